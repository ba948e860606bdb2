"""The interfaces of a node: what it receives, and the protocols of components that talk to it directly.

Peer discoveries, service providers and interactive sharings are such components. Most components never see a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from shoal.message import Payload
from shoal.sharing.sharing import SenderGroup
from shoal.topologies.graph import Mixing, Peers
from shoal.types import NodeId

if TYPE_CHECKING:
    from shoal.node import Node


class Received(dict[NodeId, Payload]):
    """Payloads by sender, in ascending order of sender."""

    __slots__ = ("peers",)

    def __init__(self, peers: Peers | None = None) -> None:
        """`peers`: the expected senders, with their mixing weights; None if the receive named only ids."""
        self.peers = peers


class PeerDiscovery(Protocol):
    """Finds the peers of one node; one instance per node. It may keep a state (`shoal.state.Stateful`)."""

    async def peers(self, node: Node, round: int) -> Peers: ...


class DiscoveryTopology(Protocol):
    """A topology whose nodes find their peers with a protocol. In other topologies the peers follow from the seed."""

    def discovery(self) -> PeerDiscovery: ...


class ServiceProvider(Protocol):
    """An algorithm or a topology that needs a node of its own, such as a server or a peer sampler.

    A service node has no data. It runs `serve`, and the engine cancels it when the last training node has ended.
    """

    async def serve(self, node: Node) -> None: ...


class InteractiveSharing(Protocol):
    """A sharing that exchanges messages of its own with the sharings of other nodes, for example keys.

    Its class declares `Traits(interactive=True)`. The node calls these methods before and after it sends or receives
    messages of kind "model"; the algorithm does not need to change.
    """

    def set_sender_group(self, receiver: NodeId, round: int, group: SenderGroup) -> None:
        """Define which nodes send to `receiver` in `round`. Needed for receivers outside the graph, such as servers."""
        ...

    async def before_send(self, node: Node, to: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        """Prepare payloads for `to`. Returns the receivers that the node may send to."""
        ...

    def expected_senders(self, node: Node, senders: Sequence[NodeId], round: int) -> Sequence[NodeId]:
        """Return the nodes of `senders` that may send to this node in `round`."""
        ...

    async def after_receive(self, node: Node, received: Received, round: int) -> Received:
        """Turn received payloads into payloads for `merge`, without the senders whose payloads are not usable."""
        ...

    async def serve_peers(self, node: Node) -> None:
        """Answer requests from the sharings of other nodes. Runs in the background while the algorithm runs."""
        ...

    async def drain(self, node: Node) -> None:
        """Wait after the end of the algorithm until no other node needs answers from this node."""
        ...


class GraphPeers:
    """The default peer discovery: reads the peers from the graph, without messages."""

    def __init__(self, mixing: Mixing) -> None:
        self.mixing = mixing

    async def peers(self, node: Node, round: int) -> Peers:
        return self.mixing.peers(node.id, round)
