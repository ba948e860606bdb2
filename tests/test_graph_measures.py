"""Mixing weights, the conformance suite of graphs, measures and drawings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.randomness import generator
from shoal.testing import check_graph, check_mixing, check_topology
from shoal.topologies import Links, Mixing, TopologyWarning
from shoal.topologies.drawing import draw, positions
from shoal.topologies.exponential import Exponential, OnePeerExponential
from shoal.topologies.given import Edges, from_networkx
from shoal.topologies.measures import contraction, diameter, matrix, measure, spectral_gap
from shoal.topologies.random_graphs import SmallWorld
from shoal.topologies.regular import Regular, RegularRounds
from shoal.topologies.static import Full, Grid, Ring, Star, Torus, Tree

seeds = st.integers(0, 2**32)


# Weights

small_graphs = st.integers(1, 12).flatmap(
    lambda n: (
        st.tuples(
            st.just(n),
            st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] != e[1])),
        )
        if n > 1
        else st.just((1, []))
    )
)


@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")
@given(small_graphs)
def test_metropolis_hastings_weights_are_doubly_stochastic_on_any_graph(
    drawn: tuple[int, list[tuple[int, int]]],
) -> None:
    nodes, edges = drawn
    mixing = Mixing(Edges(tuple(edges)).build(nodes, 0))
    check_mixing(mixing)
    w = matrix(mixing, 0).toarray()
    assert np.allclose(w, w.T)
    assert np.allclose(w.sum(axis=0), 1)


def test_weights_of_answering_peers_are_renormalised() -> None:
    peers = Mixing(Star().build(4, 0), "uniform").peers(0, 0)
    assert peers.weights == {1: 0.25, 2: 0.25, 3: 0.25}
    assert peers.weights_of([1, 2]) == {1: pytest.approx(1 / 3), 2: pytest.approx(1 / 3)}
    assert peers.weights_of({1: None, 2: None, 3: None}) == peers.weights
    assert peers.weights_of([]) == {}


def test_rows_of_a_large_full_graph_are_not_cached() -> None:
    small, large = (Mixing(Full().build(nodes, 0)) for nodes in (20, 2000))
    assert small.peers(0, 0) is small.peers(0, 1)
    assert large.peers(0, 0) is not large.peers(0, 1)


# The conformance suite detects defects


class Broken:
    """A ring of 4 in which one answer is replaced."""

    static = True
    nodes = 4

    def __init__(self, node: int, links: Links, round: int = 0, degree: int = 2) -> None:
        self.wrong = {(node, round): links}
        self.claimed = degree

    def links(self, node: int, round: int) -> Links:
        peers = tuple(sorted(((node - 1) % 4, (node + 1) % 4)))
        return self.wrong.get((node, round), Links(peers, peers))

    def degree(self, node: int, round: int) -> int:
        return self.claimed


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (Broken(0, Links((3, 1), (1, 3))), "node 0, round 0: links.receivers is not in ascending order"),
        (Broken(0, Links((1, 1, 3), (1, 3))), "links.receivers is not in ascending order without repetition"),
        (Broken(0, Links((0, 1, 3), (1, 3))), "links.receivers contains the node itself"),
        (Broken(0, Links((1, 3), (1, 4))), "links.senders has ids outside the graph"),
        (Broken(0, Links((1, 2, 3), (1, 3))), "node 0, round 0: it sends to 2, which receives only from"),
        (Broken(0, Links((1, 3), (1, 2, 3))), "node 0, round 0: it receives from 2, which sends only to"),
        (Broken(0, Links((1, 3), (1, 3)), degree=3), r"degree\(\) is 3, but it receives from 2"),
        (Broken(0, Links((1, 3), [1, 3])), "links.senders is a list"),  # type: ignore[arg-type]
        (Broken(1, Links((), ()), round=2), "round 2: (it sends to|it receives from|degree)"),
    ],
)
def test_conformance_suite_names_the_defect(graph: Broken, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_graph(graph, 4)


def test_conformance_suite_detects_a_static_graph_that_changes() -> None:
    graph = RegularRounds(8, 2, seed=0)
    graph.static = True
    with pytest.raises(AssertionError, match="is declared static, but links changed"):
        check_graph(graph, 8)


def test_conformance_suite_detects_a_graph_that_ignores_its_seed() -> None:
    class Forgetful:
        def __init__(self) -> None:
            self.built = 0

        def build(self, nodes: int, seed: int) -> RegularRounds:
            self.built += 1
            return RegularRounds(nodes, 2, self.built)

    with pytest.raises(AssertionError, match="built twice from seed 0"):
        check_topology(Forgetful(), 8)


# Measures


def test_measures_of_a_ring_match_the_formulas() -> None:
    found = measure(Mixing(Ring().build(16, 0)))
    assert (found.degree_min, found.degree_mean, found.degree_max) == (2, 2.0, 2)
    assert (found.components, found.diameter, found.diameter_exact) == ((16,), 8, True)
    assert found.spectral_gap == pytest.approx(1 - (1 + 2 * math.cos(2 * math.pi / 16)) / 3)
    assert "16 nodes, degree 2 to 2" in str(found)


def test_full_graph_averages_in_one_round() -> None:
    found = measure(Mixing(Full().build(10, 0)))
    assert found.spectral_gap == pytest.approx(1)
    assert found.contraction == 0
    assert found.diameter == 1


def test_disconnected_graph_has_no_gap_and_no_diameter() -> None:
    with pytest.warns(TopologyWarning):
        graph = Edges(((0, 1), (2, 3))).build(4, 0)
    found = measure(Mixing(graph))
    assert (found.components, found.diameter, found.spectral_gap) == ((2, 2), None, 0)
    assert "diameter infinite" in str(found)


@pytest.mark.parametrize(("gap", "expected"), [(0.0, 0.0), (1e-12, 0.0), (1e-11, 1e-11), (0.25, 0.25)])
def test_gap_of_rounding_errors_counts_as_none(gap: float, expected: float) -> None:
    assert spectral_gap(scipy.sparse.diags_array([1.0, 1.0 - gap]).tocsr()) == pytest.approx(expected, rel=1e-3, abs=0)


@pytest.mark.parametrize("topology", [Ring(), Torus(), Tree(), SmallWorld(), Exponential(), Regular()])
@pytest.mark.parametrize("scheme", ["metropolis-hastings", "uniform"])
def test_extreme_eigenvalues_give_the_same_gap_as_all_of_them(
    topology: Any, scheme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = matrix(Mixing(topology.build(150, 0), scheme), 0)
    exact = spectral_gap(w)
    monkeypatch.setattr("shoal.topologies.measures.MAX_DENSE_NODES", 0)
    assert spectral_gap(w) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("rounds", [1, 3])
def test_contraction_is_that_of_the_distance_of_a_random_vector_from_its_mean(rounds: int) -> None:
    mixing = Mixing(Ring().build(6, 0))
    x = generator(0, "contraction").standard_normal(6)
    assert abs(x.mean()) > 0.1, "else the first mean does not matter"
    mixed = np.linalg.matrix_power(matrix(mixing, 0).toarray(), rounds) @ x
    expected = (np.linalg.norm(mixed - x.mean()) / np.linalg.norm(x - x.mean())) ** (1 / rounds)
    assert contraction(mixing, rounds=rounds) == pytest.approx(expected)


@given(st.integers(2, 30), seeds)
@settings(deadline=None, max_examples=25)
def test_diameter_equals_that_of_networkx(nodes: int, seed: int) -> None:
    tree = networkx.random_labeled_tree(nodes, seed=seed)
    graph = from_networkx(tree).build(nodes, 0)
    assert diameter(graph) == (networkx.diameter(tree), True)


def test_diameter_of_a_large_graph_is_marked_as_a_lower_bound() -> None:
    assert diameter(Ring().build(6000, 0)) == (3000, False)


def test_changing_graph_is_measured_over_its_rounds() -> None:
    found = measure(Mixing(OnePeerExponential().build(12, 0)), rounds=8)
    assert 0 < found.contraction < 0.8
    assert found.spectral_gap < 0.05  # no round alone gets far


def test_single_node_can_be_measured() -> None:
    found = measure(Mixing(Ring().build(1, 0)))
    assert (found.diameter, found.spectral_gap, found.degree_max) == (0, 1, 0)


# Drawings


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.parametrize(
    ("topology", "nodes"),
    [(Ring(), 1), (Ring(), 8), (Torus(), 12), (Star(), 9), (Exponential(), 8), (Regular(), 12)],
    ids=repr,
)
def test_graph_is_drawn(topology: Any, nodes: int, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"graph.{ending}"
    draw(Mixing(topology.build(nodes, 0)), path)
    assert path.read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_grid_is_drawn_as_a_grid() -> None:
    assert positions(Grid().build(6, 0)).tolist() == [[0, 0], [1, 0], [2, 0], [0, -1], [1, -1], [2, -1]]


def test_nodes_of_a_changing_graph_keep_their_positions() -> None:
    graph = Regular(dynamic=True).build(20, 0)
    assert np.array_equal(positions(graph, 0), positions(graph, 5))
