"""Timed events in a run with processes: availability, crashes, restarts and other scheduled faults.

Faults between nodes and changes of the network are applied by the network process, which has the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from shoal.engines.environment_events import EventQueue, apply_event
from shoal.engines.processes import control
from shoal.engines.processes.node_commands import NodeCommands
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.node_starter import NodeStarter
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.round_faults import RoundJoins
from shoal.engines.run_tracker import RunTracker
from shoal.environment.environment import Environment
from shoal.environment.faults import FaultEvent, Kind
from shoal.environment.network.network import AvailabilityChange, NetworkChange
from shoal.results.records import Event
from shoal.types import NodeId


class ProcessEvents:
    """Applies the events of the environment to nodes when they are due. It is an `EventHandler`."""

    def __init__(
        self,
        environment: Environment,
        registry: NodeRegistry,
        commands: NodeCommands,
        starter: NodeStarter,
        tracker: RunTracker,
        times: RunTimes,
    ) -> None:
        self._environment = environment
        self._registry = registry
        self._commands = commands
        self._starter = starter
        self._tracker = tracker
        self._times = times
        self._queue = EventQueue(iter(()))
        self._joins = RoundJoins({}, ())

    def begin(self, at: float = 0.0) -> None:
        """Load the schedule, and note which nodes are offline or slow at first: they learn it with their `Start`.

        `at` is the time at which a resumed run continues: earlier faults are in force, and do not happen again.
        """
        self._joins = RoundJoins(self._tracker.experiment.joins_by_round, self._tracker.not_joined)
        self._queue = EventQueue(self._environment.events())
        overdue: list[FaultEvent] = []
        while self._queue.next_time <= at and (at > 0.0 or not isinstance(self._queue.next, FaultEvent)):
            event = self._queue.pop()
            if isinstance(event, AvailabilityChange):
                self._note_availability(event)
            elif isinstance(event, FaultEvent) and event.kind == "slow":
                self._note_slowdown(event)
            elif isinstance(event, FaultEvent) and event.kind == "join":
                overdue.append(event)  # the checkpoint may have been complete before the coordinator applied it
        self._queue.put_back(overdue)

    def apply_due(self) -> None:
        while self._tracker.phase == "running" and self._queue.next_time <= self._times.now():
            apply_event(self._queue.pop(), self)

    def seconds_to_next(self) -> float:
        """Seconds until the next event; infinity if there is none while nodes run."""
        if self._tracker.phase != "running":
            return math.inf
        return max(0.0, self._queue.next_time - self._times.now())

    def offline_forever(self, nodes: Collection[NodeId]) -> bool:
        """Whether all of these nodes are offline, and no event can bring one of them online or start another."""
        if self._queue.next is not None and self._environment.restarts:
            return False
        now = self._times.now()
        return all(self._registry[n].offline and not self._environment.will_be_online(n, now) for n in nodes)

    def restart_exited(self, node: NodeId) -> bool:
        """Restart a node whose process has exited, if a restart was due before. Returns whether it was."""
        due = self._registry[node].restart_on_exit
        if due:
            self._start([node], "restart")
        return due

    def round_begins(self, round: int) -> None:
        """A node has completed all rounds before this one: start the late nodes that join when it starts this round.

        After the last round, no node starts another.
        """
        rounds = self._tracker.experiment.algorithm.options.get("rounds")
        if rounds is not None and round >= rounds:
            return
        if nodes := [node for node in self._joins.due(round) if node in self._tracker.not_joined]:
            self._start(nodes, "join")

    # The operations of an `EventHandler`

    def change_availability(self, change: AvailabilityChange) -> None:
        self._note_availability(change)
        self._commands.set_online(change.node, not self._registry[change.node].offline)

    def change_network(self, change: NetworkChange) -> None:
        """Nothing: the network process does it."""

    def crash(self, fault: FaultEvent) -> None:
        working = self._working(fault.nodes)
        for node in working:
            entry = self._registry[node]
            entry.restart_on_exit = False
            entry.fail("crashed on schedule")
        self._commands.record([(node, _fault_record(fault)) for node in working])
        self._commands.kill(working)

    def restart(self, fault: FaultEvent) -> None:
        lost = self._tracker.lost.keys() - self._tracker.not_joined
        for node in fault.nodes:
            if self._registry[node].failure is not None and node not in lost:
                self._registry[node].restart_on_exit = True
        self._start([node for node in fault.nodes if node in lost], "restart")

    def join(self, fault: FaultEvent) -> None:
        self._start([node for node in fault.nodes if node in self._tracker.not_joined], "join")

    def hang(self, fault: FaultEvent) -> None:
        self._commands.inject(self._healthy(fault.nodes), control.InjectFault("hang", str(fault)))

    def raise_error(self, fault: FaultEvent) -> None:
        self._commands.inject(self._healthy(fault.nodes), control.InjectFault("raise", str(fault)))

    def slow_down(self, fault: FaultEvent) -> None:
        self._commands.inject(self._healthy(fault.nodes), self._note_slowdown(fault))

    def disturb_links(self, fault: FaultEvent) -> None:
        """Only notify the user: the network process does it."""
        self._tracker.listener.notice(f"at {fault.time:g} s: {fault}")

    def _note_slowdown(self, fault: FaultEvent) -> control.InjectFault:
        factor = fault.value if fault.what != "network" else None
        message = control.InjectFault("slow", str(fault), factor)
        if factor is not None:
            for node in fault.nodes:
                self._registry[node].slowdown = message
        return message

    def _note_availability(self, change: AvailabilityChange) -> None:
        self._registry[change.node].offline_reasons += -1 if change.online else 1

    def _working(self, nodes: Collection[NodeId]) -> list[NodeId]:
        return [node for node in nodes if self._registry[node].working]

    def _healthy(self, nodes: Collection[NodeId]) -> list[NodeId]:
        """The nodes that work and are not about to end."""
        return [node for node in self._working(nodes) if self._registry[node].failure is None]

    def _start(self, nodes: Collection[NodeId], kind: Kind) -> None:
        """Start nodes that are not there, because of a fault of this kind."""
        now = self._times.now()
        self._commands.record([(node, _fault_record(FaultEvent(now, kind, (node,)))) for node in nodes])
        self._starter.restart(nodes)


def _fault_record(fault: FaultEvent) -> Event:
    return Event("fault", fault.time, str(fault))
