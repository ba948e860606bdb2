"""The network's own process: the model that the simulation uses, in real time.

Nodes tell it of every message that they send; it tells senders when a message has left, and receivers when one is
due. It sees no content. It works out what happens at the times of the model, not at those at which it gets to it, so
that being late now and then does not add up; and it says when a message arrives as soon as it has left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TypeAlias

import zmq

from shoal.engines.processes import control
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
)
from shoal.engines.processes.transport import MESSAGES_PER_TURN
from shoal.environment.faults import FaultEvent
from shoal.environment.network.model import Delivery, DeliveryUpdate, EnvironmentEvent, NetworkModel
from shoal.environment.network.network import AvailabilityChange
from shoal.errors import MessageError
from shoal.experiment.setup import Setup
from shoal.types import NodeId

LONGEST_POLL = 1.0
LONGEST_WORDS = 2**16
"""Bytes: what nodes say here takes some fifty, and what ZeroMQ says to greet them some hundreds."""
REPORT_EVERY = 0.5
TELL_AFTER = 0.02
"""Seconds until receivers are told of messages that are under way. Most have left by then, and one word does for both;
for the others there is one for many."""
SHORTEST = 1e-5
"""Seconds: no message leaves faster."""
SUBMISSIONS_PER_TURN = 64 * MESSAGES_PER_TURN
"""What is taken in before the model goes on, even in a flood. More than a thousand nodes send at a time: what is left
for the next turn is late by the model."""
BY_THE_SUPERVISOR = frozenset({"crash", "restart", "raise", "hang"})
"""What the supervisor does to nodes, and says when it is done."""


ReportsByNode: TypeAlias = dict[NodeId, dict[tuple[NodeId | None, int], NetworkReport]]
"""What is still to be said to each node: of its own messages by ticket, of others' by sender and ticket. What is known
later takes the place of what was known before."""


class Timetable:
    """What becomes of the messages that nodes post, worked out at the times of the model. Reads no clock.

    Times are seconds of the run, but for those that nodes say and are told, which are the machine's.
    """

    def __init__(self, network_model: NetworkModel, events: Iterator[EnvironmentEvent]) -> None:
        self._carrier = network_model
        self._events = events
        self._next: EnvironmentEvent | None = None
        self.epoch = math.inf
        """When the run began, on the machine's monotonic clock. The carrier's clock begins there."""
        self.now = 0.0
        """How far the carrier is."""
        self._paces: dict[NodeId, float] = {}
        """Bytes per second at which each node's last message left it."""
        self._set_out: ReportsByNode = {}
        """That messages are on their way, as far as their receivers have not been told yet."""
        self._tell_at = math.inf

    def begin(self, epoch: float) -> None:
        self.epoch = epoch
        self._next = next(self._events, None)

    def next_time(self) -> float:
        """When something happens next, if nobody says anything."""
        due = min(self._carrier.next_time(), self._tell_at)
        return due if self._next is None else min(due, self._next.time)

    def is_plausible(self, said: Registration | Submission, now: float) -> bool:
        """Whether that can have been at the time that is said. `now` is the machine's, read after it came.

        The carrier never goes back: one word from the future, and it would have to wait until then with all others.
        """
        return self.epoch <= said.since <= now

    def submit(self, sender: NodeId, post: Submission, told: ReportsByNode) -> None:
        """Let happen what happened before, and then this.

        What should have been under way for a moment has got as far as the sender's last message would have. The
        receiver is soon told that a message is on its way: it keeps for long only what it is told of.
        """
        since = post.since - self.epoch
        self.catch_up(since, told)
        self.now = max(self.now, since)
        ahead = (self.now - since) * self._paces.get(sender, 0.0) if post.waits else 0.0
        self._carrier.send(self.now, Delivery(sender, post.to, max(0, post.size - int(ahead)), post))
        if not self._set_out:
            self._tell_at = self.now + TELL_AFTER
        self._set_out.setdefault(post.to, {})[sender, post.ticket] = Arrival(sender, post.ticket, math.inf)

    def catch_up(self, now: float, told: ReportsByNode) -> None:
        """Let happen what happens up to `now`, each at its time."""
        while self._next is not None and self._next.time <= now:
            at = max(self.now, self._next.time)
            self._tell(self._carrier.advance(at), told)
            if not (isinstance(self._next, FaultEvent) and self._next.kind in BY_THE_SUPERVISOR):
                self._carrier.apply_event(at, self._next)
            self.now = at
            self._next = next(self._events, None)  # not further: of what is the supervisor's there may be no end
        while (due := self._carrier.next_time()) <= now:
            self._tell(self._carrier.advance(max(due, self.now)), told)
            self.now = max(due, self.now)
        if self._tell_at <= now:
            for node, words in self._set_out.items():
                if words:
                    told.setdefault(node, {}).update(words)
            self._set_out, self._tell_at = {}, math.inf

    def set_online(self, node: NodeId, online: bool, now: float) -> None:
        self.now = max(self.now, now)
        self._carrier.apply_event(self.now, AvailabilityChange(self.now, node, online))

    def _tell(self, news: list[DeliveryUpdate], told: ReportsByNode) -> None:
        for at, fate, delivery in news:
            post: Submission = delivery.content
            at += self.epoch
            if fate == "sent":
                if post.waits:
                    self._paces[delivery.sender] = post.size / max(at - post.since, SHORTEST)
                    told.setdefault(delivery.sender, {})[None, post.ticket] = Departure(post.ticket, at, True)
            elif fate in ("in_transit", "lost"):
                if fate == "lost" and post.waits and not delivery.sent:
                    told.setdefault(delivery.sender, {})[None, post.ticket] = Departure(post.ticket, at, False)
                due = Arrival(
                    delivery.sender, post.ticket, delivery.arrival_time + self.epoch if fate == "in_transit" else None
                )
                told.setdefault(delivery.receiver, {})[delivery.sender, post.ticket] = due
                self._set_out.get(delivery.receiver, {}).pop((delivery.sender, post.ticket), None)


class NetworkProcess:
    """Lives as long as the run does: the zygote ends it."""

    def __init__(self, setup: Setup, start: control.StartNodes, pair: KeyPair | None = None) -> None:
        """With a key pair where links are sealed."""
        network_model = setup.environment.network_model()
        assert network_model is not None
        network_model.load()
        self._size = setup.experiment.size
        self._timetable = Timetable(network_model, setup.environment.events())
        self._dead: set[NodeId] = set()
        self._here: dict[NodeId, float] = {}
        """Those that listen, and since when."""
        self._untold: ReportsByNode = {}
        """What those are told first that do not listen yet."""
        self._routes: dict[NodeId, bytes] = {}
        """By which name on the socket those that listen are reached."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context = context
        self._run = start.run
        self._strangers = self._reported = 0
        self._stranger = ""
        self._report_at = 0.0
        self._seal = None if pair is None else Seal(context, pair, self._turn_away, time.monotonic, math.inf)
        self._nodes = context.socket(zmq.ROUTER)
        self._nodes.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a node that connects again keeps its name
        self._nodes.setsockopt(zmq.SNDHWM, 0)
        self._nodes.setsockopt(zmq.RCVHWM, MESSAGES_PER_TURN)  # per peer; further messages wait, none is lost
        self._nodes.setsockopt(zmq.MAXMSGSIZE, LONGEST_WORDS)
        self._nodes.setsockopt(zmq.BACKLOG, 4096)
        self._nodes.setsockopt(zmq.LINGER, 0)
        if self._seal is not None:
            self._seal.secure_server(self._nodes)
        self._nodes.bind("tcp://127.0.0.1:*")
        self._line = context.socket(zmq.DEALER)
        self._line.setsockopt(zmq.LINGER, 1000)
        if self._seal is not None:
            self._seal.secure_client(self._line, start.coordinator_key)
        self._line.connect(start.coordinator)
        endpoint = self._nodes.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        self._line.send(control.encode(control.NetworkListening(start.run, endpoint)))
        self._poller = zmq.Poller()
        self._poller.register(self._nodes, zmq.POLLIN)
        self._poller.register(self._line, zmq.POLLIN)
        for socket in () if self._seal is None else self._seal.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def serve(self) -> int:
        while True:
            self._wait()
            # A node speaks after the supervisor has said that it is there: whoever is heard first knows less.
            posts = self._posts() if self._timetable.epoch < math.inf else []
            if not self._hear_supervisor():
                self._close()
                return 0
            if self._seal is not None:
                self._seal.answer_pending()
                self._report_strangers()
            if self._timetable.epoch == math.inf:
                continue  # what comes from nodes that know already that the run has begun waits until this one does
            told, self._untold = self._untold, {}
            for sender, post in posts:
                self._timetable.submit(sender, post, told)
            self._timetable.catch_up(self._clock(), told)
            for node, said in told.items():
                if node in self._here:
                    self._nodes.send_multipart([self._routes[node], encode(list(said.values()))])
                elif node not in self._dead:
                    self._untold[node] = said

    def _clock(self) -> float:
        return time.monotonic() - self._timetable.epoch

    def _wait(self) -> None:
        """Until something has come, or the model has something to do. ZeroMQ waits for whole milliseconds only."""
        if self._timetable.epoch == math.inf:
            self._line.poll(int(LONGEST_POLL * 1000))
            return
        due = self._timetable.next_time()
        left = min(due - self._clock(), LONGEST_POLL)
        if left <= 0:
            return
        if not self._poller.poll(int(left * 1000)) and left < LONGEST_POLL:
            rest = due - self._clock()
            if 0 < rest < 0.001:
                time.sleep(rest)

    def _posts(self) -> list[tuple[NodeId, Submission]]:
        """What has been sent, in order of time."""
        posts = []
        for _ in range(SUBMISSIONS_PER_TURN):
            try:
                name, frame = self._nodes.recv_multipart(zmq.NOBLOCK, copy=False)
                # Anybody may choose any name for itself, and where links are sealed it is the key that counts.
                sender = int(name.bytes[1:] if self._seal is None else authenticated_sender(frame))
                said = decode_node_report(frame.buffer)
            except zmq.Again:
                break
            except MessageError as error:
                self._turn_away(str(error))
                continue
            except control.DECODE_ERRORS:
                continue  # a stranger on the port
            if not 0 <= sender < self._size or not self._timetable.is_plausible(said, time.monotonic()):
                continue
            if isinstance(said, Registration):
                self._here[sender], self._routes[sender] = said.since, name.bytes
            elif 0 <= said.to < self._size:
                posts.append((sender, said))
        posts.sort(key=lambda sent: sent[1].since)
        return posts

    def _hear_supervisor(self) -> bool:
        """False when the run is over."""
        while True:
            try:
                said = control.decode_to_node(self._line.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            if isinstance(said, control.Start):
                if self._seal is not None:
                    self._seal.allow_all({str(node): key for node, key in enumerate(said.public_keys)})
                    self._seal.key_wait = KEY_WAIT_SECONDS
                self._timetable.begin(said.epoch)
            elif isinstance(said, control.PeerFailed) and said.node not in self._dead:
                self._dead.add(said.node)
                if self._here.get(said.node, math.inf) < said.time:  # else it is back already
                    del self._here[said.node]
                self._timetable.set_online(said.node, online=False, now=self._clock())
            elif isinstance(said, control.PeerRestarted) and said.node in self._dead:
                if self._seal is not None and said.key is not None:
                    self._seal.allow(str(said.node), said.key)
                self._dead.discard(said.node)
                self._timetable.set_online(said.node, online=True, now=self._clock())
            elif isinstance(said, control.Finish):
                return False

    def _turn_away(self, who: str) -> None:
        self._strangers += 1
        self._stranger = who

    def _report_strangers(self, over: bool = False) -> None:
        """Not of each, lest many of them keep the supervisor busy; but when it is over, whether or not there are more:
        the supervisor waits for that."""
        if over or (self._strangers > self._reported and time.monotonic() > self._report_at):
            self._reported, self._report_at = self._strangers, time.monotonic() + REPORT_EVERY
            self._line.send(
                control.encode(control.UnauthenticatedConnections(self._run, self._strangers, self._stranger, over))
            )

    def _close(self) -> None:
        if self._seal is not None:
            self._seal.answer_pending()
            self._seal.count_remaining()
            self._report_strangers(over=True)
            self._seal.close()
        self._nodes.close()
        self._line.close()
        self._context.term()  # waits until that is said
