"""The faults between pairs of nodes: partitions, holds and drops."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shoal.environment.faults.events import FaultEvent
from shoal.types import NodeId


class PairFaults:
    """The active faults between nodes: partitions, holds, and the probability that a message is dropped.

    Each pair of nodes, in each direction, is either cut or not. A second partition of a pair changes nothing. A repair
    of some nodes and others ends every cut between them, also one of a partition that named more nodes, and no other
    cut. Releases end holds in the same way. A message passes if none of the active drops of its pair drops it: drops
    are independent of each other. Of the drops without an end, only the latest counts. A node always reaches itself.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._cuts: _PairValues | None = None
        self._holds: _PairValues | None = None
        self._lasting_drops: _PairValues | None = None
        """The drops without an end."""
        self._ending_drops = _EndingDrops(size)

    def apply(self, fault_event: FaultEvent) -> None:
        """Apply an event. Events that are not between nodes, such as crashes, change nothing.

        An event without nodes is between all nodes. An event without others is between its nodes and all others.
        """
        if fault_event.kind in ("partition", "repair"):
            self._cuts = self._changed(self._cuts, fault_event, fault_event.kind == "partition", np.bool_)
        elif fault_event.kind in ("hold", "release"):
            self._holds = self._changed(self._holds, fault_event, fault_event.kind == "hold", np.bool_)
        elif fault_event.kind == "drop":
            self._change_drops(fault_event)

    def cut(self, sender: NodeId, receiver: NodeId) -> bool:
        """Whether a partition blocks all messages."""
        return self._cuts is not None and sender != receiver and bool(self._cuts.value(sender, receiver))

    def held(self, sender: NodeId, receiver: NodeId) -> bool:
        """Whether messages wait for a release."""
        return self._holds is not None and sender != receiver and bool(self._holds.value(sender, receiver))

    def drop(self, sender: NodeId, receiver: NodeId) -> float:
        """The probability that a message is dropped."""
        if sender == receiver:
            return 0.0
        combined = 0.0 if self._lasting_drops is None else self._lasting_drops.value(sender, receiver)
        for value in self._ending_drops.values(sender, receiver):
            combined = 1 - (1 - combined) * (1 - value) if combined else value
        return combined

    def undoes(self, fault_event: FaultEvent) -> bool:
        """Whether a repair or a release ends any fault."""
        pairs = self._cuts if fault_event.kind == "repair" else self._holds
        return pairs is not None and any(pairs.any_of(*sides) for sides in self._sides(fault_event))

    def _change_drops(self, fault_event: FaultEvent) -> None:
        if fault_event.ended_value is not None:
            self._ending_drops.end(dataclasses.replace(fault_event, time=0.0, value=fault_event.ended_value))
        elif fault_event.has_end:
            nodes, others = next(self._sides(fault_event))
            self._ending_drops.start(dataclasses.replace(fault_event, time=0.0), nodes, others)
        else:
            self._lasting_drops = self._changed(self._lasting_drops, fault_event, fault_event.value, np.float64)

    def _changed(
        self, pairs: _PairValues | None, fault_event: FaultEvent, value: float, kind: DTypeLike
    ) -> _PairValues | None:
        if pairs is None:
            if not value:
                return None
            pairs = _PairValues(self._size, kind)
        for senders, receivers in self._sides(fault_event):
            pairs.fill(senders, receivers, value)
        return pairs

    def _sides(self, fault_event: FaultEvent) -> Iterator[tuple[Collection[NodeId], Collection[NodeId]]]:
        """The affected senders and receivers, in one or both directions."""
        nodes = frozenset(fault_event.nodes or range(self._size))
        others: Collection[NodeId] = frozenset(fault_event.others)
        if not others:
            others = [node for node in range(self._size) if not fault_event.nodes or node not in nodes]
        yield nodes, others
        if not fault_event.oneway:
            yield others, nodes


@dataclass(frozen=True, eq=False)
class _EndingDrop:
    """An active drop with an end."""

    event: FaultEvent
    nodes: frozenset[NodeId]
    others: bytes
    """For each node of the run, whether it is on the other side."""

    def affects(self, sender: NodeId, receiver: NodeId) -> bool:
        return bool(sender in self.nodes and self.others[receiver])


class _EndingDrops:
    """The active drops with an end. The work of a change grows with the nodes of its event, not with all pairs."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_event: defaultdict[FaultEvent, list[_EndingDrop]] = defaultdict(list)
        self._by_node: defaultdict[NodeId, list[_EndingDrop]] = defaultdict(list)
        """For each node, the drops whose `nodes` contain it."""

    def start(self, event: FaultEvent, nodes: Iterable[NodeId], others: Iterable[NodeId]) -> None:
        flags = bytearray(self._size)
        for node in others:
            flags[node] = True
        drop = _EndingDrop(event, frozenset(nodes), bytes(flags))
        self._by_event[event].append(drop)
        for node in drop.nodes:
            self._by_node[node].append(drop)

    def end(self, event: FaultEvent) -> None:
        """End a drop that started with an equal event."""
        drop = self._by_event[event].pop()
        if not self._by_event[event]:
            del self._by_event[event]
        for node in drop.nodes:
            self._by_node[node].remove(drop)

    def values(self, sender: NodeId, receiver: NodeId) -> list[float]:
        """The probabilities of the drops that affect a pair, in ascending order: the last bit of their combination must
        not depend on the order in which they started."""
        found = [drop.event.value for drop in self._by_node.get(sender, ()) if drop.affects(sender, receiver)]
        for drop in self._by_node.get(receiver, ()):
            if not drop.event.oneway and drop.affects(receiver, sender) and not drop.affects(sender, receiver):
                found.append(drop.event.value)
        return sorted(found)


class _PairValues:
    """A number for every ordered pair of different nodes, initially 0.

    Nodes that were always named together form a group. The matrix has a row and a column for each group, not for each
    node: with one partition, each of a thousand processes keeps four numbers, not a million.
    """

    def __init__(self, size: int, kind: DTypeLike) -> None:
        self._group = [0] * size
        self._members = [size]
        """The number of nodes in each group."""
        self._values: NDArray[Any] = np.zeros((4, 4), kind)

    def value(self, sender: NodeId, receiver: NodeId) -> float:
        value: float = self._values.item(self._group[sender], self._group[receiver])
        return value

    def fill(self, senders: Collection[NodeId], receivers: Collection[NodeId], value: float) -> None:
        self._separate(senders)
        self._separate(receivers)
        self._values[np.ix_([*self._named(senders)], [*self._named(receivers)])] = value

    def any_of(self, senders: Collection[NodeId], receivers: Collection[NodeId]) -> bool:
        """Whether any of these pairs has a number other than 0."""
        rows, columns = self._named(senders), self._named(receivers)
        found = self._values[np.ix_([*rows], [*columns])] != 0
        for group in rows.keys() & columns.keys():
            if len(rows[group] | columns[group]) == 1:  # a node and itself
                found[[*rows].index(group), [*columns].index(group)] = False
        return bool(found.any())

    def _named(self, nodes: Iterable[NodeId]) -> dict[int, set[NodeId]]:
        """These nodes by their group."""
        named: dict[int, set[NodeId]] = {}
        for node in nodes:
            named.setdefault(self._group[node], set()).add(node)
        return named

    def _separate(self, nodes: Iterable[NodeId]) -> None:
        """Split groups so that each group consists of these nodes only, or has none of them."""
        for group, members in self._named(nodes).items():
            if len(members) == self._members[group]:
                continue
            new = len(self._members)
            if new == len(self._values):
                larger = np.zeros((2 * new, 2 * new), self._values.dtype)
                larger[:new, :new] = self._values
                self._values = larger
            self._values[new, :new] = self._values[group, :new]
            self._values[: new + 1, new] = self._values[: new + 1, group]
            self._members[group] -= len(members)
            self._members.append(len(members))
            for node in members:
                self._group[node] = new
