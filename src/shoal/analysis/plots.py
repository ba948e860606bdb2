"""Pictures of runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from shoal.analysis.summary import statistics
from shoal.errors import DataError
from shoal.records import Average, Evaluation, RunFolder


def accuracy_plot(folders: Sequence[RunFolder], path: Path) -> None:
    """Accuracy by round: the mean over the nodes, their spread, and the averaged model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    drawn = False
    for number, folder in enumerate(folders):
        scores = _by_round(folder)
        if not scores:
            continue
        drawn = True
        rounds = sorted(scores)
        found = [statistics(scores[r]) for r in rounds]
        spread = [s for s in found if s is not None]
        xs = [r + 1 for r in rounds]
        colour = f"C{number}"
        label = folder.path.parent.name if len(folders) == 1 else f"{folder.path.parent.name} {folder.path.name}"
        axes.plot(xs, [s["mean"] for s in spread], color=colour, label=f"{label}: mean over nodes")
        axes.fill_between(
            xs, [s["min"] for s in spread], [s["max"] for s in spread], color=colour, alpha=0.15, linewidth=0,
            label="least to most accurate node" if len(folders) == 1 else None,
        )  # fmt: skip
        averages = sorted((r.round + 1, r.scores["accuracy"]) for r in folder.read_averages()
                          if isinstance(r, Average) and "accuracy" in r.scores)  # fmt: skip
        if averages:
            axes.plot(*zip(*averages, strict=True), color=colour, linestyle="--", linewidth=1,
                      label="averaged model" if len(folders) == 1 else None)  # fmt: skip
    if not drawn:
        raise DataError("nothing to plot: no accuracy was recorded; see evaluation.every and evaluation.nodes")
    axes.set(xlabel="round", ylabel="test accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _by_round(folder: RunFolder) -> dict[int, list[float]]:
    scores: dict[int, list[float]] = defaultdict(list)
    for file in sorted((folder.path / "nodes").glob("*.jsonl"), key=lambda f: int(f.stem)):
        for record in folder.read(int(file.stem)):
            if isinstance(record, Evaluation) and "accuracy" in record.scores:
                scores[record.round].append(record.scores["accuracy"])
    return scores
