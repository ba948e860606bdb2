"""A network: how long messages take."""

from dataclasses import dataclass
from typing import Annotated

from shoal import Bounds, NodeId
from shoal.environment.network.network import LOOPBACK, NetworkTimeline, Route, capacity


@dataclass(frozen=True)
class PluginName:
    """Two sites, each with half of the nodes. All messages from one site to the other share one link.

    Bandwidths are in Mbit/s, latencies in seconds, one way.
    """

    bandwidth: Annotated[float, Bounds(above=0)] = 100.0  # of each node, up and down
    between: Annotated[float, Bounds(above=0)] = 20.0  # of the link between the sites, in each direction
    latency: Annotated[float, Bounds(at_least=0)] = 0.001
    latency_between: Annotated[float, Bounds(at_least=0)] = 0.02

    def build(self, nodes: int, seed: int) -> NetworkTimeline:
        # Every process builds the network itself: it must depend on the arguments only. For a network that changes,
        # return more states, each with the second at which it starts. Servers are nodes, too.
        return NetworkTimeline([(0.0, TwoSites(self, nodes))])


class TwoSites:
    """Link 2i is the upload of node i, link 2i + 1 its download. The last two links are between the sites."""

    def __init__(self, settings: PluginName, nodes: int) -> None:
        self.settings, self.nodes = settings, nodes
        self.capacities = capacity([settings.bandwidth] * (2 * nodes) + [settings.between] * 2)  # bytes per second
        self._routes: dict[tuple[NodeId, NodeId], Route] = {}

    def access(self, node: NodeId) -> tuple[int, ...]:
        """The node's own links, which a slow device can limit further."""
        return (2 * node, 2 * node + 1)

    def route(self, sender: NodeId, receiver: NodeId) -> Route:
        if sender == receiver:
            return LOOPBACK
        if (sender, receiver) not in self._routes:  # called for every message: keep the routes
            self._routes[sender, receiver] = self._create_route(sender, receiver)
        return self._routes[sender, receiver]

    def _create_route(self, sender: NodeId, receiver: NodeId) -> Route:
        own_links, latencies = (2 * sender, 2 * receiver + 1), self.settings
        sites = [2 * node // self.nodes for node in (sender, receiver)]
        if sites[0] == sites[1]:
            return Route(own_links, latencies.latency)
        return Route((*own_links, 2 * self.nodes + sites[0]), latencies.latency_between)
