"""What happens in a run by schedule: nodes come and go, faults strike and are mended, links change."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from operator import attrgetter

from shoal.environment.availability import AvailabilitySchedule
from shoal.environment.network.model import EnvironmentEvent
from shoal.environment.network.network import AvailabilityChange, NetworkChange, NetworkTimeline
from shoal.types import NodeId


def events(
    timeline: NetworkTimeline | None,
    availability_schedule: AvailabilitySchedule | None,
    nodes: int,
    faults: Iterator[EnvironmentEvent],
) -> Iterator[EnvironmentEvent]:
    """All of it in order of time, and it may be endless. What changes links comes before what strikes nodes."""
    stages: Sequence[EnvironmentEvent] = (
        [NetworkChange(time, network_state) for time, network_state in timeline.states[1:]] if timeline else []
    )
    availability_changes: Sequence[EnvironmentEvent] = timeline.availability_changes if timeline else []
    comings = [_comings(availability_schedule, node) for node in range(nodes)] if availability_schedule else []
    return heapq.merge(stages, availability_changes, *comings, faults, key=attrgetter("time"))


def _comings(availability_schedule: AvailabilitySchedule, node: NodeId) -> Iterator[AvailabilityChange]:
    """When a node goes, and when it comes back. It is there when the run begins, if only for a moment."""
    online, time = True, 0.0
    if not availability_schedule.online(node, time):
        online = False
        yield AvailabilityChange(time, node, online)
    while (time := availability_schedule.next_change(node, time)) != math.inf:
        online = not online
        yield AvailabilityChange(time, node, online)
