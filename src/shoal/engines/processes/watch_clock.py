"""A clock that stands still while the coordinator does not run."""

from __future__ import annotations

import math

MAX_STEP = 0.25
"""Seconds between two ticks that count at most."""


class WatchClock:
    """The seconds in which the coordinator was able to read the messages of nodes.

    Timeouts of nodes use this clock. A coordinator that was suspended, or got no processor time, finds old messages
    when it continues: it has to read them before it may conclude that a node sends none.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = math.inf

    def tick(self, now: float) -> None:
        """Advance to `now` on the machine's monotonic clock. Call it in every turn of the coordinator's loop."""
        self.seconds += min(MAX_STEP, max(0.0, now - self._last))
        self._last = now
