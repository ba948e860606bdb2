"""Pictures of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shoal.errors import DataError
from shoal.results.progress import main_metric
from shoal.results.records import Average, Evaluation, RunFolder
from shoal.results.timing import Curve, bytes_sent, clock, curve_or_none, experiment, records

Axis: TypeAlias = Literal["rounds", "time", "bytes"]
"""What to draw by."""

SHARES = ("accuracy", "top5", "class ")
"""Metrics between 0 and 1, by how their names begin."""
WAYS = ("versions", "simulation", "processes", "checkpoint", "mapping")
"""Tables of an experiment that say how it is computed, and nothing of what."""


def choose_metric(folders: Sequence[RunFolder], wanted: str | None = None) -> str:
    """What to draw of these runs: what is wanted, or the leading one of what was measured.

    Raises `DataError` where there is none, or not this one.
    """
    known = {name for folder in folders for record in _evaluations(folder) for name in record.scores}
    metric = main_metric(known) if wanted is None else wanted
    if metric is None:
        raise DataError("nothing to plot: no scores were recorded; see evaluation.every and evaluation.nodes")
    if metric not in known:
        raise DataError(f"--metric {metric!r} was not measured; what was is {', '.join(sorted(known)) or 'nothing'}")
    return metric


def choose_axis(folders: Sequence[RunFolder]) -> Axis:
    """What to draw these runs by when nobody says: time, if one of them was looked at by time, and else rounds."""
    ticks = any(record.tick is not None for folder in folders for record in _evaluations(folder))
    return "time" if ticks else "rounds"


def metric_plot(folders: Sequence[RunFolder], path: Path, metric: str, x: Axis = "rounds") -> None:
    """A metric by rounds, time or bytes sent: the mean over the nodes, their spread, and the averaged model.

    Runs that do not have it, such as those that failed before their first evaluation, are left out.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter

    curves = {folder: found for folder in folders if (found := curve_or_none(folder, metric)) is not None}
    alone = len(curves) == 1
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for number, ((folder, found), label) in enumerate(zip(curves.items(), labels(list(curves)), strict=True)):
        xs = _along(x, folder, found)
        colour = f"C{number}"
        axes.plot(xs, found.means, color=colour, label=f"{label}: mean over nodes" if alone else label)
        axes.fill_between(
            xs, found.mins, found.maxs, color=colour, alpha=0.15, linewidth=0,
            label="from node to node" if alone else None,
        )  # fmt: skip
        averages = _averages(folder, found)
        places = [i for i, moment in enumerate(found.moments) if moment in averages]
        if places:
            axes.plot(
                [xs[i] for i in places], [averages[found.moments[i]] for i in places],
                color=colour, linestyle="--", linewidth=1, label="averaged model" if alone else None,
            )  # fmt: skip
    if x == "bytes":
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    if x != "rounds":
        axes.set_xlim(left=0)
    axes.set(xlabel=_title(x, curves), ylabel=f"test {metric}")
    if metric.startswith(SHARES):
        axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, loc="lower right" if metric.startswith(SHARES) else "upper right",
        title=None if alone else "mean over nodes; dashed: averaged model",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def labels(folders: Sequence[RunFolder]) -> list[str]:
    """A name for each run: the keys in which their experiments differ, where that tells them apart, else its folder."""
    if len(folders) < 2:
        return [folder.path.parent.name for folder in folders]
    tables = [dict(_flat(experiment(folder))) for folder in folders]
    shared = [key for key in tables[0] if all(key in table for table in tables)]
    differing = [key for key in shared if any(table[key] != tables[0][key] for table in tables)]
    found = [", ".join(f"{key.removesuffix('.name')} = {table[key]}" for key in differing) for table in tables]
    if len(set(found)) == len(found):
        return found
    return [f"{folder.path.parent.name} {folder.path.name}" for folder in folders]


def _flat(table: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """The dotted keys of nested tables, with their values spelt."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{place}{key}.") if place or key not in WAYS else ()
        elif place or key != "name":
            yield f"{place}{key}", str(value)


def _along(x: Axis, folder: RunFolder, found: Curve) -> Sequence[float]:
    if x == "bytes":
        return bytes_sent(folder, found)
    return found.times if x == "time" else found.rounds


def _title(x: Axis, curves: Mapping[RunFolder, Curve]) -> str:
    if x == "bytes":
        return "sent by all nodes"
    if x == "time":
        clocks = sorted({clock(folder) for folder in curves})
        return f"{' or '.join(clocks)} time [s]"
    return "round, mean over nodes" if any(found.by_ticks for found in curves.values()) else "round"


def _averages(folder: RunFolder, found: Curve) -> dict[int, float]:
    """The averaged model's score, by moment."""
    scores = {}
    for record in folder.read_averages():
        if isinstance(record, Average) and found.metric in record.scores:
            moment = record.tick if found.by_ticks else record.round
            if moment is not None:
                scores[moment] = record.scores[found.metric]
    return scores


def _evaluations(folder: RunFolder) -> Iterator[Evaluation]:
    return (record for _, record in records(folder) if isinstance(record, Evaluation))
