"""What the command line shows of a sweep: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
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
from shoal.sweeps.estimate import Estimate
from shoal.sweeps.execution import RunState, SweepState
from shoal.sweeps.plan import Combination
from shoal.sweeps.sweep import Sweep
from shoal.sweeps.tuning import TuningPlan, describe_tuning
from shoal.sweeps.values import Range, Searched, describe_settings, describe_value
from shoal.types import format_node_ids

BAR_WIDTH = 30
REFRESH_SECONDS = 0.1
"""Seconds between two updates of the live view."""
LINE_SECONDS = 15.0
"""Seconds after which a line is printed outside of a terminal, if no run has ended."""
TEXT_WIDTH = 400
"""The width of a table that is not shown in a terminal: its lines are not wrapped."""
MAX_LABEL = 60
"""Characters of a combination in the live view."""


class SweepDisplay:
    """A `SweepListener`. It also shows Python's warnings as notices."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._stack = ExitStack()
        self._refreshed = 0.0
        self._printed = time.monotonic()

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

    def stop_live(self) -> None:
        """Remove the live view: no more runs follow."""
        if self._live is not None:
            self._live.stop()

    def update(self, state: SweepState) -> None:
        now = time.monotonic()
        if self._live is not None:
            if now - self._refreshed > REFRESH_SECONDS:
                self._refreshed = now
                self._live.update(_view(state), refresh=True)
        elif now - self._printed > LINE_SECONDS and state.running:
            run = min(state.running.values(), key=lambda run: run.started)
            latest = "starting" if run.progress is None else describe(run.progress)
            count = len(state.running)
            self._print(f"{_plural(count, 'run')} in progress; the oldest: {run.combination.label}: {latest}")

    def run_ended(self, state: SweepState, run: RunState) -> None:
        done = state.skipped + len(state.ended)
        left = state.seconds_left
        time_left = f"; {format_seconds(left)} left" if left else ""
        self._print(f"{done}/{state.total} ended: {run.combination.label}: {describe_end(run)}{time_left}")

    def notice(self, text: str) -> None:
        self._console.print(f"[yellow]![/yellow] {escape(text)}", highlight=False, soft_wrap=True)

    # Plans and results

    def show_plan(
        self, sweep: Sweep, combinations: Sequence[Combination], done: int, searched: TuningPlan | None
    ) -> None:
        """Print the number of runs, and all combinations."""
        seeds: dict[str, list[int]] = {}
        for combination in combinations:
            settings = {k: v for k, v in combination.settings.items() if k not in sweep.tune}
            seeds.setdefault(describe_settings(settings) or sweep.name, []).append(combination.experiment.seed)
        already = f", {done} of them done already" if done else ""
        self._print(f"{_plural(len(combinations), 'run')}: {_plural(len(seeds), 'combination')}{already}")
        for number, (label, found) in enumerate(seeds.items(), 1):
            self._print(f"  {number}. {label} (seed{'s' if len(found) > 1 else ''} {format_node_ids(found)})")
        if searched is not None:
            self.show_search(searched)

    def show_search(self, searched: TuningPlan, folder: Path | None = None) -> None:
        """Print what is searched, and warn if the test samples are used for it."""
        keys = ", ".join(f"{k} in {_searched(v)}" for k, v in searched.sweep.tune.items())
        where = "" if folder is None else f" in {folder}"
        self._print(f"search for {keys}: {_plural(searched.cost.runs, 'run')}{where}, before the final runs")
        if any(tuning.split == "test" for tuning in searched.tunings):
            self.notice(
                "values are chosen by their scores on the test samples, because the experiment has no "
                "dataset.validation: the scores of the final runs are optimistic. Set dataset.validation to choose on "
                "other samples"
            )

    def show_tuned(self, searched: TuningPlan, path: Path) -> None:
        """Print the best values of each combination."""
        table = Table(title=Text(f"best values ({path})"), title_justify="left", box=None, padding=(0, 2))
        for heading in ("combination", *searched.sweep.tune, "score", "samples", "trials"):
            table.add_column(Text(heading))
        for tuning in searched.tunings:
            values, score = tuning.best or ({}, None)
            cells = [describe_tuning(tuning), *(describe_value(values.get(key, "none")) for key in searched.sweep.tune)]
            shown = "all trials failed" if score is None else f"{tuning.metric} {score:.4f}"
            table.add_row(*map(Text, [*cells, shown, tuning.split, str(len(tuning.trials))]))
        if self._console.is_terminal:
            self._console.print(table)
        else:
            text = io.StringIO()
            Console(file=text, width=TEXT_WIDTH).print(table)
            for line in text.getvalue().splitlines():
                self._print(line.rstrip())

    def show_estimate(self, estimated: Estimate, runs: int, searched: TuningPlan | None) -> None:
        """Print the estimated time, and how it was estimated."""
        for run in estimated.failed:
            self._print(f"{run.combination.label}: {run.error}")
        if estimated.seconds is None:
            self._print("the time cannot be estimated: no calibration run finished a part of its rounds")
            return
        seconds = estimated.seconds
        if searched is not None:
            seconds += estimated.seconds / runs * searched.cost.whole_runs
        self._print(
            f"estimated time: {format_seconds(seconds)}, with at most {_plural(estimated.at_once, 'run')} at once. "
            f"{estimated.calibrated} of {_plural(estimated.combinations, 'combination')} ran for a short time, mostly "
            "up to the first evaluation; their speed is extrapolated to all rounds and runs"
        )

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        print_line(text, self._console)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _searched(searched: Searched) -> str:
    return str(searched) if isinstance(searched, Range) else describe_value(searched)


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
    for _ in range(3):
        rows.add_column(no_wrap=True, overflow="ellipsis")
    for run in state.running.values():
        label = run.combination.label
        label = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
        fraction = None if run.progress is None else run.progress.done
        bar = ProgressBar(total=1, completed=fraction or 0, width=BAR_WIDTH // 2, pulse=fraction is None)
        rows.add_row(bar, Text(label), "starting" if run.progress is None else describe(run.progress))
    return Group(head, rows)
