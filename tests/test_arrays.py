"""User-supplied arrays: every layout gives the same data; errors name the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.arrays import ArrayFiles
from shoal.errors import DataError
from shoal.experiment import Experiment

RNG = np.random.default_rng(0)
X, Y, OWNER = RNG.random((20, 3, 4)).astype(np.float32), np.arange(20) % 4, np.arange(20) // 5
NAMED = {"x_train": X[:15], "y_train": Y[:15], "owner_train": OWNER[:15],
         "x_test": X[15:], "y_test": Y[15:], "owner_test": OWNER[15:]}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def two_files(folder: Path) -> Path:
    for split in ("train", "test"):
        np.savez(folder / f"{split}.npz", **{part: NAMED[f"{part}_{split}"] for part in ("x", "y", "owner")})
    return folder


def one_file(folder: Path) -> Path:
    np.savez_compressed(folder / "all.npz", **NAMED)
    return folder / "all.npz"


def one_file_in_a_folder(folder: Path) -> Path:
    return one_file(folder).parent


def npy_files(folder: Path) -> Path:
    for name, array in NAMED.items():
        np.save(folder / f"{name}.npy", array)
    return folder


LAYOUTS = [two_files, one_file, one_file_in_a_folder, npy_files]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_data_mapped_into_memory(layout: Callable[[Path], Path], tmp_path: Path) -> None:
    data = ArrayFiles(layout(tmp_path)).load(seed=0)
    for samples, suffix in ((data.train, "_train"), (data.test, "_test")):
        assert np.array_equal(samples.x, NAMED["x" + suffix])
        assert np.array_equal(samples.y, NAMED["y" + suffix])
        assert samples.owner is not None
        assert np.array_equal(samples.owner, NAMED["owner" + suffix])
        assert isinstance(samples.x.base, np.memmap)
        assert samples.y.dtype == np.int64
    assert (data.classes, data.task, data.shape, data.scaling) == (4, "classification", (3, 4), None)


def test_files_of_the_right_type_are_memory_mapped_directly(tmp_path: Path, cache: Path) -> None:
    ArrayFiles(npy_files(tmp_path)).load(seed=0)
    assert not cache.exists()


def test_the_split_of_inputs_and_targets_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=X, y=Y)
    one, other = (ArrayFiles(tmp_path / "all.npz", test_fraction=0.25).load(seed) for seed in (0, 1))
    assert (len(one.train), len(one.test)) == (15, 5)
    assert np.array_equal(one.test.x, other.test.x)
    assert len({bytes(row) for row in (*one.train.x, *one.test.x)}) == 20


def test_bytes_are_scaled_and_other_numbers_become_float32(tmp_path: Path) -> None:
    np.savez(tmp_path / "bytes.npz", x=(X * 255).astype(np.uint8), y=Y)
    data = ArrayFiles(tmp_path / "bytes.npz").load(seed=0)
    assert data.train.x.dtype == np.uint8
    assert data.scaling is not None
    for kind in (np.float64, np.float16, np.int64):
        np.savez(tmp_path / "other.npz", x=X.astype(kind), y=Y)
        assert ArrayFiles(tmp_path / "other.npz").load(seed=0).train.x.dtype == np.float32


def test_ids_numbers_and_sequences(tmp_path: Path) -> None:
    pairs = np.stack([np.arange(20) % 5, np.arange(20)], axis=1)
    np.savez(tmp_path / "ratings.npz", x=pairs, y=np.linspace(1, 5, 20)[:, None])
    ratings = ArrayFiles(tmp_path / "ratings.npz", task="regression", sizes=(5, 20)).load(seed=0)
    assert (ratings.classes, ratings.sizes, ratings.train.x.dtype) == (1, (5, 20), np.int64)
    assert (ratings.train.y.dtype, ratings.train.y.ndim) == (np.float32, 1)
    texts = RNG.integers(1, 9, (20, 6)).astype(np.uint8)
    following = np.where(texts > 6, -1, texts.astype(np.int64))
    np.savez(tmp_path / "texts.npz", x=texts, y=following)
    text = ArrayFiles(tmp_path / "texts.npz", task="sequence", sizes=(9,), classes=9, padding=-1).load(seed=0)
    assert (text.classes, text.padding, text.scaling, text.train.x.dtype) == (9, -1, None, np.uint8)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no targets": ({"x_train": X, "x_test": X}, {}, "no array y_train; expected x_train, y_train"),
    "lengths": ({"x": X, "y": Y[:7]}, {}, "20 inputs, .* 7 targets; expected one target for each input"),
    "label too high": ({"x": X, "y": Y}, {"classes": 3}, "the target of sample 3 is 3; expected 0 to 2"),
    "label negative": ({"x": X, "y": Y - 1}, {}, "the target of sample 0 is -1; expected 0 or more"),
    "float labels": ({"x": X, "y": Y / 2}, {}, "float64; expected integers"),
    "label matrix": (
        {"x": X, "y": np.stack([Y, Y], 1)},
        {},
        r"shape \(20, 2\); expected 1 axes for a classification task; for one-hot targets, .* y\.argmax\(1\)",
    ),
    "objects": ({"x": np.array([None] * 20), "y": Y}, {}, "holds Python objects"),
    "words": ({"x": np.array(["a"] * 20), "y": Y}, {}, "<U1; expected numbers"),
    "flat": ({"x": X[:, 0, 0], "y": Y}, {}, r"use \(samples, 1\) for numbers"),
    "not finite": ({"x": np.where(X[3, 1, 2] == X, np.nan, X), "y": Y}, {}, "sample 3 has nan; expected finite"),
    "ids too high": ({"x": OWNER[:, None], "y": Y}, {"sizes": (3,)}, r"sample 15 has 3; expected ids below \(3,\)"),
    "ids that are floats": ({"x": X, "y": Y}, {"sizes": (3,)}, "float32; expected integers"),
    "shapes differ": ({**NAMED, "x_test": X[15:, :2]}, {}, r"training x have shape \(3, 4\), test x \(2, 4\)"),
    "owners": ({"x": X, "y": Y, "owner": OWNER[:3]}, {}, "expected 20 integers from 0"),
    "nothing": ({"x": X[:0], "y": Y[:0]}, {}, "no samples"),
    "too few to divide": ({"x": X[:1], "y": Y[:1]}, {}, "the training or test set of 1 samples is empty"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_invalid_file(name: str, tmp_path: Path) -> None:
    arrays, options, expected_error = WRONG[name]
    np.savez(tmp_path / "all.npz", **arrays)
    with pytest.raises(DataError, match=expected_error) as caught:
        ArrayFiles(tmp_path / "all.npz", **options).load(seed=0)
    assert "all.npz" in str(caught.value)


def test_files_without_arrays_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no .*nowhere"):
        ArrayFiles(tmp_path / "nowhere").load(seed=0)
    with pytest.raises(DataError, match=r"expected train\.npz"):
        ArrayFiles(tmp_path).load(seed=0)
    archive = one_file(tmp_path)
    archive.write_bytes(archive.read_bytes()[:300])
    with pytest.raises(DataError, match=r"not an \.npz file, or incomplete"):
        ArrayFiles(archive).load(seed=0)
    archive.unlink()
    (tmp_path / "x.npy").write_bytes(b"no array")
    np.save(tmp_path / "y.npy", Y)
    with pytest.raises(DataError, match=r"x\.npy: cannot be read"):
        ArrayFiles(tmp_path).load(seed=0)


def test_contradictory_parameters_are_rejected() -> None:
    with pytest.raises(ValueError, match="a regression has one output"):
        ArrayFiles(Path(), task="regression", classes=3)
    with pytest.raises(ValueError, match="only sequences"):
        ArrayFiles(Path(), padding=0)


def test_user_supplied_arrays_run_with_their_owners(tmp_path: Path) -> None:
    run = Experiment(
        nodes=3, algorithm={"name": "dpsgd", "rounds": 2}, topology={"name": "ring"}, model={"name": "logistic"},
        dataset={"name": "arrays", "path": str(npy_files(tmp_path))}, partition={"name": "natural"},
    ).run(tmp_path / "runs")  # fmt: skip
    assert run.status == "completed"
