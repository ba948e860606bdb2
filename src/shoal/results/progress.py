"""The progress that a run reports, and the outcome that an engine returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

PROGRESS_INTERVAL = 0.25
"""Seconds between two reports of progress."""

WRITING = "writing"
"""The phase in which the results of a run are written, after its nodes have ended."""

Status: TypeAlias = Literal["completed", "incomplete", "failed", "interrupted", "unfinished"]
"""All nodes reached the end; some did; none did; the user stopped the run; the run has no summary yet, because it is in
progress or its coordinator was killed."""

Score: TypeAlias = tuple[str, float]
"""The name of a metric, and its value."""

MAIN_METRICS = ("accuracy", "rmse", "perplexity", "loss")
"""In order of preference."""


def main_metric(names: Iterable[str]) -> str | None:
    """Return the metric to show if only one is shown: accuracy, or the main metric of a task without accuracy."""
    found = sorted(names)
    return next((name for name in MAIN_METRICS if name in found), found[0] if found else None)


def main_score(scores: Mapping[str, float]) -> Score | None:
    """Return the main metric and its value."""
    name = main_metric(scores)
    return None if name is None else (name, scores[name])


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    phase: str
    nodes: int
    alive: int
    seconds: float
    """Wall time since the run started."""
    round: float = 0.0
    """Finished rounds, mean over the nodes."""
    rounds: int | None = None
    """All rounds, if the algorithm has a fixed number of them."""
    score: Score | None = None
    """Mean over the nodes at the latest evaluation."""
    bytes_sent: int = 0
    virtual_seconds: float | None = None
    duration: float | None = None
    """The time after which the run ends at the latest: virtual seconds if the run has a virtual clock."""
    failed: int = 0
    """Nodes that failed, without nodes that have not joined yet."""
    activity: str = ""
    """What the run does, if it is not training: "evaluating 3 averaged models"."""
    activity_done: float | None = None
    """The finished fraction of the activity; None if it is unknown."""

    @property
    def done(self) -> float | None:
        """The finished fraction of the run, by rounds or by the clock; None if neither has an end."""
        clock = self.seconds if self.virtual_seconds is None else self.virtual_seconds
        parts = [self.round / self.rounds if self.rounds else 0.0, clock / self.duration if self.duration else 0.0]
        return min(1.0, max(parts)) if self.rounds or self.duration else None


class ProgressListener(Protocol):
    """Receives the progress of a run and notices for the user."""

    def progress(self, progress: Progress) -> None: ...

    def notice(self, text: str) -> None:
        """Show the user a message, such as a failed node or a warning."""
        ...


class NullProgressListener:
    """A listener that ignores everything."""

    def progress(self, progress: Progress) -> None: ...

    def notice(self, text: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended. Only the engine knows it: it is not in the records of the nodes."""

    status: Status
    wall_s: float | None
    startup_s: float | None
    """Seconds from the command until all nodes began to train, or until the end of a run that ended before; None if the
    engine raised an error."""
    virtual_s: float | None = None
    lost: dict[int, str] = field(default_factory=dict)
    """Nodes that did not reach the end, and why."""
    facts: dict[str, object] = field(default_factory=dict)
    """Further entries of the summary: what the engine chose or measured."""
    unauthenticated_connections: int = 0
    """Connections that the engine rejected, in addition to those that nodes rejected."""


class MeanScore:
    """The mean score of the latest evaluation, updated with one score at a time."""

    def __init__(self) -> None:
        self._round = -1
        self._name = ""
        self._sum = 0.0
        self._count = 0

    def add(self, round: int, score: Score | None) -> None:
        if round > self._round:
            self._round, self._sum, self._count = round, 0.0, 0
        if round == self._round and score is not None:
            self._name = score[0]
            self._sum += score[1]
            self._count += 1

    @property
    def mean(self) -> Score | None:
        return (self._name, self._sum / self._count) if self._count else None
