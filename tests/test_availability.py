"""Availability schedules: consistency of `online` and `next_change`, and rejection of invalid files."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shoal.environment.availability import (
    HORIZON,
    Always,
    AvailabilitySchedule,
    DayNight,
    FedScaleAvailability,
    Intervals,
    RepeatedIntervals,
)
from shoal.errors import DataError, ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup

SECONDS = st.integers(0, 3000).map(lambda tenths: tenths / 10)
TIMES = st.one_of(
    st.floats(0, 1000), st.floats(1e6 - 500, 1e6 + 500), st.floats(HORIZON - 500, HORIZON + 500), st.just(1e300)
)


@st.composite
def intervals(draw: st.DrawFn) -> list[tuple[float, float]]:
    """Intervals in any order; they may overlap, touch or be empty."""
    return [(min(pair), max(pair)) for pair in draw(st.lists(st.tuples(SECONDS, SECONDS), max_size=6))]


class SameForAll:
    """An availability schedule in which every node has the same intervals."""

    def __init__(self, schedule: RepeatedIntervals) -> None:
        self.schedule = schedule

    def online(self, node: int, time: float) -> bool:
        return self.schedule.online(time)

    def next_change(self, node: int, time: float) -> float:
        return self.schedule.next_change(time)


def assert_consistent(availability_schedule: AvailabilitySchedule, node: int, time: float, fraction: float) -> None:
    """Check that `next_change` is after `time`, and that `online` is constant until then and differs at it."""
    for _ in range(5):
        now, change = availability_schedule.online(node, time), availability_schedule.next_change(node, time)
        assert change > time
        if change == math.inf:
            later = (time + 1, 2 * time, 1e7, HORIZON, 1e12)
            assert all(availability_schedule.online(node, t) == now for t in later if t >= time)
            return
        assert availability_schedule.online(node, change) != now
        before = math.nextafter(change, 0)
        for t in (before, max(time, min(before, time + fraction * (change - time)))):
            assert availability_schedule.online(node, t) == now
            assert availability_schedule.next_change(node, t) == change
        time = change


def schedule_of(folder: Path, clients: dict[Any, Any], nodes: int = 1) -> AvailabilitySchedule:
    (folder / "trace.json").write_text(json.dumps(clients))
    return FedScaleAvailability(folder / "trace.json", order="file").build(nodes, seed=0)


def client(active: list[float], inactive: list[float], finish_time: float = 100) -> dict[str, Any]:
    return {"duration": 1, "inactive": inactive, "finish_time": finish_time, "active": active, "model": "CPH1801"}


# Intervals


@given(intervals(), st.one_of(st.just(math.inf), st.floats(0.001, 400)), TIMES, st.floats(0, 1))
@example([(0.0, 0.1)], 0.3, 1e6, 0.5)
@example([(0.1, 0.2), (0.2, 0.3)], 0.3, 999_999.9, 0.5)
@example([(0.0, 5.0), (9.0, 10.0)], 10.0, 9.5, 0.5)
@example([(3.9, 93.9)], 108.4, 1_913_365.0, 0.5)  # a sum that is rounded twice is wrong here
@example([(77.8, 184.1)], 321.6, 1_155_462.0, 0.5)
def test_a_schedule_is_constant_until_its_next_change(
    given: list[tuple[float, float]], period: float, time: float, fraction: float
) -> None:
    assume(time <= HORIZON)
    assert_consistent(SameForAll(RepeatedIntervals(given, period)), 0, time, fraction)


@given(intervals(), st.one_of(st.just(math.inf), SECONDS.filter(bool)), SECONDS)
def test_a_node_is_online_only_within_its_intervals(
    given: list[tuple[float, float]], period: float, time: float
) -> None:
    phase = time if period == math.inf else time % period
    assert RepeatedIntervals(given, period).online(time) == any(on <= phase < off for on, off in given)


@given(intervals(), st.integers(1, 400), SECONDS, st.integers(1, 10_000))
def test_a_schedule_repeats_without_drift(
    given: list[tuple[float, float]], period: int, time: float, times: int
) -> None:
    """Times are whole seconds, so that the later time is exactly a multiple of the period after the earlier one."""
    schedule, time = RepeatedIntervals(given, period), math.floor(time)
    later = time + times * period
    assert schedule.online(later) == schedule.online(time)
    change, again = schedule.next_change(time), schedule.next_change(later)
    assert again - later == pytest.approx(change - time, abs=1e-6) if change < math.inf else again == math.inf


def test_changes_one_microsecond_apart_are_distinct_late_in_a_run() -> None:
    schedule = RepeatedIntervals([(1.0, 1.000001), (1.000002, 1.000003)], 7.7)
    time, changes = 1e8, []
    for _ in range(8):
        time = schedule.next_change(time)
        changes.append(time)
    assert [round(b - a, 5) for a, b in itertools.pairwise(changes[:5])] == [0, 0, 0, 7.7]
    assert len(set(changes)) == 8


# A CSV of intervals


def write_intervals(folder: Path, text: str) -> Path:
    (folder / "shifts.csv").write_text(text, encoding="utf-8")
    return folder / "shifts.csv"


@pytest.mark.parametrize(
    "header", ["", "node,on,off\n", "# shifts\n\nNode, On, Off # seconds\n", "\ufeffnode,on,off\r\n"]
)
def test_intervals_of_a_file_are_merged_in_any_order(header: str, tmp_path: Path) -> None:
    path = write_intervals(tmp_path, header + "2,10,20\n0,30,40\n\n2, 5, 10 # touches\n2,15,25\n0,1.5,2\n3,7,inf\n")
    availability_schedule = Intervals(path).build(4, seed=0)
    for node, changes in {0: [1.5, 2, 30, 40], 1: [], 2: [5, 25], 3: [7], 4: []}.items():
        found, time = [], 0.0
        while (time := availability_schedule.next_change(node, time)) < math.inf:
            found.append(time)
        assert found == changes, node
        assert availability_schedule.online(node, 1e5) == (node in (1, 3, 4))


def test_a_file_repeats_after_its_period(tmp_path: Path) -> None:
    availability_schedule = Intervals(
        write_intervals(tmp_path, "0,0,10\n0,50,60\n1,0,60\n2,20,inf\n"), period=60
    ).build(3, seed=0)
    assert availability_schedule.next_change(0, 55) == 70  # online over the end of the period
    assert availability_schedule.next_change(0, 70) == 110
    assert availability_schedule.next_change(1, 1e6) == math.inf
    assert [availability_schedule.next_change(2, t) for t in (0, 20, 60)] == [20, 60, 80]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0,5,5\n", ":1: on = 5, off = 5: expected 0 ≤ on < off"),
        ("node,on,off\n0,1,2\n0,9,5\n", ":3: on = 9, off = 5: expected 0 ≤ on < off"),
        ("0,-1,5\n", ":1: on = -1, off = 5: expected 0 ≤ on < off"),
        ("0,nan,5\n", ":1: on = 'nan': expected seconds"),
        ("0,1,later\n", ":1: off = 'later': expected seconds"),
        ("0,1,\n", ":1: off = '': expected seconds"),
        ("\n\n4,1,2\n", ":3: there is no node 4; with nodes = 4, ids are 0 to 3"),
        ("-1,1,2\n", ":1: node = '-1': expected a node's id"),
        ("0,1,2\nnode,on,off\n", ":2: node = 'node': expected a node's id"),
        ("9" * 5000 + ",1,2\n", ": expected a node's id"),
        ("0,1\n", ":1: expected node, on, off; found 2 values"),
        ("node,off,on\n", ":1: the columns are node, off, on; expected node, on, off"),
        ("0,50,61\n", ":1: on = 50, off = 61: expected times within the period, 60 s"),
        ("0,60,inf\n", ":1: on = 60, off = inf: expected times within the period, 60 s"),
        ("0,inf,inf\n", ":1: on = inf, off = inf: expected 0 ≤ on < off"),
    ],
)
def test_an_invalid_line_is_rejected_with_its_number(text: str, problem: str, tmp_path: Path) -> None:
    path = write_intervals(tmp_path, text)
    with pytest.raises(DataError) as caught:
        Intervals(path, period=60).build(4, seed=0)
    assert str(caught.value).startswith(f"{path}:")
    assert str(caught.value).endswith(problem)


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("none", "No such file"), (".", "Is a directory"), ("binary.csv", "it is not a text file")):
        with pytest.raises(DataError, match=f"cannot read these intervals: {reason}"):
            Intervals(tmp_path / name).build(1, seed=0)
    for name, reason in (("none", "No such file"), (".", "Is a directory"), ("binary.csv", "not a pickle")):
        with pytest.raises(DataError, match=reason):
            FedScaleAvailability(tmp_path / name).build(1, seed=0)


# FedScale's traces


def test_a_client_is_online_from_active_to_inactive_in_every_period_of_finish_time(tmp_path: Path) -> None:
    availability_schedule = schedule_of(tmp_path, {"7": client([10, 40], [20, 60])})
    for start in (0, 100, 1_000_000):
        assert [availability_schedule.online(0, start + t) for t in (0, 10, 19, 20, 40, 59, 60, 99)] == [
            False, True, True, False, True, True, False, False,
        ]  # fmt: skip
        assert [availability_schedule.next_change(0, start + t) for t in (0, 10, 20, 40, 60)] == [
            start + t for t in (10, 20, 40, 60, 110)
        ]


def test_nothing_changes_after_thirty_years(tmp_path: Path) -> None:
    availability_schedule = schedule_of(tmp_path, {"7": client([10], [60])})
    assert availability_schedule.next_change(0, HORIZON - 45) == HORIZON - 40
    assert availability_schedule.next_change(0, HORIZON - 40) == math.inf
    for time in (HORIZON - 40, HORIZON, HORIZON + 10, 1e300):
        assert not availability_schedule.online(0, time)
        assert availability_schedule.next_change(0, time) == math.inf


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_and_json_give_the_same_schedule(protocol: int, tmp_path: Path) -> None:
    clients = {3834: client([10, 40], [20, 60]), 5: client([0], [100])}
    (tmp_path / "trace").write_bytes(pickle.dumps(clients, protocol))
    found = FedScaleAvailability(tmp_path / "trace", order="file").build(2, seed=0)
    other = schedule_of(tmp_path, clients, nodes=2)
    for node in range(2):
        for time in range(0, 200, 5):
            assert found.online(node, time) == other.online(node, time)
            assert found.next_change(node, time) == other.next_change(node, time)


def test_nodes_take_random_clients_and_all_clients_before_any_repeats(tmp_path: Path) -> None:
    clients = {str(i): client([i], [i + 1]) for i in range(20)}
    schedule_of(tmp_path, clients)
    taken = {}
    for seed in (0, 1):
        availability_schedule = FedScaleAvailability(tmp_path / "trace.json").build(25, seed)
        taken[seed] = [
            int(t) if not availability_schedule.online(n, 0) else 0
            for n in range(25)
            for t in [availability_schedule.next_change(n, 0)]
        ]
        assert sorted(taken[seed][:20]) == list(range(20))
        assert taken[seed][20:] == taken[seed][:5]
        fewer = FedScaleAvailability(tmp_path / "trace.json").build(3, seed)
        assert [fewer.online(n, taken[seed][n]) for n in range(3)] == [True] * 3
    assert taken[0] != taken[1]


def test_a_client_that_is_never_online_causes_a_warning(tmp_path: Path) -> None:
    clients = {"a": client([], []), "b": client([5], [6]), "c": client([200], [300]), "d": client([7], [7])}
    with pytest.warns(UserWarning, match=r"trace.json: 3 of the nodes are never online: 0, 2, 3$"):
        availability_schedule = schedule_of(tmp_path, clients, nodes=4)
    assert [availability_schedule.next_change(node, 0) for node in range(4)] == [math.inf, 5, math.inf, math.inf]
    assert not any(availability_schedule.online(node, 0) for node in range(4))


@pytest.mark.parametrize(
    ("trace", "problem"),
    [
        (client([1], [2], 0), "finish_time = 0: expected a number above 0"),
        (client([1], [2], 1e-9), "finish_time = 1e-09: expected at least 0.001 s"),
        (client([1], [2], math.nan), "finish_time = nan: expected a number above 0"),
        (client([1], [2], 10**400), "expected a number above 0"),
        (client([1, 5], [2]), "active holds 2 times and inactive 1; expected pairs"),
        (client([5], [2]), "active at 5 s and inactive before that, at 2 s"),
        (client([-5], [2]), "active holds -5: expected seconds, 0 or more"),
        (client([True], [2]), "active holds True: expected seconds, 0 or more"),
        ({**client([1], [2]), "active": "soon"}, "active = 'soon': expected a list of seconds"),
        ({"computation": 1, "communication": 2}, "has no 'finish_time'; found computation, communication"),
        ([1, 2], "is [1, 2]: expected a dictionary"),
    ],
)
def test_an_invalid_trace_is_rejected_with_its_client(trace: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        schedule_of(tmp_path, {"17": trace})
    assert f"{tmp_path / 'trace.json'}: client '17'" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"), [(b"{}", "expected a dictionary of clients"), (b"{,", "not valid JSON")]
)
def test_a_file_without_clients_is_rejected(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        FedScaleAvailability(tmp_path / "trace").build(1, seed=0)
    (tmp_path / "trace").write_bytes(b'{"a":' * 100_000)
    with pytest.raises(DataError, match="not valid JSON"):
        FedScaleAvailability(tmp_path / "trace").build(1, seed=0)


class OpensFile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("kind", ["open", "system"])
def test_a_pickle_that_would_run_code_is_rejected_without_running_it(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    shell = f"touch {mark}".encode()
    pickles = {
        "open": pickle.dumps({1: client([1], [2]), 2: OpensFile(mark)}),
        "system": b"cposix\nsystem\n(S'" + shell + b"'\ntR.",
    }
    (tmp_path / "trace").write_bytes(pickles[kind])
    with pytest.raises(DataError, match="the pickle names"):
        FedScaleAvailability(tmp_path / "trace").build(1, seed=0)
    assert not mark.exists()
    pickle.loads(pickles[kind])  # without the check it runs
    assert mark.exists()


# Day and night


@given(
    st.floats(0.001, 1e5), st.floats(0, 0.5), st.floats(0.51, 1), st.integers(1, 30), st.booleans(),
    st.integers(0, 3), TIMES, st.floats(0, 1),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*never online")
def test_a_day_night_schedule_is_constant_until_its_next_change(
    period: float, low: float, high: float, phases: int, same: bool, node: int, time: float, fraction: float
) -> None:
    assert_consistent(DayNight(period, low, high, phases, same).build(4, seed=3), node, time, fraction)


@pytest.mark.filterwarnings("ignore:.*never online")
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("start", [0, 997 * 3600])
def test_the_share_of_online_nodes_follows_a_sine(same: bool, start: float) -> None:
    nodes = 3000
    availability_schedule = DayNight(phases=1, same_hours=same).build(nodes, seed=1)
    for time in np.arange(0, 3600, 300):
        share = np.mean([availability_schedule.online(node, start + float(time)) for node in range(nodes)])
        expected = 0.45 + 0.35 * math.sin(2 * math.pi * time / 3600)
        assert share == pytest.approx(expected, abs=4 * math.sqrt(0.25 / nodes)), time


def test_days_of_time_zones_are_shifted() -> None:
    nodes = 2000
    availability_schedule = DayNight(phases=2).build(nodes, seed=1)
    online_shares = [
        np.mean([availability_schedule.online(node, t) for node in range(nodes)]) for t in (0, 900, 1800, 2700)
    ]
    assert online_shares == pytest.approx([0.45] * 4, abs=4 * math.sqrt(0.25 / nodes))


def test_nodes_change_at_a_plausible_rate() -> None:
    availability_schedule = DayNight().build(200, seed=5)
    lengths: list[float] = []
    longest = 0.0
    for node in range(200):
        time, changes = 0.0, [0.0]
        while (time := availability_schedule.next_change(node, time)) < 50 * 3600:
            changes.append(time)
        spans = np.diff(changes)
        lengths.extend(spans[1:])
        longest = max(longest, spans.max())
        assert 30 < len(changes) <= 150
        online = sum(spans[0 if availability_schedule.online(node, 0) else 1 :: 2])
        assert 0.4 < online / changes[-1] < 0.5  # no node is online much more than others
    assert longest < 4 * 3600  # no node is offline or online for days
    assert np.mean(np.array(lengths) < 36) < 0.01  # one in a hundred is shorter than a hundredth of the period
    assert np.median(lengths) > 1000


def test_nodes_with_the_same_hours_repeat_them_and_some_are_never_online() -> None:
    with pytest.warns(UserWarning, match=r"availability 'day-night': \d+ of the nodes are never online: (\d+, ){5}…"):
        availability_schedule = DayNight(same_hours=True).build(300, seed=1)
    never_online = [
        node
        for node in range(300)
        if availability_schedule.next_change(node, 0) == math.inf and not availability_schedule.online(node, 0)
    ]
    assert 0.1 < len(never_online) / 300 < 0.3
    for node in range(50):
        for time in (0.5, 1234.5, 3000.0):
            assert availability_schedule.online(node, time) == availability_schedule.online(node, time + 3600 * 1000)


def test_the_hours_of_a_node_do_not_depend_on_the_number_of_nodes() -> None:
    small, large = DayNight().build(3, seed=1), DayNight().build(30, seed=1)
    other = DayNight().build(3, seed=2)
    changes = [[a.next_change(node, 0) for node in range(3)] for a in (small, large, other)]
    assert changes[0] == changes[1] != changes[2]


# In an experiment


def test_all_nodes_are_online_by_default(tmp_path: Path) -> None:
    experiment = Experiment(nodes=2)
    assert experiment.availability.build() == Always()
    assert Setup(experiment).environment.availability_schedule is None
    write_intervals(tmp_path, "1,0,10\n")
    table = {"nodes": 2, "availability": {"name": "intervals", "path": "shifts.csv", "period": 30}}
    found = Experiment.from_table(table, base=tmp_path)
    again = Experiment.from_table(found.to_table(), base=Path(os.sep))
    assert again == found
    availability_schedule = Setup(again).environment.availability_schedule
    assert availability_schedule is not None
    assert [availability_schedule.next_change(node, 0) for node in range(2)] == [math.inf, 10]


def test_a_server_is_always_online() -> None:
    experiment = Experiment(nodes=2, algorithm={"name": "fedavg"}, availability=DayNight())
    availability_schedule = Setup(experiment).environment.availability_schedule
    assert availability_schedule is not None
    assert (experiment.size, availability_schedule.online(2, 0), availability_schedule.next_change(2, 0)) == (
        3,
        True,
        math.inf,
    )


@pytest.mark.parametrize(
    ("availability", "problem"),
    [
        (
            {"name": "day-nihgt"},
            "availability.name = 'day-nihgt': unknown availability 'day-nihgt'; did you mean 'day-night'?",
        ),
        ({"name": "day-night", "hihg": 1}, "availability.hihg: unknown key; did you mean 'high'?"),
        ({"name": "day-night", "low": 0.9}, "availability: low = 0.9, high = 0.8: expected low below high"),
        ({"name": "intervals"}, "availability.path: missing; expected path of a file"),
        ({"name": "intervals", "path": "x", "period": 0}, "availability.period = 0: expected number at least 0.001"),
        (
            {"name": "fedscale", "path": "x", "order": "first"},
            "availability.order = 'first': expected one of 'drawn', 'file'",
        ),
        ({"period": 3}, "availability = {'period': 3}: expected a table with a name, such as { name = 'always' }"),
    ],
)
def test_an_invalid_availability_is_rejected_with_its_problem(availability: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        Experiment.from_table({"availability": availability})
    assert caught.value.problems == (problem,)


def test_an_invalid_file_is_rejected_before_the_run(tmp_path: Path) -> None:
    path = write_intervals(tmp_path, "node,on,off\n16,0,1\n")
    with pytest.raises(DataError, match=r"shifts\.csv:2: there is no node 16"):
        Experiment(availability=Intervals(path)).run(tmp_path / "runs")
