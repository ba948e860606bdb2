"""Comparison of groups of runs: intervals, ratios, targets, and the command that shows them."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from conftest import CommandResult
from shoal.errors import DataError
from shoal.results.comparison import Comparison, compare_groups
from shoal.results.comparison_text import csv_text, latex_text, markdown_text, text_table
from shoal.results.groups import group_runs
from shoal.results.progress import Outcome
from shoal.results.records import End, Evaluation, RecordFile, Round, RunFolder
from shoal.results.statistics import mean_estimate, paired_ratio, unpaired_ratio
from shoal.results.summary import summarize

positive = st.floats(0.01, 1000)


# Intervals


@given(st.lists(positive, min_size=2, max_size=12).filter(lambda values: np.std(values) > 1e-6))
def test_the_interval_of_a_mean_is_that_of_scipy(values: list[float]) -> None:
    found = mean_estimate(values)
    expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.value == pytest.approx(np.mean(values))


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=8))
def test_the_intervals_of_ratios_are_those_of_scipy(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = np.array(pairs).T
    logs = np.log(ours), np.log(theirs)
    if min(np.std(logs[0]), np.std(logs[1]), np.std(logs[0] - logs[1])) < 1e-6:
        return
    paired = paired_ratio(ours.tolist(), theirs.tolist())
    assert paired is not None
    expected = stats.ttest_rel(*logs).confidence_interval(0.95)
    assert (math.log(paired.low or 0), math.log(paired.high or 0)) == pytest.approx(tuple(expected))
    unpaired = unpaired_ratio(ours.tolist(), theirs.tolist())
    assert unpaired is not None
    expected = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    assert (math.log(unpaired.low or 0), math.log(unpaired.high or 0)) == pytest.approx(tuple(expected))
    assert paired.value == pytest.approx(unpaired.value)


def test_one_value_has_no_interval() -> None:
    assert mean_estimate([0.5]).low is mean_estimate([0.5]).high is None
    for ratio in (paired_ratio([2.0], [4.0]), unpaired_ratio([2.0], [4.0, 4.0])):
        assert ratio is not None
        assert (ratio.value, ratio.low) == (pytest.approx(0.5), None)
    assert unpaired_ratio([2.0, 0.0], [1.0, 1.0]) is None, "it has no logarithm"
    same = unpaired_ratio([2.0, 2.0], [4.0, 4.0])
    assert same is not None
    assert (same.low, same.high) == pytest.approx((0.5, 0.5))


# Comparisons


Made = Callable[..., RunFolder]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def run(
        seed: int, sharing: str, *scores: float, metric: str = "accuracy", ended: bool = True, **tables: Any
    ) -> RunFolder:
        """Create a run of one node with a score per round. Round r ends after 10 r seconds and sends 1000 bytes."""
        folder = RunFolder.create(tmp_path / "runs", sharing.replace("/", ""))
        table = {"name": "made", "engine": "simulation", "nodes": 1, "seed": seed, "sharing": {"name": sharing}}
        folder.experiment.write_text(tomli_w.dumps({**table, "dataset": {"name": "digits"}, **tables}))
        file = RecordFile(folder.node(0))
        for r, score in enumerate(scores):
            file.write(Round(r, 10.0 * (r + 1), 0.5, 1000 * (r + 1), r))
            file.write(Evaluation(r, 10.0 * (r + 1), {metric: score}))
        if ended:
            file.write(End(99.0, "digest", 1000 * len(scores), 0, 0, 0))
            summarize(folder, "simulation", 1, seed, Outcome("completed", 1.0, 0.1))
        file.close()
        return folder

    return run


def compared(runs: Sequence[RunFolder], target: float | None = None, metric: str | None = None) -> Comparison:
    return compare_groups(group_runs(runs), target, metric)


def table_of(comparison: Comparison) -> list[Mapping[str, str]]:
    table = text_table(comparison)
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def test_groups_have_means_over_seeds_and_ratios_paired_by_seed(made: Made) -> None:
    full = [made(seed, "full", 0.2, last + 0.05, last) for seed, last in ((1, 0.8), (2, 0.7), (3, 0.9))]
    topk = [made(seed, "topk", 0.1, 0.1, last) for seed, last in ((3, 0.45), (1, 0.4), (2, 0.35))]
    found = compared([*full, *topk], 0.3)
    assert (found.metric, found.split, found.target) == ("accuracy", "test", 0.3)
    one, two = found.groups
    assert [group.group.label for group in found.groups] == ["sharing = full", "sharing = topk"]
    assert one.final.values == (0.8, 0.7, 0.9)
    assert one.best.values == pytest.approx((0.85, 0.75, 0.95))
    assert one.final.mean is not None
    assert (one.final.mean.low, one.final.mean.high) == pytest.approx(
        stats.t.interval(0.95, 2, loc=0.8, scale=stats.sem([0.8, 0.7, 0.9]))
    )
    assert two.paired
    assert two.final.ratio is not None
    assert (two.final.ratio.value, two.final.ratio.low, two.final.ratio.high) == pytest.approx((0.5, 0.5, 0.5))
    assert one.seconds is not None
    assert two.seconds is not None
    assert (one.seconds.values, two.seconds.values) == ((20.0,) * 3, (30.0,) * 3)
    assert two.seconds.ratio is not None
    assert two.seconds.ratio.value == pytest.approx(1.5)
    assert two.bytes is not None
    assert two.bytes.values == (3000, 3000, 3000)


def test_groups_with_other_seeds_are_not_paired(made: Made) -> None:
    runs = [*(made(seed, "full", 0.5 + seed / 100) for seed in (1, 2)), *(made(seed, "topk", 0.4) for seed in (2, 3))]
    group = compared(runs).groups[1]
    assert not group.paired
    assert group.final.ratio == unpaired_ratio([0.4, 0.4], [0.51, 0.52])


def test_of_repeated_runs_of_one_seed_the_last_counts(made: Made) -> None:
    """They are not independent: an interval over them would be too narrow."""
    with pytest.warns(UserWarning, match="sharing = full: 3 runs with 2 seeds; the last run of each seed counts"):
        found = compared([made(1, "full", 0.5), made(1, "full", 0.6), made(2, "full", 0.8), made(1, "topk", 0.3)])
    assert found.groups[0].final.values == (0.6, 0.8)


def test_a_target_that_some_runs_did_not_reach_has_no_mean(made: Made) -> None:
    runs = [made(seed, "full", 0.3, 0.7) for seed in (1, 2, 3)]
    runs += [made(seed, "topk", 0.3, last) for seed, last in ((1, 0.7), (2, 0.5), (3, 0.6))]
    found = compared(runs, 0.6)
    topk = found.groups[1]
    assert topk.seconds is not None
    assert (topk.seconds.values, topk.seconds.mean, topk.seconds.ratio) == ((20.0, None, 20.0), None, None)
    row = table_of(found)[1]
    assert (row["virtual time to 0.6 [s]"], row["sent to 0.6 [kB]"]) == ("2 of 3 reached", "2 of 3 reached")
    assert row["ratio of time"] == "–"
    assert any("would be biased" in note for note in text_table(found).notes)


def test_one_seed_is_shown_without_an_interval(made: Made) -> None:
    found = compared([made(1, "full", 0.5), made(1, "topk", 0.25)])
    assert [row["final test accuracy"] for row in table_of(found)] == ["0.5", "0.25"]
    assert [row["ratio of final"] for row in table_of(found)] == ["1", "0.5"]
    assert "A group of one run has no interval." in text_table(found).notes


def test_a_diverged_run_has_no_score(made: Made) -> None:
    found = compared([made(1, "full", 0.5, 0.6), made(2, "full", 0.5, math.nan)])
    row = table_of(found)[0]
    assert row["final test accuracy"] == "1 of 2 finite"
    assert row["best"].startswith("0.55 ± ")


def test_the_default_target_is_that_of_the_experiments(made: Made) -> None:
    plan = {"evaluation": {"target": 0.6}}
    assert compared([made(1, "full", 0.5, **plan), made(1, "topk", 0.5, **plan)]).target == 0.6
    assert compared([made(1, "full", 0.5, **plan), made(1, "topk", 0.5)]).target is None
    assert compared([made(1, "full", 0.5, **plan)], 0.4).target == 0.4


def test_times_of_different_clocks_are_in_different_columns_and_have_no_ratio(made: Made) -> None:
    runs = [made(1, "full", 0.5), made(1, "full", 0.5, engine="processes")]
    rows = table_of(compared(runs, 0.4))
    assert [row["virtual time to 0.4 [s]"] for row in rows] == ["10", "–"]
    assert [row["time to 0.4 [s]"] for row in rows] == ["–", "10"]
    assert [row["ratio of time"] for row in rows] == ["1", "–"]
    assert [row["ratio of bytes"] for row in rows] == ["1", "1"]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"dataset": {"name": "cifar10"}}, "different data sets, cifar10 and digits: .* each by themselves"),
        ({"evaluation": {"split": "validation"}}, "different splits, test and validation"),
        ({"metric": "rmse"}, "different metrics, accuracy and rmse: .* --metric"),
    ],
)
def test_runs_of_different_tasks_are_not_compared(made: Made, other: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        compared([made(1, "full", 0.5), made(1, "topk", 0.5, **other)])


def test_runs_without_scores_are_left_out(made: Made) -> None:
    scored, empty = made(1, "full", 0.5), made(2, "full")
    with pytest.warns(UserWarning, match="has no scores and is left out"):
        assert compared([scored, empty]).groups[0].seeds == (1,)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(DataError, match=r"see evaluation\.every"):
        compared([empty])
    with pytest.raises(DataError, match="'rmse' was not measured; use one of accuracy"):
        compared([scored], metric="rmse")


def test_runs_that_go_on_count_with_a_warning(made: Made) -> None:
    going = made(1, "full", 0.2, 0.5, ended=False)
    with going.node(0).open("ab") as file:
        file.write(b'{"kind":"evaluation","round":2,"ti')
    with pytest.warns(UserWarning, match="1 run is unfinished"):
        assert compared([going]).groups[0].final.values == (0.5,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compared([made(1, "full", 0.5)])


# Formats


def test_csv_has_all_numbers(made: Made) -> None:
    runs = [made(seed, sharing, 0.1, 0.5 + seed / 100) for sharing in ("full", "topk") for seed in (1, 2)]
    rows = list(csv.DictReader(io.StringIO(csv_text(compared(runs, 0.5)))))
    assert [row["sharing.name"] for row in rows] == ["full", "topk"]
    assert [row["runs"] for row in rows] == ["2", "2"]
    assert float(rows[0]["final_mean"]) == pytest.approx(0.515)
    expected = stats.t.interval(0.95, 1, loc=0.515, scale=stats.sem([0.51, 0.52]))
    assert (float(rows[0]["final_low"]), float(rows[0]["final_high"])) == pytest.approx(expected)
    assert (rows[0]["final_ratio"], float(rows[1]["final_ratio"])) == ("", pytest.approx(1.0))
    assert (float(rows[1]["seconds_to_target_mean"]), float(rows[1]["bytes_to_target_mean"])) == (20.0, 2000.0)


def test_labels_are_escaped(made: Made) -> None:
    found = compared([made(1, "a|b<i>_%", 0.5), made(1, "full", 0.5)])
    assert "sharing = a\\|b&lt;i>\\_%" in markdown_text(found)
    assert r"sharing = a|b\textless{}i\textgreater{}\_\%" in latex_text(found)
    assert latex_text(found).count(r"\\") == 3


# The command


@pytest.fixture
def folder(made: Made, tmp_path: Path) -> Path:
    for seed in (1, 2):
        made(seed, "full", 0.1, 0.6 + seed / 100)
        made(seed, "topk", 0.1, 0.3)
    return tmp_path / "runs"


def test_compare_shows_the_groups_of_a_folder(folder: Path, shoal: Callable[..., CommandResult]) -> None:
    found = shoal("compare", folder, "--target", "0.5")
    assert found.code == 0
    lines = found.out.splitlines()
    assert lines[0].split()[:2] == ["group", "runs"]
    assert lines[1].split()[:5] == ["sharing", "=", "full", "2", "0.615"]
    assert "0 of 2 reached" in lines[2]
    assert "paired by seed" in found.out


def test_compare_writes_files_in_the_format_of_their_ending(
    folder: Path, tmp_path: Path, shoal: Callable[..., CommandResult]
) -> None:
    for name, start in (("a.csv", "group,"), ("b.md", "| group"), ("c.tex", "% "), ("d.txt", " group")):
        found = shoal("compare", folder, "--out", tmp_path / "tables" / name)
        assert (found.code, found.out) == (0, f"2 groups: {tmp_path / 'tables' / name}\n")
        assert (tmp_path / "tables" / name).read_text().startswith(start)
    assert shoal("compare", folder, "--format", "markdown").out == (tmp_path / "tables" / "b.md").read_text()


def test_the_order_of_arguments_sets_the_first_group(made: Made, shoal: Callable[..., CommandResult]) -> None:
    one, two = made(1, "full", 0.5), made(1, "topk", 0.5)
    lines = shoal("compare", two.path, one.path, one.path).out.splitlines()
    assert [line.split()[2:4] for line in lines[1:3]] == [["topk", "1"], ["full", "1"]], "a run counts once"


def test_compare_reports_wrong_input(made: Made, tmp_path: Path, shoal: Callable[..., CommandResult]) -> None:
    (tmp_path / "empty").mkdir()
    for path in ("empty", "nowhere"):
        found = shoal("compare", path)
        assert (found.code, "there is no run in" in found.err) == (2, True)
    one = made(1, "full", 0.5)
    assert shoal("compare", one.path, "--target", "high").code == 2
    (tmp_path / "file").write_text("")
    found = shoal("compare", one.path, "--out", tmp_path / "file" / "x.csv")
    assert (found.code, "choose another file" in found.err) == (2, True)
    one.node(0).write_text("damaged\n")
    one.metrics.unlink(missing_ok=True)
    found = shoal("compare", one.path)
    assert (found.code, "line 1 is damaged" in found.err) == (2, True)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"nodes = ", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b'engine = "simulation"\nseed = 1', "it has no key 'nodes'"),
        (b'engine = "simulation"\nseed = 1\nnodes = "many"', "nodes = 'many'; expected a positive integer"),
    ],
)
def test_show_reports_a_damaged_experiment(
    made: Made, shoal: Callable[..., CommandResult], content: bytes, problem: str
) -> None:
    run = made(1, "full", 0.5, ended=False)
    run.experiment.write_bytes(content)
    found = shoal("show", run.path)
    assert (found.code, problem in found.err) == (2, True)


def test_an_experiment_with_other_types_has_no_target(made: Made) -> None:
    assert compared([made(1, "full", 0.5, evaluation=3)]).target is None
    assert compared([made(1, "full", 0.5, evaluation={"target": "high", "metric": 1})]).target is None


def test_show_reports_a_summary_of_another_program(tmp_path: Path, shoal: Callable[..., CommandResult]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text('{"total": 3}')
    found = shoal("show", tmp_path / "other")
    assert found.code == 2
    assert "was not written by a run: it has no key 'status'" in found.err
