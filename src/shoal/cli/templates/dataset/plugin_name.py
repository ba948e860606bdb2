"""A data set: training and test samples. The partition distributes them over the nodes."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from shoal import Bounds
from shoal.data import Data, Samples
from shoal.randomness import generator

TURNS = 0.75  # of each arm, from the centre to its end


@dataclass(frozen=True)
class PluginName:
    """Interleaved spirals in the plane, one arm per class; no straight line separates the classes."""

    classes: Annotated[int, Bounds(at_least=2)] = 3
    samples: Annotated[int, Bounds(at_least=1)] = 1200
    test_samples: Annotated[int, Bounds(at_least=1)] = 300
    noise: Annotated[float, Bounds(at_least=0)] = 0.03

    def load(self, seed: int) -> Data:
        # Every draw depends on the seed and a purpose only, so that all processes hold the same data. Data can also
        # be read from a file here; raise shoal.errors.DataError, with what to do about it, if that fails.
        return Data(
            train=self._draw(self.samples, generator(seed, "spirals for training")),
            test=self._draw(self.test_samples, generator(seed, "spirals for the test")),
            classes=self.classes,
        )

    def _draw(self, samples: int, rng: np.random.Generator) -> Samples:
        y = np.arange(samples, dtype=np.int64) % self.classes  # 0 to classes − 1, balanced
        radius = np.sqrt(rng.uniform(0.01, 1.0, samples))  # the same density everywhere
        angle = 2 * np.pi * (y / self.classes + TURNS * radius)
        x = radius * np.stack([np.cos(angle), np.sin(angle)])
        x += rng.normal(scale=self.noise, size=x.shape)
        return Samples(x.T.astype(np.float32), y)  # one row per sample; models take float32 and int64
