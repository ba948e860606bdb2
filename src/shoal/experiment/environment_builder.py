"""Build the environment of an experiment: its network, devices, availability and faults."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.environment.availability import Availability, AvailabilitySchedule
from shoal.environment.devices import Device, Speed
from shoal.environment.environment import Environment
from shoal.environment.network.access import AccessLink, access_links
from shoal.environment.network.links import Uniform, star
from shoal.environment.network.model import AccessLimit
from shoal.environment.network.network import Direct, Network, NetworkTimeline
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.types import NodeId, format_node_ids


def build_environment(experiment: Experiment, speeds: Sequence[Speed]) -> Environment:
    """Build the environment. `speeds` are the speeds of the nodes' devices.

    Raises `ExperimentError` if the network or the availability cannot be built for these nodes.
    """
    availability: Availability = experiment.availability.build()
    limits = tuple(
        AccessLimit(math.inf if speed.bandwidth is None else speed.bandwidth, speed.network_slowdown)
        for speed in speeds
    )
    problems: list[str] = []
    timeline: NetworkTimeline | None = None
    schedule: AvailabilitySchedule | None = None
    try:
        timeline = _timeline(experiment)
        if timeline is None and any(speed.bandwidth is not None for speed in speeds):
            timeline = Uniform(latency=0.0).build(experiment.size, experiment.seed)
    except ValueError as error:
        problems.append(f"network = {experiment.network.name!r}: {error}")
    try:
        schedule = availability.build(experiment.nodes, experiment.seed)
    except ValueError as error:
        problems.append(f"availability = {experiment.availability.name!r}: {error}")
    if not problems:
        problems += _slowdowns_without_effect(experiment, timeline, limits)
    if problems:
        raise ExperimentError(problems, experiment.name)
    own_speeds = any(speed.step_seconds is not None or speed.slowdown != 1.0 for speed in speeds)
    return Environment(
        nodes=experiment.nodes,
        size=experiment.size,
        seed=experiment.seed,
        timeline=timeline,
        availability_schedule=schedule,
        timed_faults=experiment.timed_faults,
        restarts=experiment.restarts,
        access_limits=limits,
        access_links=_kernel_links(experiment, timeline, limits),
        duration=experiment.duration,
        join_by_round=frozenset(experiment.joins_by_round),
        has_time_settings=own_speeds or experiment.evaluation.seconds is not None,
    )


def device_speeds(experiment: Experiment) -> list[Speed]:
    """The speed of every node's device, by node id, servers included."""
    devices: dict[int, Device] = {}  # one for all nodes with the same settings: it may have read a file
    speeds = []
    for node in range(experiment.size):
        settings = experiment.settings(node)
        key = id(settings.speed)
        if key not in devices:
            devices[key] = settings.speed.build()
        speeds.append(devices[key].speed(node, experiment.seed, settings.training.batch_size))
    return speeds


def _timeline(experiment: Experiment) -> NetworkTimeline | None:
    """The network of all nodes. In a 'uniform' network, groups may have access links of their own."""
    network: Network = experiment.network.build()
    if all(group.network is None for group in experiment.group):
        return network.build(experiment.size, experiment.seed)
    built = [experiment.settings(node).network.build() for node in range(experiment.size)]
    uniform = [one for one in built if isinstance(one, Uniform)]
    if not isinstance(network, Uniform) or len(uniform) < experiment.size:
        raise ValueError("groups have their own network, which only 'uniform' supports; describe it as 'kollaps'")
    if any(one.links != network.links for one in uniform):
        raise ValueError("groups have their own 'links'; move these to the network of all nodes")
    return NetworkTimeline([(0.0, star(uniform, network.links))])


def _slowdowns_without_effect(
    experiment: Experiment, timeline: NetworkTimeline | None, limits: Sequence[AccessLimit]
) -> list[str]:
    """The network slowdowns of nodes whose access links have no bandwidth limit: there is nothing to divide."""
    size = experiment.size
    slowed = {"speed: network_slowdown": [i for i in range(size) if limits[i].slowdown != 1.0]}
    for number, fault in enumerate(experiment.fault):
        if fault.kind == "slow" and fault.what == "network":
            slowed[f"fault[{number}]: what = 'network'"] = list(fault.ids(size) or range(experiment.nodes))
    if not any(slowed.values()):
        return []
    limited = _nodes_with_limits(timeline, limits)
    return [
        f"{setting} has no effect on {_format_nodes(unlimited)}: in network = {experiment.network.name!r} their access "
        "links have no bandwidth limit; give them an upload and a download there, or use a network like "
        "{ name = 'uniform', upload = 100, download = 100 }"
        for setting, nodes in slowed.items()
        if (unlimited := [node for node in nodes if node not in limited])
    ]


def _format_nodes(nodes: Sequence[NodeId]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {format_node_ids(nodes, most=8)}"


def _nodes_with_limits(timeline: NetworkTimeline | None, limits: Sequence[AccessLimit]) -> set[NodeId]:
    """The nodes that have an access link with a finite bandwidth at some time."""
    limited = {node for node, limit in enumerate(limits) if limit.bandwidth < math.inf}
    for _, network_state in timeline.states if timeline is not None else ():
        capacities = network_state.capacities
        limited.update(
            node
            for node in range(len(limits))
            if node not in limited and any(capacities[link] < math.inf for link in network_state.access(node))
        )
    return limited


def _kernel_links(
    experiment: Experiment, timeline: NetworkTimeline | None, limits: Sequence[AccessLimit]
) -> tuple[AccessLink, ...] | None:
    """The access links for the kernel to enforce; None if it does not shape messages."""
    if experiment.engine != "processes" or experiment.processes.shaping != "kernel":
        return None
    try:
        return access_links(timeline or NetworkTimeline([(0.0, Direct())]), experiment.size, limits)
    except ValueError as error:
        problem = f"network = {experiment.network.name!r}: {error}; use processes.shaping = 'model'"
        raise ExperimentError([problem], experiment.name) from None
