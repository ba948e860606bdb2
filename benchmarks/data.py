"""CIFAR-10: decoding, loading from the cache, the data path's share of a step, and the memory of node processes.

    SHOAL_DATA=… python benchmarks/data.py       # about two minutes; 'shoal data fetch cifar10' downloads the data

Data path and step are measured in turns, so a busy machine slows both.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from measuring import Figure, median, script, shoal_run, show, step
from shoal.data import Data
from shoal.data.cifar import Cifar10
from shoal.models.basic import GnLenet
from shoal.models.flat import initial_module
from shoal.training.learner import Learner
from shoal.training.settings import Training

READY = """
import time
import numpy, shoal.schema
started = time.perf_counter()
from shoal.data.cifar import Cifar10
data = Cifar10().load(0)
data.train.x[::5000].sum(), data.train.y.sum()
print(time.perf_counter() - started)
"""
LIKE_CIFAR = {"name": "synthetic", "shape": [3, 32, 32], "classes": 10, "samples": 50_000, "test_samples": 10_000}


def decoding() -> list[Figure]:
    """Decode into a new cache, then load from it, each time in a new interpreter."""
    started, spent = time.perf_counter(), time.process_time()
    Cifar10().load(0)
    seconds, processor = time.perf_counter() - started, time.process_time() - spent
    ready = median([script(READY) for _ in range(5)])
    return [
        Figure("first decoding", seconds, "s", at_most=15, note=f"{processor:.1f} s of processor time"),
        Figure("ready from the cache", 1e3 * ready, "ms", at_most=300, note="with the import of the loader"),
    ]


def data_path(data: Data, batch_size: int, repeats: int = 40, steps: int = 5) -> Figure:
    """Compare the time to gather and scale a batch with the time of a whole training step."""
    import torch

    torch.set_num_threads(1)
    flat = initial_module(lambda: GnLenet().build(data.shape, data.classes), 0, torch.device("cpu"))
    learner = Learner(flat, Training(lr=0.01, batch_size=batch_size), data)
    rng = np.random.default_rng(0)
    params = flat.read()
    gather_seconds, training_seconds = [], []
    for _ in range(repeats):
        batches = rng.integers(len(data.train), size=(steps, batch_size))
        # Other batches of the same size, because gathered batches are in the processor's cache.
        others = rng.integers(len(data.train), size=(steps, batch_size))
        gather_seconds.append(_seconds(lambda o=others: [learner.gather(b)  # type: ignore[misc]
                                                    for b in torch.from_numpy(o)]) / steps)  # fmt: skip
        training_seconds.append(_seconds(lambda b=batches: learner.train(params, {}, b)) / steps)  # type: ignore[misc]
    share = median([g / t for g, t in zip(gather_seconds, training_seconds, strict=True)])
    note = f"{1e3 * median(gather_seconds):.3f} ms of {1e3 * median(training_seconds):.2f} ms, GN-LeNet"
    return Figure(f"gather and scale, of a step, batch {batch_size}", 100 * share, "%", at_most=5, note=note)


def memory(nodes: int = 32) -> list[Figure]:
    """Compare the private memory of a node after ten rounds of four steps with CIFAR-10 and with synthetic data."""
    settings = {"nodes": nodes, "algorithm.rounds": 10, "training.local_steps": 4, "evaluation.nodes": 0,
                "evaluation.average": False}  # fmt: skip
    used = {}
    for name, table in (("synthetic", LIKE_CIFAR), ("cifar10", {"name": "cifar10"})):
        dataset = {**table, "partition": {"name": "iid"}}
        used[name] = shoal_run("thousand-processes.toml", {**settings, "dataset": dataset})["memory"]["uss_mean_mib"]
    note = f"USS {used['cifar10']:.2f} MiB, with synthetic data of the same shape {used['synthetic']:.2f} MiB"
    more = used["cifar10"] - used["synthetic"]
    return [Figure(f"private memory that CIFAR-10 adds to each of {nodes} nodes", more, "MiB", at_most=1, note=note)]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHOAL_CACHE"] = str(Path(cache))
        with step("decoding CIFAR-10, and loading it from the cache"):
            figures = decoding()
        with step("the data path of a step"):
            data = Cifar10().load(0)
            figures += [data_path(data, size) for size in (8, 32)]
        with step("memory of node processes"):
            figures += memory()
    show("CIFAR-10", figures)


if __name__ == "__main__":
    main()
