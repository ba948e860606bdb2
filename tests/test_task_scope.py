"""A scope of tasks: no task outlives it, and no error is lost."""

from __future__ import annotations

import asyncio

import pytest

from shoal.engines.processes.task_scope import TaskScope


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


async def failing() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError("in the background")


def test_tasks_are_cancelled_when_the_scope_ends() -> None:
    ended: list[str] = []

    async def main() -> None:
        async with TaskScope() as scope:
            scope.start(forever(ended))
            await asyncio.sleep(0)

    asyncio.run(main())
    assert ended == ["cancelled"]


def test_the_error_of_a_task_ends_the_scope_and_is_raised() -> None:
    ended: list[str] = []

    async def in_scope() -> None:
        async with TaskScope() as scope:
            scope.start(forever(ended))
            scope.start(failing())
            await asyncio.Event().wait()

    async def main() -> bool:
        with pytest.raises(ZeroDivisionError, match="in the background"):
            await in_scope()
        async with asyncio.timeout(60):  # the main task is not cancelled any longer
            await asyncio.sleep(0)
        return True

    assert asyncio.run(main())
    assert ended == ["cancelled"]


def test_the_error_of_the_main_task_is_raised_first() -> None:
    async def main() -> None:
        async with TaskScope() as scope:
            scope.fail(ZeroDivisionError("later"))
            raise ValueError("of the main task")

    with pytest.raises(ValueError, match="of the main task"):
        asyncio.run(main())


def test_a_cancelled_main_task_stays_cancelled() -> None:
    async def main() -> None:
        async with TaskScope():
            await asyncio.Event().wait()

    async def run() -> bool:
        task = asyncio.create_task(main())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(run())
