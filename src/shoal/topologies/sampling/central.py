"""The central peer sampler: a service node that sends every node its neighbours in each round.

Only the sampler knows the graph. Every node reports the rounds that it reaches. On the first report of a round, the
sampler sends all nodes their neighbours in the next round, so that they arrive before they are needed. The neighbours
of a static graph are sent once. A restored sampler sends the last round again, because its messages may have been in
transit. A node that rejoins is sent all rounds again, from the round that it reaches.
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
STATIC = "lasting"
MAX_SKIPPED_ROUNDS = 64
"""Rounds that nodes may skip without asking for neighbours. A report beyond is rejected, because the neighbours of all
rounds in between would be sent to all nodes."""


@dataclass(frozen=True)
class PeerSampler:
    """A service node sends every node its neighbours in each round, from any graph (Dhasade et al. 2023).

    With its default graph this is the oracle of Epidemic Learning (de Vos et al. 2023). If the sampler fails or times
    out, nodes keep their last neighbours, without peers that time out.
    """

    traits: ClassVar[Traits] = Traits(discovers_peers=True, has_service=True)

    graph: Annotated[Topology, Nested("topology")] = Regular(degree=5, dynamic=True)

    @property
    def sampled_topology(self) -> Topology:
        return self.graph

    def build(self, nodes: int, seed: int) -> Graph:
        """Return the sampler's graph."""
        return self.graph.build(nodes, seed)

    def discovery(self) -> CentralDiscovery:
        return CentralDiscovery()

    async def serve(self, node: Node) -> None:
        static = node.mixing.graph.static
        if static:
            node.checkpoints.leave()  # it only sends the neighbours once
        await self._send_round(node, node.algorithm_state.get("last_round", 0), static)
        rejoin_counts: dict[NodeId, int] = {}
        while (message := await node.receive(kind=REACHED)) is not None:
            last_round: int = node.algorithm_state["last_round"]
            if node.rejoin_counts.get(message.sender) != rejoin_counts.get(message.sender):
                rejoin_counts[message.sender] = node.rejoin_counts[message.sender]
                for round in range(message.round, (message.round if static else last_round) + 1):
                    await self._send_neighbours(node, [message.sender], round, static)
            if static:
                continue
            if message.round > last_round + MAX_SKIPPED_ROUNDS:
                node.reject(
                    message.sender, f"it reports round {message.round}, but neighbours were sent up to {last_round}"
                )
                continue
            for round in range(last_round + 1, message.round + 2):
                await self._send_round(node, round, static)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        graph = experiment.topology.options["graph"]
        if graph.traits.discovers_peers:
            return [
                f"topology.graph = {graph.name!r}: its nodes find their peers by a protocol, and a sampler must know "
                "the graph; use a graph such as 'regular' here, or this sampler as the topology"
            ]
        if not graph.traits.needs_labels:
            try:
                self.graph.build(experiment.nodes, experiment.seed)
            except TopologyError as error:
                return [f"topology.graph: {error}"]
        return []

    async def _send_round(self, node: Node, round: int, static: bool) -> None:
        node.algorithm_state["last_round"] = round
        async with node.requested_round(round):
            await self._send_neighbours(node, range(node.nodes), round, static)

    async def _send_neighbours(self, node: Node, to: Iterable[NodeId], round: int, static: bool) -> None:
        def payload(peer: NodeId) -> Payload:
            return _encode(node.mixing.peers(peer, round), static)

        await node.send(to, payload, round=round, kind=NEIGHBOURS)


class CentralDiscovery:
    """Asks the central sampler for neighbours."""

    def __init__(self) -> None:
        self._peers: Peers | None = None
        self._round = -1
        self._static = False
        self._sampler_unreachable = False

    async def peers(self, node: Node, round: int) -> Peers:
        """Return the neighbours in this round, or the last ones if the sampler has failed or timed out."""
        if self._peers is not None and (self._static or round == self._round):
            return self._peers
        if not self._sampler_unreachable:
            sampler = node.context.services["topology"]
            await node.send([sampler], Payload({}), round=round, kind=REACHED)
            while (message := await node.receive(kind=NEIGHBOURS, round=round, sender=sampler)) is not None:
                try:
                    self._peers, self._static = _decode(message.payload, node)
                except MessageError as error:
                    node.reject(message.sender, str(error))
                    continue
                self._round = round
                return self._peers
            self._sampler_unreachable = True
            failure = "failed" if sampler in node.failed_peers else "timed out"
            detail = f"round {round}: node {sampler} {failure}; this node keeps {self._describe_kept()}"
            node.record_event("peer sampler unreachable", detail)
        return self._without_timed_out_peers(node, round)

    def state(self) -> State:
        if self._peers is None:
            return {}
        senders = list(self._peers.weights)
        return {
            "round": self._round,
            "static": self._static,
            "to": list(self._peers.receivers),
            "of": senders,
            "weights": [self._peers.weights[peer] for peer in senders],
        }

    def restore(self, state: State) -> None:
        if state:
            self._round, self._static = state["round"], state["static"]
            self._peers = Peers(tuple(state["to"]), dict(zip(state["of"], state["weights"], strict=True)))

    def _describe_kept(self) -> str:
        return "no neighbours: it never received any" if self._peers is None else f"the peers of round {self._round}"

    def _without_timed_out_peers(self, node: Node, round: int) -> Peers:
        """Return the last neighbours, without peers that timed out.

        These peers may use the neighbours of another round and never send.
        """
        kept = self._peers or Peers((), {})
        if node.timed_out_peers & kept.weights.keys():
            node.record_event("peers dropped", f"round {round}: no longer waits for {sorted(node.timed_out_peers)}")
            kept = Peers(
                kept.receivers, kept.weights_of([peer for peer in kept.weights if peer not in node.timed_out_peers])
            )
        self._peers = kept
        return kept


def _encode(peers: Peers, static: bool) -> Payload:
    arrays: dict[str, NDArray[Any]] = {
        "to": np.array(peers.receivers, np.uint32),
        "of": np.fromiter(peers.weights.keys(), np.uint32, len(peers.weights)),
        "weights": np.fromiter(peers.weights.values(), np.float64, len(peers.weights)),
    }
    return Payload(arrays, {STATIC: static})


def _decode(payload: Payload, node: Node) -> tuple[Peers, bool]:
    """Return the neighbours of `node`, and whether they are the same in all rounds. Raises `MessageError`."""
    try:
        to, of = _ids(payload, "to", node), _ids(payload, "of", node)
        weights = payload.arrays["weights"]
    except KeyError as error:
        raise MessageError(f"neighbours without {error}") from error
    if weights.dtype != np.float64 or weights.shape != (len(of),):
        raise MessageError(f"expected {len(of)} float64 weights")
    if not np.isfinite(weights).all() or (weights < 0).any() or math.fsum(weights) > 1 + 1e-9:
        raise MessageError("expected weights of at least 0 that sum to at most 1")
    return Peers(to, dict(zip(of, weights.tolist(), strict=True))), payload.fields.get(STATIC) is True


def _ids(payload: Payload, name: str, node: Node) -> tuple[NodeId, ...]:
    ids = payload.arrays[name]
    if ids.dtype != np.uint32 or ids.ndim != 1:
        raise MessageError(f"{name!r}: expected a list of uint32")
    found: tuple[NodeId, ...] = tuple(ids.tolist())
    if len(set(found)) != len(found) or node.id in found or any(peer >= node.nodes for peer in found):
        raise MessageError(f"{name!r}: expected different nodes below {node.nodes}, without {node.id} itself")
    return found
