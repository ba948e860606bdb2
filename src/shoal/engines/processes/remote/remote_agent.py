"""An agent on another machine, seen from the coordinator."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.agent import Report
from shoal.engines.processes.control_server import ControlMessage
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.files import FileReceiver
from shoal.engines.processes.remote.link import Beat, ClockEstimate, Data, Link, Missing
from shoal.engines.processes.remote.relay import RelayServer
from shoal.engines.processes.watch_clock import WatchClock
from shoal.errors import DiskFullError, MessageError, RunError
from shoal.results.checkpoints import SavedNode
from shoal.results.coordinator_file import AgentShare
from shoal.results.record_writer import RETRY_SECONDS
from shoal.results.records import RunFolder
from shoal.types import NodeId, Params

NETWORK: NodeId = -1
"""The network process, at the relay."""
BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
MIN_TIMEOUT_SECONDS = 20.0
"""An agent is not lost before it has sent nothing for so long."""
TIMEOUT_FACTOR = 5.0
"""An agent is lost after so many times the longest time between two of its messages."""
MAX_TIMEOUT_SECONDS = 65.0
REQUESTS = "requests"
"""The stream of requests to the agent, which stay in order."""
AVERAGES = "averages"
"""The stream of averaged models. Requests do not wait for them."""


class RemoteAgent:
    """Sends requests to one agent over a link, and receives its reports and files."""

    def __init__(
        self, info: protocol.AgentInfo, session: str, transmit: Callable[[protocol.Header, list[bytes]], None]
    ) -> None:
        """`transmit` sends to the agent, or loses what it cannot send."""
        self.info = info
        self.name = info.name
        """Its name in the run. It has a number at the end if another agent has the same name."""
        self.clock = ClockEstimate()
        self.relay: RelayServer | None = None
        """The relay through which other machines reach the nodes of this agent; None: they reach them directly."""
        self.lost: str | None = None
        """Why the agent is lost; None while it is not."""
        self._all_files_arrived = False
        self._link = Link(session, transmit)
        self._transmit = transmit
        self._reports: deque[Report] = deque()
        self._files: FileReceiver | None = None
        self._nodes: set[NodeId] = set()
        """Nodes that were started here and have not exited."""
        self._started: set[NodeId] = set()
        """All nodes that were ever started here."""
        self._parameters = 0
        """Of the model."""
        self.ends_with_coordinator = False
        """Whether the agent ends when this process does."""
        self.continues = ""
        """The session of an earlier coordinator whose run the agent continues in this one."""
        self.run_report: protocol.RunReport | None = None
        """The state of that run, once it has arrived."""
        self._follows = False
        """Whether this coordinator follows that run."""
        self._killed = False
        self._has_network = False
        self._records_before: dict[NodeId, int] = {}
        """The bytes of each node's records when the run began here: 0, except in a resumed run."""
        self._run = ""
        self._rejected = 0
        self._evaluating: set[int] = set()
        self._disk_full = False
        self._beat_at = self._write_at = 0.0
        self._watch = WatchClock()
        self._last_message = 0.0
        self._longest_pause = 0.0

    @property
    def session(self) -> str:
        return self._link.session

    def begin(self, begin: protocol.BeginRun, folder: RunFolder) -> None:
        """Have the agent prepare a run, whose files are written into `folder`."""
        self._run = begin.run
        self._has_network = begin.with_network
        self._files = FileReceiver(folder)
        self._records_before = {
            node: path.stat().st_size for node in range(begin.nodes) if (path := folder.node(node)).exists()
        }
        self._link.send(protocol.encode(begin), stream=REQUESTS)

    def take_over(self, share: AgentShare, folder: RunFolder, has_network: bool) -> None:
        """Continue the agent's share of the run of an earlier coordinator."""
        self._started = set(share.nodes)
        self._has_network = has_network
        self._records_before = {int(node): size for node, size in share.records.items()}
        self._files = FileReceiver(folder, self._records_before)
        report = self.run_report
        if report is None:
            self.lost = "it does not have this run any longer"
            return
        for entry in report.nodes:
            if entry.node not in self._started or any(saved.node != entry.node for saved in entry.saved):
                self.run_report, self.lost = None, "it sent the state of a node that it does not run"
                return
            entry.saved = [self._with_earlier_records(saved) for saved in entry.saved]
        self._run, self._parameters = report.run, report.parameters
        self._nodes = {entry.node for entry in report.nodes if entry.exit_code is None}
        self._follows = True
        self._link.send(protocol.encode(protocol.Follow()), stream=REQUESTS)

    def share(self, nodes: list[NodeId]) -> AgentShare | None:
        if self.relay is not None or self.ends_with_coordinator:
            return None
        records = {str(node): size for node, size in self._records_before.items() if node in nodes}
        return AgentShare(self.name, self.session, nodes, records)

    # The interface of an agent

    def send(self, request: control.ToAgent) -> None:
        if self.lost is not None:
            self._report_undone(request)
            return
        if isinstance(request, control.StartNodes):
            self._nodes.update(request.nodes)
            self._started.update(request.nodes)
            if request.states:
                self._link.send_later(_states(request), REQUESTS)
                request = msgspec.structs.replace(request, states={})
        elif isinstance(request, control.EvaluateAverage):
            self._evaluating.add(request.round)
        stream = AVERAGES if isinstance(request, control.EvaluateAverage) else REQUESTS
        self._link.send(protocol.encode(request), stream=stream)
        self._link.pump()

    def open_tunnel(self, node: NodeId, token: str) -> None:
        """Have a peer connected to a node that is relayed."""
        if self.relay is not None and self.lost is None:
            self._link.send(protocol.encode(protocol.OpenTunnel(token, node, self.relay.tunnel_port)))

    def runs(self, node: NodeId) -> bool:
        """Whether the agent runs this process: a node, or the network process."""
        return node in self._nodes or (node == NETWORK and self._has_network)

    def _report_undone(self, request: control.ToAgent) -> None:
        """Report that the lost agent does not do what it is asked for."""
        if isinstance(request, control.StartNodes):
            for node in request.nodes:
                self._report_failed(node)
        elif isinstance(request, control.EvaluateAverage):
            self._reports.append(control.AverageEvaluated(request.round, 1))

    def _report_failed(self, node: NodeId) -> None:
        self._reports.append(ControlMessage(control.NodeFailed(node, self._run, f"its agent {self.name!r} is lost")))
        self._reports.append(control.NodeExited(node, 1))

    def collect(self) -> None:
        """Ask for the rest of the run's files."""
        if self.lost is None:
            self._link.send(protocol.encode(protocol.Collect()), stream=REQUESTS)

    @property
    def collected(self) -> bool:
        return (self._all_files_arrived and not self._disk_full) or self._killed or self.lost is not None

    def receive(self, header: protocol.Header, frames: list[bytes]) -> None:
        """Handle what has arrived from the agent."""
        if isinstance(header, protocol.NoSession) and header.session == self.session:
            self._lose("it was restarted, or has another run")
        if not isinstance(header, Data | Beat | Missing) or header.session != self.session:
            return
        if self.lost is not None:
            self.close()  # its nodes count as failed: it must end them
            return
        if self._nodes:  # before, it imports and loads
            self._longest_pause = max(self._longest_pause, self._watch.seconds - self._last_message)
        self._last_message = self._watch.seconds
        if isinstance(header, Beat) and header.echo:
            self.clock.add(header.echo, header.time, time.monotonic())
        if self.run_report is not None and not self._follows:
            return  # messages are sent again, when this coordinator continues the run, or to the next one
        try:
            content = self._link.receive(header, frames)
            if content is not None:
                self._receive_report(protocol.decode_from_remote(content[0]), content[1:])
                self._link.handled()
        except (MessageError, IndexError, *control.DECODE_ERRORS) as error:
            self._lose(f"it sent an invalid message: {error}")

    def _receive_report(self, report: protocol.FromRemote, rest: list[bytes]) -> None:
        if not self.continues or self.run_report is not None:
            self._handle(report, rest)
        elif isinstance(report, protocol.RunReport):
            self.run_report = report
        else:
            raise MessageError("a report before the state of its run")

    def advance(self) -> None:
        """Send a heartbeat if one is due, and note if the agent has sent nothing for too long."""
        self._write_waiting()
        now = time.monotonic()
        self._watch.tick(now)
        if self.lost is None and now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self._link.beat(now)
        if self.lost is None:
            self._link.pump()
        timeout = min(MAX_TIMEOUT_SECONDS, max(MIN_TIMEOUT_SECONDS, TIMEOUT_FACTOR * self._longest_pause))
        if not self._nodes:
            timeout = MAX_TIMEOUT_SECONDS  # it imports and loads, which takes long on a loaded machine
        if self._watch.seconds - self._last_message > timeout:
            self._lose(f"it has sent nothing for {timeout:.0f} s: its machine, its process or the network has failed")

    def measure_clock(self) -> None:
        """Send a heartbeat, whose answer measures the difference of the clocks."""
        self._link.beat(time.monotonic())

    def reports(self) -> Iterator[Report]:
        if self._killed:
            raise RunError("the run was interrupted")
        while self._reports:
            yield self._reports.popleft()

    def register(self, poller: zmq.Poller) -> None:
        """Nothing: the channel is registered once for all agents."""

    @property
    def received_bytes(self) -> int:
        return self._link.received_bytes

    @property
    def is_lost(self) -> bool:
        return self.lost is not None

    @property
    def is_stopped(self) -> bool:
        return False  # a stopped agent sends no heartbeats

    @property
    def waits_for_space(self) -> bool:
        return self._disk_full and self.lost is None

    @property
    def unauthenticated_connections(self) -> int:
        return self._rejected

    def count_remaining(self) -> None:
        """Nothing: the agent has done it when its files were collected."""

    def kill(self) -> None:
        self._killed = True  # `close` ends the session: a signal handler must not send

    def close(self) -> None:
        """End the session. The agent kills its nodes."""
        self._transmit(protocol.Close(self.session), [])

    def _handle(self, report: protocol.FromRemote, rest: list[bytes]) -> None:
        if isinstance(report, protocol.FromNode):
            if not self._may_send(report.message):
                raise MessageError("a message in the name of a node that it does not run")
            params = self._read_model(report.message, rest)
            self._reports.append(ControlMessage(self._at_home(self._reachable(report.message)), params))
        elif isinstance(report, protocol.FileData):
            if self._files is None or len(rest) != 1:
                raise MessageError("a chunk of a file without content")
            self._files.write(report, rest[0])
            self._note_space()
        elif isinstance(report, protocol.RejectedConnections):
            self._rejected = report.count
        elif isinstance(report, protocol.Collected):
            self._all_files_arrived = True
        elif isinstance(report, protocol.AgentFailed):
            self._lose(report.reason)
        elif isinstance(report, protocol.RunReport):
            raise MessageError("the state of a run that it was not asked for")
        else:
            if isinstance(report, control.NodeExited | control.KeyAnnounced) and not self._owns(report.node):
                raise MessageError("a report of a node that it does not run")
            if isinstance(report, control.Prepared):
                self._parameters = report.parameters
            elif isinstance(report, control.NodeExited):
                self._nodes.discard(report.node)
            elif isinstance(report, control.AverageEvaluated):
                self._evaluating.discard(report.round)
            self._reports.append(report)

    def _write_waiting(self) -> None:
        """Write files that wait because the disk of this machine was full."""
        if self._files is not None and self._files.waits and time.monotonic() >= self._write_at:
            self._write_at = time.monotonic() + RETRY_SECONDS
            with contextlib.suppress(DiskFullError):  # later again
                self._files.write_waiting()
            self._note_space()
            self._link.handled()

    def _note_space(self) -> None:
        """Inform the user when the disk is full, and when it has space again."""
        assert self._files is not None
        self._link.holds = self._files.waits
        if self._files.waits != self._disk_full:
            self._disk_full = self._files.waits
            state = "wait in memory: the disk of this machine is full" if self._disk_full else "are written again"
            self._reports.append(control.Notice(f"files of agent {self.name!r} {state}"))

    def _reachable(self, message: control.FromNode) -> control.FromNode:
        """Replace the endpoint of a process that other machines reach only through the relay."""
        if self.relay is None or not isinstance(message, control.NodeListening | control.NetworkListening):
            return message
        node = message.node if isinstance(message, control.NodeListening) else NETWORK
        return msgspec.structs.replace(message, endpoint=self.relay.endpoint(node))

    def _at_home(self, message: control.FromNode) -> control.FromNode:
        """Count the records that a node wrote before the run was resumed, which are not on the agent's machine.

        A state that is not on this disk yet is no part of a checkpoint.
        """
        if not isinstance(message, control.CheckpointSaved) or message.saved is None:
            return message
        saved = message.saved
        if self._disk_full:
            return control.CheckpointFailed(message.node, saved.round, "the disk of the coordinator's machine is full")
        return msgspec.structs.replace(message, saved=self._with_earlier_records(saved))

    def _with_earlier_records(self, saved: SavedNode) -> SavedNode:
        return msgspec.structs.replace(saved, records=saved.records + self._records_before.get(saved.node, 0))

    def _may_send(self, message: control.FromNode) -> bool:
        return self._owns(None if isinstance(message, control.FromNetwork) else message.node)

    def _owns(self, node: NodeId | None) -> bool:
        """Whether the agent was asked to run this node, or, for None, the network process."""
        return self._has_network if node is None else node in self._started

    def _read_model(self, message: control.FromNode, rest: list[bytes]) -> Params | None:
        """The parameters of a `ModelSnapshot`. Raises `MessageError` if they are no model of this run."""
        sizes = [4 * self._parameters] if isinstance(message, control.ModelSnapshot) else []
        if [len(frame) for frame in rest] != sizes:
            raise MessageError("a message with parameters that are no model of this run")
        return np.frombuffer(rest[0], np.float32) if rest else None

    def _lose(self, reason: str) -> None:
        """The agent is lost: its nodes have failed, and what it was asked for will not be done."""
        if self.lost is not None:
            return
        self.lost = reason
        self._reports.append(control.Notice(f"agent {self.name!r} is lost: {reason}"))
        for node in sorted(self._nodes):
            self._report_failed(node)
        if self._has_network:
            self._reports.append(control.NetworkExited(1))
        for round in sorted(self._evaluating):
            self._reports.append(control.AverageEvaluated(round, 1))
        if not self._started:
            self._reports.append(control.StartFailed("LaunchError", reason, []))


def _states(request: control.StartNodes) -> Iterator[list[bytes]]:
    """The states with which nodes of a resumed run start, read one after another. Raises `RunError`."""
    for node in request.nodes:
        if node in request.states:
            try:
                content = Path(request.states[node]).read_bytes()
            except OSError as error:
                raise RunError(f"the state of node {node} cannot be read: {error}") from error
            yield [protocol.encode(protocol.NodeState(node)), content]
