"""Partial views: invariants of a view, and the links that result from many exchanges."""

from __future__ import annotations

import itertools
import math
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import MessageError, TopologyError
from shoal.message import Message, Payload, decode
from shoal.randomness import generator
from shoal.state import Stateful
from shoal.topologies.overlay import Overlay, measure_overlay
from shoal.topologies.views import Descriptors, View, ViewPolicy

NODES = 500


def descriptors(*pairs: tuple[int, int]) -> Descriptors:
    ids, ages = zip(*pairs, strict=True) if pairs else ((), ())
    return Descriptors(np.array(ids, dtype=np.uint32), np.array(ages, dtype=np.uint32))


def entries(view: View) -> dict[int, int]:
    return dict(zip(view.peers, view.descriptors.ages.tolist(), strict=True))


def view_of(node: int, policy: ViewPolicy, *pairs: tuple[int, int]) -> View:
    view = View(node, policy)
    view.restore({"ids": [i for i, _ in pairs], "ages": [age for _, age in pairs]})
    return view


# One view

policies = st.integers(2, 12).flatmap(
    lambda size: st.integers(0, size // 2).flatmap(
        lambda healer: st.builds(
            ViewPolicy,
            st.just(size),
            st.just(healer),
            st.integers(0, size // 2 - healer),
            st.sampled_from(["random", "oldest"]),
        )
    )
)
buffers = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 30)), max_size=12)


@given(policies, st.lists(st.integers(0, 15), max_size=20), st.lists(buffers, max_size=6), st.integers(0, 2**32))
@settings(deadline=None)
def test_view_is_bounded_and_has_distinct_others(
    policy: ViewPolicy, known: list[int], received: list[list[tuple[int, int]]], seed: int
) -> None:
    rng = generator(seed, "test")
    view = View(3, policy, known)
    for buffer in [[], *received]:
        sent = view.to_send(rng)
        assert (sent.ids[0], sent.ages[0]) == (3, 0)
        assert len(sent.ids) == len(sent.ages) <= max(1, policy.size // 2)
        assert set(sent.ids[1:].tolist()) <= set(view.peers)
        before = entries(view)
        buffer = buffer[: policy.size]
        view.absorb(descriptors(*buffer), rng)
        known_now = {i: min(age for j, age in [*before.items(), *buffer] if j == i) for i in [*before, *dict(buffer)]}
        known_now.pop(3, None)
        assert entries(view).items() <= known_now.items()  # the youngest entry of each node, and no unknown node
        assert len(view) == min(policy.size, len(known_now))  # no entry is dropped without need
        assert len(set(view.peers)) == len(view)
        view.increase_age()
        assert min(entries(view).values(), default=1) >= 1
        peer = view.select_peer(rng)
        assert peer in view.peers if view.peers else peer is None


def test_sent_entries_move_to_the_head_and_the_oldest_to_the_end() -> None:
    policy = ViewPolicy(size=6, healer=2, swapper=1)
    view = view_of(0, policy, (1, 9), (2, 1), (3, 7), (4, 1), (5, 1), (6, 1))
    sets = set()
    for seed in range(40):
        sent = view.to_send(generator(seed, "test"))
        assert len(sent.ids) == 3  # itself, and size/2 - 1 others
        assert view.descriptors.ids[:2].tolist() == sent.ids[1:].tolist()
        assert view.descriptors.ids[-2:].tolist() == [3, 1]
        sets.add(tuple(sorted(sent.ids[1:].tolist())))
    assert sets == set(itertools.combinations((2, 4, 5, 6), 2))  # the two oldest are never sent


def test_healer_drops_the_oldest_first() -> None:
    view = view_of(0, ViewPolicy(4, healer=2, swapper=0), (1, 9), (2, 1), (3, 8), (4, 2))
    view.absorb(descriptors((5, 0), (6, 3)), generator(0, "test"))
    assert entries(view) == {2: 1, 4: 2, 5: 0, 6: 3}


def test_swapper_drops_the_entries_just_sent() -> None:
    view = view_of(0, ViewPolicy(6, healer=0, swapper=3), *((i, i) for i in range(1, 7)))
    rng = generator(0, "test")
    sent = view.to_send(rng)
    view.absorb(descriptors((7, 0), (8, 4)), rng)
    assert set(view.peers) == {*range(1, 9)} - {*sent.ids.tolist()}


def test_healer_comes_before_swapper_and_random_drops_come_last() -> None:
    policy = ViewPolicy(6, healer=1, swapper=1)
    left = set()
    for seed in range(60):
        view = view_of(0, policy, (1, 9), (2, 2), (3, 2), (4, 2), (5, 2), (6, 2))
        view.absorb(descriptors((7, 0), (8, 0), (9, 0)), generator(seed, "test"))  # three too many; head is 1
        assert len(view) == 6
        assert not {1, 2} & {*view.peers}  # 1 as the oldest, 2 as the head
        left |= {*range(3, 10)} - {*view.peers}
    assert left == {*range(3, 10)}


def test_younger_of_two_entries_is_kept() -> None:
    view = view_of(0, ViewPolicy(6, 0, 0), (1, 5), (2, 0))
    view.absorb(descriptors((1, 3), (2, 7), (0, 0), (3, 9), (3, 8)), generator(0, "test"))
    assert entries(view) == {1: 3, 2: 0, 3: 8}


def test_peer_selection_is_random_or_oldest() -> None:
    pairs = ((1, 5), (2, 9), (3, 9), (4, 0))
    rng = generator(0, "test")
    oldest, random = (view_of(0, ViewPolicy(4, 0, 2, select), *pairs) for select in ("oldest", "random"))
    assert {oldest.select_peer(rng) for _ in range(60)} == {2, 3}
    assert {random.select_peer(rng) for _ in range(60)} == {1, 2, 3, 4}
    assert View(0, ViewPolicy()).select_peer(rng) is None


def test_view_starts_with_the_known_nodes() -> None:
    view = View(2, ViewPolicy(3, 0, 1), [5, 2, 5, 7, 1, 9])
    assert entries(view) == {5: 0, 7: 0, 1: 0}
    view.drop(7)
    view.drop(8)
    assert view.peers == (5, 1)


def test_restored_view_continues_like_the_original() -> None:
    policy = ViewPolicy(8, 1, 3)
    view = View(0, policy, range(1, 9))
    view.to_send(generator(1, "test"))
    view.increase_age()
    again = View(0, policy)
    again.restore(view.state())
    assert isinstance(view, Stateful)
    for one in (view, again):
        rng = generator(2, "test")
        one.to_send(rng)
        one.absorb(descriptors((20, 0), (21, 1), (3, 0)), rng)
    assert view.state() == again.state()
    assert all(type(number) is int for numbers in view.state().values() for number in numbers)


def test_entries_can_be_sent_in_a_message() -> None:
    sent = View(7, ViewPolicy(10, 1, 4), range(6)).to_send(generator(0, "test"))
    message = Message(7, "view", 0, Payload({"ids": sent.ids, "ages": sent.ages}))
    received = decode(message.frames()).payload
    other = View(9, ViewPolicy(10, 1, 4))
    other.absorb(Descriptors(received.arrays["ids"], received.arrays["ages"]), generator(0, "test"))
    assert set(other.peers) == set(sent.ids.tolist())


@pytest.mark.parametrize(
    ("ids", "ages", "message"),
    [
        ([1, 2], [0], "2 ids and 1 ages of a view"),
        ([*range(5)], [0] * 5, "5 ids and 5 ages of a view: expected as many of each, at most 4"),
        ([-1], [0], "ids of a view: -1 to -1"),
        ([1], [2**31], "ages of a view: 2147483648"),
        ([1.0], [0], r"ids of a view: expected a list of integers, got float64\(1,\)"),
        ([[1]], [[0]], "ids of a view: expected a list of integers"),
    ],
)
def test_invalid_entries_are_rejected(ids: Any, ages: Any, message: str) -> None:
    view = View(0, ViewPolicy(4, 1, 1), [1, 2])
    with pytest.raises(MessageError, match=message):
        view.absorb(Descriptors(np.array(ids), np.array(ages)), generator(0, "test"))
    assert entries(view) == {1: 0, 2: 0}


@pytest.mark.parametrize(("size", "healer", "swapper"), [(1, 0, 0), (10, 3, 3), (10, -1, 2), (10, 0, 6)])
def test_contradictory_policies_are_rejected(size: int, healer: int, swapper: int) -> None:
    with pytest.raises(TopologyError, match=f"size = {size}, healer = {healer}, swapper = {swapper}: .* try healer"):
        ViewPolicy(size, healer, swapper)


# Many views


def exchange(views: dict[int, View], rng: np.random.Generator) -> None:
    """One round, push and pull: each running node exchanges with one peer; failed nodes do not answer."""
    for node in rng.permutation(list(views)).tolist():
        view = views[node]
        peer = view.select_peer(rng)
        if peer in views:
            other = views[peer]
            sent, answer = view.to_send(rng), other.to_send(rng)
            other.absorb(sent, rng)
            other.increase_age()
            view.absorb(answer, rng)
        view.increase_age()


def overlay(views: dict[int, View]) -> Overlay:
    return measure_overlay({node: view.peers for node, view in views.items()})


def star(policy: ViewPolicy) -> dict[int, View]:
    return {node: View(node, policy, [0 if node else 1]) for node in range(NODES)}


def ring(policy: ViewPolicy) -> dict[int, View]:
    return {node: View(node, policy, [(node + 1) % NODES]) for node in range(NODES)}


@pytest.mark.parametrize("bootstrap", [star, ring])
def test_swapping_turns_a_star_or_a_ring_into_a_random_graph(bootstrap: Any) -> None:
    rng = generator(1, "test")
    views = bootstrap(ViewPolicy(size=20, healer=1, swapper=9))
    before = overlay(views)
    for _ in range(25):
        exchange(views, rng)
    after = overlay(views)
    assert after.components == (NODES,)
    assert after.in_degree_mean == 20
    assert after.in_degree_std == pytest.approx(after.random_in_degree_std, rel=0.2)
    assert after.in_degree_max < 1.3 * after.random_in_degree_max
    assert after.clustering == pytest.approx(after.random_clustering, rel=0.1)
    assert after.path_length < 2.1
    assert before.path_length > after.path_length or bootstrap is star


def test_swapping_balances_in_degrees_better_than_random_drops() -> None:
    relative_std = {}
    for swapper in (0, 10):
        rng = generator(2, "test")
        views = ring(ViewPolicy(size=20, healer=0, swapper=swapper))
        for _ in range(20):
            exchange(views, rng)
        relative_std[swapper] = overlay(views).in_degree_std / overlay(views).random_in_degree_std
    assert relative_std[10] < 1.0 < 1.5 < relative_std[0]


def test_healer_drops_failed_nodes_within_a_few_rounds() -> None:
    dead_links = {}
    for healer in (0, 10):
        rng = generator(3, "test")
        views = star(ViewPolicy(size=20, healer=healer, swapper=10 - healer))
        for _ in range(15):
            exchange(views, rng)
        failed = set(rng.choice(NODES, NODES * 3 // 10, replace=False).tolist())
        views = {node: view for node, view in views.items() if node not in failed}
        assert overlay(views).dead_links == pytest.approx(0.3, abs=0.05)
        for _ in range(8):
            exchange(views, rng)
        dead_links[healer] = overlay(views).dead_links
        assert overlay(views).components[0] == len(views)
    assert dead_links[10] < 0.01
    assert dead_links[0] > 0.1


# Measures


def test_measures_of_a_random_overlay_match_the_formulas() -> None:
    rng = generator(4, "test")
    views = {i: [j + (j >= i) for j in rng.choice(599, 12, replace=False).tolist()] for i in range(600)}
    found = measure_overlay(views)
    assert found.in_degree_mean == 12
    assert found.in_degree_std == pytest.approx(found.random_in_degree_std, rel=0.1)
    assert found.random_in_degree_std == pytest.approx(math.sqrt(12 * (1 - 12 / 599)))
    assert found.in_degree_max == pytest.approx(found.random_in_degree_max, rel=0.15)
    assert found.clustering == pytest.approx(found.random_clustering, rel=0.1)


@given(st.integers(2, 12).flatmap(lambda n: st.lists(st.sets(st.integers(0, n + 3)), min_size=n, max_size=n)))
@settings(deadline=None, max_examples=40)
def test_measures_equal_those_of_networkx(known: list[set[int]]) -> None:
    views = {node: sorted(peers - {node}) for node, peers in enumerate(known)}
    found = measure_overlay(views)
    graph: Any = networkx.Graph()
    graph.add_nodes_from(views)
    graph.add_edges_from((a, b) for a in views for b in views[a] if b in views)
    assert found.nodes == len(views)
    assert found.clustering == pytest.approx(networkx.average_clustering(graph))
    assert list(found.components) == sorted(map(len, networkx.connected_components(graph)), reverse=True)
    hops = [h for _, to in networkx.all_pairs_shortest_path_length(graph) for h in to.values() if h]
    assert found.path_length == pytest.approx(sum(hops) / len(hops) if hops else 0)
    links = [(a, b) for a in views for b in views[a]]
    dead = [b for _, b in links if b not in views]
    assert found.dead_links == pytest.approx(len(dead) / len(links) if links else 0)
    assert "dead links" in str(found)


def test_overlay_of_one_node_can_be_measured() -> None:
    found = measure_overlay({7: []})
    assert (found.nodes, found.components, found.path_length, found.dead_links) == (1, (1,), 0, 0)
