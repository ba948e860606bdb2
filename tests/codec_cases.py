"""Codecs with their parameters, for tests."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from shoal.compression import INDICES

few = settings(max_examples=20, deadline=None)  # a first example may import a library, which takes its time


def make(registry: Mapping[str, str], name: str, **table: Any) -> Any:
    module, cls = registry[name].split(":")
    return getattr(importlib.import_module(module), cls)(**table)


def have(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


needs_blosc2 = pytest.mark.skipif(not have("blosc2"), reason="blosc2 is not installed: pip install blosc2")
needs_zfp = pytest.mark.skipif(not have("zfpy"), reason="zfpy is not installed: pip install zfpy")

index_codecs = pytest.mark.parametrize("codec", [make(INDICES, name) for name in INDICES], ids=list(INDICES))

CASES: dict[str, list[dict[str, Any]]] = {
    "float32": [{}],
    "float16": [{}],
    "bfloat16": [{}],
    "int8": [{}, {"block": 3}, {"block": 1000, "unbiased": False}],
    "qsgd": [{}, {"levels": 1, "bucket": 7}, {"levels": 7}, {"levels": 1000, "bucket": 5}],
    "zstd": [{}, {"level": 5}],
    "blosc2": [{}, {"codec": "zstd", "shuffle": "bytes"}, {"shuffle": "none"}, {"bits": 7}, {"bits": 0}],
    "zfp": [{}, {"tolerance": 0.0}, {"tolerance": 0.5}],
}
"""Each name of the registry, with tables as an experiment writes them."""

MARKS = {"blosc2": [needs_blosc2], "zfp": [needs_zfp]}
float_codecs = pytest.mark.parametrize(
    ("name", "table"),
    [pytest.param(n, t, marks=MARKS.get(n, []), id=f"{n}-{i}") for n in CASES for i, t in enumerate(CASES[n])],
)


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)
