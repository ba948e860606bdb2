"""The batch script of `shoal deploy slurm`, executed on this machine with a stand-in for srun."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import SMALL, until
from process_runs import HELD
from shoal.experiment import Experiment

SRUN = Path(__file__).with_name("stand_in_srun.sh")
AGENTS = 2
PLUG_IN = "algorithm={name='held.py:Held', rounds=1, held=1}"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_process_is_left")]


@dataclass
class Cluster:
    """A folder with a deployment, and commands that stand in for those of a cluster."""

    folder: Path
    environment: dict[str, str]
    job: int

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "job.log").open("wb") as log:
            return subprocess.Popen(
                ["bash", "job.sh"], cwd=self.folder, env=self.environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def run(self) -> int:
        return self.start().wait(150)

    @property
    def log(self) -> str:
        logs = [self.folder / "job.log", *sorted(self.folder.glob("logs/*"))]
        return "\n".join(path.read_text() for path in logs)

    @property
    def keys(self) -> Path:
        return self.folder / f"keys-{self.job}"

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(next(self.folder.glob("runs/*/*/summary.json")).read_text())

    def processes(self) -> list[psutil.Process]:
        """All processes of the job."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURM_JOB_ID") == str(self.job) and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def deployed(tmp_path: Path, shoal: Callable[..., Any]) -> Iterator[Callable[..., Cluster]]:
    """Deploy an experiment, with a job id that no other test has."""
    clusters = []
    commands = tmp_path / "bin"
    commands.mkdir()
    _command(commands / "shoal", f'exec "{sys.executable}" -m shoal "$@"')
    _command(commands / "srun", f'exec bash "{SRUN}" "$@"')
    _command(commands / "hostname", "echo 127.0.0.1")

    def deploy(text: str, *options: str) -> Cluster:
        (tmp_path / "small.toml").write_text(text)
        arguments = ("--agents", AGENTS, "--cpus-per-task", 1, "--out", "job", *options)
        result = shoal("deploy", "slurm", "small.toml", "--set", 'engine="processes"', *arguments)
        assert result.code == 0, result
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        job = os.getpid() * 100 + len(clusters) + time.monotonic_ns() % 100
        environment |= {
            "PATH": f"{commands}:{environment['PATH']}",
            "SLURM_JOB_ID": str(job),
            "SLURM_SUBMIT_DIR": str(tmp_path / "job"),
        }
        clusters.append(Cluster(tmp_path / "job", environment, job))
        return clusters[-1]

    yield deploy
    for cluster in clusters:
        left = cluster.processes()
        for process in left:
            process.kill()
        assert not left


def _command(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


LONG = SMALL.replace("rounds = 4", "rounds = 100_000")


def wait_for_first_record(cluster: Cluster, job: subprocess.Popen[bytes]) -> None:
    until(lambda: list(cluster.folder.glob("runs/*/*/nodes/0.jsonl")) or job.poll() is not None)
    assert job.poll() is None, cluster.log


def test_a_job_gives_the_models_of_one_machine(tmp_path: Path, deployed: Callable[..., Cluster]) -> None:
    cluster = deployed(SMALL)
    assert cluster.run() == 0, cluster.log
    assert cluster.summary["status"] == "completed"
    alone = Experiment.from_file(tmp_path / "small.toml", {"engine": "simulation"}).run(tmp_path / "alone")
    assert cluster.summary["digest"] == alone.summary["digest"]
    mapping = json.loads(next(cluster.folder.glob("runs/*/*/mapping.json")).read_text())
    assert sorted(mapping) == ["agent-0", "agent-1"]
    assert sorted(path.name for path in cluster.folder.glob("logs/*")) == [
        f"{cluster.job}-agent-{i}.log" for i in (0, 1)
    ]
    assert not cluster.keys.exists()


def test_only_the_user_can_read_the_keys_and_sigterm_ends_everything(deployed: Callable[..., Cluster]) -> None:
    cluster = deployed(LONG)
    job = cluster.start()
    wait_for_first_record(cluster, job)
    for path in [cluster.keys, *cluster.keys.iterdir()]:
        assert not stat.S_IMODE(path.stat().st_mode) & (0o077 if path.suffix != ".key" else 0o022), path
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM, cluster.log
    assert cluster.summary["status"] == "interrupted"
    assert not cluster.processes()
    assert not cluster.keys.exists()


def test_a_job_that_is_submitted_again_resumes_its_run(tmp_path: Path, deployed: Callable[..., Cluster]) -> None:
    (tmp_path / "held.py").write_text(HELD)
    held = "algorithm={name='held.py:Held', rounds=4, held=3}"
    cluster = deployed(SMALL, "--set", held, "--set", "checkpoint.every=1")
    job = cluster.start()
    until(lambda: list(cluster.folder.glob("runs/*/*/checkpoints/round-1/checkpoint.json")) or job.poll() is not None)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM, cluster.log
    assert cluster.summary["status"] == "interrupted"
    (cluster.folder / "go-on").touch()
    assert cluster.run() == 0, cluster.log
    assert "resumed from the checkpoint of round" in cluster.log
    (summary,) = [json.loads(path.read_text()) for path in cluster.folder.glob("runs/*/*/summary.json")]
    assert summary["status"] == "completed"
    alone = Experiment.from_file(tmp_path / "small.toml", {"engine": "simulation"}).run(tmp_path / "alone")
    assert summary["digest"] == alone.summary["digest"]


def test_a_coordinator_that_fails_ends_the_job(deployed: Callable[..., Cluster]) -> None:
    cluster = deployed(SMALL)
    (cluster.folder / "experiment.toml").write_text("nodez = 3\n")
    assert cluster.run() == 2, cluster.log
    assert "nodez" in cluster.log
    assert not cluster.processes()
    assert not cluster.keys.exists()


def test_agents_that_are_ended_by_sigterm_end_the_job(deployed: Callable[..., Cluster]) -> None:
    cluster = deployed(LONG)
    job = cluster.start()
    wait_for_first_record(cluster, job)
    step = next(p for p in cluster.processes() if str(SRUN) in p.cmdline())
    step.terminate()  # as SLURM does on pre-emption
    assert job.wait(60) not in (0, None), cluster.log
    assert not cluster.processes()


def test_given_keys_and_plug_ins_are_used_and_more_agents_than_nodes_end_too(
    tmp_path: Path, deployed: Callable[..., Cluster], shoal: Callable[..., Any]
) -> None:
    (tmp_path / "held.py").write_text(HELD)
    shoal("keys", "make", "own keys", "--name", "coordinator", "--name", "agent")
    few = ("--set", "nodes=2", "--set", 'topology={name="ring"}', "--agents", "3")
    cluster = deployed(SMALL, "--keys", "own keys", "--set", PLUG_IN, *few)
    assert cluster.run() == 0, cluster.log
    assert cluster.summary["status"] == "completed"
    assert "gets no nodes" in cluster.log
    assert (tmp_path / "own keys" / "agent.key_secret").exists()
    assert not cluster.keys.exists()


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("SLURM_JOB_ID", "", "submit it with sbatch"),
        ("SLURM_SUBMIT_DIR", "/", "there is no experiment.toml in /"),
        ("PATH", "/usr/bin:/bin", "there is no command shoal"),
    ],
)
def test_a_job_that_cannot_start_names_the_reason(
    variable: str, value: str, problem: str, deployed: Callable[..., Cluster]
) -> None:
    cluster = deployed(SMALL)
    cluster.environment[variable] = value
    assert cluster.run() == 2, cluster.log
    assert problem in cluster.log
