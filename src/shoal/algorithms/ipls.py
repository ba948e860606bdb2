"""IPLS: every peer is the server of a part of the model (Pappas et al., IFIP Networking 2021, arXiv:2101.01901)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shoal.algorithms.support.partition_exchange import PartitionExchange
from shoal.node import Node
from shoal.traits import Traits
from shoal.types import Bounds


@dataclass(frozen=True)
class IPLS:
    """Pappas et al. 2021: each peer averages a few partitions of the model for all peers, and fetches the others.

    The model is cut into `partitions` slices, by default as many as there are nodes. Each peer is responsible for at
    least `per_node` of them. In a round a peer trains the whole model, then
    - sends each slice to one of the peers responsible for it, spread evenly over them;
    - averages the slices that it receives, and exchanges the average and its weight with the other replicas of its
      partitions;
    - sends the averages to the senders of the slices, and puts the averages that it receives into its model.
    So every peer ends the round with x ← mean_i train_i(x), or with the mean weighted by sample counts. Slices are
    those of the trained models, not of their changes: nodes that differ after a fault are equal after the next round.

    If a peer fails or times out, the least loaded of the other peers take over its partitions in the next round. Each
    peer assigns these roles itself, without the nodes that it takes to be absent, and lists these nodes in its update.
    So all peers know what each peer does in this round, even before they agree. A slice without an average keeps the
    values of its own node. A late peer is sent the averages, but is not waited for in the next rounds; it counts again
    as soon as it is in time. `deadline` is the time to wait for peers in each of the three exchanges, in seconds; by
    default the engine's timeout. See docs/decisions/ipls.md.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    partitions: Annotated[int, Bounds(at_least=1)] | None = None
    per_node: Annotated[int, Bounds(at_least=1)] = 1
    weights: Literal["equal", "samples"] = "equal"
    deadline: Annotated[float, Bounds(above=0)] | None = None

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        peers = PartitionExchange(
            node,
            partitions=self.partitions or node.nodes,
            per_node=self.per_node,
            weighted=self.weights == "samples",
            deadline=self.deadline,
        )
        async for r in node.rounds(self.rounds):
            trained = await node.train(node.params)
            updates = await peers.exchange_updates(trained, r)
            averages = await peers.exchange_partials(updates, r)
            node.params = await peers.exchange_results(trained, updates, averages, r)
