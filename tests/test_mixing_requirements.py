"""What algorithms and sharings require of the mixing matrix, and what happens without it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.topologies.graph import Links, Mixing, TopologyWarning
from shoal.topologies.inspection import is_doubly_stochastic
from shoal.topologies.measures import matrix
from shoal.topologies.random_graphs import ErdosRenyi
from shoal.topologies.random_out import RandomOut
from shoal.topologies.static import StaticGraph

NEEDS = {
    "gradient-tracking": {"algorithm": "gradient-tracking"},
    "k-gt": {"algorithm": "k-gt"},
    "d2": {"algorithm": "d2"},
    "muffliato": {"algorithm": {"name": "muffliato", "accelerated": True}},
    "choco": {"sharing": "choco"},
    "deepsqueeze": {"sharing": "deepsqueeze"},
    "powergossip": {"sharing": "powergossip"},
}


@dataclass(frozen=True)
class Shortcut:
    """A directed circle in which node 0 also sends to node 3."""

    def build(self, nodes: int, seed: int) -> StaticGraph:
        links = [Links((((node + 1) % nodes),), ((node - 1) % nodes,)) for node in range(nodes)]
        links[0] = Links((1, 3), links[0].senders)
        links[3] = Links(links[3].receivers, (0, 2))
        return StaticGraph(links)


def experiment(**changed: Any) -> Experiment:
    named = {
        key: {"name": value} if isinstance(value, str) and key != "weights" else value for key, value in changed.items()
    }
    return Experiment(**{"nodes": 6, "training": {"lr": 0.1}, **named})


@pytest.mark.parametrize("name", NEEDS)
def test_uniform_weights_on_an_irregular_graph_are_rejected(name: str) -> None:
    with pytest.raises(ExperimentError, match=r"use topology\.weights = 'metropolis-hastings'"):
        experiment(topology="star", weights="uniform", **NEEDS[name])


@pytest.mark.parametrize("name", NEEDS)
def test_uniform_weights_on_a_regular_graph_are_accepted(name: str) -> None:
    experiment(topology="ring", weights="uniform", **NEEDS[name])


@pytest.mark.parametrize("name", [name for name in NEEDS if name not in ("gradient-tracking", "k-gt")])
def test_directed_graphs_are_rejected_where_weights_have_to_be_symmetric(name: str) -> None:
    with pytest.raises(ExperimentError, match=r"undirected graph"):
        experiment(topology="exponential", **NEEDS[name])


@pytest.mark.parametrize("name", ["gradient-tracking", "k-gt"])
def test_directed_graphs_are_accepted_if_all_nodes_have_as_many_links(name: str) -> None:
    experiment(topology="exponential", **NEEDS[name])
    with pytest.raises(ExperimentError, match=r"directed.*use an undirected graph, or algorithm = 'sgp'"):
        experiment(topology=Shortcut(), **NEEDS[name])


def test_averages_with_unequal_influence_are_a_warning() -> None:
    with pytest.warns(TopologyWarning, match=r"not doubly stochastic.*use topology\.weights = 'metropolis-hastings'"):
        experiment(topology="star", weights="uniform")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experiment(topology="star")
        experiment(topology="ring", weights="uniform")


@pytest.mark.parametrize("algorithm", ["d2", "gradient-tracking"])
@pytest.mark.parametrize("training", [{"local_steps": 5}, {"local_epochs": 1}], ids=["steps", "epochs"])
def test_several_local_steps_are_a_warning_where_the_correction_holds_for_one(algorithm: str, training: Any) -> None:
    with pytest.warns(UserWarning, match=r"training\.local_.*use algorithm = 'k-gt'"):
        experiment(algorithm=algorithm, training={"lr": 0.1, **training})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experiment(algorithm=algorithm)
        experiment(algorithm="k-gt", training={"lr": 0.1, **training})


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(2, 12),
    seed=st.integers(0, 100),
    topology=st.sampled_from([ErdosRenyi(0.4), RandomOut(1)]),
    scheme=st.sampled_from(["uniform", "metropolis-hastings"]),
)
def test_columns_are_summed_correctly(nodes: int, seed: int, topology: Any, scheme: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixing = Mixing(topology.build(nodes, seed), scheme)
    rounds = range(1 if mixing.graph.static else 3)
    columns = [np.asarray(matrix(mixing, round).sum(0)).ravel() for round in rounds]
    assert is_doubly_stochastic(mixing) == bool(np.allclose(columns, 1.0, atol=1e-9))


LABELLED = {"topology": {"name": "d-cliques", "size": 3}, "partition": {"name": "shards", "per_node": 2}, "nodes": 8}


@pytest.mark.parametrize("name", NEEDS)
def test_a_graph_from_labels_is_checked_when_the_data_is_loaded(name: str) -> None:
    described = experiment(weights="uniform", model="logistic", **LABELLED, **NEEDS[name])
    with pytest.raises(ExperimentError, match=r"use topology\.weights = 'metropolis-hastings'"):
        Setup(described)
    Setup(experiment(model="logistic", **LABELLED, **NEEDS[name]))


def test_a_graph_from_labels_with_unequal_influence_is_a_warning() -> None:
    described = experiment(weights="uniform", model="logistic", **LABELLED)
    with pytest.warns(TopologyWarning, match="not doubly stochastic"):
        Setup(described)


def test_other_requirements_are_checked_of_a_graph_from_labels_too() -> None:
    described = experiment(algorithm={"name": "adpsgd", "bipartite": "require"}, model="logistic", **LABELLED)
    with pytest.raises(ExperimentError, match="not bipartite"):
        Setup(described)


@pytest.mark.parametrize("name", ["gradient-tracking", "k-gt", "deepsqueeze", "powergossip"])
def test_the_graph_of_a_peer_sampler_is_checked(name: str) -> None:
    sampler = {"name": "peer-sampler", "graph": {"name": "star"}}
    with pytest.raises(ExperimentError, match=r"use topology\.weights = 'metropolis-hastings'"):
        experiment(topology=sampler, weights="uniform", **NEEDS[name])
    experiment(topology=sampler, **NEEDS[name])
    experiment(topology={"name": "peer-sampler", "graph": {"name": "ring"}}, weights="uniform", **NEEDS[name])
    labelled = {**sampler, "graph": {"name": "d-cliques", "size": 3}}
    described = experiment(weights="uniform", model="logistic", **{**LABELLED, "topology": labelled}, **NEEDS[name])
    with pytest.raises(ExperimentError, match=r"use topology\.weights = 'metropolis-hastings'"):
        Setup(described)


def test_a_peer_sampler_with_unequal_influence_is_a_warning() -> None:
    with pytest.warns(TopologyWarning, match="not doubly stochastic"):
        experiment(topology={"name": "peer-sampler", "graph": {"name": "star"}}, weights="uniform")


@pytest.mark.parametrize("name", [*(name for name in NEEDS if name != "muffliato"), "adpsgd", "sgp", "swift"])
def test_a_disconnected_graph_is_one_warning(name: str) -> None:
    edges = [[0, 1], [1, 2], [2, 0], [3, 4], [4, 5], [5, 3]]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        needs = NEEDS.get(name, {"algorithm": name})
        Setup(experiment(topology={"name": "edges", "edges": edges}, model="logistic", **needs))
    (found,) = (str(warning.message) for warning in shown if "disconnected" in str(warning.message))
    assert "add links between them" in found


@dataclass(frozen=True)
class Chain:
    """Each node sends to the next one; the last one to `back`, if it is given."""

    back: int | None = None

    def build(self, nodes: int, seed: int) -> StaticGraph:
        links = [(node, node + 1) for node in range(nodes - 1)]
        links += [] if self.back is None else [(nodes - 1, self.back)]
        return StaticGraph(
            [Links(tuple(b for a, b in links if a == n), tuple(a for a, b in links if b == n)) for n in range(nodes)]
        )


@pytest.mark.parametrize("back", [None, 1])
def test_sgp_rejects_a_graph_in_which_weights_leave_a_node_for_good(back: int | None) -> None:
    with pytest.raises(ExperimentError, match=r"needs a path from every node to every other.*add links"):
        experiment(topology=Chain(back), algorithm="sgp")
    experiment(topology=Chain(back=0), algorithm="sgp")
