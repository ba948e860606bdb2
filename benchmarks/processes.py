"""The process engine: memory of a node, start-up, processor time outside training, and 1024 nodes.

    python benchmarks/processes.py            # all except the 1024 nodes, about three minutes
    python benchmarks/processes.py --thousand # also 1024 nodes: 14 GiB of memory, about three minutes more

All runs use GN-LeNet (89,834 parameters, 359 KB per message) on a random 5-regular graph. Compared variants are
measured in turns, so a busy machine slows both.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import psutil

from measuring import Figure, bare_step, median, script, shoal_run, show, step
from shoal.engines.operating_system import available_memory
from shoal.engines.processes.slots import usable_cores

EXAMPLE = "thousand-processes.toml"
QUIET = {"evaluation.nodes": 0, "evaluation.average": False, "dataset.samples": 2048}
"""No evaluation: only the cost of the algorithm itself."""

SHORT_BYTES = int(2.4 * 2**30)
"""Free memory in which 64 nodes fit, and cannot keep the memory of their trainings."""

PLAIN_SCRIPT = """
import time, psutil
import torch
model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 5, padding=2), torch.nn.Flatten(), torch.nn.Linear(32768, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.zeros(8, dtype=torch.long))
loss.backward()
optimizer.step()
print(time.time() - psutil.Process().create_time())
"""

WRITE_MEMORY = """
import time
import numpy as np
started = time.monotonic()
np.ones({size}, np.uint8)
print(time.monotonic() - started)
"""
"""Nothing but writing new memory once. On a virtual machine, this can be slow: the host provides each page then."""


def start_up(repeats: int = 3) -> list[Figure]:
    plain, ours = [], []
    for _ in range(repeats):
        plain.append(script(PLAIN_SCRIPT))
        ours.append(shoal_run(EXAMPLE, {**QUIET, "nodes": 64, "algorithm.rounds": 1})["time"]["startup_s"])
    ratio = median([o / p for o, p in zip(ours, plain, strict=True)])
    note = f"64 nodes {median(ours):.1f} s, a plain torch script {median(plain):.1f} s"
    return [Figure("start-up / plain script", ratio, "×", at_most=3, note=note)]


def memory() -> list[Figure]:
    """Private memory where nodes may keep the memory of trainings, and where most of the machine's memory is taken."""
    settings = {**QUIET, "nodes": 64, "algorithm.rounds": 10}
    plentiful = shoal_run(EXAMPLE, settings)["memory"]["uss_mean_mib"]
    taken = np.ones(max(0, available_memory() - SHORT_BYTES), np.uint8)  # every page is written
    short = shoal_run(EXAMPLE, settings)["memory"]["uss_mean_mib"]
    del taken
    note = "USS after 10 rounds, 64 nodes, batch 8"
    return [
        Figure("private memory per node, memory is short", short, "MiB", at_most=12, note=note),
        Figure("private memory per node, memory is plentiful", plentiful, "MiB", at_most=24, note=note),
    ]


def rounds(repeats: int = 3) -> list[Figure]:
    """Rounds of 64 nodes with two short steps each, and of 16 nodes with eight, compared with bare training steps."""
    cores = usable_cores()
    shares: dict[tuple[int, int], list[float]] = {(64, 2): [], (16, 8): []}
    outside, seconds = [], []
    for _ in range(repeats):
        for (nodes, steps), found in shares.items():
            count = 15 if nodes == 64 else 20
            settings = {**QUIET, "nodes": nodes, "algorithm.rounds": count, "training.local_steps": steps}
            before = bare_step(cores)
            times = shoal_run(EXAMPLE, settings)["time"]
            bare = (before + bare_step(cores)) / 2
            found.append(bare * nodes * count * steps / (times["wall_s"] * cores))
            if nodes == 64:
                seconds.append(times["wall_s"] / count)
                outside.append(1e3 * (times["total_cpu_s"] - times["train_cpu_s"]) / (nodes * count))
    how = f"bare steps in {cores} processes at a time, channels last"
    return [
        Figure("64 nodes: seconds per round", median(seconds), "s", note="2 local steps, degree 5"),
        Figure("64 nodes: processor time outside training", median(outside), "ms", at_most=2.5, note="a node-round"),
        *(
            Figure(
                f"{nodes} nodes, {steps} local steps: bare steps / (wall × cores)",
                median(found),
                "",
                at_least=0.85,
                note=how,
            )
            for (nodes, steps), found in shares.items()
        ),
    ]


def thousand() -> list[Figure]:
    used = _MemoryWatch()
    with used:
        summary = shoal_run(EXAMPLE, {})
    pss = summary["memory"]["pss_total_mib"] / 1024
    peak = f"the whole machine's peak rose by {used.peak / 2**30:.1f} GiB"
    written = script(WRITE_MEMORY.format(size=used.peak))
    return [
        Figure("1024 nodes: memory", pss, "GiB", at_most=14, note=f"sum of PSS after 3 rounds; {peak}"),
        Figure(
            "1024 nodes: start-up", summary["time"]["startup_s"], "s", at_most=90, note="to the last node's first round"
        ),
        Figure("1024 nodes: first round done", summary["first_round_s"], "s", at_most=90, note="by the last node"),
        Figure("a plain script that writes as much memory", written, "s", note="as the peak rose by, in one process"),
        Figure("1024 nodes: three rounds", summary["time"]["wall_s"], "s", note="after start-up, two steps per round"),
    ]


class _MemoryWatch:
    """The increase of the machine's used memory at its peak, including the kernel and caches of processes."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()

    def __enter__(self) -> None:
        self._before = psutil.virtual_memory().available
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.peak = max(self.peak, self._before - psutil.virtual_memory().available)


def main(with_thousand: bool) -> None:
    figures: list[Figure] = []
    parts = [start_up, memory, rounds, *([thousand] if with_thousand else [])]
    for part in parts:
        with step(part.__name__.replace("_", "-")):
            figures += part()
    show("Process engine, GN-LeNet, 5-regular", figures)


if __name__ == "__main__":
    started = time.monotonic()
    main("--thousand" in sys.argv)
    print(f"{time.monotonic() - started:.0f} s in total")
