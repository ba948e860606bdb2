"""An algorithm: who speaks when. One coroutine, which runs on every node and in every engine."""

from dataclasses import dataclass
from typing import Annotated

from shoal import Bounds, Node


@dataclass(frozen=True)
class PluginName:
    """Train once, average `exchanges` times: nodes agree more, for as many times the messages.

    NEAR-DGD^t of Berahas et al. 2019, arXiv:1709.02999, with stochastic gradients; D-PSGD where `exchanges` is 1.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    exchanges: Annotated[int, Bounds(at_least=1)] = 2

    async def run(self, node: Node) -> None:
        async for r in node.rounds(self.rounds):  # evaluates and records between rounds
            node.params = await node.train(node.params)
            for exchange in range(self.exchanges):
                # Nodes are not in step: what a fast one says waits under its number until we ask for that number.
                # So each exchange has one of its own. A dynamic topology gives it its own graph, too.
                number = r * self.exchanges + exchange
                peers = await node.peers(number)
                await node.send(peers, node.sharing.outgoing(node.params, number), round=number)
                received = await node.receive_each(peers, round=number)  # without those that died
                node.params = node.sharing.merge(node.params, received, node.weights(received))
