"""Starting a run with processes: checks, keys, the agent of this machine, and the coordinator that follows the run.

It leaves nothing behind. The zygote and its nodes are one process group, which is killed at the end in every case. If
the coordinator itself is killed, the kernel ends the zygote and the nodes.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
from contextlib import ExitStack

import zmq

from shoal.engines.operating_system import raise_file_limit
from shoal.engines.processes import control
from shoal.engines.processes.agent import AgentSettings, LocalAgent
from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.checkpoints import mark_absent
from shoal.engines.processes.control_server import LOOPBACK
from shoal.engines.processes.coordinator import Coordinator, RunContext
from shoal.engines.processes.interrupts import Interrupts
from shoal.engines.processes.keys import read_public, require_keys
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.remote.agents_plan import AgentsPlan
from shoal.engines.processes.remote.launch import start_remote_agents, take_over_agents
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.processes.takeover import TakenOver
from shoal.engines.processes.template_process import ZygoteTemplates
from shoal.engines.run_tracker import RunTracker
from shoal.errors import LaunchError, RunError
from shoal.experiment import Experiment
from shoal.experiment.environment_builder import build_environment, device_speeds
from shoal.experiment.mapping import LOCALHOST
from shoal.experiment.plugin_files import with_plugin_hashes
from shoal.message import RUN_LENGTH
from shoal.results.checkpoints import Manifest
from shoal.results.coordinator_file import CoordinatorFile
from shoal.results.progress import Outcome, ProgressListener
from shoal.results.records import RunFolder
from shoal.types import NodeId, format_node_ids

LOCAL_NAMES = {LOCALHOST, LOOPBACK, socket.gethostname()}
"""The names of this machine in a mapping."""
MAX_SOCKETS = 16
"""Sockets of the coordinator: one for all nodes, and those of the authentication."""
TEMPLATES = ZygoteTemplates()
"""The template of this process's zygotes, if it makes several runs."""


def run_processes(
    experiment: Experiment,
    folder: RunFolder,
    listener: ProgressListener | None = None,
    command_time: float | None = None,
    plan: AgentsPlan | None = None,
    resumed: Manifest | None = None,
    left: CoordinatorFile | None = None,
) -> Outcome:
    """Run an experiment as processes, on this machine or on the agents of `plan`.

    `resumed` is the checkpoint that the run continues from. `left` is what a killed coordinator has left of a run: it
    continues on the agents that still run its nodes. Raises `NotContinuedError` if there are none.
    """
    times = RunTimes(command_time, experiment.round_nodes)
    raise_file_limit()
    tracker = RunTracker(experiment, listener, resumed)
    environment = build_environment(experiment, device_speeds(experiment))
    registry = NodeRegistry(experiment.size)
    run = RunContext(experiment, environment, folder, secrets.token_urlsafe(RUN_LENGTH * 3 // 4), resumed)
    taken_over: TakenOver | None = None
    with Interrupts() as interrupts, ExitStack() as resources:
        try:
            if left is not None and plan is not None:
                agents, taken_over = take_over_agents(run, left, plan, tracker.listener.notice, resources, interrupts)
                run = dataclasses.replace(run, id=taken_over.run)
            elif plan is None:
                agents = _start_local_agent(run, registry, resources, interrupts)
            else:
                agents = start_remote_agents(run, plan, tracker.listener.notice, resources, interrupts)
        except RunError:
            if interrupts.signal is None:
                raise
            # The user has interrupted the start, or the second signal killed the processes.
            facts: dict[str, object] = {"first_round_s": None, "signal": interrupts.signal}
            return Outcome("interrupted", tracker.training_seconds(), times.since_command(), facts=facts)
        mark_absent(tracker.lost, registry)
        times.do_not_await(tracker.lost)
        return Coordinator(run, registry, agents, tracker, times, interrupts).run(taken_over)


def _start_local_agent(
    run: RunContext, registry: NodeRegistry, resources: ExitStack, interrupts: Interrupts
) -> AgentGroup:
    experiment = run.experiment
    _check_machines(experiment)
    settings = _agent_settings(run, registry)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    resources.callback(context.destroy, linger=0)
    agent = LocalAgent(context, run.folder, settings, templates=TEMPLATES)
    agents = AgentGroup([agent], dict.fromkeys(range(experiment.size), 0))
    resources.callback(agents.close)  # called first: whatever happens to the sockets, no process stays behind
    interrupts.on_repeat(agents.kill_all)
    table, base = with_plugin_hashes(experiment), str(experiment.base.resolve())
    agents.prepare(control.Prepare(table, base, experiment.size))
    return agents


def _check_machines(experiment: Experiment) -> None:
    """Raise `LaunchError` if the mapping places nodes on other machines."""
    for machine, nodes in experiment.placement.items():
        if machine not in LOCAL_NAMES:
            raise LaunchError(
                f"mapping: nodes {format_node_ids(nodes)} are placed on {machine!r}, and this run has no agent of that "
                f"name; name the agents with --agents, or place the nodes on {LOCALHOST!r}"
            )


def _agent_settings(run: RunContext, registry: NodeRegistry) -> AgentSettings:
    """What the agent must know. Where a folder holds the nodes' keys, their public keys are read into `registry`."""
    experiment, plan = run.experiment, run.experiment.processes
    nodes = range(experiment.size)
    public_keys: dict[NodeId, bytes] = {}
    if plan.sealed and plan.keys is not None:
        require_keys(plan.keys, nodes)
        public_keys = read_public(plan.keys, nodes)
        for node, key in public_keys.items():
            registry[node].public_key = key
    return AgentSettings(
        run.id,
        plan,
        experiment.size,
        plan.sealed,
        run.environment.needs_network_model,
        public_keys,
        run.environment.access_links,
    )
