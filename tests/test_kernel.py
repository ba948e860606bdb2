"""The kernel of the simulation: the order of events and the ends of tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engines.simulation.kernel import Crash, Kernel, Task, park

# The kernel


def ignore_end(task: Task, crashed: bool) -> None:
    """Do nothing when a task ends."""


@given(st.lists(st.integers(0, 5), max_size=30))
def test_events_at_one_time_happen_in_the_order_in_which_they_were_scheduled(times: list[int]) -> None:
    kernel, seen = Kernel(), []
    for i, time in enumerate(times):
        kernel.at(time, lambda i=i: seen.append((kernel.now, i)))  # type: ignore[misc]
    kernel.run()
    assert seen == sorted((time, i) for i, time in enumerate(times))


def test_immediate_events_come_before_later_times() -> None:
    kernel, seen = Kernel(), []
    kernel.at(0.0, lambda: seen.append("at 0"))
    kernel.at(1.0, lambda: (kernel.soon(lambda: seen.append("soon after")), seen.append("at 1")))
    kernel.at(1.0, lambda: seen.append("also at 1"))
    kernel.soon(lambda: seen.append("first"))
    kernel.run()
    assert seen == ["first", "at 0", "at 1", "soon after", "also at 1"]


def test_tasks_take_turns_and_time_advances_only_when_all_tasks_wait() -> None:
    kernel, seen = Kernel(), []

    async def sleeper(name: str, seconds: float) -> None:
        for _ in range(2):
            kernel.at(kernel.now + seconds, kernel.task().resume)
            await park()
            seen.append((name, kernel.now))

    kernel.spawn(sleeper("a", 2.0), ignore_end)
    kernel.spawn(sleeper("b", 1.0), ignore_end)
    kernel.run()
    assert seen == [("b", 1.0), ("a", 2.0), ("b", 2.0), ("a", 4.0)]


def test_an_error_in_a_task_ends_the_run_but_a_crash_ends_only_the_task() -> None:
    async def fail(error: BaseException) -> None:
        raise error

    kernel, ends = Kernel(), []
    kernel.spawn(fail(Crash()), lambda task, crashed: ends.append(crashed))
    kernel.run()
    assert ends == [True]
    kernel.spawn(fail(KeyError("on purpose")), ignore_end)
    with pytest.raises(KeyError, match="on purpose"):
        kernel.run()


def test_a_cancelled_task_is_cleaned_up_and_not_resumed() -> None:
    kernel, seen = Kernel(), []

    async def body() -> None:
        try:
            kernel.at(1.0, kernel.task().resume)
            await park()
            seen.append("resumed")
        finally:
            seen.append("cleaned up")

    task = kernel.spawn(body(), ignore_end)
    kernel.soon(task.cancel)
    kernel.run()
    assert seen == ["cleaned up"]
