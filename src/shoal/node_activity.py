"""The activity of one node since its previous record: what it did, and the nodes that it sent models to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.results.spans import MAX_SPANS, OFFLINE, Span, condensed
from shoal.state import State
from shoal.types import NodeId


def carries_model(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Whether a payload of an algorithm's own kind carries (a part of) a model: only models are float32."""
    return any(array.dtype == np.float32 for array in arrays.values())


class NodeActivity:
    """Collects spans and receivers for the next record. The runtime adds spans, the node adds receivers.

    The runtime calls `add` for the algorithm only, not for background tasks: so spans do not overlap.
    """

    __slots__ = ("_longest_gap", "_offline", "_recorded", "_spans", "receivers")

    def __init__(self, longest_gap: float = 0.0) -> None:
        """Two spans of one activity become one span if the time between them is at most `longest_gap` seconds."""
        self.receivers: set[NodeId] = set()
        """The nodes that models were sent to since the previous record."""
        self._recorded: set[NodeId] | None = None
        """The receivers of the latest record."""
        self._spans: list[Span] = []
        self._offline: list[tuple[float, float]] = []
        """Times that the node was offline, which are not in `_spans` yet."""
        self._longest_gap = longest_gap

    def add(self, activity: str, start: float, end: float) -> None:
        """Add what the algorithm has just done. If the node was offline meanwhile, the activity was suspended."""
        if self._offline:
            start = self._add_offline(activity, start)
        if end > start:
            self._append(activity, start, end)

    def add_offline(self, start: float, end: float) -> None:
        """Add a time that the node was offline. The algorithm may be in an activity, which is added later."""
        if end > start:
            self._offline.append((start, end))

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
        for start, end in self._offline:
            self._append(OFFLINE, start, end)
        self._offline.clear()
        spans, self._spans = self._spans, []
        return receivers, spans

    def state(self) -> State:
        return {
            "receivers": sorted(self.receivers),
            "recorded": None if self._recorded is None else sorted(self._recorded),
            "spans": [list(span) for span in self._spans],
            "offline": [list(times) for times in self._offline],
        }

    def restore(self, state: State) -> None:
        recorded = state["recorded"]
        self.receivers = set(state["receivers"])
        self._recorded = None if recorded is None else set(recorded)
        self._spans = [(activity, start, end) for activity, start, end in state["spans"]]
        self._offline = [(start, end) for start, end in state["offline"]]

    def _add_offline(self, activity: str, start: float) -> float:
        """Add the times that the node was offline, and the activity between them. Return where the activity goes on."""
        for began, ended in self._offline:
            if began > start:
                self._append(activity, start, began)
            self._append(OFFLINE, began, ended)
            start = max(start, ended)
        self._offline.clear()
        return start

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
