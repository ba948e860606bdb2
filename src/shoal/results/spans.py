"""Spans: what a node did, and when. They are part of the records of a node.

A span is an activity with its start and its end in seconds of the run's clock. The spans of a node are in order of time
and do not overlap. Activities:

| activity | the node's algorithm |
|---|---|
| `train` | trains |
| `wait` | waits for messages |
| `send` | hands messages to the network, or waits until the network has taken them |
| `offline` | is suspended, because the node's device is offline |

In the time between spans the node is idle: it sleeps, evaluates its model, or waits for a processor. Only the algorithm
itself has spans, its background tasks have none: a task that always waits for messages does not make a node wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Span: TypeAlias = tuple[str, float, float]
"""An activity, its start and its end."""

TRAIN, WAIT, SEND, OFFLINE = ACTIVITIES = ("train", "wait", "send", "offline")

MAX_SPANS = 64
"""The most spans of one record."""
PARTS = MAX_SPANS // 2 // len(ACTIVITIES)
"""The number of parts of `condensed` spans."""


def condensed(spans: Sequence[Span]) -> list[Span]:
    """Return at most `MAX_SPANS` / 2 spans with the same total for each activity.

    The time of `spans` is divided into parts. In each part, the spans of one activity become one span, and these follow
    each other without a gap. So a span is at most one part away from its true place.
    """
    size = -(-len(spans) // PARTS)
    found: list[Span] = []
    for first in range(0, len(spans), size):
        part = spans[first : first + size]
        start = part[0][1]
        totals = dict.fromkeys((activity for activity, _, _ in part), 0.0)
        for activity, begin, end in part:
            totals[activity] += end - begin
        for activity, total in totals.items():
            found.append((activity, start, start + total))
            start += total
    return found
