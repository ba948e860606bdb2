"""Nodes that are killed and restarted, and a network partition: whether runs complete, and how accurate they are.

    python benchmarks/chaos.py                                  # the simulation with 20 seeds, processes with 3
    python benchmarks/chaos.py --engine simulation --seeds 2    # shorter

64 nodes run 200 rounds of D-PSGD on the digits, two shards each, on a 5-regular graph. For each seed there are two
runs. The first is quiet: its duration gives the times of the faults in the second one. In the second run, 6 nodes are
killed (SIGKILL in processes) at random times, and 3 of them are restarted after up to 20 rounds. One network partition
separates the two halves of the nodes for the duration of 20 rounds. The nodes have different speeds, so fast nodes send
their models before their peers need them.

The columns of the table:

    status       that of the run with faults, and the exit code; "incomplete" and 3 are right, because 3 nodes stay away
    accuracy     the mean of all nodes that are there at the end, without faults and with faults; target: at most
                 3 points less
    rejoined     restarted nodes that continued with the model of a peer
    old merged   models of an earlier incarnation of a restarted node that were merged in a receive that began after the
                 node had rejoined; target: 0. `traced_dpsgd.py` records which incarnation sent each merged model
    new merged   models of restarted nodes that were merged
    timeouts     receives that timed out, because of the partition or, in processes, because the machine is busy
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table

from shoal.environment.faults import Fault
from shoal.results.records import REJOINED, Event, RunFolder
from shoal.testing import Faults
from traced_dpsgd import MERGED

NODES, ROUNDS, DEGREE = 64, 200, 5
KILLED, RESTARTED = 6, 3
PARTITION_ROUNDS = 20
MAX_LOSS = 0.03
"""The largest difference of accuracies: 3 points."""
ALGORITHM = str(Path(__file__).resolve().parent / "traced_dpsgd.py") + ":TracedDPSGD"


def experiment(engine: str, seed: int, rounds: int) -> dict[str, Any]:
    table: dict[str, Any] = {
        "name": "chaos",
        "nodes": NODES,
        "seed": seed,
        "engine": engine,
        "dataset": {"name": "digits", "partition": {"name": "shards", "per_node": 2}},
        "model": {"name": "mlp"},
        "algorithm": {"name": ALGORITHM, "rounds": rounds},
        "topology": {"name": "regular", "degree": DEGREE},
        "training": {"lr": 0.1, "batch_size": 16, "local_steps": 4},
        "evaluation": {"every": 0, "average": False},
        "checkpoint": {"final": False},
    }
    if engine == "simulation":  # in processes, the speeds differ by themselves
        table["speed"] = {"name": "lognormal", "sample_seconds": 0.001, "mu": 0.0, "sigma": 0.3}
        table["network"] = {"name": "uniform", "latency": 0.01}
    return table


@dataclass(frozen=True)
class Chaos:
    """The faults of one run."""

    faults: tuple[Fault, ...]
    restarted: tuple[int, ...]
    lost: tuple[int, ...]


def draw(seed: int, seconds: float, rounds: int) -> Chaos:
    """Draw the faults of a run that takes `seconds` without them."""
    rng, round_s = random.Random(seed), seconds / rounds
    killed = rng.sample(range(NODES), KILLED)
    restarted, lost = killed[:RESTARTED], killed[RESTARTED:]
    faults = Faults()
    for node in restarted:
        faults = faults.crash(node).at(rng.uniform(0.05, 0.7) * seconds).lasting(rng.uniform(0, 20) * round_s)
    for node in lost:
        faults = faults.crash(node).at(rng.uniform(0.05, 0.9) * seconds)
    half = f"0-{NODES // 2 - 1}"
    faults = faults.partition(half).at(rng.uniform(0.1, 0.6) * seconds).lasting(PARTITION_ROUNDS * round_s)
    return Chaos(faults.schedule, tuple(sorted(restarted)), tuple(sorted(lost)))


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    code: int
    summary: dict[str, Any]
    events: list[tuple[int, Event]]


def run(table: dict[str, Any], folder: Path) -> Ended:
    file = folder / "chaos.toml"
    file.write_text(tomli_w.dumps(table))
    command = [sys.executable, "-m", "shoal", "run", str(file), "--out", str(folder / "runs")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list((folder / "runs").rglob("summary.json"))
    if not found:
        raise SystemExit(f"{' '.join(command)} wrote no summary:\n{ended.stdout}\n{ended.stderr}")
    records = RunFolder(found[0].parent).read_all()
    events = [(node, record) for node, record in records if isinstance(record, Event)]
    return Ended(ended.returncode, json.loads(found[0].read_text()), events)


@dataclass(frozen=True)
class Outcome:
    """A quiet run and a run with faults, of one seed."""

    engine: str
    seed: int
    status: str
    code: int
    quiet: float
    chaos: float
    rejoined: int
    old_merged: int
    new_merged: int
    timeouts: int
    as_planned: bool
    """Whether exactly the nodes failed that were not restarted."""

    @property
    def met(self) -> bool:
        completes = self.status == "incomplete" and self.code == 3 and self.as_planned and self.rejoined == RESTARTED
        return completes and self.quiet - self.chaos <= MAX_LOSS and not self.old_merged and self.new_merged > 0


def merges(ended: Ended, restarted: tuple[int, ...]) -> tuple[int, int]:
    """How many merged models of restarted nodes are of an earlier incarnation, and how many of the new one.

    A receive that began before the node had rejoined may merge a model that the node sent before it was killed.
    """
    rejoined = {node: event.time for node, event in ended.events if event.what == REJOINED}
    old = new = 0
    for _, event in ended.events:
        if event.what == MERGED:
            sender, born, since = event.detail.split()
            time = rejoined.get(int(sender))
            if time is not None and int(sender) in restarted:
                new += float(born) >= time
                old += float(born) < time < float(since)
    return old, new


def compare(engine: str, seed: int, rounds: int) -> Outcome:
    table = experiment(engine, seed, rounds)
    with tempfile.TemporaryDirectory() as folder:
        quiet = run(table, Path(folder))
    seconds = quiet.summary["time"]["virtual_s"] or quiet.summary["time"]["wall_s"]
    chaos = draw(seed, seconds, rounds)
    table["fault"] = [fault.to_table() for fault in chaos.faults]
    table["algorithm"]["watched"] = ", ".join(map(str, chaos.restarted))
    timeout = 10 * seconds / rounds
    table[engine] = {"receive_timeout": timeout if engine == "simulation" else max(2.0, timeout)}
    with tempfile.TemporaryDirectory() as folder:
        ended = run(table, Path(folder))
    old, new = merges(ended, chaos.restarted)
    return Outcome(
        engine,
        seed,
        ended.summary["status"],
        ended.code,
        quiet.summary["accuracy"]["mean"],
        ended.summary["accuracy"]["mean"],
        sum(event.what == REJOINED for _, event in ended.events),
        old,
        new,
        sum(event.what == "timed out" for _, event in ended.events),
        tuple(sorted(map(int, ended.summary["lost"]))) == chaos.lost,
    )


def show(outcomes: list[Outcome]) -> None:
    table = Table(title=f"Chaos: {NODES} nodes, {KILLED} killed, {RESTARTED} restarted, one partition")
    columns = ("engine", "seed", "status", "accuracy", "difference", "rejoined", "old merged", "new merged", "timeouts")
    for column in (*columns, "met"):
        table.add_column(column, justify="right" if column not in ("engine", "status") else "left")
    for o in outcomes:
        table.add_row(
            o.engine,
            str(o.seed),
            f"{o.status} ({o.code})",
            f"{o.quiet:.3f} / {o.chaos:.3f}",
            f"{100 * (o.chaos - o.quiet):+.2f}",
            f"{o.rejoined} of {RESTARTED}",
            str(o.old_merged),
            str(o.new_merged),
            str(o.timeouts),
            "yes" if o.met else "no",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    for engine in dict.fromkeys(o.engine for o in outcomes):
        own = [o for o in outcomes if o.engine == engine]
        worst = min(100 * (o.chaos - o.quiet) for o in own)
        mean = sum(100 * (o.chaos - o.quiet) for o in own) / len(own)
        print(
            f"{engine}: {sum(o.met for o in own)} of {len(own)} runs meet all targets; difference of accuracy "
            f"{mean:+.2f} points on average, {worst:+.2f} in the worst run"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["processes", "simulation"], help="default: both")
    parser.add_argument("--seeds", type=int, help="default: 20 in the simulation, 3 in processes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--jobs", type=int, default=1, help="simulations at the same time")
    given = parser.parse_args()
    started, outcomes = time.monotonic(), []
    for engine in [given.engine] if given.engine else ["simulation", "processes"]:
        seeds = range(1, 1 + (given.seeds or (20 if engine == "simulation" else 3)))
        with ThreadPoolExecutor(given.jobs if engine == "simulation" else 1) as pool:
            for outcome in pool.map(lambda seed, engine=engine: compare(engine, seed, given.rounds), seeds):
                outcomes.append(outcome)
                print(f"  {outcome}", flush=True)
    show(outcomes)
    print(f"{time.monotonic() - started:.0f} s in total")
    if not all(outcome.met for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
