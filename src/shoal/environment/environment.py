"""The environment of a run: everything that surrounds its nodes, and the events that change it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from shoal.environment.availability import AvailabilitySchedule
from shoal.environment.faults import Fault, FaultEvent, fault_events
from shoal.environment.network.access import AccessLink
from shoal.environment.network.model import AccessLimit, EnvironmentEvent, NetworkModel
from shoal.environment.network.network import AvailabilityChange, Direct, NetworkChange, NetworkTimeline
from shoal.types import NodeId

UNBLOCKING_FAULTS = frozenset({"crash", "raise", "hang", "restart", "join", "hold", "release"})
"""The kinds of faults whose start or end may unblock nodes that wait for each other."""


@dataclass(frozen=True)
class Environment:
    """Network, devices, availability and faults of a run. Every process that builds it gets the same one."""

    nodes: int
    """The number of training nodes."""
    size: int
    """The number of all nodes, including servers."""
    seed: int
    timeline: NetworkTimeline | None
    """None: messages take no time."""
    availability_schedule: AvailabilitySchedule | None
    """None: all nodes are always online."""
    timed_faults: Sequence[Fault]
    restarts: bool
    """Whether nodes may be started during the run: failed ones again, or late ones."""
    access_limits: Sequence[AccessLimit]
    """What the device of each node allows."""
    access_links: tuple[AccessLink, ...] | None = None
    """The bandwidth limits of each node that the kernel enforces; None if the kernel does not shape messages."""
    duration: float | None = None
    """The time at which the run ends, in seconds; None: when all nodes have returned."""
    join_by_round: Collection[NodeId] = ()
    """The late nodes that join when the others start a given round."""
    has_time_settings: bool = False
    """Whether the experiment evaluates at given times, or has devices with a speed of their own."""

    @property
    def has_timed_events(self) -> bool:
        """Whether nodes go offline and online, or anything else changes at a given time."""
        return bool(
            self.availability_schedule is not None
            or self.timed_faults
            or (self.timeline is not None and (self.timeline.availability_changes or len(self.timeline.states) > 1))
        )

    @property
    def timing_matters(self) -> bool:
        """Whether results depend on real time, so that evaluation must not delay nodes."""
        shaped = self.needs_network_model or self.access_links is not None
        return shaped or self.duration is not None or self.has_time_settings

    @property
    def needs_network_model(self) -> bool:
        """Whether messages pass through a network model."""
        return self.access_links is None and (self.timeline is not None or self.has_timed_events)

    def network_model(self) -> NetworkModel | None:
        """Create a network model, if messages need one."""
        if not self.needs_network_model:
            return None
        network_state = self.timeline.initial_state if self.timeline is not None else Direct()
        return NetworkModel(network_state, self.size, self.seed, self.access_limits)

    def events(self) -> Iterator[EnvironmentEvent]:
        """All changes of the environment, in order of time. There may be no last one.

        At equal times, changes of the network come before changes of nodes.
        """
        timeline, schedule = self.timeline, self.availability_schedule
        network_changes = [NetworkChange(time, state) for time, state in timeline.states[1:]] if timeline else []
        network_availability = timeline.availability_changes if timeline else ()
        availability = [_availability_changes(schedule, node) for node in range(self.nodes)] if schedule else []
        faults = self._fault_events(self.timed_faults)
        return heapq.merge(network_changes, network_availability, *availability, faults, key=attrgetter("time"))

    def unblocking_times(self) -> Iterator[float]:
        """The times of events that may unblock nodes that wait for each other, in order.

        These are crashes (the others stop waiting), restarts, joins, releases of messages, errors, and changes of the
        network. A node that goes offline or online is no such event: the nodes that wait for it continue to wait.
        """
        # The index of a fault is part of its random seed: the other faults stay in the list, without a time.
        faults = [f if f.kind in UNBLOCKING_FAULTS else replace(f, time=None, every=None) for f in self.timed_faults]
        network_changes = (time for time, _ in (self.timeline.states[1:] if self.timeline is not None else ()))
        return heapq.merge(network_changes, (event.time for event in self._fault_events(faults)))

    def will_be_online(self, node: NodeId, time: float) -> bool:
        """Whether the network and the availability schedule have the node online at `time` or later."""
        changes = self.timeline.availability_changes if self.timeline is not None else ()
        last = next((change for change in reversed(changes) if change.node == node), None)
        if last is not None and not last.online and last.time <= time:
            return False
        schedule = self.availability_schedule
        if schedule is None or node >= self.nodes:
            return True
        return schedule.online(node, time) or schedule.next_change(node, time) < math.inf

    def _fault_events(self, faults: Sequence[Fault]) -> Iterator[FaultEvent]:
        return fault_events(faults, self.nodes, self.size, self.seed, self.join_by_round)


def _availability_changes(schedule: AvailabilitySchedule, node: NodeId) -> Iterator[AvailabilityChange]:
    """When a node goes offline and online. Every node is online when the run begins, if only for a moment."""
    online, time = True, 0.0
    if not schedule.online(node, time):
        online = False
        yield AvailabilityChange(time, node, online)
    while (time := schedule.next_change(node, time)) != math.inf:
        online = not online
        yield AvailabilityChange(time, node, online)
