"""What a run tells while it goes on, and what an engine says of it when it has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

PROGRESS_INTERVAL = 0.25
"""Seconds between two reports of progress."""

Status: TypeAlias = Literal["completed", "incomplete", "failed", "interrupted"]
"""All nodes reached the end; some did; none did; the user stopped the run."""

Score: TypeAlias = tuple[str, float]
"""A metric, and what it comes to."""

LEADING = ("accuracy", "rmse", "perplexity", "loss")


def main_metric(names: Iterable[str]) -> str | None:
    """The metric to show where there is room for one: accuracy, or what a task without it is measured by."""
    found = sorted(names)
    return next((name for name in LEADING if name in found), found[0] if found else None)


def main_score(scores: Mapping[str, float]) -> Score | None:
    name = main_metric(scores)
    return None if name is None else (name, scores[name])


@dataclass(frozen=True)
class Progress:
    """Where a run is."""

    phase: str
    nodes: int
    alive: int
    seconds: float
    """Wall time since the run began."""
    round: float = 0.0
    """Rounds done, averaged over the nodes."""
    rounds: int | None = None
    """Rounds to do, where the algorithm has a number of them."""
    score: Score | None = None
    """Mean over the nodes at the latest evaluation."""
    bytes_sent: int = 0
    virtual_seconds: float | None = None
    duration: float | None = None
    """When the run ends at the latest: in virtual seconds where there are such, else in real ones."""

    @property
    def done(self) -> float | None:
        """The part of the run that is behind it, by its rounds or by its clock; None where neither says."""
        clock = self.seconds if self.virtual_seconds is None else self.virtual_seconds
        parts = [self.round / self.rounds if self.rounds else 0.0, clock / self.duration if self.duration else 0.0]
        return min(1.0, max(parts)) if self.rounds or self.duration else None


class ProgressListener(Protocol):
    """Somebody who watches a run."""

    def progress(self, progress: Progress) -> None: ...

    def notice(self, text: str) -> None:
        """Something the user should see: a node that was lost, a warning."""
        ...


class NullProgressListener:
    """A listener that does not listen."""

    def progress(self, progress: Progress) -> None: ...

    def notice(self, text: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as only the engine knows."""

    status: Status
    wall_s: float
    startup_s: float | None
    """From the command to the last node's first round; None when it did not come to that."""
    virtual_s: float | None = None
    lost: dict[int, str] = field(default_factory=dict)
    """Nodes that did not reach the end, and why."""
    facts: dict[str, object] = field(default_factory=dict)
    """What the engine chose or measured, for the summary."""
    unauthenticated_connections: int = 0
    """Connections that were refused beside those that nodes refused."""


class MeanScore:
    """The mean score at the latest evaluation, from scores that come one at a time."""

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
