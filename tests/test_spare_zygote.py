"""The zygote that an idle agent starts in advance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conftest import SMALL, is_zygote, until
from machines import end
from shoal.results.records import RunFolder

pytestmark = pytest.mark.usefixtures("no_process_is_left")


class IdleAgent:
    """An agent on the loopback of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "small.toml").write_text(SMALL)
        self._log = folder / "agent.log"
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "shoal", "agent", "--listen", "127.0.0.1:0"]
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def spare(self) -> psutil.Process:
        """The agent's zygote, once there is one."""
        found: list[psutil.Process] = until(
            lambda: [child for child in psutil.Process(self.process.pid).children() if is_zygote(child)]
        )
        assert len(found) == 1
        return found[0]

    def run(self) -> RunFolder:
        address = until(lambda: self._log.read_text().partition("listens at ")[2].split())[0]
        settings = ["--engine", "processes", "--set", "evaluation.samples=50", "--agents", address]
        command = [sys.executable, "-m", "shoal", "run", "small.toml", *settings]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return RunFolder(max(self.folder.glob("runs/*/*"), key=lambda path: path.stat().st_mtime_ns))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[IdleAgent]:
    agent = IdleAgent(tmp_path)
    try:
        yield agent
    finally:
        end(agent.process)


def test_a_run_uses_the_zygote_that_the_idle_agent_has_started(agent: IdleAgent) -> None:
    spare = agent.spare()
    until(lambda: any("libtorch" in mapped.path for mapped in spare.memory_maps()))  # before there is a run
    status = json.loads(agent.run().summary.read_text())["status"]
    assert status == "completed"
    assert not spare.is_running(), "it belonged to the run, which has ended"
    until(lambda: agent.spare().pid != spare.pid)  # for the next run


def test_a_run_starts_although_the_spare_zygote_was_killed(agent: IdleAgent) -> None:
    spare = agent.spare()
    spare.kill()
    until(lambda: not is_zygote(spare))
    folder = agent.run()
    assert json.loads(folder.summary.read_text())["status"] == "completed"
