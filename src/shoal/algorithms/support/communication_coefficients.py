"""SWIFT's communication coefficient selection (Bornstein et al., arXiv:2210.14026): symmetric averaging weights."""

from __future__ import annotations

from shoal.topologies.graph import Graph, Mixing, cached_per_mixing
from shoal.types import NodeId


@cached_per_mixing
def coefficients_of(mixing: Mixing) -> list[dict[NodeId, float]]:
    """Return the coefficients of the mixing's graph."""
    return communication_coefficients(mixing.graph)


def communication_coefficients(graph: Graph) -> list[dict[NodeId, float]]:
    """Return each node's weights for the models of its neighbours in a static undirected graph; the rest is its own.

    The paper's rule for nodes of equal influence: in descending order of degree, a node accepts the offers of its
    neighbours of higher degree, and divides the rest equally between itself and its other neighbours: these are its
    offers. Between nodes of equal degree, the smaller of the two offers counts. So the weights are symmetric. The
    weights of a node, with its own, sum to 1, and its own weight is at least 1/n, as the paper requires.

    On some graphs the offers of neighbours of higher degree leave a node less than 1/n for itself, or sum to more than
    1, such as three offers of 7/20. Then the node accepts at most 1/(1 + its degree) of each, and the neighbours keep
    the difference. The weights keep these properties, which the rule alone would break.
    """
    neighbours = [graph.links(node, 0).senders for node in range(graph.nodes)]
    degrees = [len(peers) for peers in neighbours]
    weights: list[dict[NodeId, float]] = [{} for _ in neighbours]
    offers = [0.0] * graph.nodes
    for node in sorted(range(graph.nodes), key=lambda node: -degrees[node]):
        higher = [peer for peer in neighbours[node] if degrees[peer] > degrees[node]]
        lower = degrees[node] - len(higher)
        accepted = {peer: offers[peer] for peer in higher}
        if (1.0 - sum(accepted.values())) / (lower + 1) < 1.0 / graph.nodes:
            accepted = {peer: min(offer, 1.0 / (1 + degrees[node])) for peer, offer in accepted.items()}
        offers[node] = (1.0 - sum(accepted.values())) / (lower + 1)
        for peer, weight in accepted.items():
            weights[node][peer] = weights[peer][node] = weight
    for node, peers in enumerate(neighbours):
        for peer in peers:
            if degrees[peer] == degrees[node]:
                weights[node][peer] = min(offers[node], offers[peer])
    return [dict(sorted(of_node.items())) for of_node in weights]
