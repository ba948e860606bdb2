"""A scope of tasks: no task outlives it, and no error is lost."""

from __future__ import annotations

import asyncio
import traceback

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


async def fails_when_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise ZeroDivisionError("while cancelled")


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


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves the scope", "waits"])
@pytest.mark.parametrize("beside", [0, 1])
def test_an_error_that_the_main_task_reports_itself_is_raised(beside: int, leaves: bool) -> None:
    async def in_scope() -> None:
        async with TaskScope() as scope:
            for _ in range(beside):
                scope.start(forever([]))
            scope.fail(ZeroDivisionError("reported by the main task"))
            if not leaves:
                await asyncio.Event().wait()

    async def main() -> int:
        with pytest.raises(ZeroDivisionError, match="reported by the main task"):
            await in_scope()
        await asyncio.sleep(0)  # the main task is not cancelled any longer
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert asyncio.run(main()) == 0


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


def test_the_error_of_a_task_that_is_cancelled_at_the_end_is_raised() -> None:
    async def in_scope() -> None:
        async with TaskScope() as scope:
            scope.start(fails_when_cancelled())
            await asyncio.sleep(0)

    async def main() -> int:
        with pytest.raises(ZeroDivisionError, match="while cancelled"):
            await in_scope()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert asyncio.run(main()) == 0


def test_the_traceback_of_an_error_shows_its_cause_and_not_the_cancellation() -> None:
    async def fails_twice() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise ZeroDivisionError("second")  # noqa: B904 - without `from`, as most code does

    async def main() -> str:
        try:
            async with TaskScope() as scope:
                scope.start(fails_twice())
                await asyncio.Event().wait()
        except ZeroDivisionError:
            return traceback.format_exc()
        return ""

    shown = asyncio.run(main())
    assert "KeyError: 'first'\n\nDuring handling of the above exception" in shown
    assert "CancelledError" not in shown


def test_an_error_after_the_scope_has_ended_does_not_cancel_the_main_task() -> None:
    async def main() -> bool:
        async with TaskScope() as scope:
            pass
        scope.fail(ZeroDivisionError("too late"))
        await asyncio.sleep(0)
        return True

    assert asyncio.run(main())


def test_a_task_that_another_task_starts_while_it_is_cancelled_ends_with_the_scope() -> None:
    ended: list[str] = []

    async def starts_another(scope: TaskScope) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            scope.start(forever(ended))
            await asyncio.sleep(0)

    async def main() -> list[str]:
        async with TaskScope() as scope:
            scope.start(starts_another(scope))
            await asyncio.sleep(0)
        return list(ended)

    assert asyncio.run(main()) == ["cancelled"]


def test_the_error_of_a_task_does_not_undo_a_cancellation_from_outside() -> None:
    async def in_scope(main: asyncio.Task[int]) -> None:
        async with TaskScope() as scope:
            scope.start(fails_when_cancelled())
            await asyncio.sleep(0)
            main.cancel()
            await asyncio.sleep(0)

    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(ZeroDivisionError):
            await in_scope(task)
        return task.cancelling()

    assert asyncio.run(main()) == 1
