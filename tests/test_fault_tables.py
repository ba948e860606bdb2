"""Tables of faults: what is valid, how invalid ones are rejected, and the builder."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from fault_schedules import (
    AT,
    CRASH,
    CUT,
    DRAWN,
    NODES,
    RESTART,
    SCHEDULES,
    SERVED,
    SERVER,
    expanded,
    experiment,
    problems,
)
from shoal.environment.faults import Fault, fault_events
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.testing import Faults

PAGE = Path(__file__).parent.parent / "docs" / "faults.md"


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({**CRASH, "kind": "crush"}, "kind = 'crush': expected one of 'crash', 'raise', 'hang', 'restart', "
         "'join', 'partition', 'repair', 'hold', 'release', 'slow', 'drop'; did you mean 'crash'?"),
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
        ({**DRAWN, "before": 9.0, "until": 8.0}, "until = 8.0: expected a time at or after before = 9.0; "
         "faults that start later would not end"),
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
         "round = 5: kind = 'partition' has no such key; remove it (only 'crash', 'raise', 'hang', 'join' have "
         "it)"),
        # nodes that join
        ({"kind": "join", "node": 3}, "time: missing; expected time = … (in seconds) or round = …"),
        ({"kind": "join", "node": 3, "time": 5.0, "round": 2}, "time = 5.0: round is given too; remove one of them"),
        ({"kind": "join", "node": 3, "time": 0.0},
         "time = 0.0: the nodes would be there from the start; give a later time, or remove the fault"),
        ({"kind": "join", "node": 3, "round": 0},
         "round = 0: the nodes would be there from the start; give a later round, or remove the fault"),
        ({"kind": "join", "node": 3, "every": 5.0},
         "every = 5.0: a node joins once; give time = … (in seconds) or round = … instead"),
        ({"kind": "join", "time": 5.0}, "node: missing; expected node = 3 or nodes = '0-3, 8'"),
        ({"kind": "join", "nodes": "0-7", "time": 5.0}, "nodes = '0-7': no node would be there at the start, and late "
         "nodes join through others; leave at least one training node out"),
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
    problem = (
        "node 8 is a service node, such as a server, and cannot restart; leave it out, or remove the end of the crash"
    )
    assert problems(fault, **SERVED) == (f"fault[0].{key}: {problem}",)


def test_a_server_cannot_join_late() -> None:
    problem = "node 8 is a service node, such as a server, and must be there from the start; leave it out"
    assert problems({"kind": "join", "nodes": "7-8", "round": 5}, **SERVED) == (f"fault[0].nodes = '7-8': {problem}",)


def test_a_node_joins_once_and_no_fault_at_a_fixed_time_strikes_it_before() -> None:
    join = {"kind": "join", "node": 3, "time": 20.0}
    twice = ("fault[1].nodes = '2-3': node 3 joins twice; remove it from one of the faults",)
    assert problems(join, {"kind": "join", "nodes": "2-3", "round": 5}) == twice
    for kind in ("crash", "raise", "hang"):
        early = ("fault[0].time = 10.0: node 3 joins later, at 20.0; give a later time, or leave it out",)
        assert problems({**AT, "kind": kind}, join) == early
    assert problems({"kind": "restart", "node": 3, "time": 10.0}, join) == (
        "fault[0].time = 10.0: node 3 is not down at this time; add an earlier crash, or leave it out",
    )
    events = expanded(join, {**AT, "time": 25.0, "until": 30.0}, {**DRAWN, "node": 3, "until": 15.0, "every": 1.0})
    assert [str(event) for event in events] == ["node 3 joins", "node 3 crashes", "node 3 restarts"]


def test_a_server_may_crash_and_be_cut_off() -> None:
    (crash,) = expanded({"kind": "crash", "node": SERVER, "time": 5.0}, **SERVED)
    assert crash.nodes == (SERVER,)
    (cut,) = expanded({"kind": "partition", "node": 0, "time": 5.0}, **SERVED)
    assert cut.others == (1, 2, 3, 4, 5, 6, 7, SERVER)
    (problem,) = problems({"kind": "hang", "node": 9}, **SERVED)
    assert problem == "fault[0].node = 9: there is no such node; nodes = 8, and 1 server"


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


@settings(max_examples=30, deadline=None)
@given(SCHEDULES)
def test_faults_are_the_same_after_a_round_trip_through_toml(schedule: list[dict[str, Any]]) -> None:
    described = experiment(*schedule)
    assert Experiment.from_table(tomllib.loads(described.toml())) == described
    assert [fault.to_table() for fault in described.fault] == schedule


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
        "crash", "raise", "hang", "restart", "join", "partition", "repair", "hold", "release", "slow", "drop"
    }  # fmt: skip
