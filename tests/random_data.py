"""A small random data set, and the samples of one node."""

from __future__ import annotations

import numpy as np

from shoal.data.dataset import Data, Samples

CLASSES = 3
rng = np.random.default_rng(0)
DATA = Data(
    train=Samples(rng.standard_normal((40, 6)).astype(np.float32), rng.integers(0, CLASSES, 40)),
    test=Samples(rng.standard_normal((15, 6)).astype(np.float32), rng.integers(0, CLASSES, 15)),
    classes=CLASSES,
)
PART = np.arange(8, 31)
