"""The table in "Failures of processes and machines" of docs/faults.md, row by row, with real processes and real faults.

Every row checks the exit code, the time until the command has ended, and that no process is left. Rows in which a node
or the run fails also check that `shoal show` can read the records, if there are any.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from conftest import SMALL, until
from disks import fill, small_disk
from process_runs import NODES, Started, listens_on, started
from shoal.engines.processes.liveness import STOP_SECONDS
from shoal.experiment import Experiment
from shoal.results.records import Average, End, Evaluation, Round, RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_process_is_left")]

TIMEOUT = "processes.receive_timeout=2"
"""The hang timeout is then 7 seconds."""
HANG_SECONDS = 7.0
SLOW_MACHINE = 60.0
"""Seconds that a busy machine may take in addition to what is documented, where it also starts or waits."""
BUSY = 20.0
"""The same where a process is killed: the others only have to notice it, and to end their rounds."""
SHAPED = "network={name='uniform', latency=0.001}"
BLOCKING_MODEL = textwrap.dedent(
    '''
    """A network whose node 1 stays in a training step, in its training slot, while the file "train" exists."""

    import os
    import time
    from dataclasses import dataclass
    from pathlib import Path

    import torch


    class Blocking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def forward(self, x):
            if Path("train").exists() and not Path("blocked").exists():
                Path("blocked").write_text(str(os.getpid()))
                while Path("train").exists():
                    time.sleep(0.02)
            return self.layer(x.flatten(1))


    @dataclass(frozen=True)
    class Model:
        def build(self, shape, outputs):
            return Blocking()
    '''
)


def end_within(going: Started, seconds: float, slack: float = SLOW_MACHINE) -> tuple[int, str]:
    """Wait for the end, and print how long it took (shown by `pytest -rP`). Returns the exit code and the output.

    `slack` is what a busy machine may take in addition to `seconds`.
    """
    began = time.monotonic()
    code, out = going.end()
    took = time.monotonic() - began
    print(f"ended after {took:.1f} s with exit code {code}")
    assert took < seconds + slack
    return code, out


def allowed(number: signal.Signals) -> tuple[float, float]:
    """Seconds until the end after a node was killed or stopped, and the slack: for `end_within`."""
    return (2.0, BUSY) if number == signal.SIGKILL else (HANG_SECONDS + 2.0, SLOW_MACHINE)


def lost_for(number: signal.Signals) -> str:
    """The reason in `lost` for a node that was killed or stopped."""
    return "killed by SIGKILL" if number == signal.SIGKILL else "sent no heartbeat for 7 s"


def show(going: Started) -> str:
    """What `shoal show` prints of the run."""
    command = [sys.executable, "-m", "shoal", "show", str(going.folder.path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


# Nodes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_fails_while_it_waits(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path, TIMEOUT, held=1) as going:
        going.wait_for_round(0)
        going.nodes[2].send_signal(number)
        going.release()
        code, out = end_within(going, *allowed(number))
        assert code == 3, out
        assert lost_for(number) in going.summary["lost"]["2"]
        assert set(going.summary["lost"]) == {"2"}
        assert going.summary["rounds"] == 4
        assert "incomplete" in show(going)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_fails_while_it_trains_and_its_slot_becomes_free(
    number: signal.Signals, slots: int, tmp_path: Path
) -> None:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "blocking.py").write_text(BLOCKING_MODEL)
    settings = (TIMEOUT, "model={name='blocking.py:Model'}", f"processes.training_slots={slots}")
    with started(tmp_path, *settings, held=1) as going:
        going.wait_for_round(0)
        (tmp_path / "train").touch()
        going.release()
        pid = int(until(lambda: (tmp_path / "blocked").exists() and (tmp_path / "blocked").read_text()))
        os.kill(pid, number)
        (tmp_path / "train").unlink()
        code, out = end_within(going, *allowed(number))
        assert code == 3, out
        (reason,) = going.summary["lost"].values()
        assert lost_for(number) in reason
        assert going.summary["rounds"] == 4, "the others have trained all rounds"
        assert "incomplete" in show(going)


def test_a_node_that_is_stopped_for_a_short_time_is_not_lost(tmp_path: Path) -> None:
    with started(tmp_path, "processes.receive_timeout=60", held=1) as going:
        going.wait_for_round(0)
        going.nodes[2].suspend()
        going.release()
        time.sleep(2.0)
        going.nodes[2].resume()
        code, out = end_within(going, 2.0)
        assert code == 0, out
        assert going.summary["status"] == "completed"


# The zygote, the network process, the coordinator


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("which", ["zygote", "network process"])
def test_a_process_that_the_run_needs_fails(which: str, number: signal.Signals, tmp_path: Path) -> None:
    settings = (TIMEOUT, *([SHAPED] if which == "network process" else []))
    with started(tmp_path, *settings, held=1) as going:
        going.wait_for_round(0)
        process = going.zygote if which == "zygote" else going.network_process
        process.send_signal(number)
        code, out = end_within(going, *allowed(number))
        assert code == 1, out
        expected = {
            ("zygote", signal.SIGKILL): "the process that starts nodes exited unexpectedly",
            ("zygote", signal.SIGSTOP): "the process that starts nodes was stopped for 7 s",
            ("network process", signal.SIGKILL): "the network process exited unexpectedly",
            ("network process", signal.SIGSTOP): "the network process sent no heartbeat for 7 s",
        }
        assert expected[which, number] in " ".join(out.split())
        assert going.summary["status"] == "failed"
        assert "failed" in show(going)


def test_the_coordinator_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, held=3) as going:
        going.wait_for_round(1, Evaluation)
        nodes, began = going.nodes, time.monotonic()
        going.process.kill()
        assert going.process.wait() == -signal.SIGKILL
        _, left = psutil.wait_procs(nodes, timeout=BUSY)
        print(f"all processes had ended after {time.monotonic() - began:.1f} s")
        assert not any(node.is_running() and node.status() != psutil.STATUS_ZOMBIE for node in left)
        shown = show(going)
        assert "unfinished" in shown
        assert "accuracy" in shown
        picture = tmp_path / "loss.png"
        command = [sys.executable, "-m", "shoal", "plot", str(going.folder.path), "--metric", "loss"]
        plotted = subprocess.run([*command, "--out", str(picture)], capture_output=True, text=True, check=False)
        assert plotted.returncode == 0, plotted.stderr
        assert picture.exists()


def test_the_coordinator_is_stopped_and_continues(tmp_path: Path) -> None:
    with started(tmp_path, TIMEOUT, held=1) as going:
        going.wait_for_round(0)
        os.kill(going.process.pid, signal.SIGSTOP)
        time.sleep(HANG_SECONDS + 3.0)  # longer than the timeout of nodes
        os.kill(going.process.pid, signal.SIGCONT)
        going.release()
        code, out = end_within(going, 2.0)
        assert code == 0, out
        assert going.summary["status"] == "completed"


AVERAGE = textwrap.dedent(
    '''
    """A network whose evaluation in the process that evaluates averages lasts until the file "go-on" exists."""

    import os
    import time
    from dataclasses import dataclass
    from pathlib import Path

    import torch

    STARTED = os.getpid()


    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def forward(self, x):
            is_node = any(thread.name == "train" for thread in __import__("threading").enumerate())
            if os.getpid() != STARTED and not is_node and not self.training:
                Path("average").write_text(str(os.getpid()))
                while not Path("go-on").exists():
                    time.sleep(0.02)
            return self.layer(x.flatten(1))


    @dataclass(frozen=True)
    class Model:
        def build(self, shape, outputs):
            return Slow()
    '''
)


def test_the_process_that_evaluates_an_average_is_stopped(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "slow.py").write_text(AVERAGE)
    with started(tmp_path, TIMEOUT, "model={name='slow.py:Model'}", held=3) as going:
        os.kill(int(until(lambda: _text_of(tmp_path / "average"))), signal.SIGSTOP)
        going.release()
        code, out = end_within(going, HANG_SECONDS)
        assert code == 0, out
        assert "evaluating the averaged model of round 1 failed" in " ".join(out.split())


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# Signals of the user


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_user_interrupts_the_run(number: signal.Signals, times: int, tmp_path: Path) -> None:
    with started(tmp_path, held=1) as going:
        going.wait_for_round(0)
        if times == 2:
            for node in going.nodes:
                node.suspend()  # so that they cannot exit by themselves
        for _ in range(times - 1):
            going.process.send_signal(number)
            time.sleep(1.0)
        going.process.send_signal(number)
        # Nodes that cannot exit by themselves are killed ten seconds after the first signal: the second one is faster.
        code, out = end_within(going, 1.0, slack=SLOW_MACHINE if times == 1 else STOP_SECONDS - 2.5)
        assert code == 128 + number, out
        assert going.summary["status"] == "interrupted"
        if times == 1:
            assert all(going.folder.model(node).exists() for node in range(NODES)), "their models are saved"
        assert "interrupted" in show(going)


# The disk


LONG = ("algorithm={name='held.py:Held', rounds=60, held=1}", "evaluation.every=30")
"""The records of a node exceed a block of the disk."""


@contextmanager
def full_disk_at_the_end(root: Path, engine: str) -> Iterator[tuple[Started, Path]]:
    """A run that waits for space at its end, because its disk is full since round 0, and the file that fills it."""
    with small_disk(root / "runs", kib=2048), started(root, *LONG, held=1, engine=engine) as going:
        if engine == "processes":
            going.wait_for_round(0)
        else:
            # The experiment is written once more, when the simulation starts.
            until(going.folder.mapping.exists)
            until(lambda: going.folder.experiment.stat().st_mtime_ns > going.folder.mapping.stat().st_mtime_ns)
        filler = fill(root / "runs")
        going.release()
        until(lambda: "free some space in the next 60 s" in " ".join(going.output.split()))
        yield going, filler


@pytest.mark.parametrize("engine", ["processes", "simulation"])
def test_the_disk_is_full_for_some_time(engine: str, tmp_path: Path) -> None:
    table = {**tomllib.loads(SMALL), "algorithm": {"name": "dpsgd", "rounds": 60}, "evaluation": {"every": 30}}
    undisturbed = Experiment.from_table(table).run(tmp_path / "undisturbed")
    with full_disk_at_the_end(tmp_path, engine) as (going, filler):
        filler.unlink()
        code, out = end_within(going, 6.0)
        assert code == 0, out
        assert going.summary["digest"] == undisturbed.summary["digest"]
        for node in range(NODES):
            assert content(going.folder, node) == content(undisturbed.folder, node)
            assert going.folder.model(node).read_bytes() == undisturbed.folder.model(node).read_bytes()
        if engine == "processes":
            shown = " ".join(out.split())
            assert "records are paused, because the disk at" in shown
            assert "records are written again" in shown


def content(folder: RunFolder, node: int) -> list[tuple[object, ...]]:
    """The records of a node without the times, and the averages."""
    averages = sorted((a.round, a.scores["accuracy"]) for a in folder.read_averages() if isinstance(a, Average))
    rounds = [(r.round, r.loss, r.bytes_sent, r.messages_sent) for r in folder.read(node) if isinstance(r, Round)]
    evaluations = [(e.round, *sorted(e.scores.items())) for e in folder.read(node) if isinstance(e, Evaluation)]
    ends = [(e.digest, e.bytes_sent) for e in folder.read(node) if isinstance(e, End)]
    return [*averages, *rounds, *evaluations, *ends]


@pytest.mark.parametrize("engine", ["processes", "simulation"])
def test_the_disk_stays_full(engine: str, tmp_path: Path) -> None:
    with full_disk_at_the_end(tmp_path, engine) as (going, _):
        going.process.send_signal(signal.SIGINT)  # do not wait for a minute
        code, out = end_within(going, STOP_SECONDS)
        assert code == 1, out
        assert "the disk or the quota is full: free some space" in " ".join(out.split())
        if engine == "processes":
            assert "unfinished" in show(going), "the records before are readable"


@pytest.mark.parametrize("engine", ["processes", "simulation"])
def test_the_folder_is_removed(engine: str, tmp_path: Path) -> None:
    with started(tmp_path, held=1, engine=engine) as going:
        if engine == "processes":
            going.wait_for_round(0)
        shutil.rmtree(going.folder.path)
        going.release()
        code, out = end_within(going, 6.0)
        assert code == 1, out
        assert "its folder was removed or moved during the run" in " ".join(out.split())


# Ports


def test_the_ports_are_taken(tmp_path: Path) -> None:
    with started(tmp_path / "first", held=1) as first:
        port = listens_on(first.nodes[0])
        with started(tmp_path / "second", f"processes.base_port={port}") as second:
            code, out = end_within(second, 5.0)
            assert code == 2, out
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in " ".join(out.split())
            assert not list(second.root.glob("*/*")), "a run that cannot start leaves no folder"
        first.release()
        assert first.end()[0] == 0, "the first run is not disturbed"


@pytest.mark.parametrize(
    ("ports", "settings"),
    [
        pytest.param(6, (), id="nodes"),
        pytest.param(0, (), id="coordinator"),
        pytest.param(1, ("network={name='uniform', latency=0.001}", "processes.base_port=41000"), id="network process"),
    ],
)
def test_no_port_is_left(ports: int, settings: tuple[str, ...], tmp_path: Path) -> None:
    """In a network namespace with so many ports."""
    limited = [
        "unshare",
        "--net",
        "sh",
        "-c",
        f'ip link set lo up && sysctl -qw net.ipv4.ip_local_port_range="40000 {40000 + ports}" '
        'net.ipv4.ip_local_reserved_ports=40000 && exec "$@"',
        "sh",
    ]
    if subprocess.run([*limited, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a network namespace needs root, ip and sysctl")
    with started(tmp_path, *settings, wrapper=limited) as going:
        code, out = end_within(going, 5.0)
        assert code == 2, out
        assert "the system has no free port left" in " ".join(out.split())
        assert not list(going.root.glob("*/*")), "a run that cannot start leaves no folder"
