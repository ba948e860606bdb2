"""AD-PSGD: nodes average in pairs while they train (Lian et al., ICML 2018, arXiv:1710.06952)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shoal.algorithms.support.bipartition import bipartition, bipartition_of
from shoal.algorithms.support.pairwise_averaging import ActiveSide, PassiveSide
from shoal.node import Node
from shoal.topologies.graph import TopologyWarning
from shoal.topologies.inspection import graph_of, is_directed, is_dynamic
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, NodeId


@dataclass(frozen=True)
class ADPSGD:
    """Lian et al. 2018: compute a gradient on a copy of the model, average with one random neighbour, then step.

    In an iteration, with x̂ = x at its start and u = train(x̂) − x̂: x_i and x_j ← (x_i + x_j)/2 atomically, with a
    random neighbour j, while i trains; then x_i ← x_i + u. Averages that other nodes start with i meanwhile are kept.

    The links form a bipartite graph, so that no two nodes wait for each other. Active nodes start one exchange per
    iteration and wait for its end if it takes longer than the training. Passive nodes answer at once while they train,
    and never wait. The larger side is active, so that passive nodes are averaged about as often as active nodes; of two
    equal sides, the side of the lowest node. With `bipartite` = "make", links within a side are dropped from any other
    graph, with a warning; with "require", such a graph is rejected. Pairs average evenly: the weights of the experiment
    are not used.

    A repeated request is answered again and counts once; an answer after its timeout still counts. Nodes that have
    finished their rounds answer until their neighbours have finished. See `support.pairwise_averaging`.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    bipartite: Literal["make", "require"] = "make"
    patience: Annotated[float, Bounds(above=0)] | None = None
    """Seconds to wait for an answer before the request is repeated; by default the timeout of the experiment or the
    engine."""
    attempts: Annotated[int, Bounds(at_least=1)] = 3
    """The number of requests to send before the node continues without an answer."""

    traits: ClassVar[Traits] = Traits(own_payloads=True, checkpoint_cut="time")

    async def run(self, node: Node) -> None:
        sides = bipartition_of(node.mixing)
        if node.id == 0 and sides.dropped:
            node.record_event(
                "links dropped", f"{sides.dropped} of {sides.links} links are within a side and are not used"
            )
        if node.id in sides.active:
            await self._run_active(node, sides.neighbours[node.id])
        else:
            await self._run_passive(node, sides.neighbours[node.id])

    async def _run_active(self, node: Node, passive: tuple[NodeId, ...]) -> None:
        averaging = ActiveSide(node, passive, timeout=self.patience, attempts=self.attempts)
        async for r in node.rounds(self.rounds):
            averaging.apply_late_answers()
            before = node.params
            peer = await averaging.start_exchange(r)
            step = await node.train(before) - before
            if peer is not None:
                await averaging.finish_exchange(peer, r)
            node.params = node.params + step
        averaging.apply_late_answers()
        await averaging.announce_end(self.rounds - 1)

    async def _run_passive(self, node: Node, active: tuple[NodeId, ...]) -> None:
        averaging = PassiveSide(node, active, timeout=self.patience, attempts=self.attempts)
        async for r in node.rounds(self.rounds):
            before = node.params
            step = await node.train(before) - before
            node.params = node.params + step
            if r == self.rounds - 1:
                await averaging.wait_for_active()  # within the last round, so that the final model is evaluated
        await averaging.wait_for_active()  # a node that rejoined after the last round has had no round

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        graph, name = graph_of(experiment), experiment.topology.name
        if is_dynamic(experiment, graph) or is_directed(graph):
            return [
                f"topology = {name!r}: 'adpsgd' averages in pairs and needs an undirected graph that does not change; "
                "use a graph like { name = 'ring' } or { name = 'regular' } without dynamic"
            ]
        sides = None if graph is None else bipartition(graph)
        if sides is None or not sides.dropped:
            return []
        if self.bipartite == "require":
            return [
                f"topology = {name!r}: the graph is not bipartite because of {sides.dropped} of its {sides.links} "
                "links; use algorithm.bipartite = 'make' to drop these links, or a bipartite graph such as a ring of "
                "an even number of nodes, a grid or a tree"
            ]
        warnings.warn(
            f"'adpsgd' needs a bipartite graph and topology {name!r} is not bipartite: {sides.dropped} of its "
            f"{sides.links} links are dropped",
            TopologyWarning,
            stacklevel=2,
        )
        return []
