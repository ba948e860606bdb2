"""D-PSGD in its overlapped order: models travel while nodes train (Lian et al., NeurIPS 2017, arXiv:1705.09056)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.node import Node


@dataclass(frozen=True)
class OverlappedDPSGD:
    """Lian et al. 2017: send, train, average, then add the local step.

    All models X follow X ← WX − η∇F(X). An experiment selects it with `name = "dpsgd", overlap = true`.
    """

    rounds: int = 100

    async def run(self, node: Node) -> None:
        async for r in node.rounds(self.rounds):
            before = node.params
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(before, r), round=r)
            step = await node.train(before) - before
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(before, received, node.weights(received)) + step
