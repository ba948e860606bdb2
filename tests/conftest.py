"""Fixtures for tests of commands, downloads and complete runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from file_server import Server, serve
from shoal.cli import main
from shoal.engines.processes.template_process import TEMPLATE
from shoal.experiment import running

# No deadline: the duration of an example depends on the load of the machine.
settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

SMALL = """
name       = "small"
nodes      = 6
seed       = 1
algorithm  = { name = "dpsgd", rounds = 4 }
topology   = { name = "regular", degree = 3, dynamic = true }
dataset    = { name = "digits", partition = { name = "shards", per_node = 2 } }
training   = { lr = 0.1, batch_size = 16, local_steps = 2 }
evaluation = { every = 2 }
simulation = { batching = "off" }
"""


OTHERS_PER_SLOW_FILE = 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start slow files early, mixed with other files.

    Many of the slow ones wait for processes, while the others use the cores. If slow files were started late, the last
    of them would run alone, without tests for the other workers.
    """
    slow: list[list[pytest.Item]] = []
    others: list[list[pytest.Item]] = []
    for _, file in itertools.groupby(items, key=lambda item: item.path):
        tests = list(file)
        (slow if tests[0].get_closest_marker("slow") else others).append(tests)
    placed = [(place * OTHERS_PER_SLOW_FILE, tests) for place, tests in enumerate(slow)] + list(enumerate(others))
    items[:] = [item for _, tests in sorted(placed, key=lambda file: file[0]) for item in tests]


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A short experiment."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


@pytest.fixture
def shoal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CommandResult]:
    """Run the command line in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> CommandResult:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        return CommandResult(int(ended.value.code or 0), *capfd.readouterr())

    return run


# Data sets


@pytest.fixture
def data_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets and their cache are in empty folders."""
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server() -> Iterator[Server]:
    """A web server from which files are downloaded."""
    with serve() as running:
        yield running


# Runs


def models_of(run: running.Run, nodes: Iterable[int] | None = None) -> NDArray[np.float32]:
    """The final models of `nodes`, by default of all nodes that trained to the end, as a matrix."""
    if nodes is None:
        nodes = [node for node in range(run.summary["nodes"]) if str(node) not in run.summary["lost"]]
    return np.stack([np.load(run.folder.model(node)) for node in nodes])


@pytest.fixture(autouse=True)
def interrupted_runs_end_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the tests if a signal to pytest, such as that of `timeout`, interrupts a run in this process.

    A run handles the signal, and pytest never receives it. The test would go on with the files of a run that has not
    reached its end.
    """
    run = running.run

    def checked(*arguments: Any, **options: Any) -> running.Run:
        ended = run(*arguments, **options)
        if (number := ended.summary.get("signal")) is not None:
            pytest.exit(f"signal {number} interrupted the run in {ended.folder.path}", returncode=128 + number)
        return ended

    monkeypatch.setattr(running, "run", checked)


@pytest.fixture
def unused_port() -> int:
    """A port that no program listens on, in a range from which the system assigns none by itself."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# Real processes


def is_zygote(process: psutil.Process) -> bool:
    """Whether the process is the zygote or a node; a fork keeps the command line. A template of zygotes is not."""
    try:
        command = set(process.cmdline())
        if process.status() == psutil.STATUS_ZOMBIE or is_template(process):
            return False
        return not command.isdisjoint(("shoal.engines.processes.zygote", TEMPLATE))
    except psutil.NoSuchProcess:
        return False


def is_template(process: psutil.Process) -> bool:
    """Whether the process is a template, and a child of the process that has started it."""
    command = process.cmdline()
    return TEMPLATE in command and str(process.ppid()) == command[command.index(TEMPLATE) + 2]


def zygotes() -> set[int]:
    return {p.pid for p in psutil.process_iter() if is_zygote(p)}


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait for a true value of `condition` and return it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    """Check after a test that its processes have ended. Other runs on this machine are ignored."""
    earlier = zygotes()
    yield
    until(lambda: not any(_is_ours(pid) for pid in zygotes() - earlier))


def _is_ours(pid: int) -> bool:
    """Whether this test started the process, or it is an orphan with only zygotes between it and the first process."""
    try:
        *parents, _ = psutil.Process(pid).parents()
        return os.getpid() in [p.pid for p in parents] or all(is_zygote(p) for p in parents)
    except psutil.NoSuchProcess:
        return False
