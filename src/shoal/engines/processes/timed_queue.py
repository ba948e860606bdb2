"""A queue that releases its items when they are due, on the event loop's clock."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TimedQueue(Generic[T]):
    """Calls `release` with every item when it is due: in order of time, and of arrival where times are equal."""

    def __init__(self, release: Callable[[T], None]) -> None:
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, T]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, due: float, item: T) -> None:
        """Add an item. It is released at once if it is due."""
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, item))
        self._release_due()

    def remove(self, condition: Callable[[T], bool]) -> None:
        """Remove every item for which `condition` is true."""
        self._heap = [entry for entry in self._heap if not condition(entry[2])]
        heapq.heapify(self._heap)

    def close(self) -> None:
        """Release nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _release_due(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            while self._heap and self._heap[0][0] <= self._loop.time():
                self._release(heapq.heappop(self._heap)[2])
        finally:  # also when `release` raises
            if self._heap:
                self._timer = self._loop.call_at(self._heap[0][0], self._release_due)
