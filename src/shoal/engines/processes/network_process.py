"""The network process: the network model of the simulation, in real time.

Nodes report every message that they send. The network process reports to senders when a message has left, and to
receivers when a message arrives; it never sees the content. It computes with the times of the model, not with the times
at which it runs, so that delays of the process do not add up. It reports an arrival as soon as the message has left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import zmq

from shoal.engines.processes import control
from shoal.engines.processes.control_server import LOOPBACK
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.sealing import KEY_WAIT_SECONDS, Seal, authenticated_sender
from shoal.engines.processes.shaper import (
    Arrival,
    Departure,
    NetworkReport,
    Registration,
    Submission,
    decode_node_report,
    encode,
    node_of,
)
from shoal.engines.processes.transport import MESSAGES_PER_TURN, bind_to_any_port
from shoal.environment.faults import FaultEvent
from shoal.environment.network.model import Delivery, DeliveryUpdate, EnvironmentEvent, NetworkModel
from shoal.environment.network.network import AvailabilityChange
from shoal.errors import MessageError
from shoal.experiment.setup import Setup
from shoal.types import NodeId

MAX_POLL_SECONDS = 1.0
MAX_REPORT_BYTES = 2**16
"""Reports of nodes take about fifty bytes, and ZeroMQ's handshake a few hundred."""
COUNT_INTERVAL = 0.5
"""Seconds between two reports of unauthenticated connections to the coordinator."""
ANNOUNCE_SECONDS = 0.02
"""Time until receivers learn of messages in transit. Most messages have left by then, and one report covers both facts;
the others are announced together."""
MIN_SEND_SECONDS = 1e-5
"""No message leaves faster."""
SUBMISSIONS_PER_TURN = 64 * MESSAGES_PER_TURN
"""Reports that are read before the model advances, even in a flood. More than a thousand nodes may send at once: what
is left for the next turn is late in the model."""
COORDINATOR_FAULTS = frozenset({"crash", "restart", "join", "raise", "hang"})
"""Faults that the coordinator injects into nodes, and reports when they have happened."""


ReportsByNode: TypeAlias = dict[NodeId, dict[tuple[NodeId | None, int], NetworkReport]]
"""Reports to send to each node: of its own messages by (None, ticket), of others' messages by (sender, ticket). A later
report replaces an earlier one of the same message."""


class Timetable:
    """Computes when the messages of nodes leave and arrive, at the times of the network model. Reads no clock.

    Times are seconds of the run, except in reports from and to nodes, which use the coordinator's monotonic clock.
    """

    def __init__(
        self, network_model: NetworkModel, events: Iterator[EnvironmentEvent], clock_error: float = 0.0
    ) -> None:
        """`clock_error` is how many seconds the clocks of nodes may differ from this machine's."""
        self._network_model = network_model
        self._clock_error = clock_error
        self._events = events
        self._next: EnvironmentEvent | None = None
        self.epoch = math.inf
        """When the run began, on the coordinator's monotonic clock: time 0 of the network model."""
        self.now = 0.0
        """The time up to which the network model has advanced."""
        self._rates: dict[NodeId, float] = {}
        """Bytes per second at which each node's last message left."""
        self._in_transit: ReportsByNode = {}
        """Reports that messages are in transit, as far as their receivers do not have them yet."""
        self._announce_at = math.inf

    def begin(self, epoch: float) -> None:
        self.epoch = epoch
        self._next = next(self._events, None)

    def next_time(self) -> float:
        """When the next event happens, if no node reports anything."""
        due = min(self._network_model.next_time(), self._announce_at)
        return due if self._next is None else min(due, self._next.time)

    def is_plausible(self, report: Registration | Submission, now: float) -> bool:
        """Whether the time of `report` lies in the run, and not after `now`, which is read afterwards.

        The network model never goes back in time: after one report from the future, all nodes would wait until then.
        """
        return self.epoch - self._clock_error <= report.since <= now + self._clock_error

    def submit(self, sender: NodeId, submission: Submission, reports: ReportsByNode) -> None:
        """Advance to the time of `submission`, and send its message.

        If the submission is handled late, the bytes that the sender could have sent in the meantime, at the rate of its
        last message, count as sent. The receiver soon learns that the message is in transit: it keeps unannounced
        messages only within its budget.
        """
        since = max(0.0, submission.since - self.epoch)
        self.catch_up(since, reports)
        self.now = max(self.now, since)
        ahead = (self.now - since) * self._rates.get(sender, 0.0) if submission.waits else 0.0
        size = max(0, submission.size - int(ahead))
        self._network_model.send(self.now, Delivery(sender, submission.to, size, submission))
        if not self._in_transit:
            self._announce_at = self.now + ANNOUNCE_SECONDS
        arrival = Arrival(sender, submission.ticket, math.inf)
        self._in_transit.setdefault(submission.to, {})[sender, submission.ticket] = arrival

    def catch_up(self, now: float, reports: ReportsByNode) -> None:
        """Advance the network model to `now`, and apply each event at its time."""
        while self._next is not None and self._next.time <= now:
            at = max(self.now, self._next.time)
            self._report(self._network_model.advance(at), reports)
            if not (isinstance(self._next, FaultEvent) and self._next.kind in COORDINATOR_FAULTS):
                self._network_model.apply_event(at, self._next)
            self.now = at
            self._next = next(self._events, None)  # only one: the coordinator's events may be endless
        while (due := self._network_model.next_time()) <= now:
            self._report(self._network_model.advance(max(due, self.now)), reports)
            self.now = max(due, self.now)
        if self._announce_at <= now:
            for node, arrivals in self._in_transit.items():
                if arrivals:
                    reports.setdefault(node, {}).update(arrivals)
            self._in_transit, self._announce_at = {}, math.inf

    def set_online(self, node: NodeId, online: bool, now: float) -> None:
        self.now = max(self.now, now)
        self._network_model.apply_event(self.now, AvailabilityChange(self.now, node, online))

    def _report(self, updates: list[DeliveryUpdate], reports: ReportsByNode) -> None:
        for at, status, delivery in updates:
            submission: Submission = delivery.content
            ticket, key = submission.ticket, (delivery.sender, submission.ticket)
            at += self.epoch
            if status == "sent":
                if submission.waits:
                    self._rates[delivery.sender] = submission.size / max(at - submission.since, MIN_SEND_SECONDS)
                    reports.setdefault(delivery.sender, {})[None, ticket] = Departure(ticket, at, True)
            elif status in ("in_transit", "lost"):
                if status == "lost" and submission.waits and not delivery.sent:
                    reports.setdefault(delivery.sender, {})[None, ticket] = Departure(ticket, at, False)
                arrival_time = delivery.arrival_time + self.epoch if status == "in_transit" else None
                reports.setdefault(delivery.receiver, {})[key] = Arrival(delivery.sender, ticket, arrival_time)
                self._in_transit.get(delivery.receiver, {}).pop(key, None)


class NodeReports:
    """The socket on which nodes report their messages, and are sent what becomes of them."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        nodes: int,
        run: str,
        timetable: Timetable,
        seal: Seal | None,
        reject: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`run` is the run's secret identifier. `reject` is called with the reason for every report without it, and
        for every report that did not come over a sealed link."""
        self._socket = socket
        self._count = nodes
        self._run = run
        self._timetable = timetable
        self._seal = seal
        self._reject = reject
        self._monotonic = monotonic
        self.registered: dict[NodeId, float] = {}
        """The nodes that listen, and since when."""
        self._identities: dict[NodeId, bytes] = {}
        """The ZeroMQ identities of the nodes that listen."""

    def read(self) -> list[tuple[NodeId, Submission]]:
        """Read what has arrived, and return the messages that nodes have sent, in order of time."""
        submissions = []
        for _ in range(SUBMISSIONS_PER_TURN):
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                sender = node_of(identity.bytes, self._run)
                if self._seal is not None and authenticated_sender(frame) != str(sender):
                    raise MessageError(f"{authenticated_sender(frame)!r} sent a report in the name of node {sender}")
                report = decode_node_report(frame.buffer)
            except zmq.Again:
                break
            except MessageError as error:
                self._reject(str(error))
                continue
            except control.DECODE_ERRORS:
                continue  # not a report of a node
            if not 0 <= sender < self._count or not self._timetable.is_plausible(report, self._monotonic()):
                continue
            if isinstance(report, Registration):
                self.registered[sender], self._identities[sender] = report.since, identity.bytes
            elif 0 <= report.to < self._count:
                submissions.append((sender, report))
        submissions.sort(key=lambda sent: sent[1].since)
        return submissions

    def send(self, node: NodeId, reports: list[NetworkReport]) -> None:
        self._socket.send_multipart([self._identities[node], encode(reports)])

    def mark_failed(self, node: NodeId, at: float) -> None:
        """Send nothing to a node that failed, unless it has registered again since."""
        if self.registered.get(node, math.inf) < at:
            del self.registered[node]


class NetworkProcess:
    """Runs until the coordinator finishes the run; the zygote ends the process."""

    def __init__(self, setup: Setup, start: control.StartNodes, pair: KeyPair | None = None) -> None:
        """`pair` is the key pair of the process, where links are sealed."""
        network_model = setup.environment.network_model()
        assert network_model is not None
        network_model.load()
        self._timetable = Timetable(network_model, setup.environment.events(), start.clock_error)
        self._failed: set[NodeId] = set()
        self._unsent: ReportsByNode = {}
        """Reports for nodes that do not listen yet."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context = context
        self._run = start.run
        self._unauthenticated = self._reported = 0
        self._last_unauthenticated = ""
        self._report_at = self._heartbeat_at = 0.0
        self._heartbeat_interval = setup.experiment.processes.heartbeat_interval
        self._seal = None if pair is None else Seal(context, pair, self._count, time.monotonic, math.inf)
        self._clock_offset = start.clock_offset
        self._socket = self._listen(start.host or LOOPBACK)
        self._nodes = NodeReports(
            self._socket, setup.experiment.size, start.run, self._timetable, self._seal, self._count, self._monotonic
        )
        self._link = context.socket(zmq.DEALER)
        self._link.setsockopt(zmq.LINGER, 1000)
        if self._seal is not None:
            self._seal.secure_client(self._link, start.control_key)
        self._link.connect(start.control_endpoint)
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        endpoint = f"tcp://{start.announce or start.host or LOOPBACK}:{bound.rpartition(':')[2]}"
        self._link.send(control.encode(control.NetworkListening(start.run, endpoint)))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._link, zmq.POLLIN)
        for socket in () if self._seal is None else self._seal.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def serve(self) -> int:
        """Serve nodes until the run is over, and return the exit code."""
        while True:
            self._wait()
            # A restarted node reports only after the coordinator has announced it: read the nodes' reports first, and
            # the coordinator's messages, which know more, second.
            submissions = self._nodes.read() if self._timetable.epoch < math.inf else []
            if not self._handle_control_messages():
                self._close()
                return 0
            if self._seal is not None:
                self._seal.answer_pending()
            self._report_unauthenticated()
            self._send_heartbeat()
            if self._timetable.epoch == math.inf:
                continue  # nodes that started earlier wait until this process starts
            reports, self._unsent = self._unsent, {}
            for sender, submission in submissions:
                self._timetable.submit(sender, submission, reports)
            self._timetable.catch_up(self._now(), reports)
            for node, own in reports.items():
                if node in self._nodes.registered:
                    self._nodes.send(node, list(own.values()))
                elif node not in self._failed:
                    self._unsent[node] = own

    def _listen(self, host: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a node that connects again keeps its identity
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, MESSAGES_PER_TURN)  # per peer; further messages wait, none is lost
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPORT_BYTES)
        socket.setsockopt(zmq.BACKLOG, 4096)
        socket.setsockopt(zmq.LINGER, 0)
        if self._seal is not None:
            self._seal.secure_server(socket)
        bind_to_any_port(socket, host)
        return socket

    def _monotonic(self) -> float:
        """The coordinator's monotonic clock, as far as it is known on this machine."""
        return time.monotonic() + self._clock_offset

    def _now(self) -> float:
        return self._monotonic() - self._timetable.epoch

    def _wait(self) -> None:
        """Wait until a message arrives, or the model's next event.

        ZeroMQ waits only for whole milliseconds, so the rest is slept. A message that arrives in this time is late by
        less than a millisecond, and `Timetable.submit` compensates for it.
        """
        if self._timetable.epoch == math.inf:
            self._link.poll(int(MAX_POLL_SECONDS * 1000))
            return
        due = self._timetable.next_time()
        left = min(due - self._now(), MAX_POLL_SECONDS)
        if left <= 0:
            return
        if not self._poller.poll(int(left * 1000)) and left < MAX_POLL_SECONDS:
            rest = due - self._now()
            if 0 < rest < 0.001:
                time.sleep(rest)

    def _handle_control_messages(self) -> bool:
        """Handle the coordinator's messages. Returns False when the run is over."""
        while True:
            try:
                message = control.decode_to_node(self._link.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            if isinstance(message, control.Start):
                if self._seal is not None:
                    self._seal.allow_all({str(node): key for node, key in enumerate(message.public_keys)})
                    self._seal.key_wait = KEY_WAIT_SECONDS
                self._timetable.begin(message.epoch)
                for node in message.failed_nodes:  # before the checkpoint of a resumed run
                    self._failed.add(node)
                    self._timetable.set_online(node, online=False, now=self._timetable.now)
            elif isinstance(message, control.PeerFailed) and message.node not in self._failed:
                self._failed.add(message.node)
                self._nodes.mark_failed(message.node, message.time)
                self._timetable.set_online(message.node, online=False, now=self._now())
            elif isinstance(message, control.PeerRestarted) and message.node in self._failed:
                if self._seal is not None and message.key is not None:
                    self._seal.allow(str(message.node), message.key)
                self._failed.discard(message.node)
                self._timetable.set_online(message.node, online=True, now=self._now())
            elif isinstance(message, control.Finish):
                return False

    def _send_heartbeat(self) -> None:
        if time.monotonic() > self._heartbeat_at:
            self._heartbeat_at = time.monotonic() + self._heartbeat_interval
            self._link.send(control.encode(control.NetworkHeartbeat()))

    def _count(self, description: str) -> None:
        """Count an unauthenticated connection."""
        self._unauthenticated += 1
        self._last_unauthenticated = description

    def _report_unauthenticated(self, final: bool = False) -> None:
        """Report the count of unauthenticated connections, at most every `COUNT_INTERVAL`.

        A flood of them must not occupy the coordinator. The final report is always sent: the coordinator waits for it.
        """
        if final or (self._unauthenticated > self._reported and time.monotonic() > self._report_at):
            self._reported, self._report_at = self._unauthenticated, time.monotonic() + COUNT_INTERVAL
            count = control.UnauthenticatedConnections(
                self._run, self._unauthenticated, self._last_unauthenticated, final
            )
            self._link.send(control.encode(count))

    def _close(self) -> None:
        if self._seal is not None:
            self._seal.answer_pending()
            self._seal.count_remaining()
            self._report_unauthenticated(final=True)
            self._seal.close()
        self._socket.close()
        self._link.close()
        self._context.term()  # waits until the final report is sent
