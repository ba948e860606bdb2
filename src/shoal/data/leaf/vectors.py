"""LEAF's data sets whose samples are lists of numbers: FEMNIST and Synthetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data
from shoal.data.leaf.decoding import Flaws, Prepare, Rows, conversion_only, decode_leaf, leaf_data
from shoal.data.leaf.json_reader import shorten
from shoal.data.store import data_folder
from shoal.types import Bounds

NUMBERS = frozenset((int, float))
"""The types of numbers in JSON. A bool is an int for isinstance, and is no number here."""


@dataclass(frozen=True)
class Femnist:
    """LEAF's FEMNIST (2018): handwritten characters of 3,550 writers, 1×28×28 from 0 to 1, 62 classes.

    float32, with the values of the files. The 62 classes are digits, capital and small letters. Set `classes` if the
    files have only the first of them.
    """

    path: Path | None = None
    """The folder that holds train and test; by default `folder` below SHOAL_DATA."""
    folder: str = "femnist"
    classes: Annotated[int, Bounds(at_least=2)] = 62

    def load(self, seed: int) -> Data:
        path = self.path or data_folder() / self.folder
        arrays = decode_leaf("femnist", path, _vectors((1, 28, 28), self.classes), key=str(self.classes))
        return leaf_data(arrays, self.classes)


@dataclass(frozen=True)
class LeafSynthetic:
    """LEAF's Synthetic (2018): vectors of 60 numbers. The classes depend on them differently for each user."""

    path: Path | None = None
    classes: Annotated[int, Bounds(at_least=2)] | None = None
    """5 as published by LEAF. By default the largest label of the files, plus 1."""

    def load(self, seed: int) -> Data:
        arrays = decode_leaf("leaf-synthetic", self.path, _vectors(None, self.classes), key=str(self.classes))
        classes = self.classes or 1 + int(max(arrays["y_train"].max(), arrays["y_test"].max()))
        return leaf_data(arrays, max(classes, 2))


def class_labels(y: list[Any], classes: int | None) -> NDArray[np.int64]:
    """Return labels as an array. Raises ValueError if one is no integer from 0 to `classes` − 1."""
    labels = np.empty(len(y), dtype=np.int64)
    for number, label in enumerate(y):
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if type(label) is not int or not 0 <= label < (classes or 1 << 31):
            expected = f"between 0 and {classes - 1}" if classes else "of at least 0"
            raise ValueError(f"the label of sample {number} is {shorten(label)}; expected an integer {expected}")
        labels[number] = label
    return labels


def _vectors(shape: tuple[int, ...] | None, classes: int | None) -> Prepare:
    """Return the conversion of lists of numbers, with labels below `classes`."""

    def convert(x: list[Any], y: list[Any], flaws: Flaws) -> Rows:
        return _numbers(x, shape), class_labels(y, classes)

    return conversion_only(convert)


def _numbers(x: list[Any], shape: tuple[int, ...] | None) -> NDArray[np.float32]:
    size = int(np.prod(shape)) if shape else (len(x[0]) if isinstance(x[0], list) else 0)
    for number, sample in enumerate(x):
        if not isinstance(sample, list) or len(sample) != size or not size:
            found = f"{len(sample)} values" if isinstance(sample, list) else shorten(sample)
            raise ValueError(f"sample {number} is {found}; expected a list of {size or 'some'} numbers")
        if not NUMBERS.issuperset(map(type, sample)):
            wrong = next(value for value in sample if type(value) not in NUMBERS)
            raise ValueError(f"sample {number} contains {shorten(wrong)}; expected numbers")
    try:
        rows = np.array(x, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"samples contain values that are not finite numbers: {error}") from error
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise ValueError("samples contain values that are not finite numbers")
    return rows.reshape(len(rows), *(shape or (size,)))
