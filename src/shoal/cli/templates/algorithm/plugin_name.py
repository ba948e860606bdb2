"""An algorithm: when a node trains, sends, receives and averages. The same coroutine runs on every node."""

from dataclasses import dataclass
from typing import Annotated

from shoal import Bounds, Node


@dataclass(frozen=True)
class PluginName:
    """Train once, average `exchanges` times: the models get closer, at `exchanges` times the number of messages.

    NEAR-DGD^t of Berahas et al. 2019, arXiv:1709.02999, with stochastic gradients; D-PSGD if `exchanges` is 1.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    exchanges: Annotated[int, Bounds(at_least=1)] = 2

    async def run(self, node: Node) -> None:
        async for r in node.rounds(self.rounds):  # evaluates and records between rounds
            node.params = await node.train(node.params)
            for exchange in range(self.exchanges):
                # Nodes are not synchronized: a message of a fast node waits until this node asks for its number.
                # Therefore each exchange has its own number. A dynamic topology has a graph for each number.
                number = r * self.exchanges + exchange
                peers = await node.peers(number)
                await node.send(peers, node.sharing.outgoing(node.params, number), round=number)
                received = await node.receive_each(peers, round=number)  # failed peers are missing
                node.params = node.sharing.merge(node.params, received, node.weights(received))
