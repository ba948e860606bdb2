"""A long run as processes: whether memory, open files, threads or connections grow.

    python benchmarks/soak.py                             # 32 nodes, 2,000 rounds, about five minutes
    python benchmarks/soak.py --dynamic                   # the same on a graph that changes in every round
    python benchmarks/soak.py --rounds 600 --nodes 8      # shorter

The nodes run D-PSGD with a small model on a random 5-regular graph. All processes of the run are sampled in regular
intervals: the proportional anonymous memory (PSS) of all of them, the private memory (USS) of nodes, the resident
memory (RSS) of the coordinator and the zygote, and of each process the open files, the threads and the TCP connections.
A node shares memory with the zygote until it writes to it. This increases the private memory of the node, but not its
anonymous memory, private and shared.

The figures compare the first tenth of the samples, from round 300 on, with the last tenth. A node that trains while it
is sampled needs more memory than one that waits, so the figures are medians of the samples. The queue of a connection
in ZeroMQ has places for 256 messages, and takes more pages until each place has been written once. On the static graph
this has happened by round 256. With `--dynamic`, a node sends to 31 peers in turn, and it takes 1,587 rounds: so
private memory is also compared in the second half of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from measuring import Figure, show

WARM_UP_ROUNDS = 300
"""Rounds before the first sample that counts."""
COUNTS = ("files", "threads", "connections")


def experiment(nodes: int, rounds: int, dynamic: bool) -> dict[str, Any]:
    return {
        "name": "soak",
        "nodes": nodes,
        "seed": 1,
        "engine": "processes",
        "dataset": {"name": "digits", "partition": {"name": "iid"}},
        "model": {"name": "mlp"},
        "algorithm": {"name": "dpsgd", "rounds": rounds},
        "topology": {"name": "regular", "degree": 5, "dynamic": dynamic},
        "training": {"lr": 0.05, "batch_size": 8, "local_steps": 1},
        "evaluation": {"every": 100, "nodes": 4},
        "checkpoint": {"every": 100, "keep": 2},
    }


@dataclass(frozen=True)
class Sample:
    """The resources of one process at one time."""

    round: int
    uss: int
    anonymous: int
    """Memory that is not of files, private or still shared with the zygote."""
    proportional: int
    """The private anonymous memory, and an equal share of the anonymous memory that several processes share."""
    rss: int
    files: int
    threads: int
    connections: int


class Sampler:
    """Samples the processes of a run, by their role: "coordinator", "zygote" or "node 3"."""

    def __init__(self, command: psutil.Process, folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._known: dict[int, tuple[str, psutil.Process]] = {}
        self.samples: dict[str, list[Sample]] = defaultdict(list)

    def take(self) -> int:
        """Sample all processes. Returns the round of node 0."""
        round = self._round()
        if round < 0:
            return round
        established = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
        connections = Counter(connection.pid for connection in established)
        for name, process in self._processes():
            try:
                memory = process.memory_full_info()
                proportional = _proportional(process.pid)
                files, threads = process.num_fds(), process.num_threads()
            except (psutil.Error, OSError):
                continue  # it has exited
            anonymous = memory.rss - memory.shared
            self.samples[name].append(
                Sample(round, memory.uss, anonymous, proportional, memory.rss, files, threads, connections[process.pid])
            )
        return round

    def _processes(self) -> list[tuple[str, psutil.Process]]:
        """The coordinator, the zygote, and the nodes, which are the zygote's children. Evaluations are left out."""
        if not self._known:
            zygote = self._command.children()[0]
            nodes = sorted(zygote.children(), key=lambda process: process.pid)
            named = [("coordinator", self._command), ("zygote", zygote)]
            named += [(f"node {i}", process) for i, process in enumerate(nodes)]
            self._known = {process.pid: (name, process) for name, process in named}
        return list(self._known.values())

    def _round(self) -> int:
        """The last round that node 0 has recorded; -1 if there is none."""
        for file in self._folder.rglob("nodes/0.jsonl"):
            for line in reversed(file.read_text().splitlines()):
                if (record := _parsed(line)) is not None and "round" in record:
                    return int(record["round"])
        return -1


def _proportional(pid: int) -> int:
    """The anonymous memory of a process in bytes; of shared memory its share. The sum over all processes is what they
    use together, without files, which other programs may use too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))


def _parsed(line: str) -> dict[str, Any] | None:
    """The record in a line; None if the node has not written all of it yet."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def run(nodes: int, rounds: int, dynamic: bool, interval: float) -> dict[str, list[Sample]]:
    """Run the experiment, and return the samples of each process."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = folder / "soak.toml"
        file.write_text(tomli_w.dumps(experiment(nodes, rounds, dynamic)))
        command = [sys.executable, "-m", "shoal", "run", str(file), "--out", str(folder / "runs")]
        with (folder / "output").open("w+") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            sampler = Sampler(psutil.Process(process.pid), folder)
            shown = time.monotonic()
            while process.poll() is None:
                time.sleep(interval)
                round = sampler.take()
                if time.monotonic() - shown > 30:
                    shown = time.monotonic()
                    print(f"  round {round} of {rounds}", flush=True)
            output.seek(0)
            if process.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{output.read()}")
    return sampler.samples


def counts(sample: Sample, rounds: int, begin: int = WARM_UP_ROUNDS) -> bool:
    """Whether the sample is after round `begin` and before the end. Sampling all processes takes some rounds."""
    return begin <= sample.round < 0.97 * rounds


def first_and_last(
    samples: list[Sample], rounds: int, begin: int = WARM_UP_ROUNDS
) -> tuple[list[Sample], list[Sample]]:
    """The first and the last tenth of the samples after round `begin`, without those of nodes that finish."""
    counted = [sample for sample in samples if counts(sample, rounds, begin)]
    size = max(1, len(counted) // 10)
    return counted[:size], counted[-size:]


def growth(processes: list[list[Sample]], rounds: int, what: str, title: str, begin: int = WARM_UP_ROUNDS) -> Figure:
    """The growth of the memory of some processes after round `begin`, in percent."""
    first = last = 0.0
    for samples in processes:
        tenths = first_and_last(samples, rounds, begin)
        first += statistics.median(getattr(sample, what) for sample in tenths[0]) / len(processes)
        last += statistics.median(getattr(sample, what) for sample in tenths[1]) / len(processes)
    note = f"mean: {first / 2**20:.2f} MiB at first, {last / 2**20:.2f} MiB at the end"
    return Figure(title, 100 * (last / first - 1), "%", at_most=2, note=note)


def figures(samples: dict[str, list[Sample]], rounds: int) -> list[Figure]:
    nodes = [own for name, own in samples.items() if name.startswith("node")]
    found = [
        growth(list(samples.values()), rounds, "proportional", "all processes: growth of anonymous memory (PSS)"),
        growth(nodes, rounds, "uss", "nodes: growth of private memory"),
        growth(nodes, rounds, "uss", "… in the second half of the run", rounds // 2),
        growth(nodes, rounds, "anonymous", "nodes: growth of anonymous memory"),
        growth([samples["coordinator"]], rounds, "rss", "coordinator: growth of RSS"),
        growth([samples["zygote"]], rounds, "rss", "zygote: growth of RSS"),
    ]
    for what in COUNTS:
        found_counts = {name: _counts(own, rounds, what) for name, own in samples.items()}
        largest = max(abs(last - first) for first, last in found_counts.values())
        at_end = ", ".join(f"{name} {found_counts[name][1]:g}" for name in ("coordinator", "zygote", "node 0"))
        found.append(Figure(what, largest, "", at_most=0, note=f"largest change of a process; at the end: {at_end}"))
    return found


def course(samples: dict[str, list[Sample]], rounds: int) -> str:
    """The mean private memory of nodes in each tenth of the samples after the warm-up, in MiB."""
    nodes = [[s.uss for s in own if counts(s, rounds)] for name, own in samples.items() if name.startswith("node")]
    tenths = []
    for tenth in range(10):
        parts = [own[len(own) * tenth // 10 : max(1, len(own) * (tenth + 1) // 10)] for own in nodes]
        tenths.append(statistics.mean(statistics.median(part) for part in parts if part) / 2**20)
    return ", ".join(f"{mib:.2f}" for mib in tenths)


def _counts(samples: list[Sample], rounds: int, what: str) -> tuple[float, float]:
    """A count in the first and in the last tenth."""
    first, last = (statistics.median(getattr(s, what) for s in tenth) for tenth in first_and_last(samples, rounds))
    return first, last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--dynamic", action="store_true", help="a new graph in every round")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between samples")
    given = parser.parse_args()
    if given.rounds < 2 * WARM_UP_ROUNDS:
        parser.error(f"--rounds {given.rounds}: expected at least {2 * WARM_UP_ROUNDS}")
    started = time.monotonic()
    samples = run(given.nodes, given.rounds, given.dynamic, given.interval)
    counted = sum(counts(sample, given.rounds) for sample in samples["coordinator"])
    title = f"Soak: {given.nodes} processes, {given.rounds} rounds, {counted} samples of each process"
    show(title, figures(samples, given.rounds))
    print(f"Private memory of nodes in each tenth of the time after round {WARM_UP_ROUNDS}, mean, in MiB:")
    print(course(samples, given.rounds))
    print(f"{time.monotonic() - started:.0f} s in total")


if __name__ == "__main__":
    main()
