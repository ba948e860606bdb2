"""Codecs in experiments, and the selection of coordinates."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from codec_cases import CASES, few, rng
from shoal import schema
from shoal.compression import INDICES, VALUES
from shoal.compression.libraries import Blosc2, Zfp, Zstd
from shoal.compression.quantizers import QSGD, Int8
from shoal.compression.sparse import kept_count, top_positions

# What an experiment sees


@pytest.mark.parametrize("registry", [INDICES, VALUES], ids=["indices", "values"])
def test_every_codec_has_a_description_and_parameters_that_a_file_can_contain(
    registry: dict[str, str],
) -> None:
    for place in registry.values():
        module, name = place.split(":")
        cls = getattr(importlib.import_module(module), name)
        first = (cls.__doc__ or "").splitlines()[0]
        assert 20 < len(first) < 120
        assert not first.startswith(f"{name}(")
        schema.parameters(cls)
    assert set(CASES) == set(VALUES)


def test_parameters_out_of_bounds_are_named() -> None:
    problems: list[str] = []
    schema.build(QSGD, {"levels": 0, "bucket": 0}, "values", problems)
    schema.build(Int8, {"block": 0}, "values", problems)
    assert len(problems) == 3
    assert "values.levels = 0: expected integer at least 1 and at most 32767" in problems


@pytest.mark.parametrize(("cls", "library"), [(Zstd, "zstandard"), (Blosc2, "blosc2"), (Zfp, "zfpy")])
def test_a_missing_library_is_named_when_the_codec_is_made(
    cls: type, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"pip install {library}"):
        cls()


def test_making_codecs_imports_no_library() -> None:
    program = (
        "import sys\n"
        "from shoal.compression.libraries import Blosc2, Zfp, Zstd\n"
        "for codec in (Zstd, Blosc2, Zfp):\n"
        "    try: codec()\n"
        "    except ValueError: pass\n"
        "print(sorted({'zstandard', 'blosc2', 'zfpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Which coordinates


@few
@given(
    hnp.arrays(np.float32, st.integers(1, 60), elements=st.sampled_from([0.0, 0.5, 1.0, 2.0, np.inf, np.nan])),
    st.data(),
)
def test_the_largest_win_and_among_equals_the_first(magnitudes: NDArray[np.float32], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, magnitudes.size))
    key = np.where(np.isnan(magnitudes), np.float32(np.inf), magnitudes)
    expected = sorted(sorted(range(key.size), key=lambda i: (-key[i], i))[:count])
    chosen = top_positions(magnitudes, count)
    assert chosen.dtype == np.int64
    assert chosen.tolist() == expected


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.05, 0.1, 0.25, 0.6])
@pytest.mark.parametrize("kind", ["normal", "few values", "mostly zero", "diverged", "odd ones large", "rising"])
def test_the_largest_of_many_equal_those_of_a_stable_sort(kind: str, share: float) -> None:
    values = rng().normal(size=20_011).astype(np.float32)
    if kind == "few values":
        values = np.round(values * 2)
    elif kind == "mostly zero":
        values[rng(1).random(values.size) < 0.97] = 0
    elif kind == "diverged":
        values[::7], values[::9], values[3] = np.nan, -np.inf, -np.nan
    elif kind == "odd ones large":  # and a sample of every eighth sees none or all of them
        values[:: 8 if share < 0.1 else 1] *= 100
        values[1::8] *= 10_000
    elif kind == "rising":
        values = np.arange(values.size, dtype=np.float32)
    count = int(share * values.size)
    key = np.where(np.isnan(values), np.float32(np.inf), np.abs(values))
    expected = np.sort(np.argsort(-key, kind="stable")[:count])
    np.testing.assert_array_equal(top_positions(values, count), expected)


def test_more_coordinates_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="count is 4, expected 0 to 3"):
        top_positions(np.ones(3, np.float32), 4)


@pytest.mark.parametrize(
    ("size", "fraction", "count"), [(89_834, 0.1, 8983), (10, 0.1, 1), (10, 0.19, 1), (10, 1.0, 10), (1, 1.0, 1)]
)
def test_the_number_of_kept_coordinates_is_rounded_down(size: int, fraction: float, count: int) -> None:
    assert kept_count(size, fraction) == count
