"""The sender groups that secure aggregation works on: which nodes send to a receiver in a round."""

from __future__ import annotations

from shoal.errors import NodeError
from shoal.node import Node
from shoal.sharing.sharing import SenderGroup
from shoal.types import NodeId


class SenderGroups:
    """The sender groups that one node knows: those of the graph, and those that a server has announced."""

    def __init__(self) -> None:
        self._announced: dict[NodeId, tuple[int, SenderGroup]] = {}
        """The latest announced group of each receiver, with its round."""

    def announce(self, receiver: NodeId, round: int, group: SenderGroup) -> None:
        self._announced[receiver] = round, group

    def of(self, node: Node, receiver: NodeId, round: int) -> SenderGroup:
        """Return the nodes that send to `receiver` in `round`. Raises `NodeError` if neither source knows them."""
        announced = self._announced.get(receiver)
        if announced is not None and announced[0] == round:
            return announced[1]
        if receiver >= node.nodes:
            raise NodeError(
                f"node {node.id} does not know the senders of node {receiver} in round {round}: node {receiver} is not "
                "in the graph and has announced no senders"
            )
        weights = node.mixing.peers(receiver, round).weights
        return SenderGroup(weights.keys(), weights)
