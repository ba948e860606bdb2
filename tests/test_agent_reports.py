"""What an agent sends to the coordinator, and what the coordinator makes of it: both ends of a link in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from disks import fill, small_disk
from shoal.engines.processes import control
from shoal.engines.processes.agent import Report
from shoal.engines.processes.control_server import ControlMessage
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.link import WINDOW_BYTES, Header, Link
from shoal.engines.processes.remote.outbox import Frames
from shoal.engines.processes.remote.remote_agent import RemoteAgent
from shoal.engines.processes.remote.run_reports import KEPT_CHECKPOINTS, MAX_WAITING_BYTES, RunReports
from shoal.errors import RunError
from shoal.results.checkpoints import Checkpoints, SavedNode
from shoal.results.coordinator_file import AgentShare
from shoal.results.records import RunFolder
from shoal.results.state_files import write_state

PARAMETERS = 2**20
INFO = protocol.AgentInfo("a", {}, 1, 1, "127.0.0.1", "127.0.0.1")


class Machines:
    """The machine of an agent with the nodes 0 to 3, and the coordinator's."""

    def __init__(self, root: Path) -> None:
        self.there, self.home = RunFolder.create(root, "agent"), RunFolder.create(root, "home")
        self.to_home: deque[tuple[Header, Frames]] = deque()
        self.to_agent: deque[tuple[protocol.Header, Frames]] = deque()
        self.requests: list[protocol.ToRemote] = []
        self.link = Link("s", lambda header, frames: self.to_home.append((header, frames)))
        self.reports = RunReports(self.link, self.there)
        self.coordinator = RemoteAgent(INFO, "s", lambda header, frames: self.to_agent.append((header, frames)))
        self.now = 0.0
        self.coordinator.begin(protocol.BeginRun("r", "run", 4, 4, False, False, {}, [], 0.0), self.home)
        self.coordinator.send(control.StartNodes([0, 1, 2, 3], "run"))
        self.reports.report(control.Prepared(PARAMETERS, []))
        assert [type(report) for report in self.exchange()] == [control.Prepared]

    def node_sends(self, message: control.FromNode, params: np.ndarray | None = None) -> None:
        self.reports.pass_on(ControlMessage(message, params))

    def advance(self) -> None:
        """A turn of the agent, after enough time to search for files."""
        self.now += 1.0
        self.reports.advance(self.now)

    def deliver_to_coordinator(self) -> None:
        while self.to_home:
            self.coordinator.receive(*self.to_home.popleft())

    def deliver(self) -> list[Report]:
        """Deliver what is on its way, in both directions. Returns what the coordinator has to handle."""
        self.deliver_to_coordinator()
        while self.to_agent:
            header, frames = self.to_agent.popleft()
            content = self.link.receive(header, frames)  # type: ignore[arg-type]
            if content is not None:
                self.requests.append(protocol.decode_to_remote(content[0]))
                self.link.handled()
        return list(self.coordinator.reports())

    def exchange(self) -> list[Report]:
        """Deliver until nothing is left to send."""
        reports = []
        while True:
            self.advance()
            self.link.beat(0.0)
            self.coordinator.advance()
            self.coordinator.measure_clock()  # acknowledges
            reports += self.deliver()
            if self.link.all_acknowledged and not self.to_home:
                return reports

    @property
    def bytes_on_the_way(self) -> int:
        return sum(len(frame) for _, frames in self.to_home for frame in frames)


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def messages(reports: list[Report]) -> list[control.FromNode]:
    return [report.message for report in reports if isinstance(report, ControlMessage)]


def save_state(machines: Machines, node: int, round: int) -> control.CheckpointSaved:
    """Write a state that is larger than the window, and return the node's report."""
    state = {"params": np.full(WINDOW_BYTES // 2, round, np.float32)}
    file = write_state(Checkpoints(machines.there).state(round, node), state)
    with machines.there.node(node).open("ab") as records:
        records.write(b"a record\n")
        return control.CheckpointSaved(node, SavedNode(node, round, file, 0.0, records.tell(), 0))


def test_heartbeats_do_not_wait_for_files_models_and_checkpoints(machines: Machines) -> None:
    for node in range(4):
        machines.there.model(node).write_bytes(bytes(4 * PARAMETERS))
        machines.node_sends(control.ModelSnapshot(node, 1, 0.0), np.zeros(PARAMETERS, np.float32))
        machines.node_sends(save_state(machines, node, 1))
    machines.advance()
    for node in range(4):
        machines.node_sends(control.Heartbeat(node, True))
    assert WINDOW_BYTES / 2 < machines.bytes_on_the_way < WINDOW_BYTES + 2**12
    assert messages(machines.deliver()) == [control.Heartbeat(node, True) for node in range(4)]
    machines.exchange()
    for node in range(4):
        assert machines.home.model(node).stat().st_size == 4 * PARAMETERS


def test_a_state_and_all_models_arrive_before_the_later_reports_of_their_node(machines: Machines) -> None:
    saved = save_state(machines, 2, 5)
    model = np.arange(PARAMETERS, dtype=np.float32)
    machines.node_sends(control.ModelSnapshot(2, 5, 0.0), model)
    machines.node_sends(saved)
    machines.node_sends(control.NodeDone(2))
    machines.reports.report(control.NodeExited(2, 0))
    seen: list[Report] = []
    while control.NodeExited(2, 0) not in seen:
        machines.advance()
        for report in machines.deliver():
            seen.append(report)
            if report == ControlMessage(saved):
                state = Checkpoints(machines.home).state(5, 2)
                assert state.read_bytes() == Checkpoints(machines.there).state(5, 2).read_bytes()
                assert machines.home.node(2).read_bytes() == b"a record\n"
    assert [type(message) for message in messages(seen)] == [
        control.ModelSnapshot, control.CheckpointSaved, control.NodeDone,
    ]  # fmt: skip
    assert isinstance(seen[0], ControlMessage)
    assert seen[0].params is not None
    assert (seen[0].params == model).all()


def test_a_state_that_its_node_has_replaced_is_not_reported(machines: Machines) -> None:
    for round in (1, 2):
        machines.node_sends(save_state(machines, 0, round))
    Checkpoints(machines.there).state(1, 0).unlink()
    saved = [message.saved for message in messages(machines.exchange()) if isinstance(message, control.CheckpointSaved)]
    assert [entry.round for entry in saved if entry is not None] == [2]


def test_while_the_coordinator_is_away_models_and_states_wait_on_the_disk(machines: Machines) -> None:
    model = np.ones(PARAMETERS, np.float32)
    count = 3 * MAX_WAITING_BYTES // model.nbytes
    for round in range(count):
        machines.node_sends(control.ModelSnapshot(0, round, 0.0), model)
        machines.node_sends(control.ProgressReport(0, round, 0))
        machines.node_sends(save_state(machines, 1, round))
        machines.advance()
    assert machines.link.waiting_bytes <= MAX_WAITING_BYTES
    assert machines.link.unacknowledged_bytes < WINDOW_BYTES + 2**16
    machines.to_home.clear()  # lost
    received = messages(machines.exchange())
    assert [m.round for m in received if isinstance(m, control.ModelSnapshot)] == list(range(count))
    assert [m.saved.round for m in received if isinstance(m, control.CheckpointSaved) and m.saved] == list(range(count))
    left = [path for path in machines.there.path.rglob("*") if path.is_file() and path != machines.there.node(1)]
    kept = [Checkpoints(machines.there).state(round, 1) for round in range(count - KEPT_CHECKPOINTS, count)]
    assert sorted(left) == sorted(kept), "nothing else stays on the agent's disk"


def test_all_is_collected_when_everything_has_been_sent(machines: Machines) -> None:
    machines.there.log.write_bytes(bytes(3 * WINDOW_BYTES))
    machines.node_sends(control.ModelSnapshot(0, 1, 0.0), np.zeros(PARAMETERS, np.float32))
    machines.reports.collect()
    turns = 0
    while not machines.reports.collected():
        machines.advance()
        machines.deliver()
        turns += 1
    assert turns > 1
    assert not machines.reports.collected(), "only once"
    assert machines.home.log.stat().st_size == 3 * WINDOW_BYTES


# Requests


def test_requests_do_not_wait_for_averaged_models_and_stay_behind_states(machines: Machines, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_bytes(bytes(3 * WINDOW_BYTES))
    machines.requests.clear()
    machines.coordinator.send(control.EvaluateAverage(1, 0.0, 4, 0.0, bytes(4 * WINDOW_BYTES)))
    machines.coordinator.send(control.KillNodes([1]))
    machines.coordinator.send(control.StartNodes([0, 1], "run", states={0: str(state), 1: str(state)}))
    machines.coordinator.send(control.ToNodes([0], control.SetOnline(True)))
    on_the_way = sum(len(frame) for _, frames in machines.to_agent for frame in frames)
    assert on_the_way < WINDOW_BYTES + 2**12
    machines.exchange()
    while len(machines.requests) < 6:
        machines.coordinator.advance()
        machines.deliver()
    kinds = [type(request) for request in machines.requests]
    assert kinds[0] is control.KillNodes
    kinds.remove(control.EvaluateAverage)
    states = [protocol.NodeState, protocol.NodeState]
    assert kinds == [control.KillNodes, *states, control.StartNodes, control.ToNodes]


def test_a_state_that_cannot_be_read_ends_the_run_with_an_error(machines: Machines, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the state of node 0 cannot be read"):
        machines.coordinator.send(control.StartNodes([0], "run", states={0: str(tmp_path / "absent")}))


# Agents that are lost


def fails(machines: Machines) -> None:
    machines.reports.report(protocol.AgentFailed("its disk is full"))


def sends_an_invalid_message(machines: Machines) -> None:
    machines.link.send(msgspec.msgpack.encode("invalid"))


@pytest.mark.parametrize("lose", [fails, sends_an_invalid_message])
def test_averages_that_a_lost_agent_should_evaluate_are_reported_as_failed(
    machines: Machines, lose: Callable[[Machines], None]
) -> None:
    request = control.EvaluateAverage(3, 0.0, 4, 0.0, bytes(4 * PARAMETERS))
    machines.coordinator.send(request)
    lose(machines)
    reports = machines.deliver()
    assert machines.coordinator.is_lost
    assert control.AverageEvaluated(3, 1) in reports
    assert [report.node for report in reports if isinstance(report, control.NodeExited)] == [0, 1, 2, 3]
    machines.coordinator.send(msgspec.structs.replace(request, round=4))
    assert list(machines.coordinator.reports()) == [control.AverageEvaluated(4, 1)]
    assert machines.coordinator.collected, "its files are not waited for"
    machines.link.beat(0.0)
    machines.deliver_to_coordinator()
    assert protocol.Close("s") in [header for header, _ in machines.to_agent], "it must end its nodes"


def test_a_second_interrupt_ends_the_wait_for_agents(machines: Machines) -> None:
    machines.coordinator.collect()
    assert not machines.coordinator.collected
    machines.coordinator.kill()
    assert machines.coordinator.collected
    with pytest.raises(RunError, match="interrupted"):
        next(machines.coordinator.reports())


# A coordinator that continues the run of another one


def state(*nodes: int) -> protocol.RunReport:
    return protocol.RunReport("run", PARAMETERS, [protocol.NodeReport(n) for n in nodes], None, None, -1, 0.0, 0.0)


def continue_with_another(machines: Machines, report: protocol.RunReport) -> RemoteAgent:
    """Begin the session of another coordinator, which receives the state of the run first."""
    machines.to_home.clear()
    machines.coordinator = RemoteAgent(INFO, "t", lambda header, frames: machines.to_agent.append((header, frames)))
    machines.coordinator.continues = "s"
    machines.link.restart("t", protocol.encode(report))
    return machines.coordinator


def test_a_coordinator_acknowledges_nothing_before_it_follows_the_run(machines: Machines) -> None:
    machines.node_sends(control.NodeDone(0))
    another = continue_with_another(machines, state(0, 1, 2, 3))
    machines.link.beat(0.0)
    assert machines.deliver() == []
    another.measure_clock()
    machines.deliver()
    assert not machines.link.all_acknowledged, "a third coordinator would not receive it"
    another.take_over(AgentShare("a", "s", [0, 1, 2, 3]), machines.home, has_network=False)
    machines.link.beat(0.0)
    machines.deliver()
    assert machines.requests[-1] == protocol.Follow()
    assert messages(machines.deliver()) == [control.NodeDone(0)], "it is sent again after the first heartbeat"


def test_an_agent_cannot_report_the_nodes_of_other_agents(machines: Machines) -> None:
    another = continue_with_another(machines, state(0, 7))
    machines.deliver()
    another.take_over(AgentShare("a", "s", [0, 1, 2, 3]), machines.home, has_network=False)
    assert another.is_lost
    assert another.run_report is None


def test_files_that_wait_for_space_are_not_acknowledged(machines: Machines, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        another = continue_with_another(machines, state(0, 1, 2, 3))
        machines.deliver()
        home = RunFolder.create(disk, "home")
        another.take_over(AgentShare("a", "s", [0, 1, 2, 3]), home, has_network=False)
        filler = fill(disk)
        machines.there.node(0).write_bytes(b"x" * 2**14 + b"\n")
        for _ in range(3):
            machines.advance()
            machines.link.beat(0.0)
            another.measure_clock()
            machines.deliver()
        assert not machines.link.all_acknowledged
        filler.unlink()
        machines.exchange()
        assert home.node(0).read_bytes() == machines.there.node(0).read_bytes()
