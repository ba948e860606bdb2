"""The stream of a node's training batches."""

from __future__ import annotations

import numpy as np

from shoal.data.dataset import Indices
from shoal.state import State, generator_state, restore_generator


class Batches:
    """An endless stream of one node's samples: every pass has all of them once, in a new random order."""

    def __init__(self, samples: Indices, size: int, rng: np.random.Generator) -> None:
        self.samples = samples
        """May be replaced. The next pass uses the new ones."""
        self._size = size
        self._rng = rng
        self._left = samples[:0]

    def take(self, steps: int) -> Indices:
        """Return the next `steps` batches as a matrix of sample indices."""
        count = steps * self._size
        left = self._left
        if len(left) < count:
            pieces = [left]
            have = len(left)
            while have < count:
                pieces.append(self._rng.permutation(self.samples))
                have += len(self.samples)
            left = np.concatenate(pieces)
        self._left = left[count:]
        return left[:count].reshape(steps, self._size)

    def state(self) -> State:
        return {"left": self._left, "rng": generator_state(self._rng)}

    def restore(self, state: State) -> None:
        self._left = state["left"]
        restore_generator(self._rng, state["rng"])
