"""What the command line shows of a sweep: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.cli.display import print_line
from shoal.errors import DataError
from shoal.results.progress import main_metric
from shoal.results.progress_text import describe, format_seconds
from shoal.results.records import RunFolder
from shoal.sweeps.execution import RunState, SweepState

BAR_WIDTH = 30
MAX_LABEL = 60
"""Characters of a combination in the live view."""


class SweepDisplay:
    """A `SweepListener`. It also shows Python's warnings as notices."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._stack = ExitStack()
        self._refreshed = 0.0

    def __enter__(self) -> SweepDisplay:
        self._stack.enter_context(warnings.catch_warnings())
        warnings.showwarning = lambda message, *_, **__: self.notice(str(message))
        if self._live is not None:
            self._stack.enter_context(self._live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def update(self, state: SweepState) -> None:
        if self._live is not None and time.monotonic() - self._refreshed > 0.1:
            self._refreshed = time.monotonic()
            self._live.update(_view(state), refresh=True)

    def run_started(self, state: SweepState, run: RunState) -> None:
        if self._live is None:
            number = state.skipped + len(state.ended) + len(state.running)
            print_line(f"run {number} of {state.total} starts: {run.combination.label}", self._console)

    def run_ended(self, state: SweepState, run: RunState) -> None:
        done = state.skipped + len(state.ended)
        left = state.seconds_left
        time_left = f"; {format_seconds(left)} left" if left else ""
        self._print(f"{done}/{state.total} ended: {run.combination.label}: {describe_end(run)}{time_left}")

    def notice(self, text: str) -> None:
        self._console.print(f"[yellow]![/yellow] {escape(text)}", highlight=False, soft_wrap=True)

    def _print(self, text: str) -> None:
        print_line(text, self._console)


def describe_end(run: RunState) -> str:
    """Return how a run ended, in one line."""
    parts = [run.status or "failed"]
    if run.has_ended and run.folder is not None and (score := final_score(run.folder)) is not None:
        parts.append(score)
    if run.error is not None:
        parts.append(run.error.strip().splitlines()[-1])
    if run.seconds is not None:
        parts.append(format_seconds(run.seconds))
    return ", ".join(parts)


def final_score(folder: RunFolder) -> str | None:
    """Return the main metric of a run at its end, such as "accuracy 0.912"; None if there is none."""
    try:
        metrics = folder.read_summary()["metrics"]
    except (DataError, KeyError):
        return None
    name = main_metric(metrics)
    mean = None if name is None or metrics[name] is None else metrics[name]["mean"]
    return None if mean is None else f"{name} {mean:.3f}"


def _view(state: SweepState) -> Group:
    done = state.skipped + len(state.ended)
    head = Table.grid(padding=(0, 1))
    parts = [f"{done} of {state.total} runs", f"{len(state.running)} at once"]
    if state.failed:
        parts.append(f"{len(state.failed)} failed")
    parts.append(f"{format_seconds(time.monotonic() - state.started)} elapsed")
    if (left := state.seconds_left) is not None:
        parts.append(f"{format_seconds(left)} left")
    head.add_row(ProgressBar(total=state.total, completed=done, width=BAR_WIDTH), " · ".join(parts))
    rows = Table.grid(padding=(0, 1))
    for run in state.running.values():
        label = run.combination.label
        label = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
        fraction = None if run.progress is None else run.progress.done
        bar = ProgressBar(total=1, completed=fraction or 0, width=BAR_WIDTH // 2, pulse=fraction is None)
        rows.add_row(bar, Text(label), "starting" if run.progress is None else describe(run.progress))
    return Group(head, rows)
