"""Events of faults: their order and times, and faults between pairs of nodes."""

from __future__ import annotations

import itertools
import math
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_schedules import AT, CRASH, CUT, DRAWN, NODES, RESTART, SCHEDULES, SERVED, expanded, tables
from shoal.environment.faults import Fault, FaultEvent, PairFaults, fault_events, incompatibilities
from shoal.types import format_node_ids

# Expansion to events


def test_a_fault_with_an_end_yields_two_events() -> None:
    ends = {"time": 1.0, "until": 4.0, "nodes": "0, 2-3"}
    named, others = (0, 2, 3), (1, 4, 5, 6, 7)
    for fault, first, last in (
        ({"kind": "crash"}, FaultEvent(1.0, "crash", named), FaultEvent(4.0, "restart", named)),
        (
            {"kind": "partition", "oneway": True},
            FaultEvent(1.0, "partition", named, others, oneway=True),
            FaultEvent(4.0, "repair", named, others, oneway=True),
        ),
        ({"kind": "hold"}, FaultEvent(1.0, "hold", named, others), FaultEvent(4.0, "release", named, others)),
        (
            {"kind": "slow", "factor": 2.5, "what": "network"},
            FaultEvent(1.0, "slow", named, value=2.5, what="network"),
            FaultEvent(4.0, "slow", named, value=1.0, what="network"),
        ),
        (
            {"kind": "drop", "probability": 0.25, "others": "5"},
            FaultEvent(1.0, "drop", named, (5,), 0.25),
            FaultEvent(4.0, "drop", named, (5,), 0.0),
        ),
    ):
        assert list(expanded(ends | fault)) == [first, last]
        del (lasts := ends | fault | {"lasting": 3.0})["until"]
        assert list(expanded(lasts)) == [first, last]
        del lasts["lasting"]
        assert list(expanded(lasts)) == [first]


def test_a_partition_without_nodes_is_between_all_nodes() -> None:
    all_nodes = tuple(range(NODES + 1))
    cut, repair = expanded({"kind": "partition", "time": 1.0, "until": 2.0}, **SERVED)
    assert cut.nodes == cut.others == repair.nodes == repair.others == all_nodes


def test_events_at_the_same_time_are_in_the_order_of_the_file() -> None:
    table = (
        {"kind": "hang", "node": 4, "time": 5.0},
        {"kind": "crash", "node": 3, "time": 2.0, "until": 5.0},
        {"kind": "crash", "node": 3, "time": 5.0},
        {"kind": "hang", "node": 1, "time": 5.0},
    )
    assert [(h.time, str(h)) for h in expanded(*table)] == [
        (2.0, "node 3 crashes"), (5.0, "node 4 hangs"), (5.0, "node 3 restarts"), (5.0, "node 3 crashes"),
        (5.0, "node 1 hangs"),
    ]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(SCHEDULES, st.integers(0, 2**63 - 1))
def test_events_are_in_order_of_time_and_reproducible(schedule: list[dict[str, Any]], seed: int) -> None:
    faults = [Fault(**table) for table in schedule]
    assert incompatibilities(faults, NODES, NODES) == []
    table = list(fault_events(faults, NODES, NODES, seed))
    assert table == list(fault_events(faults, NODES, NODES, seed))
    assert [h.time for h in table] == sorted(h.time for h in table)
    assert all(str(h) for h in table)
    assert all(h.nodes and max((*h.nodes, *h.others)) < NODES for h in table)
    between = [h for h in table if h.others and h.nodes != h.others]
    assert all(not set(h.nodes) & set(h.others) for h in between)


@settings(max_examples=100, deadline=None)
@given(SCHEDULES, st.integers(0, 2**63 - 1))
def test_random_faults_do_not_depend_on_faults_by_round_nor_on_later_ones(
    schedule: list[dict[str, Any]], seed: int
) -> None:
    faults = [Fault(**table) for table in schedule if table["kind"] != "raise"]
    more = [Fault("crash", 3, 5), *faults, Fault("raise", every=3.0, count=9)]
    others = [fault_event for fault_event in fault_events(more, NODES, NODES, seed) if fault_event.kind != "raise"]
    assert others == list(fault_events(faults, NODES, NODES, seed))


@settings(max_examples=100, deadline=None)
@given(st.lists(tables(st.just("crash")), min_size=2, max_size=5), st.integers(0, 2**63 - 1))
def test_nodes_crash_only_when_up_and_restart_only_when_down(schedule: list[dict[str, Any]], seed: int) -> None:
    down: set[int] = set()
    for fault_event in fault_events([Fault(**table) for table in schedule], NODES, NODES, seed):
        if fault_event.kind == "crash":
            assert down.isdisjoint(fault_event.nodes)
            down.update(fault_event.nodes)
        elif fault_event.kind == "restart":
            assert down.issuperset(fault_event.nodes)
            down.difference_update(fault_event.nodes)


def test_the_first_of_two_ends_restarts_a_node() -> None:
    twice = ({**AT, "until": 30.0}, {"kind": "crash", "nodes": "2-3", "time": 15.0, "until": 20.0})
    assert [(h.time, str(h)) for h in expanded(*twice)] == [
        (10.0, "node 3 crashes"), (15.0, "node 2 crashes"), (20.0, "nodes 2-3 restart"),
    ]  # fmt: skip


def test_each_fault_has_its_own_random_times() -> None:
    random_fault = {"kind": "hang", "every": 5.0, "count": 4}
    one, other = list(expanded(random_fault, seed=1)), list(expanded(random_fault, seed=2))
    assert len(one) == len(other) == 4
    assert {h.time for h in one}.isdisjoint(h.time for h in other)
    both = list(expanded(random_fault, random_fault, seed=1))
    assert len({h.time for h in both}) == 8
    assert {h.time for h in one} < {h.time for h in both}


def test_a_restart_includes_nodes_that_may_have_crashed_by_round() -> None:
    assert list(expanded({**CRASH, "round": 9}, RESTART)) == [FaultEvent(30.0, "restart", (3,))]
    random_fault = {"kind": "restart", "node": 3, "every": 9.0, "count": 2}
    assert [h.nodes for h in expanded({**CRASH, "round": 9}, random_fault)] == [(3,), (3,)]


def test_endless_events_are_generated_on_demand() -> None:
    endless = expanded({**DRAWN, "lasting": 1.0}, {"kind": "hang", "every": 1e-3}, {**CUT, "time": 0.5})
    some = list(itertools.islice(endless, 2000))
    assert {h.kind for h in some} == {"hang", "partition"}
    assert some[-1].time < some[0].time + 4


def test_random_faults_are_exponential_in_time_and_uniform_over_nodes() -> None:
    random_fault = {"kind": "hang", "nodes": "1-4", "every": 5.0, "after": 100.0, "count": 4000}
    table = list(expanded(random_fault, seed=3))
    gaps = np.diff([100.0, *(h.time for h in table)])
    assert len(table) == 4000
    assert gaps.mean() == pytest.approx(5.0, rel=0.06)
    assert gaps.std() == pytest.approx(5.0, rel=0.1)
    assert (gaps > 10.0).mean() == pytest.approx(np.exp(-2), rel=0.15)
    met = np.bincount([h.nodes[0] for h in table], minlength=NODES)
    assert met[0] == met[5:].sum() == 0
    assert met[1:5] == pytest.approx(1000, rel=0.12)


def test_random_faults_have_random_durations() -> None:
    random_fault = {"kind": "slow", "factor": 3.0, "nodes": "0", "every": 1000.0, "lasting": 2.0, "count": 3000}
    table = list(expanded(random_fault, seed=3))
    begun = np.array([h.time for h in table if h.has_end])
    ended = np.array([h.time for h in table if h.ended_value is not None])
    assert len(begun) == len(ended) == 3000
    assert (ended - begun).mean() == pytest.approx(2.0, rel=0.08)
    assert (ended - begun).std() == pytest.approx(2.0, rel=0.15)


WINDOWS = st.lists(
    st.tuples(
        st.sampled_from([0.25, 0.5, 0.75]), st.frozensets(st.integers(0, NODES - 2), min_size=1),
        st.integers(0, 9), st.integers(1, 9), st.sampled_from(["compute", "network", "both"]),
    ),
    max_size=6,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(WINDOWS, st.integers(0, 20))
def test_slow_and_drop_faults_that_overlap_combine_and_end_one_by_one(windows: list[Any], now: int) -> None:
    slow = [
        {
            "kind": "slow",
            "factor": 4 * value,
            "nodes": format_node_ids(nodes),
            "time": start,
            "lasting": long,
            "what": what,
        }
        for value, nodes, start, long, what in windows
    ]
    drops = [
        {"kind": "drop", "probability": value, "nodes": format_node_ids(nodes), "time": start, "lasting": long}
        for value, nodes, start, long, _ in windows
    ]
    factors = {(node, target): 1.0 for node in range(NODES) for target in ("compute", "network")}
    pair_faults = PairFaults(NODES)
    lasting = {"kind": "slow", "factor": 2.0, "node": 0, "time": 0}
    faults = [Fault(**table) for table in (lasting, *slow, *drops)]
    for event in fault_events(faults, NODES, NODES, 0):
        if event.time <= now:
            pair_faults.apply(event)
            for node in event.nodes if event.kind == "slow" else ():
                for target in ("compute", "network") if event.what == "both" else (event.what,):
                    factors[node, target] = event.value
    active = [window for window in windows if window[2] <= now < window[2] + window[3]]
    for node in range(NODES):
        for target in ("compute", "network"):
            expected = math.prod(4 * v for v, nodes, _, _, what in active if node in nodes and what in (target, "both"))
            assert factors[node, target] == pytest.approx(expected * (2.0 if node == 0 else 1.0))
    for a, b in itertools.permutations(range(NODES), 2):
        passes = math.prod(1 - value for value, nodes, *_ in active if (a in nodes) != (b in nodes))
        assert pair_faults.drop(a, b) == pytest.approx(1 - passes)


def test_of_slow_and_drop_faults_without_an_end_the_latest_counts() -> None:
    slow = [{"kind": "slow", "factor": factor, "node": 3, "time": time} for time, factor in enumerate((4.0, 2.0, 1.0))]
    assert [event.value for event in expanded(*slow)] == [4.0, 2.0, 1.0]
    pair_faults = PairFaults(NODES)
    for probability in (0.5, 0.25):
        pair_faults.apply(FaultEvent(0.0, "drop", (3,), (4,), probability))
        assert pair_faults.drop(3, 4) == probability


def test_random_faults_respect_their_limits() -> None:
    random_fault = {"kind": "partition", "every": 0.5, "after": 10.0, "before": 20.0}
    times = [h.time for h in expanded(random_fault)]
    assert 5 < len(times) < 50
    assert 10.0 < times[0] < times[-1] < 20.0
    table = list(expanded({"kind": "partition", "every": 0.5, "until": 20.0}))
    cuts, repairs = table[: len(table) // 2], table[len(table) // 2 :]
    assert all(h.kind == "partition" and h.time < 20.0 for h in cuts)
    assert [(h.kind, h.time) for h in repairs] == [("repair", 20.0)] * len(cuts)


def test_a_random_partition_cuts_one_node_off_from_all_others() -> None:
    for fault_event in expanded({"kind": "partition", "nodes": "2-3", "every": 1.0, "count": 20}, **SERVED):
        (node,) = fault_event.nodes
        assert node in (2, 3)
        assert fault_event.others == tuple(other for other in range(NODES + 1) if other != node)


def test_a_random_fault_picks_training_nodes_that_are_not_on_the_other_side() -> None:
    affected = {h.nodes[0] for h in expanded({**DRAWN, "count": 200}, **SERVED)}
    assert affected == set(range(NODES))
    random_fault = {"kind": "hold", "others": "0-3, 8", "every": 1.0, "count": 200}
    assert {h.nodes[0] for h in expanded(random_fault, **SERVED)} == {4, 5, 6, 7}


def test_random_repairs_without_nodes_end_all_partitions() -> None:
    (repair,) = expanded({"kind": "repair", "every": 1.0, "count": 1})
    assert repair.nodes == repair.others == tuple(range(NODES))


@pytest.mark.parametrize(
    ("fault_event", "sentence"),
    [
        (FaultEvent(1.0, "crash", (3,)), "node 3 crashes"),
        (FaultEvent(1.0, "crash", (0, 1, 3)), "nodes 0-1, 3 crash"),
        (FaultEvent(1.0, "raise", (3,)), "node 3 raises"),
        (FaultEvent(1.0, "hang", (3, 4)), "nodes 3-4 hang"),
        (FaultEvent(1.0, "restart", (3,)), "node 3 restarts"),
        (FaultEvent(1.0, "partition", (0, 1), (4, 5)), "nodes 0-1 are cut off from 4-5"),
        (FaultEvent(1.0, "partition", (0,), (4, 5)), "node 0 is cut off from 4-5"),
        (FaultEvent(1.0, "partition", (0,), (4, 5), oneway=True), "node 0 no longer reaches 4-5"),
        (FaultEvent(1.0, "partition", (0,)), "node 0 is cut off from all other nodes"),
        (FaultEvent(1.0, "partition", (0, 1), (0, 1)), "all nodes are cut off from each other"),
        (FaultEvent(1.0, "repair", (0,), (4, 5)), "node 0 and 4-5 reach each other again"),
        (FaultEvent(1.0, "repair", (0,), (4, 5), oneway=True), "node 0 reaches 4-5 again"),
        (FaultEvent(1.0, "repair", ()), "all nodes reach each other again"),
        (FaultEvent(1.0, "hold", (0, 1), (4, 5)), "messages between nodes 0-1 and 4-5 are held"),
        (FaultEvent(1.0, "hold", (0,), (4,), oneway=True), "messages from node 0 to 4 are held"),
        (FaultEvent(1.0, "release", ()), "messages between all nodes are released"),
        (FaultEvent(1.0, "slow", (3,), value=2.5), "node 3 computes and communicates 2.5 times as slowly"),
        (FaultEvent(1.0, "slow", (3, 4), value=4.0, what="network"), "nodes 3-4 communicate 4 times as slowly"),
        (FaultEvent(1.0, "slow", (3,), value=1.0, what="compute"), "node 3 computes at full speed again"),
        (FaultEvent(1.0, "drop", (3,), (4, 5), 0.05), "5 % of messages between node 3 and 4-5 are dropped"),
        (FaultEvent(1.0, "drop", (3,), (4, 5), 0.0), "messages between node 3 and 4-5 are no longer dropped"),
    ],
)  # fmt: skip
def test_an_event_prints_as_a_sentence(fault_event: FaultEvent, sentence: str) -> None:
    assert str(fault_event) == sentence


# Faults between pairs of nodes

SIDES = st.sets(st.integers(0, NODES - 1))
PAIR_EVENTS = st.builds(
    lambda kind, nodes, others, probability, oneway: FaultEvent(
        0.0, kind, tuple(sorted(nodes)), tuple(sorted(others)), probability if kind == "drop" else 0.0, oneway=oneway
    ),
    st.sampled_from(["partition", "repair", "hold", "release", "drop"]),
    SIDES, SIDES, st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.booleans(),
)  # fmt: skip


def named(fault_event: FaultEvent) -> set[tuple[int, int]]:
    """The pairs of a sender and a receiver that an event affects."""
    all_nodes = range(NODES)
    nodes = fault_event.nodes or all_nodes
    others = fault_event.others or [n for n in all_nodes if not fault_event.nodes or n not in fault_event.nodes]
    pairs = {(a, b) for a in nodes for b in others}
    return {(a, b) for a, b in pairs | (set() if fault_event.oneway else {(b, a) for a, b in pairs}) if a != b}


@settings(max_examples=100, deadline=None)
@given(st.lists(PAIR_EVENTS, max_size=12))
def test_the_last_event_of_a_pair_decides(events: list[FaultEvent]) -> None:
    pair_faults = PairFaults(NODES)
    cut: set[tuple[int, int]] = set()
    held: set[tuple[int, int]] = set()
    drop: dict[tuple[int, int], float] = {}
    for fault_event in events:
        pairs = named(fault_event)
        if fault_event.kind in ("repair", "release"):
            assert pair_faults.undoes(fault_event) == bool(pairs & (cut if fault_event.kind == "repair" else held))
        pair_faults.apply(fault_event)
        match fault_event.kind:
            case "partition":
                cut |= pairs
            case "repair":
                cut -= pairs
            case "hold":
                held |= pairs
            case "release":
                held -= pairs
            case "drop":
                drop.update(dict.fromkeys(pairs, fault_event.value))
    for pair in itertools.product(range(NODES), repeat=2):
        assert pair_faults.cut(*pair) is (pair in cut)
        assert pair_faults.held(*pair) is (pair in held)
        assert pair_faults.drop(*pair) == drop.get(pair, 0.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(PAIR_EVENTS, max_size=6), PAIR_EVENTS)
def test_a_repair_ends_all_partitions_between_its_nodes_and_no_others(
    events: list[FaultEvent], last: FaultEvent
) -> None:
    pair_faults = PairFaults(NODES)
    for fault_event in events:
        pair_faults.apply(fault_event)
    pairs = list(itertools.product(range(NODES), repeat=2))
    before = {pair: pair_faults.cut(*pair) for pair in pairs}
    pair_faults.apply(FaultEvent(1.0, "repair", last.nodes, last.others, oneway=last.oneway))
    assert {pair: pair_faults.cut(*pair) for pair in pairs} == {
        pair: cut and pair not in named(last) for pair, cut in before.items()
    }


def test_there_are_no_pair_faults_at_first_nor_after_a_crash() -> None:
    pair_faults = PairFaults(NODES)
    for kind in ("crash", "restart", "hang", "raise", "slow", "repair", "release"):
        pair_faults.apply(FaultEvent(0.0, kind, (1,), (2,), 3.0))  # type: ignore[arg-type]
    assert not pair_faults.cut(1, 2)
    assert not pair_faults.held(1, 2)
    assert pair_faults.drop(1, 2) == 0.0


def test_a_repair_of_a_node_with_itself_has_no_effect() -> None:
    pair_faults = PairFaults(3)
    pair_faults.apply(FaultEvent(0.0, "partition", ()))
    assert not pair_faults.undoes(FaultEvent(0.0, "repair", (0,), (0,)))
    for pair in ((0, 1), (0, 2), (1, 2)):
        assert pair_faults.undoes(FaultEvent(0.0, "repair", ()))
        pair_faults.apply(FaultEvent(0.0, "repair", pair[:1], pair[1:]))
    assert not pair_faults.undoes(FaultEvent(0.0, "repair", ()))


def test_repeating_a_partition_takes_no_more_memory() -> None:
    pair_faults = PairFaults(NODES)
    tracemalloc.start()
    try:
        for _ in range(1000):
            pair_faults.apply(FaultEvent(0.0, "partition", (0, 1), (2, 3)))
            pair_faults.apply(FaultEvent(0.0, "repair", (2,), (1,)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000
    assert pair_faults.cut(0, 2)
    assert not pair_faults.cut(1, 2)


def test_a_few_partitions_of_many_nodes_take_little_memory() -> None:
    nodes = 20_000
    pair_faults = PairFaults(nodes)  # a matrix of all pairs would be 400 MB
    for first in range(5):
        pair_faults.apply(FaultEvent(0.0, "partition", tuple(range(first, 100)), tuple(range(100, nodes))))
    pair_faults.apply(FaultEvent(0.0, "drop", (), (), 0.5))
    assert pair_faults.cut(3, nodes - 1)
    assert not pair_faults.cut(3, 4)
    assert pair_faults.drop(nodes - 2, nodes - 1) == 0.5
    assert pair_faults.drop(7, 7) == 0.0


def test_drops_of_many_nodes_that_overlap_are_applied_quickly() -> None:
    nodes = 1000
    random_drops = fault_events([Fault("drop", probability=0.1, every=1.0, lasting=1e6)], nodes, nodes, 0)
    events = list(itertools.islice(random_drops, 400))
    pair_faults = PairFaults(nodes)
    began = time.process_time()
    for fault_event in events:
        pair_faults.apply(fault_event)
    assert time.process_time() - began < 2, "0.03 s, and 50 s if the work grew with the pairs of all drops"
    affected = {node for fault_event in events for node in fault_event.nodes}
    assert {node for node in range(nodes) if pair_faults.drop(node, (node + 1) % nodes)} >= affected


def test_random_crashes_stop_when_all_nodes_are_down() -> None:
    faults = [Fault("crash", nodes="1, 2", every=1.0), Fault("slow", node=0, time=1e6, factor=2.0)]
    affected = [fault_event.nodes for fault_event in fault_events(faults, 4, 4, 0)]
    assert sorted(affected[:-1]) == [(1,), (2,)]
    assert affected[-1] == (0,)


def test_nodes_that_restart_crash_again() -> None:
    random_fault = fault_events([Fault("crash", nodes="1", every=1.0, lasting=0.1)], 4, 4, 0)
    kinds = [fault_event.kind for fault_event in itertools.islice(random_fault, 100)]
    assert kinds == ["crash", "restart"] * 50
