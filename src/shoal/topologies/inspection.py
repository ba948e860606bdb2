"""What components check of an experiment's graph before a run starts."""

from __future__ import annotations

from shoal.errors import TopologyError
from shoal.topologies.graph import Graph
from shoal.traits import ExperimentView


def graph_of(experiment: ExperimentView) -> Graph | None:
    """The experiment's graph. None where it is made from labels, or found by talking, or cannot be made at all."""
    traits = experiment.topology.traits
    if traits.discovers_peers or traits.needs_labels:
        return None
    try:
        graph: Graph = experiment.topology.build().build(experiment.nodes, experiment.seed)
    except TopologyError:  # said by whoever makes it for the run
        return None
    return graph


def changes(experiment: ExperimentView) -> bool:
    """Whether nodes may have other neighbours in another round."""
    graph = graph_of(experiment)
    return experiment.topology.traits.discovers_peers or (graph is not None and not graph.static)


def directed(graph: Graph) -> bool:
    """Whether in round 0 somebody sends to one that it does not hear from."""
    return any(links.to != links.of for links in (graph.links(node, 0) for node in range(graph.nodes)))
