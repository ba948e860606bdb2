"""Faults on schedule: what strikes whom and when, and the timetable that follows from it.

A `Fault` is one `[[fault]]` table of an experiment. Those by `round` strike a node when it starts that round, and the
node's observer looks for them. All others strike by the clock: `fault_events` turns them into `FaultEvent`s in order of
time, the same ones in every process that reads it with the same seed. `PairFaults` keeps what of them stands
between nodes.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shoal import schema
from shoal.randomness import generator
from shoal.types import Bounds, NodeId, format_node_ids, parse_node_ids

Kind: TypeAlias = Literal[
    "crash", "raise", "hang", "restart", "partition", "repair", "hold", "release", "slow", "drop"
]  # fmt: skip
What: TypeAlias = Literal["compute", "network", "both"]

_COMMON = frozenset({"kind", "node", "nodes", "time", "every", "after", "before", "count"})
_BETWEEN = frozenset({"others", "oneway"})
_ENDING = frozenset({"until", "lasting"})
_OWN: dict[Kind, frozenset[str]] = {
    "crash": _ENDING | {"round"},
    "raise": frozenset({"round"}),
    "hang": frozenset({"round"}),
    "restart": frozenset(),
    "partition": _BETWEEN | _ENDING,
    "repair": _BETWEEN,
    "hold": _BETWEEN | _ENDING,
    "release": _BETWEEN,
    "slow": _ENDING | {"factor", "what"},
    "drop": _BETWEEN | _ENDING | {"probability"},
}
"""The keys of each kind, beside those that all have."""
_OPPOSITES: dict[Kind, tuple[Kind, float]] = {
    "crash": ("restart", 0.0),
    "partition": ("repair", 0.0),
    "hold": ("release", 0.0),
    "slow": ("slow", 1.0),
    "drop": ("drop", 0.0),
}
"""What ends a fault of each kind that can end, and with which value."""
_UNDONE: dict[Kind, Kind] = {"restart": "crash", "repair": "partition", "release": "hold"}
_SPELLING = "node = 3 or nodes = '0-3, 8'"


@dataclass(frozen=True)
class Fault:
    """A `fault` table. Times are seconds since the start of the run. What is not given is None.

    It strikes once, at the start of a `round` or at a `time`, or again and again at times that are drawn, `every` so
    many seconds on average. A crash, an error or a hang of which nothing is said strikes at round 0.
    """

    kind: Kind
    """A "crash" ends nodes at once, as SIGKILL does, and a "restart" brings them back; "raise" makes their code fail;
    "hang" leaves them alive and silent; "partition" cuts nodes off from others until a "repair"; "hold" keeps what they
    send to each other until a "release"; "slow" makes nodes take longer; "drop" loses messages."""
    node: Annotated[int, Bounds(at_least=0)] | None = None
    round: Annotated[int, Bounds(at_least=0)] | None = None
    """Strikes when a node starts this round or, if it has no part in that, its next one."""
    nodes: str | None = None
    """Several nodes, as in "0-3, 8". When no node is given: for a drawn fault, any that learns; for what is between
    nodes, all of them."""
    others: str | None = None
    """Between `nodes` and these; everybody else when not given, those that serve included."""
    oneway: bool | None = None
    """Whether only messages from `nodes` to `others` are meant; both directions when not given."""
    time: Annotated[float, Bounds(at_least=0)] | None = None
    every: Annotated[float, Bounds(above=0)] | None = None
    """The mean of the seconds between strikes, which are exponential. Each strikes one node, all equally likely."""
    after: Annotated[float, Bounds(at_least=0)] | None = None
    """When strikes begin to be drawn; at 0 when not given."""
    before: Annotated[float, Bounds(above=0)] | None = None
    """No strike is drawn from then on."""
    count: Annotated[int, Bounds(at_least=1)] | None = None
    """How many strikes are drawn at most."""
    until: Annotated[float, Bounds(above=0)] | None = None
    """The time at which it ends; never when neither this nor `lasting` is given."""
    lasting: Annotated[float, Bounds(above=0)] | None = None
    """Seconds from the strike to its end; the mean of an exponential for strikes that are drawn."""
    factor: Annotated[float, Bounds(above=0)] | None = None
    """How many times as long a slow node takes. It holds until the next one, and does not multiply with others."""
    what: What | None = None
    """What is slow: computing, messages, or both, as when not given."""
    probability: Annotated[float, Bounds(above=0, at_most=1)] | None = None
    """Of each message to be dropped. It holds until the next one, and does not add to others."""

    def __post_init__(self) -> None:
        if "round" in _OWN.get(self.kind, ()) and self.round is self.time is self.every is None:
            object.__setattr__(self, "round", 0)

    def ids(self, size: int) -> tuple[NodeId, ...]:
        """The nodes that are named, of so many, in ascending order; none if no node is. Raises ValueError."""
        if self.node is not None:
            return (self.node,)
        return () if self.nodes is None else _ascending(self.nodes, size)

    @property
    def ends(self) -> bool:
        """Whether what it does is undone by itself."""
        return self.until is not None or self.lasting is not None

    @property
    def restarts_nodes(self) -> bool:
        """Whether nodes that died come back by it."""
        return self.kind == "restart" or (self.kind == "crash" and self.ends)

    def strikes_at(self, round: int) -> bool:
        """Whether it strikes a node that starts `round`, if it has not yet."""
        return self.round is not None and self.round <= round

    def to_table(self) -> dict[str, Any]:
        """What is given."""
        return {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True)
class FaultEvent:
    """Something that is done to nodes at a time, in seconds since the start of the run."""

    time: float
    kind: Kind
    nodes: tuple[NodeId, ...]
    others: tuple[NodeId, ...] = ()
    """The other side, where something is done between nodes. Equal to `nodes` when it is done between all nodes."""
    value: float = 0.0
    """The factor by which nodes are slow, 1 when they no longer are; or the probability of a drop, 0 at its end."""
    what: What = "both"
    """What is slow."""
    oneway: bool = False
    """Whether only messages from `nodes` to `others` are meant."""

    def __str__(self) -> str:
        """A sentence for people: "node 3 crashes"."""
        several = len(self.nodes) != 1
        who = f"nodes {format_node_ids(self.nodes)}" if several else f"node {self.nodes[0]}"
        if self.kind in ("crash", "raise", "hang", "restart"):
            verb = self.kind if several else {"crash": "crashes"}.get(self.kind, f"{self.kind}s")
            return f"{who} {verb}"
        if self.kind == "slow":
            verbs = ("compute", "communicate") if several else ("computes", "communicates")
            does = {"compute": verbs[0], "network": verbs[1], "both": " and ".join(verbs)}[self.what]
            return f"{who} {does} " + ("at full speed again" if self.value == 1 else f"{self.value:g} times as slowly")
        everybody = not self.nodes or self.nodes == self.others
        them = format_node_ids(self.others) if self.others else "everybody else"
        reach = "reach" if several else "reaches"
        if self.kind == "partition":
            if everybody:
                return "all nodes are cut off from each other"
            cut_off = "are cut off from" if several else "is cut off from"
            return f"{who} no longer {reach} {them}" if self.oneway else f"{who} {cut_off} {them}"
        if self.kind == "repair":
            if everybody:
                return "all nodes reach each other again"
            return f"{who} {reach} {them} again" if self.oneway else f"{who} and {them} reach each other again"
        between = f"from {who} to {them}" if self.oneway else f"between {who} and {them}"
        messages = "messages between all nodes" if everybody else f"messages {between}"
        if self.kind == "drop":
            if self.value == 0:
                return f"{messages} are no longer dropped"
            return f"{100 * self.value:g} % of {messages} are dropped"
        return f"{messages} are {'held' if self.kind == 'hold' else 'released'}"


def fault_events(faults: Sequence[Fault], nodes: int, size: int, seed: int) -> Iterator[FaultEvent]:
    """What the clock brings, in order of time and, within a time, in the order of the file. It may be endless.

    `size` counts the nodes with those that serve: the last `size - nodes`. The faults are those of an experiment,
    checked, with or without those by round. Nodes that the clock has crashed do not crash again, and the end of a crash
    brings back those that are still down. A fault of kind "restart" may name nodes that are up: whoever acts on it
    leaves these alone.
    """
    down: set[NodeId] = set()
    timed = [fault for fault in faults if fault.round is None]
    for_good = () if any(fault.restarts_nodes for fault in timed) else down
    for i, fault_event in _merged(dict(enumerate(timed)), nodes, size, seed, for_good):
        struck = fault_event.nodes
        if fault_event.kind == "crash":
            struck = tuple(node for node in struck if node not in down)
            down.update(struck)
        elif fault_event.kind == "restart":
            if timed[i].kind == "crash":
                struck = tuple(node for node in struck if node in down)
            down.difference_update(struck)
        if struck:
            yield dataclasses.replace(fault_event, nodes=struck)


def _merged(
    faults: Mapping[int, Fault], nodes: int, size: int, seed: int, for_good: Collection[NodeId] = ()
) -> Iterator[tuple[int, FaultEvent]]:
    """What faults by the clock do, each with the number of its fault. Those down `for_good` are not crashed again."""
    schedules = [zip(itertools.repeat(i), _schedule(f, i, nodes, size, seed, for_good)) for i, f in faults.items()]
    return heapq.merge(*schedules, key=lambda numbered: numbered[1].time)


def _schedule(
    fault: Fault, index: int, nodes: int, size: int, seed: int, for_good: Collection[NodeId]
) -> Iterator[FaultEvent]:
    """What one fault by the clock does, and undoes, in order of time."""
    ends: list[tuple[float, int, FaultEvent]] = []
    for order, (start, end, struck) in enumerate(_strikes(fault, index, nodes, size, seed, for_good)):
        while ends and ends[0][0] <= start:
            yield heapq.heappop(ends)[-1]
        strike = FaultEvent(
            start,
            fault.kind,
            struck or tuple(range(size)),
            _other_side(fault, struck, size) if _is_between(fault) else (),
            fault.factor or fault.probability or 0.0,
            fault.what or "both",
            fault.oneway or False,
        )
        yield strike
        if end is not None:
            kind, value = _OPPOSITES[fault.kind]
            heapq.heappush(ends, (end, order, dataclasses.replace(strike, time=end, kind=kind, value=value)))
    while ends:
        yield heapq.heappop(ends)[-1]


def _strikes(
    fault: Fault, index: int, nodes: int, size: int, seed: int, for_good: Collection[NodeId]
) -> Iterator[tuple[float, float | None, tuple[NodeId, ...]]]:
    """When a fault strikes, when that ends, and whom it strikes: nobody in particular, if what is between all nodes."""
    if fault.time is not None:
        end = fault.until if fault.lasting is None else fault.time + fault.lasting
        yield fault.time, end, fault.ids(size)
    if fault.every is None:
        return
    random = generator(seed, "fault", index)
    struck = _pool(fault, nodes, size)
    last = min(math.inf if limit is None else limit for limit in (fault.before, fault.until))
    time, drawn = fault.after or 0.0, 0
    while fault.count is None or drawn < fault.count:
        time += random.exponential(fault.every)
        if time >= last or (fault.kind == "crash" and all(node in for_good for node in struck)):
            return
        one = (struck[random.integers(len(struck))],) if struck else ()
        yield time, fault.until if fault.lasting is None else time + random.exponential(fault.lasting), one
        drawn += 1


def _pool(fault: Fault, nodes: int, size: int) -> tuple[NodeId, ...]:
    """Those that a drawn fault may strike; none if it undoes whatever there is."""
    if named := fault.ids(size):
        return named
    if fault.kind in ("repair", "release"):
        return ()
    beyond = frozenset(() if fault.others is None else _ascending(fault.others, size))
    return tuple(node for node in range(nodes) if node not in beyond)


def _is_between(fault: Fault) -> bool:
    return _OWN[fault.kind] >= _BETWEEN


def _other_side(fault: Fault, struck: Collection[NodeId], size: int) -> tuple[NodeId, ...]:
    """Whom something stands between `struck` and; all, if nobody in particular is struck."""
    if fault.others is not None:
        return _ascending(fault.others, size)
    aside = frozenset(struck)
    return tuple(node for node in range(size) if node not in aside)


def _ascending(spelt: str, size: int) -> tuple[NodeId, ...]:
    return tuple(sorted(set(parse_node_ids(spelt, size))))


# What stands between nodes


class PairFaults:
    """What stands between nodes at the moment: cuts, holds, and the probability that a message is dropped.

    Each pair of nodes, in each direction, is cut or not, however often it was: a repair of some nodes and others
    undoes all cuts between them, also those of partitions that named more nodes, and no others. So do releases with
    holds, and a drop takes the place of an earlier one. Nothing ever stands between a node and itself.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._cuts: _Pairs | None = None
        self._holds: _Pairs | None = None
        self._drops: _Pairs | None = None

    def apply(self, fault_event: FaultEvent) -> None:
        """Let it happen. What is not between nodes, such as a crash, changes nothing.

        A happening without nodes is between all of them, and one without others between its nodes and all others.
        """
        if fault_event.kind in ("partition", "repair"):
            self._cuts = self._changed(self._cuts, fault_event, fault_event.kind == "partition", np.bool_)
        elif fault_event.kind in ("hold", "release"):
            self._holds = self._changed(self._holds, fault_event, fault_event.kind == "hold", np.bool_)
        elif fault_event.kind == "drop":
            self._drops = self._changed(self._drops, fault_event, fault_event.value, np.float64)

    def cut(self, sender: NodeId, receiver: NodeId) -> bool:
        """Whether no message gets through."""
        return self._cuts is not None and sender != receiver and bool(self._cuts.value(sender, receiver))

    def held(self, sender: NodeId, receiver: NodeId) -> bool:
        """Whether messages are kept until a release."""
        return self._holds is not None and sender != receiver and bool(self._holds.value(sender, receiver))

    def drop(self, sender: NodeId, receiver: NodeId) -> float:
        """The probability that a message is dropped."""
        return 0.0 if self._drops is None or sender == receiver else self._drops.value(sender, receiver)

    def undoes(self, fault_event: FaultEvent) -> bool:
        """Whether a repair or a release has anything to undo."""
        pairs = self._cuts if fault_event.kind == "repair" else self._holds
        return pairs is not None and any(pairs.any_of(*sides) for sides in self._sides(fault_event))

    def _changed(self, pairs: _Pairs | None, fault_event: FaultEvent, value: float, kind: DTypeLike) -> _Pairs | None:
        if pairs is None:
            if not value:
                return None
            pairs = _Pairs(self._size, kind)
        for senders, receivers in self._sides(fault_event):
            pairs.fill(senders, receivers, value)
        return pairs

    def _sides(self, fault_event: FaultEvent) -> Iterator[tuple[Collection[NodeId], Collection[NodeId]]]:
        """Senders and receivers that are meant, in one or both directions."""
        nodes = frozenset(fault_event.nodes or range(self._size))
        others: Collection[NodeId] = frozenset(fault_event.others)
        if not others:
            others = [node for node in range(self._size) if not fault_event.nodes or node not in nodes]
        yield nodes, others
        if not fault_event.oneway:
            yield others, nodes


class _Pairs:
    """A number for every two different nodes, in each direction; 0 at first.

    Nodes that were always named together form a group, and groups have rows and columns: a thousand processes that
    each know of one partition keep four numbers, not a million.
    """

    def __init__(self, size: int, kind: DTypeLike) -> None:
        self._group = [0] * size
        self._members = [size]
        """How many nodes each group has."""
        self._values: NDArray[Any] = np.zeros((4, 4), kind)

    def value(self, sender: NodeId, receiver: NodeId) -> float:
        value: float = self._values.item(self._group[sender], self._group[receiver])
        return value

    def fill(self, senders: Collection[NodeId], receivers: Collection[NodeId], value: float) -> None:
        self._separate(senders)
        self._separate(receivers)
        self._values[np.ix_([*self._named(senders)], [*self._named(receivers)])] = value

    def any_of(self, senders: Collection[NodeId], receivers: Collection[NodeId]) -> bool:
        """Whether the number of any of these pairs is not 0."""
        rows, columns = self._named(senders), self._named(receivers)
        found = self._values[np.ix_([*rows], [*columns])] != 0
        for group in rows.keys() & columns.keys():
            if len(rows[group] | columns[group]) == 1:  # a node and itself
                found[[*rows].index(group), [*columns].index(group)] = False
        return bool(found.any())

    def _named(self, nodes: Iterable[NodeId]) -> dict[int, set[NodeId]]:
        """These nodes, by group."""
        named: dict[int, set[NodeId]] = {}
        for node in nodes:
            named.setdefault(self._group[node], set()).add(node)
        return named

    def _separate(self, nodes: Iterable[NodeId]) -> None:
        """Let each group be wholly of these nodes, or have none of them."""
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


# What makes no sense


def incompatibilities(faults: Sequence[Fault], nodes: int, size: int) -> list[str]:
    """What is wrong with the faults of an experiment, each with its place: "fault[1].until = 5.0: …".

    `size` counts the nodes with those that serve. What is between faults is looked at when each is right by itself.
    """
    problems: list[str] = []
    known = schema.parameters(Fault)
    for i, fault in enumerate(faults):
        before = len(problems)
        for (
            key,
            value,
        ) in fault.to_table().items():  # types and ranges: one that was made in Python has not been seen yet
            schema.convert(value, known[key].hint, f"fault[{i}].{key}", problems)
        if len(problems) == before:
            said = (*_misplaced_keys(fault), *_wrong_times(fault), *_wrong_nodes(fault, nodes, size))
            problems.extend(f"fault[{i}].{problem}" for problem in said)
    return problems or list(_in_vain(faults, nodes, size))


def _misplaced_keys(fault: Fault) -> Iterator[str]:
    own = _OWN[fault.kind]
    for key, value in fault.to_table().items():
        if key not in _COMMON | own:
            kinds = ", ".join(repr(kind) for kind, keys in _OWN.items() if key in keys)
            yield f"{key} = {value!r}: kind = {fault.kind!r} has no such key; remove it (it goes with {kinds})"
    for key, meant in (("factor", "above 0"), ("probability", "above 0 and at most 1")):
        if key in own and getattr(fault, key) is None:
            yield f"{key}: missing; expected number {meant}"


def _wrong_times(fault: Fault) -> Iterator[str]:
    keys = ("round", "time", "every") if "round" in _OWN[fault.kind] else ("time", "every")
    given = [key for key in keys if getattr(fault, key) is not None]
    if not given:
        yield "time: missing; say when it strikes: time = … (in seconds) or every = … (in seconds, on average)"
    for key in given[1:]:
        yield f"{key} = {getattr(fault, key)!r}: {given[0]} says already when it strikes; remove one of them"
    for key in ("after", "before", "count"):
        if fault.every is None and (value := getattr(fault, key)) is not None:
            yield f"{key} = {value!r}: it limits strikes that are drawn; add every = … or remove it"
    if fault.every is not None and fault.before is not None and fault.before <= (fault.after or 0.0):
        yield f"before = {fault.before!r}: expected a time later than after = {fault.after!r}"
    if _OWN[fault.kind] >= _ENDING:
        yield from _wrong_ends(fault)


def _wrong_ends(fault: Fault) -> Iterator[str]:
    until, lasting = fault.until, fault.lasting
    if until is not None and lasting is not None:
        yield f"lasting = {lasting!r}: until says already when it ends; remove one of them"
    for key, value in (("until", until), ("lasting", lasting)):
        if fault.round is not None and value is not None:
            yield (
                f"{key} = {value!r}: a fault by round does not end by the clock; "
                "give time in place of round, or add a fault of kind = 'restart'"
            )
    for key in ("time", "after"):
        since = getattr(fault, key)
        if until is not None and since is not None and until <= since:
            yield f"until = {until!r}: expected a time later than {key} = {since!r}"
    if until is not None and fault.before is not None and until < fault.before:
        yield f"until = {until!r}: expected no earlier time than before = {fault.before!r}; later strikes would not end"


def _wrong_nodes(fault: Fault, nodes: int, size: int) -> Iterator[str]:
    wrong = [*_misspelt("nodes", fault.nodes, nodes, size), *_misspelt("others", fault.others, nodes, size)]
    if fault.node is not None and fault.node >= size:
        wrong.append(f"node = {fault.node}: {_absent(nodes, size)}")
    if fault.node is not None and fault.nodes is not None:
        wrong.append(f"nodes = {fault.nodes!r}: node = {fault.node} is given too; remove one of them")
    if wrong:
        yield from wrong
        return
    named = fault.ids(size)
    if _is_between(fault):
        yield from _wrong_sides(fault, named, nodes, size)
    elif not named and fault.every is None:
        yield f"node: missing; say whom it strikes: {_SPELLING}"
    if fault.restarts_nodes and (serving := [node for node in named if node >= nodes]):
        key = "nodes" if fault.node is None else "node"
        yield (
            f"{key} = {getattr(fault, key)!r}: node {serving[0]} serves the others and cannot be brought back; "
            "leave it out, or let it crash for good"
        )


def _wrong_sides(fault: Fault, named: Collection[NodeId], nodes: int, size: int) -> Iterator[str]:
    drawn = fault.every is not None
    if fault.others is None:
        if size == 1 or (len(named) == size and not drawn):
            yield "others: there is nobody else; name both sides, or neither: then all nodes are meant"
        return
    if not named and (not drawn or fault.kind in _UNDONE):
        yield f"others = {fault.others!r}: say also whose others they are: {_SPELLING}"
    elif both := sorted(set(named) & set(_ascending(fault.others, size))):
        yield f"others = {fault.others!r}: node {both[0]} is on both sides; name it on one"
    elif drawn and not _pool(fault, nodes, size):
        yield f"others = {fault.others!r}: nobody is left to be struck; name fewer others"


def _misspelt(key: str, spelt: str | None, nodes: int, size: int) -> Iterator[str]:
    if spelt is None:
        return
    if any(int(number) >= size for number in re.findall(r"[0-9]+", spelt)):
        yield f"{key} = {spelt!r}: {_absent(nodes, size)}"
        return
    try:
        parse_node_ids(spelt, size)
    except ValueError as error:
        yield key + str(error).removeprefix("nodes")


def _absent(nodes: int, size: int) -> str:
    serve = f", and {size - nodes} that serve them" if size > nodes else ""
    return f"there is no such node; nodes = {nodes}{serve}"


def _in_vain(faults: Sequence[Fault], nodes: int, size: int) -> Iterator[str]:
    """Restarts, repairs and releases at fixed times that find nothing to undo, whatever else is drawn."""
    fixed = {i: fault for i, fault in enumerate(faults) if fault.time is not None}
    if not any(fault.kind in _UNDONE for fault in fixed.values()):
        return
    drawn = [fault for fault in faults if fault.every is not None]
    interference = PairFaults(size)
    by_round = {n for fault in faults if fault.kind == "crash" and fault.round is not None for n in fault.ids(size)}
    down: set[NodeId] = set()
    for i, fault_event in _merged(fixed, nodes, size, 0):
        if (undone := _UNDONE.get(faults[i].kind)) is not None:
            perhaps = [f for f in drawn if f.kind == undone and (f.after or 0.0) < fault_event.time]
            place = f"fault[{i}].time = {fault_event.time!r}"
            if undone == "crash":
                up = set(fault_event.nodes).difference(down, by_round, *(_pool(f, nodes, size) for f in perhaps))
                if up:
                    yield f"{place}: node {min(up)} is not down by then; let it crash before, or leave it out"
            elif not perhaps and not interference.undoes(fault_event):
                done = "cut" if undone == "partition" else "held"
                yield f"{place}: nothing that it names is {done} by then; add a {undone} before, or remove this"
        if fault_event.kind == "crash":
            down.update(fault_event.nodes)
        elif fault_event.kind == "restart":
            down.difference_update(fault_event.nodes)
        interference.apply(fault_event)
