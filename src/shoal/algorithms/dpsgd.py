"""D-PSGD: train, exchange, average (Lian et al., NeurIPS 2017, arXiv:1705.09056)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.algorithms.overlapped_dpsgd import OverlappedDPSGD
from shoal.node import Node
from shoal.traits import Traits
from shoal.types import Bounds


@dataclass(frozen=True)
class DPSGD:
    """Lian et al. 2017: train, exchange, average.

    With mixing weights W, step size η and gradients ∇F, all models X follow X ← W(X − η∇F(X)). `overlap` selects the
    paper's other order, X ← WX − η∇F(X): see `OverlappedDPSGD`.
    """

    traits: ClassVar[Traits] = Traits(needs_only_sum=True)

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    overlap: bool = False

    async def run(self, node: Node) -> None:
        if self.overlap:
            await OverlappedDPSGD(self.rounds).run(node)
            return
        async for r in node.rounds(self.rounds):
            node.params = await node.train(node.params)
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(node.params, received, node.weights(received))
