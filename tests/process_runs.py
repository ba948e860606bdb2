"""Runs with real processes that a test can hold, observe and disturb."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from conftest import SMALL, is_zygote, until
from shoal.results.records import End, Round, RunFolder

NODES = 6
ROUNDS = 4
HELD = textwrap.dedent(
    '''
    """D-PSGD that is slow, or stays in a round until a test releases it, so that the test can act in between."""

    from dataclasses import dataclass
    from pathlib import Path

    from shoal.algorithms.dpsgd import DPSGD


    @dataclass(frozen=True)
    class Held(DPSGD):
        held: int = 0
        seconds: float = 0.0

        async def run(self, node):
            train = node.train

            async def train_when_released(params, steps=None):
                await node.sleep(self.seconds)
                while node.next_round >= self.held and not Path("go-on").exists():
                    await node.sleep(0.02)
                return await train(params, steps)

            node.train = train_when_released
            await super().run(node)
    '''
)


@dataclass
class Started:
    """A run in progress: a process of its own, `shoal run`."""

    process: subprocess.Popen[bytes]
    root: Path

    @property
    def folder(self) -> RunFolder:
        return RunFolder(until(lambda: next(self.root.glob("*/*/experiment.toml"), None)).parent)

    @property
    def zygote(self) -> psutil.Process:
        mine = psutil.Process(self.process.pid)
        return until(lambda: next((p for p in mine.children() if is_zygote(p)), None))

    @property
    def nodes(self) -> list[psutil.Process]:
        """The processes of the nodes, in the order of their ids: they are forked one after another."""
        return until(lambda: (found := sorted(self.zygote.children(), key=lambda p: p.create_time())) and
                     len(found) == NODES and found)  # fmt: skip

    @property
    def network_process(self) -> psutil.Process:
        """The process that the zygote forks first, in a run with a network."""
        return min(until(lambda: len(found := self.zygote.children()) == NODES + 1 and found), key=lambda p: p.pid)

    def wait_for_round(self, round: int, kind: type = Round) -> None:
        """Wait until every node has a record of this kind for `round`."""
        folder = self.folder
        until(lambda: all(any(isinstance(r, kind) and r.round >= round for r in folder.read(n)) for n in range(NODES)))

    def release(self) -> None:
        """Let the nodes that are held continue."""
        (self.root.parent / "go-on").touch()

    @property
    def output(self) -> str:
        """What the command has printed so far."""
        return _output(self.root.parent).read_text()

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and the output."""
        self.process.wait(timeout=120)
        out = self.output
        assert "Traceback" not in out or "fault on schedule" in out, out
        return self.process.returncode, out

    @property
    def summary(self) -> dict[str, Any]:
        return self.folder.read_summary()


@contextmanager
def started(
    root: Path,
    *settings: str,
    held: int | None = None,
    slow: float | None = None,
    engine: str = "processes",
    wrapper: Sequence[str] = (),
) -> Iterator[Started]:
    """A run in progress. Nodes stay in round `held` until they are released, or take `slow` seconds longer for each
    round: on a loaded machine a test needs time to act. `wrapper` is a command that runs the command of the run."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "small.toml").write_text(SMALL)
    (root / "held.py").write_text(HELD)
    given = []
    if held is not None or slow is not None:
        stays, seconds = ROUNDS if held is None else held, slow or 0.0
        given = [f"algorithm={{name='held.py:Held', rounds={ROUNDS}, held={stays}, seconds={seconds}}}"]
    run = [sys.executable, "-m", "shoal", "run", "small.toml", "--engine", engine, "--out", "runs"]
    command = [*wrapper, *run]
    for setting in (*given, *settings):
        command += ["--set", setting]
    with _output(root).open("wb") as output:
        process = subprocess.Popen(command, cwd=root, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Started(process, root / "runs")
    finally:
        process.kill()
        process.wait()


def _output(root: Path) -> Path:
    return root / "out.log"


def run(root: Path, *settings: str) -> tuple[int, str, Started]:
    with started(root, *settings) as going:
        return *going.end(), going


def ends(folder: RunFolder) -> set[int]:
    return {n for n in range(NODES) if any(isinstance(r, End) for r in folder.read(n))}


# Unauthenticated connections


def listens_on(node: psutil.Process) -> int:
    return until(
        lambda: next((c.laddr.port for c in node.net_connections("tcp") if c.status == psutil.CONN_LISTEN), None)
    )
