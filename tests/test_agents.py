"""Runs on several machines: agents, sealed links, files and records, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import SMALL, until
from disks import fill, small_disk
from machines import Machines, can_make_machines, end, machines
from shoal.experiment import Experiment
from shoal.results.records import Round, RunFolder

pytestmark = pytest.mark.slow

NODES = 12
QUICK = ["--engine", "processes", "--set", f"nodes={NODES}", "--set", "evaluation.samples=50"]
LONG = ["--set", "algorithm.rounds=150", "--set", "evaluation.every=50", "--set", "processes.receive_timeout=3"]
root = pytest.mark.skipif(not can_make_machines(), reason="network namespaces need root and iproute2")

PLUGIN = '''
from dataclasses import dataclass
import numpy as np
from shoal import Payload


@dataclass
class Half:
    """The whole model in half precision."""

    def start(self, params): ...

    def outgoing(self, params, round):
        return Payload({"params": params.astype(np.float16)})

    def merge(self, params, received, weights):
        merged = params * np.float32(1 - sum(weights.values()))
        for peer, payload in received.items():
            merged += np.float32(weights[peer]) * payload.arrays["params"]
        return merged
'''


def shoal(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def wait_for(text: str, log: Path, seconds: float = 120.0) -> None:
    """Wait until the log contains this regular expression."""
    deadline = time.monotonic() + seconds
    while not re.search(text, log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def reference(folder: Path, **settings: Any) -> RunFolder:
    """A simulation of the same experiment, which gives the same models."""
    experiment = Experiment.from_file(folder / "small.toml", {"engine": "simulation", **settings})
    return experiment.run(folder / "alone").folder


def latest(folder: Path) -> RunFolder:
    return RunFolder(max(folder.glob("runs/*/*"), key=lambda path: path.stat().st_mtime_ns))


@dataclass
class Cluster:
    """A coordinator's machine (0) and three machines with an agent each, which trust its key."""

    machines: Machines
    folder: Path
    agents: list[subprocess.Popen[bytes]]

    @property
    def addresses(self) -> str:
        return ",".join(f"{self.machines.address(machine)}:7700" for machine in (1, 2, 3))

    def start(self, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        keys = ["--key", "keys/coordinator.key_secret", "--trust", "keys/agent.key"]
        log = self.folder / f"run-{time.monotonic_ns()}.log"
        out = ["--out", str(self.folder / "runs")]
        given = ["run", "small.toml", "--agents", self.addresses, *keys, *out, *QUICK, *arguments]
        return self.machines.start(0, given, log, folder=self.folder), log


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "small.toml").write_text(SMALL)
    assert shoal("keys", "make", "keys", "--name", "coordinator", "--name", "agent", folder=folder).returncode == 0
    with machines(4) as made:
        agents = []
        try:
            for machine, name in ((1, "a"), (2, "b"), (3, "c")):
                given = ["--key", "keys/agent.key_secret", "--trust", "keys/coordinator.key", "--name", name]
                listen = ["agent", "--listen", f"{made.address(machine)}:7700"]
                log = folder / f"{name}.log"
                agents.append(made.start(machine, [*listen, *given], log, folder=folder))
                wait_for("listens at", log)
            yield Cluster(made, folder, agents)
        finally:
            end(*agents)


@pytest.fixture(scope="module")
def unknown_coordinator(cluster: Cluster) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A coordinator whose key the agents do not know. It tries to reach an agent while other tests run."""
    made = shoal("keys", "make", "other", "--name", "coordinator", folder=cluster.folder)
    assert made.returncode == 0, made.stderr
    log = cluster.folder / "other.log"
    keys = ["--key", "other/coordinator.key_secret", "--trust", "keys/agent.key"]
    given = ["run", "small.toml", "--agents", f"{cluster.machines.address(1)}:7700", *keys, *QUICK]
    run = cluster.machines.start(0, given, log, folder=cluster.folder)
    yield run, log
    end(run)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> RunFolder:
    """The run of one machine."""
    return reference(cluster.folder, **{"nodes": NODES, "evaluation.samples": 50})


@root
def test_three_machines_give_the_models_of_one_and_the_same_records(
    cluster: Cluster, expected: RunFolder, unknown_coordinator: object
) -> None:
    run, log = cluster.start()
    assert run.wait(200) == 0, log.read_text()
    folder = latest(cluster.folder)
    ours, theirs = folder.read_summary(), expected.read_summary()
    for key in ("digest", "bytes_sent", "messages_sent", "accuracy", "rounds", "status"):
        assert ours[key] == theirs[key], key
    assert json.loads(folder.mapping.read_text()) == {"a": "0-3", "b": "4-7", "c": "8-11"}
    assert tomllib.loads(folder.experiment.read_text())["processes"]["sealed"], "links between machines are sealed"
    assert ours["unauthenticated_connections"] == 0
    for node in range(NODES):
        assert [r.round for r in folder.read(node) if isinstance(r, Round)] == [0, 1, 2, 3]
        assert folder.model(node).read_bytes() == expected.model(node).read_bytes()
    assert len(list(folder.read_averages())) == 2


@root
def test_a_machine_that_is_cut_off_and_an_agent_that_is_killed_fail_and_the_others_finish(cluster: Cluster) -> None:
    run, log = cluster.start(*LONG)
    try:
        wait_for("round [1-9]", log)  # not every round is shown
        family = psutil.Process(cluster.agents[2].pid).children(recursive=True)
        agent = next(p for p in [psutil.Process(cluster.agents[2].pid), *family] if "agent" in p.cmdline())
        cluster.machines.cut_off(2)
        agent.send_signal(signal.SIGKILL)
        assert run.wait(200) == 3, log.read_text()
    finally:
        cluster.machines.connect_again(2)
        end(run)
    folder = latest(cluster.folder)
    summary = folder.read_summary()
    assert summary["status"] == "incomplete"
    assert sorted(map(int, summary["lost"])) == list(range(4, 12))
    for name in ("b", "c"):
        assert f"agent '{name}' is lost" in log.read_text()
    for node in range(4):
        assert [r.round for r in folder.read(node) if isinstance(r, Round)] == list(range(150))
    until(lambda: not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])


@root
def test_an_agent_runs_nothing_for_a_coordinator_whose_key_it_does_not_know(
    cluster: Cluster, unknown_coordinator: tuple[subprocess.Popen[bytes], Path]
) -> None:
    run, log = unknown_coordinator
    assert run.wait(120) == 2
    assert f"the agent at {cluster.machines.address(1)}:7700 cannot be reached" in log.read_text()
    assert "rejected an unauthenticated connection" in (cluster.folder / "a.log").read_text()


# Agents on this machine


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "half.py").write_text(PLUGIN)

    def start(name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "shoal", "agent", "--name", name, *arguments]
            process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env={**os.environ, **environment})
        started.append(process)
        return process

    yield start
    end(*started)


def listening(name: str, folder: Path) -> str:
    """The address of an agent that listens at any free port."""
    wait_for("listens at", folder / f"{name}.log")
    return (folder / f"{name}.log").read_text().split("listens at ")[1].split()[0]


def test_agents_join_a_coordinator_and_plug_ins_travel_where_code_is_allowed(
    local: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, unused_port: int
) -> None:
    agents = [local(name, "--join", f"127.0.0.1:{unused_port}", "--allow-code", "--once") for name in ("b", "a")]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "half.py").write_text("from precision import HALF\n" + PLUGIN.replace("np.float16", "HALF"))
    (tmp_path / "code" / "precision.py").write_text("HALF = 'float16'")  # a module beside the plug-in travels with it
    plug_in = ["--set", 'sharing={name="code/half.py:Half"}', "--engine", "processes"]
    alone = reference(tmp_path, sharing={"name": "code/half.py:Half"})
    joined = shoal(
        "run", "small.toml", *plug_in, "--listen", f"127.0.0.1:{unused_port}", "--expect", "2", folder=tmp_path
    )
    assert joined.returncode == 0, joined.stdout + joined.stderr
    assert [agent.wait(30) for agent in agents] == [0, 0]
    ours = latest(tmp_path)
    assert ours.read_summary()["digest"] == alone.read_summary()["digest"]
    assert json.loads(ours.mapping.read_text()) == {"a": "0-2", "b": "3-5"}


def test_an_agent_rejects_code_and_unknown_machines_and_serves_the_next_run(
    local: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    local("a", "--listen", "127.0.0.1:0")
    address = listening("a", tmp_path)
    for given, problem in (
        (["--set", 'sharing={name="half.py:Half"}'], "this agent accepts no code; start it with --allow-code"),
        (
            ["--set", 'sharing={name="shoal.sharing.full:FullSharing"}'],
            "names the code 'shoal.sharing.full:FullSharing'",
        ),
        (["--set", 'mapping={name="linear", machines=["a", "z"]}'], "placed on 'z', and no agent has this name"),
        (["--set", "dataset.name=cifar10"], "cifar10"),
    ):
        failed = shoal("run", "small.toml", "--engine", "processes", "--agents", address, *given, folder=tmp_path)
        assert failed.returncode == 2, failed.stdout + failed.stderr
        assert problem in " ".join(failed.stderr.split())
        assert not list((tmp_path / "runs").iterdir())


def _nodes_of(agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The nodes of an agent: the children of its zygote. The zygote for the next run has none."""
    return [node for zygote in psutil.Process(agent.pid).children() for node in zygote.children()]


def test_an_agent_that_is_killed_and_started_again_is_used_and_nothing_stays_behind(
    local: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, unused_port: int
) -> None:
    folder = tmp_path / "agents"
    killed = local("a", "--listen", "127.0.0.1:0", "--folder", str(folder))
    address, join = listening("a", tmp_path), f"127.0.0.1:{unused_port}"
    given = ["run", "small.toml", "--engine", "processes", "--agents", address, "--listen", join, "--expect", "1"]
    log = tmp_path / "run.log"
    with log.open("wb") as output:
        run = subprocess.Popen([sys.executable, "-m", "shoal", *given], cwd=tmp_path, stdout=output, stderr=output)
    wait_for("agent 'a' is connected", log)
    (abandoned,) = folder.iterdir()
    killed.kill()
    killed.wait()
    agent = local("a", "--listen", address, "--folder", str(folder))
    wait_for("agent 'a' was restarted", log)
    joined = local("b", "--join", join, "--folder", str(folder), "--once")
    assert run.wait(120) == 0, log.read_text()
    assert joined.wait(30) == 0
    assert json.loads(latest(tmp_path).mapping.read_text()) == {"a": "0-2", "b": "3-5"}
    assert latest(tmp_path).read_summary()["status"] == "completed"
    until(lambda: not _nodes_of(agent))  # it ends its processes, and removes the files of the run
    (kept,) = until(lambda: not list(folder.glob("*/*")) and list(folder.iterdir()))
    assert kept != abandoned


@root
def test_while_the_disk_of_the_coordinator_is_full_no_node_is_ended_and_no_file_is_lost(
    local: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    alone = reference(tmp_path, model={"name": "mlp", "hidden": [900]}, algorithm={"name": "dpsgd", "rounds": 100})
    agent_folder = tmp_path / "agent"
    local("a", "--listen", "127.0.0.1:0", "--folder", str(agent_folder))
    with small_disk(tmp_path / "disk", kib=8192) as disk:
        given = ["run", "small.toml", "--engine", "processes", "--agents", listening("a", tmp_path)]
        given += ["--out", str(disk / "runs"), "--set", 'model={name="mlp", hidden=[900]}']
        given += ["--set", "algorithm.rounds=100", "--set", "processes.receive_timeout=4"]
        log = tmp_path / "run.log"
        with log.open("wb") as output:
            run = subprocess.Popen([sys.executable, "-m", "shoal", *given], cwd=tmp_path, stdout=output, stderr=output)
        until(lambda: any(path.stat().st_size for path in disk.glob("runs/*/*/nodes/*")))
        filler = fill(disk)
        wait_for("wait in memory: the disk of this machine is full", log)
        until(lambda: sum('"round":99,' in path.read_text() for path in agent_folder.glob("**/nodes/*.jsonl")) == 6)
        time.sleep(11)  # longer than the hang timeout, which is 9 s
        filler.unlink()
        assert run.wait(120) == 0, log.read_text()
        ours = RunFolder(next(disk.glob("runs/*/*")))
        assert ours.read_summary()["digest"] == alone.read_summary()["digest"]
        assert ours.read_summary()["lost"] == {}
        for node in range(ours.read_summary()["nodes"]):
            assert ours.model(node).read_bytes() == alone.model(node).read_bytes()
            rounds = [[r.round for r in folder.read(node) if isinstance(r, Round)] for folder in (ours, alone)]
            assert rounds[0] == rounds[1]


@root
def test_nodes_that_other_machines_cannot_reach_are_relayed(cluster: Cluster, expected: RunFolder) -> None:
    made, folder = cluster.machines, cluster.folder
    listen = f"{made.address(0)}:7800"
    agents = []
    for machine, name, relay in ((1, "hidden-1", ["--relay"]), (2, "hidden-2", ["--relay"]), (3, "open", [])):
        given = ["agent", "--join", listen, "--once", "--name", name, *relay]
        keys = ["--key", "keys/agent.key_secret", "--trust", "keys/coordinator.key"]
        agents.append(made.start(machine, [*given, *keys], folder / f"{name}.log", folder=folder))
    try:
        keys = ["--key", "keys/coordinator.key_secret", "--trust", "keys/agent.key"]
        given = ["run", "small.toml", "--listen", listen, "--expect", "3", *keys, *QUICK, "--out", "relayed"]
        log = folder / "relayed.log"
        run = made.start(0, given, log, folder=folder)
        assert run.wait(250) == 0, log.read_text()
    finally:
        end(*agents)
    relayed = RunFolder(next((folder / "relayed").glob("*/*")))
    assert relayed.read_summary()["digest"] == expected.read_summary()["digest"]


def test_agents_are_started_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    stand_in = tmp_path / "bin" / "ssh"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\necho "$1" >> ssh.log\nexec sh -c "$2"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "agents.toml").write_text(
        f'[[agent]]\nname = "x"\naddress = "127.0.0.1:{unused_port}"\nssh = "me@x"\n'
        f'command = "{Path(sys.executable).parent}/shoal"\n'
    )
    given = ["run", "small.toml", "--engine", "processes", "--agents", "agents.toml"]
    done = shoal(*given, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ssh.log").read_text() == "me@x\n"
    assert json.loads(latest(tmp_path).mapping.read_text()) == {"x": "0-5"}
    (tmp_path / "agents.toml").write_text('[[agent]]\naddress = "127.0.0.1:1"\nssh = "y"\ncommand = "absent"\n')
    failed = shoal(*given, folder=tmp_path)
    assert failed.returncode == 2
    assert "'ssh y' could not start an agent" in failed.stderr


def test_a_killed_run_is_resumed_on_agents_with_the_same_models(
    local: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    rounds = ["--engine", "processes", "--set", "algorithm.rounds=12"]
    rounds += ["--set", "sharing.name=choco", "--set", "topology.dynamic=false"]
    settings = {"algorithm.rounds": 12, "sharing.name": "choco", "topology.dynamic": False}
    theirs = reference(tmp_path, **settings)
    ended = [local(name, "--listen", "127.0.0.1:0") for name in ("a", "b")]
    agents = ["--agents", ",".join(listening(name, tmp_path) for name in ("a", "b"))]
    log = tmp_path / "run.log"
    with log.open("wb") as output:
        given = ["run", "small.toml", *rounds, *agents, "--set", "checkpoint.every=2"]
        run = subprocess.Popen([sys.executable, "-m", "shoal", *given], cwd=tmp_path, stdout=output, stderr=output)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*/*/checkpoints/round-3/checkpoint.json")):
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.kill()
    run.wait()
    end(*ended)  # else the run would continue with its nodes
    local("c", "--listen", "127.0.0.1:0")
    resumed = shoal("resume", "--agents", listening("c", tmp_path), folder=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    ours = latest(tmp_path)
    for key in ("digest", "bytes_sent", "messages_sent", "accuracy", "rounds"):
        assert ours.read_summary()[key] == theirs.read_summary()[key], key
    for node in range(6):
        assert [r.round for r in ours.read(node) if isinstance(r, Round)] == list(range(12))
