"""Generated classification data of any shape and size, for tests, benchmarks and first steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Samples
from shoal.randomness import generator
from shoal.types import Bounds

DISTANCE = 5.0
PATCHES = 4
CHUNK_VALUES = 1 << 20  # values that are generated at once: temporaries stay below 4 MB


@dataclass(frozen=True)
class Synthetic:
    """Balanced classes: each has a random centre, and its samples are the centre plus noise.

    `noise` is the standard deviation of the (uniform) noise in each coordinate. The centres are about 5 apart for any
    shape. At 1.0 models learn most of it but not all; at 0 the samples equal the centres. The centres of images,
    (channels, height, width), consist of 4×4 constant patches, so that convolutions can learn them too.
    """

    shape: tuple[Annotated[int, Bounds(at_least=1)], ...] = (32,)
    classes: Annotated[int, Bounds(at_least=2)] = 10
    samples: Annotated[int, Bounds(at_least=1)] = 2000
    test_samples: Annotated[int, Bounds(at_least=1)] = 500
    noise: Annotated[float, Bounds(at_least=0)] = 1.0

    def load(self, seed: int) -> Data:
        centres = self._centres(generator(seed, "synthetic centres"))
        return Data(
            train=self._draw(centres, self.samples, generator(seed, "synthetic training samples")),
            test=self._draw(centres, self.test_samples, generator(seed, "synthetic test samples")),
            classes=self.classes,
        )

    def _centres(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return one flat row per class, at distances of about DISTANCE from each other."""
        scale = DISTANCE / math.sqrt(2 * math.prod(self.shape))
        if len(self.shape) != 3:
            return rng.normal(scale=scale, size=(self.classes, math.prod(self.shape)))
        channels, height, width = self.shape
        patches = rng.normal(scale=scale, size=(self.classes, channels, PATCHES, PATCHES))
        rows, columns = (np.arange(side) * PATCHES // side for side in (height, width))
        return patches[:, :, rows[:, None], columns].reshape(self.classes, -1)

    def _draw(self, centres: NDArray[np.float64], samples: int, rng: np.random.Generator) -> Samples:
        size = centres.shape[1]
        y = rng.permutation(np.arange(samples, dtype=np.int64) % self.classes)
        x = np.empty((samples, size), dtype=np.float32)
        # Uniform noise takes a quarter of the time of normal noise. A uniform number in [0, 1) times `width` has the
        # standard deviation `noise`; its mean is subtracted from the centres once, not from every sample.
        width = np.float32(self.noise * math.sqrt(12))
        corners = (centres - width / 2).astype(np.float32)
        step = max(CHUNK_VALUES // size, 1)
        for start in range(0, samples, step):
            part = x[start : start + step]
            rng.random(dtype=np.float32, out=part)
            part *= width
            part += corners[y[start : start + step]]
        return Samples(x.reshape(samples, *self.shape), y)
