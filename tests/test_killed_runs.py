"""Runs whose processes are all killed, and resumed: they end with the models of a run that was not interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import SMALL, until
from process_runs import NODES, ROUNDS, Started, started
from shoal.experiment import Experiment, parse_overrides
from shoal.results.checkpoints import Checkpoints
from shoal.results.records import Evaluation, Event, Round, RunFolder

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[str, ...]] = {
    "evaluated during the run": (),
    "evaluated after the run": ("network={name='uniform', latency=0.001, upload=100.0, download=100.0}",),
    "sealed, with a node that crashed": ("processes.sealed=true", "fault=[{kind='crash', nodes='2', round=0}]"),
}


def kill_all(going: Started) -> None:
    """Kill the coordinator, the zygote and all nodes at once."""
    coordinator = psutil.Process(going.process.pid)
    for process in [*coordinator.children(recursive=True), coordinator]:
        os.kill(process.pid, signal.SIGKILL)
    going.process.wait()


def resumed(root: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "shoal", "resume", "runs"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def killed_after(round: int, root: Path, *settings: str, slow: float | None = 0.3) -> RunFolder:
    """A run that was killed soon after the checkpoint of `round` was complete."""
    with started(root, "checkpoint.every=1", *settings, slow=slow) as going:
        files = Checkpoints(going.folder)
        until(lambda: files.is_complete(round))
        kill_all(going)
        return going.folder


def reference(root: Path, *settings: str) -> dict[str, Any]:
    """The summary of a simulation of the same experiment, in this process."""
    root.mkdir()
    (root / "small.toml").write_text(SMALL)
    changed = parse_overrides(["engine=simulation", *settings])
    return Experiment.from_file(root / "small.toml", changed).run(root / "runs").summary


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(name: str, tmp_path: Path) -> None:
    settings = ("evaluation.every=1", *CASES[name])
    expected = reference(tmp_path / "reference", *settings)
    folder = killed_after(1, tmp_path / "killed", *settings)
    code, out = resumed(tmp_path / "killed")
    assert code == (3 if expected["lost"] else 0), out
    summary = folder.read_summary()
    assert summary["digest"] == expected["digest"]
    assert (summary["bytes_sent"], summary["messages_sent"]) == (expected["bytes_sent"], expected["messages_sent"])
    lost = {int(node) for node in expected["lost"]}
    for node in set(range(NODES)) - lost:
        records = list(folder.read(node))
        assert [r.round for r in records if isinstance(r, Round)] == list(range(ROUNDS))
        assert [r.round for r in records if isinstance(r, Evaluation)] == list(range(ROUNDS))
        assert [r.what for r in records if isinstance(r, Event)].count("resumed") == 1
        assert [r.time for r in records if isinstance(r, Round)] == sorted(
            r.time for r in records if isinstance(r, Round)
        )
    assert sorted(r.round for r in folder.read_averages()) == list(range(ROUNDS))  # type: ignore[union-attr]
    assert summary["accuracy"] == pytest.approx(expected["accuracy"])
    assert not (folder.path / "checkpoints" / "kept").is_dir() or not any(
        path.is_file() for path in (folder.path / "checkpoints" / "kept").rglob("*")
    ), "models that were evaluated take no space"


def test_models_that_are_evaluated_by_the_clock_are_evaluated_once_each(tmp_path: Path) -> None:
    folder = killed_after(1, tmp_path, "evaluation={seconds=0.25}")
    code, out = resumed(tmp_path)
    assert code == 0, out
    for node in range(NODES):
        ticks = [r.tick for r in folder.read(node) if isinstance(r, Evaluation)]
        assert ticks == list(range(1, len(ticks) + 1))
    averages = [r.tick for r in folder.read_averages()]  # type: ignore[union-attr]
    assert sorted(averages) == ticks  # type: ignore[type-var]
    assert max(r.time for r in folder.read(0)) < 60, "the clock continues from the checkpoint"


def test_asynchronous_nodes_continue_from_their_latest_states(tmp_path: Path) -> None:
    folder = killed_after(
        1, tmp_path, "algorithm={name='gossip', rounds=6, period=0.3}", "topology={name='full'}", slow=None
    )
    code, out = resumed(tmp_path)
    assert code == 0, out
    assert "messages in transit at the checkpoint are lost" in " ".join(out.split())
    assert folder.read_summary()["rounds"] == 6


def test_a_run_that_was_stopped_is_resumed(tmp_path: Path) -> None:
    with started(tmp_path, "checkpoint.every=1", slow=0.3) as going:
        files = Checkpoints(going.folder)
        until(lambda: files.is_complete(1))
        going.process.send_signal(signal.SIGINT)
        assert going.end()[0] == 130
        folder = going.folder
    assert folder.read_summary()["status"] == "interrupted"
    code, out = resumed(tmp_path)
    assert code == 0, out
    assert folder.read_summary()["digest"] == reference(tmp_path / "reference")["digest"]
