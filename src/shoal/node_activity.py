"""The activity of one node since its previous record: what it did, and the nodes that it sent models to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.results.spans import MAX_SPANS, Span, condensed
from shoal.state import State
from shoal.types import NodeId


def carries_model(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Whether a payload of an algorithm's own kind carries (a part of) a model: only models are float32."""
    return any(array.dtype == np.float32 for array in arrays.values())


class NodeActivity:
    """Collects spans and receivers for the next record. The runtime adds spans, the node adds receivers.

    The runtime calls `add` for the algorithm only, and `interrupt` for what takes precedence: so spans do not overlap.
    """

    __slots__ = ("_interruptions", "_longest_gap", "_recorded", "_spans", "receivers")

    def __init__(self, longest_gap: float = 0.0) -> None:
        """Two spans of one activity become one span if the time between them is at most `longest_gap` seconds."""
        self.receivers: set[NodeId] = set()
        """The nodes that models were sent to since the previous record."""
        self._recorded: set[NodeId] | None = None
        """The receivers of the latest record."""
        self._spans: list[Span] = []
        self._interruptions: list[Span] = []
        """Spans that are not in `_spans` yet, because the algorithm may be in an activity that began before."""
        self._longest_gap = longest_gap

    def add(self, activity: str, start: float, end: float) -> None:
        """Add what the algorithm has just done. It was suspended during interruptions that were added before."""
        if self._interruptions:
            interruptions, self._interruptions = self._interruptions, []
            for span in _interrupted(activity, start, end, interruptions):
                self._append(*span)
        elif not self._spans and end > start:  # as `_append` does, but faster
            self._spans.append((activity, start, end))
        elif end > start:
            self._append(activity, start, end)

    def interrupt(self, activity: str, start: float, end: float) -> None:
        """Add a time that the node was offline, or that a background task trained.

        The algorithm may be in another activity at the same time, which is added later.
        """
        if end > start:
            before = [span for span in self._interruptions if span[2] <= start]
            during = self._interruptions[len(before) :]
            self._interruptions = [*before, *_interrupted(activity, start, end, during)]

    def take(self) -> tuple[list[NodeId] | None, list[Span]]:
        """Return the receivers and the spans since the last call, as a record has them.

        The receivers are in order; None if they are the same as before. There are at most `MAX_SPANS` spans.
        """
        receivers: list[NodeId] | None = None
        if self.receivers == self._recorded:
            self.receivers.clear()
        else:
            self._recorded, self.receivers = self.receivers, set()
            receivers = sorted(self._recorded)
        for span in self._interruptions:
            self._append(*span)
        self._interruptions.clear()
        spans, self._spans = self._spans, []
        return receivers, spans

    def state(self) -> State:
        return {
            "receivers": sorted(self.receivers),
            "recorded": None if self._recorded is None else sorted(self._recorded),
            "spans": [list(span) for span in self._spans],
            "interruptions": [list(span) for span in self._interruptions],
        }

    def restore(self, state: State) -> None:
        recorded = state["recorded"]
        self.receivers = set(state["receivers"])
        self._recorded = None if recorded is None else set(recorded)
        self._spans = [(activity, start, end) for activity, start, end in state["spans"]]
        self._interruptions = [(activity, start, end) for activity, start, end in state["interruptions"]]

    def _append(self, activity: str, start: float, end: float) -> None:
        spans = self._spans
        if spans:
            last, began, ended = spans[-1]
            if last == activity and start - ended <= self._longest_gap:
                spans[-1] = (activity, began, end)
                return
            if len(spans) >= MAX_SPANS:
                self._spans = spans = condensed(spans)
        spans.append((activity, start, end))


def _interrupted(activity: str, start: float, end: float, interruptions: Iterable[Span]) -> Iterator[Span]:
    """Yield the interruptions, in order, and the activity before, between and after them."""
    for span in interruptions:
        if span[1] > start:
            yield activity, start, span[1]
        yield span
        start = max(start, span[2])
    if end > start:
        yield activity, start, end
