"""Node: everything an algorithm may do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from shoal.errors import MessageError, NodeError
from shoal.message import Message, Params, Payload
from shoal.randomness import generator
from shoal.records import Evaluation, Event, Record, Round
from shoal.runtime import Filter, Runtime
from shoal.sharing.sharing import Checks, Outgoing, Sharing
from shoal.topologies.graph import Mixing, NodeId, Peers
from shoal.training import Evaluate, Train, Trainer


class Observer(Protocol):
    """Who watches a node: takes its records, and its model when all nodes' models are looked at together."""

    def record(self, record: Record) -> None: ...

    def model(self, round: int, params: Params) -> None:
        """The node's model after `round`, for the average over all nodes and their distance to it."""
        ...

    async def before_round(self, round: int) -> None:
        """Called at the start of every round; faults on schedule strike here."""
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

    def due(self, round: int, last: bool) -> bool:
        return last or (self.every > 0 and (round + 1) % self.every == 0)


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
    ) -> None:
        self.id = id
        self.nodes = nodes
        self.seed = seed
        self.sharing = sharing
        self.bytes_sent = 0
        self.messages_sent = 0
        self.rejected = 0
        """Payloads that the sharing refused."""
        self.runtime = runtime
        self.trainer = trainer
        self.receive_timeout = receive_timeout
        self._mixing = mixing
        self._schedule = schedule
        self._observer = observer
        self._run = run
        self._loss: float | None = None
        self._generators: dict[str, np.random.Generator] = {}
        self._check = sharing.check if isinstance(sharing, Checks) else None
        self._params = _frozen(params)
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

    def now(self) -> float:
        """Seconds since the start of the run: virtual in the simulation, real elsewhere."""
        return self.runtime.now()

    async def sleep(self, seconds: float) -> None:
        await self.runtime.sleep(seconds)

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
        """The neighbours in this round and their weights."""
        return self._mixing.peers(self.id, round)

    async def send(self, to: Peers | Iterable[NodeId], outgoing: Outgoing, *, round: int, kind: str = MODEL) -> None:
        """Say `outgoing` to each of `to`. Peers that are known to be gone are passed over."""
        recipients = to.to if isinstance(to, Peers) else to
        gone = self.runtime.gone()
        common = Message(self.id, kind, round, outgoing.frozen(), self._run) if isinstance(outgoing, Payload) else None
        for peer in recipients:
            if peer in gone:
                continue
            message = common or Message(self.id, kind, round, outgoing(peer).frozen(), self._run)  # type: ignore[operator]
            if await self.runtime.send(peer, message):
                self.bytes_sent += message.wire_size
                self.messages_sent += 1

    async def receive_each(
        self, peers: Peers | Iterable[NodeId], *, round: int, kind: str = MODEL, timeout: float | None = None
    ) -> Received:
        """One payload from each of `peers` for this round, without those that died, kept silent, or sent nonsense."""
        senders = tuple(peers.weights) if isinstance(peers, Peers) else tuple(sorted(peers))
        patience = self.receive_timeout if timeout is None else timeout
        messages = await self.runtime.receive(Filter(kind, round, senders), patience)
        if len(messages) < len(senders):
            self._report_missing(senders, messages, round)
        received = Received(peers if isinstance(peers, Peers) else None)
        messages.sort(key=_sender)
        for message in messages:
            if self._accepts(message):
                received[message.sender] = message.payload
        return received

    async def receive(
        self, *, kind: str = MODEL, round: int | None = None, timeout: float | None = None
    ) -> Message | None:
        """The next message of this kind from anyone, or None when `timeout` seconds have passed."""
        until = None if timeout is None else self.now() + timeout
        while messages := await self.runtime.receive(Filter(kind, round), timeout):
            if self._accepts(messages[0]):
                return messages[0]
            timeout = None if until is None else max(0.0, until - self.now())
        return None

    def weights(self, received: Mapping[NodeId, Payload]) -> dict[NodeId, float]:
        """The mixing weights of those who answered, renormalised; equal ones where no graph gave any."""
        if isinstance(received, Received) and received.peers is not None:
            return received.peers.weights_of(received)
        return dict.fromkeys(received, 1.0 / (1 + len(received)))

    async def rounds(self, count: int) -> AsyncIterator[int]:
        """0, 1, … count − 1. Between rounds the node is recorded and, on schedule, evaluated, off the clock."""
        for round in range(count):
            await self._observer.before_round(round)
            yield round
            self._observer.record(Round(round, self.now(), self._loss, self.bytes_sent, self.messages_sent))
            if self._schedule.due(round, last=round == count - 1):
                await self._evaluate(round)

    def event(self, what: str, detail: str) -> None:
        """Write down something out of the ordinary."""
        self._observer.record(Event(what, self.now(), detail))

    async def _evaluate(self, round: int) -> None:
        if self._schedule.evaluated:
            scores = await self.runtime.compute(Evaluate(self.trainer, self.params))
            self._observer.record(Evaluation(round, self.now(), scores))
        if self._schedule.averaged:
            self._observer.model(round, self.params)

    def _accepts(self, message: Message) -> bool:
        if self._check is not None and message.kind == MODEL:
            try:
                self._check(message.payload, self._params)
            except MessageError as error:
                self.rejected += 1
                self.event("payload rejected", f"from node {message.sender}: {error}")
                return False
        return True

    def _report_missing(self, senders: tuple[NodeId, ...], messages: list[Message], round: int) -> None:
        gone = self.runtime.gone()
        silent = sorted(set(senders) - {m.sender for m in messages} - set(gone))
        if silent:
            self.event("no answer", f"round {round}: gave up waiting for {', '.join(map(str, silent))}")


_sender = attrgetter("sender")


def _frozen(params: Params) -> Params:
    """`params` itself, made read-only, so that messages may share it without copying."""
    params.flags.writeable = False
    return params
