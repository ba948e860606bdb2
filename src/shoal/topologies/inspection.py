"""Properties of an experiment's graph that components check before a run starts."""

from __future__ import annotations

from shoal.errors import TopologyError
from shoal.topologies.graph import Graph
from shoal.topologies.static import FullGraph, components
from shoal.traits import ExperimentView


def graph_of(experiment: ExperimentView) -> Graph | None:
    """Return the experiment's graph. None if it is built from labels or found by a protocol, or cannot be built."""
    return None if experiment.topology.traits.discovers_peers else initial_graph(experiment)


def initial_graph(experiment: ExperimentView) -> Graph | None:
    """Return the graph that the topology builds. None if it is built from labels, or cannot be built.

    If nodes find their peers by a protocol, this is the graph that the protocol begins with or samples from.
    """
    if experiment.topology.traits.needs_labels:
        return None
    try:
        graph: Graph = experiment.topology.build().build(experiment.nodes, experiment.seed)
    except TopologyError:  # reported where the graph is built for the run
        return None
    return graph


def is_dynamic(experiment: ExperimentView, graph: Graph | None) -> bool:
    """Whether the neighbours of a node may differ between rounds. `graph` is the result of `graph_of`."""
    return experiment.topology.traits.discovers_peers or (graph is not None and not graph.static)


def is_directed(graph: Graph | None) -> bool:
    """Whether in round 0 some node sends to a peer that it does not receive from. False if there is no graph."""
    if graph is None or isinstance(graph, FullGraph):  # a full graph has n² links
        return False
    return any(links.receivers != links.senders for links in (graph.links(node, 0) for node in range(graph.nodes)))


def is_tree(graph: Graph) -> bool:
    """Whether the graph is static, undirected, connected and without cycles."""
    if not graph.static or is_directed(graph):
        return False
    links = sum(graph.degree(node, 0) for node in range(graph.nodes)) // 2
    return links == graph.nodes - 1 and len(components(graph)) == 1
