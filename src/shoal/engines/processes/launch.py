"""Starting a run with processes: checks, keys, the agent of this machine, and the coordinator that follows the run.

It leaves nothing behind. The zygote and its nodes are one process group, which is killed at the end in every case. If
the coordinator itself is killed, the kernel ends the zygote and the nodes.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack

import zmq

from shoal.engines.operating_system import raise_file_limit
from shoal.engines.processes import control
from shoal.engines.processes.agent import LOOPBACK, LocalAgent
from shoal.engines.processes.control_server import ControlServer, ServerSettings
from shoal.engines.processes.coordinator import Coordinator, RunContext
from shoal.engines.processes.interrupts import Interrupts
from shoal.engines.processes.keys import KeyPair, read_public, require_keys
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.run_tracker import RunTracker
from shoal.errors import LaunchError, RunError
from shoal.experiment import Experiment
from shoal.experiment.environment_builder import build_environment, device_speeds
from shoal.experiment.mapping import LOCALHOST
from shoal.message import RUN_LENGTH
from shoal.results.progress import Outcome, ProgressListener
from shoal.results.records import RunFolder
from shoal.types import NodeId, format_node_ids

LOCAL_NAMES = {LOCALHOST, LOOPBACK, socket.gethostname()}
"""The names of this machine in a mapping."""
MAX_SOCKETS = 16
"""Sockets of the coordinator: one for all nodes, and those of the authentication."""


def run_processes(
    experiment: Experiment,
    folder: RunFolder,
    listener: ProgressListener | None = None,
    command_time: float | None = None,
) -> Outcome:
    """Run an experiment as processes of this machine."""
    times = RunTimes(command_time, experiment.round_nodes)
    raise_file_limit()
    tracker = RunTracker(experiment, listener)
    environment = build_environment(experiment, device_speeds(experiment))
    registry = NodeRegistry(experiment.size)
    with Interrupts() as interrupts, ExitStack() as resources:
        nodes = _local_nodes(experiment)
        run = RunContext(experiment, environment, folder, secrets.token_urlsafe(RUN_LENGTH * 3 // 4), tuple(nodes))
        key_pair = _load_keys(experiment, registry)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        resources.callback(context.destroy, linger=0)
        agent = LocalAgent(folder, environment.access_links)
        resources.callback(agent.close)  # called first: whatever happens to the sockets, no process stays behind
        interrupts.on_repeat(agent.kill)
        try:
            agent.send(control.Prepare(experiment.to_table(), str(experiment.base.resolve())))
            settings = ServerSettings(run.id, experiment.processes, environment.needs_network_model, key_pair)
            server = ControlServer(context, settings, registry, agent, tracker.listener)
        except RunError:
            if interrupts.signal is None:
                raise
            # The second signal killed the processes.
            facts: dict[str, object] = {"first_round_s": None, "signal": interrupts.signal}
            return Outcome("interrupted", tracker.training_seconds(), times.since_command(), facts=facts)
        return Coordinator(run, registry, agent, server, tracker, times, interrupts).run()


def _local_nodes(experiment: Experiment) -> list[NodeId]:
    """All nodes. Raises `LaunchError` if the mapping places nodes on other machines, which is not supported yet."""
    for machine, nodes in experiment.placement.items():
        if machine not in LOCAL_NAMES:
            raise LaunchError(
                f"mapping: nodes {format_node_ids(nodes)} are placed on {machine!r}, but nodes can be started on this "
                f"machine, {LOCALHOST!r}, only"
            )
    return sorted(node for nodes in experiment.placement.values() for node in nodes)


def _load_keys(experiment: Experiment, registry: NodeRegistry) -> KeyPair | None:
    """A new key pair for the coordinator, where links are sealed. Reads the nodes' public keys too."""
    plan = experiment.processes
    if not plan.sealed:
        return None
    if plan.keys is not None:
        nodes = range(experiment.size)
        require_keys(plan.keys, nodes)
        for node, key in read_public(plan.keys, nodes).items():
            registry[node].public_key = key
    return KeyPair.fresh()
