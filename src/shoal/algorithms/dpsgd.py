"""D-PSGD: train, exchange, average (Lian et al., NeurIPS 2017, arXiv:1705.09056)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.node import Node
from shoal.traits import Traits
from shoal.types import Bounds


@dataclass(frozen=True)
class DPSGD:
    """Lian et al. 2017: train, exchange, average.

    With mixing weights W, step size η and gradients ∇F, all models X follow X ← W(X − η∇F(X)). With `overlap`, they
    follow the paper's other order, X ← WX − η∇F(X), in which models travel while their nodes train.
    """

    traits: ClassVar[Traits] = Traits(needs_only_sum=True)

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    overlap: bool = False

    async def run(self, node: Node) -> None:
        async for r in node.rounds(self.rounds):
            await (self._overlapped(node, r) if self.overlap else self._adapt_then_combine(node, r))

    async def _adapt_then_combine(self, node: Node, r: int) -> None:
        node.params = await node.train(node.params)
        peers = await node.peers(r)
        await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
        received = await node.receive_each(peers, round=r)
        node.params = node.sharing.merge(node.params, received, node.weights(received))

    async def _overlapped(self, node: Node, r: int) -> None:
        before = node.params
        peers = await node.peers(r)
        await node.send(peers, node.sharing.outgoing(before, r), round=r)
        step = await node.train(before) - before
        received = await node.receive_each(peers, round=r)
        node.params = node.sharing.merge(before, received, node.weights(received)) + step
