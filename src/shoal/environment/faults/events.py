"""Timed fault events: what happens to which nodes at which time."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.environment.faults.slowdowns import Slowdowns
from shoal.environment.faults.table import OPPOSITES, Fault, Kind, SlowTarget, affects_pairs, candidates, other_side
from shoal.randomness import generator
from shoal.types import NodeId, format_node_ids


@dataclass(frozen=True)
class FaultEvent:
    """A fault, or its end, at a time in seconds since the start of the run."""

    time: float
    kind: Kind
    nodes: tuple[NodeId, ...]
    others: tuple[NodeId, ...] = ()
    """The other side of a fault between nodes. Equal to `nodes` for a fault between all nodes."""
    value: float = 0.0
    """The factor by which nodes are slow, 1 at the end; or the probability of a drop, 0 at the end. In the events of a
    run (`fault_events`), the factor of all active slow faults of the nodes."""
    what: SlowTarget = "both"
    """What is slow."""
    oneway: bool = False
    """Whether the fault affects only messages from `nodes` to `others`."""
    has_end: bool = field(default=False, compare=False, repr=False)
    """Whether another event ends the fault."""
    ended_value: float | None = field(default=None, compare=False, repr=False)
    """The value of the slow or drop fault that this event ends; None if it ends none."""

    def __str__(self) -> str:
        """The event as a sentence: "node 3 crashes"."""
        several = len(self.nodes) != 1
        nodes = f"nodes {format_node_ids(self.nodes)}" if several else f"node {self.nodes[0]}"
        if self.kind in ("crash", "raise", "hang", "restart", "join"):
            verb = self.kind if several else {"crash": "crashes"}.get(self.kind, f"{self.kind}s")
            return f"{nodes} {verb}"
        if self.kind == "slow":
            verbs = ("compute", "communicate") if several else ("computes", "communicates")
            verb = {"compute": verbs[0], "network": verbs[1], "both": " and ".join(verbs)}[self.what]
            return f"{nodes} {verb} " + (
                "at full speed again" if self.value == 1 else f"{self.value:g} times as slowly"
            )
        all_nodes = not self.nodes or self.nodes == self.others
        others = format_node_ids(self.others) if self.others else "all other nodes"
        reach = "reach" if several else "reaches"
        if self.kind == "partition":
            if all_nodes:
                return "all nodes are cut off from each other"
            cut_off = "are cut off from" if several else "is cut off from"
            return f"{nodes} no longer {reach} {others}" if self.oneway else f"{nodes} {cut_off} {others}"
        if self.kind == "repair":
            if all_nodes:
                return "all nodes reach each other again"
            return f"{nodes} {reach} {others} again" if self.oneway else f"{nodes} and {others} reach each other again"
        between = f"from {nodes} to {others}" if self.oneway else f"between {nodes} and {others}"
        messages = "messages between all nodes" if all_nodes else f"messages {between}"
        if self.kind == "drop":
            if self.value == 0:
                return f"{messages} are no longer dropped"
            return f"{100 * self.value:g} % of {messages} are dropped"
        return f"{messages} are {'held' if self.kind == 'hold' else 'released'}"


def fault_events(
    faults: Sequence[Fault], nodes: int, size: int, seed: int, join_by_round: Collection[NodeId] = ()
) -> Iterator[FaultEvent]:
    """Expand timed faults to events, in order of time and, for equal times, of the file. There may be no last event.

    `size` is the number of nodes including servers, which have the last `size - nodes` ids. The faults must be
    validated; faults with a `round` are skipped. An event of kind "slow" has the factor of all active slow faults. A
    node that a timed fault has crashed does not crash again. The end of a crash restarts the nodes that are still down.
    A fault of kind "restart" may name nodes that are up: the engines ignore these. A node that joins at a time neither
    crashes nor restarts before. It is not known when the nodes in `join_by_round` join: they may crash and restart at
    any time, and the engines ignore impossible events.
    """
    timed = [fault for fault in faults if fault.round is None]
    not_joined = {node for fault in timed if fault.kind == "join" for node in fault.ids(size)}
    slowdowns = Slowdowns()
    down: set[NodeId] = set()
    down_for_good = () if any(fault.restarts_nodes for fault in timed) else down
    for i, fault_event in numbered_events(dict(enumerate(timed)), nodes, size, seed, down_for_good):
        affected = fault_event.nodes
        if fault_event.kind == "join":
            not_joined.difference_update(affected)
        elif fault_event.kind in ("crash", "restart"):
            affected = tuple(node for node in affected if node not in not_joined)
        if fault_event.kind == "crash":
            affected = tuple(node for node in affected if node not in down)
            down.update(node for node in affected if node not in join_by_round)
        elif fault_event.kind == "restart":
            if timed[i].kind == "crash":
                affected = tuple(node for node in affected if node in down or node in join_by_round)
            down.difference_update(affected)
        if fault_event.kind == "slow":
            yield from slowdowns.combined(fault_event)
        elif affected:
            yield dataclasses.replace(fault_event, nodes=affected)


def numbered_events(
    faults: Mapping[int, Fault], nodes: int, size: int, seed: int, down_for_good: Collection[NodeId] = ()
) -> Iterator[tuple[int, FaultEvent]]:
    """The events of timed faults in order of time, each with the number of its fault.

    Random crashes stop once all nodes that they may pick are in `down_for_good`.
    """
    events = [zip(itertools.repeat(i), _events_of(f, i, nodes, size, seed, down_for_good)) for i, f in faults.items()]
    return heapq.merge(*events, key=lambda numbered: numbered[1].time)


def _events_of(
    fault: Fault, index: int, nodes: int, size: int, seed: int, down_for_good: Collection[NodeId]
) -> Iterator[FaultEvent]:
    """The starts and ends of one timed fault, in order of time."""
    ends: list[tuple[float, int, FaultEvent]] = []
    for order, (start, end, picked) in enumerate(_times_of(fault, index, nodes, size, seed, down_for_good)):
        while ends and ends[0][0] <= start:
            yield heapq.heappop(ends)[-1]
        event = FaultEvent(
            start,
            fault.kind,
            picked or tuple(range(size)),
            other_side(fault, picked, size) if affects_pairs(fault) else (),
            fault.factor or fault.probability or 0.0,
            fault.what or "both",
            fault.oneway or False,
            has_end=end is not None,
        )
        yield event
        if end is not None:
            kind, value = OPPOSITES[fault.kind]
            ended = dataclasses.replace(event, time=end, kind=kind, value=value, has_end=False, ended_value=event.value)
            heapq.heappush(ends, (end, order, ended))
    while ends:
        yield heapq.heappop(ends)[-1]


def _times_of(
    fault: Fault, index: int, nodes: int, size: int, seed: int, down_for_good: Collection[NodeId]
) -> Iterator[tuple[float, float | None, tuple[NodeId, ...]]]:
    """The start, the end and the nodes of every time a fault happens. No nodes: a fault between all nodes."""
    if fault.time is not None:
        end = fault.until if fault.lasting is None else fault.time + fault.lasting
        yield fault.time, end, fault.ids(size)
    if fault.every is None:
        return
    random = generator(seed, "fault", index)
    pool = candidates(fault, nodes, size)
    last = min(math.inf if limit is None else limit for limit in (fault.before, fault.until))
    time, drawn = fault.after or 0.0, 0
    while fault.count is None or drawn < fault.count:
        time += random.exponential(fault.every)
        if time >= last or (fault.kind == "crash" and all(node in down_for_good for node in pool)):
            return
        picked = (pool[random.integers(len(pool))],) if pool else ()
        yield time, fault.until if fault.lasting is None else time + random.exponential(fault.lasting), picked
        drawn += 1
