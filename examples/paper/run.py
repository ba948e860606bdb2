"""A small paper: does top-k sharing improve if nodes send little at first and much at the end?

    python examples/paper/run.py [--engine simulation|processes] [--rounds N] [--seeds N] [--out DIR]

The script chooses the option `ramp` of the sharing in sharing.py on validation samples, compares the sharing with
`full`, `random` and `topk` on test samples, and writes results.csv, table.md and figure.png. README.md has the results.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from model import DropoutNet

from sharing import RampedTopK
from shoal import Experiment, Run
from shoal.results.timing import bytes_sent, curve

FRACTION = 0.1
LEARNING_RATE = 0.1
DIRICHLET_ALPHA = 0.3
OURS = "ramped topk"
BASELINES: dict[str, Any] = {
    "full": "full",
    "random": {"name": "random", "fraction": FRACTION},
    "topk": {"name": "topk", "fraction": FRACTION},
}
STYLES = {"full": ("0.35", "--"), "random": ("C0", ":"), "topk": ("C1", "-."), OURS: ("C3", "-")}
"""Colour and line of each method: the lines differ in print without colours too."""


@dataclass(frozen=True)
class Result:
    """One run of one method."""

    split: str
    method: str
    ramp: float | None
    seed: int
    run: Run

    @property
    def accuracy(self) -> float:
        """Mean over the nodes, after the last round."""
        return float(self.run.summary["accuracy"]["mean"])

    @property
    def bytes_per_node(self) -> float:
        return float(self.run.summary["bytes_sent"]["per_node_mean"])


def experiment(options: argparse.Namespace, sharing: Any, seed: int, split: str) -> Experiment:
    rounds = options.rounds
    return Experiment(
        name="paper",
        nodes=options.nodes,
        seed=seed,
        engine=options.engine,
        algorithm={"name": "dpsgd", "rounds": rounds},
        topology={"name": "regular", "degree": min(4, options.nodes - 1)},
        sharing=sharing,
        model=DropoutNet,
        dataset={
            "name": "digits",
            "images": True,
            "partition": {"name": "dirichlet", "alpha": DIRICHLET_ALPHA},
            "augmentation": [{"name": "crop", "padding": 1}],  # moves a digit by up to one pixel
            "validation": 0.2,
        },
        training={
            "lr": LEARNING_RATE,
            "momentum": 0.9,
            "batch_size": 16,
            "local_steps": 4,
            "schedule": {"name": "cosine", "length": rounds, "warmup": rounds // 10},
        },
        evaluation={"every": max(1, rounds // 10), "split": split, "average": False},
        simulation={"batching": "off"},  # the models are equal bit for bit in both engines
    )


def run_all(options: argparse.Namespace, split: str, method: str, sharing: Any, ramp: float | None) -> list[Result]:
    """Run one method with every seed."""
    results = []
    for seed in range(options.seeds):
        run = experiment(options, sharing, seed, split).run(options.out / "runs")
        if run.status != "completed":
            raise SystemExit(f"{run.folder.path}: the run is {run.status}; see its summary.json and nodes.log")
        results.append(Result(split, method, ramp, seed, run))
        setting = method if ramp is None else f"{method}, ramp {ramp:g}"
        print(f"{split:<10} {setting:<22} seed {seed}: accuracy {results[-1].accuracy:.3f}", flush=True)
    return results


def ours(options: argparse.Namespace, ramp: float) -> RampedTopK:
    return RampedTopK(rounds=options.rounds, fraction=FRACTION, ramp=ramp)


def choose_ramp(options: argparse.Namespace) -> tuple[float, list[Result]]:
    """Return the ramp with the best mean accuracy on the validation samples, and all results."""
    found = {ramp: run_all(options, "validation", OURS, ours(options, ramp), ramp) for ramp in options.ramps}
    best = max(found, key=lambda ramp: statistics.mean(result.accuracy for result in found[ramp]))
    return best, list(itertools.chain.from_iterable(found.values()))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def accuracy_cell(results: Sequence[Result]) -> str:
    """Format the mean and the standard deviation over the seeds; one seed has no deviation."""
    values = [result.accuracy for result in results]
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"


def kilobytes_cell(results: Sequence[Result]) -> str:
    return f"{statistics.mean(result.bytes_per_node for result in results) / 1000:.0f}"


def write_tables(path: Path, validation: Sequence[Result], methods: Mapping[str, Sequence[Result]]) -> None:
    """Write one table for the choice of the ramp and one for the comparison of the methods."""
    by_ramp: dict[float, list[Result]] = {}
    for result in validation:
        assert result.ramp is not None
        by_ramp.setdefault(result.ramp, []).append(result)
    choice = markdown(["ramp", "validation accuracy"], [[f"{r:g}", accuracy_cell(by_ramp[r])] for r in by_ramp])
    comparison = markdown(
        ["method", "test accuracy", "kB per node"],
        [[method, accuracy_cell(results), kilobytes_cell(results)] for method, results in methods.items()],
    )
    path.write_text(f"{choice}\n{comparison}", encoding="utf-8")


def write_rows(path: Path, results: Sequence[Result]) -> None:
    """Write one row for each run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["split", "method", "ramp", "seed", "accuracy", "bytes_per_node", "digest", "run"])
        for result in results:
            ramp = "" if result.ramp is None else result.ramp
            figures = result.accuracy, result.bytes_per_node, result.run.summary["digest"]
            writer.writerow([result.split, result.method, ramp, result.seed, *figures, result.run.folder.path.name])


def draw(path: Path, methods: Mapping[str, Sequence[Result]], nodes: int) -> None:
    """Draw test accuracy over rounds and over bytes: the mean over the seeds, and a band of one standard deviation."""
    figure = Figure(figsize=(7.2, 3.1), layout="constrained")
    by_rounds, by_bytes = figure.subplots(1, 2, sharey=True)
    for method, results in methods.items():
        curves = [curve(result.run.folder, "accuracy") for result in results]
        scores = np.array([found.means for found in curves])
        sent = np.mean([bytes_sent(r.run.folder, c) for r, c in zip(results, curves, strict=True)], axis=0)
        draw_curve(by_rounds, curves[0].rounds, scores, method)
        draw_curve(by_bytes, sent / nodes / 1000, scores, method)
    by_rounds.set(xlabel="round", ylabel="test accuracy, mean over nodes", ylim=(0, 1))
    by_rounds.set_xlim(left=0)
    by_bytes.set(xlabel="kB sent per node", xscale="log")
    by_bytes.xaxis.set_major_formatter(ScalarFormatter())
    for axes in by_rounds, by_bytes:
        axes.grid(alpha=0.3, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    by_rounds.legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path, dpi=200)


def draw_curve(axes: Axes, x: Any, scores: np.ndarray, method: str) -> None:
    colour, line = STYLES[method]
    mean, std = scores.mean(axis=0), scores.std(axis=0, ddof=1) if len(scores) > 1 else np.zeros(scores.shape[1])
    axes.plot(x, mean, color=colour, linestyle=line, linewidth=1.6, label=method)
    axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a new sharing with full, random and topk.")
    parser.add_argument("--engine", choices=["simulation", "processes"], default="simulation")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--ramps", type=float, nargs="+", default=[-0.5, 0.0, 0.5, 1.0], help="values to choose from")
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    ramp, validation = choose_ramp(options)
    print(f"ramp {ramp:g} has the best validation accuracy")
    methods = {name: run_all(options, "test", name, sharing, None) for name, sharing in BASELINES.items()}
    methods[OURS] = run_all(options, "test", OURS, ours(options, ramp), ramp)
    write_rows(options.out / "results.csv", [*validation, *itertools.chain.from_iterable(methods.values())])
    write_tables(options.out / "table.md", validation, methods)
    draw(options.out / "figure.png", methods, options.nodes)
    print((options.out / "table.md").read_text(encoding="utf-8"))
    print(f"results.csv, table.md and figure.png are in {options.out}")


if __name__ == "__main__":
    main()
