"""Starting a run on the agents of a plan: connect, place the nodes, and have every agent prepare its share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.coordinator import RunContext
from shoal.engines.processes.interrupts import Interrupts
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.agents_plan import AgentsPlan
from shoal.engines.processes.remote.connections import AgentConnections
from shoal.engines.processes.remote.remote_agent import RemoteAgent
from shoal.engines.processes.remote.shipping import Shipment
from shoal.engines.processes.takeover import TakenOver
from shoal.errors import LaunchError, NotContinuedError, RunError
from shoal.experiment import Experiment
from shoal.experiment.environment_builder import build_environment, device_speeds
from shoal.experiment.mapping import Machine, MachineInfo
from shoal.experiment.writing import write_mapping
from shoal.results.coordinator_file import AgentShare, CoordinatorFile
from shoal.types import NodeId, format_node_ids

MIN_CLOCK_ERROR = 0.05
"""Seconds that the clocks of two machines may differ at least: they were compared only at the start."""


def start_remote_agents(
    run: RunContext,
    plan: AgentsPlan,
    notify: Callable[[str], None],
    resources: ExitStack,
    interrupts: Interrupts,
) -> AgentGroup:
    """Connect to the agents of `plan` and have them prepare the run. Raises `RunError`."""
    experiment = run.experiment
    check_runs_on_agents(experiment)
    shipment = Shipment(experiment)
    connections = AgentConnections(plan, notify)
    resources.callback(connections.close)
    connections.connect(lambda: interrupts.signal is not None)
    if interrupts.signal is not None:
        raise RunError("interrupted")
    placement = _place(experiment, connections.agents)
    write_mapping(run.folder.mapping, placement)
    used = [agent for agent in connections.agents if agent.name in placement]
    for agent in connections.agents:
        if agent not in used:
            notify(f"agent {agent.name!r} gets no nodes")
            agent.close()
    positions = {agent.name: position for position, agent in enumerate(used)}
    by_node: dict[NodeId, int] = {node: positions[name] for name, nodes in placement.items() for node in nodes}
    agents = AgentGroup(used, by_node, connections)
    agents.clock_error = _clock_error(used)
    resources.callback(agents.close)
    interrupts.on_repeat(agents.kill_all)
    for agent in used:
        agent.begin(
            protocol.BeginRun(
                experiment.name,
                run.id,
                experiment.size,
                len(placement[agent.name]),
                experiment.processes.sealed,
                run.environment.needs_network_model and agent is used[0],
                shipment.table,
                shipment.files,
                agent.clock.offset,
            ),
            run.folder,
        )
    return agents


def take_over_agents(
    run: RunContext,
    left: CoordinatorFile,
    plan: AgentsPlan,
    notify: Callable[[str], None],
    resources: ExitStack,
    interrupts: Interrupts,
) -> tuple[AgentGroup, TakenOver]:
    """Connect to the agents that still run the nodes of a killed coordinator.

    Raises `NotContinuedError` if no agent of `plan` has them.
    """
    connections = AgentConnections(plan, notify, {share.session: share.name for share in left.agents})
    resources.callback(connections.close)
    connections.connect(lambda: interrupts.signal is not None)
    if interrupts.signal is not None:
        raise RunError("interrupted")
    if not connections.agents:
        raise NotContinuedError("no agent has the nodes of this run any longer")
    found = {agent.continues: agent for agent in connections.agents}
    agents: list[RemoteAgent] = []
    for share in left.agents:
        agent = found.get(share.session) or _absent_agent(share)
        agent.take_over(share, run.folder, has_network=run.environment.needs_network_model and not agents)
        agents.append(agent)
    if not any(agent.run_report for agent in agents):
        raise NotContinuedError("no agent has the nodes of this run any longer")
    by_node = {node: position for position, share in enumerate(left.agents) for node in share.nodes}
    group = AgentGroup(agents, by_node, connections)
    group.clock_error = max(left.clock_error, _clock_error(connections.agents))
    connections.ends_sessions = True
    resources.callback(group.close)
    interrupts.on_repeat(group.kill_all)
    reports = {agent.name: agent.run_report for agent in agents if agent.run_report is not None}
    offsets = {agent.name: agent.clock.offset for agent in agents}
    return group, TakenOver(left, reports, offsets)


def _absent_agent(share: AgentShare) -> RemoteAgent:
    """An agent that does not have its share of the run any longer."""
    info = protocol.AgentInfo(share.name, {}, 0, 0, "", "")
    return RemoteAgent(info, share.session, lambda header, frames: None)


def _clock_error(agents: list[RemoteAgent]) -> float:
    return MIN_CLOCK_ERROR + 2 * max((agent.clock.error or 0.0 for agent in agents), default=0.0)


def check_runs_on_agents(experiment: Experiment) -> None:
    """Raise `LaunchError` for settings that work on one machine only."""
    plan = experiment.processes
    if plan.shaping == "kernel":
        raise LaunchError("processes.shaping = 'kernel' works on one machine only; remove it, or run without agents")
    if experiment.checkpoint.every and build_environment(experiment, device_speeds(experiment)).timing_matters:
        raise LaunchError(
            "checkpoint.every: on several machines, a timed run (see docs/engines.md) cannot be resumed, because its "
            "models are evaluated at the end, on the machines of their nodes, where another run does not find them; "
            "set checkpoint.every = 0, run without agents, or remove what makes the run timed: network, speed, "
            "availability, duration, evaluation.seconds, and faults with time or every"
        )
    if plan.keys is not None:
        raise LaunchError(
            "processes.keys: with agents, nodes get new keys in every run, which the agents exchange; remove the key"
        )


def _place(experiment: Experiment, agents: list[RemoteAgent]) -> dict[Machine, list[NodeId]]:
    """The nodes of each agent. Raises `LaunchError` if the mapping names other machines."""
    known = [MachineInfo(agent.name, agent.info.cores, agent.info.memory) for agent in agents]
    try:
        placement = experiment.place(known)
    except ValueError as error:
        raise LaunchError(f"mapping: {error}") from error
    names = [machine.name for machine in known]
    for machine, nodes in placement.items():
        if machine not in names:
            raise LaunchError(
                f"mapping: nodes {format_node_ids(nodes)} are placed on {machine!r}, and no agent has this name; the "
                f"agents are {', '.join(map(repr, names))}"
            )
    return placement
