"""The graph of an experiment as components check it before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import Experiment
from shoal.errors import TopologyError
from shoal.experiment.setup import Setup
from shoal.topologies.exponential import Exponential
from shoal.topologies.graph import Topology
from shoal.topologies.inspection import is_directed, is_tree
from shoal.topologies.regular import Regular
from shoal.topologies.static import Full, Ring, Tree

TOO_DENSE = {"name": "regular", "degree": 50}


@pytest.mark.parametrize("sharing", ["full", "choco", "powergossip", "deepsqueeze", "secure"])
def test_a_graph_that_cannot_be_built_is_reported_where_it_is_built(sharing: str) -> None:
    experiment = Experiment(nodes=4, sharing={"name": sharing}, topology=TOO_DENSE)
    with pytest.raises(TopologyError, match="50-regular on 4 nodes"):
        Setup(experiment).mixing_factory.build(experiment.topology.build())


@pytest.mark.parametrize("sharing", ["choco", "powergossip"])
def test_a_graph_from_labels_is_not_built_before_the_data_is_known(sharing: str) -> None:
    given: dict[str, Any] = {"nodes": 10, "sharing": {"name": sharing}}
    Experiment(topology={"name": "d-cliques"}, **given)
    if sharing == "powergossip":  # links may change
        Experiment(topology={"name": "peer-sampler", "graph": {"name": "d-cliques"}}, **given)


@pytest.mark.parametrize(
    ("topology", "directed", "tree"),
    [
        (Full(), False, False),
        (Ring(), False, False),
        (Tree(), False, True),
        (Regular(degree=2, dynamic=True), False, False),
        (Exponential(), True, False),
    ],
)
def test_properties_of_graphs(topology: Topology, directed: bool, tree: bool) -> None:
    graph = topology.build(7, 1)
    assert (is_directed(graph), is_tree(graph)) == (directed, tree)


def test_an_unknown_graph_counts_as_undirected() -> None:
    assert not is_directed(None)
