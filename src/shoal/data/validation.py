"""Validation samples: training samples that no node trains on, for choosing options without the test samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Indices
from shoal.types import Bounds


@dataclass(frozen=True)
class Validation:
    """The `dataset.validation` table. A number in its place is the fraction."""

    fraction: Annotated[float, Bounds(above=0, below=1)] = 0.1
    per: Literal["dataset", "node"] = "dataset"
    """Where samples are held out: from the data set before it is partitioned, or from the samples of each node."""


def draw_stratified(labels: NDArray[np.int64], fraction: float, rng: np.random.Generator) -> Indices:
    """Return the sorted indices of ⌊fraction · samples + ½⌋ samples, as `take_stratified`; at least one, never all."""
    samples = len(labels)
    count = min(max(1, int(fraction * samples + 0.5)), samples - 1)
    return take_stratified(labels, count, rng) if count > 0 else np.arange(0)


def take_stratified(labels: NDArray[np.int64], count: int, rng: np.random.Generator) -> Indices:
    """Return the sorted indices of `count` samples: from one to all of them.

    The number of samples of each class differs from its share by less than one. Every sample is drawn with the same
    probability: the samples, in random order within each class, are taken at equal distances from a random start.
    """
    samples = len(labels)
    shuffled = rng.permutation(samples)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    places = ((np.arange(count) + rng.random()) * samples / count).astype(np.int64)
    return np.sort(by_class[np.minimum(places, samples - 1)])
