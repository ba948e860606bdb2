"""A data set: training and test samples. Who holds which of them is up to the partition."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from shoal import Bounds
from shoal.data import Data, Samples
from shoal.randomness import generator

TURNS = 0.75  # of an arm, from the centre to its end


@dataclass(frozen=True)
class PluginName:
    """Spirals in the plane that wind around each other, one arm per class; no line tells them apart."""

    classes: Annotated[int, Bounds(at_least=2)] = 3
    samples: Annotated[int, Bounds(at_least=1)] = 1200
    test_samples: Annotated[int, Bounds(at_least=1)] = 300
    noise: Annotated[float, Bounds(at_least=0)] = 0.03

    def load(self, seed: int) -> Data:
        # Every draw follows from the seed and a purpose, so that all processes hold the same data. Data from a file
        # is read here just so; raise shoal.errors.DataError, with what to do about it, when it cannot be read.
        return Data(
            train=self._draw(self.samples, generator(seed, "spirals for training")),
            test=self._draw(self.test_samples, generator(seed, "spirals for the test")),
            classes=self.classes,
        )

    def _draw(self, samples: int, rng: np.random.Generator) -> Samples:
        y = np.arange(samples, dtype=np.int64) % self.classes  # 0 to classes − 1, balanced
        radius = np.sqrt(rng.uniform(0.01, 1.0, samples))  # as dense outside as inside
        angle = 2 * np.pi * (y / self.classes + TURNS * radius)
        x = radius * np.stack([np.cos(angle), np.sin(angle)])
        x += rng.normal(scale=self.noise, size=x.shape)
        return Samples(x.T.astype(np.float32), y)  # one row per sample; models take float32 and int64
