# Long because compiled functions must be in the file of their callers: numba's cache ignores changes of other files.
"""Max-min fair allocation: the rate of every flow at any time, and the time at which it ends. Compiled with numba.

The rates are the weighted max-min fair allocation (Bertsekas and Gallager, "Data Networks", 1992, 6.5.2). The level of
a flow is its rate divided by its weight. The bottleneck of a flow is a link on its route that is full and on which no
flow has a higher level. An allocation that respects all capacities is max-min fair if and only if every flow has a
bottleneck. Rates change only when a flow starts or ends, or when a capacity changes.

The flows with the same bottleneck are the group of this link. They have the same level. The link counts the bytes that
it has served to each unit of weight of its group. A flow ends when this count reaches a fixed value, its `finish`. So a
new level of a group changes none of its flows. A heap for each group finds the flow that ends next.

`_allocate` computes the rates after changes:

1. It selects new flows. All other flows keep their bottlenecks.
2. It allocates rates by progressive filling: all levels rise together from zero, and a link that becomes full fixes the
   levels of its flows. These are the selected flows, one by one, and the groups of changed links, as a whole.
3. It selects every flow whose bottleneck may be another one now, and repeats step 2 until there is none.

A link needs few numbers to find these flows without a look at all of its flows:

- A link without a group has a reservation for each of its flows. It is at least the rate of the flow, and all together
  do not exceed the capacity. So the link does not become full while every flow stays within its reservation. The
  `ceiling` of a group is the level up to which the reservations of its flows suffice.
- On a link with a group, the reservations of the flows of other groups are exactly their rates. These groups are
  `fixed`: to change their level, all their flows are selected. The `floor` of a link is the highest level of these
  flows. The level of the link's own group must not be lower.

So a new level of a group that is not fixed, between floor and ceiling, takes the same time for any number of flows. The
result is always the same as that of a computation from scratch, apart from rounding.
"""

# mypy: disable-error-code="no-any-return"
# (the fields of records have no types that mypy knows)

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

_F = TypeVar("_F", bound=Callable[..., Any])

Records = NDArray[np.void]

LINK = np.dtype(
    [
        ("capacity", "f8"),  # bytes per second
        ("first", "i8"),  # the first hop of the link's list: one hop for each flow
        ("hops", "i8"),  # the length of the list
        ("changed", "i8"),  # 1 while the link is in `changed`
        # Its group:
        ("next_end", "i8"),  # the flow that ends next: the root of a heap
        ("served", "f8"),  # bytes for each unit of weight, until the time `since`
        ("since", "f8"),
        ("level", "f8"),
        ("flows", "i8"),  # the number of flows that are not selected
        ("weight", "f8"),  # of these flows
        ("fixed", "i8"),  # 1 if one of its flows may cross a link with exact reservations
        ("ceiling", "f8"),
        # Its flows of other groups, without selected flows:
        ("reserved", "f8"),  # bytes per second
        ("exact", "i8"),  # 1 if the reservations are the rates
        ("floor", "f8"),
        ("updates", "i8"),  # of the sums `weight` and `reserved` since they were last computed from all flows
        # While levels rise:
        ("free", "f8"),  # the capacity without the flows that have a rate
        ("first_selected", "i8"),  # the first hop of the list of selected flows
        ("waiting", "i8"),  # the number of selected flows that have no rate yet
        ("waiting_weight", "f8"),  # of these flows, and of a group that is not fixed
        ("total_weight", "f8"),  # likewise, at the beginning
        ("full_level", "f8"),  # the level at which it became full; infinite if it did not
        ("highest", "f8"),  # the highest level of the selected flows
    ]
)
FLOW = np.dtype(
    [
        ("id", "i8"),
        ("weight", "f8"),
        ("size", "f8"),  # bytes
        ("finish", "f8"),  # the flow ends when its group has been served so much
        ("selected", "i8"),  # the number of the last allocation that selected it
        ("hops", "i4"),  # the number of links on its route; 0 after its end
        ("group", "i4"),  # a link; NONE for a new flow
        ("bottleneck", "i4"),  # of a selected flow: its next group; NONE while it has no rate
        ("parent", "i4"),  # in the heap of its group
        ("left", "i4"),
        ("right", "i4"),
    ],
    align=True,
)
HOP = np.dtype(
    [("reserved", "f8"), ("link", "i4"), ("flow", "i4"), ("next", "i4"), ("previous", "i4"), ("next_selected", "i4")],
    align=True,
)
"""A link on the route of a flow. The hops of flow i begin at i × `longest_route`. `next` and `previous` are hops of the
same link."""
END = np.dtype([("time", "f8"), ("flow", "i8")])
TOTALS = np.dtype(
    [
        ("clock", "f8"),
        ("active", "i8"),  # flows
        ("ended", "i8"),  # entries in use of the array with this name
        ("changed", "i8"),  # likewise
        ("selected", "i8"),  # likewise
        ("allocations", "i8"),
        ("longest_route", "i8"),  # links
    ]
)
NONE = -1

_EQUAL = 1e-13
"""Levels and loads are equal if their relative difference is smaller: rounding must not spread through the network."""
_REST = 1e-12
"""A flow ends when no more than this part of its size is left."""
_PRECISE = 100.0
"""A link counts from zero again if it has served this many times the size of a flow that joins its group."""
_ADD_UP = 1 << 62
"""As the number of updates of a link: its sums are computed anew before they are used."""
_UPDATES = 8
"""Sums over the flows of a link are computed anew after this many updates for each flow."""


class State(NamedTuple):
    links: Records
    flows: Records
    hops: Records
    ends: NDArray[np.float64]
    """The time of the next end in each group, in a tree of minima."""
    levels: NDArray[np.float64]
    """While levels rise: the level at which each link becomes full, in a tree of minima."""
    ended: Records
    """The flows that have ended and that `advance` has not returned yet."""
    changed: NDArray[np.int64]
    """The links on which a flow or the capacity changed. During an allocation, also the links of selected flows."""
    selected: NDArray[np.int64]
    """The flows that get a new rate one by one."""
    totals: Records


Arrays = tuple[NDArray[Any], ...]


def _compiled(function: _F) -> _F:
    compiled: Any = numba.njit(cache=True, error_model="numpy")(function)
    return compiled


def _inlined(function: _F) -> _F:
    """Compiled into its callers: a call takes 0.1 µs, because it counts references to all arrays."""
    compiled: Any = numba.njit(cache=True, error_model="numpy", inline="always")(function)
    return compiled


# Trees of minima: the root is at 1, the children of i are at 2i and 2i + 1, and the leaves, one for each link, are the
# second half of the array.


@_inlined
def _set_value(tree: NDArray[np.float64], link: int, value: float) -> None:
    node = link + len(tree) // 2
    tree[node] = value
    while node > 1:
        node //= 2
        lowest = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == lowest:
            return
        tree[node] = lowest


@_inlined
def _lowest(tree: NDArray[np.float64]) -> int:
    """The first link with the lowest value."""
    node = 1
    while node < len(tree) // 2:
        node *= 2
        if tree[node] != tree[node // 2]:
            node += 1
    return node - len(tree) // 2


# Groups: the flows with the same bottleneck


@_inlined
def _served(s: State, link: int) -> float:
    """The bytes that the link has served to each unit of weight of its group until now."""
    line = s.links[link]
    elapsed = s.totals[0].clock - line.since
    return line.served + line.level * elapsed if elapsed > 0.0 and line.next_end >= 0 else line.served


@_inlined
def _note_change(s: State, link: int) -> None:
    line = s.links[link]
    if line.changed == 0:
        line.served, line.since = _served(s, link), s.totals[0].clock
        line.changed = 1
        s.changed[s.totals[0].changed] = link
        s.totals[0].changed += 1


@_compiled
def _merge(flows: Records, a: int, b: int) -> int:
    """Merge two heaps, given by their roots; returns the root. They are skew heaps (Sleator and Tarjan 1986)."""
    root, parent = NONE, NONE
    while a >= 0 and b >= 0:
        if flows[b].finish < flows[a].finish:
            a, b = b, a
        if parent >= 0:
            flows[parent].left = a
        else:
            root = a
        flows[a].parent = parent
        parent, a = a, flows[a].right
        flows[parent].right = flows[parent].left
    rest = max(a, b)
    if rest >= 0:
        flows[rest].parent = parent
    if parent < 0:
        return rest
    flows[parent].left = rest
    return root


@_compiled
def _leave(s: State, flow: int) -> None:
    """Remove the flow from the heap of its group."""
    f = s.flows[flow]
    below = _merge(s.flows, f.left, f.right)
    if below >= 0:
        s.flows[below].parent = f.parent
    if f.parent < 0:
        s.links[f.group].next_end = below
    elif s.flows[f.parent].left == flow:
        s.flows[f.parent].left = below
    else:
        s.flows[f.parent].right = below


@_compiled
def _join(s: State, flow: int, link: int) -> None:
    """Move the flow to the heap of the link's group. The links of both groups are in `changed`."""
    links, flows, hops = s.links, s.flows, s.hops
    f, line = flows[flow], links[link]
    left = f.size / f.weight
    if f.group >= 0:
        left = max(f.finish - links[f.group].served, 0.0)
        _leave(s, flow)
    if line.next_end < 0:
        line.served = 0.0
    elif line.served * f.weight > _PRECISE * f.size:
        hop = line.first
        while hop >= 0:
            other = flows[hops[hop].flow]
            if other.group == link:
                other.finish -= line.served
            hop = hops[hop].next
        line.served = 0.0
    f.group, f.finish = link, line.served + left
    f.parent, f.left, f.right = NONE, NONE, NONE
    line.next_end = _merge(flows, line.next_end, flow)


@_compiled
def _left(s: State, flow: int) -> float:
    """The bytes that are still to be carried."""
    f = s.flows[flow]
    return f.size if f.group < 0 else min(f.size, max(f.finish - _served(s, f.group), 0.0) * f.weight)


@_inlined
def _set_end(s: State, link: int) -> None:
    """Compute when the next flow of the group ends. The link is in `changed`."""
    line = s.links[link]
    end = np.inf
    if line.next_end >= 0 and line.level > 0.0:
        end = line.since + max(s.flows[line.next_end].finish - line.served, 0.0) / line.level
    _set_value(s.ends, link, end)


# Selection of flows


@_compiled
def _add_up(s: State, link: int) -> None:
    """Compute sums from all flows of the link, because the errors of additions and subtractions add up."""
    links, flows, hops = s.links, s.flows, s.hops
    line = links[link]
    line.weight, line.reserved, line.updates = 0.0, 0.0, 0
    hop = line.first
    while hop >= 0:
        f = flows[hops[hop].flow]
        line.reserved += hops[hop].reserved
        if f.group == link and f.selected != s.totals[0].allocations:
            line.weight += f.weight
        hop = hops[hop].next


@_inlined
def _subtract(s: State, flow: int) -> None:
    """Subtract a flow that is not selected from the sums of its links."""
    links, flows, hops = s.links, s.flows, s.hops
    f = flows[flow]
    first = flow * s.totals[0].longest_route
    for hop in range(first, first + f.hops):
        h = hops[hop]
        _note_change(s, h.link)
        line = links[h.link]
        line.updates += 1
        line.reserved -= h.reserved
        h.reserved = 0.0
        if h.link == f.group:
            line.flows -= 1
            line.weight -= f.weight
            if line.weight < f.weight:
                line.updates = _ADD_UP  # the small difference of large numbers is not precise


@_inlined
def _select(s: State, flow: int) -> None:
    """Have a new rate allocated to the flow."""
    f = s.flows[flow]
    if f.selected != s.totals[0].allocations:
        _subtract(s, flow)
        f.selected = s.totals[0].allocations
        s.selected[s.totals[0].selected] = flow
        s.totals[0].selected += 1


@_compiled
def _select_group(s: State, link: int) -> None:
    links, flows, hops = s.links, s.flows, s.hops
    hop = links[link].first
    while hop >= 0:
        if flows[hops[hop].flow].group == link:
            _select(s, hops[hop].flow)
        hop = hops[hop].next


@_compiled
def _select_above(s: State, link: int, level: float) -> None:
    """Select the flows of other groups above this level; the reservations of the others become exact.

    It also selects the flows of groups that are not fixed, because their level may change.
    """
    links, flows, hops = s.links, s.flows, s.hops
    line = links[link]
    line.exact, line.floor = 1, 0.0
    reserved = 0.0
    hop = line.first
    while hop >= 0:
        h = hops[hop]
        f = flows[h.flow]
        if f.group != link and f.selected != s.totals[0].allocations:
            other = links[f.group]
            if other.fixed == 0:
                _select(s, h.flow)
            elif other.level > level * (1.0 + _EQUAL):
                _select_group(s, f.group)
            else:
                line.floor = max(line.floor, other.level)
                h.reserved = f.weight * other.level
                reserved += h.reserved
        hop = h.next
    line.reserved = reserved


@_compiled
def _select_without_reservation(s: State, link: int) -> None:
    """Select the flows of the group whose reservations do not suffice for its new level."""
    links, flows, hops = s.links, s.flows, s.hops
    line = links[link]
    line.ceiling = np.inf
    hop = line.first
    while hop >= 0:
        flow = hops[hop].flow
        f = flows[flow]
        if f.group == link and f.selected != s.totals[0].allocations:
            ceiling = np.inf
            first = flow * s.totals[0].longest_route
            for other in range(first, first + f.hops):
                if other != hop:
                    ceiling = min(ceiling, hops[other].reserved / f.weight)
            if ceiling < line.full_level:
                _select(s, flow)
            else:
                line.ceiling = min(line.ceiling, ceiling)
        hop = hops[hop].next


# Allocation of rates


@_inlined
def _measure(s: State, link: int) -> None:
    """Compute the capacity that is free for flows without a rate, and the weight of these flows."""
    links, flows, hops = s.links, s.flows, s.hops
    line = links[link]
    line.free, line.waiting, line.waiting_weight = line.capacity - line.reserved, 0, 0.0
    if line.flows > 0:
        if line.fixed:
            line.free -= line.weight * line.level
        else:
            line.waiting_weight = line.weight
    hop = line.first_selected
    while hop >= 0:
        f = flows[hops[hop].flow]
        if f.bottleneck < 0:
            line.waiting += 1
            line.waiting_weight += f.weight
        else:
            line.free -= f.weight * links[f.bottleneck].full_level
        hop = hops[hop].next_selected


@_inlined
def _become_full(s: State, link: int, level: float) -> None:
    """Fix the levels of the link's flows that have none yet: the link is their bottleneck."""
    links, flows, hops = s.links, s.flows, s.hops
    links[link].full_level = level
    hop = links[link].first_selected
    while hop >= 0:
        flow = hops[hop].flow
        f = flows[flow]
        if f.bottleneck < 0:
            f.bottleneck = link
            first = flow * s.totals[0].longest_route
            for other in range(first, first + f.hops):
                line = links[hops[other].link]
                line.free -= f.weight * level
                line.waiting -= 1
                line.waiting_weight -= f.weight
                line.highest = level
        hop = hops[hop].next_selected


@_compiled
def _fill(s: State) -> None:
    """Allocate rates to the selected flows and to the groups of changed links by progressive filling."""
    links, flows, hops = s.links, s.flows, s.hops
    for i in range(s.totals[0].changed):
        line = links[s.changed[i]]
        line.first_selected, line.full_level, line.highest = NONE, np.inf, 0.0
        if line.updates > _UPDATES * line.hops:
            _add_up(s, s.changed[i])
        _measure(s, s.changed[i])
    for i in range(s.totals[0].selected):
        f = flows[s.selected[i]]
        f.bottleneck = NONE
        first = s.selected[i] * s.totals[0].longest_route
        for hop in range(first, first + f.hops):
            line = links[hops[hop].link]
            hops[hop].next_selected = line.first_selected
            line.first_selected = hop
            line.waiting += 1
            line.waiting_weight += f.weight
    for i in range(s.totals[0].changed):
        line = links[s.changed[i]]
        line.total_weight = line.waiting_weight
        if line.waiting_weight > 0.0 and line.capacity < np.inf:
            _set_value(s.levels, s.changed[i], max(line.free, 0.0) / line.waiting_weight)
    while s.levels[1] < np.inf:
        lowest, link = s.levels[1], _lowest(s.levels)
        line = links[link]
        # Another link may have fixed flows of this link since: then it is full at a higher level, or never.
        level = np.inf
        if line.waiting > 0 or (line.flows > 0 and line.fixed == 0):
            if line.free < 0.1 * line.capacity or line.waiting_weight < 0.1 * line.total_weight:
                _measure(s, link)  # the small difference of large numbers is not precise
            level = max(line.free, 0.0) / line.waiting_weight
        if level > lowest * (1.0 + _EQUAL):
            _set_value(s.levels, link, level)
        else:
            _set_value(s.levels, link, np.inf)
            _become_full(s, link, level)


@_compiled
def _settle(s: State) -> None:
    """Add the selected flows to the groups of their bottlenecks, and compute reservations for them."""
    links, flows, hops = s.links, s.flows, s.hops
    totals = s.totals[0]
    for i in range(totals.changed):
        line = links[s.changed[i]]
        if line.flows == 0:
            line.fixed, line.ceiling = 0, np.inf
        if line.fixed == 0:
            line.level = line.full_level
    for i in range(totals.selected):
        flow = s.selected[i]
        f = flows[flow]
        if f.bottleneck < 0:  # all its links are infinite
            f.bottleneck = hops[flow * totals.longest_route].link
        if f.bottleneck != f.group:
            _join(s, flow, f.bottleneck)
        links[f.group].flows += 1
        links[f.group].weight += f.weight
        links[f.group].updates += 1
    for i in range(totals.selected):
        _reserve(s, s.selected[i], True)
    for i in range(totals.selected):
        _reserve(s, s.selected[i], False)
    for i in range(totals.changed):
        line = links[s.changed[i]]
        line.changed = 0
        if line.flows == 0:
            line.exact, line.floor = 0, 0.0
        _set_end(s, s.changed[i])
    totals.changed = totals.selected = 0
    totals.allocations += 1


@_inlined
def _reserve(s: State, flow: int, exactly: bool) -> None:
    """Reserve the rate of the flow on its links; then, if not `exactly`, more of it on links without a group."""
    links, flows, hops = s.links, s.flows, s.hops
    f = flows[flow]
    group = links[f.group]
    first = flow * s.totals[0].longest_route
    for hop in range(first, first + f.hops):
        h = hops[hop]
        line = links[h.link]
        if h.link == f.group or group.level == np.inf:
            continue
        if exactly:
            more = f.weight * group.level
            if line.flows > 0:
                group.fixed, line.floor = 1, max(line.floor, group.level)
        elif line.flows == 0:
            # Each flow leaves a part of the free capacity to flows that start later.
            more = min(max(line.capacity - line.reserved, 0.0) / (1 + line.hops), group.capacity)
            group.ceiling = min(group.ceiling, (h.reserved + more) / f.weight)
        else:
            continue
        h.reserved += more
        line.reserved += more
        line.updates += 1


@_compiled
def _allocate(s: State) -> None:
    """Compute rates and ends after changes."""
    totals = s.totals[0]
    if totals.changed == 0:
        return
    fair = False
    while not fair:
        _fill(s)
        selected, fair = totals.selected, True
        for i in range(totals.changed):
            link = s.changed[i]
            line = s.links[link]
            level = line.full_level
            if line.flows > 0 and line.fixed:
                full = line.free <= _EQUAL * line.capacity
                if not full or max(line.highest, line.level) > min(level, line.level) * (1.0 + _EQUAL):
                    _select_group(s, link)
            elif line.flows > 0 and level > line.ceiling:
                _select_without_reservation(s, link)
            if (level < np.inf and not line.exact) or level < line.floor * (1.0 - _EQUAL):
                reserved = line.reserved
                _select_above(s, link, level)
                fair = fair and abs(line.reserved - reserved) <= _EQUAL * line.capacity
        fair = fair and totals.selected == selected
    _settle(s)


# Starts and ends


@_compiled
def _note_end(s: State, flow: int, time: float) -> None:
    end = s.ended[s.totals[0].ended]
    end.time, end.flow = time, s.flows[flow].id
    s.totals[0].ended += 1


@_compiled
def _stop(s: State, flow: int) -> None:
    """Take the flow off its links."""
    f = s.flows[flow]
    if f.selected != s.totals[0].allocations:
        _subtract(s, flow)
    else:
        i = 0
        while s.selected[i] != flow:
            i += 1
        s.totals[0].selected -= 1
        s.selected[i] = s.selected[s.totals[0].selected]
    if f.group >= 0:
        _leave(s, flow)
        _set_end(s, f.group)
    first = flow * s.totals[0].longest_route
    for hop in range(first, first + f.hops):
        h = s.hops[hop]
        if h.previous >= 0:
            s.hops[h.previous].next = h.next
        else:
            s.links[h.link].first = h.next
        if h.next >= 0:
            s.hops[h.next].previous = h.previous
        s.links[h.link].hops -= 1
    f.hops = 0
    s.totals[0].active -= 1


@_compiled
def _advance(s: State, now: float) -> None:
    """Go to `now`, and note the flows that end until then."""
    totals = s.totals[0]
    # A flow that ends at `now` itself may be replaced at once: rates are computed when the next call needs them.
    before = True
    while before:
        _allocate(s)
        time = max(s.ends[1], totals.clock)
        if time > now:
            break
        before = time < now
        totals.clock = time
        while s.ends[1] < np.inf:
            flow = s.links[_lowest(s.ends)].next_end
            f = s.flows[flow]
            # Rounding must neither separate flows that end together, nor leave a rest too small to move the clock.
            if s.ends[1] - time > max(4e-16 * time, _REST * f.size / (f.weight * s.links[f.group].level)):
                break
            _note_end(s, flow, time)
            _stop(s, flow)
    if now > totals.clock:
        totals.clock = now


@_compiled
def _go_to(s: State, now: float) -> None:
    """Advance, unless the clock is there already: rates are computed once for all changes at one time."""
    if now > s.totals[0].clock:
        _advance(s, now)


# The functions that `Flows` calls. It passes a plain tuple: numba reads it in half the time of a named one.


@_compiled
def start(state: Arrays, now: float, flow: int, id: int, hops: int, weight: float, size: float) -> None:
    """Start a flow over the links in its first hops."""
    s = State(*state)
    _go_to(s, now)
    f = s.flows[flow]
    f.id, f.hops, f.weight, f.size = id, hops, weight, size
    first = flow * s.totals[0].longest_route
    limited = False
    for hop in range(first, first + f.hops):
        limited |= s.links[s.hops[hop].link].capacity < np.inf
    if size <= 0.0 or not limited:
        f.hops = 0
        _note_end(s, flow, now)
        return
    f.group, f.selected = NONE, s.totals[0].allocations
    for hop in range(first, first + f.hops):
        h = s.hops[hop]
        line = s.links[h.link]
        h.flow, h.previous, h.next, h.reserved = flow, NONE, line.first, 0.0
        if line.first >= 0:
            s.hops[line.first].previous = hop
        line.first = hop
        line.hops += 1
        _note_change(s, h.link)
    s.totals[0].active += 1
    s.selected[s.totals[0].selected] = flow
    s.totals[0].selected += 1


@_compiled
def cancel(state: Arrays, now: float, flow: int) -> float:
    """Stop a flow; returns the bytes that were left, negative if it had ended before."""
    s = State(*state)
    _go_to(s, now)
    if s.flows[flow].hops == 0:
        return -1.0
    left = _left(s, flow)
    _stop(s, flow)
    return left


@_compiled
def remaining(state: Arrays, now: float, flow: int) -> float:
    s = State(*state)
    _go_to(s, now)
    return _left(s, flow) if s.flows[flow].hops > 0 else 0.0


@_compiled
def rate(state: Arrays, flow: int) -> float:
    s = State(*state)
    _allocate(s)
    f = s.flows[flow]
    return f.weight * s.links[f.group].level if f.hops > 0 else 0.0


@_compiled
def set_capacity(state: Arrays, now: float, link: int, capacity: float) -> None:
    s = State(*state)
    _go_to(s, now)
    if s.links[link].capacity != capacity:
        s.links[link].capacity = capacity
        _note_change(s, link)
        _select_group(s, link)
        _select_above(s, link, -1.0)  # all levels are higher


@_compiled
def next_time(state: Arrays) -> float:
    s = State(*state)
    if s.totals[0].ended > 0:
        return s.ended[0].time
    _allocate(s)
    return max(s.ends[1], s.totals[0].clock)


@_compiled
def advance(state: Arrays, now: float) -> int:
    """Advance to `now`; returns how many flows of `ended` are to be returned."""
    s = State(*state)
    _advance(s, now)
    count = s.totals[0].ended
    s.totals[0].ended = 0
    return count
