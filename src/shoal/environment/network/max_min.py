"""Max-min fair allocation: the rate of every flow at any time, and the time at which it ends. Compiled with numba.

The rates are the weighted max-min fair allocation (Bertsekas and Gallager, "Data Networks", 1992, 6.5.2). The level of
a flow is its rate divided by its weight. The bottleneck of a flow is a link on its route that is full and on which no
flow has a higher level. An allocation that respects all capacities is max-min fair if and only if every flow has a
bottleneck. Rates change only when a flow starts or ends, or when a capacity changes.

`_allocate` computes the rates after such changes:

1. It selects the flows whose bottleneck is a changed link, and new flows. All other flows keep their rates.
2. It allocates rates to the selected flows by progressive filling: all levels rise together from zero, and a link that
   becomes full fixes the levels of its flows.
3. It selects every other flow that no longer has a bottleneck, and repeats step 2 until there is none.

So a change costs time only where rates change, and the result is the same as that of a computation from scratch.
"""

# mypy: disable-error-code="no-any-return"
# (the fields of records have no types that mypy knows)

from __future__ import annotations

import heapq
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
        ("changed", "i8"),  # 1 while the link is in `changed`
        # During an allocation:
        ("free", "f8"),  # the capacity without the flows that have a rate
        ("weight", "f8"),  # of the flows that have no rate yet
        ("waiting", "i8"),  # the number of these flows
    ]
)
FLOW = np.dtype(
    [
        ("id", "i8"),
        ("hops", "i8"),  # the number of links on its route; 0 after its end
        ("weight", "f8"),
        ("size", "f8"),  # bytes
        ("left", "f8"),  # bytes to be carried after the time `since`
        ("since", "f8"),  # when the rate changed
        ("rate", "f8"),  # bytes per second; negative while an allocation has not fixed it
        ("bottleneck", "i8"),  # a link; NONE for a new flow, and for an infinite rate
        ("selected", "i8"),  # the number of the last allocation that selected it
        ("old_rate", "f8"),  # the rate before that allocation
    ]
)
HOP = np.dtype([("link", "i8"), ("flow", "i8"), ("next", "i8"), ("previous", "i8")])
"""A link on the route of a flow. The hops of flow i begin at i × `longest_route`."""
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


class State(NamedTuple):
    links: Records
    flows: Records
    hops: Records
    ends: NDArray[np.float64]
    """The ends of flows, in a tree of minima: the root is at 1, the children of i are at 2i and 2i + 1, and the leaves,
    one for each flow, are the second half."""
    ended: Records
    """The flows that have ended and that `advance` has not returned yet."""
    changed: NDArray[np.int64]
    """The links on which a flow or the capacity changed. During an allocation, also the links of selected flows."""
    selected: NDArray[np.int64]
    """The flows that get a new rate."""
    totals: Records


Arrays = tuple[NDArray[Any], ...]


def _compiled(function: _F) -> _F:
    compiled: Any = numba.njit(cache=True, error_model="numpy")(function)
    return compiled


@_compiled
def _note_change(s: State, link: int) -> None:
    if s.links[link].changed == 0:
        s.links[link].changed = 1
        s.changed[s.totals[0].changed] = link
        s.totals[0].changed += 1


@_compiled
def _set_end(s: State, flow: int, time: float) -> None:
    node = flow + len(s.ends) // 2
    s.ends[node] = time
    while node > 1:
        node //= 2
        earliest = min(s.ends[2 * node], s.ends[2 * node + 1])
        if s.ends[node] == earliest:
            return
        s.ends[node] = earliest


@_compiled
def _next_to_end(s: State) -> int:
    node = 1
    while node < len(s.ends) // 2:
        node *= 2
        if s.ends[node] != s.ends[node // 2]:
            node += 1
    return node - len(s.ends) // 2


# Allocation of rates


@_compiled
def _select(s: State, flow: int) -> None:
    """Have a new rate allocated to the flow."""
    f = s.flows[flow]
    if f.selected == s.totals[0].allocations:
        return
    f.selected = s.totals[0].allocations
    f.old_rate = f.rate
    s.selected[s.totals[0].selected] = flow
    s.totals[0].selected += 1
    first = flow * s.totals[0].longest_route
    for hop in range(first, first + f.hops):
        _note_change(s, s.hops[hop].link)


@_compiled
def _select_limited(s: State, link: int) -> None:
    """Select the flows whose bottleneck is the link, and the new ones."""
    hop = s.links[link].first
    while hop >= 0:
        flow = s.hops[hop].flow
        if s.flows[flow].bottleneck == link or s.flows[flow].bottleneck == NONE:
            _select(s, flow)
        hop = s.hops[hop].next


@_compiled
def _measure(s: State, link: int) -> float:
    """Compute the free capacity of the link; returns the level at which the flows without a rate fill it."""
    line = s.links[link]
    line.free, line.weight, line.waiting = line.capacity, 0.0, 0
    hop = line.first
    while hop >= 0:
        f = s.flows[s.hops[hop].flow]
        if f.rate >= 0.0:
            line.free -= f.rate
        else:
            line.weight += f.weight
            line.waiting += 1
        hop = s.hops[hop].next
    return max(line.free, 0.0) / line.weight if line.waiting > 0 else np.inf


@_compiled
def _fix_rates(s: State, link: int, level: float) -> int:
    """Fix the rates of the link's flows that have none yet: the link is their bottleneck. Returns their number."""
    fixed = s.links[link].waiting
    hop = s.links[link].first
    while hop >= 0:
        flow = s.hops[hop].flow
        f = s.flows[flow]
        if f.rate < 0.0:
            f.rate, f.bottleneck = f.weight * level, link
            first = flow * s.totals[0].longest_route
            for other in range(first, first + f.hops):
                line = s.links[s.hops[other].link]
                line.free -= f.rate
                line.weight -= f.weight
                line.waiting -= 1
        hop = s.hops[hop].next
    return fixed


@_compiled
def _fill(s: State) -> None:
    """Allocate rates to the selected flows by progressive filling. The other flows keep their rates."""
    for i in range(s.totals[0].selected):
        s.flows[s.selected[i]].rate = -1.0
    full = [(0.0, NONE) for _ in range(0)]
    for i in range(s.totals[0].changed):
        link = s.changed[i]
        level = _measure(s, link)
        if level < np.inf:
            full.append((level, link))
    heapq.heapify(full)
    waiting = s.totals[0].selected
    while waiting > 0 and len(full) > 0:
        level, link = heapq.heappop(full)
        line = s.links[link]
        if line.waiting == 0:
            continue
        # Another bottleneck may have fixed flows of this link since: then it is full at a higher level.
        now = max(line.free, 0.0) / line.weight
        if now > level * (1.0 + _EQUAL):
            heapq.heappush(full, (now, link))
        else:
            if now != level:
                now = _measure(s, link)  # `free` and `weight` are differences, with the rounding errors of large sums
            waiting -= _fix_rates(s, link, now)
    for i in range(s.totals[0].selected):
        f = s.flows[s.selected[i]]
        if f.rate < 0.0:
            f.rate, f.bottleneck = np.inf, NONE


@_compiled
def _select_unfair(s: State, link: int) -> None:
    """Select the link's flows that have lost their bottleneck, or that leave selected flows less than a fair share."""
    line = s.links[link]
    load, weight, limit, highest, others = 0.0, 0.0, np.inf, 0.0, 0
    hop = line.first
    while hop >= 0:
        f = s.flows[s.hops[hop].flow]
        load += f.rate
        weight += f.weight
        if f.selected == s.totals[0].allocations:
            highest = max(highest, f.rate / f.weight)
            if f.bottleneck == link:
                limit = f.rate / f.weight
        else:
            others += 1
        hop = s.hops[hop].next
    if others == 0:
        return
    if load > line.capacity * (1.0 + _EQUAL) and limit == np.inf:
        limit = line.capacity / weight  # the link is overloaded: no flow with a lower level has to slow down
    full = load >= line.capacity * (1.0 - _EQUAL)
    hop = line.first
    while hop >= 0:
        flow = s.hops[hop].flow
        f = s.flows[flow]
        level = f.rate / f.weight
        lost = f.bottleneck == link and (not full or highest > level * (1.0 + _EQUAL))
        if lost or level > limit * (1.0 + _EQUAL):
            _select(s, flow)
        hop = s.hops[hop].next


@_compiled
def _allocate(s: State) -> None:
    """Compute rates and ends after changes."""
    totals = s.totals[0]
    if totals.changed == 0:
        return
    totals.allocations += 1
    totals.selected = 0
    for i in range(totals.changed):
        _select_limited(s, s.changed[i])
    selected = NONE
    while selected < totals.selected:
        selected = totals.selected
        _fill(s)
        for i in range(totals.changed):
            if s.links[s.changed[i]].capacity < np.inf:
                _select_unfair(s, s.changed[i])
    for i in range(totals.selected):
        flow = s.selected[i]
        f = s.flows[flow]
        if f.rate != f.old_rate:
            f.left, f.since = _left(s, flow, f.old_rate), totals.clock
            _set_end(s, flow, totals.clock + f.left / f.rate if f.rate > 0.0 else np.inf)
    for i in range(totals.changed):
        s.links[s.changed[i]].changed = 0
    totals.changed = 0


@_compiled
def _left(s: State, flow: int, rate: float) -> float:
    """The bytes that are still to be carried, if the flow had this rate since its last change."""
    f = s.flows[flow]
    elapsed = s.totals[0].clock - f.since
    return max(f.left - rate * elapsed, 0.0) if elapsed > 0.0 else f.left


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
    first = flow * s.totals[0].longest_route
    for hop in range(first, first + f.hops):
        h = s.hops[hop]
        if h.previous >= 0:
            s.hops[h.previous].next = h.next
        else:
            s.links[h.link].first = h.next
        if h.next >= 0:
            s.hops[h.next].previous = h.previous
        _note_change(s, h.link)
    f.hops = 0
    s.totals[0].active -= 1
    _set_end(s, flow, np.inf)


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
            flow = _next_to_end(s)
            f = s.flows[flow]
            # Rounding must neither separate flows that end together, nor leave a rest too small to move the clock.
            if s.ends[1] - time > max(4e-16 * time, _REST * f.size / f.rate):
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
    f.left, f.since, f.rate, f.bottleneck = size, now, 0.0, NONE
    for hop in range(first, first + f.hops):
        h = s.hops[hop]
        line = s.links[h.link]
        h.flow, h.previous, h.next = flow, NONE, line.first
        if line.first >= 0:
            s.hops[line.first].previous = hop
        line.first = hop
        _note_change(s, h.link)
    s.totals[0].active += 1


@_compiled
def cancel(state: Arrays, now: float, flow: int) -> float:
    """Stop a flow; returns the bytes that were left, negative if it had ended before."""
    s = State(*state)
    _go_to(s, now)
    if s.flows[flow].hops == 0:
        return -1.0
    left = _left(s, flow, s.flows[flow].rate)
    _stop(s, flow)
    return left


@_compiled
def remaining(state: Arrays, now: float, flow: int) -> float:
    s = State(*state)
    _go_to(s, now)
    return _left(s, flow, s.flows[flow].rate) if s.flows[flow].hops > 0 else 0.0


@_compiled
def rate(state: Arrays, flow: int) -> float:
    s = State(*state)
    _allocate(s)
    return s.flows[flow].rate if s.flows[flow].hops > 0 else 0.0


@_compiled
def set_capacity(state: Arrays, now: float, link: int, capacity: float) -> None:
    s = State(*state)
    _go_to(s, now)
    if s.links[link].capacity != capacity:
        s.links[link].capacity = capacity
        _note_change(s, link)


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
