"""Agents: the throughput of nodes on two machines against one, and the start of many nodes over several agents.

    sudo python benchmarks/agents.py              # throughput, about five minutes; needs root for network namespaces
    python benchmarks/agents.py --start 1000      # the start of 1,000 nodes under four agents and under one; 15 GiB

Throughput: 128 nodes train GN-LeNet over sealed links, once under one agent that uses all cores of this machine, and
once under two agents with half of the cores each, in network namespaces of their own. The figure is the median of the
ratios of the rounds per second, of runs in turns.

Start: the seconds from the command until every node has begun its first round, of agents on the loopback. The agents
are idle before: each has started the zygote of its next run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from measuring import EXAMPLES, ROOT, Figure, median, show, step

sys.path.append(str(ROOT / "tests"))  # the tests use these machines too
from machines import Machines, end, machines

NODE_BYTES = 16 * 2**20
PORT = 7700
EXAMPLE = str(EXAMPLES / "thousand-processes.toml")
SETTINGS = ["--set", "evaluation.nodes=0", "--set", "evaluation.average=false"]


def wait_for_agent(log: Path) -> None:
    deadline = time.monotonic() + 60
    while "listens at" not in log.read_text():
        if time.monotonic() > deadline:
            raise SystemExit(f"an agent did not start: {log.read_text()}")
        time.sleep(0.05)


def wait_until_idle(agent: psutil.Process) -> None:
    """Wait until the agent has a zygote for the next run, which has imported what it needs."""
    before = -1.0
    while not (zygotes := agent.children()) or (used := sum(zygotes[0].cpu_times()[:2])) != before:
        before = used if zygotes else -1.0
        time.sleep(1.0)


def summary_of(folder: Path, run: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    if run.wait():
        raise SystemExit(f"a run failed:\n{log.read_text()}")
    summary: dict[str, Any] = json.loads(next(folder.rglob("summary.json")).read_text())
    return summary


def run_on_machines(made: Machines, keys: Path, agents: int, nodes: int, rounds: int) -> float:
    """Return the rounds per second of a run under this number of agents, which share the cores of this machine."""
    cores = max(1, len(os.sched_getaffinity(0)) // agents)
    with tempfile.TemporaryDirectory() as temporary:
        folder, started = Path(temporary), []
        try:
            for machine in range(1, agents + 1):
                listen = ["agent", "--listen", f"{made.address(machine)}:{PORT}", "--cores", str(cores)]
                trust = ["--key", str(keys / "agent.key_secret"), "--trust", str(keys / "coordinator.key")]
                log = folder / f"agent-{machine}.log"
                started.append(made.start(machine, [*listen, *trust, "--name", f"m{machine}"], log))
                wait_for_agent(log)
            addresses = ",".join(f"{made.address(machine)}:{PORT}" for machine in range(1, agents + 1))
            trust = ["--key", str(keys / "coordinator.key_secret"), "--trust", str(keys / "agent.key")]
            size = ["--set", f"nodes={nodes}", "--set", f"algorithm.rounds={rounds}", "--out", str(folder / "runs")]
            log = folder / "run.log"
            run = made.start(0, ["run", EXAMPLE, "--agents", addresses, *trust, *SETTINGS, *size], log)
            return rounds / float(summary_of(folder, run, log)["time"]["wall_s"])
        finally:
            end(*started)


def measure_throughput(repetitions: int, nodes: int, rounds: int) -> list[Figure]:
    ratios = []
    with tempfile.TemporaryDirectory() as temporary, machines(3) as made:
        keys = Path(temporary) / "keys"
        command = [sys.executable, "-m", "shoal", "keys", "make", str(keys), "--name", "coordinator", "--name", "agent"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for repetition in range(repetitions):
            found = {}
            for agents in (1, 2) if repetition % 2 else (2, 1):
                with step(f"{nodes} nodes under {agents} agents"):
                    found[agents] = run_on_machines(made, keys, agents, nodes, rounds)
            ratios.append(found[2] / found[1])
            print(f"  rounds per second: one agent {found[1]:.3f}, two {found[2]:.3f}: {ratios[-1]:.3f}", flush=True)
    what = f"GN-LeNet, {nodes} nodes: throughput of two agents / one"
    return [Figure(what, median(ratios), "", at_least=0.9, note=f"median of {repetitions}")]


def start_on_loopback(agents: int, nodes: int) -> float:
    """Return the start-up time of a run under this number of agents."""
    cores = max(1, len(os.sched_getaffinity(0)) // agents)
    with tempfile.TemporaryDirectory() as temporary:
        folder, started, logs = Path(temporary), [], []
        try:
            for number in range(agents):
                logs.append(folder / f"agent-{number}.log")
                started.append(shoal(["agent", "--listen", "127.0.0.1:0", "--cores", str(cores)], logs[-1]))
            for log in logs:
                wait_for_agent(log)
            for agent in started:
                wait_until_idle(psutil.Process(agent.pid))
            addresses = ",".join(log.read_text().split("listens at ")[1].split()[0] for log in logs)
            size = ["--set", f"nodes={nodes}", "--set", "algorithm.rounds=1", "--out", str(folder / "runs")]
            log = folder / "run.log"
            run = shoal(["run", EXAMPLE, "--agents", addresses, *SETTINGS, *size], log)
            return float(summary_of(folder, run, log)["time"]["startup_s"])
        finally:
            end(*started)


def shoal(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, "-m", "shoal", *arguments], stdout=output, stderr=output)


def use_memory(nodes: int) -> None:
    """Write to as much memory as a run needs, and free it.

    In a virtual machine, the host assigns memory at the first write, and takes it back some time after it was freed.
    Without this, the first run would be slower than the second.
    """
    np.ones(min(nodes * NODE_BYTES, int(0.8 * psutil.virtual_memory().available)), np.uint8)


def measure_start(repetitions: int, nodes: int) -> list[Figure]:
    ratios = []
    for repetition in range(repetitions):
        found = {}
        for agents in (1, 4) if repetition % 2 else (4, 1):
            with step(f"start of {nodes} nodes under {agents} agents"):
                use_memory(nodes)
                found[agents] = start_on_loopback(agents, nodes)
        ratios.append(found[4] / found[1])
        print(f"  seconds: one agent {found[1]:.1f}, four {found[4]:.1f}: {ratios[-1]:.3f}", flush=True)
    what = f"start of {nodes} nodes: four agents / one"
    return [Figure(what, median(ratios), "", at_most=1.2, note=f"median of {repetitions}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, metavar="NODES", help="measure the start of so many nodes instead")
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    if given.start is None:
        show("agents: throughput", measure_throughput(given.repetitions, given.nodes, given.rounds))
    else:
        show("agents: start", measure_start(given.repetitions, given.start))


if __name__ == "__main__":
    main()
