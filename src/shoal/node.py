"""Node: everything an algorithm may do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from shoal.errors import MessageError, NodeError
from shoal.experiment.registry import from_table, to_table
from shoal.mailbox import Filter
from shoal.message import Message, Payload
from shoal.randomness import generator
from shoal.results.records import Evaluation, Event, Record, Round
from shoal.runtime import Runtime
from shoal.sharing.sharing import NodeAware, NodeInfo, Outgoing, PayloadChecker, Sharing
from shoal.state import State, Stateful, generator_state, restore_generator
from shoal.topologies.graph import Mixing, Peers, Topology, WeightScheme
from shoal.training.trainer import Evaluate, Train, Trainer
from shoal.types import NodeId, Params


class Observer(Protocol):
    """Who watches a node: takes its records, and its model when all nodes' models are looked at together."""

    def record(self, record: Record) -> None: ...

    def model(self, round: int, params: Params) -> None:
        """The node's model after `round`, for the average over all nodes and their distance to it."""
        ...

    async def before_round(self, round: int) -> None:
        """Called at the start of every round; faults on schedule strike here."""
        ...

    def postpone(self, round: int, params: Params) -> bool:
        """Keep a model that is due to be tested, so as to test it when the run is over. False: test it now."""
        ...


@dataclass(frozen=True)
class Schedule:
    """When a node is evaluated."""

    every: int
    """Rounds between evaluations; 0 is after the last round only."""
    evaluated: bool
    """Whether this node is one of those evaluated."""
    averaged: bool
    """Whether the average of all models is looked at as well."""
    by_time: bool = False
    """Whether the engine looks at all nodes together, by the clock, and none is evaluated after its rounds."""

    def due(self, round: int, last: bool) -> bool:
        if self.by_time:
            return False
        return last or (self.every > 0 and (round + 1) % self.every == 0)


class PeerDiscovery(Protocol):
    """How one node finds its peers; made anew for every node. May keep a state (`shoal.state.Stateful`)."""

    async def peers(self, node: Node, round: int) -> Peers: ...


@runtime_checkable
class DiscoveryTopology(Protocol):
    """A topology whose nodes find their peers by talking, where others work them out from the seed alone."""

    def discovery(self) -> PeerDiscovery: ...


@runtime_checkable
class TopologyWrapper(Protocol):
    """A topology that hands out another's graph, such as a sampler: the graph is made from the one behind it."""

    @property
    def inner(self) -> Topology: ...


@runtime_checkable
class ServiceProvider(Protocol):
    """An algorithm or a topology that needs a node of its own beside those that learn: a server, a peer sampler.

    That node has no data. It lives in `serve`, and is ended when the last of the learning nodes has ended.
    """

    async def serve(self, node: Node) -> None: ...


@runtime_checkable
class InteractiveSharing(Protocol):
    """A sharing that has words of its own for the sharings of other nodes, beside payloads: keys, say.

    The node calls these around what its algorithm does with messages of kind "model"; the algorithm does not notice.
    """

    async def before_send(self, node: Node, to: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        """Before payloads for `to` are asked for. Returns those of them that may be spoken to."""
        ...

    def expected_senders(self, node: Node, senders: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        """Those of `senders` to wait for: the others must not speak in this round."""
        ...

    async def after_receive(self, node: Node, received: Received, round: int) -> Received:
        """What has come as `merge` wants it, from those whose words could be opened."""
        ...

    async def serve_peers(self, node: Node) -> None:
        """Answer the sharings of other nodes; runs beside the algorithm for as long as the node takes part."""
        ...

    async def drain(self, node: Node) -> None:
        """After the algorithm has ended: wait until nobody needs this node's answers any more."""
        ...


class GraphPeers:
    """The finder of nodes that know the graph."""

    def __init__(self, mixing: Mixing) -> None:
        self.mixing = mixing

    async def peers(self, node: Node, round: int) -> Peers:
        return self.mixing.peers(node.id, round)


MixingFactory: TypeAlias = Callable[[Topology, WeightScheme | None], Mixing]
"""What a topology is on the nodes of this run; weighted as the experiment says, or by the scheme that is named."""

Check: TypeAlias = Callable[[Payload], object]
"""Raises `MessageError` for a payload of an algorithm's own that it cannot use."""

REFUSALS_RECORDED = 1000
"""Beyond, they are only counted: whoever talks nonsense must not fill the disk."""

MODEL = "model"
"""The kind of message that carries what the sharing says; other kinds are the algorithm's own."""


class Received(dict[NodeId, Payload]):
    """What came from whom, in ascending order of sender, with the peers it was asked of."""

    __slots__ = ("peers",)

    def __init__(self, peers: Peers | None = None) -> None:
        self.peers = peers


class Node:
    """One participant. An algorithm is a coroutine that is given one of these, and nothing else."""

    def __init__(
        self,
        id: NodeId,
        *,
        nodes: int,
        seed: int,
        params: Params,
        runtime: Runtime,
        trainer: Trainer,
        sharing: Sharing,
        mixing: Mixing,
        schedule: Schedule,
        observer: Observer,
        run: str,
        receive_timeout: float | None = None,
        discovery: PeerDiscovery | None = None,
        mixings: MixingFactory | None = None,
        services: Mapping[str, NodeId] | None = None,
        shapes: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        self.id = id
        self.nodes = nodes
        """How many nodes learn. Their ids are 0 to nodes − 1; those that serve them come after."""
        self.seed = seed
        self.shapes = shapes or (params.shape,)
        """The tensors that lie behind each other in the flat vector."""
        self.services = services or {}
        """The nodes that serve: by what needs them, "algorithm" or "topology"."""
        self.sharing = sharing
        self.bytes_sent = 0
        self.messages_sent = 0
        self.rejected = 0
        """Payloads that the sharing or the algorithm refused."""
        self.runtime = runtime
        self.trainer = trainer
        self.receive_timeout = receive_timeout
        self.mixing = mixing
        """The experiment's graph and weights, of all nodes. An algorithm asks `peers`, which may know better."""
        self.memory: State = {}
        """What the algorithm keeps from round to round beside the model: put it here, and a checkpoint has it."""
        self.timed_out_peers: frozenset[NodeId] = frozenset()
        """Those that the last `receive_each` waited for in vain, though nobody knows them to be dead."""
        self.rejoin_counts: dict[NodeId, int] = {}
        """How often each that had died came back: what was agreed with it before, it knows nothing of."""
        self._next_round = 0
        self._back: dict[NodeId, int] = {}
        """From which round on those that came back are waited for."""
        self._rewired: tuple[Topology, WeightScheme | None] | None = None
        self._discovery: PeerDiscovery = discovery or GraphPeers(mixing)
        self._mixings = mixings
        self.schedule = schedule
        self._observer = observer
        self._run = run
        self._loss: float | None = None
        self._generators: dict[str, np.random.Generator] = {}
        self._check = sharing.check if isinstance(sharing, PayloadChecker) else None
        self._interactive = sharing if isinstance(sharing, InteractiveSharing) else None
        self._companies: dict[NodeId, tuple[int, Collection[NodeId], Mapping[NodeId, float]]] = {}
        """What `accompany` said of each receiver, with the round that it is for."""
        self._params = _frozen(params)
        if isinstance(sharing, NodeAware):
            data = getattr(trainer, "data", None)
            sharing.join(NodeInfo(id, nodes, seed, self.shapes, data))
        sharing.start(self._params)

    @property
    def params(self) -> Params:
        """The model: one flat float32 vector, read-only. A new model is assigned, never written into the old."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        if params.shape != self._params.shape or params.dtype != np.float32:
            raise NodeError(
                f"node {self.id}: params must be a float32 vector of {self._params.size} values, "
                f"not {params.dtype} of shape {params.shape}"
            )
        self._params = _frozen(params)

    @property
    def run(self) -> str:
        """The name of the run, which every message carries."""
        return self._run

    @property
    def server(self) -> NodeId:
        """The node in which the `serve` of the experiment's algorithm runs."""
        if "algorithm" not in self.services:
            raise NodeError(f"node {self.id} asks for its server, and the experiment's algorithm has none: no `serve`")
        return self.services["algorithm"]

    @property
    def samples(self) -> int:
        """How many samples this node trains on."""
        return self.trainer.samples

    def now(self) -> float:
        """Seconds since the start of the run: virtual in the simulation, real elsewhere."""
        return self.runtime.now()

    async def sleep(self, seconds: float) -> None:
        await self.runtime.sleep(seconds)

    @property
    def failed_peers(self) -> Collection[NodeId]:
        """The nodes that are known to have failed."""
        return self.runtime.failed_peers()

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        """Run `task` beside the algorithm; it ends when the algorithm ends."""
        self.runtime.background(task)

    def rng(self, purpose: str) -> np.random.Generator:
        """This node's own generator for `purpose`; the same object each time it is asked for."""
        if purpose not in self._generators:
            self._generators[purpose] = generator(self.seed, purpose, self.id)
        return self._generators[purpose]

    async def train(self, params: Params, steps: int | None = None) -> Params:
        """`params` after local training on this node's data: a new vector. `steps` None is what the experiment says."""
        trained = await self.runtime.compute(Train(self.trainer, params, steps))
        self._loss = trained.loss
        return trained.params

    async def peers(self, round: int) -> Peers:
        """The neighbours in this round and their weights: from the graph, or from whoever samples peers."""
        return await self._discovery.peers(self, round)

    def company(self, receiver: NodeId, round: int) -> Collection[NodeId]:
        """All who speak to `receiver` in this round: by the graph, or as told."""
        return self._company(receiver, round)[0]

    def counts(self, receiver: NodeId, round: int) -> Mapping[NodeId, float]:
        """How much they count there: by the graph all of them, or as told those that this node knows of."""
        return self._company(receiver, round)[1]

    def accompany(
        self, receiver: NodeId, round: int, company: Collection[NodeId], counts: Mapping[NodeId, float]
    ) -> None:
        """Where no graph says so: all who speak to `receiver` in this round, and how much those of them count there of
        whom this node has to know it: all for the receiver, and itself for one that speaks."""
        self._companies[receiver] = round, company, counts

    def _company(self, receiver: NodeId, round: int) -> tuple[Collection[NodeId], Mapping[NodeId, float]]:
        told = self._companies.get(receiver)
        if told is not None and told[0] == round:
            return told[1:]
        if receiver >= self.nodes:
            raise NodeError(f"node {self.id} was not told who else speaks to node {receiver} in round {round}")
        weights = self.mixing.peers(receiver, round).weights
        return weights.keys(), weights

    def rewire(self, topology: Topology, weights: WeightScheme | None = None) -> None:
        """From now on `peers` follows this graph, with the experiment's weights or those of another scheme.

        Every node that the graph links has to be rewired alike, from the same round on.
        """
        if self._mixings is None:
            raise NodeError(f"node {self.id} cannot be rewired here: nobody builds graphs for it")
        self.mixing = self._mixings(topology, weights)
        self._discovery = GraphPeers(self.mixing)
        self._rewired = topology, weights

    async def send(self, to: Peers | Iterable[NodeId], outgoing: Outgoing, *, round: int, kind: str = MODEL) -> None:
        """Say `outgoing` to each of `to`. Peers that are known to be gone are passed over."""
        recipients = to.to if isinstance(to, Peers) else to
        if self._interactive is not None and kind == MODEL:
            recipients = await self._interactive.before_send(self, tuple(recipients), round)
        gone = self.failed_peers
        common = Message(self.id, kind, round, outgoing.frozen(), self._run) if isinstance(outgoing, Payload) else None
        for peer in recipients:
            if peer in gone:
                continue
            message = common or Message(self.id, kind, round, outgoing(peer).frozen(), self._run)  # type: ignore[operator]
            if await self.runtime.send(peer, message):
                self.bytes_sent += message.wire_size
                self.messages_sent += 1

    def message(self, kind: str, payload: Payload, round: int = 0) -> Message:
        """A message of this node's, ready to be handed to the runtime."""
        return Message(self.id, kind, round, payload.frozen(), self._run)

    async def transmit(self, to: NodeId, outgoing: Outgoing, *, round: int, kind: str = MODEL) -> bool:
        """Say `outgoing` to one peer, and wait until the last of it has left this node; whether it did.

        `send` hands over at once all that it is given, and what the network has no room for waits there. Use this where
        a message that waits may be overtaken by events.
        """
        if to in self.failed_peers:
            return False
        said = outgoing if isinstance(outgoing, Payload) else outgoing(to)
        message = self.message(kind, said, round)
        if not await self.runtime.transmit(to, message):
            return False
        self.bytes_sent += message.wire_size
        self.messages_sent += 1
        return True

    def collect(self, *, kind: str = MODEL, check: Check | None = None) -> list[Message]:
        """All messages of this kind that have come so far, in order, without those that sharing or `check` refuses."""
        return [message for message in self.runtime.collect(kind) if self._accepts(message, check)]

    async def receive_each(
        self,
        peers: Peers | Iterable[NodeId],
        *,
        round: int,
        kind: str = MODEL,
        timeout: float | None = None,
        check: Check | None = None,
    ) -> Received:
        """One payload from each of `peers` for this round, without those that died, kept silent, or sent nonsense.

        Nonsense is what the sharing refuses, in messages of kind "model", and what `check` does; it is counted.
        """
        senders = tuple(peers.weights) if isinstance(peers, Peers) else tuple(sorted(peers))
        interactive = self._interactive if kind == MODEL else None
        if interactive is not None:
            senders = tuple(interactive.expected_senders(self, senders, round))
        patience = self.receive_timeout if timeout is None else timeout
        messages = await self.runtime.receive(Filter(kind, round, senders), patience)
        self.timed_out_peers = frozenset()
        if len(messages) < len(senders):
            self._report_missing(senders, messages, round)
        received = Received(peers if isinstance(peers, Peers) else None)
        messages.sort(key=_sender)
        for message in messages:
            if self._accepts(message, check):
                received[message.sender] = message.payload
        return received if interactive is None else await interactive.after_receive(self, received, round)

    async def receive_first(
        self, peers: Iterable[NodeId], *, kind: str = MODEL, timeout: float | None = None
    ) -> Message | None:
        """The next message of this kind from any of `peers`. None when all of them have died, or kept silent."""
        wanted = Filter(kind, senders=tuple(sorted(peers)), first=True)
        patience = self.receive_timeout if timeout is None else timeout
        while messages := await self.runtime.receive(wanted, patience):
            if self._accepts(messages[0]):
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
    ) -> Message | None:
        """The next message of this kind, from anyone or from `sender`, that neither sharing nor `check` refuses.

        None when `timeout` seconds have passed, and when `sender` has died. Without a timeout it waits for `sender` as
        `receive_each` does, for as long as the experiment or the engine says, and for anyone for ever.
        """
        wanted = Filter(kind, round, None if sender is None else (sender,), more=True)
        if timeout is None and sender is not None:
            timeout = self.receive_timeout
        until = None if timeout is None else self.now() + timeout
        while messages := await self.runtime.receive(wanted, timeout):
            if self._accepts(messages[0], check):
                return messages[0]
            timeout = None if until is None else max(0.0, until - self.now())
        return None

    def weights(self, received: Mapping[NodeId, Payload]) -> dict[NodeId, float]:
        """The mixing weights of those who answered, renormalised; equal ones where no graph gave any."""
        if isinstance(received, Received) and received.peers is not None:
            return received.peers.weights_of(received)
        return dict.fromkeys(received, 1.0 / (1 + len(received)))

    @property
    def next_round(self) -> int:
        """How many rounds this node has done, or passed over: the number of the one that it is in, or comes to."""
        return self._next_round

    def begin_at(self, round: int, params: Params) -> None:
        """Take up the work of others, who are about to begin `round`, before one's own first round."""
        self._next_round = round
        self.params = params

    def mark_rejoined(self, peer: NodeId, round: int) -> None:
        """`peer`, which had died, is sent to again at once, and waited for from `round` on."""
        self.rejoin_counts[peer] = self.rejoin_counts.get(peer, 0) + 1
        self._back[peer] = round
        self.runtime.mark_rejoined(peer, round)

    def full_model(self, payload: Payload) -> Params:
        """The model that `payload` holds whole. Raises `MessageError` for anything else."""
        params = payload.arrays.get("params")
        if params is None or params.dtype != np.float32 or params.shape != self._params.shape:
            raise MessageError(f"expected params, {self._params.size} float32 values")
        if not np.isfinite(params).all():
            raise MessageError("some values are not finite")
        return np.array(params)

    async def rounds(self, count: int) -> AsyncIterator[int]:
        """0, 1, … count − 1, or from where `restore` left off.

        Between rounds the node is recorded and, on schedule, evaluated, off the clock.
        """
        for round in range(self._next_round, count):
            await self._observer.before_round(round)
            yield round
            self._next_round = round + 1
            self._record(round)
            if self.schedule.due(round, last=round == count - 1):
                await self._evaluate(round)

    @asynccontextmanager
    async def round(self, round: int) -> AsyncIterator[None]:
        """One round, for a node that is called to it by another: recorded, not evaluated."""
        await self._observer.before_round(round)
        yield
        self._record(round)

    async def evaluate(self, round: int) -> None:
        """Test the model now, if this node is one of those tested; `rounds` does so by itself, on schedule."""
        if self.schedule.evaluated and not self._observer.postpone(round, self.params):
            scores = await self.runtime.compute(Evaluate(self.trainer, self.params))
            self._observer.record(Evaluation(round, self.now(), scores))

    def reject(self, message: Message, why: str) -> None:
        """Count a message that makes no sense, and write down why; the algorithm goes on as if it had not come."""
        self.refuse(message.sender, why)

    def refuse(self, sender: NodeId, why: str) -> None:
        """Count something that `sender` said and that makes no sense; the first ones are written down."""
        self.rejected += 1
        if self.rejected <= REFUSALS_RECORDED:
            self.event("payload rejected", f"from node {sender}: {why}")

    def event(self, what: str, detail: str) -> None:
        """Write down something out of the ordinary."""
        self._observer.record(Event(what, self.now(), detail))

    def state(self) -> State:
        """All that the next round depends on: the model, and what algorithm, trainer, sharing, finder and generators
        keep. It is whole between rounds, when no message is under way."""
        parts = {"trainer": self.trainer, "sharing": self.sharing, "finder": self._discovery}
        return {
            "round": self._next_round,
            "params": self._params,
            "sent": [self.bytes_sent, self.messages_sent],
            "memory": dict(self.memory),
            "generators": {purpose: generator_state(rng) for purpose, rng in self._generators.items()},
            "rewired": None if self._rewired is None else self._spelt(*self._rewired),
            **{name: part.state() for name, part in parts.items() if isinstance(part, Stateful)},
        }

    def restore(self, state: State) -> None:
        """Go on from what an equal node's `state` gave."""
        self._next_round = state["round"]
        self.params = np.array(state["params"], np.float32)
        self.bytes_sent, self.messages_sent = state["sent"]
        self.memory = dict(state["memory"])
        for purpose, words in state["generators"].items():
            restore_generator(self.rng(purpose), words)
        if (rewired := state["rewired"]) is not None:
            self.rewire(from_table("topology", rewired["topology"]), rewired["weights"])
        parts = {"trainer": self.trainer, "sharing": self.sharing, "finder": self._discovery}
        for name, part in parts.items():
            if isinstance(part, Stateful):
                part.restore(state[name])

    def _spelt(self, topology: Topology, weights: WeightScheme | None) -> State:
        """What `rewire` was given, as plain data."""
        try:
            return {"topology": to_table("topology", topology), "weights": weights}
        except ValueError as error:
            raise NodeError(f"node {self.id} was rewired to a graph that cannot be written down: {error}") from error

    def _record(self, round: int) -> None:
        self._observer.record(Round(round, self.now(), self._loss, self.bytes_sent, self.messages_sent))

    async def _evaluate(self, round: int) -> None:
        await self.evaluate(round)
        if self.schedule.averaged:
            self._observer.model(round, self.params)

    def _accepts(self, message: Message, check: Check | None = None) -> bool:
        try:
            if self._check is not None and message.kind == MODEL:
                self._check(message.payload, self._params)
            if check is not None:
                check(message.payload)
        except MessageError as error:
            self.reject(message, str(error))
            return False
        return True

    def _report_missing(self, senders: tuple[NodeId, ...], messages: list[Message], round: int) -> None:
        gone = self.failed_peers
        absent = {peer for peer, first in self._back.items() if round < first}
        silent = sorted(set(senders) - {m.sender for m in messages} - set(gone) - absent)
        if silent:
            self.timed_out_peers = frozenset(silent)
            self.event("no answer", f"round {round}: gave up waiting for {', '.join(map(str, silent))}")


_sender = attrgetter("sender")


def _frozen(params: Params) -> Params:
    """`params` itself, made read-only, so that messages may share it without copying."""
    params.flags.writeable = False
    return params
