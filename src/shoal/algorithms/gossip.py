"""Gossip learning: models walk the network on a clock, and are merged and trained where they come by.

Ormándi, Hegedűs, Jelasity: Gossip Learning with Linear Models on Fully Distributed Data, Concurrency and Computation
25(4), 2013; the merge by age is that of Hegedűs, Danner, Jelasity: Gossip Learning as a Decentralized Alternative to
Federated Learning, DAIS 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.sharing import Outgoing
from shoal.traits import Traits
from shoal.types import Bounds, NodeId

OLDEST = 2**53
"""No model is as old: ages up to here are exact as numbers of any kind."""
SHORTEST = 1e-3
"""Seconds: the shortest period that is not given, for devices that take no time."""


@dataclass(frozen=True)
class Gossip:
    """Ormándi et al. 2013: on a clock, send the model to one random peer; who hears a model merges, then trains.

    A model's age is how often it was trained. Of two models with ages s and t the merge is their average with weights
    s/(s + t) and t/(s + t), and has the greater age. `variant` is what becomes of a model that comes:
    "mu" merge with the own one, then train; "um" train both, then merge; "rw" train it in place of the own one, so
    that models walk at random. Of several models of one peer that wait for a busy node, it takes the latest.

    A round is one period: each node sends one model in it, the first after a random part of it, for clocks are not
    set alike. `period` is in seconds. When it is not given, it is twice as long as a node takes for a model that
    comes, by `device.step_seconds` and by how long the last one took: real time, where nodes are processes. It is a
    millisecond at the least, for with `device.step_seconds = 0` all rounds would be over before anything could come.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    variant: Literal["mu", "um", "rw"] = "mu"
    period: Annotated[float, Bounds(above=0)] | None = None

    traits: ClassVar[Traits] = Traits(sends_to="anyone")

    async def run(self, node: Node) -> None:
        own = _Own(node, trainings=2 if self.variant == "um" else 1)
        node.background(self._listen(node, own))
        rng = node.rng("gossip")
        async for r in node.rounds(self.rounds):
            period = self.period or max(SHORTEST, 2 * own.seconds)
            await node.sleep(period * rng.random() if r == 0 else period)
            gone = node.failed_peers
            peers = [peer for peer in (await node.peers(r)).to if peer not in gone]
            if peers:
                peer = peers[int(rng.integers(len(peers)))]
                await node.send([peer], _aged(node.sharing.outgoing(node.params, r), peer, own.age), round=r)

    async def _listen(self, node: Node, own: _Own) -> None:
        """The only task that assigns the model: no step is lost, though the clock above goes on while it trains."""
        waiting: dict[NodeId, Message] = {}
        while True:
            message = await node.receive(timeout=0.0 if waiting else None, check=_age)
            if message is not None:
                waiting[message.sender] = message
            elif waiting:
                began = node.now()
                await self._take(node, own, waiting.pop(next(iter(waiting))))
                own.seconds = max(own.by_device, node.now() - began)

    async def _take(self, node: Node, own: _Own, message: Message) -> None:
        sender, age = message.sender, _age(message.payload)
        received = {sender: message.payload}
        if self.variant == "mu":
            merged = node.sharing.merge(node.params, received, {sender: _share(age, own.age)})
            trained, age = await node.train(merged), max(age, own.age)
        elif self.variant == "um":
            theirs = await node.train(node.sharing.merge(node.params, received, {sender: 1.0}))
            ours = await node.train(node.params)
            share = _share(age + 1, own.age + 1)
            trained, age = ours + (theirs - ours) * share, max(age, own.age)
        else:
            trained = await node.train(node.sharing.merge(node.params, received, {sender: 1.0}))
        node.params, own.age = trained, min(age + 1, OLDEST - 1)
        node.memory["age"] = own.age


class _Own:
    """What the clock of a node has to know of its model."""

    def __init__(self, node: Node, trainings: int) -> None:
        self.age: int = node.memory.get("age", 0)
        self.by_device = trainings * node.trainer.steps(None) * node.trainer.step_seconds
        """How long the node's device takes for a model that comes."""
        self.seconds = self.by_device
        """The same, or how long the last one took if that was longer."""


def _aged(outgoing: Outgoing, peer: NodeId, age: int) -> Payload:
    said = outgoing if isinstance(outgoing, Payload) else outgoing(peer)
    return Payload(said.arrays, {**said.fields, "age": age})


def _age(payload: Payload) -> int:
    age = payload.fields.get("age")
    if type(age) is not int or not 0 <= age < OLDEST:
        raise MessageError(f"age = {age!r}: expected how often the model was trained")
    return age


def _share(theirs: int, ours: int) -> float:
    """The weight of a model with age `theirs`; of two that were never trained, each counts alike."""
    return theirs / (theirs + ours) if theirs + ours else 0.5
