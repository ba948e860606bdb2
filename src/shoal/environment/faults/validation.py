"""Checks of `[[fault]]` tables. Every problem names the table, the key and what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from shoal import schema
from shoal.environment.faults.events import numbered_events
from shoal.environment.faults.pairs import PairFaults
from shoal.environment.faults.table import (
    COMMON_KEYS,
    END_KEYS,
    KEYS,
    UNDONE,
    Fault,
    affects_pairs,
    candidates,
    sorted_ids,
)
from shoal.types import NodeId, parse_node_ids

_EXAMPLE = "node = 3 or nodes = '0-3, 8'"


def incompatibilities(faults: Sequence[Fault], nodes: int, size: int) -> list[str]:
    """The problems of an experiment's faults, each with its location: "fault[1].until = 5.0: …".

    `size` is the number of nodes including servers. Faults are checked together once each is valid by itself.
    """
    problems: list[str] = []
    known = schema.parameters(Fault)
    for i, fault in enumerate(faults):
        before = len(problems)
        # Types and ranges too: those of a fault that was created in Python are not checked yet.
        for key, value in fault.to_table().items():
            schema.convert(value, known[key].hint, f"fault[{i}].{key}", problems)
        if len(problems) == before:
            found = (*_misplaced_keys(fault), *_wrong_times(fault), *_wrong_nodes(fault, nodes, size))
            problems.extend(f"fault[{i}].{problem}" for problem in found)
    problems = problems or list(_wrong_joins(faults, nodes, size))
    return problems or list(_without_effect(faults, nodes, size))


def _misplaced_keys(fault: Fault) -> Iterator[str]:
    own = KEYS[fault.kind]
    for key, value in fault.to_table().items():
        if key not in COMMON_KEYS | own:
            kinds = ", ".join(repr(kind) for kind, keys in KEYS.items() if key in keys)
            yield f"{key} = {value!r}: kind = {fault.kind!r} has no such key; remove it (only {kinds} have it)"
    for key, expected in (("factor", "above 0"), ("probability", "above 0 and at most 1")):
        if key in own and getattr(fault, key) is None:
            yield f"{key}: missing; expected number {expected}"


def _wrong_times(fault: Fault) -> Iterator[str]:
    if fault.kind == "join":
        yield from _wrong_join_time(fault)
        return
    keys = ("round", "time", "every") if "round" in KEYS[fault.kind] else ("time", "every")
    given = [key for key in keys if getattr(fault, key) is not None]
    if not given:
        yield "time: missing; expected time = … (in seconds) or every = … (mean seconds between random faults)"
    for key in given[1:]:
        yield f"{key} = {getattr(fault, key)!r}: {given[0]} is given too; remove one of them"
    for key in ("after", "before", "count"):
        if fault.every is None and (value := getattr(fault, key)) is not None:
            yield f"{key} = {value!r}: it applies to random faults only; add every = … or remove it"
    if fault.every is not None and fault.before is not None and fault.before <= (fault.after or 0.0):
        yield f"before = {fault.before!r}: expected a time later than after = {fault.after!r}"
    if KEYS[fault.kind] >= END_KEYS:
        yield from _wrong_ends(fault)


def _wrong_join_time(fault: Fault) -> Iterator[str]:
    for key in ("every", "after", "before", "count"):
        if (value := getattr(fault, key)) is not None:
            yield f"{key} = {value!r}: a node joins once; give time = … (in seconds) or round = … instead"
    given = [(key, value) for key in ("round", "time") if (value := getattr(fault, key)) is not None]
    if not given and fault.every is None:
        yield "time: missing; expected time = … (in seconds) or round = …"
    if len(given) > 1:
        yield f"time = {fault.time!r}: round is given too; remove one of them"
    for key, value in given:
        if value == 0:
            yield f"{key} = {value!r}: the nodes would be there from the start; give a later {key}, or remove the fault"


def _wrong_ends(fault: Fault) -> Iterator[str]:
    until, lasting = fault.until, fault.lasting
    if until is not None and lasting is not None:
        yield f"lasting = {lasting!r}: until is given too; remove one of them"
    for key, value in (("until", until), ("lasting", lasting)):
        if fault.round is not None and value is not None:
            yield (
                f"{key} = {value!r}: a fault with a round has no end time; "
                "give time instead of round, or add a fault of kind = 'restart'"
            )
    for key in ("time", "after"):
        since = getattr(fault, key)
        if until is not None and since is not None and until <= since:
            yield f"until = {until!r}: expected a time later than {key} = {since!r}"
    if until is not None and fault.before is not None and until < fault.before:
        yield (
            f"until = {until!r}: expected a time at or after before = {fault.before!r}; faults that start later would "
            "not end"
        )


def _wrong_nodes(fault: Fault, nodes: int, size: int) -> Iterator[str]:
    wrong = [*_malformed_ids("nodes", fault.nodes, nodes, size), *_malformed_ids("others", fault.others, nodes, size)]
    if fault.node is not None and fault.node >= size:
        wrong.append(f"node = {fault.node}: {_no_such_node(nodes, size)}")
    if fault.node is not None and fault.nodes is not None:
        wrong.append(f"nodes = {fault.nodes!r}: node = {fault.node} is given too; remove one of them")
    if wrong:
        yield from wrong
        return
    named = fault.ids(size)
    if affects_pairs(fault):
        yield from _wrong_sides(fault, named, nodes, size)
    elif not named and fault.every is None:
        yield f"node: missing; expected {_EXAMPLE}"
    if fault.restarts_nodes and (servers := [node for node in named if node >= nodes]):
        problem = "cannot restart; leave it out, or remove the end of the crash"
        if fault.kind == "join":
            problem = "must be there from the start; leave it out"
        yield f"{_named(fault)}: node {servers[0]} is a service node, such as a server, and {problem}"


def _named(fault: Fault) -> str:
    """The key of the fault that names nodes, with its value."""
    key = "nodes" if fault.node is None else "node"
    return f"{key} = {getattr(fault, key)!r}"


def _wrong_sides(fault: Fault, named: Collection[NodeId], nodes: int, size: int) -> Iterator[str]:
    drawn = fault.every is not None
    if fault.others is None:
        if size == 1 or (len(named) == size and not drawn):
            yield "others: there are no other nodes; name both sides, or neither for a fault between all nodes"
        return
    if not named and (not drawn or fault.kind in UNDONE):
        yield f"others = {fault.others!r}: missing the nodes on this side; add {_EXAMPLE}"
    elif both := sorted(set(named) & set(sorted_ids(fault.others, size))):
        yield f"others = {fault.others!r}: node {both[0]} is on both sides; remove it from one"
    elif drawn and not candidates(fault, nodes, size):
        yield f"others = {fault.others!r}: no node is left for the random fault; name fewer others"


def _malformed_ids(key: str, text: str | None, nodes: int, size: int) -> Iterator[str]:
    if text is None:
        return
    if any(int(number) >= size for number in re.findall(r"[0-9]+", text)):
        yield f"{key} = {text!r}: {_no_such_node(nodes, size)}"
        return
    try:
        parse_node_ids(text, size)
    except ValueError as error:
        yield key + str(error).removeprefix("nodes")


def _no_such_node(nodes: int, size: int) -> str:
    servers = f", and {size - nodes} server{'s' if size - nodes > 1 else ''}" if size > nodes else ""
    return f"there is no such node; nodes = {nodes}{servers}"


def _wrong_joins(faults: Sequence[Fault], nodes: int, size: int) -> Iterator[str]:
    """Joins that contradict each other, and faults at a fixed time of nodes that have not joined."""
    late: dict[NodeId, Fault] = {}
    for i, fault in enumerate(faults):
        if fault.kind != "join":
            continue
        if twice := late.keys() & set(fault.ids(size)):
            yield f"fault[{i}].{_named(fault)}: node {min(twice)} joins twice; remove it from one of the faults"
        late.update(dict.fromkeys(fault.ids(size), fault))
        if len(late) == nodes:
            yield (
                f"fault[{i}].{_named(fault)}: no node would be there at the start, and late nodes join through others; "
                "leave at least one training node out"
            )
    for i, fault in enumerate(faults):
        if fault.kind in ("crash", "raise", "hang") and fault.time is not None:
            joins = {node: late[node].time for node in fault.ids(size) if node in late}
            if early := [node for node, time in joins.items() if time is not None and fault.time < time]:
                yield (
                    f"fault[{i}].time = {fault.time!r}: node {early[0]} joins later, at {joins[early[0]]!r}; "
                    "give a later time, or leave it out"
                )


def _without_effect(faults: Sequence[Fault], nodes: int, size: int) -> Iterator[str]:
    """Restarts, repairs and releases at fixed times that have nothing to end, whatever random faults happen."""
    fixed = {i: fault for i, fault in enumerate(faults) if fault.time is not None}
    if not any(fault.kind in UNDONE for fault in fixed.values()):
        return
    drawn = [fault for fault in faults if fault.every is not None]
    pair_faults = PairFaults(size)
    by_round = {n for fault in faults if fault.kind == "crash" and fault.round is not None for n in fault.ids(size)}
    down: set[NodeId] = set()
    for i, fault_event in numbered_events(fixed, nodes, size, 0):
        if (undone := UNDONE.get(faults[i].kind)) is not None:
            possible = [f for f in drawn if f.kind == undone and (f.after or 0.0) < fault_event.time]
            place = f"fault[{i}].time = {fault_event.time!r}"
            if undone == "crash":
                up = set(fault_event.nodes).difference(down, by_round, *(candidates(f, nodes, size) for f in possible))
                if up:
                    yield f"{place}: node {min(up)} is not down at this time; add an earlier crash, or leave it out"
            elif not possible and not pair_faults.undoes(fault_event):
                state = "cut" if undone == "partition" else "held"
                yield f"{place}: none of these nodes is {state} at this time; add an earlier {undone}, or remove this"
        if fault_event.kind == "crash":
            down.update(fault_event.nodes)
        elif fault_event.kind == "restart":
            down.difference_update(fault_event.nodes)
        pair_faults.apply(fault_event)
