"""The graphs of the latest rounds, computed on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

RoundT = TypeVar("RoundT")

REMEMBERED_ROUNDS = 3


class RecentRounds(Generic[RoundT]):
    """Compute each round's graph when it is first asked for, and keep the last `REMEMBERED_ROUNDS` of them."""

    def __init__(self, compute: Callable[[int], RoundT]) -> None:
        self._compute = compute
        self._rounds: dict[int, RoundT] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """The rounds in memory, in the order of their computation."""
        return tuple(self._rounds)

    def get(self, round: int) -> RoundT:
        found = self._rounds.get(round)
        if found is None:
            found = self._rounds[round] = self._compute(round)
            if len(self._rounds) > REMEMBERED_ROUNDS:
                del self._rounds[next(iter(self._rounds))]
        return found
