"""Progress as lines of plain text, for a terminal, a file or a notebook."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.results.progress import WRITING, Progress

LINE_INTERVAL = 2.0
"""Seconds between two lines of progress, at the beginning."""
LONGEST_INTERVAL = 60.0
"""Seconds between two lines of progress of a command that takes hours."""
SHARE = 1 / 30
"""The interval as a share of the time since the first line."""
SEPARATOR = " · "


@dataclass(frozen=True)
class ProgressRow:
    """The progress of one run, file or other task, as a display shows it."""

    facts: Sequence[str]
    """Short texts, the most important first: a narrow terminal may omit the last ones."""
    done: float | None = None
    """The finished fraction, from 0 to 1; None if it is unknown."""
    label: str = ""
    """The name of the task, if a display shows several."""
    stage: str = ""
    """What the task does now. A display shows a new stage at once."""

    @property
    def text(self) -> str:
        """The row as one line of plain text."""
        return f"{self.label}: {SEPARATOR.join(self.facts)}" if self.label else SEPARATOR.join(self.facts)


class ProgressLines:
    """A `ProgressListener` that writes a line every few seconds, at each new phase, at its end, and for each notice.

    The longer a command takes, the fewer lines it writes.
    """

    def __init__(self, write: Callable[[str], object] = print) -> None:
        self._write = write
        self._began: float | None = None
        self._written = 0.0
        self._line = ""
        self._stage: tuple[str, str, bool] | None = None

    def progress(self, progress: Progress) -> None:
        if progress.phase != WRITING:  # a moment before the command prints the summary
            self.row(replace(run_row(progress), stage=progress.phase))

    def row(self, row: ProgressRow) -> None:
        """Write the progress of a task, if a line is due."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        interval = min(LONGEST_INTERVAL, max(LINE_INTERVAL, SHARE * (now - self._began)))
        stage = row.label, row.stage, row.done == 1
        if stage == self._stage and now - self._written < interval:
            return
        if row.text != self._line:
            self._write(row.text)
        self._written, self._line, self._stage = now, row.text, stage

    def notice(self, text: str) -> None:
        self._write(f"! {text}")


def run_row(progress: Progress, label: str = "") -> ProgressRow:
    """Return the progress of a run as a row."""
    if progress.phase == "running" and not progress.activity:
        return ProgressRow(_training(progress), progress.done, label, progress.phase)
    facts = [progress.activity or f"{progress.phase} {progress.nodes} nodes"]
    if progress.seconds >= 1:
        facts.append(f"{format_seconds(progress.seconds)} elapsed")
    return ProgressRow(facts, progress.activity_done, label, progress.phase + progress.activity)


def _training(progress: Progress) -> list[str]:
    facts = [f"round {int(progress.round)}" + (f"/{progress.rounds}" if progress.rounds else "")]
    left = time_left(progress)
    if left is not None:
        facts.append(f"{format_seconds(left)} left")
    if progress.score is not None:
        facts.append("{} {:.3f}".format(*progress.score))
    if progress.failed:
        facts.append(f"{progress.failed} of {progress.nodes} nodes failed")
    facts.append(f"{format_bytes(progress.bytes_sent)} sent")
    if progress.alive + progress.failed < progress.nodes or not progress.failed:
        facts.append(f"{progress.alive}/{progress.nodes} nodes")
    if progress.virtual_seconds is not None:
        facts.append(f"virtual {format_seconds(progress.virtual_seconds)}")
    facts.append(f"{format_seconds(progress.seconds)} elapsed")
    return facts


def describe(progress: Progress) -> str:
    """Return the progress of a run as one line of plain text."""
    return run_row(progress).text


def time_left(progress: Progress) -> float | None:
    """Estimate the seconds until the run ends from its speed so far; None while that is unknown.

    Before the first round ends, only the clock of a run with a duration shows a speed.
    """
    done = progress.done if progress.round >= 1 else replace(progress, rounds=None).done
    return progress.seconds * (1 - done) / done if done else None


class TransferMeter:
    """The progress of a transfer of bytes: its speed, and the time that is left."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._began = time.monotonic()
        self._start: int | None = None
        """The bytes that were there before: a transfer may continue an earlier one."""

    def row(self, count: int, total: int | None) -> ProgressRow:
        """Return the progress after `count` bytes of `total`; None if the total is unknown."""
        self._start = count if self._start is None else self._start
        seconds = time.monotonic() - self._began
        speed = (count - self._start) / seconds if seconds > 0 else 0.0
        facts = [format_bytes(count) + (f" of {format_bytes(total)}" if total else "")]
        if speed:
            if total:
                facts.append(f"{format_seconds(max(0, total - count) / speed)} left")
            facts.append(f"{format_bytes(speed)}/s")
        return ProgressRow(facts, count / total if total else None, self._label, "transfer")


def format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
