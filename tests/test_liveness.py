"""Nodes that do not start, hang, or do not finish."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordination import FakeAgents
from shoal.engines.processes import control
from shoal.engines.processes.liveness import MIN_START_SECONDS, STOP_SECONDS, LivenessMonitor, Timeouts
from shoal.engines.processes.node_commands import NodeCommands
from shoal.engines.processes.node_registry import NodeRegistry, NodeState
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.processes.start_monitor import StartMonitor
from shoal.engines.processes.watch_clock import MAX_STEP, WatchClock
from shoal.errors import RunError

TIMEOUT = 60.0


class CheckedMonitor(StartMonitor):
    """A monitor that is checked at regular intervals of a clock of its own."""

    def __init__(self) -> None:
        self.clock = WatchClock()
        super().__init__(self.clock)
        self.now = 1000.0
        self.found: list[set[int]] = []
        self.clock.tick(self.now)

    def start(self, *nodes: int) -> None:
        self.expect(nodes)

    def advance(self, seconds: float, interval: float = MAX_STEP) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += interval
            self.clock.tick(self.now)
            if overdue := self.overdue(TIMEOUT):
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


class Watched:
    """Four nodes that run, of which the first three train, and the monitor of their liveness."""

    def __init__(self) -> None:
        self.agents = FakeAgents()
        self.clock, self.now = WatchClock(), 0.0
        self.registry, self.starts = NodeRegistry(4), StartMonitor(self.clock)
        for entry in self.registry:
            entry.run(self.clock.seconds)
        times = RunTimes(None, range(3))
        commands = NodeCommands(self.registry, self.agents.as_group(), times)
        timeouts = Timeouts(start=0.1, hang=50.0, finish=100.0)
        training_nodes = frozenset(range(3))
        self.liveness = LivenessMonitor(
            self.registry, training_nodes, self.starts, commands, timeouts, self.clock, "nodes.log"
        )

    def watch(self, seconds: float) -> None:
        """Let the coordinator read messages for `seconds`."""
        for _ in range(round(seconds / MAX_STEP)):
            self.now += MAX_STEP
            self.clock.tick(self.now)

    @property
    def stopped(self) -> set[int]:
        """Nodes that were asked to stop."""
        sent = self.agents.sent.items()
        return {node for node, messages in sent if any(isinstance(m, control.Finish) and m.stopped for m in messages)}

    @property
    def failures(self) -> list[str | None]:
        return [entry.failure for entry in self.registry]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_nodes_that_do_not_start_are_killed_with_a_reason(watched: Watched) -> None:
    watched.starts.expect([1, 3])
    watched.watch(1.0)
    watched.liveness.end_nodes_that_do_not_start()
    assert watched.agents.requests == [control.KillNodes([1, 3])]
    reason = "did not report within 0.1 s that it listens; see nodes.log"
    assert watched.failures == [None, reason, None, reason]


def test_learners_are_stopped_and_then_killed_when_no_node_was_busy_for_long(watched: Watched) -> None:
    watched.watch(49.0)
    watched.liveness.end_hung_nodes(lambda nodes: False)
    assert not watched.stopped
    watched.watch(2.0)
    watched.liveness.end_hung_nodes(lambda nodes: False)
    assert watched.stopped == {0, 1, 2}
    reason = "hung: it waited 50 s and no node computed or sent anything"
    assert watched.failures == [reason, reason, reason, None]
    watched.liveness.end_hung_nodes(lambda nodes: False)
    assert watched.agents.requests == []
    watched.watch(STOP_SECONDS)
    watched.liveness.end_hung_nodes(lambda nodes: False)
    assert watched.agents.requests == [control.KillNodes([0, 1, 2])]


def test_one_busy_node_or_a_starting_node_keeps_all_nodes_alive(watched: Watched) -> None:
    watched.watch(1000.0)
    watched.registry[3].last_busy = watched.clock.seconds
    watched.liveness.end_hung_nodes(lambda nodes: False)
    watched.watch(1000.0)
    watched.starts.expect([2])
    watched.liveness.end_hung_nodes(lambda nodes: False)
    assert not watched.stopped


def test_a_node_without_heartbeats_is_killed_and_the_others_are_not(watched: Watched) -> None:
    watched.watch(49.0)
    for node in (0, 2, 3):
        watched.registry[node].last_message = watched.clock.seconds
    watched.liveness.end_unresponsive_nodes()
    assert watched.agents.requests == []
    watched.watch(2.0)
    watched.liveness.end_unresponsive_nodes()
    assert watched.agents.requests == [control.KillNodes([1])]
    assert [failure is None for failure in watched.failures] == [True, False, True, True]
    assert "sent no heartbeat for 50 s: its process is stopped or blocked" in str(watched.failures[1])
    watched.liveness.end_unresponsive_nodes()
    assert len(watched.agents.requests) == 1, "one request is enough"


def test_nodes_that_do_not_run_need_no_heartbeats(watched: Watched) -> None:
    states = (NodeState.NOT_STARTED, NodeState.STARTING, NodeState.LISTENING, NodeState.EXITED)
    for node, state in enumerate(states):
        watched.registry[node].state = state
    watched.watch(1000.0)
    watched.liveness.end_unresponsive_nodes()
    assert watched.agents.requests == []


def test_time_in_which_the_coordinator_was_suspended_does_not_count(watched: Watched) -> None:
    watched.now += 100_000.0
    watched.clock.tick(watched.now)
    watched.liveness.finishing_since = 0.0
    watched.liveness.network_last_message = 0.0
    watched.liveness.end_unresponsive_nodes()
    watched.liveness.check_network()
    watched.liveness.end_hung_nodes(lambda nodes: False)
    watched.liveness.end_nodes_that_do_not_finish()
    assert watched.agents.requests == []
    assert not watched.stopped


def test_a_network_process_without_heartbeats_ends_the_run(watched: Watched) -> None:
    watched.watch(100.0)
    watched.liveness.check_network()  # a run without a network process
    watched.liveness.network_last_message = watched.clock.seconds
    watched.watch(49.0)
    watched.liveness.check_network()
    watched.watch(2.0)
    with pytest.raises(RunError, match="network process sent no heartbeat for 50 s"):
        watched.liveness.check_network()


def test_processes_whose_messages_wait_for_space_on_the_disk_are_not_ended(watched: Watched) -> None:
    watched.liveness.network_last_message = watched.clock.seconds
    watched.registry[3].state = NodeState.EXITED
    for _ in range(4):
        watched.watch(30.0)
        watched.liveness.note_full_disk([0, 1, 2, 3], network=True)
        watched.liveness.end_unresponsive_nodes()
        watched.liveness.check_network()
        watched.liveness.end_hung_nodes(lambda nodes: False)
    assert watched.agents.requests == []
    assert not watched.stopped
    assert watched.registry[3].last_message == 0.0
    watched.watch(51.0)
    watched.liveness.note_full_disk([0], network=False)
    watched.liveness.end_unresponsive_nodes()
    assert watched.agents.requests == [control.KillNodes([1, 2])]


def test_an_agent_that_is_stopped_ends_the_run_unless_it_continues(watched: Watched) -> None:
    def check(*stopped: bool) -> None:
        watched.liveness.check_agents([cast(Any, SimpleNamespace(is_stopped=one)) for one in stopped])

    for _ in range(3):
        watched.watch(49.0)
        check(False, True)
        check(False, False)
    watched.watch(51.0)
    with pytest.raises(RunError, match="process that starts nodes was stopped for 50 s"):
        check(False, True)


def test_nodes_that_are_offline_forever_are_stopped_at_once(watched: Watched) -> None:
    watched.liveness.end_hung_nodes(lambda nodes: nodes == {0, 1, 2})
    assert watched.stopped == {0, 1, 2}


def test_nodes_that_do_not_finish_are_stopped(watched: Watched) -> None:
    watched.registry[0].state, watched.registry[1].state = NodeState.EXITED, NodeState.DONE
    watched.liveness.finishing_since = watched.clock.seconds
    watched.watch(60.0)
    watched.liveness.end_nodes_that_do_not_finish()
    assert watched.stopped == {2, 3}, "a node that is done has more time"
    watched.watch(50.0)
    watched.liveness.end_nodes_that_do_not_finish()
    assert watched.stopped == {1, 2, 3}


def test_nodes_have_a_minute_to_start_although_the_hang_timeout_is_shorter() -> None:
    assert Timeouts.from_hang_timeout(1.0).start == MIN_START_SECONDS == TIMEOUT
    assert Timeouts.from_hang_timeout(100.0).start > 100.0
