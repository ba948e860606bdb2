"""Gossip learning: on a clock, nodes send their models to random peers, which merge and train them.

The protocol: Ormándi, Hegedűs, Jelasity: Gossip Learning with Linear Models on Fully Distributed Data, Concurrency and
Computation 25(4), 2013; its merge is the plain average. The merge by age: Hegedűs, Danner, Jelasity: Gossip Learning as
a Decentralized Alternative to Federated Learning, DAIS 2019, and Decentralized Learning Works, Journal of Parallel and
Distributed Computing 148, 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.sharing import payload_for
from shoal.traits import Traits
from shoal.types import Bounds, NodeId

MAX_AGE = 2**53
"""Ages are below this limit, so that they are exact as integers and as floats."""
MIN_PERIOD = 1e-3
"""The shortest default period in seconds, for devices that take no time."""


@dataclass(frozen=True)
class Gossip:
    """Ormándi et al. 2013, Hegedűs et al. 2019: on a clock, send the model to one random peer, which merges and trains.

    `merge` is how a node with model x merges a received model y. A model's age is the number of times that it was
    trained: s for x, t for y.
    - "age": (s·x + t·y)/(s + t), of age max(s, t): Hegedűs et al. 2019, 2021;
    - "average": (x + y)/2, of age max(s, t): Ormándi et al. 2013;
    - "none": y, of age t: the received model replaces the node's, so that models make random walks.

    `variant` is the order (Ormándi et al. 2013): "mu": merge, then train; "um": train both models, then merge; "rw":
    "mu" without a merge, as with `merge` = "none". Of several models of one peer that wait for a busy node, the latest
    counts.

    A round is one period. Each node sends one model per period, the first after a random part of it, because clocks are
    not synchronised. `period` is in seconds. By default it is twice the time that a node needs for a received model:
    the larger of `speed.step_seconds` times the steps and the time that the last one took, which is real time if
    nodes are processes. It is at least a millisecond, because with `speed.step_seconds = 0` all rounds would end
    before any model arrives.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    variant: Literal["mu", "um", "rw"] = "mu"
    period: Annotated[float, Bounds(above=0)] | None = None
    merge: Literal["age", "average", "none"] = "age"

    traits: ClassVar[Traits] = Traits(sends_to="anyone", checkpoint_cut="time")

    def __post_init__(self) -> None:
        if self.variant == "um" and self.merge == "none":
            raise ValueError("merge = 'none': variant = 'um' trains two models to merge them; use variant = 'mu'")
        if self.variant == "rw" and self.merge == "average":
            raise ValueError("merge = 'average': variant = 'rw' merges no models; use variant = 'mu', or remove merge")

    async def run(self, node: Node) -> None:
        state = _ModelState(node, trainings=2 if self.variant == "um" else 1)
        node.background(self._receive_models(node, state))
        rng = node.rng("gossip")
        async for r in node.rounds(self.rounds):
            period = self.period or max(MIN_PERIOD, 2 * state.seconds)
            await node.sleep(period * rng.random() if r == 0 else period)
            failed = node.failed_peers
            peers = [peer for peer in (await node.peers(r)).receivers if peer not in failed]
            if peers:
                peer = peers[int(rng.integers(len(peers)))]
                model = payload_for(node.sharing.outgoing(node.params, r), peer)
                await node.send([peer], model.with_field("age", state.age), round=r)

    async def _receive_models(self, node: Node, state: _ModelState) -> None:
        """Receive and use models. Only this task assigns the model, so no step is lost while the clock above runs."""
        waiting: dict[NodeId, Message] = {}
        while True:
            message = await node.receive(timeout=0.0 if waiting else None, check=_age_of)
            if message is not None:
                waiting[message.sender] = message
            elif waiting:
                began = node.now()
                await self._use(node, state, waiting.pop(next(iter(waiting))))
                state.seconds = max(state.device_seconds, node.now() - began)

    async def _use(self, node: Node, state: _ModelState, message: Message) -> None:
        sender, age = message.sender, _age_of(message.payload)
        received = {sender: message.payload}
        if self.variant == "um":
            theirs = await node.train(node.sharing.merge(node.params, received, {sender: 1.0}))
            ours = await node.train(node.params)
            trained = ours + (theirs - ours) * self._weight(age + 1, state.age + 1)
        else:
            weight = self._weight(age, state.age)
            trained = await node.train(node.sharing.merge(node.params, received, {sender: weight}))
        if not self._replaces:
            age = max(age, state.age)
        node.params, state.age = trained, min(age + 1, MAX_AGE - 1)
        node.algorithm_state["age"] = state.age

    @property
    def _replaces(self) -> bool:
        """Whether a received model replaces the node's."""
        return self.variant == "rw" or self.merge == "none"

    def _weight(self, theirs: int, ours: int) -> float:
        """The weight of a received model of age `theirs`. Two models that were never trained have equal weights."""
        if self._replaces:
            return 1.0
        return theirs / (theirs + ours) if self.merge == "age" and theirs + ours else 0.5


class _ModelState:
    """The age of the node's model, and the time that a received model takes."""

    def __init__(self, node: Node, trainings: int) -> None:
        self.age: int = node.algorithm_state.get("age", 0)
        self.device_seconds = trainings * node.trainer.steps(None) * node.trainer.step_seconds
        """The time that the node's device needs for a received model."""
        self.seconds = self.device_seconds
        """The same, or the time that the last model took if that was longer."""


def _age_of(payload: Payload) -> int:
    age = payload.fields.get("age")
    if type(age) is not int or not 0 <= age < MAX_AGE:
        raise MessageError(f"age = {age!r}: expected the number of times that the model was trained")
    return age
