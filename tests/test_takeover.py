"""A coordinator that leaves its state in coordinator.json, and another one that continues: without real processes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from disks import FreesTheDisk, fill, small_disk
from shoal.engines.processes import control
from shoal.engines.processes.agent import Report
from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.checkpoints import mark_absent
from shoal.engines.processes.control_server import ControlMessage
from shoal.engines.processes.coordinator import Coordinator, RunContext
from shoal.engines.processes.interrupts import Interrupts
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.remote.protocol import NodeReport, RunReport
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.processes.takeover import TakenOver
from shoal.engines.run_tracker import RunTracker
from shoal.experiment import Experiment
from shoal.experiment.environment_builder import build_environment, device_speeds
from shoal.results.coordinator_file import AgentShare, CoordinatorFile, read_coordinator_file
from shoal.results.progress import Outcome, ProgressListener
from shoal.results.records import NOT_JOINED, RunFolder
from shoal.testing import Faults

NODES = 3
PATIENCE = 10.0
"""Seconds that a test waits for a run."""


class ScriptedAgent:
    """An agent whose nodes do what a test decides, in every turn of the coordinator. It starts and ends them."""

    name = "a"
    received_bytes = 0
    collected = True
    is_lost = is_stopped = waits_for_space = False
    unauthenticated_connections = 0

    def __init__(self, turn: Callable[[ScriptedAgent], None]) -> None:
        self.requests: list[control.ToAgent] = []
        self._turn = turn
        self._reports: deque[Report] = deque()
        self._ready, self._wakeup = os.pipe()
        os.write(self._wakeup, b"x")
        self._began = time.monotonic()

    @property
    def waited_seconds(self) -> float:
        return time.monotonic() - self._began

    def report(self, *reports: Report) -> None:
        self._reports.extend(reports)

    def node_sends(self, *messages: control.FromNode) -> None:
        self.report(*map(ControlMessage, messages))

    def listens(self, *nodes: int) -> None:
        self.node_sends(*(control.NodeListening(node, "run", endpoint(node)) for node in nodes))

    def sent(self, node: int, kind: type[Any]) -> list[Any]:
        """The messages of this kind to a node."""
        passed_on = [request for request in self.requests if isinstance(request, control.ToNodes)]
        return [request.message for request in passed_on if node in request.nodes and isinstance(request.message, kind)]

    def started(self) -> list[int]:
        return [n for request in self.requests if isinstance(request, control.StartNodes) for n in request.nodes]

    def killed(self) -> list[int]:
        return [n for request in self.requests if isinstance(request, control.KillNodes) for n in request.nodes]

    # The interface of an agent

    def send(self, request: control.ToAgent) -> None:
        self.requests.append(request)
        if isinstance(request, control.StartNodes):
            self.listens(*request.nodes)
        elif isinstance(request, control.KillNodes):
            self.report(*(control.NodeExited(node, -9) for node in request.nodes))
        elif isinstance(request, control.ToNodes) and isinstance(request.message, control.Finish):
            self.report(*(control.NodeExited(node, 0) for node in request.nodes))

    def reports(self) -> Iterator[Report]:
        assert self.waited_seconds < PATIENCE, "the run does not end"
        while self._reports:
            yield self._reports.popleft()
        self._turn(self)

    def register(self, poller: zmq.Poller) -> None:
        if self._reports:
            poller.register(self._ready, zmq.POLLIN)

    def share(self, nodes: list[int]) -> AgentShare:
        return AgentShare(self.name, "session", nodes)

    def collect(self) -> None: ...

    def count_remaining(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None:
        os.close(self._ready)
        os.close(self._wakeup)


def endpoint(node: int) -> str:
    return f"tcp://127.0.0.1:{5000 + node}"


def listening(node: int, **changed: Any) -> NodeReport:
    return NodeReport(node, **{"endpoint": endpoint(node), "starts": 1, **changed})


def follow(
    folder: RunFolder,
    turn: Callable[[ScriptedAgent], None],
    taken_over: TakenOver | None = None,
    listener: ProgressListener | None = None,
    **changed: Any,
) -> tuple[Outcome, ScriptedAgent]:
    """Let a coordinator follow a run to its end, from its start or from where another coordinator has left it."""
    experiment = Experiment(**{"nodes": NODES, "engine": "processes", **changed})
    tracker, registry = RunTracker(experiment, listener), NodeRegistry(NODES)
    times = RunTimes(None, experiment.round_nodes)
    mark_absent(tracker.lost, registry)
    times.do_not_await(tracker.lost)
    run = RunContext(experiment, build_environment(experiment, device_speeds(experiment)), folder, "run")
    agent = ScriptedAgent(turn)
    if taken_over is None:
        agent.report(control.Prepared(10, []))
    agents = AgentGroup([agent], dict.fromkeys(range(NODES), 0))
    try:
        return Coordinator(run, registry, agents, tracker, times, Interrupts()).run(taken_over), agent
    finally:
        agent.close()


def end_when(
    condition: Callable[[], object], nodes: tuple[int, ...] = tuple(range(NODES))
) -> Callable[[ScriptedAgent], None]:
    """End the algorithm of nodes when a condition is true, or is not true in time."""
    ended = False

    def turn(agent: ScriptedAgent) -> None:
        nonlocal ended
        if not ended and (condition() or agent.waited_seconds > PATIENCE / 2):
            ended = True
            agent.node_sends(*map(control.NodeDone, nodes))

    return turn


def left_by(folder: RunFolder, turn: Callable[[ScriptedAgent], None], **changed: Any) -> CoordinatorFile:
    """What a coordinator has in its file before its nodes end."""
    left: list[CoordinatorFile | None] = []

    def look(agent: ScriptedAgent) -> None:
        left.append(read_coordinator_file(folder))
        turn(agent)

    follow(folder, look, **changed)
    found = [content for content in left if content is not None]
    assert found
    return found[-1]


def taken_over(left: CoordinatorFile, *nodes: NodeReport) -> TakenOver:
    return TakenOver(left, {"a": RunReport("run", 10, list(nodes), None, None, -1, 0.0, 0.0)}, {"a": 0.0})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


def test_while_the_disk_is_full_the_run_goes_on_and_its_state_is_written_when_there_is_space(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kib=256) as disk:
        folder = RunFolder.create(disk, "run")
        listener = FreesTheDisk(fill(disk), "another may not continue the run")
        left: list[CoordinatorFile | None] = []

        def is_written() -> bool:
            left.append(read_coordinator_file(folder))
            return left[-1] is not None

        outcome, _ = follow(folder, end_when(is_written), listener=listener)
        assert outcome.status == "completed"
        assert left[0] is None, "the disk was full when the nodes started"
        assert left[-1] is not None
        assert left[-1].agents == [AgentShare("a", "session", list(range(NODES)))]
        assert len([notice for notice in listener.notices if "may not continue" in notice]) == 1
        assert read_coordinator_file(folder) is None, "the run has ended"


@pytest.mark.parametrize("reported", [[0, 1, 2], [0, 1]], ids=["it runs", "it is unknown"])
def test_a_node_that_was_lost_stays_lost_and_its_process_is_ended(folder: RunFolder, reported: list[int]) -> None:
    end = end_when(lambda: read_coordinator_file(folder).lost, nodes=(0, 1))  # type: ignore[union-attr]

    def fail(agent: ScriptedAgent) -> None:
        if not agent.killed():
            agent.node_sends(control.NodeFailed(2, "run", "out of memory"))  # the coordinator has its process killed
        end(agent)

    left = left_by(folder, fail)
    assert left.lost == {"2": "out of memory"}

    running = [listening(node, runs=True) for node in reported]
    outcome, agent = follow(folder, end_when(lambda: True, nodes=(0, 1)), taken_over(left, *running))
    assert outcome.status == "incomplete"
    assert outcome.lost == {2: "out of memory"}
    assert agent.killed() == reported[2:]
    assert agent.started() == []
    assert agent.sent(0, control.PeerFailed)[0].node == 2


def test_nodes_are_awaited_whose_agent_has_to_send_again_that_they_listen(folder: RunFolder) -> None:
    """The coordinator was killed before it had acknowledged the reports of nodes 1 and 2."""
    left = left_by(folder, end_when(lambda: True))
    to_listen = [2, 1]

    def turn(agent: ScriptedAgent) -> None:
        if to_listen:
            assert not agent.sent(0, control.Start)
            agent.listens(to_listen.pop())
        elif agent.sent(0, control.Start) and not agent.sent(0, control.Finish):
            agent.node_sends(*map(control.NodeDone, range(NODES)))

    outcome, agent = follow(folder, turn, taken_over(left, listening(0), NodeReport(2, key=b"k" * 40)))
    assert (outcome.status, outcome.lost) == ("completed", {})
    for node in range(NODES):
        (start,) = agent.sent(node, control.Start)
        assert start.endpoints == [endpoint(node) for node in range(NODES)]


# Files at the end


def test_when_the_disk_has_space_again_files_have_time_to_arrive(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engines.processes.coordinator.COLLECT_SECONDS", 0.6)
    ended = end_when(lambda: True)
    phases = iter([("full", 0.0), ("space", 0.8), ("arrived", 1.0)])
    phase, at = next(phases)
    began: float | None = None

    def turn(agent: ScriptedAgent) -> None:
        nonlocal began, phase, at
        ended(agent)
        if began is None and agent.sent(0, control.Finish):
            began = time.monotonic()
        if began is not None and time.monotonic() - began >= at:
            agent.collected, agent.waits_for_space = phase == "arrived", phase == "full"
            phase, at = next(phases, (phase, at))

    outcome, _ = follow(folder, turn)
    assert outcome.status == "completed"


# Late nodes

JOINS: dict[str, Any] = {
    "fault": Faults().join(2, round=4).schedule,
    "algorithm": {"name": "dpsgd", "rounds": 10},
    "topology": {"name": "full"},
}


@pytest.fixture
def left(folder: RunFolder) -> CoordinatorFile:
    """What a coordinator has left of a run that node 2 has not joined."""
    left = left_by(folder, end_when(lambda: True, nodes=(0, 1)), **JOINS)
    assert left.lost == {"2": NOT_JOINED}
    return left


def test_a_node_that_joins_by_round_after_the_takeover_is_started_once(
    folder: RunFolder, left: CoordinatorFile
) -> None:
    rounds = iter(range(2, 10))

    def turn(agent: ScriptedAgent) -> None:
        if (round := next(rounds, None)) is not None:
            agent.node_sends(*(control.ProgressReport(node, round, 0) for node in (0, 1)))
            assert agent.started() == ([2] if round > 4 else [])
        elif not agent.sent(0, control.Finish):
            agent.node_sends(*map(control.NodeDone, range(NODES)))

    running = [listening(node, runs=True, rounds=1) for node in (0, 1)]
    outcome, agent = follow(folder, turn, taken_over(left, *running), **JOINS)
    assert (outcome.status, outcome.lost) == ("completed", {})
    (start,) = agent.sent(2, control.Start)
    assert start.endpoints == [endpoint(node) for node in range(NODES)]
    assert [update.endpoint for update in agent.sent(0, control.PeerRestarted)] == [endpoint(2)]


@pytest.mark.parametrize("known", [listening(2), NodeReport(2, key=b"k" * 40)], ids=["it listens", "its key"])
def test_a_late_node_that_started_since_the_state_was_written_joins(
    folder: RunFolder, left: CoordinatorFile, known: NodeReport
) -> None:
    """The coordinator was killed before it had noted that the node listens."""
    listens = [] if known.starts else [2]

    def turn(agent: ScriptedAgent) -> None:
        if listens:
            agent.listens(listens.pop())
        elif agent.sent(2, control.Start) and not agent.sent(0, control.Finish):
            agent.node_sends(*(control.ProgressReport(node, 5, 0) for node in (0, 1)))
            agent.node_sends(*map(control.NodeDone, range(NODES)))

    running = [listening(node, runs=True, rounds=5) for node in (0, 1)]
    outcome, agent = follow(folder, turn, taken_over(left, *running, known), **JOINS)
    assert (outcome.status, outcome.lost) == ("completed", {})
    assert agent.killed() == agent.started() == []
    assert len(agent.sent(2, control.Start)) == 1
    (announced,) = agent.sent(0, control.PeerRestarted)
    assert announced.endpoint == endpoint(2)
    if known.key is not None:
        assert announced.key == known.key


def test_a_late_node_of_which_only_its_listening_arrives_again_joins(folder: RunFolder, left: CoordinatorFile) -> None:
    """Without sealed links, the agent has no report of the node that the earlier coordinator has acknowledged."""
    listens = [2]

    def turn(agent: ScriptedAgent) -> None:
        if listens:
            agent.listens(listens.pop())
        elif agent.sent(2, control.Start) and not agent.sent(0, control.Finish):
            agent.node_sends(*map(control.NodeDone, range(NODES)))

    running = [listening(node, runs=True, rounds=3) for node in (0, 1)]
    outcome, _ = follow(folder, turn, taken_over(left, *running), **JOINS)
    assert (outcome.status, outcome.lost) == ("completed", {})
