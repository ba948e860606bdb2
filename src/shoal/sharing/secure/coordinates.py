"""The coordinates that a node has its neighbours say, where they do not say all.

Who hears a sum cannot be told by each neighbour what has changed most there: all say the same coordinates, and who
hears them names them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal.compression.indices import Positions
from shoal.compression.sparse import top_positions
from shoal.state import State
from shoal.types import Params

LATEST = 0.5
"""How much the latest pace counts, of what is taken for a coordinate's pace."""


class Wanted:
    """Names the coordinates at which a node and its neighbours have probably moved most since they were last averaged,
    each times the rounds for which it has waited.

    How far its own model has moved a node knows. How far a neighbour's, it reckons from the means that it has heard: if
    a coordinate of the mean of n moved by d in a round, each of them moved by √n d, as they do if they move
    independently of each other. Without this, what has changed at neighbours alone would never be heard of. And without
    the wait, of few coordinates the same would be named again and again.
    """

    def __init__(self, params: Params, count: int) -> None:
        self._count = count
        self._averaged = np.array(params)
        """The own model, each coordinate as it was when it was last averaged."""
        self._mean = np.array(params)
        """The neighbours', as it was last heard."""
        self._heard = np.full(params.size, -1, np.int32)
        """In which round that was."""
        self._pace = np.zeros(params.size, np.float32)
        """How far a neighbour moves in a round."""
        self._round = 0

    def name(self, params: Params, round: int) -> Positions:
        self._round = round
        rounds = (round - self._heard).astype(np.float32)
        moved = np.abs(params - self._averaged) + self._pace * rounds
        return top_positions(moved * rounds, self._count)

    def hear(self, params: Params, positions: Positions, mean: NDArray[np.float64], speakers: int) -> None:
        """These coordinates were averaged in the round in which they were last named, and are as in `params` now."""
        rounds = np.maximum(1, self._round - self._heard[positions])  # though it were heard twice in one
        moved = np.abs(mean - self._mean[positions]) / rounds
        self._pace[positions] += LATEST * (math.sqrt(speakers) * moved - self._pace[positions])
        self._mean[positions] = mean
        self._averaged[positions] = params[positions]
        self._heard[positions] = self._round

    def state(self) -> State:
        return {
            "averaged": self._averaged.copy(),
            "mean": self._mean.copy(),
            "heard": self._heard.copy(),
            "pace": self._pace.copy(),
        }

    def restore(self, state: State) -> None:
        self._averaged = np.array(state["averaged"], np.float32)
        self._mean = np.array(state["mean"], np.float32)
        self._heard = np.array(state["heard"], np.int32)
        self._pace = np.array(state["pace"], np.float32)
