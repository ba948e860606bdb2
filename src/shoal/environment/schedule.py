"""What happens in a run by schedule: nodes come and go, faults strike and are mended, links change."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from operator import attrgetter

from shoal.environment.availability import Attendance
from shoal.environment.network.model import Occurrence
from shoal.environment.network.network import Presence, Stage, Wired
from shoal.types import NodeId


def agenda(
    wired: Wired | None, attendance: Attendance | None, nodes: int, faults: Iterator[Occurrence]
) -> Iterator[Occurrence]:
    """All of it in order of time, and it may be endless. What changes links comes before what strikes nodes."""
    stages: Sequence[Occurrence] = [Stage(time, wiring) for time, wiring in wired.stages[1:]] if wired else []
    presences: Sequence[Occurrence] = wired.presences if wired else []
    comings = [_comings(attendance, node) for node in range(nodes)] if attendance else []
    return heapq.merge(stages, presences, *comings, faults, key=attrgetter("time"))


def _comings(attendance: Attendance, node: NodeId) -> Iterator[Presence]:
    """When a node goes, and when it comes back. It is there when the run begins, if only for a moment."""
    online, time = True, 0.0
    if not attendance.online(node, time):
        online = False
        yield Presence(time, node, online)
    while (time := attendance.next_change(node, time)) != math.inf:
        online = not online
        yield Presence(time, node, online)
