"""A scope for the tasks that run beside a main task."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Coroutine
from types import TracebackType
from typing import Any


class _Stage(enum.Enum):
    OPEN = enum.auto()
    CLOSING = enum.auto()
    """The main task has left the scope, which waits for the tasks beside it."""
    CLOSED = enum.auto()


class TaskScope:
    """The tasks that run beside the task that enters the scope, and end with it: an asynchronous context manager.

    The first task that fails cancels the main task. The scope raises its error on exit, so no failure is lost.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """The error of the first task that failed."""
        self._main: asyncio.Task[Any] | None = None
        self._stage = _Stage.OPEN
        self._cancelled_main = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TaskScope:
        self._main = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stage = _Stage.CLOSING
        try:
            while self._tasks:  # a task that is cancelled may start others
                self.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._stage = _Stage.CLOSED
        if self.failure is None or not (error is None or isinstance(error, asyncio.CancelledError)):
            return  # the main task's own error, if any, is raised
        if self._cancelled_main and self._main is not None:
            self._main.uncancel()
        context = self.failure.__context__
        try:
            raise self.failure
        finally:
            self.failure.__context__ = context  # `raise` replaces it by the cancellation of the main task

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: BaseException) -> None:
        """Cancel the main task, and raise `error` on exit. Later errors, and errors after the exit, are ignored."""
        if self.failure is not None or self._stage is _Stage.CLOSED:
            return
        self.failure = error
        if self._main is None:
            return
        loop = self._main.get_loop()
        if asyncio.current_task(loop) is self._main:
            loop.call_soon(self._cancel_main)  # when it waits; it may leave the scope before
        else:
            self._cancel_main()

    def has(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether `task` runs beside the main task."""
        return task in self._tasks

    def cancel(self) -> None:
        """Cancel all tasks beside the main task."""
        for task in list(self._tasks):
            task.cancel()

    def _cancel_main(self) -> None:
        if self._main is not None and self._stage is _Stage.OPEN:
            self._cancelled_main = True
            self._main.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
