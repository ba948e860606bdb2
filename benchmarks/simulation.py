"""The simulation compared with the bare cost of its computations.

    python benchmarks/simulation.py

A second comparison is that of GN-LeNet with bare training steps on all cores.

The bare cost of a round of D-PSGD is one vmapped training step of all nodes and one sparse matrix product to mix them:
a script with no nodes, messages, clock or records. The simulation computes the same with all of these.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.func import functional_call, grad, vmap

from measuring import EXAMPLES, Figure, bare_step, median, shoal_run, show, step
from shoal.engines.processes.slots import usable_cores
from shoal.engines.simulation.compute import STACK_SIZE
from shoal.engines.simulation.engine import Simulation
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.results.records import RunFolder
from shoal.topologies.measures import matrix
from shoal.training.batches import Batches

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Records are written to memory, because 10,000 files take a disk 0.2 to 5 s."""


def experiment(nodes: int, rounds: int) -> Experiment:
    """mlp on digits-like data (64 inputs, 10 classes), one local step per round, 5-regular."""
    return Experiment.from_file(
        EXAMPLES / "ten-thousand-simulated.toml",
        {
            "nodes": nodes,
            "algorithm.rounds": rounds,
            "dataset.samples": 20 * nodes,
            "evaluation.nodes": 0,
            "evaluation.average": False,
            "simulation.batching": "vmap",
        },
    )


def simulated(nodes: int, rounds: int) -> float:
    """Measure seconds per node and round, with records."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        simulation = Simulation(experiment(nodes, rounds), RunFolder.create(Path(folder), "benchmark"))
        return simulation.run().wall_s / (nodes * rounds)


def bare(nodes: int, rounds: int) -> float:
    """Measure seconds per node and round of only the training and the mixing."""
    setup = Setup(experiment(nodes, rounds))
    module, flat = setup.trainer_factory.flat.module, setup.trainer_factory.flat
    inputs, targets = torch.from_numpy(setup.data.train.x.copy()), torch.from_numpy(setup.data.train.y.copy())
    streams = [Batches(part, 16, np.random.default_rng(i)) for i, part in enumerate(setup.parts)]
    weights = matrix(setup.mixing, 0).astype(np.float32).tocsr()
    models = np.tile(setup.initial, (nodes, 1))

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(functional_call(module, parameters, (x,)), y)

    slopes_of = vmap(grad(loss))
    started = time.perf_counter()
    for _ in range(rounds):
        for first in range(0, nodes, STACK_SIZE):
            some = slice(first, first + STACK_SIZE)
            stack = torch.from_numpy(models[some])
            batch = torch.from_numpy(np.concatenate([s.take(1) for s in streams[some]]))
            views = flat.stacked(stack)
            for name, slope in slopes_of(views, inputs[batch], targets[batch]).items():
                views[name].sub_(slope, alpha=0.1)
        models = weights @ models
    return (time.perf_counter() - started) / (nodes * rounds)


def overhead(repeats: int, rounds: int) -> list[Figure]:
    ratios, ours, theirs = [], [], []
    for _ in range(repeats):
        theirs.append(bare(1024, rounds))
        ours.append(simulated(1024, rounds))
        ratios.append(ours[-1] / theirs[-1])
    note = f"{1e6 * median(ours):.0f} µs against {1e6 * median(theirs):.0f} µs a node and round, 1024 nodes"
    return [Figure("simulation / bare cost", median(ratios), "×", at_most=2.5, note=note)]


def scaling(repeats: int, rounds: int) -> list[Figure]:
    ratios, small, large = [], [], []
    for _ in range(repeats):
        small.append(simulated(1000, rounds))
        large.append(simulated(10_000, rounds))
        ratios.append(large[-1] / small[-1])
    note = f"{1e6 * median(large):.0f} µs against {1e6 * median(small):.0f} µs a node and round"
    return [Figure("10,000 nodes / 1,000 nodes", median(ratios), "×", at_most=1.25, note=note)]


def convolutional(repeats: int, rounds: int) -> list[Figure]:
    """64 nodes with GN-LeNet and 4 local steps on all cores, compared with bare training steps."""
    cores = usable_cores()
    settings = {
        "engine": "simulation",
        "simulation.batching": "pool",
        "nodes": 64,
        "algorithm.rounds": rounds // 2,
        "training.local_steps": 4,
        "dataset.samples": 2048,
        "evaluation.nodes": 0,
        "evaluation.average": False,
    }
    shares = []
    for _ in range(repeats):
        before = bare_step(cores)
        wall = shoal_run("thousand-processes.toml", settings)["time"]["wall_s"]
        bare = (before + bare_step(cores)) / 2
        shares.append(bare * 64 * 4 * (rounds // 2) / (wall * cores))
    note = f"64 nodes, 4 local steps, {cores} cores; bare steps in {cores} processes at a time, channels last"
    return [Figure("GN-LeNet: bare steps / (wall × cores)", median(shares), "", at_least=0.9, note=note)]


def main(short: bool) -> None:
    torch.set_num_threads(1)
    repeats, rounds = (3, 10) if short else (5, 20)
    figures: list[Figure] = []
    for part in (overhead, scaling, convolutional):
        with step(part.__name__):
            figures += part(repeats, rounds)
    show("Simulation, 5-regular; mlp with one local step a round, and GN-LeNet", figures)


if __name__ == "__main__":
    main("--short" in sys.argv)
