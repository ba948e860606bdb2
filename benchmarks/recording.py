"""The cost of recording what nodes do and to which nodes they send.

    python benchmarks/recording.py
    python benchmarks/recording.py --short        # fewer repetitions

D-PSGD runs with and without these records, in turns. The figure compares the least processor time of both: other work
on the machine only adds to it. All other records are written in both cases.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from measuring import EXAMPLES, Figure, shoal_run, show, step
from shoal.engines.simulation.engine import Simulation
from shoal.experiment import Experiment
from shoal.results.records import RunFolder

RECORDED, UNRECORDED = (
    f"{Path(__file__).with_name('recorded_dpsgd.py')}:{name}" for name in ("Recorded", "Unrecorded")
)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Records are written to memory: a disk takes a time that varies."""
NO_EVALUATION = {"evaluation.nodes": 0, "evaluation.average": False}


def simulated(algorithm: str, rounds: int) -> float:
    """Return the processor seconds of a simulation of 1024 nodes: mlp, 5-regular, one local step a round."""
    settings: dict[str, Any] = {
        "nodes": 1024, "algorithm": {"name": algorithm, "rounds": rounds}, "dataset.samples": 20 * 1024,
        "simulation.batching": "vmap", **NO_EVALUATION,
    }  # fmt: skip
    experiment = Experiment.from_file(EXAMPLES / "ten-thousand-simulated.toml", settings)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        simulation = Simulation(experiment, RunFolder.create(Path(folder), "benchmark"))
        return float(str(simulation.run().facts["total_cpu_s"]))


def processes(algorithm: str, rounds: int) -> float:
    """Return the processor seconds of 16 node processes: mlp on the digits, 5-regular, one local step a round."""
    settings: dict[str, Any] = {
        "nodes": 16, "algorithm": {"name": algorithm, "rounds": rounds}, "training.local_steps": 1, **NO_EVALUATION,
    }  # fmt: skip
    return float(shoal_run("quickstart.toml", settings)["time"]["total_cpu_s"])


def cost(what: str, measure: Any, repeats: int, rounds: int, nodes: int) -> Figure:
    with_records: list[float] = []
    without: list[float] = []
    for turn in range(repeats):
        for algorithm in (RECORDED, UNRECORDED) if turn % 2 else (UNRECORDED, RECORDED):
            (with_records if algorithm == RECORDED else without).append(measure(algorithm, rounds) / rounds / nodes)
    least, base = min(with_records), min(without)
    note = f"{1e6 * least:.1f} µs against {1e6 * base:.1f} µs a node and round, the least of {repeats} runs each"
    return Figure(what, 100 * (least / base - 1), "%", at_most=1, note=note)


def main(short: bool) -> None:
    torch.set_num_threads(1)
    figures = []
    for what, measure, repeats, rounds, nodes in (
        ("simulation, 1024 nodes", simulated, 5 if short else 15, 20, 1024),
        ("16 processes", processes, 3 if short else 9, 100, 16),
    ):
        with step(what):
            figures.append(cost(what, measure, repeats, rounds, nodes))
    show("Additional processor time for records of activity", figures)


if __name__ == "__main__":
    main("--short" in sys.argv)
