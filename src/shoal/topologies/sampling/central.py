"""The central peer sampler: one more node, which tells each of the others its neighbours in every round.

Only the sampler knows the graph. A node that reaches a round says so; the first to do so makes the sampler tell
everybody the neighbours of the round after, so that they are there when they are needed. A graph that never changes
is told once. A sampler made anew from its state tells the round that it told last once more: what it said before may
have been under way. So it does to a node that died and comes back, with all rounds from the one that this reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError, TopologyError
from shoal.message import Payload
from shoal.node import Node
from shoal.state import State
from shoal.topologies.graph import Graph, Peers, Topology
from shoal.topologies.regular import Regular
from shoal.traits import ExperimentView, Traits
from shoal.types import Nested, NodeId

REACHED = "round reached"
NEIGHBOURS = "neighbours"
LEAP = 64
"""Rounds that nodes may pass over without asking for neighbours. Who claims to be further on than that is refused:
each round in between would be told to everybody."""


@dataclass(frozen=True)
class PeerSampler:
    """A node of its own tells every node its neighbours each round, from any graph (Dhasade et al. 2023).

    With the graph it has by default this is the oracle of Epidemic Learning (de Vos et al. 2023). Should the sampler
    die or fall silent, nodes keep the neighbours that they were told last, without those that no longer answer.
    """

    traits: ClassVar[Traits] = Traits(discovers_peers=True, has_service=True)

    graph: Annotated[Topology, Nested("topology")] = Regular(degree=5, dynamic=True)

    @property
    def inner(self) -> Topology:
        return self.graph

    def build(self, nodes: int, seed: int) -> Graph:
        """The graph behind the sampler."""
        return self.graph.build(nodes, seed)

    def discovery(self) -> Told:
        return Told()

    async def serve(self, node: Node) -> None:
        lasting = node.mixing.graph.static
        await self._tell(node, node.memory.get("told", 0), lasting)
        returns: dict[NodeId, int] = {}
        while (message := await node.receive(kind=REACHED)) is not None:
            told: int = node.memory["told"]
            if node.rejoin_counts.get(message.sender) != returns.get(message.sender):
                returns[message.sender] = node.rejoin_counts[message.sender]
                for round in range(message.round, (message.round if lasting else told) + 1):
                    await self._say(node, [message.sender], round, lasting)
            if lasting:
                continue
            if message.round > told + LEAP:
                node.reject(
                    message.sender, f"says that it has reached round {message.round}, and was told {told} at the most"
                )
                continue
            for round in range(told + 1, message.round + 2):
                await self._tell(node, round, lasting)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        graph = experiment.topology.options["graph"]
        if graph.traits.discovers_peers:
            return [
                f"topology.graph = {graph.name!r}: its nodes find their peers by talking, and a sampler has to know "
                "the graph; use a graph such as 'regular' here, or this sampler as the topology itself"
            ]
        if not graph.traits.needs_labels:
            try:
                self.graph.build(experiment.nodes, experiment.seed)
            except TopologyError as error:
                return [f"topology.graph: {error}"]
        return []

    async def _tell(self, node: Node, round: int, lasting: bool) -> None:
        node.memory["told"] = round
        async with node.round(round):
            await self._say(node, range(node.nodes), round, lasting)

    async def _say(self, node: Node, to: Iterable[NodeId], round: int, lasting: bool) -> None:
        def said(peer: NodeId) -> Payload:
            return _told(node.mixing.peers(peer, round), lasting)

        await node.send(to, said, round=round, kind=NEIGHBOURS)


class Told:
    """The finder of nodes that are told their neighbours."""

    def __init__(self) -> None:
        self._peers: Peers | None = None
        self._round = -1
        self._lasting = False
        self._alone = False

    async def peers(self, node: Node, round: int) -> Peers:
        """The neighbours of this round, or those told last when the sampler has died or keeps silent."""
        if self._peers is not None and (self._lasting or round == self._round):
            return self._peers
        if not self._alone:
            sampler = node.context.services["topology"]
            await node.send([sampler], Payload({}), round=round, kind=REACHED)
            while (message := await node.receive(kind=NEIGHBOURS, round=round, sender=sampler)) is not None:
                try:
                    self._peers, self._lasting = _understood(message.payload, node)
                except MessageError as error:
                    node.reject(message.sender, str(error))
                    continue
                self._round = round
                return self._peers
            self._alone = True
            silent = "" if sampler in node.failed_peers else f"node {sampler} keeps silent; "
            node.event("peer sampler lost", f"round {round}: {silent}goes on with {self._kept()}")
        return self._without_the_silent(node, round)

    def state(self) -> State:
        if self._peers is None:
            return {}
        heard = list(self._peers.weights)
        return {
            "round": self._round,
            "lasting": self._lasting,
            "to": list(self._peers.to),
            "of": heard,
            "weights": [self._peers.weights[peer] for peer in heard],
        }

    def restore(self, state: State) -> None:
        if state:
            self._round, self._lasting = state["round"], state["lasting"]
            self._peers = Peers(tuple(state["to"]), dict(zip(state["of"], state["weights"], strict=True)))

    def _kept(self) -> str:
        return "no neighbours: it was never told any" if self._peers is None else f"the peers of round {self._round}"

    def _without_the_silent(self, node: Node, round: int) -> Peers:
        """What was told last. Others may have been told of another round: those are not waited for twice."""
        kept = self._peers or Peers((), {})
        if node.timed_out_peers & kept.weights.keys():
            node.event("peers dropped", f"round {round}: no longer waits for {sorted(node.timed_out_peers)}")
            kept = Peers(kept.to, kept.weights_of([peer for peer in kept.weights if peer not in node.timed_out_peers]))
        self._peers = kept
        return kept


def _told(peers: Peers, lasting: bool) -> Payload:
    arrays: dict[str, NDArray[Any]] = {
        "to": np.array(peers.to, np.uint32),
        "of": np.fromiter(peers.weights.keys(), np.uint32, len(peers.weights)),
        "weights": np.fromiter(peers.weights.values(), np.float64, len(peers.weights)),
    }
    return Payload(arrays, {"lasting": lasting})


def _understood(payload: Payload, node: Node) -> tuple[Peers, bool]:
    """The neighbours that a sampler tells `node`, and whether they are so for good."""
    try:
        to, of = _ids(payload, "to", node), _ids(payload, "of", node)
        weights = payload.arrays["weights"]
    except KeyError as error:
        raise MessageError(f"neighbours without {error}") from error
    if weights.dtype != np.float64 or weights.shape != (len(of),):
        raise MessageError(f"expected {len(of)} float64 weights")
    if not np.isfinite(weights).all() or (weights < 0).any() or math.fsum(weights) > 1 + 1e-9:
        raise MessageError("weights that are negative, or sum to more than 1")
    return Peers(to, dict(zip(of, weights.tolist(), strict=True))), payload.fields.get("lasting") is True


def _ids(payload: Payload, name: str, node: Node) -> tuple[NodeId, ...]:
    ids = payload.arrays[name]
    if ids.dtype != np.uint32 or ids.ndim != 1:
        raise MessageError(f"{name!r}: expected a list of uint32")
    found: tuple[NodeId, ...] = tuple(ids.tolist())
    if len(set(found)) != len(found) or node.id in found or any(peer >= node.nodes for peer in found):
        raise MessageError(f"{name!r}: expected different nodes below {node.nodes}, without {node.id} itself")
    return found
