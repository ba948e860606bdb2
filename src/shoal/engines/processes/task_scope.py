"""A scope for the tasks that run beside a main task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any


class TaskScope:
    """The tasks that run beside the task that creates the scope, and end with it: an asynchronous context manager.

    The first task that fails cancels the main task. The scope raises its error on exit, so no failure is lost.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """The error of the first task that failed."""
        self._main = asyncio.current_task()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TaskScope:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failure is None or not (error is None or isinstance(error, asyncio.CancelledError)):
            return  # the main task's own error, if any, is raised
        if error is not None and self._main is not None:
            self._main.uncancel()
        raise self.failure

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: BaseException) -> None:
        """Cancel the main task, and raise `error` on exit. Later errors are ignored."""
        if self.failure is None:
            self.failure = error
            if self._main is not None:
                self._main.cancel()

    def cancel(self) -> None:
        """Cancel all tasks beside the main task."""
        for task in list(self._tasks):
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
