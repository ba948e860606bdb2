"""Checkpoints: what they cost, and whether a run that is killed ends like one that is not.

    python benchmarks/checkpoints.py                # the cost, about five minutes
    python benchmarks/checkpoints.py --short        # the same with fewer repetitions
    python benchmarks/checkpoints.py --kills 10     # ten runs of each algorithm, killed at random moments, and resumed

Cost: 8 nodes train GN-LeNet as processes, with and without a checkpoint after every round, in turns. The figure is the
median of the ratios of their training times.

Kills: all processes of a run (coordinator, zygote and nodes) are killed with SIGKILL at a random moment, and the run is
resumed, which may be killed too. The digest of the final models must be that of a run that was not interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from measuring import Figure, median, shoal_run, show, step

CASES: dict[str, dict[str, Any]] = {
    "dpsgd": {"algorithm": {"name": "dpsgd"}},
    "choco": {"algorithm": {"name": "dpsgd"}, "sharing": {"name": "choco"}},
    "gradient tracking": {"algorithm": {"name": "gradient-tracking"}},
    "fedavg": {"algorithm": {"name": "fedavg", "fraction": 0.5, "server": "momentum"}},
    "secure": {"algorithm": {"name": "dpsgd"}, "sharing": {"name": "secure"}, "topology": {"name": "full"}},
}
EXPERIMENT: dict[str, Any] = {
    "nodes": 4,
    "seed": 11,
    "dataset": {"name": "digits", "partition": {"name": "shards", "per_node": 2}},
    "model": {"name": "mlp"},
    "topology": {"name": "ring"},
    "training": {"lr": 0.05, "batch_size": 32, "local_steps": 4},
    "evaluation": {"every": 10},
    "simulation": {"batching": "off"},
    "checkpoint": {"every": 1, "keep": 2},
}
COST = {"nodes": 8, "evaluation.nodes": 0, "evaluation.average": False, "dataset.samples": 2048, "algorithm.rounds": 60}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shoal", *arguments]


def digest(runs: Path) -> str | None:
    """The digest in the summary of the one run below `runs`; None if it has no summary."""
    files = list(runs.rglob("summary.json"))
    if not files:
        return None
    summary = json.loads(files[0].read_text())
    return summary["digest"] if summary["status"] == "completed" else None


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all its descendants at once."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def manifests(runs: Path) -> set[str]:
    """The manifests below `runs`. Folders may be removed meanwhile, which `Path.rglob` does not allow."""
    return {os.path.join(folder, "checkpoint.json") for folder, _, files in os.walk(runs) if "checkpoint.json" in files}


def run_and_kill(arguments: list[str], runs: Path, seconds: float) -> bool:
    """Run a command, and kill it `seconds` after its first checkpoint. Returns whether it was killed before its end."""
    before = manifests(runs)
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not manifests(runs) - before:
        time.sleep(0.002)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill_all(process)
        return True
    return False


def check_kills(name: str, engine: str, kills: int, rounds: int, rng: random.Random) -> tuple[int, int]:
    """Return how many runs ended with the right models, and how often one was killed."""
    table = {**EXPERIMENT, **CASES[name], "engine": engine}
    table["algorithm"] = {**table["algorithm"], "rounds": rounds}
    equal = killed = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.toml"
        file.write_text(tomli_w.dumps(table))
        whole = Path(folder) / "whole"
        subprocess.run(command("run", str(file), "--out", str(whole)), check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(next(whole.rglob("summary.json")).read_text())
        seconds, expected = summary["time"]["wall_s"], summary["digest"]
        for i in range(kills):
            runs = Path(folder) / str(i)
            runs.mkdir()
            killed += run_and_kill(command("run", str(file), "--out", str(runs)), runs, rng.uniform(0, seconds))
            if rng.random() < 0.3 and digest(runs) is None:
                killed += run_and_kill(command("resume", str(runs)), runs, rng.uniform(0, seconds / 2))
            if digest(runs) is None:
                done = subprocess.run(command("resume", str(runs)), capture_output=True, text=True, check=False)
                if done.returncode:
                    print(done.stdout[-2000:], done.stderr[-2000:])
            same = digest(runs) == expected
            equal += same
            if not same:
                print(f"{name}, {engine}, kill {i}: digest {digest(runs)}, expected {expected}")
    return equal, killed


def measure_kills(kills: int, engines: list[str], rounds: int, seed: int) -> list[Figure]:
    rng, figures = random.Random(seed), []
    for engine in engines:
        for name in CASES:
            with step(f"{name}, {engine}"):
                equal, killed = check_kills(name, engine, kills, rounds, rng)
            figures.append(
                Figure(f"{name}, {engine}", equal, f"of {kills} equal", at_least=kills, note=f"{killed} kills")
            )
    return figures


def measure_cost(repetitions: int) -> list[Figure]:
    ratios: dict[str, list[float]] = {"wall_s": [], "total_cpu_s": []}
    for i in range(repetitions):
        times = {}
        for every in (0, 1) if i % 2 else (1, 0):
            settings = {**COST, "checkpoint.every": every}
            times[every] = shoal_run("thousand-processes.toml", settings)["time"]
        for key, found in ratios.items():
            found.append(times[1][key] / times[0][key])
            print(f"  {key}: without {times[0][key]:.2f}, with {times[1][key]:.2f}: {found[-1]:.3f}", flush=True)
    what = "GN-LeNet, 8 processes, a checkpoint after every round"
    note = f"with / without, median of {repetitions}"
    return [
        Figure(f"{what}: wall time", median(ratios["wall_s"]), "", at_most=1.05, note=note),
        Figure(f"{what}: processor time of nodes", median(ratios["total_cpu_s"]), "", at_most=1.05, note=note),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--kills", type=int, help="kill so many runs of each algorithm, and measure no cost")
    parser.add_argument("--engine", choices=["processes", "simulation"], help="default: both")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.kills is None:
        show("checkpoints: cost", measure_cost(4 if given.short else 10))
    else:
        engines = [given.engine] if given.engine else ["processes", "simulation"]
        show("checkpoints: killed runs", measure_kills(given.kills, engines, given.rounds, given.seed))


if __name__ == "__main__":
    main()
