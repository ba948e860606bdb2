"""Handwritten digits: 1,797 images of 8×8 pixels, small enough to ship with scikit-learn.

Alpaydin and Kaynak 1998, "Cascading Classifiers"; "Optical Recognition of Handwritten Digits" in the UCI
repository.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Samples
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.types import Bounds

CLASSES = 10
SIDE = 8
MAX_PIXEL = 16  # a pixel is the number of dark dots among 4×4


@dataclass(frozen=True)
class Digits:
    """The 8×8 digits: 64 pixels from 0 to 1, 10 classes. No download.

    With `images` the shape is one channel of 8×8, for convolutions; by default it is a vector. The test set does not
    depend on the seed, so that runs with different seeds are comparable.
    """

    test_fraction: Annotated[float, Bounds(above=0, below=1)] = 0.2
    images: bool = False

    def load(self, seed: int) -> Data:
        table = _table()
        x = table[:, :-1].astype(np.float32) / np.float32(MAX_PIXEL)
        if self.images:
            x = x.reshape(-1, 1, SIDE, SIDE)
        y = table[:, -1].astype(np.int64)
        test = _stratified(y, self.test_fraction)
        return Data(train=Samples(x[~test], y[~test]), test=Samples(x[test], y[test]), classes=CLASSES)


def _table() -> NDArray[np.uint8]:
    """Return one row per image: 64 pixels from 0 to 16, then the digit."""
    # scikit-learn is located, not imported: the import would cost a second, and memory in every process.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "dataset 'digits': it ships with scikit-learn, which is not installed; pip install scikit-learn"
        )
    return _read(Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"))


@functools.cache
def _read(path: Path) -> NDArray[np.uint8]:
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            table: NDArray[np.uint8] = np.loadtxt(lines, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"dataset 'digits': cannot read {path} ({error}); reinstall scikit-learn") from error
    table.setflags(write=False)
    return table


def _stratified(labels: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Mark `fraction` of every class, at least one sample and never all. The result is always the same."""
    rng = generator(0, "digits test set")
    marked = np.zeros(len(labels), dtype=np.bool_)
    for label in range(CLASSES):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        marked[members[:count]] = True
    return marked
