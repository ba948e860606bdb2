"""Sweeps whose processes are killed or interrupted, and runs that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import CommandResult, until
from shoal.results.checkpoints import Checkpoints
from shoal.results.records import Event
from shoal.sweeps.folder import FoundRun, find_runs

pytestmark = pytest.mark.slow

Shoal = Callable[..., CommandResult]
SLOW = textwrap.dedent(
    '''
    """D-PSGD whose trainings take real time, and fail on request."""

    import time
    from dataclasses import dataclass

    from shoal.algorithms.dpsgd import DPSGD


    @dataclass(frozen=True)
    class Slow(DPSGD):
        seconds: float = 0.0
        fails: bool = False

        async def run(self, node):
            train = node.train

            async def slow_train(params, steps=None):
                time.sleep(self.seconds)
                if self.fails and node.next_round == 1:
                    raise ValueError("fails on request")
                return await train(params, steps)

            node.train = slow_train
            await super().run(node)
    '''
)


def command(seconds: float, *options: str, rounds: int = 3) -> list[str]:
    algorithm = f"algorithm={{name='slow.py:Slow', rounds={rounds}, seconds={seconds}}}"
    few = ("nodes=4", "evaluation.average=false", "checkpoint.final=false")
    settings = [argument for setting in (algorithm, *few) for argument in ("--set", setting)]
    return ["sweep", "small.toml", *settings, *options]


@pytest.fixture(autouse=True)
def slow(small: Path) -> Path:
    file = small.parent / "slow.py"
    file.write_text(SLOW)
    return file


class StartedSweep:
    """A sweep in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], out: Path) -> None:
        self.process = process
        self.out = out

    @property
    def descendants(self) -> list[psutil.Process]:
        """All processes that the sweep has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def runs(self, *, ended: bool) -> list[FoundRun]:
        return [run for run in find_runs(self.out) if run.has_ended == ended]

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and the output."""
        out, _ = self.process.communicate(timeout=120)
        return self.process.returncode, out


@contextmanager
def started(root: Path, arguments: list[str]) -> Iterator[StartedSweep]:
    run = [sys.executable, "-m", "shoal", *arguments]
    process = subprocess.Popen(run, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield StartedSweep(process, root / arguments[arguments.index("--out") + 1])
    finally:
        process.kill()
        process.communicate()


def results(out: Path) -> dict[tuple[str, int], Any]:
    """What a comparison of runs depends on, except wall times, by sharing and seed."""
    found = {}
    for run in find_runs(out):
        summary = run.folder.read_summary()
        key = (run.folder.read_experiment()["sharing"]["name"], summary["seed"])
        assert key not in found, "a run was repeated"
        kept = ("status", "metrics", "best", "bytes_sent", "messages_sent", "rounds", "digest")
        found[key] = {name: summary[name] for name in kept} | {"virtual_s": summary["time"]["virtual_s"]}
    return found


def table_in(output: str) -> str:
    """The comparison that a sweep prints at its end."""
    _, found, rest = output.partition(" group ")
    assert found, output
    return rest


def ends(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_a_killed_sweep_goes_on_and_gives_the_same_results(tmp_path: Path, shoal: Shoal) -> None:
    options = ("--grid", "sharing=full,topk", "--seeds", "1-3", "--set", "evaluation.target=0.05", "--out")
    with started(tmp_path, command(0.1, *options, "swept")) as going:
        until(lambda: going.runs(ended=True) and going.runs(ended=False))
        processes = going.descendants
        os.kill(going.process.pid, signal.SIGKILL)
        until(lambda: ends(processes), 10)
        assert 0 < len(going.runs(ended=True)) < 6
    resumed = shoal(*command(0.1, *options, "swept"))
    assert resumed.code == 0, resumed.err
    assert "of 6 runs are done already" in resumed.out
    uninterrupted = shoal(*command(0.1, *options, "other"))
    assert uninterrupted.code == 0, uninterrupted.err
    assert len(results(Path("swept"))) == 6
    assert results(Path("swept")) == results(Path("other"))
    assert table_in(resumed.out) == table_in(uninterrupted.out)
    assert "sharing = topk" in table_in(resumed.out)
    assert "sent to 0.05" in table_in(resumed.out)


def test_an_interrupted_sweep_leaves_no_process_and_resumes_checkpoints(tmp_path: Path, shoal: Shoal) -> None:
    arguments = command(0.15, "--seeds", "1-2", "--set", "checkpoint.every=1", "--out", "swept", rounds=6)
    with started(tmp_path, arguments) as going:
        until(lambda: any(Checkpoints(run.folder).is_complete(0) for run in going.runs(ended=False)))
        processes = going.descendants
        assert len(processes) >= 2
        os.kill(going.process.pid, signal.SIGINT)
        code, out = going.end()
        assert code == 130, out
        assert "give the same command again" in out
        assert ends(processes)
    interrupted = find_runs(Path("swept"))
    assert [run.status for run in interrupted] == ["interrupted"] * len(interrupted)
    done = shoal(*arguments)
    assert done.code == 0, done.err
    resumed = find_runs(Path("swept"))
    assert [run.status for run in resumed] == ["completed"] * 2
    continued = [run.folder for run in resumed if run.folder in [before.folder for before in interrupted]]
    events = [record.what for folder in continued for record in folder.read(0) if isinstance(record, Event)]
    assert "resumed" in events


def test_a_killed_run_and_a_failed_run_do_not_stop_the_others(tmp_path: Path, shoal: Shoal) -> None:
    options = ("--grid", "algorithm.fails=true,false", "--seeds", "1-2", "--jobs", "1", "--out", "swept")
    with started(tmp_path, command(0.15, *options)) as going:
        launcher = until(lambda: next(iter(psutil.Process(going.process.pid).children()), None))
        until(lambda: len(going.runs(ended=False)) == 3)  # both runs that fail, and one that does not
        (child,) = launcher.children()
        child.kill()
        code, out = going.end()
    assert code == 1, out
    assert "3 of 4 runs failed; the same command tries them again" in out
    assert out.count("fails on request") >= 2
    assert "its process was killed (SIGKILL)" in out
    assert sorted(str(run.status) for run in find_runs(tmp_path / "swept")) == ["None", "completed", "failed", "failed"]
    cut_off = tmp_path / "swept" / "small" / "20000101-000000-abcdef"  # its process was killed before it wrote a file
    (cut_off / "nodes").mkdir(parents=True)
    again = shoal(*command(0.15, *options))
    assert not cut_off.exists()
    assert again.code == 1
    assert "3 runs that did not reach the end are removed and started again" in again.out
    assert "2 of 4 runs failed" in again.out
    statuses = [str(run.status) for run in find_runs(Path("swept"))]
    assert sorted(statuses) == ["completed", "completed", "failed", "failed"]


def test_a_second_sweep_cannot_use_the_folder_at_the_same_time(tmp_path: Path, shoal: Shoal) -> None:
    arguments = command(0.3, "--out", "swept")
    with started(tmp_path, arguments) as going:
        until(lambda: going.runs(ended=False))
        second = shoal(*arguments)
    assert second.code == 2
    assert "another sweep uses this folder" in second.err


@pytest.mark.usefixtures("no_process_is_left")
def test_runs_with_processes_are_one_at_a_time(shoal: Shoal) -> None:
    settings = (
        "--set",
        "engine=processes",
        "--set",
        "nodes=3",
        "--set",
        "topology=ring",
        "--set",
        "algorithm.rounds=2",
    )
    done = shoal("sweep", "small.toml", *settings, "--seeds", "1-2", "--out", "swept")
    assert done.code == 0, done.err
    files = sorted(Path("swept").glob("*/*/summary.json"))
    begun = sorted((file.parent / "mapping.json").stat().st_mtime for file in files)
    assert len(files) == 2
    assert min(file.stat().st_mtime for file in files) <= begun[1]
