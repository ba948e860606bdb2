"""A discrete-event kernel: a heap of times, a queue of actions for each time, and coroutines as tasks.

Time advances only when no task can run. Actions of one time run in the order in which they were scheduled. So a run
depends only on its inputs: not on the order of a set or hash, on a real clock, or on threads.
"""

from __future__ import annotations

import heapq
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Crash(BaseException):
    """Raised inside a task to end it at once, as a crash of its node does."""


class Task:
    """A running coroutine. `resume` runs it until it parks again or ends."""

    __slots__ = ("_send", "coroutine", "ended", "kernel", "on_end", "resume")

    def __init__(
        self, kernel: Kernel, coroutine: Coroutine[Any, Any, None], on_end: Callable[[Task, bool], None]
    ) -> None:
        self.kernel = kernel
        self.coroutine = coroutine
        self.ended = False
        self.on_end = on_end
        """Called when the task has ended, with the task and whether it crashed."""
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
        """End a parked task."""
        if not self.ended:
            self.ended = True
            self.coroutine.close()


class Kernel:
    """The clock and the event queue. An exception in a task ends `run` with it, so no failure is lost."""

    def __init__(self) -> None:
        self.now = 0.0
        self.current: Task | None = None
        self._ready: deque[Callable[[], None]] = deque()
        # Synchronous algorithms have thousands of events at few times: so the heap holds times, not events.
        self._times: list[float] = []
        self._later: dict[float, deque[Callable[[], None]]] = {}
        self._daemons = 0
        self.soon = self._ready.append
        """Schedule an action at the current time, after the actions already scheduled for it."""

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action at `time`, after the actions already scheduled for it."""
        events = self._later.get(time)
        if events is None:
            events = self._later[time] = deque()
            heapq.heappush(self._times, time)
        events.append(action)

    def schedule_daemon(self, time: float, action: Callable[[], None]) -> None:
        """Schedule a daemon event: an action that does not keep the run alive by itself."""

        def run_daemon() -> None:
            self._daemons -= 1
            action()

        self._daemons += 1
        self.at(time, run_daemon)

    @property
    def only_daemons(self) -> bool:
        """Whether only daemon events are scheduled."""
        return not self._ready and sum(map(len, self._later.values())) <= self._daemons

    def spawn(self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[Task, bool], None]) -> Task:
        task = Task(self, coroutine, on_end)
        self.soon(task.resume)
        return task

    def task(self) -> Task:
        """The task that runs at present."""
        assert self.current is not None
        return self.current

    def run(self) -> None:
        """Run all actions until none is left."""
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
    """A scheduled action that can be cancelled by setting `action` to None, which also releases its memory."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def fire(self) -> None:
        if self.action is not None:
            self.action()


@types.coroutine
def park() -> Generator[None, None, None]:
    """Suspend the current task until its `resume` is called."""
    yield
