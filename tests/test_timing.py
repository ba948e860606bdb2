"""Time to accuracy: curves by ticks and rounds, targets, comparisons, and the commands that show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import msgspec
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from conftest import CommandResult
from shoal.errors import DataError, ExperimentError
from shoal.experiment import Experiment
from shoal.results.comparison import TimesToTarget, compare_times
from shoal.results.frames import RecordColumns
from shoal.results.progress import Outcome
from shoal.results.records import Average, End, Evaluation, Event, Record, RecordFile, Round, RunFolder, decode, encode
from shoal.results.summary import summarize
from shoal.results.timing import (
    Curve,
    best,
    bytes_sent,
    bytes_to,
    clock,
    curve,
    curve_of,
    time_to,
)


def end(time: float, sent: int = 0) -> End:
    return End(time, "digest", sent, 0, 0, 0)


def tick(number: int, accuracy: float, round: int = 0) -> Evaluation:
    """One of several evaluations, 10 seconds apart."""
    return Evaluation(round, 10.0 * number, {"accuracy": accuracy, "loss": 1 - accuracy}, number)


def written(
    root: Path, nodes: Mapping[int, Sequence[Record]], table: Mapping[str, object] | None = None, name: str = "made"
) -> RunFolder:
    """Create the folder of a run with these records."""
    folder = RunFolder.create(root, name)
    for node, records in nodes.items():
        file = RecordFile(folder.node(node))
        for record in records:
            file.write(record)
        file.close()
    if table is not None:
        folder.experiment.write_text(tomli_w.dumps(table))
    return folder


def summarized(folder: RunFolder, nodes: int, **outcome: object) -> dict[str, object]:
    return summarize(folder, "simulation", nodes, 1, Outcome("completed", 1.0, 0.1, **outcome))  # type: ignore[arg-type]


def rising(*means: float) -> Curve:
    return _curve("accuracy", means)


def _curve(metric: str, means: Sequence[float]) -> Curve:
    columns = RecordColumns()
    columns.add(0, [Evaluation(n, 10.0 * n, {metric: mean}, n) for n, mean in enumerate(means, start=1)])
    found = curve_of(columns.finish(), metric)
    assert found is not None
    return found


# Curves


def test_a_point_is_the_mean_over_the_nodes_at_a_tick(tmp_path: Path) -> None:
    folder = written(
        tmp_path,
        {
            0: [tick(1, 0.25, round=3), tick(2, 0.5, round=7), end(20.0)],
            1: [tick(1, 0.75, round=0), tick(2, 1.0, round=1), end(20.0)],
        },
    )
    assert curve(folder) == Curve(
        metric="accuracy", by_ticks=True, moments=(1, 2), times=(10.0, 20.0), rounds=(2.5, 5.0),
        means=(0.5, 0.75), stds=(0.25, 0.25), mins=(0.25, 0.5), maxs=(0.75, 1.0), nodes=(2, 2),
    )  # fmt: skip
    assert curve(folder, "loss").means == (0.5, 0.25)


def test_a_round_ends_when_the_last_node_has_finished_it(tmp_path: Path) -> None:
    fast = [Evaluation(4, 1.0, {"accuracy": 0.5}), Evaluation(9, 2.0, {"accuracy": 0.7}), end(2.0)]
    slow = [Evaluation(4, 5.0, {"accuracy": 0.3}), Evaluation(9, 10.0, {"accuracy": 0.9}), end(10.0)]
    found = curve(written(tmp_path, {0: fast, 1: slow}))
    assert (found.by_ticks, found.moments, found.rounds) == (False, (4, 9), (5, 10))
    assert found.times == (5.0, 10.0)
    assert found.means == pytest.approx((0.4, 0.8))


def test_an_offline_or_ended_node_counts_with_its_last_evaluation(tmp_path: Path) -> None:
    offline = [tick(1, 0.2), tick(3, 0.6), end(30.0)]
    early = [tick(1, 0.4), end(12.0)]
    late = [tick(2, 0.9), tick(3, 0.9), end(30.0)]
    found = curve(written(tmp_path, {0: offline, 1: early, 2: late}))
    assert found.nodes == (2, 3, 3), "a node counts from its first evaluation on"
    assert found.means == pytest.approx((0.3, 0.5, (0.6 + 0.4 + 0.9) / 3))


def test_by_ticks_a_failed_node_counts_until_its_last_record(tmp_path: Path) -> None:
    failed = [tick(1, 0.1), Round(5, 15.0, None, 0, 0), Event("fault", 20.0, "crash at round 6")]
    alive = [tick(k, 0.5) for k in (1, 2, 3, 4)]
    found = curve(written(tmp_path, {0: failed, 1: [*alive, end(40.0)]}))
    assert found.nodes == (2, 2, 1, 1)
    assert found.means == pytest.approx((0.3, 0.3, 0.5, 0.5))


def test_by_rounds_a_failed_node_counts_until_its_last_round(tmp_path: Path) -> None:
    def by_round(*rounds: int) -> list[Record]:
        return [r for n in rounds for r in (Round(n, n + 1.0, None, 0, 0), Evaluation(n, n + 1.0, {"accuracy": 0.5}))]

    failed = [*by_round(0), Round(1, 50.0, None, 0, 0), Event("fault", 50.0, "crash at round 2")]
    found = curve(written(tmp_path, {0: failed, 1: [*by_round(0, 1, 2), end(3.0)]}))
    assert found.nodes == (2, 2, 1)


def test_the_times_of_rounds_do_not_decrease(tmp_path: Path) -> None:
    slow = [Evaluation(0, 100.0, {"accuracy": 0.5})]
    fast = [Evaluation(0, 1.0, {"accuracy": 0.5}), Evaluation(1, 2.0, {"accuracy": 0.6}), end(2.0)]
    assert curve(written(tmp_path, {0: slow, 1: fast})).times == (100.0, 100.0)


def test_by_ticks_evaluations_by_the_algorithm_do_not_count(tmp_path: Path) -> None:
    by_algorithm = Evaluation(7, 15.0, {"accuracy": 0.9})
    assert curve(written(tmp_path, {0: [tick(1, 0.2), by_algorithm, tick(2, 0.4), end(20.0)]})).means == (0.2, 0.4)


def test_an_interrupted_run_has_a_curve(tmp_path: Path) -> None:
    folder = written(tmp_path, {0: [tick(1, 0.2), tick(2, 0.8)], 1: [tick(1, 0.4)]})
    with folder.node(1).open("ab") as file:
        file.write(encode(tick(2, 0.6))[:-9])
    found = curve(folder)
    assert found.nodes == (2, 2), "without end records no node is known to have failed"
    assert found.means == pytest.approx((0.3, 0.6))


def test_a_curve_of_a_metric_that_was_not_measured_raises_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'rmse' was not measured; use one of accuracy, loss"):
        curve(written(tmp_path, {0: [tick(1, 0.2)]}), "rmse")
    with pytest.raises(DataError, match=r"no scores were recorded; see evaluation.every"):
        curve(written(tmp_path, {0: [Round(0, 1.0, None, 0, 0), Evaluation(0, 1.0, {})]}))


def test_the_default_metric_is_that_of_the_experiment(tmp_path: Path) -> None:
    folder = written(tmp_path, {0: [tick(1, 0.2)]}, {"evaluation": {"metric": "loss"}})
    assert curve(folder).metric == "loss"
    assert curve(folder, "accuracy").metric == "accuracy"


def test_the_clock_is_virtual_in_the_simulation(tmp_path: Path) -> None:
    assert clock(written(tmp_path, {}, {"engine": "simulation"})) == "virtual"
    assert clock(written(tmp_path, {}, {"engine": "processes"})) == "wall"


# Targets


def test_the_time_to_a_target_is_that_of_the_first_mean_that_reaches_it() -> None:
    found = rising(0.1, 0.5, 0.8, 0.7, 0.9)
    assert time_to(found, 0.5) == 20.0
    assert time_to(found, 0.6) == 30.0, "not interpolated"
    assert time_to(found, 0.05) == 10.0
    assert time_to(found, 0.95) is None


@pytest.mark.parametrize("metric", ["loss", "rmse", "perplexity"])
def test_a_loss_reaches_a_target_from_above(metric: str) -> None:
    found = _curve(metric, (2.0, 1.0, 0.5, 0.6))
    assert time_to(found, 1.0) == 20.0
    assert time_to(found, 0.7) == 30.0
    assert time_to(found, 0.1) is None
    assert best(found) == 2


def test_the_mean_with_a_diverged_node_reaches_no_target(tmp_path: Path) -> None:
    diverged = [tick(1, 0.9), tick(2, math.nan), tick(3, math.inf), end(30.0)]
    folder = written(tmp_path, {0: diverged, 1: [tick(k, 0.7) for k in (1, 2, 3)]})
    found = curve(folder)
    assert [math.isnan(mean) for mean in found.means] == [False, True, True]
    assert time_to(found, 0.8) == 10.0
    assert time_to(found, 0.81) is None
    assert time_to(curve(folder, "loss"), 0.0) is None
    assert best(found) == 0
    assert best(rising(math.nan)) is None


@given(st.lists(st.floats(0, 1) | st.just(math.nan), min_size=1, max_size=20), st.floats(0, 1))
def test_no_mean_reaches_the_target_before_the_time_to_it(means: list[float], target: float) -> None:
    for metric, reaches in (("accuracy", lambda m: m >= target), ("loss", lambda m: m <= target)):
        found = _curve(metric, means)
        seconds = time_to(found, target)
        early = [mean for time, mean in zip(found.times, means, strict=True) if seconds is None or time < seconds]
        assert not any(reaches(mean) for mean in early)
        if seconds is not None:
            assert reaches(means[found.times.index(seconds)])
            assert best(found) is not None


def test_bytes_to_a_target_are_those_of_finished_rounds(tmp_path: Path) -> None:
    one = [Round(0, 4.0, None, 100, 1), tick(1, 0.3), Round(1, 20.0, None, 200, 2), tick(2, 0.6), end(20.0)]
    two = [tick(1, 0.3), Round(0, 11.0, None, 1000, 1), Round(1, 21.0, None, 2000, 2), tick(2, 0.6), end(21.0)]
    folder = written(tmp_path, {0: one, 1: two})
    found = curve(folder)
    assert bytes_sent(folder, found) == (100, 1200)
    assert bytes_to(folder, found, 0.5) == 1200
    assert bytes_to(folder, found, 0.7) is None


def test_the_traffic_of_a_node_before_it_failed_and_rejoined_counts(tmp_path: Path) -> None:
    first = [Round(0, 1.0, None, 100, 1), Round(1, 2.0, None, 200, 2), Round(2, 3.0, None, 300, 3)]
    rejoined = [Event("rejoined", 4.0, ""), Round(1, 5.0, None, 250, 4), Round(2, 6.0, None, 260, 5)]
    evaluations = [tick(1, 0.5), Evaluation(2, 6.0, {"accuracy": 0.9}, 2)]
    folder = written(
        tmp_path, {0: [*first, evaluations[0], *rejoined, evaluations[1], End(7.0, "digest", 270, 6, 0, 0)]}
    )
    summary = summarized(folder, 1)
    assert summary["bytes_sent"] == {"total": 570, "per_node_mean": 570}
    assert summary["messages_sent"] == 9
    assert bytes_sent(folder, curve(folder)) == (560, 560)
    by_rounds = [Evaluation(r, 3.0 * r, {"accuracy": 0.5}) for r in (1, 2)]
    folder = written(tmp_path, {0: [*first, by_rounds[0], *rejoined, by_rounds[1]]}, name="rounds")
    assert bytes_sent(folder, curve(folder)) == (200, 560)


def test_by_rounds_bytes_are_those_of_the_round(tmp_path: Path) -> None:
    records = [Round(0, 9.0, None, 100, 1), Round(1, 10.0, None, 200, 2), Evaluation(1, 10.0, {"accuracy": 0.5})]
    ahead = [Round(r, r / 10, None, 10 * (r + 1), 1) for r in range(5)]
    folder = written(tmp_path, {0: records, 1: ahead})
    assert bytes_sent(folder, curve(folder)) == (220,)


# Summaries


def test_a_summary_has_the_time_to_the_target_of_the_experiment(tmp_path: Path) -> None:
    nodes = {0: [tick(1, 0.5), tick(2, 0.9), tick(3, 0.8), end(30.0)]}
    summary = summarized(written(tmp_path, nodes, {"evaluation": {"target": 0.6}}), 1)
    assert summary["time_to_target"] == {"metric": "accuracy", "target": 0.6, "seconds": 20.0}
    assert summary["best"] == {"metric": "accuracy", "mean": 0.9, "seconds": 20.0}
    by_loss = summarized(written(tmp_path, nodes, {"evaluation": {"target": 0.01, "metric": "loss"}}), 1)
    assert by_loss["time_to_target"] == {"metric": "loss", "target": 0.01, "seconds": None}
    assert by_loss["best"] == {"metric": "loss", "mean": pytest.approx(0.1), "seconds": 20.0}
    assert summarized(written(tmp_path, nodes), 1)["time_to_target"] is None


def test_the_target_of_a_run_without_scores_is_not_reached(tmp_path: Path) -> None:
    summary = summarized(written(tmp_path, {}, {"evaluation": {"target": 0.6}}), 1)
    assert summary["time_to_target"] == {"metric": None, "target": 0.6, "seconds": None}
    assert summary["best"] is None


def test_by_ticks_the_final_scores_are_those_of_each_nodes_last_tick(tmp_path: Path) -> None:
    nodes = {
        0: [tick(1, 0.2, round=1), tick(2, 0.4, round=9), end(20.0)],
        1: [tick(1, 0.6, round=1), end(20.0)],  # offline at the end
        2: [tick(1, 0.9, round=5), tick(2, 0.9, round=5)],
    }
    folder = written(tmp_path, nodes)
    file = RecordFile(folder.averages)
    file.write(Average(9, 20.0, 2, 0.1, {"accuracy": 0.8}, 2))
    file.write(Average(30, 10.0, 2, 0.2, {"accuracy": 0.7}, 1))  # slower to evaluate
    file.close()
    summary = summarized(folder, 3, lost={2: "crashed"})
    assert summary["accuracy"] == pytest.approx({"mean": 0.5, "std": 0.1, "min": 0.4, "max": 0.6})
    assert summary["consensus_distance"] == 0.1


def test_by_rounds_the_final_scores_are_those_of_the_last_round(tmp_path: Path) -> None:
    nodes = {n: [Evaluation(r, r + 1.0, {"accuracy": a}), end(9.0)] for n, r, a in ((0, 9, 0.8), (1, 4, 0.2))}
    summary = summarized(written(tmp_path, nodes), 2)
    assert summary["accuracy"] == {"mean": 0.8, "std": 0.0, "min": 0.8, "max": 0.8}


def test_padding_is_the_sum_over_the_nodes_and_none_without_any(tmp_path: Path) -> None:
    padded = [[End(1.0, "", 0, 0, 0, 0, padded_s=s)] for s in (0.5, 0.25)]
    times = summarized(written(tmp_path, dict(enumerate(padded))), 2)["time"]
    assert times["padded_s"] == 0.75  # type: ignore[index]
    assert summarized(written(tmp_path, {0: [end(1.0)]}), 1)["time"]["padded_s"] is None  # type: ignore[index]


@given(st.none() | st.integers(1, 10**6), st.sampled_from([0.5, math.nan, math.inf]))
def test_a_tick_is_read_as_it_was_written_even_for_a_diverged_model(number: int | None, score: float) -> None:
    for record in (Evaluation(3, 1.0, {"loss": score}, number), Average(3, 1.0, 2, score, {"loss": score}, number)):
        line = encode(record)
        read = decode(line)
        assert isinstance(read, type(record))
        assert (read.round, read.tick) == (3, number)  # type: ignore[union-attr]
        assert (b"tick" in line) == (number is not None), "by rounds there is no tick in the line"


# Comparison


def made(root: Path, *means: float, engine: str = "simulation", metric: str = "accuracy") -> RunFolder:
    records = [Evaluation(k, 10.0 * k, {metric: mean}, k) for k, mean in enumerate(means, start=1)]
    return written(root, {0: [*records, end(10.0 * len(means))]}, {"engine": engine})


def test_a_comparison_has_means_over_seeds_and_ratios_to_the_first(tmp_path: Path) -> None:
    runs = {
        "gossip": [made(tmp_path, 0.2, 0.8), made(tmp_path, 0.2, 0.3, 0.4, 0.8)],
        "slow": [made(tmp_path, 0.1, 0.2, 0.3, 0.4, 0.5, 0.8)],
        "unsteady": [made(tmp_path, 0.8), made(tmp_path, 0.7)],
    }
    assert compare_times(runs, 0.8) == (
        TimesToTarget("gossip", (20.0, 40.0), 30.0, 10.0, 20.0, 40.0, 1.0),
        TimesToTarget("slow", (60.0,), 60.0, 0.0, 60.0, 60.0, 2.0),
        TimesToTarget("unsteady", (10.0, None), None, None, None, None, None),
    )
    assert [row.reached for row in compare_times(runs, 0.8)] == [2, 1, 1]
    backwards = compare_times(dict(reversed(runs.items())), 0.8)
    assert [row.ratio for row in backwards] == [None, None, None], "no ratio to a missing time"


def test_runs_with_different_metrics_or_clocks_are_not_compared(tmp_path: Path) -> None:
    one = made(tmp_path, 0.8)
    with pytest.raises(DataError, match="different clocks, virtual and wall"):
        compare_times({"a": [one], "b": [made(tmp_path, 0.8, engine="processes")]}, 0.5)
    with pytest.raises(DataError, match="different metrics, accuracy and rmse"):
        compare_times({"a": [one], "b": [made(tmp_path, 0.8, metric="rmse")]}, 0.5)


# The experiment


@pytest.mark.parametrize(
    ("evaluation", "problem"),
    [
        ({"seconds": 0}, "evaluation.seconds = 0: expected number above 0"),
        ({"target": "high"}, "evaluation.target = 'high': expected number"),
        ({"metric": "acuracy"}, "evaluation.metric = 'acuracy': unknown; did you mean 'accuracy'?"),
        ({"metric": "per-class"}, "evaluation.metric = 'per-class': unknown; did you mean 'class 0'?"),
        ({"metric": "top5"}, "evaluation.metric = 'top5': it would not be measured; add 'top5' to evaluation.metrics"),
        ({"metrics": ["acuracy", "loss"]}, "evaluation.metrics: 'acuracy' is unknown; did you mean 'accuracy'?"),
        ({"metrics": ["class 3"]}, "evaluation.metrics: 'class 3' is unknown; did you mean 'per-class'?"),
        ({"metric": "class 3", "metrics": ["accuracy"]}, "it would not be measured; add 'per-class'"),
    ],
)
def test_a_wrong_evaluation_is_rejected(evaluation: dict[str, object], problem: str) -> None:
    with pytest.raises(ExperimentError) as rejected:
        Experiment(evaluation=evaluation)  # type: ignore[arg-type]
    assert problem in str(rejected.value)


def test_the_duration_and_the_target_are_in_the_table() -> None:
    table = {"duration": 60, "evaluation": {"seconds": 5, "target": 0.8, "metric": "class 3", "metrics": ["per-class"]}}
    experiment = Experiment.from_table(table)
    assert experiment.duration == 60.0
    assert (experiment.evaluation.seconds, experiment.evaluation.target) == (5.0, 0.8)
    assert Experiment.from_table(experiment.to_table()) == experiment
    assert "duration" not in Experiment().to_table()
    with pytest.raises(ExperimentError, match="duration = 0: expected number above 0"):
        Experiment(duration=0)


# The command line


@pytest.fixture
def two(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    """Two runs with summaries: one reaches 0.8 after 20 seconds, the other does not."""

    def records(node: int, top: float) -> list[Record]:
        found: list[Record] = []
        for k in (1, 2, 3):
            found += [Round(k, 10.0 * k, None, 10**6 * k, k), tick(k, top - 0.3 / k + node / 50, round=k)]
        return [*found, end(30.0)]

    runs = []
    for name, top in (("dpsgd", 0.95), ("gossip", 0.75)):
        table = {"engine": "simulation", "algorithm": {"name": name}, "evaluation": {"target": 0.8}}
        runs.append(written(tmp_path / "runs", {n: records(n, top) for n in range(3)}, table))
        summarized(runs[-1], 3, virtual_s=30.0)
    return runs[0], runs[1]


def test_show_prints_the_time_to_the_target(
    shoal: Callable[..., CommandResult], two: tuple[RunFolder, RunFolder]
) -> None:
    def shown(*arguments: object) -> dict[str, str]:
        result = shoal("show", *arguments)
        assert result.code == 0, result
        cells = (row.strip().partition("  ") for row in result.out.splitlines())
        return {key: value.strip() for key, _, value in cells}

    reached, missed = two[0].path, two[1].path
    assert shown(reached)["time to accuracy 0.8"] == "virtual 20 s"
    assert shown(reached)["best"] == "accuracy 0.8700 at virtual 30 s"
    assert shown(missed)["time to accuracy 0.8"] == "not reached"
    assert shown(missed, "--target", 0.6)["time to accuracy 0.6"] == "virtual 20 s"
    by_loss = shown(reached, "--target", 0.5, "--metric", "loss")
    assert by_loss["time to loss 0.5"] == "virtual 10 s"
    assert by_loss["best"] == "loss 0.1300 at virtual 30 s"
    assert not any(key.startswith("time to") for key in shown(reached, "--metric", "loss"))


def test_show_rejects_a_metric_that_was_not_measured(
    shoal: Callable[..., CommandResult], two: tuple[RunFolder, RunFolder]
) -> None:
    result = shoal("show", two[0].path, "--target", 0.5, "--metric", "rmse")
    assert result.code == 2
    assert "'rmse' was not measured; use one of accuracy, loss" in result.err
    for wrong in ("nan", "much"):
        assert f"{wrong!r}: expected a finite number" in shoal("show", "--target", wrong).err


def test_show_reads_old_summaries_without_targets(
    shoal: Callable[..., CommandResult], two: tuple[RunFolder, RunFolder]
) -> None:
    summary = two[0].read_summary()
    for key in ("best", "time_to_target"):
        del summary[key]
    two[0].summary.write_bytes(msgspec.json.encode(summary))
    result = shoal("show", two[0].path)
    assert result.code == 0, result
    assert "time to" not in result.out


@pytest.mark.parametrize(
    ("x", "axis"),
    [
        ([], "virtual time [s]"),
        (["--x", "time"], "virtual time [s]"),
        (["--x", "rounds"], "round, mean over nodes"),
        (["--x", "bytes"], "sent by all nodes [MB]"),
    ],
)
def test_plot_draws_several_runs_over_the_given_axis(
    x: list[str],
    axis: str,
    shoal: Callable[..., CommandResult],
    two: tuple[RunFolder, RunFolder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters, not their outlines
    assert shoal("plot", *(folder.path for folder in two), *x, "--out", "plot.svg").code == 0
    drawn = Path("plot.svg").read_text()
    for text in (axis, "test accuracy", "algorithm", "dpsgd", "gossip"):
        assert f">{text}<" in drawn


def test_plot_names_both_clocks(
    shoal: Callable[..., CommandResult], two: tuple[RunFolder, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    two[1].experiment.write_text('engine = "processes"')
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    assert shoal("plot", *(folder.path for folder in two), "--out", "plot.svg").code == 0
    assert ">virtual or wall time [s]<" in Path("plot.svg").read_text()
