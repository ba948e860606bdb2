"""Timed events in a simulation: availability, faults and changes of the network, at their virtual times."""

from __future__ import annotations

import math
from functools import partial

from shoal.engines.environment_events import EventQueue, apply_event
from shoal.engines.simulation.checkpoints import SimulatedCheckpoints
from shoal.engines.simulation.nodes import SimulatedNodes
from shoal.engines.simulation.recorder import Recorder
from shoal.engines.simulation.world import World
from shoal.environment.environment import Environment
from shoal.environment.faults import FaultEvent
from shoal.environment.network.model import EnvironmentEvent
from shoal.environment.network.network import AvailabilityChange, NetworkChange
from shoal.errors import NodeError
from shoal.types import NodeId


class SimulatedEvents:
    """Applies the events of the environment to nodes and network. It is an `EventHandler`."""

    def __init__(
        self,
        environment: Environment,
        world: World,
        nodes: SimulatedNodes,
        recorder: Recorder,
        checkpoints: SimulatedCheckpoints,
    ) -> None:
        self._environment = environment
        self._world = world
        self._nodes = nodes
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._queue = EventQueue(environment.events() if environment.has_timed_events else iter(()))
        self._unblocking_times = environment.unblocking_times()
        self._next_unblocking = next(self._unblocking_times, math.inf)

    def skip_past(self) -> None:
        """In a resumed run: put the events before the checkpoint into force, without recording them again.

        Crashes, restarts, joins and hangs are left out: the checkpoint has the nodes that failed or hung.
        """
        for _ in range(self._checkpoints.events):
            event = self._queue.pop()
            if isinstance(event, FaultEvent) and event.kind in ("crash", "restart", "join", "hang", "raise"):
                continue
            self._world.apply_event(event)
            if isinstance(event, AvailabilityChange):
                self._set_online(event)
            elif isinstance(event, FaultEvent) and event.kind == "slow":
                self._slow_down(event)

    def schedule_next(self) -> None:
        if self._queue.next is not None:
            event = self._queue.pop()
            self._world.kernel.schedule_daemon(event.time, partial(self._apply, event))

    def run_is_over(self) -> bool:
        """Whether all training nodes have ended, or no node can continue whatever event follows."""
        now, duration = self._world.kernel.now, self._environment.duration
        if not self._nodes.learning:
            return True
        if (duration is not None and now < duration) or not self._world.is_idle:
            return False
        while self._next_unblocking < now:
            self._next_unblocking = next(self._unblocking_times, math.inf)
        suspended = [r.id for r in self._world.runtimes if r.suspended and not r.hung]
        return self._next_unblocking == math.inf and not any(
            self._environment.will_be_online(node, now) for node in suspended
        )

    def offline_forever(self) -> list[NodeId]:
        now = self._world.kernel.now
        offline = [runtime.id for runtime in self._world.runtimes if runtime.offline_reasons]
        return [id for id in offline if not self._environment.will_be_online(id, now)]

    def _apply(self, event: EnvironmentEvent) -> None:
        if not self.run_is_over():
            self._checkpoints.events += 1
            apply_event(event, self)
            self.schedule_next()

    # The operations of an `EventHandler`

    def change_availability(self, change: AvailabilityChange) -> None:
        self._world.apply_event(change)
        self._set_online(change)

    def change_network(self, change: NetworkChange) -> None:
        self._world.apply_event(change)

    def crash(self, fault: FaultEvent) -> None:
        self._record(fault)
        for node in fault.nodes:
            self._world.runtimes[node].crash()

    def restart(self, fault: FaultEvent) -> None:
        for node in fault.nodes:
            self._recorder.write_fault(node, fault)
        for node in fault.nodes:
            self._nodes.restart(node)

    def join(self, fault: FaultEvent) -> None:
        for node in fault.nodes:
            self._recorder.write_fault(node, fault)
        for node in fault.nodes:
            self._nodes.join(node)

    def hang(self, fault: FaultEvent) -> None:
        self._record(fault)
        for node in fault.nodes:
            self._world.runtimes[node].hang()

    def raise_error(self, fault: FaultEvent) -> None:
        if not any(self._world.runtimes[node].running for node in fault.nodes):
            return
        self._record(fault)
        raise NodeError(f"fault on schedule: {fault} at {self._world.kernel.now:g} s")

    def slow_down(self, fault: FaultEvent) -> None:
        self._record(fault)
        self.disturb_links(fault)
        self._slow_down(fault)

    def disturb_links(self, fault: FaultEvent) -> None:
        self._nodes.tracker.listener.notice(f"at {self._world.kernel.now:g} s: {fault}")
        self._world.apply_event(fault)

    def _set_online(self, change: AvailabilityChange) -> None:
        runtime = self._world.runtimes[change.node]
        if change.online:
            runtime.come_online()
        else:
            runtime.go_offline(change.time)

    def _slow_down(self, fault: FaultEvent) -> None:
        if fault.what != "network":
            for node in fault.nodes:
                self._world.runtimes[node].slow_down(fault.value)

    def _record(self, fault: FaultEvent) -> None:
        """Record the fault for every node that runs."""
        for node in fault.nodes:
            if self._world.runtimes[node].running:
                self._recorder.write_fault(node, fault)
