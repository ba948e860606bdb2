"""A discrete-event kernel: a heap of times, what happens at each in sequence, and tasks that are coroutines.

Time moves only when no task can run. Everything that happens at one time happens in the order in which it was
scheduled, so a run depends on its inputs alone: no set or hash order, no clock, no thread.
"""

from __future__ import annotations

import heapq
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Crash(BaseException):
    """Raised inside a task to end it on the spot, as a crash of its node does."""


class Task:
    """A coroutine under way. `resume` runs it until it parks again or ends."""

    __slots__ = ("_send", "coroutine", "ended", "kernel", "on_end", "resume")

    def __init__(
        self, kernel: Kernel, coroutine: Coroutine[Any, Any, None], on_end: Callable[[Task, bool], None]
    ) -> None:
        self.kernel = kernel
        self.coroutine = coroutine
        self.ended = False
        self.on_end = on_end
        """Called with the task, and whether it crashed, when it has ended."""
        self._send = coroutine.send
        self.resume = self._resume

    def _resume(self) -> None:
        if self.ended:
            return
        kernel = self.kernel
        kernel.current = self
        try:
            self._send(None)
        except StopIteration:
            self.ended = True
            self.on_end(self, False)
        except Crash:
            self.ended = True
            self.on_end(self, True)

    def cancel(self) -> None:
        """End a task that is parked."""
        if not self.ended:
            self.ended = True
            self.coroutine.close()


class Kernel:
    """The clock and the order of things. An exception in a task ends `run` with it: nothing fails in silence."""

    def __init__(self) -> None:
        self.now = 0.0
        self.current: Task | None = None
        self._ready: deque[Callable[[], None]] = deque()
        # Synchronous algorithms have thousands of events at few times: the heap holds the times, not the events.
        self._times: list[float] = []
        self._later: dict[float, deque[Callable[[], None]]] = {}
        self._daemons = 0
        self.soon = self._ready.append
        """Schedule an action at the present time, after those already scheduled for it."""

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action at `time`, after all that happens before it or was scheduled for it earlier."""
        events = self._later.get(time)
        if events is None:
            events = self._later[time] = deque()
            heapq.heappush(self._times, time)
        events.append(action)

    def schedule_daemon(self, time: float, action: Callable[[], None]) -> None:
        """As `at`, for what is only to happen if anything else still does."""

        def appear() -> None:
            self._daemons -= 1
            action()

        self._daemons += 1
        self.at(time, appear)

    @property
    def only_daemons(self) -> bool:
        """Whether nothing is scheduled but by `schedule_daemon`."""
        return not self._ready and sum(map(len, self._later.values())) <= self._daemons

    def spawn(self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[Task, bool], None]) -> Task:
        task = Task(self, coroutine, on_end)
        self.soon(task.resume)
        return task

    def task(self) -> Task:
        """The task that is running."""
        assert self.current is not None
        return self.current

    def run(self) -> None:
        """Until nothing is left to do."""
        ready, times = self._ready, self._times
        while True:
            while ready:
                ready.popleft()()
            if not times:
                return
            self.now = times[0]
            events = self._later[self.now]
            events.popleft()()
            if not events:
                del self._later[heapq.heappop(times)]


class Timer:
    """An action at a time, which can be called off. What was called off is forgotten at once."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def fire(self) -> None:
        if self.action is not None:
            self.action()


@types.coroutine
def park() -> Generator[None, None, None]:
    """Give way until somebody calls the task's `resume`."""
    yield
