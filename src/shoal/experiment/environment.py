"""The conditions that an experiment puts its nodes under, worked out for the engines: network, devices, comings and
goings, faults."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.environment.availability import Availability, AvailabilitySchedule
from shoal.environment.devices import Device, Speed
from shoal.environment.faults import fault_events
from shoal.environment.network.access import AccessLink, access_links
from shoal.environment.network.links import Uniform, star
from shoal.environment.network.model import AccessLimit, EnvironmentEvent, NetworkModel
from shoal.environment.network.network import Direct, Network, NetworkTimeline
from shoal.environment.schedule import events
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.types import NodeId, format_node_ids

UNBLOCKING_FAULTS = frozenset({"crash", "raise", "hang", "restart", "hold", "release"})
"""The kinds of faults that strike, or end, by what can set nodes going that wait for each other."""


@dataclass(frozen=True)
class Environment:
    """What surrounds the nodes of a run, the same in every process that works it out."""

    experiment: Experiment
    timeline: NetworkTimeline | None
    """None: messages take no time."""
    availability_schedule: AvailabilitySchedule | None
    """None: everybody is online, always."""
    access_limits: tuple[AccessLimit, ...]
    has_device_speeds: bool
    """Whether any node's device has a speed of its own."""
    access_links: tuple[AccessLink, ...] | None = None
    """What the kernel limits each node to; None where it does not shape messages."""

    @property
    def has_timed_events(self) -> bool:
        """Whether nodes come and go, or anything else happens by the clock."""
        return bool(
            self.availability_schedule is not None
            or self.experiment.timed_faults
            or (self.timeline is not None and (self.timeline.availability_changes or len(self.timeline.states) > 1))
        )

    @property
    def timing_matters(self) -> bool:
        """Whether it matters when things happen, so that no time may be lost by testing models."""
        plan = self.experiment
        shaped = self.needs_network_model or self.access_links is not None
        return shaped or plan.duration is not None or plan.evaluation.seconds is not None or self.has_device_speeds

    @property
    def needs_network_model(self) -> bool:
        """Whether messages need a carrier."""
        return self.access_links is None and (self.timeline is not None or self.has_timed_events)

    @property
    def restarts(self) -> bool:
        """Whether nodes that died may come back."""
        return self.experiment.restarts

    def network_model(self) -> NetworkModel | None:
        """A new carrier, if messages need one."""
        if not self.needs_network_model:
            return None
        network_state = self.timeline.initial_state if self.timeline is not None else Direct()
        return NetworkModel(network_state, self.experiment.size, self.experiment.seed, self.access_limits)

    def events(self) -> Iterator[EnvironmentEvent]:
        """What happens by the clock, from the beginning."""
        experiment = self.experiment
        faults = fault_events(experiment.timed_faults, experiment.nodes, experiment.size, experiment.seed)
        return events(self.timeline, self.availability_schedule, experiment.nodes, faults)

    def unblocking_times(self) -> Iterator[float]:
        """When the clock brings something that can set nodes going which wait for each other, in order of time.

        That is a death, for then nobody waits any longer, a return from it, a release of messages, an error, or a
        change of the network. That nodes come and go is none: whoever waits, waits.
        """
        plan = self.experiment
        faults = [f if f.kind in UNBLOCKING_FAULTS else replace(f, time=None, every=None) for f in plan.timed_faults]
        stages = self.timeline.states[1:] if self.timeline is not None else ()
        changes = (time for time, _ in stages)
        return heapq.merge(changes, (h.time for h in fault_events(faults, plan.nodes, plan.size, plan.seed)))

    def will_be_online(self, node: NodeId, time: float) -> bool:
        """Whether a node that is offline is ever online again, as far as network and availability know."""
        last = next(
            (p for p in reversed(self.timeline.availability_changes if self.timeline else ()) if p.node == node), None
        )
        if last is not None and not last.online and last.time <= time:
            return False
        availability_schedule = self.availability_schedule
        if availability_schedule is None or node >= self.experiment.nodes:
            return True
        return availability_schedule.online(node, time) or availability_schedule.next_change(node, time) < math.inf


def build_environment(experiment: Experiment, speeds: Sequence[Speed]) -> Environment:
    """Those of nodes that are so fast.

    Raises `ExperimentError` for a network or an availability that cannot be built on these nodes.
    """
    availability: Availability = experiment.availability.build()
    limited = any(speed.bandwidth is not None for speed in speeds)
    access_limits = tuple(
        AccessLimit(math.inf if speed.bandwidth is None else speed.bandwidth, speed.network_slowdown)
        for speed in speeds
    )
    problems: list[str] = []
    timeline: NetworkTimeline | None = None
    availability_schedule: AvailabilitySchedule | None = None
    try:
        timeline = _timeline(experiment)
        if timeline is None and limited:
            timeline = Uniform(latency=0.0).build(experiment.size, experiment.seed)
    except ValueError as error:
        problems.append(f"network = {experiment.network.name!r}: {error}")
    try:
        availability_schedule = availability.build(experiment.nodes, experiment.seed)
    except ValueError as error:
        problems.append(f"availability = {experiment.availability.name!r}: {error}")
    if not problems:
        problems += _without_effect(experiment, timeline, access_limits)
    if problems:
        raise ExperimentError(problems, experiment.name)
    paced = any(speed.step_seconds is not None or speed.slowdown != 1.0 for speed in speeds)
    access = _access(experiment, timeline, access_limits)
    return Environment(experiment, timeline, availability_schedule, access_limits, paced, access)


def _without_effect(
    experiment: Experiment, timeline: NetworkTimeline | None, access_limits: Sequence[AccessLimit]
) -> list[str]:
    """What is to make messages slow at nodes whose own links nothing limits, so that there is nothing to divide."""
    size = experiment.size
    slowed = {"device: network_slowdown": [i for i in range(size) if access_limits[i].slowdown != 1.0]}
    for number, fault in enumerate(experiment.fault):
        if fault.kind == "slow" and fault.what == "network":
            slowed[f"fault[{number}]: what = 'network'"] = list(fault.ids(size) or range(experiment.nodes))
    if not any(slowed.values()):
        return []
    limited = _limited(timeline, access_limits)
    return [
        f"{what} has no effect on {_named(unlimited)}: in network = {experiment.network.name!r} nothing "
        "limits their own links; give them an upload and a download there, or use a network like "
        "{ name = 'uniform', upload = 100, download = 100 }"
        for what, nodes in slowed.items()
        if (unlimited := [node for node in nodes if node not in limited])
    ]


def _named(nodes: Sequence[NodeId]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {format_node_ids(nodes, most=8)}"


def _limited(timeline: NetworkTimeline | None, access_limits: Sequence[AccessLimit]) -> set[NodeId]:
    """The nodes that have a link of their own with a bandwidth, at some time."""
    limited = {node for node, connection in enumerate(access_limits) if connection.bandwidth < math.inf}
    for _, network_state in timeline.states if timeline is not None else ():
        carries = network_state.capacities
        limited.update(
            node
            for node in range(len(access_limits))
            if node not in limited and any(carries[link] < math.inf for link in network_state.access(node))
        )
    return limited


def _access(
    experiment: Experiment, timeline: NetworkTimeline | None, access_limits: Sequence[AccessLimit]
) -> tuple[AccessLink, ...] | None:
    if experiment.engine != "processes" or experiment.processes.shaping != "kernel":
        return None
    try:
        return access_links(timeline or NetworkTimeline([(0.0, Direct())]), experiment.size, access_limits)
    except ValueError as error:
        said = f"network = {experiment.network.name!r}: {error}; use processes.shaping = 'model'"
        raise ExperimentError([said], experiment.name) from None


def _timeline(experiment: Experiment) -> NetworkTimeline | None:
    """The network on all nodes; some may have connections of their own, where all are round one switch."""
    network: Network = experiment.network.build()
    others = [group for group in experiment.group if group.network is not None]
    if not others:
        return network.build(experiment.size, experiment.seed)
    built = [experiment.settings(node).network.build() for node in range(experiment.size)]
    each = [one for one in built if isinstance(one, Uniform)]
    if not isinstance(network, Uniform) or len(each) < experiment.size:
        raise ValueError("groups have a network of their own, which only goes with 'uniform'; describe it as 'kollaps'")
    if any(one.links != network.links for one in each):
        raise ValueError("groups say 'links' of their own; say them in the network of all nodes")
    return NetworkTimeline([(0.0, star(each, network.links))])


def device_speeds(experiment: Experiment) -> list[Speed]:
    """How fast each node is, by its id; those that serve come last."""
    devices: dict[int, Device] = {}  # one for all nodes that have the same, for it may have read a file
    speeds = []
    for node in range(experiment.size):
        settings = experiment.settings(node)
        which = id(settings.device)
        if which not in devices:
            devices[which] = settings.device.build()
        speeds.append(devices[which].speed(node, experiment.seed, settings.training.batch_size))
    return speeds
