"""Figures of runs: lines with intervals over seeds, their labels, sizes and styles, and wrong input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import shoal as package
from conftest import CommandResult
from plotted_runs import write_run
from shoal.errors import DataError
from shoal.results.figures import FigureOptions, draw_figure
from shoal.results.plot_style import line_style
from shoal.results.plots import chart_figure, read_chart
from shoal.results.records import Evaluation, RecordFile, RunFolder

NAMES = ("full", "topk", "random", "choco", "qsgd", "jwins", "int8", "float16", "powergossip")


def legend_labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def drawn_box(axes: Axes) -> Bbox:
    """Return the box of a panel with its axes and their texts."""
    boxes = [axes.get_window_extent(), axes.xaxis.get_tightbbox(), axes.yaxis.get_tightbbox()]
    return Bbox.union([box for box in boxes if box is not None])


def seeds(root: Path, sharing: str, *scores: list[float]) -> list[RunFolder]:
    return [write_run(root, means, sharing, seed) for seed, means in enumerate(scores)]


# Lines and bands


def test_runs_that_differ_only_in_the_seed_are_one_line_with_a_t_interval(tmp_path: Path) -> None:
    full = [[0.2, 0.5], [0.3, 0.6], [0.25, 0.8]]
    runs = [*seeds(tmp_path, "full", *full), *seeds(tmp_path, "topk", [0.2, 0.3], [0.2, 0.4], [0.1, 0.4])]
    chart = read_chart(runs)
    assert (chart.y, chart.axes, chart.title) == ("accuracy", ("rounds",), "sharing")
    assert [line.label for line in chart.lines] == ["full", "topk"]
    line = chart.lines[0].panels[0]
    assert line.x.tolist() == [1, 2]
    assert line.mean == pytest.approx(np.mean(full, axis=0))
    assert line.low is not None
    assert line.high is not None
    for at in range(2):
        values = [scores[at] for scores in full]
        expected = scipy.stats.t.interval(0.95, 2, np.mean(values), scipy.stats.sem(values))
        assert (line.low[at], line.high[at]) == pytest.approx(expected)
    figure = chart_figure(chart)
    assert legend_labels(figure) == ["full", "topk"]
    assert figure.axes[0].get_title(loc="left") == "bands: 95 % interval of the mean over 3 seeds"


def test_seeds_with_different_times_are_interpolated_where_all_have_a_value(tmp_path: Path) -> None:
    slow = write_run(tmp_path, [0.2, 0.4, 0.6], seed=1, seconds=10.0)
    fast = write_run(tmp_path, [0.3, 0.5, 0.7], seed=2, seconds=8.0)
    with pytest.warns(UserWarning, match="at 24 of 30"):
        line = read_chart([slow, fast], axes=["time"]).lines[0].panels[0]
    assert line.x.tolist() == [10, 16, 20, 24], "from the later first point to the earlier last point"
    at_10, at_16, at_20, at_24 = 0.3 + 0.2 * 2 / 8, 0.5, 0.5 + 0.2 * 4 / 8, 0.7
    assert line.mean == pytest.approx([(0.2 + at_10) / 2, (0.32 + at_16) / 2, (0.4 + at_20) / 2, (0.48 + at_24) / 2])


def test_a_run_that_still_goes_on_ends_the_line_of_its_group(tmp_path: Path) -> None:
    whole = write_run(tmp_path, [0.2, 0.4, 0.6, 0.8], seed=1)
    cut = write_run(tmp_path, [0.3, 0.5], seed=2, ended=False)
    with cut.node(1).open("ab") as file:
        file.write(b'{"kind":"evaluation","round":2,"ti')
    with pytest.warns(UserWarning, match="ends where the shortest of its 2 runs ends, at 2 of 4"):
        line = read_chart([whole, cut]).lines[0].panels[0]
    assert line.mean == pytest.approx([0.25, 0.45])
    assert read_chart([cut]).lines[0].panels[0].mean == pytest.approx([0.3, 0.5])


def test_repeated_runs_of_a_seed_count_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, [mean], seed=seed) for mean, seed in ((0.2, 1), (0.4, 1), (0.6, 2))]
    with pytest.warns(UserWarning, match="3 runs with 2 seeds; the last run of each seed counts"):
        chart = read_chart(runs)
    assert chart.lines[0].panels[0].mean == pytest.approx([0.5])


def test_one_run_shows_the_nodes_and_the_averaged_model(tmp_path: Path) -> None:
    chart = read_chart([write_run(tmp_path, [0.2, 0.5], averages=True)])
    line = chart.lines[0].panels[0]
    assert line.low is not None
    assert line.high is not None
    assert (line.low.tolist(), line.high.tolist()) == (pytest.approx([0.1, 0.4]), pytest.approx([0.3, 0.6]))
    figure = chart_figure(chart)
    assert legend_labels(figure) == ["made: mean over nodes", "from node to node", "averaged model"]
    assert figure.axes[0].lines[1].get_ydata() == pytest.approx([0.4, 0.7])


def test_the_spread_over_nodes_and_no_spread(tmp_path: Path) -> None:
    runs = seeds(tmp_path, "full", [0.2], [0.4])
    nodes, none = (read_chart(runs, spread=spread).lines[0].panels[0] for spread in ("nodes", "none"))
    assert nodes.low == pytest.approx([0.2]), "the mean of 0.1 and 0.3, the worst nodes of the runs"
    assert nodes.high == pytest.approx([0.4])
    assert none.low is None
    averaged = write_run(tmp_path, [0.2], averages=True)
    with pytest.raises(DataError, match="spread = 'nodes': 'consensus' has no value for each node"):
        read_chart([averaged], "consensus", spread="nodes")


@pytest.mark.parametrize(
    ("y", "values", "title"),
    [
        ("consensus", [4.0, 2.0], "consensus distance"),
        ("drift", [0.1, 0.1], "drift: std of accuracy"),
        ("training-loss", [1.0, 0.5], "training loss"),
        ("averaged-accuracy", [0.4, 0.7], "test accuracy, averaged model"),
    ],
)
def test_quantities_that_are_not_metrics(y: str, values: list[float], title: str, tmp_path: Path) -> None:
    chart = read_chart([write_run(tmp_path, [0.2, 0.5], averages=True)], y, ["rounds", "time", "bytes"])
    rounds, time, sent = chart.lines[0].panels
    assert rounds.mean == pytest.approx(values)
    assert (rounds.x.tolist(), time.x.tolist(), sent.x.tolist()) == ([1, 2], [10, 20], [2000, 4000])
    assert chart_figure(chart).axes[0].get_ylabel() == title


def test_a_diverged_run_leaves_a_gap(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, [0.2, math.nan, math.nan], seed=1), write_run(tmp_path, [0.2, 0.4, 0.6], seed=2)]
    with pytest.warns(UserWarning, match="has gaps, because a value is not finite"):
        chart = read_chart(runs)
    assert np.isnan(chart.lines[0].panels[0].mean).tolist() == [False, True, True]
    chart_figure(chart).draw_without_rendering()


def test_the_axis_is_time_if_one_run_was_evaluated_by_time(tmp_path: Path) -> None:
    by_rounds, by_ticks = write_run(tmp_path, [0.5], "full"), RunFolder.create(tmp_path, "ticks")
    file = RecordFile(by_ticks.node(0))
    file.write(Evaluation(0, 1.0, {"accuracy": 0.5}, tick=1))
    file.close()
    assert read_chart([by_rounds]).axes == ("rounds",)
    assert read_chart([by_rounds, by_ticks]).axes == ("time",)


# Labels, sizes and styles


def test_labels_name_what_differs_or_are_given(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, [0.5], name, 1, table={"nodes": n}) for name, n in (("full", 2), ("topk", 4))]
    assert [line.label for line in read_chart(runs).lines] == ["nodes = 2, sharing = full", "nodes = 4, sharing = topk"]
    assert legend_labels(chart_figure(read_chart(runs, labels=["ours", "theirs"]))) == ["ours", "theirs"]
    with pytest.raises(DataError, match=r"1 label for 2 lines; .*\n  1. nodes = 2, sharing = full\n  2. nodes = 4"):
        read_chart(runs, labels=["ours"])


def test_labels_are_drawn_as_they_are(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, [0.5], name) for name in ("full", "topk", "random", "choco")]
    figure = chart_figure(read_chart(runs, labels=[r"$\frac{", "_hidden", "\x1b[31mred", "<b> " * 200]))
    figure.draw_without_rendering()
    first, hidden, control, long = legend_labels(figure)
    assert (first, hidden, control) == (r"\$\frac{", " _hidden", "\N{REPLACEMENT CHARACTER}[31mred")
    assert long.count("\n") == 2
    assert long.endswith("…")


@pytest.mark.parametrize(
    ("count", "columns", "panels"),
    [(1, 1, 1), (2, 2, 1), (6, 1, 1), (6, 2, 3), (9, 1, 3), (9, 2, 3), (9, 1, 1)],
)
def test_the_legend_covers_no_data_and_nothing_is_cut_off(
    count: int, columns: int, panels: int, tmp_path: Path
) -> None:
    runs = [write_run(tmp_path, [0.2, 0.5], name, seed) for name in NAMES[:count] for seed in (1, 2)]
    options = FigureOptions(None, ("rounds", "time", "bytes")[:panels], columns=columns)  # type: ignore[arg-type]
    figure = draw_figure(runs, options).figure
    figure.draw_without_rendering()
    page, legend = figure.bbox, figure.legends[0].get_window_extent()
    note = next(text for text in figure.axes[0].findobj(Text) if text.get_text().startswith("bands: "))
    boxes = [drawn_box(axes) for axes in figure.axes]
    assert len(boxes) == panels
    assert not any(Bbox.intersection(legend, box) for box in (*boxes, note.get_window_extent()))
    assert not any(Bbox.intersection(one, other) for one, other in itertools.combinations(boxes, 2))
    for box in (legend, note.get_window_extent(), *boxes):
        assert page.contains(box.x0, box.y0)
        assert page.contains(box.x1, box.y1)
    assert figure.get_figwidth() == {1: 3.5, 2: 7.16}[columns]


def test_lines_differ_without_colours() -> None:
    styles = [line_style(number) for number in range(40)]
    assert len({(str(style.dash), style.marker) for style in styles}) == 40
    assert len({style.colour for style in styles[:8]}) == 8


def test_a_figure_names_the_split_and_shows_one_only(tmp_path: Path) -> None:
    test, validated = (write_run(tmp_path, [0.5], table={"evaluation": {"split": s}}) for s in ("test", "validation"))
    assert chart_figure(read_chart([test])).axes[0].get_ylabel() == "test accuracy"
    assert chart_figure(read_chart([validated])).axes[0].get_ylabel() == "validation accuracy"
    with pytest.raises(DataError, match="different splits, test and validation: plot those of each split"):
        read_chart([test, validated])


def test_units_of_axes_follow_their_values(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, [0.2, 0.5], seconds=3600.0)]
    time, sent = chart_figure(read_chart(runs, axes=["time", "bytes"])).axes
    assert (time.get_xlabel(), sent.get_xlabel()) == ("virtual time [h]", "sent by all nodes [kB]")
    assert time.lines[0].get_xdata().tolist() == [1, 2]  # type: ignore[union-attr]
    assert sent.lines[0].get_xdata().tolist() == [2, 4]  # type: ignore[union-attr]


def test_axes_can_be_logarithmic(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, [0.2, 0.5], averages=True)]
    figure = draw_figure(runs, FigureOptions("consensus", ("rounds", "bytes"), log=("bytes", "y"))).figure
    assert [axes.get_xscale() for axes in figure.axes] == ["linear", "log"]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log"]
    with pytest.raises(DataError, match="log = 'x'; expected one of 'rounds', 'time', 'bytes', 'y'"):
        package.plot(runs[0].path, log=["x"])  # type: ignore[list-item]
    zero = write_run(tmp_path, [0.0])
    with pytest.raises(DataError, match="has no values above 0"):
        package.plot(zero.path, "accuracy", log=["y"], spread="none")


# Heat maps


def test_a_heat_map_has_a_row_for_each_node_and_white_cells_without_a_score(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [0.2, 0.5, 0.6])
    file = RecordFile(folder.node(2))
    file.write(Evaluation(1, 20.0, {"accuracy": 0.9}))
    file.close()
    figure = draw_figure([folder], FigureOptions(kind="heatmap")).figure
    axes, bar = figure.axes
    cells = axes.images[0].get_array()
    assert cells is not None
    assert np.ma.filled(cells, -1).tolist() == [
        pytest.approx([0.1, 0.4, 0.5]), pytest.approx([0.3, 0.6, 0.7]), pytest.approx([-1, 0.9, -1]),
    ]  # fmt: skip
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("round", "node", "test accuracy")
    losses = draw_figure([folder], FigureOptions("training-loss", kind="heatmap")).figure.axes[0].images[0].get_array()
    assert losses is not None
    assert losses.shape == (2, 3)


# The command and the Python functions


def test_plot_takes_all_runs_of_a_folder(shoal: Callable[..., CommandResult], tmp_path: Path) -> None:
    for name in ("full", "topk"):
        seeds(tmp_path / "runs", name, [0.2, 0.5], [0.3, 0.4])
    result = shoal("plot", "runs", "--panels", "rounds,time,bytes", "--columns", 1, "--out", "figure.pdf")
    assert (result.code, result.out) == (0, "accuracy by rounds, time, bytes: figure.pdf\n")
    content = Path("figure.pdf").read_bytes()
    assert b"/FontFile2" in content, "fonts are embedded as TrueType"
    assert b"/Type3" not in content
    assert shoal("plot", "runs", "--metric", "training-loss").out == "training-loss by rounds: training-loss.png\n"
    assert shoal("plot", "runs", "--kind", "heatmap").out == "heatmap: heatmap.png\n"


def test_all_kinds_of_figures_of_a_run(shoal: Callable[..., CommandResult], small: Path) -> None:
    assert shoal("run", small, "--plot").code == 0
    for options in ([], ["--y", "consensus"], ["--kind", "heatmap"], ["--kind", "timeline", "--start", 0]):
        result = shoal("plot", "small", *options, "--out", "figure.svg")
        assert result.code == 0, result
        assert "<svg" in Path("figure.svg").read_text()
    for colour in ("accuracy", "class"):
        assert shoal("plot", "small", "--kind", "topology", "--round", 1, "--y", colour).code == 0
        assert Path("topology.png").read_bytes().startswith(b"\x89PNG")
    assert "round = 9" in rejected(shoal("plot", "small", "--kind", "topology", "--round", 9))
    assert "round = 1: a figure of kind 'lines' does not have it" in rejected(shoal("plot", "small", "--round", 1))


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_runs_give_the_same_file(ending: str, shoal: Callable[..., CommandResult], tmp_path: Path) -> None:
    seeds(tmp_path / "runs", "full", [0.2, 0.5], [0.3, 0.4])
    names = [f"one.{ending}", f"two.{ending}"]
    for name in names:
        assert shoal("plot", "runs", "--out", name).code == 0
    one, two = (Path(name).read_bytes() for name in names)
    assert one == two


def test_figures_in_python_are_those_of_the_command(tmp_path: Path) -> None:
    runs = [*seeds(tmp_path, "full", [0.2, 0.5], [0.3, 0.6]), write_run(tmp_path, [0.2, 0.4], "topk")]
    figure = package.plot(tmp_path, panels=["rounds", "bytes"], labels=["a", "b"])
    assert [axes.get_xlabel() for axes in figure.axes] == ["round", "sent by all nodes [kB]"]
    assert legend_labels(figure) == ["a", "b"]
    run = package.open_run(runs[2].path)
    assert run.plot("training-loss", columns=1).get_figwidth() == 3.5
    assert package.plot([run, runs[0].path], metric := "accuracy").axes[0].get_ylabel() == f"test {metric}"
    assert run.plot(metric="accuracy").axes[0].get_ylabel() == "test accuracy"
    with pytest.raises(DataError, match="x = 'time' and panels = "):
        run.plot(x="time", panels=["rounds"])
    with pytest.raises(DataError, match="there is no run in"):
        package.plot(tmp_path / "none")


# Wrong input


def rejected(result: CommandResult) -> str:
    assert result.code == 2, result
    assert "Traceback" not in result.err
    return result.err


def test_wrong_options_are_rejected(shoal: Callable[..., CommandResult], tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / "runs", [0.5], name).path for name in ("full", "topk"))
    assert (
        "'acuracy' was not measured; the records have accuracy, drift, training-loss; did you mean 'accuracy'?"
        in rejected(shoal("plot", "runs", "--y", "acuracy"))
    )
    assert "'consensus' was not measured; set evaluation.average = true" in rejected(
        shoal("plot", "runs", "--y", "consensus")
    )
    assert "'byte': expected some of rounds, time, bytes" in rejected(shoal("plot", "runs", "--panels", "rounds,byte"))
    assert "not allowed with argument" in rejected(shoal("plot", "runs", "--panels", "rounds", "--x", "time"))
    assert "a name is there twice" in rejected(shoal("plot", "runs", "--panels", "time,time"))
    assert "shows one run, and 2 were given" in rejected(shoal("plot", one, two, "--kind", "heatmap"))
    assert "spread = 'nodes': a figure of kind 'heatmap' does not have it" in rejected(
        shoal("plot", one, "--kind", "heatmap", "--spread", "nodes")
    )
    assert "did you mean 'accuracy'" in rejected(shoal("plot", one, "--kind", "heatmap", "--y", "acuracy"))
    with pytest.raises(DataError, match="columns = 3; expected 1 or 2"):
        package.plot(one, columns=3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="kind = 'pie'; expected one of 'lines', 'heatmap', 'timeline', 'topology'"):
        package.open_run(one).plot(kind="pie")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="spread = 'std'; expected one of 'seeds', 'nodes', 'none'"):
        package.plot(one, spread="std")  # type: ignore[arg-type]


def test_runs_without_evaluations_or_with_other_metrics(shoal: Callable[..., CommandResult], tmp_path: Path) -> None:
    empty = write_run(tmp_path / "runs", [])
    assert "nothing to plot: no scores were recorded; see evaluation.every" in rejected(shoal("plot", empty.path))
    assert "no scores were recorded" in rejected(shoal("plot", empty.path, "--kind", "heatmap"))
    write_run(tmp_path / "runs", [0.5])
    write_run(tmp_path / "runs", [0.9], "topk", metric="rmse")
    result = shoal("plot", "runs")
    assert result.code == 0
    assert "2 of 3 runs have no accuracy: left out" in result.out
    assert "drift" in rejected(shoal("plot", "runs", "--y", "drif"))
    assert "runs have different metrics, accuracy and rmse" in rejected(shoal("plot", "runs", "--y", "drift"))
