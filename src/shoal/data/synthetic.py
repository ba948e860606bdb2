"""Made-up classification data of any shape and size, for tests, benchmarks and first steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Samples
from shoal.randomness import generator
from shoal.schema import Bounds

CHUNK_VALUES = 1 << 20  # how much of the data is in work at once: temporaries stay at 4 MB


@dataclass(frozen=True)
class Synthetic:
    """Every class is a random centre; every sample is its class's centre plus noise. All classes are as large.

    `noise` is the standard deviation of the (uniform) noise in each coordinate. At 1.0, a linear model learns
    to classify most samples but not all, whatever the shape. More is harder; at 0 the samples are the centres.
    """

    shape: tuple[Annotated[int, Bounds(at_least=1)], ...] = (32,)
    classes: Annotated[int, Bounds(at_least=2)] = 10
    samples: Annotated[int, Bounds(at_least=1)] = 2000
    test_samples: Annotated[int, Bounds(at_least=1)] = 500
    noise: Annotated[float, Bounds(at_least=0)] = 1.0

    def load(self, seed: int) -> Data:
        size = math.prod(self.shape)
        # Centres at a distance of about 2 size^¼ keep the task as hard in any dimension: what a linear model
        # learns from n samples depends on distance⁴ · n / size.
        spread = math.sqrt(2) * size**-0.25
        centres = generator(seed, "synthetic centres").standard_normal((self.classes, size)) * spread
        return Data(
            train=self._draw(centres, self.samples, generator(seed, "synthetic training samples")),
            test=self._draw(centres, self.test_samples, generator(seed, "synthetic test samples")),
            classes=self.classes,
        )

    def _draw(self, centres: NDArray[np.float64], samples: int, rng: np.random.Generator) -> Samples:
        size = centres.shape[1]
        y = rng.permutation(np.arange(samples, dtype=np.int64) % self.classes)
        x = np.empty((samples, size), dtype=np.float32)
        # Uniform noise costs a quarter of normal noise. A uniform number in [0, 1) times `width` has the
        # standard deviation `noise`; its mean is taken off the centres once, and not off every sample.
        width = np.float32(self.noise * math.sqrt(12))
        corners = (centres - width / 2).astype(np.float32)
        step = max(CHUNK_VALUES // size, 1)
        for start in range(0, samples, step):
            part = x[start : start + step]
            rng.random(dtype=np.float32, out=part)
            part *= width
            part += corners[y[start : start + step]]
        return Samples(x.reshape(samples, *self.shape), y)
