"""The fastest way to compute for a model: benchmarked once and cached.

Stacking changes the last bits of the results, so a replay needs the same choice. The choice is written into the run's
experiment.toml, and cached per model and machine, so that a second run chooses the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import platformdirs

from shoal.engines.simulation.compute import STACK_SIZE
from shoal.errors import ExperimentError
from shoal.experiment import Batching, Experiment
from shoal.experiment.checks import uses_accelerator
from shoal.experiment.setup import Setup
from shoal.training.trainer import BatchableTrainer, Train

SECONDS = 0.3
"""Seconds for which each way is timed."""


def choose_batching(experiment: Experiment, setup: Setup) -> Batching:
    """Return the way that the experiment names, or the fastest one."""
    asked = experiment.simulation.batching
    if experiment.adds_data:
        if asked in ("pool", "ray"):
            raise ExperimentError(
                [
                    f"simulation.batching = {asked!r}: its workers would not see the samples that nodes are sent with "
                    "this sharing; use 'off' or 'vmap'"
                ],
                experiment.name,
            )
        return "off" if asked == "auto" else asked  # nodes with samples of their own are not stacked
    if asked != "auto":
        return asked
    if not isinstance(setup.trainer_factory.trainer(0, experiment.training, 0.0), BatchableTrainer):
        return "off"
    key = _key(experiment, setup)
    known = _read_cache()
    if key not in known:
        known[key] = _measure(experiment, setup)
        _write_cache(known)
    return known[key]


def _measure(experiment: Experiment, setup: Setup) -> Batching:
    cores = min(experiment.simulation.workers or os.cpu_count() or 1, experiment.nodes)
    alone = _seconds(_works(experiment, setup, 1)[0].run)
    best = alone
    fastest: Batching = "off"
    # Below 1 ms, the overhead of the pool matters. An accelerator does not work in its forked workers.
    if cores > 1 and alone > 1e-3 and not uses_accelerator(experiment):
        best, fastest = alone / cores, "pool"
    works = _works(experiment, setup, min(experiment.nodes, STACK_SIZE))
    if len(works) > 1 and len({work.batch_key for work in works}) == 1:
        batched = _seconds(lambda: Train.run_batch(works)) / len(works)
        if batched < best:
            fastest = "vmap"
    return fastest


def _works(experiment: Experiment, setup: Setup, count: int) -> list[Train]:
    """Return the first training of `count` nodes, with trainers that only the measurement uses."""
    training = experiment.training
    trainers = [setup.trainer_factory.trainer(node, training, 0.0) for node in range(count)]
    return [Train(trainer, setup.initial, training.local_steps) for trainer in trainers]


def _seconds(work: Callable[[], object]) -> float:
    """The shortest time of `work` in a few repetitions, after one that warms up."""
    work()
    times: list[float] = []
    while not times or (sum(times) < SECONDS and len(times) < 20):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _key(experiment: Experiment, setup: Setup) -> str:
    """A hash of everything that the outcome depends on."""
    facts = [
        experiment.trainer.to_table(),
        experiment.model.to_table(),
        setup.data.shape,
        repr(experiment.training),
        min(experiment.nodes, STACK_SIZE),
        experiment.simulation.workers,
        os.cpu_count(),
        platform.processor() or platform.machine(),
        version("torch"),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]


def _file() -> Path:
    return Path(platformdirs.user_cache_dir("shoal")) / "batching.json"


def _read_cache() -> dict[str, Batching]:
    try:
        known = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if v in ("vmap", "pool", "off")} if isinstance(known, dict) else {}


def _write_cache(known: dict[str, Batching]) -> None:
    """Write the cache. If its folder cannot be written, the next run measures again."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        scratch = _file().with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(known))
        scratch.replace(_file())
    except OSError:
        return
