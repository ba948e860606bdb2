"""What one more node costs, and what that means for very large runs.

    python benchmarks/scale.py              # about ten minutes
    python benchmarks/scale.py --short      # smaller runs

Runs of several sizes give straight lines: memory, processor time and records for each further node, in the simulation
and in the coordinator of a run with processes. A simulation computes in every round. A coordinator handles messages
that nodes send by the clock, such as heartbeats, so its processor time counts by the second of the run. Nodes have a
logistic model of 650 parameters. The table extends these lines to 100,000 and 1,000,000 simulated nodes, and to 10,000
processes on ten machines. An extension is an estimate: nothing of that size was run.

The mailbox of one node is measured by itself: the processor time of a message, when a node receives from so many
senders in a round, and the memory of a message that waits, without its model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from measuring import EXAMPLES, Figure, show, step
from shoal.mailbox import Filter, Mailbox
from shoal.message import Message, Payload

EXAMPLE = EXAMPLES / "thousand-processes.toml"
TICKS = os.sysconf("SC_CLK_TCK")
SAMPLES = 8
"""The training samples of each node."""
SMALL_MODEL = ["--set", "model.name=logistic", "--set", "dataset.shape=[1,8,8]"]
SETTINGS = ["--set", "evaluation.nodes=0", "--set", "evaluation.average=false"]


@dataclass(frozen=True)
class Sample:
    """One run: what the process of `shoal run` itself has used, without the processes of nodes."""

    nodes: int
    rounds: int
    peak_mib: float
    cpu_s: float
    disk_bytes: int
    wall_s: float
    """The time of the training, without the start."""


def own_use(process: subprocess.Popen[bytes]) -> tuple[float, float] | None:
    """The peak memory in MiB and the processor seconds of a process, without its children; None if it has ended."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return None
    peak = [line for line in status.splitlines() if line.startswith("VmHWM")]
    if not peak:
        return None
    return int(peak[0].split()[1]) / 1024, (int(fields[11]) + int(fields[12])) / TICKS


def run(nodes: int, rounds: int, settings: Sequence[str]) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        size = ["--set", f"nodes={nodes}", "--set", f"algorithm.rounds={rounds}", "--out", folder]
        size += ["--set", f"dataset.samples={SAMPLES * nodes}"]
        command = [sys.executable, "-m", "shoal", "run", str(EXAMPLE), *size, *SETTINGS, *settings]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        used = (0.0, 0.0)
        while process.poll() is None:
            used = own_use(process) or used
            time.sleep(0.05)
        if process.returncode:
            assert process.stderr is not None
            raise SystemExit(process.stderr.read().decode())
        records = sum(path.stat().st_size for path in Path(folder).rglob("nodes/*.jsonl"))
        summary = json.loads(next(Path(folder).rglob("summary.json")).read_text())
        return Sample(nodes, rounds, *used, records, summary["time"]["wall_s"])


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The intercept and the slope of the straight line through measured points, by least squares."""
    slope, intercept = np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)
    return float(intercept), float(slope)


@dataclass(frozen=True)
class Costs:
    """Straight lines through the samples of one engine."""

    base_mib: float
    node_mib: float
    round_us: float
    """Processor time for each node and round."""
    second_us: float
    """Processor time for each node and second of the run."""
    record_bytes: float
    """Bytes of records for each node and round."""


def costs(samples: Sequence[Sample], few: int, many: int) -> Costs:
    """`few` and `many` are the numbers of rounds of the runs of each size."""
    memory = [s for s in samples if s.rounds == many]
    base, node = line([s.nodes for s in memory], [s.peak_mib for s in memory])
    by_nodes: dict[int, dict[int, Sample]] = {}
    for sample in samples:
        by_nodes.setdefault(sample.nodes, {})[sample.rounds] = sample
    pairs = [(pair[few], pair[many]) for pair in by_nodes.values()]
    rounds = [s.nodes * (many - few) for s, _ in pairs]
    time_us = 1e6 * float(np.sum([b.cpu_s - a.cpu_s for a, b in pairs]))
    seconds = float(np.sum([b.nodes * (b.wall_s - a.wall_s) for a, b in pairs]))
    records = float(np.sum([b.disk_bytes - a.disk_bytes for a, b in pairs]) / np.sum(rounds))
    return Costs(base, node, time_us / float(np.sum(rounds)), time_us / seconds, records)


def measure(what: str, sizes: Sequence[int], few: int, many: int, settings: Sequence[str]) -> Costs:
    samples = []
    for nodes in sizes:
        for rounds in (few, many):
            with step(f"{what}: {nodes} nodes, {rounds} rounds"):
                samples.append(run(nodes, rounds, settings))
            print(f"    {samples[-1]}", flush=True)
    return costs(samples, few, many)


def mailbox(senders: int, rounds: int) -> tuple[float, float]:
    """Return the processor time in µs, and the bytes of memory, of a message from one of so many senders.

    Half of the messages arrive before the node receives, the other half while it waits.
    """
    box, everyone = Mailbox(), tuple(range(senders))
    payload = Payload({"params": np.zeros(1, np.float32)})
    messages = [[Message(sender, "model", round, payload) for sender in everyone] for round in range(rounds)]
    started = time.process_time()
    for round, of_round in enumerate(messages):
        for message in of_round[: senders // 2]:
            box.put(message)
        waiter = box.start_receive(Filter("model", round, everyone), lambda: None)
        for message in of_round[senders // 2 :]:
            box.put(message)
        assert waiter.done
    seconds = time.process_time() - started
    tracemalloc.start()
    for sender in everyone:
        box.put(Message(sender, "model", rounds, payload))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return 1e6 * seconds / (rounds * senders), size / senders


def mailbox_figures() -> list[Figure]:
    rows = []
    for senders in (10, 100, 1000, 10_000):
        time_us, size = mailbox(senders, 200_000 // senders)
        rows.append(Figure(f"mailbox, {senders:,} senders: processor time of a message", time_us, "µs"))
        rows.append(Figure(f"mailbox, {senders:,} senders: memory of a message that waits", size, "bytes"))
    return rows


def simulation_figures(found: Costs) -> list[Figure]:
    rows = [
        *_slopes("simulation", found),
        Figure("simulation: processor time for each node and round", found.round_us, "µs"),
    ]
    for nodes in (100_000, 1_000_000):
        rows += _sizes("simulation", found, nodes)
        seconds = nodes * found.round_us / 1e6
        rows.append(Figure(f"simulation: {nodes:,} nodes: one round", seconds, "s", note="estimate"))
    return rows


def coordinator_figures(found: Costs) -> list[Figure]:
    load = 10_000 * found.second_us / 1e6
    return [
        *_slopes("coordinator", found),
        Figure("coordinator: processor time for each node and second", found.second_us, "µs"),
        *_sizes("coordinator", found, 10_000),
        Figure("coordinator: 10,000 nodes: part of a core in use", load, "", note="estimate; it can use one core"),
    ]


def _slopes(what: str, found: Costs) -> list[Figure]:
    return [
        Figure(f"{what}: memory for each further node", 1024 * found.node_mib, "KiB"),
        Figure(f"{what}: records of each node and round", found.record_bytes, "bytes"),
    ]


def _sizes(what: str, found: Costs, nodes: int) -> list[Figure]:
    memory = (found.base_mib + nodes * found.node_mib) / 1024
    disk = 100 * nodes * found.record_bytes / 2**30
    return [
        Figure(f"{what}: {nodes:,} nodes: memory", memory, "GiB", note="estimate"),
        Figure(f"{what}: {nodes:,} nodes: records of 100 rounds", disk, "GiB", note="estimate"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    simulated = (500, 1000, 2000) if given.short else (1000, 2000, 4000, 8000)
    processes = (16, 32) if given.short else (32, 64, 128)
    rows = simulation_figures(measure("simulation", simulated, 2, 6, [*SMALL_MODEL, "--engine", "simulation"]))
    rows += coordinator_figures(measure("coordinator", processes, 50, 200, SMALL_MODEL))
    show("scale", [*rows, *mailbox_figures()])


if __name__ == "__main__":
    main()
