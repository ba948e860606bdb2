"""Common parts of the benchmarks: figures with their targets, and runs of the command line."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Figure:
    """A measured number with its target."""

    what: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.at_most is not None:
            return self.value <= self.at_most
        if self.at_least is not None:
            return self.value >= self.at_least
        return None

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return f"≥ {self.at_least:g}" if self.at_least is not None else ""


def show(title: str, figures: list[Figure]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("figure", "measured", "target", "met", "how"):
        table.add_column(column, justify="right" if column in ("measured", "target") else "left")
    marks = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}
    for figure in figures:
        table.add_row(figure.what, f"{figure.value:.3g} {figure.unit}", figure.target, marks[figure.met], figure.note)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def shoal_run(example: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run an example with the command line, in a separate process. Returns its summary."""
    with tempfile.TemporaryDirectory() as folder:
        run = shoal_run_in(Path(folder), example, settings)
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
        return summary


def shoal_run_in(folder: Path, example: str, settings: dict[str, Any]) -> Path:
    """Run an example with the command line, in a separate process. Returns the run's folder below `folder`."""
    command = [sys.executable, "-m", "shoal", "run", str(EXAMPLES / example), "--out", str(folder)]
    for key, value in settings.items():
        command += ["--set", f"{key}={_toml(value)}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stdout}\n{ended.stderr}")
    return next(folder.rglob("summary.json")).parent


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def script(source: str) -> float:
    """Run a script in a new interpreter. Returns the last number that it prints."""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd=ROOT)
    return float(ended.stdout.split()[-1])


BARE_STEPS = """
import time, torch
from shoal.models.basic import GnLenet
torch.set_num_threads(1)
model = GnLenet().build((3, 32, 32), 10)
images, labels = torch.randn(2048, 3, 32, 32), torch.randint(0, 10, (2048,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
criterion = torch.nn.CrossEntropyLoss()
def steps(count):
    for _ in range(count):
        batch = torch.randint(0, 2048, (8,))
        optimizer.zero_grad()
        criterion(model(images[batch].contiguous(memory_format=torch.channels_last)), labels[batch]).backward()
        optimizer.step()
steps(30)
started = time.monotonic()
steps(400)
print((time.monotonic() - started) / 400)
"""
"""Training steps of GN-LeNet in a plain script, in the memory format that is fastest for it."""


def bare_step(processes: int) -> float:
    """Return the seconds of a bare step in each of so many processes that take steps at the same time, as a mean."""
    command = [sys.executable, "-c", BARE_STEPS]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(processes)]
    return statistics.mean(float(process.communicate()[0].split()[-1]) for process in started)


def median(values: list[float]) -> float:
    return statistics.median(values)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print what is measured, and how long it took."""
    print(f"  {what} …", end="", flush=True)
    started = time.monotonic()
    yield
    print(f" {time.monotonic() - started:.0f} s", flush=True)
