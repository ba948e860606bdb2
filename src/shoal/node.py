"""Node: the interface between an algorithm and the rest of Shoal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any, TypeAlias, cast

import numpy as np

from shoal.errors import MessageError, NodeError
from shoal.mailbox import Filter
from shoal.message import Message, Payload
from shoal.node_activity import carries_model
from shoal.node_checkpoints import NodeCheckpoints
from shoal.node_context import CheckpointSaver, NodeContext, Observer
from shoal.node_protocols import (
    DiscoveryTopology,
    GraphPeers,
    InteractiveSharing,
    PeerDiscovery,
    Received,
    ServiceProvider,
)
from shoal.node_training import NodeTraining
from shoal.peer_timeouts import PeerTimeouts
from shoal.results.records import DIVERGED, NOT_TRAINED, Evaluation, Event, Round
from shoal.runtime import Runtime
from shoal.sharing.sharing import NodeAware, NodeInfo, Outgoing, PayloadChecker, Sharing, payload_for
from shoal.state import Generators, State, Stateful
from shoal.topologies.graph import Peers, Topology, WeightScheme
from shoal.training.trainer import DataHolder, Trainer
from shoal.traits import traits_of
from shoal.types import NodeId, Params, frozen

__all__ = [
    "MODEL",
    "RECORDED_PAYLOAD_REJECTIONS",
    "Check",
    "DiscoveryTopology",
    "GraphPeers",
    "InteractiveSharing",
    "Node",
    "PeerDiscovery",
    "Received",
    "ServiceProvider",
]

MODEL = "model"
"""The kind of messages that carry payloads of the sharing. Algorithms use other kinds for their own payloads."""

RECORDED_PAYLOAD_REJECTIONS = 1000
"""Rejected payloads that a node records one by one. Further ones are only counted, so that a peer that sends invalid
payloads cannot fill the disk."""

Check: TypeAlias = Callable[[Payload], object]
"""Raises `MessageError` if the algorithm cannot use the payload."""


class Node:
    """One participant of a run. An algorithm is a coroutine that receives a node as its only argument."""

    def __init__(
        self,
        context: NodeContext,
        *,
        params: Params,
        runtime: Runtime,
        trainer: Trainer,
        sharing: Sharing,
        observer: Observer,
        discovery: PeerDiscovery | None = None,
        saver: CheckpointSaver | None = None,
    ) -> None:
        self.context = context
        self.runtime = runtime
        self.trainer = trainer
        self.sharing = sharing
        self.mixing = context.mixing
        """The graph and weights of all nodes. Algorithms call `peers`, because peers may come from a peer sampler."""
        self.algorithm_state: State = {}
        """What the algorithm keeps between rounds beside the model. Checkpoints include it."""
        self.bytes_sent = 0
        self.messages_sent = 0
        self.rejected_count = 0
        """The number of payloads that the sharing or the algorithm rejected."""
        self.timed_out_peers: frozenset[NodeId] = frozenset()
        """The peers that the last `receive_each` got no message from before its timeout, without failed peers."""
        self.rejoin_counts: dict[NodeId, int] = {}
        """How often each failed peer has rejoined. A rejoined peer has lost its state, for example keys that were
        exchanged with it."""
        self._params = frozen(params)
        self._next_round = 0
        self._expected_from: dict[NodeId, int] = {}
        """The first round in which each rejoined peer sends."""
        self._peer_timeouts = PeerTimeouts(runtime.late_messages)
        self._rewired: tuple[Topology, WeightScheme | None] | None = None
        self.discovery: PeerDiscovery = discovery or GraphPeers(context.mixing)
        self._observer = observer
        self.checkpoints = NodeCheckpoints(saver)
        self.training = NodeTraining(trainer, context.learning_rate)
        self._generators = Generators(context.seed, context.id)
        self._check = sharing.check if isinstance(sharing, PayloadChecker) else None
        self.interactive_sharing: InteractiveSharing | None = None
        """The sharing, if it is interactive."""
        if traits_of(sharing, "sharing").interactive:
            self.interactive_sharing = cast(InteractiveSharing, sharing)
        if isinstance(sharing, NodeAware):
            data = trainer.data if isinstance(trainer, DataHolder) else None
            sharing.bind(
                NodeInfo(context.id, context.nodes, context.seed, context.shapes, data, self.rejects_non_finite)
            )
        sharing.start(self._params)

    # Identity and model

    @property
    def id(self) -> NodeId:
        return self.context.id

    @property
    def nodes(self) -> int:
        """The number of training nodes: see `NodeContext.nodes`."""
        return self.context.nodes

    @property
    def seed(self) -> int:
        """The seed of the experiment, equal on all nodes. For random draws use `rng`."""
        return self.context.seed

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the model's tensors, in their order in `params`."""
        return self.context.shapes

    @property
    def receive_timeout(self) -> float | None:
        """Seconds that a receive waits for its senders; None: no limit."""
        return self.context.receive_timeout

    @property
    def server(self) -> NodeId:
        """The service node of the experiment's algorithm."""
        if "algorithm" not in self.context.services:
            raise NodeError(f"node {self.id} has no server: the experiment's algorithm has no method `serve`")
        return self.context.services["algorithm"]

    @property
    def samples(self) -> int:
        """The number of samples that this node trains on."""
        return self.trainer.samples

    @property
    def learning_rate(self) -> float:
        """The learning rate of this node's next local step; it changes if the training has a schedule."""
        return self.training.learning_rate

    @property
    def params(self) -> Params:
        """The model: one flat float32 vector, read-only. Assign a new vector to change the model."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        if type(params) is not np.ndarray and hasattr(params, "__await__"):
            raise NodeError(f"node {self.id}: params is a {type(params).__name__}; write 'await' before the call")
        if params.shape != self._params.shape or params.dtype != np.float32:
            raise NodeError(
                f"node {self.id}: params must be a float32 vector of {self._params.size} values, "
                f"not {params.dtype} of shape {params.shape}"
            )
        self._params = frozen(params)

    # Time and computation

    def now(self) -> float:
        """Return the seconds since the start of the run: virtual in the simulation, real elsewhere."""
        return self.runtime.now()

    async def sleep(self, seconds: float) -> None:
        await self.runtime.sleep(seconds)

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        """Run `task` concurrently with the algorithm; it ends when the algorithm ends."""
        self.runtime.background(task)

    def rng(self, purpose: str) -> np.random.Generator:
        """Return this node's generator for `purpose`, the same object on every call."""
        return self._generators[purpose]

    async def train(self, params: Params, steps: int | None = None) -> Params:
        """Return a new vector: `params` after local training. `steps` None uses the experiment's number of steps."""
        trained = await self.training.train(self.runtime, params, steps)
        if self.training.newly_diverged(trained):
            self.record_event(DIVERGED, f"round {self.training.round}: the training loss is {trained.loss}")
        if trained.steps_left_out and trained.steps_left_out == self.trainer.steps(steps):
            self.record_event(NOT_TRAINED, f"round {self.training.round}: the gradients of all steps overflowed")
        return trained.params

    # Peers

    async def peers(self, round: int) -> Peers:
        """Return the neighbours in this round with their weights, from the graph or from a peer sampler."""
        return await self.discovery.peers(self, round)

    @property
    def failed_peers(self) -> Collection[NodeId]:
        """The nodes that are known to have failed."""
        return self.runtime.failed_peers()

    def mark_rejoined(self, peer: NodeId, round: int) -> None:
        """Mark the failed `peer` as running again: send to it again, and wait for its messages from `round` on."""
        self.rejoin_counts[peer] = self.rejoin_counts.get(peer, 0) + 1
        self._expected_from[peer] = round
        self._peer_timeouts.responded([peer])
        self.runtime.mark_rejoined(peer, round)

    def set_topology(self, topology: Topology, weights: WeightScheme | None = None) -> None:
        """Use the graph of `topology` in `peers` from now on. `weights` None uses the experiment's scheme.

        All nodes that the graph connects must call this with the same arguments before the same round.
        """
        self.mixing = self.context.mixing_factory.build(topology, weights)
        self.discovery = GraphPeers(self.mixing)
        self._rewired = topology, weights

    # Messages

    async def send(self, to: Peers | Iterable[NodeId], outgoing: Outgoing, *, round: int, kind: str = MODEL) -> None:
        """Send `outgoing` to every peer in `to` that is not known to have failed."""
        receivers = to.receivers if isinstance(to, Peers) else to
        if self.interactive_sharing is not None and kind == MODEL:
            receivers = await self.interactive_sharing.before_send(self, tuple(receivers), round)
        failed = self.failed_peers
        shared = self.make_message(kind, outgoing, round) if isinstance(outgoing, Payload) else None
        for peer in receivers:
            if peer in failed:
                continue
            message = shared or self.make_message(kind, outgoing(peer), round)  # type: ignore[operator]
            if await self.runtime.send(peer, message):
                self.bytes_sent += message.wire_size
                self.messages_sent += 1
                if kind == MODEL or carries_model(message.payload.arrays):
                    self.runtime.activity.receivers.add(peer)

    def make_message(self, kind: str, payload: Payload, round: int = 0) -> Message:
        """Return a message from this node, ready for `Runtime.send`."""
        return Message(self.id, kind, round, payload.frozen(), self.context.run, None, self.context.incarnation)

    async def send_and_wait(self, to: NodeId, outgoing: Outgoing, *, round: int, kind: str = MODEL) -> bool:
        """Send `outgoing` to one peer and wait until the message has left this node. Returns False if it was dropped.

        `send` does not wait for the transmission; its messages wait in the network's queue. Use `send_and_wait` if a
        message that waits in the queue could become outdated.
        """
        if to in self.failed_peers:
            return False
        message = self.make_message(kind, payload_for(outgoing, to), round)
        if not await self.runtime.send_and_wait(to, message):
            return False
        self.bytes_sent += message.wire_size
        self.messages_sent += 1
        if kind == MODEL or carries_model(message.payload.arrays):
            self.runtime.activity.receivers.add(to)
        return True

    def receive_available(self, *, kind: str = MODEL, check: Check | None = None, finite: bool = True) -> list[Message]:
        """Return the messages of this kind received so far, without rejected ones; `finite` as in `receive`."""
        return [message for message in self.runtime.receive_available(kind) if self._accepts(message, check, finite)]

    async def receive_each(
        self,
        peers: Peers | Iterable[NodeId],
        *,
        round: int,
        kind: str = MODEL,
        timeout: float | None = None,
        check: Check | None = None,
    ) -> Received:
        """Return one payload of this round from every peer that did not fail, time out or send an invalid payload.

        A payload is invalid if `check_finite`, the sharing (for kind "model") or `check` rejects it. Invalid payloads
        are counted. The node waits less and less for a peer that has timed out, until a message of that peer arrives in
        time: see `peer_timeouts`. For a list of ids with a `timeout`, it waits for this time in every receive.
        """
        senders = tuple(peers.weights) if isinstance(peers, Peers) else tuple(sorted(peers))
        interactive = self.interactive_sharing if kind == MODEL else None
        if interactive is not None:
            senders = tuple(interactive.expected_senders(self, senders, round))
        adaptive = timeout is None or isinstance(peers, Peers)
        timeout = self.receive_timeout if timeout is None else timeout
        slow, wait = self._peer_timeouts.wait_for(senders) if adaptive else ((), 0.0)
        if len(slow) == len(senders) and self.id >= self.nodes:
            slow = ()  # a server does not train: without any wait, all its rounds would be over at once
        prompt = tuple(sender for sender in senders if sender not in slow) if slow else senders
        began = self.now()
        messages = await self.runtime.receive(Filter(kind, round, prompt), timeout) if prompt or not slow else []
        waited = self.now() - began
        if slow:
            wait = wait if timeout is None else min(wait, timeout)
            messages += await self.runtime.receive(Filter(kind, round, slow), wait)
        self._peer_timeouts.responded(message.sender for message in messages)
        self.timed_out_peers = frozenset()
        if len(messages) < len(senders):
            self._report_missing(senders, messages, round)
            if adaptive:
                self._peer_timeouts.timed_out(self.timed_out_peers, waited)
        elif adaptive and not slow:
            self._peer_timeouts.complete(waited)
        received = Received(peers if isinstance(peers, Peers) else None)
        messages.sort(key=attrgetter("sender"))
        for message in messages:
            if self._accepts(message, check):
                received[message.sender] = message.payload
        return received if interactive is None else await interactive.after_receive(self, received, round)

    async def receive_first(
        self, peers: Iterable[NodeId], *, kind: str = MODEL, timeout: float | None = None, finite: bool = True
    ) -> Message | None:
        """Return the next message of this kind from any of `peers`. None if all of them failed or timed out.

        `finite` as in `receive`.
        """
        wanted = Filter(kind, senders=tuple(sorted(peers)), any_sender=True)
        timeout = self.receive_timeout if timeout is None else timeout
        while messages := await self.runtime.receive(wanted, timeout):
            if self._accepts(messages[0], finite=finite):
                return messages[0]
        return None

    async def receive(
        self,
        *,
        kind: str = MODEL,
        round: int | None = None,
        sender: NodeId | None = None,
        timeout: float | None = None,
        check: Check | None = None,
        finite: bool = True,
    ) -> Message | None:
        """Return the next valid message of this kind, from `sender` if given, otherwise from any node.

        Returns None after `timeout` seconds, and if `sender` has failed. Without `timeout`, a receive from `sender`
        waits for `receive_timeout`, as in `receive_each`; a receive from any node has no limit. With `finite` false,
        the algorithm calls `check_finite` itself, for example because it has to answer every message.
        """
        wanted = Filter(kind, round, None if sender is None else (sender,), several=True)
        if timeout is None and sender is not None:
            timeout = self.receive_timeout
        deadline = None if timeout is None else self.now() + timeout
        while messages := await self.runtime.receive(wanted, timeout):
            if self._accepts(messages[0], check, finite):
                return messages[0]
            timeout = None if deadline is None else max(0.0, deadline - self.now())
        return None

    @property
    def rejects_non_finite(self) -> bool:
        """Whether payloads with infinities or NaN are rejected: the experiment's `non_finite`."""
        return self.context.non_finite == "reject"

    def check_finite(self, message: Message) -> None:
        """Raise `MessageError` for values that are not finite, unless the experiment keeps them."""
        if self.rejects_non_finite and not message.is_finite:
            raise MessageError("it holds values that are not finite")

    def _accepts(self, message: Message, check: Check | None = None, finite: bool = True) -> bool:
        try:
            if finite and not message.is_finite:
                self.check_finite(message)
            if self._check is not None and message.kind == MODEL:
                self._check(message.payload, self._params)
            if check is not None:
                check(message.payload)
        except MessageError as error:
            self.reject(message.sender, str(error))
            return False
        return True

    def _report_missing(self, senders: tuple[NodeId, ...], messages: list[Message], round: int) -> None:
        not_expected = {peer for peer, first in self._expected_from.items() if round < first}
        received = {message.sender for message in messages}
        timed_out = sorted(set(senders) - received - set(self.failed_peers) - not_expected)
        if timed_out:
            self.timed_out_peers = frozenset(timed_out)
            self.record_event("timed out", f"round {round}: no message from {', '.join(map(str, timed_out))}")

    def weights(self, received: Mapping[NodeId, Payload]) -> dict[NodeId, float]:
        """Return the renormalised mixing weights of the senders; without `received.peers`, 1 / (1 + senders) each."""
        if isinstance(received, Received) and received.peers is not None:
            return received.peers.weights_of(received)
        return dict.fromkeys(received, 1.0 / (1 + len(received)))

    # Rounds and records

    @property
    def next_round(self) -> int:
        """The number of the current or next round: how many rounds this node has completed or skipped."""
        return self._next_round

    def start_at_round(self, round: int, params: Params) -> None:
        """Start at `round` with `params`, for a node that joins a run in progress. Call it before the first round."""
        self._next_round = round
        self.params = params

    async def rounds(self, count: int) -> AsyncIterator[int]:
        """Yield 0, 1, … count − 1; after `restore`, the rounds that are left.

        After each round the node writes a record and, if an evaluation is due, evaluates. Both take no virtual time.
        """
        for round in range(self._next_round, count):
            await self._observer.before_round(round)
            self.training.round = round
            yield round
            self._next_round = round + 1
            self._record(round)
            if self.context.schedule.due(round, last=round == count - 1):
                await self.evaluate(round)
                if self.context.schedule.averaged:
                    self._observer.submit_for_average(round, self.params)
            self.checkpoints.after_round(round)

    @asynccontextmanager
    async def requested_round(self, round: int) -> AsyncIterator[None]:
        """Context manager for one round that another node, such as a server, requested: recorded, not evaluated."""
        self.checkpoints.begin_requested_round(round)
        await self._observer.before_round(round)
        self.training.round = round
        yield
        self._record(round)
        self.checkpoints.end_requested_round()

    async def evaluate(self, round: int) -> None:
        """Evaluate the model now, or save it for evaluation after the run; nothing if this node is not evaluated."""
        progress = self.training.progress
        if self.context.schedule.evaluated and not self._observer.defer_evaluation(round, self.params, progress):
            scores = await self.runtime.compute(self.training.evaluation(self.params, progress))
            self._observer.record(Evaluation(round, self.now(), scores))

    def reject(self, sender: NodeId, reason: str) -> None:
        """Count an invalid payload from `sender`, and record the reason for the first ones."""
        self.rejected_count += 1
        if self.rejected_count <= RECORDED_PAYLOAD_REJECTIONS:
            self.record_event("payload rejected", f"from node {sender}: {reason}")

    def record_event(self, what: str, detail: str) -> None:
        """Record an unusual event."""
        self._observer.record(Event(what, self.now(), detail))

    def _record(self, round: int) -> None:
        sent, activity = (self.bytes_sent, self.messages_sent), self.runtime.activity.take()
        self._observer.record(Round(round, self.now(), self.training.loss, *sent, *activity))

    # State

    def state(self) -> State:
        """Return all that the next round depends on: model, algorithm, trainer, sharing, peer discovery, generators.

        The state is complete only between rounds, while no message is in transit.
        """
        return {
            "round": self._next_round,
            "params": self._params,
            "sent": [self.bytes_sent, self.messages_sent, self.rejected_count],
            **self.training.state(),
            "timeouts": self._peer_timeouts.state(),
            "algorithm": dict(self.algorithm_state),
            "generators": self._generators.state(),
            "rewired": self._rewired_state(),
            **{name: part.state() for name, part in self._stateful_parts().items()},
        }

    def restore(self, state: State) -> None:
        """Continue from a `state` that was saved by a node with the same configuration."""
        self._next_round = state["round"]
        self.params = np.array(state["params"], np.float32)
        self.bytes_sent, self.messages_sent, self.rejected_count = state["sent"]
        self.training.restore(state)
        self._peer_timeouts.restore(state["timeouts"])
        self.algorithm_state = dict(state["algorithm"])
        self._generators.restore(state["generators"])
        if (rewired := state["rewired"]) is not None:
            self.set_topology(self.context.mixing_factory.from_table(rewired["topology"]), rewired["weights"])
        for name, part in self._stateful_parts().items():
            part.restore(state[name])

    def _stateful_parts(self) -> dict[str, Stateful]:
        parts = {"trainer": self.trainer, "sharing": self.sharing, "discovery": self.discovery}
        return {name: part for name, part in parts.items() if isinstance(part, Stateful)}

    def _rewired_state(self) -> State | None:
        """Return the arguments of the last `set_topology` as plain data."""
        if self._rewired is None:
            return None
        topology, weights = self._rewired
        try:
            return {"topology": self.context.mixing_factory.to_table(topology), "weights": weights}
        except ValueError as error:
            raise NodeError(f"node {self.id}: its rewired topology cannot be saved: {error}") from error
