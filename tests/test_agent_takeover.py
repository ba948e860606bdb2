"""Agents whose coordinator was killed, and a coordinator that continues their run: real sockets, but no nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from conftest import is_zygote, until
from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.coordinator import RunContext
from shoal.engines.processes.interrupts import Interrupts
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.agent_server import AgentServer
from shoal.engines.processes.remote.agents_plan import AgentsPlan, ListedAgent
from shoal.engines.processes.remote.channel import Address, Channel, Trust
from shoal.engines.processes.remote.connections import AgentConnections
from shoal.engines.processes.remote.hosted_run import AgentOptions
from shoal.engines.processes.remote.launch import take_over_agents
from shoal.engines.processes.takeover import TakenOver
from shoal.engines.run_tracker import RunTracker
from shoal.errors import CheckpointError, NotContinuedError
from shoal.experiment import Experiment
from shoal.experiment.environment_builder import build_environment, device_speeds
from shoal.experiment.resuming import resume
from shoal.experiment.running import Machines
from shoal.experiment.writing import experiment_hash, write_experiment
from shoal.results.coordinator_file import AgentShare, CoordinatorFile, boot_id, write_coordinator_file
from shoal.results.records import RunFolder

pytestmark = pytest.mark.usefixtures("no_process_is_left")

NODES = 4
EXPERIMENT = Experiment(nodes=NODES, engine="processes", name="r")


class RunningAgent:
    """An agent, served by a thread."""

    def __init__(self, name: str, folder: Path, join: int | None = None) -> None:
        """`join` is the port of the coordinator; None: the agent listens."""
        self.folder = folder / name
        self.port = 0
        channel = Channel(Trust(), lambda reason: None)
        if join is None:
            self.port = channel.listen(Address("127.0.0.1", 0))
        else:
            channel.dial(Address("127.0.0.1", join), None, name.encode())
        options = AgentOptions(name, "127.0.0.1", "127.0.0.1", self.folder)
        self._server = AgentServer(options, channel, join is not None, lambda text: None)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._server.turn()
        self._server.close()

    @property
    def has_run(self) -> bool:
        """Whether the agent has a run: its folder is removed with it."""
        return any(self.folder.glob("*/*"))

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class Impostor:
    """An agent that claims the run of another agent, with all that a coordinator has sent to it."""

    def __init__(self) -> None:
        self._channel = Channel(Trust(), lambda reason: None)
        self.port = self._channel.listen(Address("127.0.0.1", 0))
        self.learnt: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        info = protocol.AgentInfo("impostor", protocol.versions(), 1, 2**30, "127.0.0.1", "127.0.0.1")
        while not self._ended.wait(0.01):
            for received in self._channel.receive():
                if isinstance(received.header, protocol.Open):
                    self.learnt += received.header.takes_over
                    opened = protocol.Opened(received.header.session, info, self.learnt[0])
                    self._channel.send(received.route, opened, [])
        self._channel.close()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def listed(*agents: RunningAgent | Impostor) -> AgentsPlan:
    return AgentsPlan(tuple(ListedAgent(Address("127.0.0.1", agent.port)) for agent in agents))


class Place:
    """The agents and coordinators of a test."""

    def __init__(self, root: Path, resources: ExitStack) -> None:
        self.notices: list[str] = []
        self.home = RunFolder.create(root, "home")
        self._root = root
        self._resources = resources

    def agent(self, name: str, join: int | None = None) -> RunningAgent:
        agent = RunningAgent(name, self._root, join)
        self._resources.callback(agent.close)
        return agent

    def impostor(self) -> Impostor:
        impostor = Impostor()
        self._resources.callback(impostor.close)
        return impostor

    def begin(
        self,
        plan: AgentsPlan,
        *agents: RunningAgent,
        before_kill: Callable[[AgentConnections], object] = lambda c: None,
    ) -> CoordinatorFile:
        """Begin a run on the agents of a plan, with two nodes on each, and kill the coordinator."""
        connections = AgentConnections(plan, self.notices.append)
        try:
            connections.connect(lambda: False)
            for agent in connections.agents:
                offset, table = agent.clock.offset, EXPERIMENT.to_table()
                agent.begin(protocol.BeginRun("r", "secret", NODES, NODES, False, False, table, [], offset), self.home)
            pump_until(connections, lambda: all(agent.has_run for agent in agents))
            before_kill(connections)
        finally:
            kill(connections)
        shares = [
            AgentShare(agent.name, agent.session, [2 * position, 2 * position + 1])
            for position, agent in enumerate(connections.agents)
        ]
        return left_file(*shares)

    def attempt(self, plan: AgentsPlan, left: CoordinatorFile) -> protocol.RunReport:
        """Connect to an agent to continue its run, and end before the run is continued. Returns what it reports."""
        names = {share.session: share.name for share in left.agents}
        connections = AgentConnections(plan, self.notices.append, names)
        try:
            connections.connect(lambda: False)
        finally:
            kill(connections)
        (agent,) = connections.agents
        assert agent.run_report is not None
        return agent.run_report

    def take_over(self, plan: AgentsPlan, left: CoordinatorFile) -> tuple[AgentGroup, TakenOver]:
        environment = build_environment(EXPERIMENT, device_speeds(EXPERIMENT))
        run = RunContext(EXPERIMENT, environment, self.home, "another")
        with ExitStack() as resources:
            taken = take_over_agents(run, left, plan, self.notices.append, resources, Interrupts())
            self._resources.push(resources.pop_all())
        return taken


def left_file(*shares: AgentShare) -> CoordinatorFile:
    digest = experiment_hash(EXPERIMENT)
    return CoordinatorFile(list(shares), str(Path.cwd()), digest, boot_id(), 0.0, 0.0, None, None, 0.0)


def pump_until(connections: AgentConnections, condition: Callable[[], bool]) -> None:
    def pumped() -> bool:
        connections.pump()
        return condition()

    until(pumped)


def kill(connections: AgentConnections) -> None:
    """Close the sockets of a coordinator, as the kernel does. The sessions do not end."""
    connections.ends_sessions = False
    connections.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as resources:
        yield Place(tmp_path, resources)


# Who may continue a run


def test_only_a_coordinator_that_knows_the_session_continues_the_run(place: Place) -> None:
    agent = place.agent("a")
    left = place.begin(listed(agent), agent)
    session = left.agents[0].session
    for guess in ("another", protocol.session_hash(session)):
        with pytest.raises(NotContinuedError):
            place.take_over(listed(agent), left_file(AgentShare("a", guess, [0, 1])))
    assert agent.has_run
    _, taken_over = place.take_over(listed(agent), left)
    assert taken_over.run == "secret"


def test_an_agent_cannot_claim_the_run_of_another_agent(place: Place) -> None:
    agent, impostor = place.agent("a"), place.impostor()
    left = place.begin(listed(agent), agent)
    group, taken_over = place.take_over(listed(impostor, agent), left)
    assert [one.name for one in group.agents] == list(taken_over.reports) == ["a"]
    assert "agent 'impostor' does not have this run: it is not used" in place.notices
    assert impostor.learnt
    assert left.agents[0].session not in impostor.learnt


def test_an_agent_that_joins_without_the_run_does_not_replace_a_lost_one(
    place: Place, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engines.processes.remote.connections.REACH_SECONDS", 1.5)
    plan = AgentsPlan(listen=Address("127.0.0.1", unused_port), expect=1)
    agent = place.agent("a", join=unused_port)
    left = place.begin(plan, agent)
    new = place.agent("b", join=unused_port)
    lost = AgentShare("b", "the session of an agent that was killed", [2, 3])
    plan = AgentsPlan(listen=Address("127.0.0.1", unused_port), expect=2)
    group, taken_over = place.take_over(plan, left_file(*left.agents, lost))
    assert [(one.name, one.is_lost) for one in group.agents] == [("a", False), ("b", True)]
    assert list(taken_over.reports) == ["a"]
    assert "agent 'b' does not have this run: it is not used" in place.notices
    assert not new.has_run


def test_an_agent_keeps_the_number_that_its_name_has_in_the_run(place: Place) -> None:
    agent = place.agent("a")
    left = place.begin(listed(agent), agent)
    second = left_file(AgentShare("a-2", left.agents[0].session, [0, 1]))
    place.notices.clear()
    group, _ = place.take_over(listed(agent), second)
    assert [one.name for one in group.agents] == ["a-2"]
    (connected,) = place.notices
    assert connected.startswith("agent 'a-2' is connected")


# Agents that have no run any more


def end_zygotes() -> None:
    """End the processes that start nodes: the run has failed."""
    for child in psutil.Process().children():
        if is_zygote(child):
            child.kill()


def test_the_nodes_of_an_agent_that_was_restarted_are_lost(place: Place) -> None:
    first, killed = place.agent("a"), place.agent("b")
    left = place.begin(listed(first, killed), first, killed)
    killed.close()
    restarted = place.agent("b")
    group, taken_over = place.take_over(listed(first, restarted), left)
    assert [(agent.name, agent.is_lost) for agent in group.agents] == [("a", False), ("b", True)]
    tracker, registry = RunTracker(EXPERIMENT), NodeRegistry(NODES)
    taken_over.restore_nodes(registry, tracker, 0.0)
    assert tracker.lost == dict.fromkeys((2, 3), "its agent 'b' is lost")
    assert registry.present == {0, 1}


def test_a_run_that_has_failed_on_its_agent_is_not_continued(place: Place) -> None:
    agent = place.agent("a")

    def fail(connections: AgentConnections) -> None:
        def failed() -> bool:
            end_zygotes()
            return connections.agents[0].is_lost

        pump_until(connections, failed)

    left = place.begin(listed(agent), agent, before_kill=fail)
    with pytest.raises(NotContinuedError, match="no agent has the nodes of this run any longer"):
        place.take_over(listed(agent), left)


def test_without_an_agent_that_has_the_run_its_file_is_removed(place: Place) -> None:
    write_experiment(place.home.experiment, EXPERIMENT.to_table())
    write_coordinator_file(place.home, left_file(AgentShare("a", "session", [0, 1, 2, 3])))
    file = place.home.path / "coordinator.json"
    assert file.exists()
    with pytest.raises(CheckpointError, match="has no valid checkpoint"):
        resume(place.home.path, machines=Machines(listed(place.agent("a"))))
    assert not file.exists()


# Attempts to continue that fail


def test_the_time_without_a_coordinator_includes_attempts_that_failed(place: Place) -> None:
    agent = place.agent("a")
    began = time.monotonic()
    left = place.begin(listed(agent), agent)
    time.sleep(0.5)
    first = place.attempt(listed(agent), left)
    assert 0.4 < first.away < time.monotonic() - began
    second = place.attempt(listed(agent), left)
    assert second.away > first.away
    _, taken_over = place.take_over(listed(agent), left)
    assert taken_over.away > second.away


# Files


def test_files_that_an_earlier_coordinator_has_collected_are_collected_again(place: Place) -> None:
    agent = place.agent("a")

    def collect(connections: AgentConnections) -> None:
        connections.agents[0].collect()
        pump_until(connections, lambda: connections.agents[0].collected)
        for _ in range(5):  # acknowledge it: the agent does not send it to the next coordinator by itself
            connections.agents[0].measure_clock()
            time.sleep(0.05)
            connections.pump()

    left = place.begin(listed(agent), agent, before_kill=collect)
    group, _ = place.take_over(listed(agent), left)
    assert not group.collected
    group.collect()

    def collected() -> bool:
        list(group.reports())
        return group.collected

    until(collected, 10.0)
