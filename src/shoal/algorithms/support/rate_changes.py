"""Algorithms that keep vectors in units of the learning rate, when the learning rate follows a schedule."""

from __future__ import annotations

from shoal.algorithms.support.vectors import Vector
from shoal.node import Node

RATE = "learning_rate"


def rate_change(node: Node) -> float:
    """Return the current learning rate, as a multiple of that of the last call; 1 in the first call.

    Call it once per round, before training. The rate is part of the algorithm's state.
    """
    rate = node.learning_rate
    before = node.algorithm_state.get(RATE, rate)
    node.algorithm_state[RATE] = rate
    return rate / before if before else 1.0


def rescaled(vector: Vector, change: float) -> Vector:
    """Return `vector`, which is in units of the former rate, in units of the current one."""
    return vector if change == 1.0 else vector * vector.dtype.type(change)
