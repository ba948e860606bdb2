"""Which way to compute is fastest for a model: measured once, and remembered.

Stacking changes the last bits of the numbers, so the choice is part of what a run replays: it is written into the
run's experiment.toml, and remembered per model and machine, so that a second run does not pick otherwise.
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
from shoal.experiment.setup import Setup
from shoal.training.trainer import BatchableTrainer, Train

SECONDS = 0.3
"""How long each way is tried."""


def choose_batching(experiment: Experiment, setup: Setup) -> Batching:
    """What the experiment says, or what was measured."""
    asked = experiment.simulation.batching
    if _adds_data(experiment):
        if asked == "pool":
            raise ExperimentError(
                [
                    "simulation.batching = 'pool': its workers would not see the samples that nodes are sent with "
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
    known = _remembered()
    if key not in known:
        known[key] = _measure(experiment, setup)
        _remember(known)
    return known[key]


def _adds_data(experiment: Experiment) -> bool:
    """Whether what some node hears changes what it trains on."""
    nodes = range(experiment.nodes) if experiment.group else range(1)
    return any(experiment.settings(node).sharing.traits.adds_data for node in nodes)


def _measure(experiment: Experiment, setup: Setup) -> Batching:
    cores = min(experiment.simulation.workers or os.cpu_count() or 1, experiment.nodes)
    alone = _seconds(_works(experiment, setup, 1)[0].run)
    best = alone
    fastest: Batching = "off"
    if cores > 1 and alone > 1e-3:  # below 1 ms, the overhead of the pool matters
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
    """The least time that `work` took, in a few tries after a first that does not count."""
    work()
    times: list[float] = []
    while not times or (sum(times) < SECONDS and len(times) < 20):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _key(experiment: Experiment, setup: Setup) -> str:
    """What the outcome depends on."""
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


def _remembered() -> dict[str, Batching]:
    try:
        known = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if v in ("vmap", "pool", "off")} if isinstance(known, dict) else {}


def _remember(known: dict[str, Batching]) -> None:
    """Where the cache folder cannot be written, the next run measures again."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        scratch = _file().with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(known))
        scratch.replace(_file())
    except OSError:
        return
