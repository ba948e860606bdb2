"""The way in which a simulation computes its nodes: benchmarked once per model and machine, and cached.

Stacking changes the last bits of the results; the other ways do not. So whether nodes are stacked depends only on the
trainer, the model, the shape of the data and the machine: two runs that a user compares never differ in it, whatever
else differs between them. The choice is written into the run's experiment.toml, so that a replay makes the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import msgspec
import platformdirs

from shoal.errors import ExperimentError
from shoal.experiment import Batching, Experiment
from shoal.experiment.checks import uses_accelerator
from shoal.experiment.setup import Setup
from shoal.training.settings import Training
from shoal.training.torch_factory import TorchTrainerFactory
from shoal.training.trainer import BatchableTrainer, Train
from shoal.types import NodeId

VERSION = 2
"""The version of the benchmark and of what it measures. Answers of other versions in the cache are not used."""
SECONDS = 0.2
"""Seconds for which each way is timed."""
NODES = 32
"""The most nodes that are stacked in the benchmark, whatever the number of nodes of the experiment."""
STACK_SECONDS = 0.02
"""The first stack of the benchmark has as many nodes as train one by one in this time."""
FALLING = 0.75
"""Larger stacks are measured while twice as many nodes reduce the time per node to less than this part."""
LONGEST_STEP = 0.05
"""Seconds of a step from which on stacking is not measured. It saves the overhead of calls to torch, and the operations
of such a model take far longer than that."""
MARGIN = 0.8
"""Stacking is chosen if its time is below this part of the time on all cores. If both are about equal, the choice does
not depend on the noise of the machine."""
POOL_SECONDS = 1e-3
"""Trainings that take less are not worth the overhead of a pool."""


class Measured(msgspec.Struct, frozen=True):
    """The outcome of the benchmark."""

    stacked: bool
    """Whether stacking is clearly faster than all cores of the machine."""
    step_seconds: float
    """The time of one step of one node."""


def choose_batching(experiment: Experiment, setup: Setup) -> Batching:
    """Return the way that the experiment names, or the fastest one."""
    asked = experiment.simulation.batching
    if asked in ("pool", "ray") and experiment.adds_data:
        raise ExperimentError(
            [
                f"simulation.batching = {asked!r}: its workers would not see the samples that nodes are sent with "
                "this sharing; use 'off' or 'vmap'"
            ],
            experiment.name,
        )
    if asked != "auto":
        return asked
    if not isinstance(setup.trainer_factory.trainer(0, experiment.training, 0.0), BatchableTrainer):
        return "off"
    stackable = _stackable(experiment, setup)
    measured = _measured(experiment, setup, stackable)
    if stackable is not None and measured.stacked:
        return "vmap"
    cores = min(experiment.simulation.workers or os.cpu_count() or 1, experiment.nodes)
    steps = experiment.training.steps(setup.parts[0])
    pays = cores > 1 and measured.step_seconds * steps > POOL_SECONDS
    forks = not experiment.adds_data and not uses_accelerator(experiment)
    return "pool" if pays and forks else "off"


def _stackable(experiment: Experiment, setup: Setup) -> NodeId | None:
    """Return a node whose training can be stacked. If there is none, all ways give the same bits."""
    nodes = range(experiment.nodes) if experiment.group else range(1)
    by_settings = {repr(experiment.settings(node).training): node for node in nodes}
    return next((n for n in by_settings.values() if _have_one_key(_works(experiment, setup, n, 2))), None)


def _measured(experiment: Experiment, setup: Setup, stackable: NodeId | None) -> Measured:
    """Return the cached benchmark of the experiment's model, after measuring it if it is not in the cache.

    Only one process at a time measures, so that runs that start together agree. Without a cache they would not, so
    stacking is not chosen then.
    """
    key = _key(experiment, setup, stackable is not None)
    if (found := _read_cache().get(key)) is not None:
        return found
    try:
        with _lock():
            known = _read_cache()
            if key not in known:
                known[key] = _measure(experiment, setup, stackable)
                _write_cache(known)
            return known[key]
    except OSError as error:
        if stackable is not None:
            warnings.warn(
                f"simulation.batching = 'auto': {_file()} cannot be written ({error.strerror}); nodes are not "
                "stacked, because another run could choose otherwise and give slightly different models; set "
                "simulation.batching = 'vmap' to stack them",
                stacklevel=2,
            )
        return _measure(experiment, setup, None)


def _measure(experiment: Experiment, setup: Setup, stackable: NodeId | None) -> Measured:
    node = stackable or 0
    training = _reference(experiment.settings(node).training)
    alone = _seconds(_works(experiment, setup, node, 1, training)[0].run)
    if stackable is None or alone > LONGEST_STEP or not _have_one_key(_works(experiment, setup, node, 2, training)):
        return Measured(False, alone)

    def stack(count: int) -> list[Train]:
        return _works(experiment, setup, node, count, training)

    return Measured(_is_faster_stacked(stack, alone), alone)


def _is_faster_stacked(stack: Callable[[int], list[Train]], alone: float) -> bool:
    """Return whether nodes in a stack are faster than on all cores, if a node alone takes `alone` seconds.

    The stack grows only while that reduces the time per node: a large stack of a large model takes time and memory.
    """
    limit = MARGIN * alone / (os.cpu_count() or 1)
    count = max(1, min(NODES, int(STACK_SECONDS / max(alone, 1e-9))))
    seconds = _seconds_per_node(stack(count))
    while limit < seconds < math.inf and count < NODES:
        count = min(NODES, 2 * count)
        before, seconds = seconds, _seconds_per_node(stack(count))
        if seconds > FALLING * before:
            break
    return seconds <= limit


def _seconds_per_node(works: list[Train]) -> float:
    """Return the time per node of a stack; infinite if a plug-in has prevented it."""
    seconds = _seconds(lambda: Train.run_batch(works)) / len(works)
    return seconds if _have_one_key(works) else math.inf


def _reference(training: Training) -> Training:
    """Return the settings of the benchmark: the default ones, except where the model needs others."""
    return Training(loss=training.loss, buffers=training.buffers, device=training.device)


def _works(
    experiment: Experiment, setup: Setup, node: NodeId, count: int, training: Training | None = None
) -> list[Train]:
    """Return the first training of `count` nodes like `node`, with trainers that only the benchmark uses."""
    training = training or experiment.settings(node).training
    trainers = [setup.trainer_factory.trainer(node, training, 0.0) for _ in range(count)]
    return [Train(trainer, setup.initial) for trainer in trainers]


def _have_one_key(works: list[Train]) -> bool:
    return len({work.batch_key for work in works}) == 1


def _seconds(work: Callable[[], object]) -> float:
    """The shortest time of `work` in a few repetitions, after one that warms up. Long work is done only once."""
    first = _time(work)
    times = [first] if first > SECONDS else []
    while not times or (sum(times) < SECONDS and len(times) < 20):
        times.append(_time(work))
    return min(times)


def _time(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def _key(experiment: Experiment, setup: Setup, stackable: bool) -> str:
    """A hash of everything that the outcome may depend on."""
    data = setup.data
    facts = [
        VERSION,
        stackable,
        experiment.trainer.to_table(),
        experiment.model.to_table(),
        _module_facts(experiment, setup),
        experiment.training.device,
        data.shape,
        data.task,
        data.classes,
        data.sizes,
        os.cpu_count(),
        platform.processor() or platform.machine(),
        version("torch"),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]


def _module_facts(experiment: Experiment, setup: Setup) -> list[object]:
    """The shapes of the parameters, the layers and the memory format of a module.

    Two models may have one name, and a plug-in may be edited.
    """
    factory = setup.trainer_factory
    if not isinstance(factory, TorchTrainerFactory):
        return [factory.shapes]
    layers = re.sub(r" at 0x[0-9a-f]+", "", repr(factory.flat.module))  # addresses differ in each process
    return [factory.shapes, layers, factory.learner(experiment.training).channels_last]


# The cache


def _file() -> Path:
    return Path(platformdirs.user_cache_dir("shoal")) / "batching.json"


@contextmanager
def _lock() -> Iterator[None]:
    """Wait until no other process measures. Raises OSError if the folder of the cache cannot be written."""
    _file().parent.mkdir(parents=True, exist_ok=True)
    with _file().with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_cache() -> dict[str, Measured]:
    try:
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, Measured])
    except (OSError, msgspec.DecodeError):  # missing, damaged, or of an earlier version
        return {}


def _write_cache(known: dict[str, Measured]) -> None:
    scratch = _file().with_suffix(f".{os.getpid()}")
    scratch.write_bytes(msgspec.json.encode(known))
    scratch.replace(_file())
