"""Properties of an experiment's graph that components check before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from shoal.topologies.graph import Graph, Mixing, TopologyWrapper
from shoal.topologies.static import FullGraph, components
from shoal.traits import ExperimentView
from shoal.types import NodeId


def graph_of(experiment: ExperimentView) -> Graph | None:
    """Return the experiment's graph. None if it is not known, or if nodes find their peers by a protocol."""
    return None if experiment.topology.traits.discovers_peers else initial_graph(experiment)


def initial_graph(experiment: ExperimentView) -> Graph | None:
    """Return the graph that the topology builds: `ExperimentView.graph`."""
    graph: Graph | None = experiment.graph
    return graph


def mixing_graph(experiment: ExperimentView) -> Graph | None:
    """Return the graph whose weights nodes use: also that of a peer sampler that takes all neighbours from a graph."""
    topology = experiment.topology
    if topology.traits.discovers_peers and not isinstance(topology.build(), TopologyWrapper):
        return None
    return initial_graph(experiment)


def is_dynamic(experiment: ExperimentView, graph: Graph | None) -> bool:
    """Whether the neighbours of a node may differ between rounds. `graph` is the result of `graph_of`."""
    return experiment.topology.traits.discovers_peers or (graph is not None and not graph.static)


def is_directed(graph: Graph | None) -> bool:
    """Whether in round 0 some node sends to a peer that it does not receive from. False if there is no graph."""
    if graph is None or isinstance(graph, FullGraph):  # a full graph has n² links
        return False
    return any(links.receivers != links.senders for links in (graph.links(node, 0) for node in range(graph.nodes)))


CHECKED_ROUNDS = 3
"""Rounds of a changing graph whose weights are checked."""


def is_doubly_stochastic(mixing: Mixing) -> bool:
    """Whether the columns of the mixing matrix sum to 1, as its rows do; then mixing keeps the mean of all models."""
    graph = mixing.graph
    if isinstance(graph, FullGraph):
        return True
    if graph.static and mixing.scheme == "metropolis-hastings" and not is_directed(graph):
        return True
    for round in range(1 if graph.static else CHECKED_ROUNDS):
        columns = np.ones(graph.nodes)
        for node in range(graph.nodes):
            for peer, weight in mixing.peers(node, round).weights.items():
                columns[peer] += weight
                columns[node] -= weight
        if np.abs(columns - 1.0).max() > 1e-9:
            return False
    return True


def requires_doubly_stochastic(experiment: ExperimentView, component: str) -> list[str]:
    """Reject mixing weights with which `component`, such as "algorithm = 'd2'", would converge to a wrong model."""
    graph = mixing_graph(experiment)
    if graph is None or is_doubly_stochastic(Mixing(graph, experiment.weights)):
        return []
    topology = f"topology = {experiment.topology.name!r}"
    wrong = f"{component} needs a doubly stochastic mixing matrix, and would otherwise converge to a wrong model"
    if is_directed(graph):
        return [
            f"{topology}: its links are directed and its nodes have different numbers of them; {wrong}; use an "
            "undirected graph, or algorithm = 'sgp'"
        ]
    return [
        f"topology.weights = {experiment.weights!r}: on {topology} nodes have different numbers of neighbours; "
        f"{wrong}; use topology.weights = 'metropolis-hastings'"
    ]


def requires_symmetric(experiment: ExperimentView, component: str) -> list[str]:
    """Reject directed graphs as well: the weight of a link has to be the same in both directions."""
    if is_directed(mixing_graph(experiment)):
        return [
            f"topology = {experiment.topology.name!r}: its links are directed, and {component} needs the same weight "
            "in both directions of a link; use an undirected graph"
        ]
    return requires_doubly_stochastic(experiment, component)


def requires_paths_between_all(experiment: ExperimentView, component: str) -> list[str]:
    """Reject static directed graphs in which what one node sends never reaches another, not even through others."""
    graph = mixing_graph(experiment)
    if graph is None or not graph.static or not is_directed(graph) or _is_strongly_connected(graph):
        return []
    return [
        f"topology = {experiment.topology.name!r}: messages of some nodes never reach some other nodes, and "
        f"{component} needs a path from every node to every other along the directed links; add links, or use an "
        "undirected graph"
    ]


def _is_strongly_connected(graph: Graph) -> bool:
    """Whether node 0 reaches all nodes in round 0, and all nodes reach node 0."""
    from_first = _reachable(lambda node: graph.links(node, 0).receivers)
    to_first = _reachable(lambda node: graph.links(node, 0).senders)
    return len(from_first) == len(to_first) == graph.nodes


def _reachable(peers: Callable[[NodeId], Iterable[NodeId]]) -> set[NodeId]:
    """The nodes to which a path leads from node 0."""
    found, path = {0}, [0]
    for node in path:  # the list grows during the loop
        new = set(peers(node)) - found
        found |= new
        path.extend(new)
    return found


def is_tree(graph: Graph) -> bool:
    """Whether the graph is static, undirected, connected and without cycles."""
    if not graph.static or is_directed(graph):
        return False
    links = sum(graph.degree(node, 0) for node in range(graph.nodes)) // 2
    return links == graph.nodes - 1 and len(components(graph)) == 1
