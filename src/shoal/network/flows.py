"""Transfers that share links: how fast each goes at any time, and when each ends, exactly.

The rates of all flows are the weighted max-min fair allocation (Bertsekas and Gallager, "Data Networks", 1992, 6.5.2):
flows that are limited by the same link share it in proportion to their weights, and what a flow cannot use of a link,
because another limits it, is left to the others. They change only when a flow starts or ends or a capacity changes.

Flows with the same way and the same weight always have the same rate: they are a group. A group counts the bytes that
each of its flows has been given since it was first used, so that a flow ends when this count reaches what it was at
its start plus the flow's size, whatever the rates were in between; a change of the rate touches the group and not its
flows. A link that limits flows has a level: bytes per second and unit of weight. A group's level is the lowest of its
links', and its rate that times its weight.

`_settle` works out the levels by progressive filling: all levels rise together from zero, a link that is full fixes its
groups. After a change it fills only what the change reaches, because a change moves no level below the lowest at which
something is different: links stay as they are until the filling has come to a group on them whose level differs.
"""

# mypy: disable-error-code="no-any-return"
# (the fields of records have no types that mypy knows)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

_F = TypeVar("_F", bound=Callable[..., Any])

Records = NDArray[np.void]

_LINK = np.dtype(
    [
        ("capacity", "f8"),  # bytes per second
        ("level", "f8"),  # infinite: it limits nobody
        ("first", "i8"),  # its list of hops: one for each group that goes over it
        ("dirty", "i8"),  # something about it has changed since the levels were settled
        ("opened", "i8"),  # the number of the settling that opened it last
        ("stage", "i8"),  # and how far it came in that
        ("free", "f8"),  # in that: what those groups leave of it whose level is fixed
        ("claims", "f8"),  # the weight of all flows whose level is not
        ("claimants", "i8"),  # the number of their groups
    ],
    align=True,
)
_GROUP = np.dtype(
    [
        ("weight", "f8"),  # of each flow
        ("flows", "i8"),
        ("first", "i8"),  # its hops
        ("length", "i8"),  # how many
        ("level", "f8"),
        ("limit", "i8"),  # the link that sets the level; negative before there is one
        ("given", "f8"),  # bytes that each flow was given until `since`
        ("since", "f8"),
        ("head", "i8"),  # the flow that ends first: the root of a pairing heap
        ("fixed", "i8"),  # the number of the settling that fixed its level last
        ("awaited", "i8"),  # and of that which put its old level among the events to come
    ],
    align=True,
)
_FLOW = np.dtype(
    [
        ("id", "i8"),
        ("group", "i8"),  # negative when it has ended
        ("size", "f8"),
        ("tag", "f8"),  # it ends when its group has given so many bytes
        ("child", "i8"),
        ("next", "i8"),
        ("previous", "i8"),  # the sibling before it, or for the first child its parent
    ],
    align=True,
)
_HOP = np.dtype(
    [
        ("group", "i8"),
        ("link", "i8"),
        ("next", "i8"),  # of the same link
        ("previous", "i8"),
        ("claiming", "i8"),  # the last settling in which the group was among the link's claimants
    ],
    align=True,
)
_END = np.dtype([("time", "f8"), ("flow", "i8")], align=True)
_TOTALS = np.dtype(
    [
        ("clock", "f8"),
        ("settlings", "i8"),
        ("dirty", "i8"),
        ("opened", "i8"),
        ("events", "i8"),
        ("ended", "i8"),
        ("active", "i8"),
    ],
    align=True,
)

_OPEN, _RELEASED, _FULL = 0, 1, 2
_NONE = -1
_SAME = 1e-13
"""Levels that differ relatively by less are the same: rounding must not send changes through the whole network."""
_REST = 1e-12
"""A flow of which no more than this part is left has ended."""
_PRECISE = 1000.0
"""A group's count of bytes is set back before it is so many times a new flow, whose size would drown in it."""


class _State(NamedTuple):
    """All that the compiled functions work on. The arrays are as long as there is room for, not as is used."""

    links: Records
    groups: Records
    flows: Records
    hops: Records
    ends: NDArray[np.float64]
    """When the next flow of each group ends: a tree of minima, whose leaves are its second half."""
    dirty: NDArray[np.int64]
    opened: NDArray[np.int64]
    keys: NDArray[np.float64]
    """A binary heap of levels, and of what happens at them: a link, or −1 − g for group g."""
    items: NDArray[np.int64]
    ended: Records
    totals: Records


_Arrays = tuple[Any, ...]

_OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy", "_nrt": False}
"""Without `_nrt` nothing counts references, which takes two thirds of the time: `Flows` keeps the arrays, and the
compiled functions make none."""


def _compiled(function: _F) -> _F:
    compiled: _F = numba.njit(**_OPTIONS)(function)
    return compiled


# A group's flows, in a pairing heap (Fredman et al., 1986) by tag, then by id.


@_compiled
def _meld(s: _State, a: int, b: int) -> int:
    if a < 0:
        return b
    if b < 0:
        return a
    flows = s.flows
    if flows[b].tag < flows[a].tag or (flows[b].tag == flows[a].tag and flows[b].id < flows[a].id):
        a, b = b, a
    child = flows[a].child
    flows[b].next = child
    flows[b].previous = a
    if child >= 0:
        flows[child].previous = b
    flows[a].child = b
    return a


@_compiled
def _without_root(s: _State, root: int) -> int:
    """The heap of what was below `root`: pairs from the left, then all from the right."""
    flows = s.flows
    rest = flows[root].child
    pairs = _NONE
    while rest >= 0:
        a = rest
        b = flows[a].next
        rest = flows[b].next if b >= 0 else _NONE
        flows[a].next = _NONE
        if b >= 0:
            flows[b].next = _NONE
        pair = _meld(s, a, b)
        flows[pair].next = pairs
        pairs = pair
    heap = _NONE
    while pairs >= 0:
        after = flows[pairs].next
        flows[pairs].next = _NONE
        heap = _meld(s, heap, pairs)
        pairs = after
    flows[root].child = _NONE
    if heap >= 0:
        flows[heap].previous = _NONE
    return heap


@_compiled
def _take_out(s: _State, root: int, flow: int) -> int:
    """The heap without `flow`."""
    if flow == root:
        return _without_root(s, root)
    flows = s.flows
    before, after = flows[flow].previous, flows[flow].next
    if flows[before].child == flow:
        flows[before].child = after
    else:
        flows[before].next = after
    if after >= 0:
        flows[after].previous = before
    flows[flow].next = _NONE
    return _meld(s, root, _without_root(s, flow))


# When groups end their next flows.


@_compiled
def _given(s: _State, group: int, now: float) -> float:
    """Bytes that each flow of the group was given until `now`."""
    g = s.groups[group]
    if now <= g.since or g.level == 0.0:
        return g.given
    return g.given + g.weight * g.level * (now - g.since)


@_compiled
def _end(s: _State, group: int) -> float:
    """When the group's next flow ends."""
    g = s.groups[group]
    if g.flows == 0 or (g.level == 0.0 and s.flows[g.head].tag > g.given):
        return np.inf
    if g.level == np.inf:
        return g.since
    return g.since + max(0.0, (s.flows[g.head].tag - g.given) / (g.weight * g.level))


@_compiled
def _reschedule(s: _State, group: int) -> None:
    ends = s.ends
    i = ends.size // 2 + group
    ends[i] = _end(s, group)
    while i > 1:
        i //= 2
        least = min(ends[2 * i], ends[2 * i + 1])
        if ends[i] == least:
            break
        ends[i] = least


@_compiled
def _first_to_end(s: _State) -> int:
    """The group of the flow that ends first."""
    ends = s.ends
    i = 1
    while i < ends.size // 2:
        i *= 2
        if ends[i + 1] < ends[i]:
            i += 1
    return i - ends.size // 2


# The levels.


@_compiled
def _before(key: float, item: int, other_key: float, other_item: int) -> bool:
    """At one level links come first: a group keeps its level only if its link has not been opened at this level."""
    return key < other_key or (key == other_key and item >= 0 > other_item)


@_compiled
def _push(s: _State, key: float, item: int) -> None:
    keys, items = s.keys, s.items
    i = s.totals[0].events
    s.totals[0].events = i + 1
    while i > 0 and _before(key, item, keys[(i - 1) // 2], items[(i - 1) // 2]):
        keys[i], items[i] = keys[(i - 1) // 2], items[(i - 1) // 2]
        i = (i - 1) // 2
    keys[i], items[i] = key, item


@_compiled
def _drop_first(s: _State) -> None:
    keys, items = s.keys, s.items
    n = s.totals[0].events - 1
    s.totals[0].events = n
    key, item = keys[n], items[n]
    i = 0
    while 2 * i + 1 < n:
        j = 2 * i + 1
        if j + 1 < n and _before(keys[j + 1], items[j + 1], keys[j], items[j]):
            j += 1
        if not _before(keys[j], items[j], key, item):
            break
        keys[i], items[i] = keys[j], items[j]
        i = j
    keys[i], items[i] = key, item


@_compiled
def _soonest(s: _State, link: int) -> float:
    """A level below which nothing about a changed link is different: its old one, or where it may now be full.

    The second is a step or two of Newton's method for the level at which the link is full, if all groups that others
    limit keep theirs: what a link carries is a concave function of its level, so a step never ends above the root.
    """
    room = s.links[link].capacity
    old = s.links[link].level
    if room == np.inf:
        return old
    level = 0.0 if old == np.inf else old
    for step in range(3):
        taken, claims = 0.0, 0.0
        hop = s.links[link].first
        while hop >= 0:
            g = s.groups[s.hops[hop].group]
            if g.limit >= 0 and g.limit != link and g.level < level:
                taken += g.flows * g.weight * g.level
            else:
                claims += g.flows * g.weight
            hop = s.hops[hop].next
        if claims == 0.0:
            if taken <= room:
                return old
            level = 0.0
        else:
            reached = (room - taken) / claims
            if step > 0 and reached <= level:
                break
            level = max(reached, 0.0)
    return min(old, level)


@_compiled
def _open(s: _State, link: int, level: float, settling: int) -> None:
    """Take a link into the filling, that has come to `level`."""
    line = s.links[link]
    line.opened = settling
    line.stage = _OPEN
    s.opened[s.totals[0].opened] = link
    s.totals[0].opened += 1
    free, claims, claimants = line.capacity, 0.0, 0
    hop = line.first
    while hop >= 0:
        group = s.hops[hop].group
        g = s.groups[group]
        weight = g.flows * g.weight
        if g.fixed == settling:
            free -= weight * g.level
        elif g.limit < 0 or s.links[g.limit].opened == settling:
            claims += weight
            claimants += 1
            s.hops[hop].claiming = settling
        elif g.level < level:
            free -= weight * g.level
        else:
            claims += weight
            claimants += 1
            s.hops[hop].claiming = settling
            # What another link limits stays limited by it, unless that link is opened before.
            if g.awaited != settling:
                g.awaited = settling
                _push(s, g.level, -1 - group)
        hop = s.hops[hop].next
    line.free, line.claims, line.claimants = free, claims, claimants
    if claimants > 0:
        soonest = min(max(free / claims, level), line.level)
        if soonest < np.inf:
            _push(s, soonest, link)


@_compiled
def _fix(s: _State, group: int, level: float, limit: int, settling: int) -> None:
    """The group has `level`, set by the link `limit`: the others on its way have the less to fill."""
    g = s.groups[group]
    weight = g.flows * g.weight
    old = g.level
    changed = g.limit < 0 or old != level
    g.fixed = settling
    g.limit = limit
    if changed:
        now = s.totals[0].clock
        g.given = _given(s, group, now)
        g.since = now
        g.level = level
        _reschedule(s, group)
    for hop in range(g.first, g.first + g.length):
        link = s.hops[hop].link
        line = s.links[link]
        if line.opened == settling:
            if s.hops[hop].claiming == settling:
                line.free -= weight * level
                line.claims -= weight
                line.claimants -= 1
            else:
                line.free -= weight * (level - old)
        elif changed and line.capacity < np.inf:
            _open(s, link, level, settling)


@_compiled
def _release(s: _State, link: int, level: float, settling: int) -> None:
    """The filling passes the link's old level: its groups' levels rise, so their other links may be full earlier."""
    s.links[link].stage = _RELEASED
    hop = s.links[link].first
    while hop >= 0:
        group = s.hops[hop].group
        g = s.groups[group]
        if g.limit == link and g.fixed != settling:
            first = g.first
            for other in range(first, first + g.length):
                line = s.links[s.hops[other].link]
                if line.opened != settling and line.capacity < np.inf:
                    _open(s, s.hops[other].link, level, settling)
        hop = s.hops[hop].next


@_compiled
def _fill(s: _State, link: int, level: float, settling: int) -> None:
    """The link is full at `level`: all on it that nothing limited earlier have this level."""
    line = s.links[link]
    line.stage = _FULL
    line.level = level
    hop = line.first
    while hop >= 0:
        group = s.hops[hop].group
        if s.hops[hop].claiming == settling and s.groups[group].fixed != settling:
            _fix(s, group, level, link, settling)
        hop = s.hops[hop].next


@_compiled
def _settle(s: _State) -> None:
    """Work out the levels anew, as far as the changes reach. Each link is opened, released and filled at most once."""
    totals = s.totals[0]
    if totals.dirty == 0:
        return
    totals.settlings += 1
    settling = totals.settlings
    totals.opened = 0
    for i in range(totals.dirty):
        soonest = _soonest(s, s.dirty[i])
        if soonest < np.inf:
            _push(s, soonest, s.dirty[i])
    while totals.events > 0:
        level, item = s.keys[0], s.items[0]
        _drop_first(s)
        if item < 0:
            g = s.groups[-1 - item]
            if g.fixed != settling and s.links[g.limit].opened != settling:
                _fix(s, -1 - item, g.level, g.limit, settling)
            continue
        line = s.links[item]
        if line.opened != settling:
            _open(s, item, level, settling)
            continue
        if line.stage == _FULL or line.claimants == 0:
            continue
        full = max(line.free / line.claims, level)
        old = line.level if line.stage == _OPEN else np.inf
        if abs(full - old) <= _SAME * old < np.inf:
            full = old
        if min(full, old) > level:
            if min(full, old) < np.inf:
                _push(s, min(full, old), item)
        elif full > old:
            _release(s, item, level, settling)
            if full < np.inf:
                _push(s, full, item)
        else:
            _fill(s, item, full, settling)
    for i in range(totals.opened):
        if s.links[s.opened[i]].stage != _FULL:
            s.links[s.opened[i]].level = np.inf
    for i in range(totals.dirty):
        link = s.dirty[i]
        s.links[link].dirty = 0
        if s.links[link].capacity == np.inf:
            _unlimited(s, link, settling)
    totals.dirty = 0


@_compiled
def _unlimited(s: _State, link: int, settling: int) -> None:
    """What a link limited that has become infinite, and now nothing does, goes infinitely fast."""
    hop = s.links[link].first
    while hop >= 0:
        group = s.hops[hop].group
        g = s.groups[group]
        if g.fixed != settling and (g.limit < 0 or g.limit == link):
            g.given = _given(s, group, s.totals[0].clock)
            g.since = s.totals[0].clock
            g.level = np.inf
            g.limit = _NONE
            _reschedule(s, group)
        hop = s.hops[hop].next


# Starts and ends.


@_compiled
def _touch(s: _State, link: int) -> None:
    if s.links[link].dirty == 0:
        s.links[link].dirty = 1
        s.dirty[s.totals[0].dirty] = link
        s.totals[0].dirty += 1


@_compiled
def _touch_way(s: _State, group: int) -> None:
    first = s.groups[group].first
    for hop in range(first, first + s.groups[group].length):
        _touch(s, s.hops[hop].link)


@_compiled
def _enlist(s: _State, group: int) -> None:
    """The group has its first flow: it takes part on its links."""
    first = s.groups[group].first
    for hop in range(first, first + s.groups[group].length):
        line = s.links[s.hops[hop].link]
        s.hops[hop].next = line.first
        s.hops[hop].previous = _NONE
        if line.first >= 0:
            s.hops[line.first].previous = hop
        line.first = hop
    g = s.groups[group]
    g.limit = _NONE
    g.level = 0.0
    g.given = 0.0
    g.since = s.totals[0].clock


@_compiled
def _delist(s: _State, group: int) -> None:
    """The group has no flow any more."""
    first = s.groups[group].first
    for hop in range(first, first + s.groups[group].length):
        before, after = s.hops[hop].previous, s.hops[hop].next
        if before >= 0:
            s.hops[before].next = after
        else:
            s.links[s.hops[hop].link].first = after
        if after >= 0:
            s.hops[after].previous = before


@_compiled
def _take_away(s: _State, flow: int) -> None:
    """The flow has ended or is cancelled: it leaves its group."""
    group = s.flows[flow].group
    g = s.groups[group]
    g.head = _take_out(s, g.head, flow)
    g.flows -= 1
    s.flows[flow].group = _NONE
    s.totals[0].active -= 1
    if g.flows == 0:
        _delist(s, group)
    _reschedule(s, group)
    _touch_way(s, group)


@_compiled
def _note_end(s: _State, flow: int, time: float) -> None:
    end = s.ended[s.totals[0].ended]
    end.time = time
    end.flow = s.flows[flow].id
    s.totals[0].ended += 1


@_compiled
def _advance(s: _State, now: float) -> None:
    """Go to `now`, and note the flows that end on the way."""
    totals = s.totals[0]
    # What has ended at `now` itself may be replaced at once: that is settled once, when it is asked for.
    before = True
    while before:
        _settle(s)
        time = max(s.ends[1], totals.clock)
        if time > now:
            break
        before = time < now
        totals.clock = time
        while s.ends[1] < np.inf:
            group = _first_to_end(s)
            g = s.groups[group]
            flow = g.head
            # Rounding must neither part those that end together, nor leave a rest too small to move the clock.
            late = s.ends[1] - time
            slack = 4e-16 * time
            if g.level < np.inf:
                slack = max(slack, _REST * s.flows[flow].size / (g.weight * g.level))
            if late > slack:
                break
            _note_end(s, flow, time)
            _take_away(s, flow)
    if now > totals.clock:
        totals.clock = now


@_compiled
def _pass(s: _State, now: float) -> None:
    """To `now`, unless it is now already: what happens at one time is settled once."""
    if now > s.totals[0].clock:
        _advance(s, now)


@_compiled
def _left(s: _State, flow: int) -> float:
    """The bytes of a flow that are still to be carried."""
    group = s.flows[flow].group
    if group < 0:
        return 0.0
    left = s.flows[flow].tag - _given(s, group, s.totals[0].clock)
    return min(max(left, 0.0), s.flows[flow].size)


@_compiled
def _set_back(s: _State, group: int, now: float) -> None:
    """Count the group's bytes from zero on again."""
    g = s.groups[group]
    given = _given(s, group, now)
    g.given = 0.0
    g.since = now
    # Every flow of the heap, by way of the children first.
    flow = g.head
    while flow >= 0:
        s.flows[flow].tag -= given
        if s.flows[flow].child >= 0:
            flow = s.flows[flow].child
            continue
        while flow != g.head and s.flows[flow].next < 0:
            while s.flows[s.flows[flow].previous].child != flow:
                flow = s.flows[flow].previous
            flow = s.flows[flow].previous
        if flow == g.head:
            break
        flow = s.flows[flow].next


# What `Flows` calls. It hands over a plain tuple, which takes numba half the time of one with names.


@_compiled
def _start(state: _Arrays, now: float, flow: int, id: int, group: int, size: float) -> None:
    s = _State(*state)
    _pass(s, now)
    f = s.flows[flow]
    f.id = id
    f.size = size
    f.child = f.next = f.previous = _NONE
    f.group = _NONE
    g = s.groups[group]
    limited = False
    for hop in range(g.first, g.first + g.length):
        limited |= s.links[s.hops[hop].link].capacity < np.inf
    if size <= 0.0 or not limited:
        _note_end(s, flow, now)
        return
    if g.flows == 0:
        _enlist(s, group)
    given = _given(s, group, now)
    if given > _PRECISE * size:
        _set_back(s, group, now)
        given = 0.0
    f.group = group
    f.tag = given + size
    g.head = _meld(s, g.head, flow)
    g.flows += 1
    s.totals[0].active += 1
    _reschedule(s, group)
    _touch_way(s, group)


@_compiled
def _cancel(state: _Arrays, now: float, flow: int) -> float:
    """What was left of the flow; negative when it had ended before."""
    s = _State(*state)
    _pass(s, now)
    if s.flows[flow].group < 0:
        return -1.0
    left = _left(s, flow)
    _take_away(s, flow)
    return left


@_compiled
def _remaining(state: _Arrays, now: float, flow: int) -> float:
    s = _State(*state)
    _pass(s, now)
    return _left(s, flow)


@_compiled
def _rate(state: _Arrays, flow: int) -> float:
    s = _State(*state)
    _settle(s)
    group = s.flows[flow].group
    return s.groups[group].weight * s.groups[group].level if group >= 0 else 0.0


@_compiled
def _set_capacity(state: _Arrays, now: float, link: int, capacity: float) -> None:
    s = _State(*state)
    _pass(s, now)
    if s.links[link].capacity != capacity:
        s.links[link].capacity = capacity
        _touch(s, link)


@_compiled
def _next_time(state: _Arrays) -> float:
    s = _State(*state)
    if s.totals[0].ended > 0:
        return s.ended[0].time
    _settle(s)
    return max(s.ends[1], s.totals[0].clock)


@_compiled
def _hand_out(state: _Arrays, now: float) -> int:
    """Advance to `now`; returns how many flows of `ended` are to be handed out."""
    s = _State(*state)
    _advance(s, now)
    count = s.totals[0].ended
    s.totals[0].ended = 0
    return count


class Flows:
    """The flows of a network. Times are seconds, sizes bytes, capacities and rates bytes per second.

    Calls come in order of time, and take the flows to `now` first. A flow that ends on the way is kept for the next
    `advance`. What starts, stops or changes at one and the same time is worked out once, when it is asked for.
    """

    def __init__(self, capacities: NDArray[np.float64]) -> None:
        capacities = np.asarray(capacities, dtype=np.float64)
        for link, capacity in enumerate(capacities):
            _check_capacity(link, float(capacity))
        links = np.zeros(len(capacities), _LINK)
        links["capacity"] = capacities
        links["level"] = np.inf
        links["first"] = _NONE
        room = 1024
        self._arrays: _Arrays = ()
        self._hold(
            _State(
                links=links,
                groups=_fresh_groups(room),
                flows=np.zeros(room, _FLOW),
                hops=np.zeros(2 * room, _HOP),
                ends=np.full(2 * room, np.inf),
                dirty=np.zeros(len(links), np.int64),
                opened=np.zeros(len(links), np.int64),
                keys=np.zeros(2 * len(links) + room),
                items=np.zeros(2 * len(links) + room, np.int64),
                ended=np.zeros(room, _END),
                totals=np.zeros(1, _TOTALS),
            )
        )
        self._longest = 2
        """The links of the longest way so far: each group has room for so many hops."""
        self._groups: dict[tuple[tuple[int, ...], float], int] = {}
        self._free_groups = list(range(room - 1, -1, -1))
        self._places: dict[int, int] = {}
        """Where the flows are that are under way, or whose ends are still to be handed out."""
        self._free_places = list(range(room - 1, -1, -1))
        self._started = 0
        self._now = 0.0

    @property
    def active(self) -> int:
        """How many flows are under way."""
        return int(self._state.totals["active"][0])

    def start(self, now: float, links: tuple[int, ...], weight: float, size: float) -> int:
        """Carry `size` bytes over `links`, in whatever order; returns the flow's id, higher than all before it.

        A flow without links, or with infinite ones only, ends at once.
        """
        self._come_to(now)
        group = self._groups.get((links, weight))
        if group is None:
            group = self._new_group(links, weight)
        if not 0.0 <= size < math.inf:
            raise ValueError(f"size is {size}; expected a number of bytes, at least 0")
        if not self._free_places:
            self._grow_flows()
        id = self._started
        self._started += 1
        place = self._places[id] = self._free_places.pop()
        _start(self._arrays, now, place, id, group, float(size))  # an int would be compiled for once more
        return id

    def cancel(self, now: float, flow: int) -> float:
        """End a flow; returns how many of its bytes were still to be carried.

        That is 0 for one that has ended by itself by now; the next `advance` tells of it all the same.
        """
        self._come_to(now)
        left = _cancel(self._arrays, now, self._place(flow))
        if left < 0.0:
            return 0.0
        self._free_places.append(self._places.pop(flow))
        return left

    def remaining(self, now: float, flow: int) -> float:
        """How many of a flow's bytes are still to be carried."""
        self._come_to(now)
        return _remaining(self._arrays, now, self._place(flow))

    def rate(self, flow: int) -> float:
        """At the time of the last call; 0 once the flow has ended."""
        return _rate(self._arrays, self._place(flow))

    def set_capacity(self, now: float, link: int, capacity: float) -> None:
        """From `now` on. Flows over a link of capacity 0 stand still."""
        self._come_to(now)
        self._check_link(link)
        _check_capacity(link, capacity)
        _set_capacity(self._arrays, now, link, capacity)

    def next_time(self) -> float:
        """When the next flow ends, if nothing else happens; infinite if none does."""
        return _next_time(self._arrays)

    def advance(self, now: float) -> list[tuple[float, int]]:
        """To `now`: the flows that have ended since they were last asked for, each with its time, in order of time and
        of their ids. From then on they are not known any more."""
        self._come_to(now)
        count = _hand_out(self._arrays, now)
        if not count:
            return []
        ended: list[tuple[float, int]] = sorted(self._state.ended[:count].tolist())
        for _, flow in ended:
            self._free_places.append(self._places.pop(flow))
        return ended

    def _hold(self, state: _State) -> None:
        """Have this state from now on."""
        self._state = state
        self._arrays = tuple(state)
        # A field is looked up once: that takes longer than to set an item of it.
        self._weights, self._firsts, self._lengths = (state.groups[name] for name in ("weight", "first", "length"))
        self._hop_groups, self._hop_links = state.hops["group"], state.hops["link"]

    def _come_to(self, now: float) -> None:
        if not self._now <= now < math.inf:
            raise ValueError(f"now is {now}; expected a time that is not before {self._now}, that of the last call")
        self._now = now

    def _place(self, flow: int) -> int:
        try:
            return self._places[flow]
        except KeyError:
            raise KeyError(f"flow {flow} is not under way: it was never started, was cancelled, or has ended") from None

    def _check_link(self, link: int) -> None:
        if not 0 <= link < len(self._state.links):
            raise ValueError(f"link is {link}; expected one of the {len(self._state.links)} links, numbered from 0")

    def _new_group(self, links: tuple[int, ...], weight: float) -> int:
        for link in links:
            self._check_link(link)
        if not 0.0 < weight < math.inf:
            raise ValueError(f"weight is {weight}; expected a positive number, such as one over the round trip time")
        way = list(dict.fromkeys(links))
        if len(way) > self._longest:
            self._widen(len(way))
        if not self._free_groups:
            self._make_room_for_groups()
        group = self._groups[links, weight] = self._free_groups.pop()
        first = group * self._longest
        self._weights[group], self._firsts[group], self._lengths[group] = weight, first, len(way)
        for hop, link in enumerate(way, start=first):
            self._hop_groups[hop], self._hop_links[hop] = group, link
        return group

    def _make_room_for_groups(self) -> None:
        """Forget the groups without flows; have twice as many if that is less than half of them."""
        state = self._state
        flows = state.groups["flows"].tolist()
        unused = [key for key, group in self._groups.items() if not flows[group]]
        for key in unused:
            self._free_groups.append(self._groups.pop(key))
        room = len(state.groups)
        if 2 * len(unused) >= room:
            return
        self._free_groups = list(range(2 * room - 1, room - 1, -1)) + self._free_groups
        ends = np.full(4 * room, np.inf)
        # Each level of the old tree is the left half of the new one's level below the root.
        width = 1
        while width <= room:
            ends[2 * width : 3 * width] = state.ends[width : 2 * width]
            width *= 2
        ends[1] = state.ends[1]
        events = 2 * len(state.links) + 2 * room
        self._hold(
            state._replace(
                groups=np.concatenate([state.groups, _fresh_groups(room)]),
                hops=_longer(state.hops),
                ends=ends,
                keys=np.zeros(events),
                items=np.zeros(events, np.int64),
            )
        )

    def _grow_flows(self) -> None:
        room = len(self._state.flows)
        self._free_places = list(range(2 * room - 1, room - 1, -1))
        self._hold(self._state._replace(flows=_longer(self._state.flows), ended=_longer(self._state.ended)))

    def _widen(self, longest: int) -> None:
        """Have room for ways of so many links."""
        state, old = self._state, self._longest
        hops = np.zeros((len(state.groups), longest), _HOP)
        hops[:, :old] = state.hops.reshape(-1, old)
        for numbers in (hops["next"], hops["previous"], state.links["first"], state.groups["first"]):
            numbers[:] = np.where(numbers >= 0, numbers // old * longest + numbers % old, _NONE)
        self._longest = longest
        self._hold(state._replace(hops=hops.reshape(-1)))


def _check_capacity(link: int, capacity: float) -> None:
    if not capacity >= 0.0:
        raise ValueError(f"the capacity of link {link} is {capacity}; expected bytes per second, at least 0")


def _fresh_groups(room: int) -> Records:
    groups = np.zeros(room, _GROUP)
    groups["head"] = _NONE
    groups["limit"] = _NONE
    return groups


def _longer(records: Records) -> Records:
    return np.concatenate([records, np.zeros_like(records)])


def load() -> None:
    """Load the compiled code, or compile it where that was never done: the first flow would wait for it otherwise."""
    flows = Flows(np.ones(1))
    flows.start(0.0, (0,), 1.0, 1.0)
    flows.set_capacity(0.0, 0, 2.0)
    flows.cancel(0.0, flows.start(0.0, (0,), 1.0, 1.0))
    flows.advance(flows.next_time())
