"""The progress of a run as lines of plain text, for a terminal, a file or a notebook."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from shoal.results.progress import Progress

LINE_INTERVAL = 2.0
"""Seconds between two lines of progress."""


class ProgressLines:
    """A `ProgressListener` that writes a line every few seconds, at each new phase, and for each notice."""

    def __init__(self, write: Callable[[str], object] = print) -> None:
        self._write = write
        self._written = -LINE_INTERVAL
        self._line = ""
        self._phase = ""

    def progress(self, progress: Progress) -> None:
        if progress.phase != self._phase or time.monotonic() - self._written >= LINE_INTERVAL:
            line = describe(progress)
            if line != self._line:
                self._write(line)
            self._written, self._line, self._phase = time.monotonic(), line, progress.phase

    def notice(self, text: str) -> None:
        self._write(f"! {text}")


def describe(progress: Progress) -> str:
    """Return the progress of a run as one line of plain text."""
    if progress.phase != "running":
        return f"{progress.phase} {progress.nodes} nodes"
    of = f"/{progress.rounds}" if progress.rounds else ""
    parts = [f"round {int(progress.round)}{of}"]
    if progress.score is not None:
        parts.append("{} {:.3f}".format(*progress.score))
    parts.append(f"{format_bytes(progress.bytes_sent)} sent")
    parts.append(f"{progress.alive}/{progress.nodes} nodes")
    if progress.virtual_seconds is not None:
        parts.append(f"virtual {format_seconds(progress.virtual_seconds)}")
    parts.append(f"{format_seconds(progress.seconds)} elapsed")
    left = time_left(progress)
    if left is not None:
        parts.append(f"{format_seconds(left)} left")
    return " · ".join(parts)


def time_left(progress: Progress) -> float | None:
    """Estimate the seconds until the run ends from its speed so far; None while that is unknown.

    Before the first round ends, only the clock of a run with a duration shows a speed.
    """
    done = progress.done if progress.round >= 1 else replace(progress, rounds=None).done
    return progress.seconds * (1 - done) / done if done else None


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
