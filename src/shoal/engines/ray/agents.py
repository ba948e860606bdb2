"""Agents of the process engine on a Ray cluster, one on each Ray node.

Ray only starts and ends the agents. An agent joins the coordinator as `shoal agent --join` does, and nodes exchange
messages over their own connections. Secret keys never travel: every agent makes its own, and sends the public key.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.remote.agent_folder import agent_folder
from shoal.engines.processes.remote.agent_server import serve_agent
from shoal.engines.processes.remote.agents_plan import AgentsPlan
from shoal.engines.processes.remote.channel import Address, Trust, bracketed
from shoal.engines.processes.remote.hosted_run import AgentOptions
from shoal.engines.processes.remote.launch import check_runs_on_agents
from shoal.engines.processes.slots import usable_cores
from shoal.engines.ray.cluster import connected, describe, describe_cpus, load_ray, placed, reserved
from shoal.errors import LaunchError, ShoalError
from shoal.experiment import Experiment

START_SECONDS = 60.0
"""How long Ray may take to start the actors."""
JOIN_SECONDS = 60.0
"""How long an agent tries to reach the coordinator."""
ABANDON_SECONDS = 300.0
"""How long nodes continue on a machine that is cut off. Ray ends them sooner if the coordinator has ended."""
EXIT_SECONDS = 10.0
"""How long agents may take to end their nodes after the run."""
PARENT_SECONDS = 0.5
"""Seconds between two checks whether the process of the Ray node runs."""


@contextlib.contextmanager
def ray_agents(address: str, experiment: Experiment, notify: Callable[[str], None]) -> Iterator[AgentsPlan]:
    """Start an agent on every Ray node, for the duration of the context, and provide the plan with which they join.

    `address` is "local", "auto", HOST:PORT or ray://HOST:PORT. An agent reserves `processes.training_slots` CPUs, by
    default all CPUs of its Ray node. Raises LaunchError if the connection fails, or the CPUs are not available.
    """
    check_runs_on_agents(experiment)
    slots = experiment.processes.training_slots
    ray = load_ray()
    with connected(address, slots or usable_cores()):
        bundles = _bundles(ray.nodes(), slots, experiment.nodes)
        wanted = f"{int(sum(bundle['CPU'] for bundle in bundles))} CPUs for agents on {len(bundles)} Ray nodes"
        with reserved(bundles, "STRICT_SPREAD", wanted, "processes.training_slots") as group:
            agents = RayAgents(group, _places(placed(group), bundles), notify)
            listen = Address(bracketed(str(ray.util.get_node_ip_address())), 0)
            wait = 2 * JOIN_SECONDS  # an agent that cannot join reports it before
            yield AgentsPlan(listen=listen, expect=len(bundles), wait=wait, trust=agents.trust(), starter=agents)


@dataclass(frozen=True)
class Place:
    """Where an agent runs, and its name."""

    name: str
    host: str
    """The address of the Ray node."""
    cpus: int
    machine: str
    """A description of the machine."""


class AgentActor:
    """The actor that is an agent. Ray creates it on one of its machines."""

    def __init__(self) -> None:
        self._pair = KeyPair.fresh()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=_end_with_parent, args=(os.getppid(), self._idle), daemon=True).start()

    def public_key(self) -> bytes:
        return self._pair.public

    def serve(self, place: Place, join: Address, coordinator: bytes) -> str:
        """Run the nodes of one run for the coordinator at `join`. Returns why the agent has failed, or nothing."""
        self._idle.clear()
        try:
            return self._serve(place, join, coordinator)
        except (ShoalError, OSError) as error:
            return str(error)
        finally:
            self._idle.set()

    def _serve(self, place: Place, join: Address, coordinator: bytes) -> str:
        printed: list[str] = []
        with agent_folder(Path(tempfile.gettempdir())) as folder:
            options = AgentOptions(
                place.name,
                place.host,
                place.host,
                folder,
                allows_code=True,  # a program that can use the Ray cluster can run any code on it
                once=True,
                cores=place.cpus,
                wait=JOIN_SECONDS,
                abandon=ABANDON_SECONDS,
            )
            trust = Trust(self._pair, {"coordinator": coordinator})
            code = serve_agent(options, trust, None, join, printed.append)
        return "" if code == 0 else printed[-1]


def _end_with_parent(parent: int, idle: threading.Event) -> None:
    """End this process when its parent has ended, the process of the Ray node. Ray itself would wait for the agent."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)  # the agent ends its nodes, and reports it to the coordinator
    idle.wait(EXIT_SECONDS)
    os._exit(1)


class RayAgents:
    """The agents of one run: an `AgentStarter`."""

    def __init__(self, group: Any, places: Sequence[Place], notify: Callable[[str], None]) -> None:
        """Start an actor for each bundle of the placement group."""
        self._ray = load_ray()
        self._places = places
        self._coordinator = KeyPair.fresh()
        self._join: Address | None = None
        self._serving: dict[Any, Place] = {}
        self._actors = []
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for index, place in enumerate(places):
            options = {"num_cpus": place.cpus, "max_restarts": 0, "scheduling_strategy": strategy(group, index)}
            self._actors.append(self._ray.remote(AgentActor).options(**options).remote())
            notify(f"agent {place.name!r} is on {place.machine}; CPUs: {place.cpus}")

    def trust(self) -> Trust:
        """Wait until all actors run, and return the coordinator's keys.

        Raises LaunchError if an actor cannot run, or does not run within START_SECONDS.
        """
        pending = [actor.public_key.remote() for actor in self._actors]
        _, late = self._ray.wait(pending, num_returns=len(pending), timeout=START_SECONDS)
        if late:
            machine = self._places[pending.index(late[0])].machine
            raise LaunchError(
                f"the agent on {machine} did not start within {START_SECONDS:g} s; check the machine with 'ray status' "
                "and its Ray logs, and start the run again"
            )
        keys = {place.name: self._get(key, place) for place, key in zip(self._places, pending, strict=True)}
        return Trust(self._coordinator, keys)

    def start(self, join: Address) -> None:
        self._join = join
        for actor, place in zip(self._actors, self._places, strict=True):
            self._serving[actor.serve.remote(place, join, self._coordinator.public)] = place

    def check(self) -> None:
        ended, _ = self._ray.wait(list(self._serving), num_returns=len(self._serving), timeout=0)
        for reference in ended:
            place = self._serving[reference]
            reason = self._get(reference, place) or "it has ended"
            raise LaunchError(
                f"agent {place.name!r} on {place.machine} has failed before the run began: {reason}; check that its "
                f"machine can connect to {self._join}"
            )

    def close(self) -> None:
        """Wait until the agents have ended their nodes, and end the actors."""
        if self._serving:
            self._ray.wait(list(self._serving), num_returns=len(self._serving), timeout=EXIT_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)

    def _get(self, reference: Any, place: Place) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise LaunchError(
                f"the agent on {place.machine} cannot be started; is shoal installed there? {error}"
            ) from error


def _bundles(nodes: Sequence[Mapping[str, Any]], slots: int | None, count: int) -> list[dict[str, float]]:
    """What to reserve for each agent, on the Ray nodes with the most CPUs, but on no more than `count` of them.

    The resource node:ADDRESS keeps a bundle on the machine for which its CPUs were counted. Raises LaunchError.
    """
    found = [
        {"CPU": slots or cpus, f"node:{node['NodeManagerAddress']}": 0.001}
        for node in nodes
        if node["Alive"] and (cpus := int(node["Resources"].get("CPU", 0))) >= (slots or 1)
    ]
    if not found:
        wanted = (
            f"processes.training_slots = {slots}: no Ray node has {slots} CPUs" if slots else "no Ray node has CPUs"
        )
        raise LaunchError(f"{wanted}, and no agent can be started: {describe_cpus()}; set fewer, or add machines")
    return sorted(found, key=lambda bundle: -bundle["CPU"])[:count]


def _places(nodes: Sequence[Mapping[str, Any]], bundles: Sequence[Mapping[str, float]]) -> list[Place]:
    """The place of each bundle. Agents have the names of their machines, numbered if a name is not unique."""
    hosts = [str(node["NodeManagerHostname"]) for node in nodes]
    places = []
    for index, (node, bundle) in enumerate(zip(nodes, bundles, strict=True)):
        name = (
            hosts[index]
            if hosts.count(hosts[index]) == 1
            else f"{hosts[index]}-{hosts[: index + 1].count(hosts[index])}"
        )
        places.append(Place(name, bracketed(node["NodeManagerAddress"]), int(bundle["CPU"]), describe(node)))
    return places
