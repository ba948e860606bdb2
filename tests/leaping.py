"""An event loop whose clock leaps to the next timer: waiting takes no time, and the machine's speed does not matter."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class LeapingLoop(asyncio.SelectorEventLoop):
    """Begins at time 0. Without timers it waits for sockets and threads in real time."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Leaps(self))

    def time(self) -> float:
        return self._now

    def leap(self, seconds: float) -> None:
        self._now += seconds


class _Leaps(selectors.DefaultSelector):
    def __init__(self, loop: LeapingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if not (ready := super().select(0)):
            self._loop.leap(timeout)
        return ready


def run(body: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine as `asyncio.run` does, on a clock that leaps."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(body)
