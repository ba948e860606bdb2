"""Timed events of the environment: their order, and the operations that an engine provides to apply them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from shoal.environment.faults import FaultEvent
from shoal.environment.network.model import EnvironmentEvent
from shoal.environment.network.network import AvailabilityChange, NetworkChange


class EventHandler(Protocol):
    """The operations of an engine that apply events to its nodes and its network."""

    def change_availability(self, change: AvailabilityChange) -> None: ...

    def change_network(self, change: NetworkChange) -> None: ...

    def crash(self, fault: FaultEvent) -> None: ...

    def restart(self, fault: FaultEvent) -> None: ...

    def join(self, fault: FaultEvent) -> None:
        """Start nodes that were not there before."""
        ...

    def hang(self, fault: FaultEvent) -> None: ...

    def raise_error(self, fault: FaultEvent) -> None: ...

    def slow_down(self, fault: FaultEvent) -> None: ...

    def disturb_links(self, fault: FaultEvent) -> None:
        """Apply a fault between nodes: partition, repair, hold, release or drop."""
        ...


class EventQueue:
    """The events of a run in order of time. Reads one event ahead: some schedules have no end."""

    def __init__(self, events: Iterator[EnvironmentEvent]) -> None:
        self._events = events
        self._next = next(events, None)

    @property
    def next(self) -> EnvironmentEvent | None:
        return self._next

    @property
    def next_time(self) -> float:
        """Seconds since the start of the run; infinity after the last event."""
        return math.inf if self._next is None else self._next.time

    def put_back(self, events: Sequence[EnvironmentEvent]) -> None:
        """Put events before the next one."""
        rest = self._events if self._next is None else itertools.chain([self._next], self._events)
        self._events = itertools.chain(events, rest)
        self._next = next(self._events, None)

    def pop(self) -> EnvironmentEvent:
        event = self._next
        if event is None:
            raise IndexError("pop from an empty event queue")
        self._next = next(self._events, None)
        return event


def apply_event(event: EnvironmentEvent, handler: EventHandler) -> None:
    """Call the operation of `handler` that the event asks for."""
    if isinstance(event, AvailabilityChange):
        handler.change_availability(event)
    elif isinstance(event, FaultEvent):
        _apply_fault(event, handler)
    else:
        handler.change_network(event)


def _apply_fault(fault: FaultEvent, handler: EventHandler) -> None:
    operations = {
        "crash": handler.crash,
        "restart": handler.restart,
        "join": handler.join,
        "hang": handler.hang,
        "raise": handler.raise_error,
        "slow": handler.slow_down,
        "partition": handler.disturb_links,
        "repair": handler.disturb_links,
        "hold": handler.disturb_links,
        "release": handler.disturb_links,
        "drop": handler.disturb_links,
    }
    if fault.kind not in operations:
        raise ValueError(f"fault kind {fault.kind!r}: no engine operation applies it; expected {', '.join(operations)}")
    operations[fault.kind](fault)
