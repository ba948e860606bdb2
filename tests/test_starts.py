"""Nodes that were started and do not report that they listen."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from coordination import FakeAgent, FakeServer
from shoal.engines.processes import control
from shoal.engines.processes.liveness import MIN_START_SECONDS, LivenessMonitor, Timeouts
from shoal.engines.processes.node_commands import NodeCommands
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.processes.start_monitor import MAX_CHECK_INTERVAL, StartMonitor

TIMEOUT = 60.0


class CheckedMonitor(StartMonitor):
    """A monitor with a clock of its own, which is checked at regular intervals."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 1000.0
        self.found: list[set[int]] = []

    def start(self, *nodes: int) -> None:
        self.expect(nodes, self.clock)

    def advance(self, seconds: float, interval: float = MAX_CHECK_INTERVAL) -> None:
        until = self.clock + seconds
        while self.clock < until:
            self.clock += interval
            if overdue := self.overdue(self.clock, TIMEOUT):
                self.found.append(overdue)


@pytest.fixture
def monitor() -> CheckedMonitor:
    monitor = CheckedMonitor()
    monitor.start(0, 1, 2, 3)
    return monitor


def test_every_node_that_listens_gives_the_others_more_time(monitor: CheckedMonitor) -> None:
    for node in (0, 1, 2):
        monitor.advance(TIMEOUT - 1.0)
        monitor.settle(node)
    monitor.advance(TIMEOUT - 1.0)
    assert (monitor.found, monitor.nodes) == ([], {3})
    monitor.advance(2.0)
    assert monitor.found == [{3}]
    monitor.advance(TIMEOUT - 2.0)
    assert monitor.found == [{3}], "it is reported once in this time"
    monitor.settle(3)
    monitor.advance(10 * TIMEOUT)
    assert monitor.found == [{3}]
    assert not monitor.nodes


def test_time_without_checks_does_not_count(monitor: CheckedMonitor) -> None:
    monitor.advance(100_000.0, interval=10_000.0)
    assert monitor.found == []


def test_time_before_the_first_start_does_not_count() -> None:
    monitor = CheckedMonitor()
    monitor.advance(10 * TIMEOUT)
    monitor.start(0)
    monitor.advance(TIMEOUT - 1.0)
    assert monitor.found == []


def test_nodes_that_are_started_later_do_not_extend_the_timeout_of_earlier_ones(monitor: CheckedMonitor) -> None:
    monitor.settle(0)
    for _ in range(2):
        monitor.advance(TIMEOUT / 2 + 1.0)
        monitor.start(0)  # again and again, as where nodes crash and restart
        monitor.settle(0)
    assert monitor.found == [{1, 2, 3}]


def test_nodes_that_listen_give_more_time_to_nodes_that_were_started_after_them(monitor: CheckedMonitor) -> None:
    monitor.start(4)
    for node in (0, 1, 2):
        monitor.advance(TIMEOUT - 1.0)
        monitor.settle(node)
    assert monitor.found == []
    monitor.advance(TIMEOUT + 1.0)
    assert monitor.found == [{3, 4}]


def test_nodes_that_do_not_start_are_killed_with_a_reason() -> None:
    agent, registry, starts = FakeAgent(), NodeRegistry(4), StartMonitor()
    server: Any = FakeServer()
    commands = NodeCommands(registry, cast(Any, agent), server, RunTimes(None, range(4)))
    timeouts = Timeouts(start=0.1, hang=1.0, finish=1.0)
    liveness = LivenessMonitor(registry, frozenset(range(4)), starts, commands, timeouts, "nodes.log")
    starts.expect([1, 3], time.monotonic() - 1.0)
    liveness.end_nodes_that_do_not_start()
    assert agent.requests == [control.KillNodes([1, 3])]
    for node in (1, 3):
        assert registry[node].failure == "did not report within 0.1 s that it listens; see nodes.log"


def test_nodes_have_a_minute_to_start_although_the_hang_timeout_is_shorter() -> None:
    assert Timeouts.from_hang_timeout(1.0).start == MIN_START_SECONDS == TIMEOUT
    assert Timeouts.from_hang_timeout(100.0).start > 100.0
