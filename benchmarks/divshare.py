"""DivShare, AD-PSGD and SWIFT: virtual time to accuracy, with and without communication stragglers.

python benchmarks/divshare.py                     # digits, three seeds: about 30 minutes on two cores
python benchmarks/divshare.py --short             # one seed
python benchmarks/divshare.py --stragglers        # only with the slow nodes
python benchmarks/divshare.py --iteration 1.5     # 1.5 s of training per iteration
python benchmarks/divshare.py --cifar10           # CIFAR-10 (in SHOAL_DATA): days
python benchmarks/divshare.py --cifar10 --short   # the same with 16 local steps, one seed, with stragglers only
python benchmarks/divshare.py --overhead          # the simulation's time outside training: three minutes

The network is DivShare's: 60 nodes at one switch, 60 Mbit/s, 7 of them with 10 to 13 (Biswas et al., WWW 2025). AD-PSGD
and SWIFT are those of their papers, and the variants in the artifact of the DivShare paper (`adpsgd-artifact`,
`swift-artifact`), which the published times compare with. The paper does not state the training time of an iteration.
By default it is 0.32 s, about the time that a fast node needs to send the fragments of one iteration, six models:
faster training would exceed its sending rate. Runs have the same number of iterations for any training time.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from measuring import Figure, show, step
from shoal import Experiment
from shoal.results.comparison import TimesToTarget, compare_times
from shoal.results.records import RunFolder
from shoal.results.timing import best, curve
from shoal.topologies import TopologyWarning

PAPER = 3.9
"""The best speed-up of DivShare over AD-PSGD in the paper, with stragglers on CIFAR-10."""
TRAINING_SECONDS = 0.32
GRAPH = {"name": "regular", "degree": 6}
ALGORITHMS = ("divshare", "adpsgd", "swift", "adpsgd-artifact", "swift-artifact")


@dataclass(frozen=True)
class Task:
    """The data, the model and the target accuracy."""

    name: str
    settings: Mapping[str, Any]
    local_steps: int
    lr: float
    duration: float
    target: float
    training_seconds: float = TRAINING_SECONDS
    """Virtual seconds of training per iteration."""

    def with_training_seconds(self, seconds: float) -> Task:
        """Return the task with another training time, and as many iterations."""
        factor = seconds / self.training_seconds
        return replace(self, training_seconds=seconds, duration=self.duration * factor)


DIGITS = Task(
    "digits, an MLP as large as GN-LeNet",
    {"dataset": {"name": "digits"}, "model": {"name": "mlp", "hidden": [1200]}},
    local_steps=8, lr=0.05, duration=60.0, target=0.85,
)  # fmt: skip
CIFAR10 = Task(
    "CIFAR-10, GN-LeNet",
    {"dataset": {"name": "cifar10"}, "model": {"name": "gn-lenet"}},
    local_steps=128, lr=0.05, duration=60.0, target=0.5,
)  # fmt: skip
CIFAR10_SHORT = replace(CIFAR10, local_steps=16, duration=30.0, target=0.3)


def described(task: Task, algorithm: str, stragglers: bool, seed: int) -> Experiment:
    return Experiment(
        name=f"{algorithm}-{'stragglers' if stragglers else 'alike'}",
        nodes=60,
        seed=seed,
        duration=task.duration if stragglers else task.duration * 2 / 3,
        algorithm={"name": algorithm, "rounds": 1_000_000},
        topology=GRAPH,
        network={"name": "divshare-stragglers", "stragglers": stragglers},
        partition={"name": "shards", "per_node": 5},
        training={"lr": task.lr, "batch_size": 8, "local_steps": task.local_steps},
        speed={"step_seconds": task.training_seconds / task.local_steps},
        evaluation={"seconds": task.duration / 60, "samples": 1000, "target": task.target},
        checkpoint={"final": False},
        **task.settings,
    )


def run(place: str, task: Task, stragglers: bool, algorithm: str, seed: int) -> RunFolder:
    warnings.simplefilter("ignore", TopologyWarning)  # AD-PSGD removes links, as expected
    return described(task, algorithm, stragglers, seed).run(place).folder


def main(task: Task, seeds: int, both: bool) -> None:
    tables = []
    # Runs are independent and use one core each, so they run in parallel.
    cores = ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
    with tempfile.TemporaryDirectory() as place, cores:
        every = [(stragglers, name, seed) for stragglers in ((False, True) if both else (True,))
                 for name in ALGORITHMS for seed in range(1, seeds + 1)]  # fmt: skip
        started = {which: cores.submit(run, place, task, *which) for which in every}
        done: dict[tuple[bool, str], list[RunFolder]] = {}
        for stragglers, name, seed in every:
            with step(f"{name}, {'7 slow nodes' if stragglers else 'all equal'}, seed {seed}"):
                done.setdefault((stragglers, name), []).append(started[stragglers, name, seed].result())
        for stragglers in sorted({which[0] for which in every}):
            tables.append(_table(task, stragglers, {name: done[stragglers, name] for name in ALGORITHMS}))
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in tables:
        console.print(table)
    console.print(f"In the paper DivShare is up to {PAPER} times faster than AD-PSGD, with stragglers, on CIFAR-10.")


def _table(task: Task, stragglers: bool, runs: Mapping[str, list[RunFolder]]) -> Table:
    nodes = "7 of 60 slow" if stragglers else "all equal"
    title = f"{task.name}: virtual seconds to accuracy {task.target}, {nodes}, {task.training_seconds} s per iteration"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("algorithm", "seconds", "over seeds", "relative to divshare", "best accuracy", "rounds", "GB sent"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for standing in compare_times(runs, task.target):
        folders = runs[standing.label]
        accuracies = [_best(folder) for folder in folders]
        accuracy = sum(accuracies) / len(accuracies)
        summaries = [folder.read_summary() for folder in folders]
        rounds = min(summary["rounds"] for summary in summaries)
        sent = sum(summary["bytes_sent"]["total"] for summary in summaries) / len(summaries) / 1e9
        table.add_row(standing.label, *_seconds(standing), f"{accuracy:.3f}", str(rounds), f"{sent:.2f}")
    return table


def _best(folder: RunFolder) -> float:
    accuracies = curve(folder)
    at = best(accuracies)
    return math.nan if at is None else accuracies.means[at]


def _seconds(standing: TimesToTarget) -> tuple[str, str, str]:
    """Return the mean, the values of all seeds, and the ratio to the first algorithm."""
    every = ", ".join("never" if s is None else f"{s:.1f}" for s in standing.seconds)
    if standing.mean is None:
        return "not always", every, ""
    return f"{standing.mean:.1f}", every, "" if standing.ratio is None else f"{standing.ratio:.2f} ×"


def overhead(nodes: int, part: int) -> None:
    """Measure the share of its time that the simulation spends outside training, one node after another.

    To save time, nodes take one local step of `part`, and the time of training counts `part` times: the rest does not
    depend on local steps.
    """
    torch.set_num_threads(1)
    alone = replace(
        described(replace(CIFAR10, local_steps=CIFAR10.local_steps // part), "divshare", stragglers=True, seed=1),
        nodes=nodes,
        duration=2.5 * TRAINING_SECONDS,
        dataset={"name": "synthetic", "shape": [3, 32, 32], "samples": 100 * nodes},
        evaluation={"every": 0, "nodes": 0, "average": False},
        simulation={"batching": "off"},
    )
    with tempfile.TemporaryDirectory() as place, step(f"{nodes} nodes, GN-LeNet, 2 iterations"):
        summary = alone.run(place).summary
    times = summary["time"]
    trained = times["train_cpu_s"]
    outside = times["total_cpu_s"] - trained
    share = 100 * outside / (outside + part * trained)
    note = f"{part * trained:.0f} s of training, {outside:.2f} s outside; {summary['messages_sent']:,} messages sent"
    figures = [
        Figure("of its processor time, the simulation spends outside training", share, "%", at_most=3.0, note=note)
    ]
    show(f"DivShare's network with {nodes} nodes and stragglers, GN-LeNet", figures)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one seed")
    parser.add_argument("--stragglers", action="store_true", help="only with the slow nodes")
    parser.add_argument("--iteration", type=float, default=TRAINING_SECONDS, help="training seconds per iteration")
    parser.add_argument("--cifar10", action="store_true", help="CIFAR-10 in place of the digits")
    parser.add_argument("--overhead", action="store_true", help="the simulation's time outside training")
    return parser.parse_args()


if __name__ == "__main__":
    options = parsed()
    if options.overhead:
        overhead(60, part=8)
        overhead(1000, part=32)
    else:
        cifar10 = CIFAR10_SHORT if options.short else CIFAR10
        chosen = (cifar10 if options.cifar10 else DIGITS).with_training_seconds(options.iteration)
        only_slow = options.stragglers or (options.cifar10 and options.short)
        main(chosen, 1 if options.short else 3, both=not only_slow)
