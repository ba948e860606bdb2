"""Pictures of runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.analysis.summary import statistics
from shoal.errors import DataError
from shoal.progress import leading
from shoal.records import Average, Evaluation, RunFolder

SHARES = ("accuracy", "top5", "class ")
"""Metrics between 0 and 1, by how their names begin."""


def metric_of(folders: Sequence[RunFolder], wanted: str | None = None) -> str:
    """What to draw of these runs: what is wanted, or the leading one of what was measured.

    Raises `DataError` where there is none, or not this one.
    """
    known = {name for folder in folders for record in _evaluations(folder) for name in record.scores}
    metric = leading(known) if wanted is None else wanted
    if metric is None:
        raise DataError("nothing to plot: no scores were recorded; see evaluation.every and evaluation.nodes")
    if metric not in known:
        raise DataError(f"--metric {metric!r} was not measured; what was is {', '.join(sorted(known)) or 'nothing'}")
    return metric


def metric_plot(folders: Sequence[RunFolder], path: Path, metric: str) -> None:
    """A metric by round: the mean over the nodes, their spread, and the averaged model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for number, folder in enumerate(folders):
        scores = _by_round(folder, metric)
        if not scores:
            continue
        rounds = sorted(scores)
        found = [statistics(scores[r]) for r in rounds]
        spread = [s for s in found if s is not None]
        xs = [r + 1 for r in rounds]
        colour = f"C{number}"
        label = folder.path.parent.name if len(folders) == 1 else f"{folder.path.parent.name} {folder.path.name}"
        axes.plot(xs, [s["mean"] for s in spread], color=colour, label=f"{label}: mean over nodes")
        axes.fill_between(
            xs, [s["min"] for s in spread], [s["max"] for s in spread], color=colour, alpha=0.15, linewidth=0,
            label="from node to node" if len(folders) == 1 else None,
        )  # fmt: skip
        averages = sorted((r.round + 1, r.scores[metric]) for r in folder.read_averages()
                          if isinstance(r, Average) and metric in r.scores)  # fmt: skip
        if averages:
            axes.plot(*zip(*averages, strict=True), color=colour, linestyle="--", linewidth=1,
                      label="averaged model" if len(folders) == 1 else None)  # fmt: skip
    axes.set(xlabel="round", ylabel=f"test {metric}")
    if metric.startswith(SHARES):
        axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right" if metric.startswith(SHARES) else "upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _by_round(folder: RunFolder, metric: str) -> dict[int, list[float]]:
    scores: dict[int, list[float]] = defaultdict(list)
    for record in _evaluations(folder):
        if metric in record.scores:
            scores[record.round].append(record.scores[metric])
    return scores


def _evaluations(folder: RunFolder) -> Iterator[Evaluation]:
    for file in sorted((folder.path / "nodes").glob("*.jsonl"), key=lambda f: int(f.stem)):
        for record in folder.read(int(file.stem)):
            if isinstance(record, Evaluation):
                yield record
