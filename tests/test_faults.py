"""Scheduled faults: validation of tables, expansion to events, and faults between pairs of nodes."""

from __future__ import annotations

import itertools
import tomllib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.environment.faults import Fault, FaultEvent, PairFaults, fault_events, incompatibilities
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.testing import Faults

NODES = 8
SERVED = {"algorithm": {"name": "fedavg"}}
SERVER = NODES
PAGE = Path(__file__).parent.parent / "docs" / "faults.md"


def experiment(*faults: dict[str, Any], **more: Any) -> Experiment:
    return Experiment.from_table({"nodes": NODES, "fault": list(faults), **more})


def problems(*faults: dict[str, Any], **more: Any) -> tuple[str, ...]:
    with pytest.raises(ExperimentError) as error:
        experiment(*faults, **more)
    return error.value.problems


def expanded(*faults: dict[str, Any], seed: int = 0, **more: Any) -> Iterator[FaultEvent]:
    described = experiment(*faults, **more)
    return fault_events(described.fault, NODES, described.size, seed)


# Invalid tables


CRASH = {"kind": "crash", "node": 3}
AT = {"kind": "crash", "node": 3, "time": 10.0}
CUT = {"kind": "partition", "nodes": "0-3", "time": 10.0}
DRAWN = {"kind": "crash", "every": 60.0}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({**CRASH, "kind": "crush"}, "kind = 'crush': expected one of 'crash', 'raise', 'hang', 'restart', "
         "'partition', 'repair', 'hold', 'release', 'slow', 'drop'; did you mean 'crash'?"),
        ({**CRASH, "tiem": 3}, "tiem: unknown key; did you mean 'time'?"),
        # when
        ({**AT, "time": -1.0}, "time = -1.0: expected number at least 0"),
        ({**CRASH, "round": -1}, "round = -1: expected integer at least 0"),
        ({**DRAWN, "every": 0}, "every = 0: expected number above 0"),
        ({**DRAWN, "count": 0}, "count = 0: expected integer at least 1"),
        ({**AT, "round": 5}, "time = 10.0: round is given too; remove one of them"),
        ({**AT, "every": 5.0}, "every = 5.0: time is given too; remove one of them"),
        ({"kind": "partition", "node": 3}, "time: missing; expected time = … (in seconds) or every = … "
         "(mean seconds between random faults)"),
        ({**AT, "after": 5.0}, "after = 5.0: it applies to random faults only; add every = … or remove it"),
        ({**AT, "before": 5.0}, "before = 5.0: it applies to random faults only; add every = … or remove it"),
        ({**CRASH, "count": 5}, "count = 5: it applies to random faults only; add every = … or remove it"),
        ({**DRAWN, "after": 9.0, "before": 9.0}, "before = 9.0: expected a time later than after = 9.0"),
        # for how long
        ({**AT, "until": 10.0}, "until = 10.0: expected a time later than time = 10.0"),
        ({**AT, "until": 9.0}, "until = 9.0: expected a time later than time = 10.0"),
        ({**AT, "lasting": 0.0}, "lasting = 0.0: expected number above 0"),
        ({**AT, "until": 20.0, "lasting": 5.0}, "lasting = 5.0: until is given too; remove one of them"),
        ({**CRASH, "round": 2, "until": 20.0}, "until = 20.0: a fault with a round has no end time; "
         "give time instead of round, or add a fault of kind = 'restart'"),
        ({**DRAWN, "after": 9.0, "until": 9.0}, "until = 9.0: expected a time later than after = 9.0"),
        ({**DRAWN, "before": 9.0, "until": 8.0}, "until = 8.0: expected a time not before 9.0 (before); "
         "later faults would not end"),
        # which nodes
        ({"kind": "crash", "time": 1.0}, "node: missing; expected node = 3 or nodes = '0-3, 8'"),
        ({"kind": "slow", "time": 1.0, "factor": 2.0},
         "node: missing; expected node = 3 or nodes = '0-3, 8'"),
        ({**CRASH, "node": 8}, "node = 8: there is no such node; nodes = 8"),
        ({**AT, "node": 8}, "node = 8: there is no such node; nodes = 8"),
        ({"kind": "hang", "nodes": "2, 7-8"}, "nodes = '2, 7-8': there is no such node; nodes = 8"),
        ({"kind": "hang", "nodes": "0-99999999999999"}, "nodes = '0-99999999999999': there is no such node; nodes = 8"),
        ({"kind": "hang", "nodes": "some"}, "nodes = 'some': expected numbers and ranges such as '0-3, 8'"),
        ({"kind": "hang", "nodes": "3-1"}, "nodes = '3-1': 3-1 counts down; did you mean 1-3?"),
        ({**AT, "nodes": "1-2"}, "nodes = '1-2': node = 3 is given too; remove one of them"),
        ({**CUT, "others": "4-9"}, "others = '4-9': there is no such node; nodes = 8"),
        ({**CUT, "others": "5-4"}, "others = '5-4': 5-4 counts down; did you mean 4-5?"),
        ({**CUT, "others": "3-5"}, "others = '3-5': node 3 is on both sides; remove it from one"),
        ({**CUT, "nodes": "0-7"},
         "others: there are no other nodes; name both sides, or neither for a fault between all nodes"),
        ({"kind": "hold", "others": "3", "time": 1.0}, "others = '3': missing the nodes on this side; add "
         "node = 3 or nodes = '0-3, 8'"),
        ({"kind": "drop", "others": "0-7", "every": 1.0, "probability": 0.5},
         "others = '0-7': no node is left for the random fault; name fewer others"),
        # how much
        ({**AT, "kind": "slow"}, "factor: missing; expected number above 0"),
        ({**AT, "kind": "slow", "factor": 0}, "factor = 0: expected number above 0"),
        ({**AT, "kind": "slow", "factor": 2, "what": "all"},
         "what = 'all': expected one of 'compute', 'network', 'both'"),
        ({**AT, "kind": "drop"}, "probability: missing; expected number above 0 and at most 1"),
        ({**AT, "kind": "drop", "probability": 0}, "probability = 0: expected number above 0 and at most 1"),
        ({**AT, "kind": "drop", "probability": 1.1}, "probability = 1.1: expected number above 0 and at most 1"),
        # what a kind does not have
        ({**AT, "factor": 2.0}, "factor = 2.0: kind = 'crash' has no such key; remove it (only 'slow' have it)"),
        ({**AT, "others": "1"}, "others = '1': kind = 'crash' has no such key; remove it (only 'partition', "
         "'repair', 'hold', 'release', 'drop' have it)"),
        ({**AT, "oneway": False}, "oneway = False: kind = 'crash' has no such key; remove it (only "
         "'partition', 'repair', 'hold', 'release', 'drop' have it)"),
        ({**AT, "kind": "hang", "until": 20.0}, "until = 20.0: kind = 'hang' has no such key; remove it (only "
         "'crash', 'partition', 'hold', 'slow', 'drop' have it)"),
        ({**CUT, "probability": 0.5},
         "probability = 0.5: kind = 'partition' has no such key; remove it (only 'drop' have it)"),
        ({**CUT, "round": 5},
         "round = 5: kind = 'partition' has no such key; remove it (only 'crash', 'raise', 'hang' have it)"),
        # nothing to undo
        ({"kind": "restart", "node": 3, "time": 5.0}, "time = 5.0: node 3 is not down at this time; "
         "add an earlier crash, or leave it out"),
        ({"kind": "repair", "time": 5.0}, "time = 5.0: none of these nodes is cut at this time; "
         "add an earlier partition, or remove this"),
        ({"kind": "release", "node": 3, "time": 5.0}, "time = 5.0: none of these nodes is held at this time; "
         "add an earlier hold, or remove this"),
    ],
)  # fmt: skip
def test_an_invalid_fault_is_rejected_with_its_key_and_what_to_do(fault: dict[str, Any], problem: str) -> None:
    assert problems(fault) == (f"fault[0].{problem}",)


def test_all_problems_of_all_faults_are_reported_at_once() -> None:
    found = problems(
        {**AT, "until": 5.0, "factor": 2.0},
        {"kind": "drop", "nodes": "x"},
        {"kind": "partition", "node": 9, "round": 1},
    )
    assert [problem.split(" ")[0].rstrip(":") for problem in found] == [
        "fault[0].factor", "fault[0].until", "fault[1].probability", "fault[1].time", "fault[1].nodes",
        "fault[2].round", "fault[2].time", "fault[2].node",
    ]  # fmt: skip


def test_a_fault_created_in_python_is_validated_too() -> None:
    with pytest.raises(ExperimentError, match=r"fault\[1\].time = -3.0: expected number at least 0"):
        Experiment(nodes=NODES, fault=Faults().crash(1).hang(2).at(-3.0).schedule)
    with pytest.raises(ExperimentError, match=r"fault\[0\].kind = 'crush': expected one of"):
        Experiment(nodes=NODES, fault=(Fault("crush", 3),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        ({"kind": "restart", "node": SERVER, "time": 50.0}, "node = 8"),
        ({"kind": "restart", "nodes": "7-8", "every": 5.0}, "nodes = '7-8'"),
        ({"kind": "crash", "nodes": "7-8", "time": 5.0, "until": 9.0}, "nodes = '7-8'"),
        ({"kind": "crash", "node": SERVER, "time": 5.0, "lasting": 9.0}, "node = 8"),
    ],
)
def test_a_server_cannot_restart(fault: dict[str, Any], key: str) -> None:
    problem = "node 8 is a server and cannot restart; leave it out, or remove the end of the crash"
    assert problems(fault, **SERVED) == (f"fault[0].{key}: {problem}",)


def test_a_server_may_crash_and_be_cut_off() -> None:
    (crash,) = expanded({"kind": "crash", "node": SERVER, "time": 5.0}, **SERVED)
    assert crash.nodes == (SERVER,)
    (cut,) = expanded({"kind": "partition", "node": 0, "time": 5.0}, **SERVED)
    assert cut.others == (1, 2, 3, 4, 5, 6, 7, SERVER)
    (problem,) = problems({"kind": "hang", "node": 9}, **SERVED)
    assert problem == "fault[0].node = 9: there is no such node; nodes = 8, and 1 server"


RESTART = {"kind": "restart", "node": 3, "time": 30.0}


@pytest.mark.parametrize(
    "before",
    [
        [{"kind": "crash", "node": 3, "time": 29.0}],
        [{"kind": "crash", "nodes": "0-7", "time": 30.0}],  # at the same time, but before it in the file
        [{"kind": "crash", "node": 3, "round": 1000}],  # at an unknown time
        [{"kind": "crash", "every": 9.0, "after": 29.0}],
        [{"kind": "crash", "node": 3, "time": 1.0, "until": 2.0}, {"kind": "crash", "node": 3, "time": 3.0}],
    ],
)
def test_a_restart_needs_a_possible_earlier_crash(before: list[dict[str, Any]]) -> None:
    experiment(*before, RESTART)


@pytest.mark.parametrize(
    "others",
    [
        [{"kind": "crash", "node": 3, "time": 31.0}],
        [{"kind": "crash", "node": 2, "time": 10.0}],
        [{"kind": "crash", "node": 3, "time": 10.0, "until": 20.0}],  # has restarted before
        [{"kind": "crash", "node": 2, "round": 1}],
        [{"kind": "crash", "every": 9.0, "after": 30.0}],
        [{"kind": "crash", "nodes": "0-2", "every": 9.0}],
        [{"kind": "hang", "node": 3, "time": 10.0}],
    ],
)
def test_a_restart_of_a_node_that_is_up_is_rejected(others: list[dict[str, Any]]) -> None:
    (problem,) = problems(*others, RESTART)
    assert problem.startswith(f"fault[{len(others)}].time = 30.0: node 3 is not down at this time")


@pytest.mark.parametrize(("do", "undo"), [("partition", "repair"), ("hold", "release")])
def test_a_repair_or_release_needs_an_earlier_fault_between_some_of_its_nodes(do: str, undo: str) -> None:
    done = {"kind": do, "nodes": "0-1", "others": "2-3", "time": 10.0}
    undone = {"kind": undo, "nodes": "3-4", "others": "1, 5", "time": 30.0}
    experiment(done, undone)
    experiment({**done, "oneway": True}, undone)
    experiment(done, {"kind": undo, "time": 10.0})
    experiment({"kind": do, "every": 10.0}, undone)
    for earlier, later in (
        ({**done, "time": 31.0}, undone),
        ({**done, "until": 20.0}, undone),
        ({**done, "nodes": "6-7"}, undone),
        ({**done, "oneway": True}, {**undone, "oneway": True}),  # the other way
        ({"kind": do, "every": 10.0, "after": 30.0}, undone),
    ):
        (problem,) = problems(earlier, later)
        assert problem.startswith("fault[1].time = 30.0: none of these nodes is")


# Valid tables


def test_a_crash_without_a_time_happens_at_the_first_round() -> None:
    described = experiment({"kind": "crash", "nodes": "2-3"}, {"kind": "hang", "node": 3, "round": 4}, AT)
    assert described.faults(3) == [Fault("crash", round=0, nodes="2-3"), Fault("hang", 3, 4)]
    assert [fault.kind for fault in described.faults(2)] == ["crash"]
    assert described.faults(1) == []
    assert described.timed_faults == (Fault("crash", 3, time=10.0),)
    assert [fault.happens_at(3) for fault in described.faults(3)] == [True, False]


def test_faults_by_round_are_sorted_by_round() -> None:
    described = experiment({"kind": "hang", "node": 1, "round": 7}, {"kind": "raise", "nodes": "0-2", "round": 5})
    assert [fault.round for fault in described.faults(1)] == [5, 7]
    assert list(fault_events(described.fault, NODES, NODES, 0)) == []


KINDS = st.sampled_from(["crash", "raise", "hang", "restart", "partition", "repair", "hold", "release", "slow", "drop"])
TIMES = st.floats(0, 100)


@st.composite
def tables(draw: st.DrawFn, kinds: st.SearchStrategy[str] = KINDS) -> dict[str, Any]:
    """A timed fault that is valid by itself."""
    kind = draw(kinds)
    table: dict[str, Any] = {"kind": kind}
    named = draw(st.sets(st.integers(0, NODES - 1), min_size=1, max_size=NODES - 1))
    between = kind in ("partition", "repair", "hold", "release", "drop")
    random_fault = draw(st.booleans()) or kind in ("restart", "repair", "release")
    if draw(st.booleans()) or not (between or random_fault):
        table["nodes"] = ", ".join(map(str, sorted(named)))
        if between and draw(st.booleans()):
            table["others"] = ", ".join(str(node) for node in range(NODES) if node not in named)
    if random_fault:
        table |= {"every": draw(st.floats(0.5, 50)), "after": draw(TIMES), "count": draw(st.integers(1, 6))}
        if draw(st.booleans()):
            table["before"] = table["after"] + draw(st.floats(1, 50))
    else:
        table["time"] = draw(TIMES)
    if kind in ("crash", "partition", "hold", "slow", "drop"):
        end = draw(st.sampled_from(["never", "lasting", "until"]))
        if end == "lasting":
            table["lasting"] = draw(st.floats(0.5, 50))
        elif end == "until":
            table["until"] = table.get("before", table.get("time", table.get("after"))) + draw(st.floats(1, 50))
    if between and draw(st.booleans()):
        table["oneway"] = draw(st.booleans())
    if kind == "slow":
        table |= {"factor": draw(st.floats(0.1, 10)), "what": draw(st.sampled_from(["compute", "network", "both"]))}
    if kind == "drop":
        table["probability"] = draw(st.floats(0.01, 1))
    return table


SCHEDULES = st.lists(tables(), max_size=5)


@settings(max_examples=30, deadline=None)
@given(SCHEDULES)
def test_faults_are_the_same_after_a_round_trip_through_toml(schedule: list[dict[str, Any]]) -> None:
    described = experiment(*schedule)
    assert Experiment.from_table(tomllib.loads(described.toml())) == described
    assert [fault.to_table() for fault in described.fault] == schedule


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
    begun = np.array([h.time for h in table if h.value == 3.0])
    ended = np.array([h.time for h in table if h.value == 1.0])
    assert len(begun) == len(ended) == 3000
    assert (ended - begun).mean() == pytest.approx(2.0, rel=0.08)
    assert (ended - begun).std() == pytest.approx(2.0, rel=0.15)


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


# The builder, and the snippets of the page


def test_faults_read_as_a_sentence() -> None:
    faults = (
        Faults()
        .crash(3, round=2)
        .crash(3).at(30.0).until(60.0)
        .restart(3).at(90.0)
        .raises("0-2").at(5.0)
        .hang().every(60.0, after=10.0, before=90.0, count=3)
        .partition("0-3", "4-7", oneway=True).at(10.0).lasting(5.0)
        .repair().at(20.0)
        .hold(1).at(1.0)
        .release(1).at(2.0)
        .slow("0-1", factor=4.0, what="compute").at(0.0)
        .drop(probability=0.1).at(0.0)
    )  # fmt: skip
    assert faults.schedule == (
        Fault("crash", 3, 2),
        Fault("crash", 3, time=30.0, until=60.0),
        Fault("restart", 3, time=90.0),
        Fault("raise", nodes="0-2", time=5.0),
        Fault("hang", every=60.0, after=10.0, before=90.0, count=3),
        Fault("partition", nodes="0-3", others="4-7", oneway=True, time=10.0, lasting=5.0),
        Fault("repair", time=20.0),
        Fault("hold", 1, time=1.0),
        Fault("release", 1, time=2.0),
        Fault("slow", nodes="0-1", factor=4.0, what="compute", time=0.0),
        Fault("drop", probability=0.1, time=0.0),
    )
    with pytest.raises(ExperimentError) as error:
        Experiment(nodes=NODES, fault=faults.schedule)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "fault[6].time = 20.0"
    ]  # is repaired by then


def test_a_time_needs_a_fault_before_it() -> None:
    with pytest.raises(ValueError, match="begin with a fault"):
        Faults().at(3.0)


def snippets() -> list[str]:
    return [block.partition("```")[0] for block in PAGE.read_text().split("```toml\n")[1:]]


def test_every_snippet_of_the_page_is_a_valid_experiment_and_every_kind_has_one() -> None:
    kinds: set[str] = set()
    for snippet in snippets():
        described = Experiment.from_table({"nodes": 16, **tomllib.loads(snippet)})
        assert described.fault
        assert described.timed_faults == () or next(fault_events(described.fault, 16, described.size, 0))
        kinds |= {fault.kind for fault in described.fault}
    assert kinds == {
        "crash", "raise", "hang", "restart", "partition", "repair", "hold", "release", "slow", "drop"
    }  # fmt: skip


def test_random_crashes_stop_when_all_nodes_are_down() -> None:
    faults = [Fault("crash", nodes="1, 2", every=1.0), Fault("slow", node=0, time=1e6, factor=2.0)]
    affected = [fault_event.nodes for fault_event in fault_events(faults, 4, 4, 0)]
    assert sorted(affected[:-1]) == [(1,), (2,)]
    assert affected[-1] == (0,)


def test_nodes_that_restart_crash_again() -> None:
    random_fault = fault_events([Fault("crash", nodes="1", every=1.0, lasting=0.1)], 4, 4, 0)
    kinds = [fault_event.kind for fault_event in itertools.islice(random_fault, 100)]
    assert kinds == ["crash", "restart"] * 50
