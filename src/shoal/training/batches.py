"""The stream of a node's training batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.data.dataset import Indices
from shoal.randomness import generator
from shoal.state import State, generator_state, restore_generator


@dataclass(frozen=True)
class FineTuning:
    """The steps that a copy of a node's model takes before its evaluation (`evaluation.fine_tune`).

    Every evaluation takes the same steps: they have a generator of their own, and start without optimizer state.
    """

    steps: int
    seed: int

    def draw(self, samples: Indices, size: int) -> tuple[Indices, int]:
        """Return the batches, as a matrix of sample indices, and a seed for random draws in training."""
        rng = generator(self.seed, "fine-tuning")
        return Batches(samples, size, rng).take(self.steps), int(rng.integers(2**63))


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
