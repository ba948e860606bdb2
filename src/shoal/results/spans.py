"""Spans: what a node did, and when. They are part of the records of a node.

A span is an activity with its start and its end in seconds of the run's clock. The spans of a node are in order of time
and do not overlap. Activities:

| activity | meaning |
|---|---|
| `train` | the node trains |
| `wait` | the node's algorithm waits for messages |
| `send` | the algorithm hands messages to the network, or waits until the network has taken them |
| `offline` | the node is suspended, because its device is offline |

In the time between spans the node is idle: it sleeps, evaluates its model, or waits for a processor. The waits and
sends of the algorithm's background tasks are no spans: a task that always waits for messages does not make its node
wait.
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
"""The parts of the spans of one record that has too many."""


def condensed(spans: Sequence[Span], parts: int = PARTS) -> list[Span]:
    """Return at most one span of each activity for each of `parts`, with the same total for each activity.

    The parts have about the same number of spans. In each part, the spans of one activity become one span, and these
    follow each other without a gap. So a span is at most one part away from its true place.
    """
    size = max(1, -(-len(spans) // parts))
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
