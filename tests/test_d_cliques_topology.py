"""D-Cliques: cliques with the label distribution of all nodes, and the links between them."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, get_args

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import TopologyError
from shoal.randomness import generator
from shoal.testing import check_graph, check_mixing
from shoal.topologies import Mixing
from shoal.topologies.d_cliques import Between, CliqueGraph, Counts, DCliques, cliques, links_between, skews, strides
from shoal.topologies.measures import diameter
from shoal.topologies.static import components

SCHEMES = get_args(Between)


def one_class_each(nodes: int, classes: int = 10) -> Counts:
    """Node i holds 50 samples of class i mod `classes`."""
    return 50 * np.eye(classes, dtype=np.int64)[np.arange(nodes) % classes]


def numbered(count: int, size: int) -> list[tuple[int, ...]]:
    """Cliques of consecutive nodes, for tests of the links between them."""
    return [tuple(range(start, start + size)) for start in range(0, count * size, size)]


label_counts = st.tuples(st.integers(1, 40), st.integers(1, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 20), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    ).map(lambda rows: np.array(rows, dtype=np.int64) + np.eye(shape[0], shape[1], dtype=np.int64))
)


# Cliques


@given(label_counts, st.integers(2, 12), st.integers(0, 30))
@settings(deadline=None, max_examples=60)
def test_cliques_partition_the_nodes_and_differ_in_size_by_at_most_one(counts: Counts, size: int, steps: int) -> None:
    found = cliques(counts, size, generator(0, "test"), steps)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(counts)))
    sizes = [len(members) for members in found]
    assert len(sizes) == -(-len(counts) // size)
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1


@given(label_counts, st.integers(2, 6), st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_swaps_never_increase_the_skew(counts: Counts, size: int, seed: int) -> None:
    after = [skews(counts, cliques(counts, size, generator(seed, "test"), steps)).sum() for steps in range(0, 25, 4)]
    assert all(later <= sooner + 1e-9 for sooner, later in itertools.pairwise(after))


def test_nodes_of_one_class_each_form_cliques_of_nearly_all_classes() -> None:
    """The paper's Figure: 100 nodes, 10 classes, cliques of 10. The best is one node of each class, skew 0."""
    counts = one_class_each(100)
    for seed in range(5):
        before = skews(counts, cliques(counts, 10, generator(seed, "test"), 0)).mean()
        after = skews(counts, cliques(counts, 10, generator(seed, "test"), 1000)).mean()
        assert before > 0.5
        assert after < 0.1


def test_default_number_of_swaps_grows_with_the_nodes() -> None:
    counts = one_class_each(1000)
    graph = DCliques().build_from(counts, seed=1)
    assert skews(counts, graph.cliques).mean() < 0.02
    fewer = DCliques(steps=1000).build_from(counts, seed=1)
    assert skews(counts, fewer.cliques).mean() > 0.05


def test_skew_is_the_distance_between_label_distributions() -> None:
    counts = np.array([[10, 0], [0, 10], [500, 0], [0, 3]])
    assert skews(counts, [(0, 1), (2, 3)]).tolist() == [0.0, 0.0]  # each node has the same weight
    assert skews(counts, [(0, 2), (1, 3)]).tolist() == [1.0, 1.0]


def test_node_without_samples_does_not_change_the_skew() -> None:
    counts = np.array([[10, 0], [0, 10], [0, 0]])
    assert skews(counts, [(2,), (0, 1, 2), (0, 2)]).tolist() == [0.0, 0.0, 0.5]


def test_cliques_of_unequal_size_swap_too() -> None:
    counts = one_class_each(21, 3)
    found = cliques(counts, 10, generator(1, "test"), 300)
    assert sorted(len(members) for members in found) == [7, 7, 7]
    counts = one_class_each(13, 2)
    found = cliques(counts, 7, generator(1, "test"), 300)
    assert sorted(len(members) for members in found) == [6, 7]
    assert skews(counts, found).max() < 0.16


# Links between cliques


@pytest.mark.parametrize("between", SCHEMES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10, 11, 25])
@pytest.mark.parametrize("size", [2, 3, 10])
def test_cliques_are_connected_by_links_spread_evenly(between: Between, count: int, size: int) -> None:
    made = numbered(count, size)
    links = links_between(made, between, size)
    assert len({frozenset(link) for link in links}) == len(links)
    assert all(a // size != b // size for a, b in links)
    graph = CliqueGraph(made, links)
    check_graph(graph, count * size, rounds=1)
    assert len(components(graph)) == 1
    for members in made:
        external = [graph.degree(node, 0) - (size - 1) for node in members]
        assert max(external) - min(external) <= (1 if between != "fractal" else size)


@pytest.mark.parametrize("count", [2, 3, 10, 16, 100])
def test_numbers_of_links_match_the_paper(count: int) -> None:
    made = numbered(count, 10)
    number: dict[Between, int] = {between: len(links_between(made, between, 10)) for between in SCHEMES}
    assert number["ring"] == (count if count > 2 else 1)
    assert number["full"] == count * (count - 1) // 2
    assert number["small-world"] <= count * 2 * (count - 1).bit_length()  # O(n/c log(n/c)), two at each scale
    assert number["ring"] <= number["small-world"] <= number["full"]


@pytest.mark.parametrize(("size", "levels"), [(2, 1), (2, 5), (3, 3), (10, 1), (10, 2)])
def test_fractal_links_join_each_pair_of_groups_once_at_every_level(size: int, levels: int) -> None:
    """size(size - 1)/2 links in each group of size, size², … cliques; at most size links a node."""
    made = numbered(size**levels, size)
    links = links_between(made, "fractal", size)
    groups = sum(size**level for level in range(levels))
    assert len(links) == groups * size * (size - 1) // 2
    external = np.bincount(np.array(links).ravel(), minlength=size ** (levels + 1))
    assert external.max() <= size


def test_small_world_links_reach_twice_as_far_each_time() -> None:
    assert [strides(count) for count in (1, 2, 3, 4, 5)] == [[], [1], [1], [1, 2], [1, 2]]
    assert strides(100) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33]
    assert strides(100, links=1) == [1, 2, 4, 8, 16, 32]
    assert strides(100, links=3) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 16, 17, 18, 32, 33, 34]
    made = numbered(100, 10)
    links = links_between(made, "small-world", 10)
    assert len(links) == 11 * 100
    assert len(links_between(made, "small-world", 10, links=1)) == 6 * 100
    assert len(links_between(numbered(16, 10), "small-world", 10)) == 5 * 16 + 8  # of the opposite clique, half
    around = {(min(a, b) // 10, max(a, b) // 10) for a, b in links}
    assert len(around) == len(links)
    assert networkx.diameter(networkx.Graph(list(around))) <= 4


def test_path_lengths_match_the_paper() -> None:
    made = numbered(40, 5)
    lengths = {between: diameter(CliqueGraph(made, links_between(made, between, 5)))[0] or 0 for between in SCHEMES}
    assert lengths["full"] == 3
    assert 3 < lengths["small-world"] < lengths["ring"]
    assert 3 < lengths["fractal"] < lengths["ring"]


# The topology


@pytest.mark.parametrize("between", SCHEMES)
@pytest.mark.parametrize("nodes", [1, 2, 9, 10, 11, 95, 100])
def test_graph_has_its_cliques(between: Between, nodes: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = DCliques(between=between).build_from(one_class_each(nodes), seed=4)
    check_graph(graph, nodes, rounds=2)
    check_mixing(Mixing(graph), rounds=2)
    assert graph.static
    assert len(components(graph)) == 1
    for node in range(nodes):
        members = graph.clique(node)
        assert node in members
        assert members in graph.cliques
        assert {*members} - {node} <= {*graph.links(node, 0).receivers}


def test_graph_depends_on_the_seed() -> None:
    counts = one_class_each(60)
    one, same, other = (DCliques().build_from(counts, seed) for seed in (1, 1, 2))
    assert one.cliques == same.cliques
    assert [one.links(i, 0) for i in range(60)] == [same.links(i, 0) for i in range(60)]
    assert one.cliques != other.cliques


def test_topology_without_labels_raises_a_clear_error() -> None:
    assert DCliques.traits.needs_labels
    with pytest.raises(TopologyError, match="d-cliques on 100 nodes: the topology needs the labels that nodes hold"):
        DCliques().build(100, 0)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(4, dtype=np.int64), r"labels of shape \(4,\): expected a row for each node and a column"),
        (np.zeros((0, 4), dtype=np.int64), r"labels of shape \(0, 4\)"),
        (np.zeros((4, 2), dtype=np.int64), "labels of 4 nodes: no node holds a sample"),
        (np.array([[1, 0], [2, -3]]), r"labels\[1, 1\] = -3: a number of samples is at least 0"),
    ],
)
def test_invalid_labels_raise_clear_errors(labels: Any, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        DCliques().build_from(labels, 0)


def test_clique_of_one_is_rejected() -> None:
    with pytest.raises(TopologyError, match="cliques of at most 1: a clique has at least 2 members"):
        DCliques(size=1).build_from(one_class_each(4), 0)
