"""What the command line prints: live progress, single lines, and the table of a run."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.results.progress import Progress, main_metric
from shoal.results.progress_text import (
    SEPARATOR,
    ProgressLines,
    ProgressRow,
    format_bytes,
    format_seconds,
    run_row,
)
from shoal.results.timing import higher_is_better
from shoal.types import format_node_ids

REFRESH_INTERVAL = 0.1
"""Seconds between two updates of a terminal."""
WIDEST_BAR = 30
"""Columns of a bar in a wide terminal."""
COUNTS = (
    "messages_rejected",
    "messages_late",
    "messages_repeated",
    "messages_unsent",
    "unauthenticated_connections",
)
"""Keys of a summary that are shown when they are not 0."""


def console(stderr: bool = False) -> Console:
    """Return a console that wraps long lines only in a terminal."""
    return Console(stderr=stderr, soft_wrap=not sys.stdout.isatty())


def print_line(text: str, screen: Console | None = None) -> None:
    """Print text as it is: without markup, colours or line breaks."""
    (screen or console()).print(text, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def show_warnings(screen: Console) -> Iterator[Display]:
    """Display progress, and show Python's warnings as notices."""
    with warnings.catch_warnings(), Display(screen) as display:
        warnings.showwarning = lambda message, *_, **__: display.notice(str(message))
        yield display


class Display:
    """Shows progress: a bar for each task in a terminal, a plain line every few seconds elsewhere.

    It has no thread of its own: engines may fork while it is active.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._lines = ProgressLines(lambda line: print_line(line, console))
        self._shown, self._stages = 0.0, [""]

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, text: str) -> None:
        """Show in a terminal what a command does before its first progress."""
        if self._live is not None:
            self.rows([ProgressRow([text])])

    def progress(self, progress: Progress) -> None:
        """Show the progress of a run."""
        if self._live is None:
            self._lines.progress(progress)
        else:
            self.rows([run_row(progress)])

    def rows(self, rows: Sequence[ProgressRow]) -> None:
        """Show the progress of several tasks. Where the output is not a terminal, only the first is written.

        It may be called often: a terminal is updated a few times per second, and at once when a stage begins.
        """
        if self._live is None:
            self._lines.row(rows[0])
            return
        now, stages = time.monotonic(), [f"{row.label} {row.stage}" for row in rows]
        if now - self._shown >= REFRESH_INTERVAL or stages != self._stages:
            self._shown, self._stages = now, stages
            self._live.update(_Bars(rows), refresh=True)

    def notice(self, text: str) -> None:
        whole_lines = not self._console.is_terminal
        self._console.print(f"[yellow]![/yellow] {escape(text)}", highlight=False, soft_wrap=whole_lines)


class _Bars:
    """Rows of progress that fit the width of the terminal.

    If the facts of a single row do not fit in one line, they continue in the next one. Of several rows, each has one
    line, and the facts that do not fit are omitted.
    """

    def __init__(self, rows: Sequence[ProgressRow]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        bar = min(WIDEST_BAR, width // 5)
        longest = max(cell_len(row.label) for row in self._rows)
        label = min(longest, width // 3)
        left = width - bar - 1 - (label + 1 if label else 0)
        grid = Table.grid(padding=(0, 1))
        if label:
            grid.add_column(width=label, no_wrap=True, overflow="ellipsis")
        grid.add_column(width=bar)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        for row in self._rows:
            lines = _lines(row.facts, left)
            text = Text("\n".join(lines if len(self._rows) == 1 else lines[:1]))
            shown = ProgressBar(total=1, completed=row.done or 0, width=bar, pulse=row.done is None)
            grid.add_row(*([Text(row.label)] if label else []), shown, text)
        yield grid


def _lines(facts: Sequence[str], width: int) -> list[str]:
    """Join facts to lines of at most `width` columns; a single fact may be longer."""
    lines: list[str] = []
    for fact in facts:
        if lines and cell_len(lines[-1] + SEPARATOR + fact) <= width:
            lines[-1] += SEPARATOR + fact
        else:
            lines.append(fact)
    return lines


STATUS_COLOURS = {"completed": "green", "failed": "red"}
"""Others are yellow."""


def summary_table(summary: Mapping[str, Any], title: str) -> Table:
    """Return the summary of a run as a table to print."""
    table = Table(title=Text(title), title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    batching = f", batching {summary['batching']!r}" if summary.get("batching") else ""
    rows = [
        ("status", _status(summary)),
        ("engine", f"{summary['engine']}{batching}, {summary['nodes']} nodes, seed {summary['seed']}"),
        ("rounds", str(summary["rounds"])),
        *_scores(summary),
        (f"{summary.get('split', 'test')} loss", _statistics(summary["loss"])),
        *_best_and_target(summary),
        *_averaged_model(summary),
        *_resources(summary),
        *(
            [("diverged", f"nodes {format_node_ids(diverged, most=10)}")]
            if (diverged := summary.get("diverged"))
            else []
        ),
        *((name.replace("_", " "), f"{summary[name]:,}") for name in COUNTS if summary.get(name)),
        ("digest", summary["digest"][:16] if summary["digest"] else "no final models"),
    ]
    for key, value in rows:
        table.add_row(key, value)
    return table


def _status(summary: Mapping[str, Any]) -> str:
    colour = STATUS_COLOURS.get(summary["status"], "yellow")
    shown = f"[{colour}]{summary['status']}[/{colour}]"
    if summary["status"] == "unfinished":
        shown += ": the run is in progress, or its coordinator was killed; all values are of the records so far"
    lost = summary["lost"]
    if lost:
        some = "; ".join(f"node {node}: {escape(why)}" for node, why in list(lost.items())[:5])
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        shown += f" ({len(lost)} lost: {some}{more})"
    return shown


def _scores(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all metrics but the loss: the main metric, its mean over the worst nodes, then the others."""
    found = {name: statistics for name, statistics in summary["metrics"].items() if not name.startswith("class ")}
    main = main_metric(found)
    if main is None:
        return [("accuracy", _statistics(None))]
    rows = [(main, _statistics(found[main]))] if main != "loss" else []
    extremes = summary["fairness"][main]
    worst = extremes["lowest_10_percent" if higher_is_better(main) else "highest_10_percent"]
    if summary["nodes"] > 1 and worst is not None:
        rows.append(("worst tenth", f"{main} {worst:.4f}"))
    return rows + [(name, _statistics(found[name])) for name in sorted(found) if name not in (main, "loss")]


def _best_and_target(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the best mean score and the time to the target; old summaries have neither."""
    virtual = summary["time"]["virtual_s"] is not None
    rows = []
    if (best := summary.get("best")) is not None:
        rows.append(("best", f"{best['metric']} {best['mean']:.4f} at {_moment(best['seconds'], virtual)}"))
    if (target := summary.get("time_to_target")) is not None:
        name = f"time to {target['metric'] or 'target'} {target['target']:g}"
        seconds = target["seconds"]
        rows.append((name, "not reached" if seconds is None else _moment(seconds, virtual)))
    return rows


def _averaged_model(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    if summary["averaged_model"] is None:
        return []
    rows = []
    scores = {name: score for name, score in summary["averaged_model"].items() if name != "round"}
    if (name := main_metric(scores)) is not None:
        rows.append(("averaged model", f"{name} {_number(scores[name], '.4f')}"))
    rows.append(("consensus distance", _number(summary["consensus_distance"], ".4g")))
    return rows


def _resources(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return traffic, time, processor time and memory."""
    sent, times, memory = summary["bytes_sent"], summary["time"], summary["memory"]
    per_node = format_bytes(sent["per_node_mean"])
    rows = [("sent", f"{format_bytes(sent['total'])} in {summary['messages_sent']:,} messages, {per_node} per node")]
    clock = [] if times["wall_s"] is None else [format_seconds(times["wall_s"])]
    if times["startup_s"] is not None:
        clock[-1] += f" after {format_seconds(times['startup_s'])} of start-up"
    if times["virtual_s"] is not None:
        clock.append(f"virtual {format_seconds(times['virtual_s'])}")
    rows.append(("time", "; ".join(clock)))
    if times["total_cpu_s"] is not None:
        training = format_seconds(times["train_cpu_s"] or 0.0)
        rows.append(("processor", f"{format_seconds(times['total_cpu_s'])}, {training} of it for training"))
    if memory["uss_mean_mib"] is not None:
        total = f"{memory['pss_total_mib']:.0f} MiB in total"
        rows.append(("memory", f"{memory['uss_mean_mib']:.1f} MiB private per node, {total}"))
    return rows


def _moment(seconds: float, virtual: bool) -> str:
    shown = f"{seconds:.4g} s" if seconds < 60 else format_seconds(seconds)
    return f"virtual {shown}" if virtual else shown


def _statistics(statistics: Mapping[str, Any] | None) -> str:
    if statistics is None:
        return "not evaluated"
    if statistics["mean"] is None:
        return "not finite: training diverged; try a smaller training.lr"
    return "{mean:.4f} ± {std:.4f}, from {min:.4f} to {max:.4f}".format(**statistics)


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
