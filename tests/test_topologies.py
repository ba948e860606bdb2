"""Topologies: their graphs, guarantees and errors."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import schema
from shoal.errors import TopologyError
from shoal.testing import check_graph, check_topology
from shoal.topologies import TOPOLOGIES, FromLabels, Graph, Links, Mixing, TopologyWarning
from shoal.topologies import regular as regular_module
from shoal.topologies.exponential import Exponential, OnePeerExponential
from shoal.topologies.given import Edges, NetworkX
from shoal.topologies.measures import contraction, matrix
from shoal.topologies.permutation import Permutation
from shoal.topologies.random_graphs import ErdosRenyi, SmallWorld
from shoal.topologies.random_out import RandomOut, receivers
from shoal.topologies.regular import Regular, RegularRounds, link_lengths
from shoal.topologies.static import Full, Grid, Ring, Star, Torus, Tree, components, grid_shape
from shoal.traits import traits_of

seeds = st.integers(0, 2**32)

# For each name of the registry: options as in an experiment, and a number of nodes.
CASES: dict[str, list[tuple[dict[str, Any], int]]] = {
    "ring": [({}, 1), ({}, 2), ({}, 3), ({}, 16)],
    "full": [({}, 1), ({}, 2), ({}, 9)],
    "star": [({}, 1), ({}, 2), ({}, 9)],
    "grid": [({}, 1), ({}, 7), ({}, 12), ({"rows": 2}, 12), ({"rows": 12}, 12)],
    "torus": [({}, 1), ({}, 2), ({}, 4), ({}, 7), ({}, 12), ({"rows": 2}, 12), ({"rows": 1}, 5)],
    "regular": [
        ({"degree": 1}, 2),
        ({"degree": 2}, 9),
        ({}, 16),
        ({"degree": 7}, 8),
        ({"degree": 6}, 9),
        ({"degree": 1, "dynamic": True}, 8),
        ({"degree": 2, "dynamic": True}, 9),
        ({"dynamic": True}, 16),
        ({"degree": 8, "dynamic": True}, 9),
        ({"dynamic": True}, 1030),
    ],
    "erdos-renyi": [({}, 1), ({}, 30), ({"probability": 1.0}, 8), ({"probability": 0}, 4)],
    "small-world": [({}, 20), ({"neighbours": 2, "rewiring": 1}, 12), ({"neighbours": 2}, 3)],
    "tree": [({}, 1), ({}, 10), ({"children": 1}, 5), ({"children": 4}, 30)],
    "exponential": [({}, n) for n in (1, 2, 3, 4, 7, 16)],
    "one-peer-exponential": [({}, n) for n in (1, 2, 3, 4, 7, 16)],
    "random-out": [({"peers": 1}, 2), ({}, 6), ({}, 40), ({"peers": 39}, 40), ({"peers": 1}, 9)],
    "d-cliques": [
        ({}, 1),
        ({}, 100),
        ({"size": 4, "between": "ring"}, 30),
        ({"size": 4, "between": "fractal", "steps": 0}, 67),
        ({"size": 2, "between": "full"}, 9),
    ],
    "peer-sampler": [({}, 10), ({"graph": Ring()}, 7), ({"graph": RandomOut(3)}, 20)],
    "gossip-sampler": [({}, 3), ({"degree": 2, "view": 4, "swapper": 1}, 12)],
    "file": [({"path": "square.edges"}, 4)],
    "networkx": [({"generator": "barabasi_albert_graph", "arguments": {"m": 2}}, 16)],
    "edges": [({"edges": [[0, 1], [1, 2], [2, 0], [3, 0]]}, 4)],
}


def from_table(name: str, table: dict[str, Any]) -> Any:
    module, cls = TOPOLOGIES[name].split(":")
    problems: list[str] = []
    built = schema.build(getattr(importlib.import_module(module), cls), table, "topology", problems)
    assert not problems
    return built


class OneClassEach:
    """A topology built from labels, on nodes that hold 10 samples of one of 5 classes."""

    def __init__(self, topology: FromLabels) -> None:
        self.topology = topology

    def build(self, nodes: int, seed: int) -> Graph:
        return self.topology.build_from(10 * np.eye(5, dtype=np.int64)[np.arange(nodes) % 5], seed)


# The registry


def test_every_name_of_the_registry_has_a_case() -> None:
    assert CASES.keys() == TOPOLOGIES.keys()


@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")
@pytest.mark.parametrize(("name", "table", "nodes"), [(n, *case) for n in CASES for case in CASES[n]])
def test_every_topology_conforms(
    name: str, table: dict[str, Any], nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "square.edges").write_text("0 1\n1 2\n2 3\n3 0\n")
    monkeypatch.chdir(tmp_path)
    topology = from_table(name, table)
    needs_labels = traits_of(topology, "topology").needs_labels
    check_topology(OneClassEach(topology) if needs_labels else topology, nodes, seed=3)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_has_a_one_line_description(name: str) -> None:
    module, cls = TOPOLOGIES[name].split(":")
    first = getattr(importlib.import_module(module), cls).__doc__.splitlines()[0]
    assert first.endswith((".", ".)")) or "." in first
    assert 20 < len(first) < 110


def test_importing_topologies_loads_neither_networkx_nor_torch() -> None:
    program = (
        "import sys, shoal.topologies, shoal.topologies.regular;"
        "shoal.topologies.regular.Regular(dynamic=True).build(16, 0).links(0, 0);"
        "print({'networkx', 'torch', 'scipy', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")
@pytest.mark.parametrize("topology", [Regular(), Regular(dynamic=True), ErdosRenyi(), SmallWorld(), RandomOut()])
def test_different_seeds_give_different_graphs(topology: Any) -> None:
    one, other = topology.build(40, 1), topology.build(40, 2)
    assert any(one.links(node, 0) != other.links(node, 0) for node in range(40))


# Textbook graphs


@given(st.integers(1, 60))
def test_nodes_of_a_ring_have_two_neighbours(nodes: int) -> None:
    graph = Ring().build(nodes, 0)
    for node in range(nodes):
        assert set(graph.links(node, 0).receivers) == {(node - 1) % nodes, (node + 1) % nodes} - {node}


def test_full_graph_of_a_hundred_thousand_nodes_is_cheap_to_build() -> None:
    graph = Full().build(100_000, 0)
    assert graph.degree(7, 0) == 99_999
    assert len(graph.links(7, 0).receivers) == 99_999


def test_star_has_its_centre_at_node_0() -> None:
    graph = Star().build(5, 0)
    assert graph.links(0, 0).receivers == (1, 2, 3, 4)
    assert graph.links(3, 0).receivers == (0,)


def test_tree_is_binary_by_default() -> None:
    assert Tree().build(7, 0).links(1, 0).receivers == (0, 3, 4)
    assert Tree(children=3).build(7, 0).links(0, 0).receivers == (1, 2, 3)


def test_grid_is_as_square_as_possible() -> None:
    assert [grid_shape(n, None) for n in (1, 12, 16, 30, 7)] == [(1, 1), (3, 4), (4, 4), (5, 6), (1, 7)]
    assert Grid().build(12, 0).links(5, 0).receivers == (1, 4, 6, 9)
    assert Grid().build(12, 0).links(0, 0).receivers == (1, 4)
    assert Torus().build(12, 0).links(0, 0).receivers == (1, 3, 4, 8)


@given(st.integers(1, 80))
def test_torus_equals_that_of_networkx(nodes: int) -> None:
    rows, columns = grid_shape(nodes, None)
    theirs = networkx.convert_node_labels_to_integers(
        networkx.grid_2d_graph(rows, columns, periodic=True), ordering="sorted"
    )
    theirs.remove_edges_from(list(networkx.selfloop_edges(theirs)))
    graph = Torus().build(nodes, 0)
    assert all(set(graph.links(node, 0).receivers) == set(theirs[node]) for node in range(nodes))


@pytest.mark.parametrize(("nodes", "receivers", "senders"), [(1, (), ()), (2, (1,), (1,)), (5, (1, 2, 4), (1, 3, 4))])
def test_exponential_graph_links_nodes_1_2_4_places_ahead(
    nodes: int, receivers: tuple[int, ...], senders: tuple[int, ...]
) -> None:
    assert Exponential().build(nodes, 0).links(0, 0) == Links(receivers, senders)


@given(st.integers(0, 6))
def test_one_peer_graph_averages_exactly_in_log2_rounds(power: int) -> None:
    nodes = 2**power
    mixing = Mixing(OnePeerExponential().build(nodes, 0))
    product = np.eye(nodes)
    for r in range(power):
        product = matrix(mixing, r) @ product
    assert np.allclose(product, 1 / nodes)


def test_one_peer_graph_cycles_through_the_hops() -> None:
    graph = OnePeerExponential().build(6, 0)
    assert [graph.links(0, r) for r in range(4)] == [
        Links((1,), (5,)),
        Links((2,), (4,)),
        Links((4,), (2,)),
        Links((1,), (5,)),
    ]


# Regular graphs

regular_sizes = st.integers(2, 40).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(1, n - 1).filter(lambda d: n * d % 2 == 0))
)


@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")
@given(regular_sizes, seeds, st.booleans())
@settings(deadline=None, max_examples=60)
def test_regular_graphs_are_regular_and_connected_in_every_round(
    size: tuple[int, int], seed: int, dynamic: bool
) -> None:
    nodes, degree = size
    graph = Regular(degree, dynamic).build(nodes, seed)
    check_graph(graph, nodes, rounds=3)
    for r in range(3):
        assert all(len(graph.links(node, r).receivers) == degree for node in range(nodes))
        assert degree < 2 or len(components(graph, r)) == 1


def test_dynamic_graph_changes_every_round() -> None:
    graph = Regular(dynamic=True).build(100, 0)
    assert not graph.static
    assert len({graph.links(0, r) for r in range(20)}) == 20


def test_dynamic_links_spread_evenly_over_all_pairs() -> None:
    """Each of the others is a neighbour in degree/(n - 1) of the rounds; chi-square at 1 in 10,000."""
    nodes, degree, rounds = 12, 4, 3000
    graph = RegularRounds(nodes, degree, seed=5)
    seen = Counter(peer for r in range(rounds) for peer in graph.links(3, r).receivers)
    expected = rounds * degree / (nodes - 1)
    assert sum((seen[peer] - expected) ** 2 / expected for peer in range(nodes) if peer != 3) < 35.6


def test_keyed_links_spread_evenly_over_all_pairs() -> None:
    nodes, degree, rounds = 1100, 4, 6000
    graph = RegularRounds(nodes, degree, seed=5)
    seen = Counter(peer * 20 // nodes for r in range(rounds) for peer in graph.links(3, r).receivers)
    expected = rounds * degree / 20
    assert sum((seen[bucket] - expected) ** 2 / expected for bucket in range(20)) < 50


@pytest.mark.parametrize("nodes", [257, 1100, 2001, 4096])
def test_tabulated_round_has_the_links_of_single_look_ups(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[Permutation] = []
    all_values = Permutation.all_values
    monkeypatch.setattr(Permutation, "all_values", lambda self: tables.append(self) or all_values(self))
    together = RegularRounds(nodes, 6, seed=9)
    for r in range(3):
        for node in range(nodes):
            together.links(node, r)
    assert len(tables) == 3  # one for each round
    monkeypatch.setattr(regular_module, "NODES_PER_LOOKUP", 0)
    alone = RegularRounds(nodes, 6, seed=9)
    assert all(alone.links(i, r) == together.links(i, r) for r in range(3) for i in range(0, nodes, 3))
    assert len(tables) == 3


def test_links_of_one_node_in_a_graph_of_a_billion() -> None:
    graph = Regular(degree=6, dynamic=True).build(10**9, 0)
    links = graph.links(123_456_789, 41)
    assert len(links.receivers) == 6
    assert all(123_456_789 in graph.links(peer, 41).senders for peer in links.receivers)


def test_only_a_few_rounds_are_cached() -> None:
    graph = Regular(dynamic=True).build(16, 0)
    before = graph.links(0, 0)
    for r in range(100):
        graph.links(0, r)
    assert graph.recent.numbers == (97, 98, 99)  # type: ignore[union-attr]
    assert graph.links(0, 0) == before


def test_mixing_of_dynamic_graphs_depends_on_their_degree() -> None:
    """Under random labels E[WᵀW] is ((‖W‖² - 1)/(n - 1)) I off the average, whatever the regular graph."""
    nodes, degree = 200, 5
    law = math.sqrt((nodes / (degree + 1) - 1) / (nodes - 1))
    measured = contraction(Mixing(Regular(degree, dynamic=True).build(nodes, 1)), rounds=60)
    assert measured == pytest.approx(law, rel=0.04)


@given(st.integers(1, 3000), st.tuples(*[st.integers(0, 2**32 - 1)] * 4), st.data())
@settings(max_examples=60)
def test_keyed_permutation_permutes_and_inverts(
    size: int, keys: tuple[int, int, int, int], data: st.DataObject
) -> None:
    permutation = Permutation(size, keys)
    table = permutation.all_values()
    assert sorted(table.tolist()) == list(range(size))
    x = data.draw(st.integers(0, size - 1))
    assert permutation.forward(x) == table[x]
    assert permutation.inverse(permutation.forward(x)) == x


@given(regular_sizes, st.lists(st.integers(0, 2**32 - 1), min_size=20, max_size=20))
def test_link_lengths_are_distinct_and_symmetric(size: tuple[int, int], numbers: list[int]) -> None:
    nodes, degree = size
    found = link_lengths(nodes, degree, numbers)
    assert len(set(found)) == degree
    assert {nodes - reach for reach in found} == set(found)
    assert degree == 1 or 1 in found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("degree", "nodes", "message"),
    [
        (5, 5, "5-regular on 5 nodes: the degree must be below the number of nodes; try degree = 4"),
        (3, 7, "3-regular on 7 nodes: an odd number .* try degree = 2 or 4, or 8 nodes"),
        (5, 1, "5-regular on 1 node: a regular graph needs at least 2 nodes"),
    ],
)
def test_impossible_regular_graphs_raise_clear_errors(degree: int, nodes: int, message: str, dynamic: bool) -> None:
    with pytest.raises(TopologyError, match=message):
        Regular(degree, dynamic).build(nodes, 0)


# Random receivers


@given(st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))), seeds)
@settings(deadline=None, max_examples=60)
def test_random_receivers_are_distinct_others_and_senders_match(size: tuple[int, int], seed: int) -> None:
    nodes, peers = size
    graph = RandomOut(peers).build(nodes, seed)
    check_graph(graph, nodes, rounds=2)
    links = [graph.links(node, 0) for node in range(nodes)]
    assert all(len(of_node.receivers) == peers for of_node in links)
    sent = {(node, peer) for node in range(nodes) for peer in links[node].receivers}
    assert sent == {(peer, node) for node in range(nodes) for peer in links[node].senders}


def test_random_receivers_change_every_round_and_few_rounds_are_cached() -> None:
    graph = RandomOut().build(100, 0)
    assert not graph.static
    before = graph.links(0, 0)
    assert len({graph.links(0, r) for r in range(20)}) == 20
    assert graph.recent.numbers == (17, 18, 19)
    assert graph.links(0, 0) == before


def test_every_set_of_receivers_is_equally_likely() -> None:
    """10 pairs of 5 others; chi-square at 1 in 10,000."""
    rounds = 4000
    graph = RandomOut(2).build(6, 7)
    for node in (0, 3):
        seen = Counter(graph.links(node, r).receivers for r in range(rounds))
        expected = rounds / math.comb(5, 2)
        assert len(seen) == 10
        assert sum((count - expected) ** 2 / expected for count in seen.values()) < 33.7


def test_in_degree_of_random_receivers_is_binomial() -> None:
    """Chi-square at 1 in 10,000 against Binomial(n - 1, s/(n - 1)), rare numbers taken together."""
    nodes, peers, rounds = 300, 6, 60
    graph = RandomOut(peers).build(nodes, 2)
    seen = Counter(min(max(graph.degree(node, r), 1), 14) for r in range(rounds) for node in range(nodes))
    p = peers / (nodes - 1)
    law = [math.comb(nodes - 1, k) * p**k * (1 - p) ** (nodes - 1 - k) for k in range(nodes)]
    expected = {1: law[0] + law[1], **{k: law[k] for k in range(2, 14)}, 14: sum(law[14:])}
    total = nodes * rounds
    assert min(expected.values()) * total > 10
    assert sum((seen[k] - total * share) ** 2 / (total * share) for k, share in expected.items()) < 40.9  # 13 degrees


def test_another_process_draws_the_same_receivers() -> None:
    program = (
        "from shoal.topologies.random_out import RandomOut;"
        "graph = RandomOut(7).build(1000, 11); print([graph.links(i, 5) for i in (999, 0, 31)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    graph = RandomOut(7).build(1000, 11)
    graph.links(3, 4)
    assert done.stdout.strip() == str([graph.links(i, 5) for i in (999, 0, 31)])


def test_receivers_do_not_depend_on_the_version_of_numpy() -> None:
    assert receivers(6, 2, key=1).tolist() == [[2, 4], [3, 5], [3, 5], [1, 4], [1, 3], [1, 2]]


# Random graphs


@pytest.mark.parametrize("nodes", [10, 100, 1000])
def test_erdos_renyi_graph_of_the_default_probability_is_mostly_connected(nodes: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TopologyWarning)
        connected = sum(len(components(ErdosRenyi().build(nodes, seed))) == 1 for seed in range(10))
    assert connected >= 8


def test_disconnected_graph_warns_with_its_components() -> None:
    with pytest.warns(TopologyWarning, match=r"5 nodes is disconnected: 3 components \(1 of 3, 2 of 1 nodes\)"):
        Edges(((0, 1), (1, 2))).build(5, 0)


def test_connected_graph_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ring().build(5, 0)


@pytest.mark.parametrize(
    ("topology", "nodes", "message"),
    [
        (RandomOut(5), 5, "5 random peers on 5 nodes: there must be fewer peers than nodes; try peers = 4"),
        (RandomOut(1), 1, "1 random peers on 1 node: .* at least 2 nodes are needed"),
        (SmallWorld(neighbours=3), 10, "must be even; try neighbours = 2"),
        (SmallWorld(neighbours=4), 4, "fewer neighbours than nodes; try neighbours = 2"),
        (SmallWorld(), 2, "at least 3 nodes are needed"),
        (Grid(rows=5), 12, "5 rows on 12 nodes: the rows must divide .*; try rows = 4"),
        (Torus(rows=13), 12, "13 rows on 12 nodes: .*; try rows = 12"),
        (Edges(((0, 1), (2, 2))), 3, r"edges\[1\] = \[2, 2\]: node 2 is linked to itself"),
        (Edges(((0, 3),)), 3, r"edges\[0\] = \[0, 3\]: with 3 nodes, ids are 0 to 2; set nodes = 4"),
        (Edges(((0, -1),)), 3, r"edges\[0\] = \[0, -1\]: with 3 nodes"),
        (NetworkX("barabasi_graph"), 9, "'barabasi_graph' is not a generator of networkx; did you mean"),
        (NetworkX("to_numpy_array"), 9, "is not a generator of networkx"),
        (NetworkX("barabasi_albert_graph"), 9, "missing a required argument: 'm'; it takes n, m"),
        (NetworkX("barabasi_albert_graph", {"m": 20}), 9, r"barabasi_albert_graph\(m=20\): .*m < n"),
        (NetworkX("cycle_graph", {"k": 2}), 9, "unexpected keyword argument 'k'"),
        (NetworkX("cycle_graph", {"n": "many"}), 9, "networkx.cycle_graph"),
        (NetworkX("petersen_graph"), 9, "has 10 nodes and the experiment has 9; set nodes = 10"),
        (NetworkX("gn_graph"), 9, "directed"),
        (NetworkX("degree_sequence_tree", {"deg_sequence": [5, 5]}), 2, "degree_sequence_tree"),
    ],
    ids=repr,
)
def test_graphs_that_cannot_be_built_raise_clear_errors(topology: Any, nodes: int, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        topology.build(nodes, 0)


def test_small_world_that_is_never_connected_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.topologies.random_graphs.MAX_DRAWS", 1)
    with pytest.raises(TopologyError, match="none of 1 draws was connected; use more neighbours"):
        SmallWorld(neighbours=2, rewiring=1.0).build(3000, 0)
