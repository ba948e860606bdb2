"""How fast each flow goes at any time, and when each ends, exactly: the compiled part of `flows`.

The rates of all flows are the weighted max-min fair allocation (Bertsekas and Gallager, "Data Networks", 1992, 6.5.2):
flows that are limited by the same link share it in proportion to their weights, and what a flow cannot use of a link,
because another limits it, is left to the others. They change only when a flow starts or ends or a capacity changes.

A link that limits flows has a level: bytes per second and unit of weight. Flows with the same way and the same weight
always have the same rate: they are a group. A group is limited by one of its links, whose level is the lowest; its rate
is that times its weight.

Two clocks make a change of rate cheap. A group counts the bytes that each of its flows has been given: a flow ends when
this count reaches what it was at its start plus the flow's size. A link counts the bytes that it has given to each unit
of weight that it limits: the next flow of a group ends when this count reaches some value. Neither depends on the rates
in between, so a change of a link's level touches the link alone, however many groups it limits.

A group that shares no more than one of its links with others is local to that link, its home. Its other links only cap
its level, and to them nobody else matters. A home keeps the sums of its local groups, and orders these by their caps:
it looks only at those whose caps its level passes. Loose ones are below their caps, tight ones at them. A group that
shares several links crosses them, and is looked at by each.

`settle` works out the levels by progressive filling: all levels rise together from zero, a link that is full fixes its
groups. After a change it fills only what the change reaches, because a change moves no level below the lowest at which
something is different: links stay as they are until the filling has come to a group on them whose level differs. Also
then a link that limits nobody is only watched, as long as what it carries leaves something of it free.
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

_NODE = [("child", "i8"), ("next", "i8"), ("previous", "i8")]
"""Of a heap. Before the first child comes its parent, before the others the sibling. What has these has a key, too."""
LINK = np.dtype(
    [
        # What the filling asks for most is side by side, here and in groups: it comes from memory together.
        ("capacity", "f8"),  # bytes per second
        ("level", "f8"),  # infinite: it limits nobody, or goes infinitely fast
        ("opened", "i8"),  # the number of the settling that opened it last
        ("stage", "i8"),  # and how far it came in that
        ("awaited", "f8"),  # in that: the level at which something happens to it next
        ("free", "f8"),  # what those crossing groups leave of it whose level is fixed; negative if it may be full
        ("claims", "f8"),  # the weight of all flows of crossing groups whose level is not
        ("claimants", "i8"),  # the number of these groups
        ("first", "i8"),  # the list of its hops: of groups that cross it first, then of those that do not
        ("loosened", "i8"),  # how many local groups are below their caps
        ("claimed", "f8"),  # the weight of all flows of these, in two parts
        ("claimed_rest", "f8"),
        ("taken", "f8"),  # bytes per second that local groups at their caps take, in two parts
        ("taken_rest", "f8"),
        ("loose", "i8"),  # local groups below their caps, of those that have one: a heap, the lowest cap first
        ("tight", "i8"),  # local groups at their caps: a heap, the highest cap first
        ("last", "i8"),  # of the list
        ("members", "i8"),  # how many groups go over it
        ("limited", "i8"),  # the groups that it limits: a heap, by the count at which their next flows end
        ("count", "f8"),  # bytes that it gave to each unit of weight that it limits, until `since`
        ("since", "f8"),
        ("dirty", "i8"),  # something about it has changed since the levels were settled
        ("nth_dirty", "i8"),  # not of this link: its number is the place in a list of links that are dirty
        ("nth_opened", "i8"),  # or were opened in this settling
    ],
    align=True,
)
GROUP = np.dtype(
    [
        ("home", "i8"),  # the link that it is local to; negative if it crosses several
        ("claim", "f8"),  # the weight of all its flows
        ("level", "f8"),  # of a crossing group
        ("limit", "i8"),  # the link that sets its level; negative before there is one
        ("fixed", "i8"),  # the number of the settling that fixed its level last
        ("awaited", "i8"),  # and of that which put its old level among the events to come
        ("first", "i8"),  # its hops
        ("length", "i8"),  # how many
        ("weight", "f8"),  # of each flow
        ("flows", "i8"),
        ("head", "i8"),  # the flow that ends first: the root of a heap
        ("given", "f8"),  # bytes that each flow was given until the limit's count was `mark`
        ("mark", "f8"),
        ("narrow", "i8"),  # of a local group: its other link with the least capacity
        ("room", "f8"),  # and this capacity
        ("key", "f8"),  # its next flow ends when its limit has counted so far
        *_NODE,  # of those that its limit limits
    ],
    align=True,
)
FLOW = np.dtype(
    [
        ("id", "i8"),
        ("group", "i8"),  # negative when it has ended
        ("size", "f8"),
        ("key", "f8"),  # it ends when its group has given so many bytes
        *_NODE,  # of its group's flows
    ],
    align=True,
)
CAP = np.dtype([("key", "f8"), *_NODE], align=True)
"""A local group's place in one of the two heaps of its home. The key is its cap, or minus its cap."""
HOP = np.dtype(
    [
        ("group", "i8"),
        ("link", "i8"),
        ("next", "i8"),  # of the same link
        ("previous", "i8"),
        ("crossing", "i8"),  # whether the group crosses the link
        ("claiming", "i8"),  # the settling in which the group is among the link's claimants
    ],
    align=True,
)
EVENT = np.dtype([("level", "f8"), ("item", "i8")], align=True)
"""What happens at a level of the filling: a link, or −1 − g for group g."""
END = np.dtype([("time", "f8"), ("flow", "i8")], align=True)
TOTALS = np.dtype(
    [
        ("clock", "f8"),
        ("settlings", "i8"),
        ("dirty", "i8"),
        ("opened", "i8"),
        ("events", "i8"),
        ("vacant", "i8"),  # the first of the events has been taken out of their heap
        ("ended", "i8"),
        ("active", "i8"),
    ],
    align=True,
)

_WATCHED, _OPEN, _RELEASED, _FULL = 0, 1, 2, 3
NONE = -1
_SAME = 1e-13
"""Levels that differ relatively by less are the same: rounding must not send changes through the whole network."""
_REST = 1e-12
"""A flow of which no more than this part is left has ended."""
_SPARE = 1e-9
"""A link of which no more than this part is free may be full: what is free of it is added up anew."""
_PRECISE = 1000.0
"""A count of bytes is set back before it is so many times a new flow, whose size would drown in it."""


class State(NamedTuple):
    """All that the compiled functions work on. The arrays are as long as there is room for, not as is used."""

    links: Records
    groups: Records
    flows: Records
    hops: Records
    caps: Records
    ends: NDArray[np.float64]
    """When the next flow of those ends that a link limits: a tree of minima, whose leaves are its second half."""
    events: Records
    """A binary heap."""
    ended: Records
    totals: Records


Arrays = tuple[Any, ...]

_OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy", "_nrt": False}
"""Without `_nrt` nothing counts references, which takes two thirds of the time: `Flows` keeps the arrays, and the
compiled functions make none."""


def _compiled(function: _F) -> _F:
    compiled: _F = numba.njit(**_OPTIONS)(function)
    return compiled


def _inlined(function: _F) -> _F:
    """Compiled into what calls it: to hand over the arrays of the state takes longer than most functions."""
    compiled: _F = numba.njit(forceinline=True, **_OPTIONS)(function)
    return compiled


# Pairing heaps (Fredman et al., 1986). A heap is the number of its root, or none.


@_compiled
def _meld(nodes: Records, a: int, b: int) -> int:
    if a < 0:
        return b
    if b < 0:
        return a
    if nodes[b].key < nodes[a].key:
        a, b = b, a
    child = nodes[a].child
    nodes[b].next = child
    nodes[b].previous = a
    if child >= 0:
        nodes[child].previous = b
    nodes[a].child = b
    return a


@_compiled
def _put_in(nodes: Records, root: int, node: int, key: float) -> int:
    """The heap with `node`."""
    n = nodes[node]
    n.key = key
    n.child = n.next = n.previous = NONE
    return _meld(nodes, root, node)


@_compiled
def _without_root(nodes: Records, root: int) -> int:
    """The heap of what was below `root`: pairs from the left, then all from the right."""
    rest = nodes[root].child
    pairs = NONE
    while rest >= 0:
        a = rest
        b = nodes[a].next
        rest = nodes[b].next if b >= 0 else NONE
        nodes[a].next = NONE
        if b >= 0:
            nodes[b].next = NONE
        pair = _meld(nodes, a, b)
        nodes[pair].next = pairs
        pairs = pair
    heap = NONE
    while pairs >= 0:
        after = nodes[pairs].next
        nodes[pairs].next = NONE
        heap = _meld(nodes, heap, pairs)
        pairs = after
    nodes[root].child = NONE
    if heap >= 0:
        nodes[heap].previous = NONE
    return heap


@_compiled
def _take_out(nodes: Records, root: int, node: int) -> int:
    """The heap without `node`."""
    if node == root:
        return _without_root(nodes, root)
    before, after = nodes[node].previous, nodes[node].next
    if nodes[before].child == node:
        nodes[before].child = after
    else:
        nodes[before].next = after
    if after >= 0:
        nodes[after].previous = before
    nodes[node].next = NONE
    return _meld(nodes, root, _without_root(nodes, node))


@_compiled
def _after(nodes: Records, root: int, node: int) -> int:
    """The node after this on a walk through the whole heap, parents before children; none after the last."""
    if nodes[node].child >= 0:
        return nodes[node].child
    while node != root and nodes[node].next < 0:
        while nodes[nodes[node].previous].child != node:
            node = nodes[node].previous
        node = nodes[node].previous
    return NONE if node == root else nodes[node].next


# The clocks.


@_inlined
def _count(s: State, link: int) -> float:
    """Bytes that the link gave to each unit of weight until now."""
    line = s.links[link]
    now = s.totals[0].clock
    if now <= line.since or line.level == np.inf:
        return line.count
    return line.count + line.level * (now - line.since)


@_inlined
def _given(s: State, group: int) -> float:
    """Bytes that each flow of the group was given until now."""
    g = s.groups[group]
    if g.limit < 0:
        return g.given
    return g.given + g.weight * (_count(s, g.limit) - g.mark)


@_inlined
def _reschedule(s: State, link: int) -> None:
    """Note when the next flow ends of those that the link limits."""
    line = s.links[link]
    end = np.inf
    if line.limited >= 0:
        left = s.groups[line.limited].key - line.count
        if line.level == np.inf:
            # Groups have just come to a link that limited nobody: its level is still to be settled.
            end = line.since if line.capacity == np.inf else np.inf
        elif left <= 0.0:
            end = line.since
        elif line.level > 0.0:
            end = line.since + left / line.level
    ends = s.ends
    i = ends.size // 2 + link
    ends[i] = end
    while i > 1:
        i //= 2
        least = min(ends[2 * i], ends[2 * i + 1])
        if ends[i] == least:
            break
        ends[i] = least


@_inlined
def _first_to_end(s: State) -> int:
    """The link that limits the flow that ends first."""
    ends = s.ends
    i = 1
    while i < ends.size // 2:
        i *= 2
        if ends[i + 1] < ends[i]:
            i += 1
    return i - ends.size // 2


@_inlined
def _set_level(s: State, link: int, level: float) -> None:
    line = s.links[link]
    line.count = _count(s, link)
    line.since = s.totals[0].clock
    line.level = level


@_compiled
def _set_link_back(s: State, link: int) -> None:
    """Have the link count from zero on again."""
    line = s.links[link]
    count = _count(s, link)
    line.count = 0.0
    line.since = s.totals[0].clock
    group = line.limited
    while group >= 0:
        s.groups[group].key -= count
        s.groups[group].mark -= count
        group = _after(s.groups, line.limited, group)


@_compiled
def _set_group_back(s: State, group: int) -> None:
    """Have the group count from zero on again."""
    g = s.groups[group]
    given = _given(s, group)
    g.given = 0.0
    if g.limit >= 0:
        g.mark = _count(s, g.limit)
    flow = g.head
    while flow >= 0:
        s.flows[flow].key -= given
        flow = _after(s.flows, g.head, flow)


@_inlined
def _take_turn(s: State, group: int) -> None:
    """Put the group among those that its limit limits."""
    g = s.groups[group]
    line = s.links[g.limit]
    count = _count(s, g.limit)
    if count * g.weight > _PRECISE * s.flows[g.head].size:
        _set_link_back(s, g.limit)
        g.mark -= count
    turn = g.mark + (s.flows[g.head].key - g.given) / g.weight
    line.limited = _put_in(s.groups, line.limited, group, turn)


@_inlined
def _join(s: State, group: int, link: int) -> None:
    """From now on the link limits the group, which nothing did before. The caller reschedules the link."""
    g = s.groups[group]
    g.limit = link
    g.mark = _count(s, link)
    _take_turn(s, group)


@_inlined
def _leave(s: State, group: int) -> None:
    """From now on nothing limits the group."""
    g = s.groups[group]
    link = g.limit
    line = s.links[link]
    g.given = _given(s, group)
    g.limit = NONE
    line.limited = _take_out(s.groups, line.limited, group)
    if line.limited < 0:
        line.level = np.inf
        line.count = 0.0
    _reschedule(s, link)


# Local groups: loose ones are limited by their home, tight ones by the narrowest of their other links.


@_inlined
def _sum(total: float, rest: float, more: float) -> tuple[float, float]:
    """`total` + `rest` + `more`, in two parts (Neumaier, 1974): what was added and taken away again leaves nothing."""
    both = total + more
    part = both - total
    return both, rest + ((total - (both - part)) + (more - part))


@_inlined
def _claim(s: State, group: int) -> None:
    """Count the group among the loose or the tight ones of its home, whichever it is."""
    g = s.groups[group]
    line = s.links[g.home]
    cap = g.room / g.claim
    if g.limit == g.home:
        line.loosened += 1
        line.claimed, line.claimed_rest = _sum(line.claimed, line.claimed_rest, g.claim)
        if cap < np.inf:
            line.loose = _put_in(s.caps, line.loose, group, cap)
    else:
        line.tight = _put_in(s.caps, line.tight, group, -cap)
        line.taken, line.taken_rest = _sum(line.taken, line.taken_rest, g.room)
        _set_level(s, g.narrow, cap)


@_inlined
def _disclaim(s: State, group: int) -> None:
    """Count it no longer."""
    g = s.groups[group]
    line = s.links[g.home]
    if g.limit == g.home:
        line.loosened -= 1
        line.claimed, line.claimed_rest = _sum(line.claimed, line.claimed_rest, -g.claim)
        if line.loosened == 0:
            line.claimed = line.claimed_rest = 0.0
        if g.room < np.inf:
            line.loose = _take_out(s.caps, line.loose, group)
    else:
        line.tight = _take_out(s.caps, line.tight, group)
        line.taken, line.taken_rest = _sum(line.taken, line.taken_rest, -g.room)
        if line.tight < 0:
            line.taken = line.taken_rest = 0.0


@_inlined
def _tighten(s: State, group: int) -> None:
    """The level of its home passes the group's cap."""
    g = s.groups[group]
    _disclaim(s, group)
    _leave(s, group)
    _join(s, group, g.narrow)
    _claim(s, group)
    _reschedule(s, g.narrow)


@_inlined
def _loosen(s: State, group: int) -> None:
    """The level of its home falls below the group's cap."""
    g = s.groups[group]
    _disclaim(s, group)
    _leave(s, group)
    _join(s, group, g.home)
    _claim(s, group)


# The levels.


@_inlined
def _push(s: State, level: float, item: int) -> None:
    events = s.events
    if s.totals[0].vacant == 1:
        # The first event has been taken, and this takes its place: one way through the heap in place of two.
        s.totals[0].vacant = 0
        _sink(s, level, item)
        return
    i = s.totals[0].events
    s.totals[0].events = i + 1
    while i > 0 and level < events[(i - 1) // 2].level:
        above = events[(i - 1) // 2]
        events[i].level, events[i].item = above.level, above.item
        i = (i - 1) // 2
    events[i].level, events[i].item = level, item


@_inlined
def _drop_first(s: State) -> None:
    n = s.totals[0].events - 1
    s.totals[0].events = n
    _sink(s, s.events[n].level, s.events[n].item)


@_inlined
def _sink(s: State, level: float, item: int) -> None:
    """Put an event into the heap in place of the first."""
    events, n = s.events, s.totals[0].events
    i = 0
    while 2 * i + 1 < n:
        j = 2 * i + 1
        if j + 1 < n:
            j += int(events[j + 1].level < events[j].level)  # nobody could foretell a branch
        if level <= events[j].level:
            break
        events[i].level, events[i].item = events[j].level, events[j].item
        i = j
    events[i].level, events[i].item = level, item


@_inlined
def _crossing(s: State, hop: int) -> bool:
    """Whether this is the hop of a group that crosses the link. After the first that is not, none is."""
    return hop >= 0 and s.hops[hop].crossing == 1


@_inlined
def _soonest(s: State, link: int) -> float:
    """A level below which nothing about a changed link is different: its old one, or where it may now be full.

    The second is a step or two of Newton's method for the level at which the link is full, if all groups that others
    limit keep theirs: what a link carries is a concave function of its level, so a step never ends above the root.
    """
    line = s.links[link]
    room = line.capacity
    old = line.level
    if room == np.inf:
        return old
    level = 0.0 if old == np.inf else old
    for step in range(2):
        taken, claims = line.taken + line.taken_rest, line.claimed + line.claimed_rest
        hop = line.first
        while _crossing(s, hop):
            g = s.groups[s.hops[hop].group]
            if g.limit >= 0 and g.limit != link and g.level < level:
                taken += g.claim * g.level
            else:
                claims += g.claim
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


@_inlined
def _open(s: State, link: int, level: float, settling: int) -> None:
    """Take a link into the filling, that has come to `level`."""
    line = s.links[link]
    if line.opened != settling:
        _note_opened(s, link, settling)
    line.stage = _OPEN
    free, claims, claimants = line.capacity, 0.0, 0
    hop = line.first
    while _crossing(s, hop):
        group = s.hops[hop].group
        g = s.groups[group]
        weight = g.claim
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
            # What another link limits stays limited by it, unless that link is opened before, or at the same level.
            if g.awaited != settling:
                g.awaited = settling
                _push(s, np.nextafter(g.level, np.inf), -1 - group)
        hop = s.hops[hop].next
    line.free, line.claims, line.claimants = free, claims, claimants
    _await(s, link, min(max(_full(s, link), level), line.level))


@_inlined
def _note_opened(s: State, link: int, settling: int) -> None:
    line = s.links[link]
    line.opened = settling
    line.awaited = np.inf
    s.links[s.totals[0].opened].nth_opened = link
    s.totals[0].opened += 1


@_inlined
def _await(s: State, link: int, level: float) -> None:
    """Look at the link again when the filling comes to `level`, unless that is earlier in any case."""
    if level < s.links[link].awaited:
        s.links[link].awaited = level
        _push(s, level, link)


@_inlined
def _watch(s: State, link: int, settling: int) -> None:
    """Take a link into the filling that limits nobody, as long as it does not: only what changes on it is looked at.

    All on it that do not rise are taken to keep their levels. The link may be full later than that says, not earlier.
    """
    _note_opened(s, link, settling)
    s.links[link].stage = _WATCHED
    s.links[link].claims = 0.0
    s.links[link].claimants = 0


@_inlined
def _full(s: State, link: int) -> float:
    """The level at which the link is full if its local groups stay loose or tight as they are.

    It is too low if some do not: too much is set aside both for those at caps that are higher, and for those that go
    beyond caps that are lower.
    """
    line = s.links[link]
    free = line.free - (line.taken + line.taken_rest)
    if line.claimants + line.loosened == 0:
        return np.inf if free >= -_SAME * line.capacity else 0.0
    claims = line.claimed + line.claimed_rest
    if line.claimants > 0:
        claims += line.claims
    return free / claims


@_inlined
def _fix(s: State, group: int, level: float, limit: int, settling: int) -> None:
    """The crossing group has `level`, set by the link `limit`: the others on its way have the less to fill."""
    g = s.groups[group]
    weight = g.claim
    old = g.level
    changed = g.limit < 0 or old != level
    g.fixed = settling
    g.level = level
    if g.limit != limit:
        if g.limit >= 0:
            _leave(s, group)
        _join(s, group, limit)
    for hop in range(g.first, g.first + g.length):
        link = s.hops[hop].link
        line = s.links[link]
        if line.opened != settling:
            if not changed or line.capacity == np.inf:
                continue
            if line.free < 0.0:
                _open(s, link, level, settling)
                continue
            _watch(s, link, settling)
        if s.hops[hop].claiming == settling:
            s.hops[hop].claiming = 0
            line.free -= weight * level
            line.claims -= weight
            line.claimants -= 1
        else:
            line.free -= weight * (level - old)
        if line.stage == _WATCHED and line.free - line.taken <= _SPARE * line.capacity:
            _open(s, link, level, settling)


@_inlined
def _let_rise(s: State, hop: int, level: float, settling: int) -> None:
    """The level of a crossing group rises from `level` on: see that this link of it is looked at when it is full."""
    link = s.hops[hop].link
    line = s.links[link]
    if line.opened != settling:
        if line.capacity == np.inf:
            return
        if line.free < 0.0:
            _open(s, link, level, settling)
            return
        _watch(s, link, settling)
    if line.stage == _WATCHED:
        g = s.groups[s.hops[hop].group]
        weight = g.claim
        line.free += weight * g.level
        line.claims += weight
        line.claimants += 1
        s.hops[hop].claiming = settling
        _await(s, link, max(_full(s, link), level))


@_inlined
def _release(s: State, link: int, level: float, settling: int) -> None:
    """The filling passes the link's old level: its groups' levels rise, so their other links may be full earlier."""
    s.links[link].stage = _RELEASED
    hop = s.links[link].first
    while _crossing(s, hop):
        if s.hops[hop].claiming == settling:
            g = s.groups[s.hops[hop].group]
            if g.limit == link:
                for other in range(g.first, g.first + g.length):
                    _let_rise(s, other, level, settling)
        hop = s.hops[hop].next


@_inlined
def _fill(s: State, link: int, level: float, settling: int) -> None:
    """The link is full at `level`: all on it that nothing limited earlier have this level."""
    line = s.links[link]
    line.stage = _FULL
    if line.level != level:
        _set_level(s, link, level)
    hop = line.first
    while _crossing(s, hop):
        if s.hops[hop].claiming == settling:
            _fix(s, s.hops[hop].group, level, link, settling)
        hop = s.hops[hop].next


@_inlined
def _reach(s: State, link: int, level: float, settling: int) -> None:
    """The filling has come to a level at which something may happen to an open link."""
    line = s.links[link]
    line.awaited = np.inf
    while line.stage != _FULL:
        full = max(_full(s, link), level)
        if full == np.inf and line.claimants + line.loosened == 0:
            return
        old = line.level if line.stage == _OPEN else np.inf
        if abs(full - old) <= _SAME * old < np.inf:
            full = old
        if min(full, old) > level:
            _await(s, link, min(full, old))
            return
        if line.stage == _WATCHED:
            _open(s, link, level, settling)
            return
        if full > old:
            _release(s, link, level, settling)
        elif line.loose >= 0 and s.caps[line.loose].key < full:
            _tighten(s, line.loose)
        elif line.tight >= 0 and -s.caps[line.tight].key > (1.0 + _SAME) * level:
            _loosen(s, line.tight)
        elif line.claimants + line.loosened == 0:
            return
        else:
            _fill(s, link, full, settling)


@_compiled
def _settle(s: State) -> None:
    """Work out the levels anew, as far as the changes reach. Each link is opened, released and filled at most once."""
    totals = s.totals[0]
    if totals.dirty == 0:
        return
    totals.settlings += 1
    settling = totals.settlings
    totals.opened = 0
    for i in range(totals.dirty):
        link = s.links[i].nth_dirty
        s.links[link].dirty = 0
        soonest = _soonest(s, link)
        if soonest < np.inf:
            _push(s, soonest, link)
    totals.dirty = 0
    while True:
        if totals.vacant == 1:
            totals.vacant = 0
            _drop_first(s)
        if totals.events == 0:
            break
        level, item = s.events[0].level, s.events[0].item
        totals.vacant = 1
        if item >= 0:
            if s.links[item].opened != settling:
                _open(s, item, level, settling)
            elif level == s.links[item].awaited:
                _reach(s, item, level, settling)
            continue
        g = s.groups[-1 - item]
        if g.fixed != settling and s.links[g.limit].opened != settling:
            _fix(s, -1 - item, g.level, g.limit, settling)
    for i in range(totals.opened):
        link = s.links[i].nth_opened
        if s.links[link].stage == _FULL:
            s.links[link].free = -np.inf
            _reschedule(s, link)


# Who is where.


@_inlined
def _touch(s: State, link: int) -> None:
    s.links[link].free = -np.inf
    if s.links[link].dirty == 0:
        s.links[link].dirty = 1
        s.links[s.totals[0].dirty].nth_dirty = link
        s.totals[0].dirty += 1


@_inlined
def _touch_way(s: State, group: int) -> None:
    """Something about the group has changed: settle the links to which it matters."""
    g = s.groups[group]
    if g.home >= 0:
        _touch(s, g.home)
        return
    for hop in range(g.first, g.first + g.length):
        _touch(s, s.hops[hop].link)


@_inlined
def _enlist(s: State, hop: int) -> None:
    """Put the hop on its link's list: at the front if its group crosses the link, else at the back."""
    h = s.hops[hop]
    line = s.links[h.link]
    h.previous = h.next = NONE
    h.crossing = int(s.groups[h.group].home < 0)
    if line.first < 0:
        line.first = line.last = hop
    elif h.crossing == 1:
        h.next = line.first
        s.hops[line.first].previous = hop
        line.first = hop
    else:
        h.previous = line.last
        s.hops[line.last].next = hop
        line.last = hop


@_inlined
def _delist(s: State, hop: int) -> None:
    h = s.hops[hop]
    line = s.links[h.link]
    if h.previous >= 0:
        s.hops[h.previous].next = h.next
    else:
        line.first = h.next
    if h.next >= 0:
        s.hops[h.next].previous = h.previous
    else:
        line.last = h.previous


@_compiled
def _place(s: State, group: int, new: bool) -> None:
    """Have the group local to a link or crossing several, as is right now."""
    g = s.groups[group]
    shared, home, narrow = 0, NONE, NONE
    for hop in range(g.first, g.first + g.length):
        link = s.hops[hop].link
        line = s.links[link]
        if line.capacity < np.inf and line.members > 1:
            shared += 1
            home = link
        if narrow < 0 or line.capacity < s.links[narrow].capacity:
            narrow = link
    if shared == 0:
        home = narrow
    elif shared > 1:
        home = NONE
    room, narrow = np.inf, NONE
    if home >= 0:
        for hop in range(g.first, g.first + g.length):
            link = s.hops[hop].link
            if link != home and s.links[link].capacity < room:
                room, narrow = s.links[link].capacity, link
    if not new:
        if home == g.home and narrow == g.narrow and room == g.room:
            return
        if g.home >= 0:
            _disclaim(s, group)
            # Others than its home were not told of the group's changes.
            if home < 0 and s.links[g.home].dirty == 1:
                for hop in range(g.first, g.first + g.length):
                    _touch(s, s.hops[hop].link)
    if new or (g.home < 0) != (home < 0):
        g.home = home
        for hop in range(g.first, g.first + g.length):
            if not new:
                _delist(s, hop)
            _enlist(s, hop)
            s.links[s.hops[hop].link].free = -np.inf
    g.home, g.narrow, g.room = home, narrow, room
    if home < 0:
        if g.limit >= 0:
            g.level = s.links[g.limit].level
            if g.level == np.inf:
                _leave(s, group)
        return
    moves = g.limit != home
    if moves:
        if g.limit >= 0:
            _leave(s, group)
        _join(s, group, home)
        _reschedule(s, home)
    _claim(s, group)
    if moves or room < g.claim * s.links[home].level:
        _touch(s, home)


@_inlined
def _place_first(s: State, link: int, members: int) -> None:
    """Place the first group on a link, if the number of groups on it has come to `members`."""
    line = s.links[link]
    if line.members == members and line.capacity < np.inf:
        _place(s, s.hops[line.first].group, False)


@_inlined
def _set_out(s: State, group: int) -> None:
    """The group has its first flow: it takes part on its links."""
    g = s.groups[group]
    for hop in range(g.first, g.first + g.length):
        s.links[s.hops[hop].link].members += 1
    for hop in range(g.first, g.first + g.length):
        _place_first(s, s.hops[hop].link, 2)
    g.limit = NONE
    g.claim = g.flows * g.weight
    _place(s, group, True)


@_inlined
def _renumber(s: State, group: int, head: int) -> None:
    """The number of the group's flows has changed; before, the next to end was `head`."""
    g = s.groups[group]
    if g.home >= 0:
        _disclaim(s, group)
    g.claim = g.flows * g.weight
    if g.home >= 0:
        _claim(s, group)
    if g.limit >= 0 and g.head != head:
        line = s.links[g.limit]
        line.limited = _take_out(s.groups, line.limited, group)
        _take_turn(s, group)
    if g.limit >= 0:
        _reschedule(s, g.limit)


@_compiled
def _stop(s: State, flow: int) -> bool:
    """The flow has ended or is cancelled: it leaves its group. Returns whether the group has no flow any more.

    If so, the caller lets it retire. No other group is moved before: what ends at the same time has to be found first.
    """
    group = s.flows[flow].group
    g = s.groups[group]
    head = g.head
    g.head = _take_out(s.flows, head, flow)
    g.flows -= 1
    s.flows[flow].group = NONE
    s.totals[0].active -= 1
    _touch_way(s, group)
    if g.flows > 0:
        _renumber(s, group, head)
        return False
    if g.home >= 0:
        _disclaim(s, group)
    if g.limit >= 0:
        _leave(s, group)
    return True


@_inlined
def _retire(s: State, group: int) -> None:
    """Take the group off its links."""
    g = s.groups[group]
    for hop in range(g.first, g.first + g.length):
        _delist(s, hop)
        s.links[s.hops[hop].link].members -= 1


@_inlined
def _place_those_left(s: State, group: int) -> None:
    """Those whom a group that has retired has left alone on a link."""
    g = s.groups[group]
    for hop in range(g.first, g.first + g.length):
        _place_first(s, s.hops[hop].link, 1)


@_inlined
def _note_end(s: State, flow: int, time: float) -> None:
    end = s.ended[s.totals[0].ended]
    end.time = time
    end.flow = s.flows[flow].id
    s.totals[0].ended += 1


@_compiled
def _advance(s: State, now: float) -> None:
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
        retiring = NONE
        while s.ends[1] < np.inf:
            line = s.links[_first_to_end(s)]
            g = s.groups[line.limited]
            flow = g.head
            # Rounding must neither part those that end together, nor leave a rest too small to move the clock.
            late = s.ends[1] - time
            slack = 4e-16 * time
            if line.level < np.inf:
                slack = max(slack, _REST * s.flows[flow].size / (g.weight * line.level))
            if late > slack:
                break
            _note_end(s, flow, time)
            group = s.flows[flow].group
            if _stop(s, flow):
                s.groups[group].next = retiring
                retiring = group
        group = retiring
        while group >= 0:
            _retire(s, group)
            group = s.groups[group].next
        while retiring >= 0:
            _place_those_left(s, retiring)
            retiring = s.groups[retiring].next
    if now > totals.clock:
        totals.clock = now


@_inlined
def _pass(s: State, now: float) -> None:
    """To `now`, unless it is now already: what happens at one time is settled once."""
    if now > s.totals[0].clock:
        _advance(s, now)


@_inlined
def _left(s: State, flow: int) -> float:
    """The bytes of a flow that are still to be carried."""
    group = s.flows[flow].group
    if group < 0:
        return 0.0
    left = s.flows[flow].key - _given(s, group)
    return min(max(left, 0.0), s.flows[flow].size)


# What `Flows` calls. It hands over a plain tuple, which takes numba half the time of one with names.


@_compiled
def start(state: Arrays, now: float, flow: int, id: int, group: int, size: float) -> None:
    s = State(*state)
    _pass(s, now)
    f = s.flows[flow]
    f.id = id
    f.size = size
    f.group = NONE
    g = s.groups[group]
    limited = False
    for hop in range(g.first, g.first + g.length):
        limited |= s.links[s.hops[hop].link].capacity < np.inf
    if size <= 0.0 or not limited:
        _note_end(s, flow, now)
        return
    f.group = group
    head = g.head
    given = 0.0
    if head < 0:
        g.given = 0.0
    else:
        given = _given(s, group)
        if given > _PRECISE * size:
            _set_group_back(s, group)
            given = 0.0
    g.head = _put_in(s.flows, head, flow, given + size)
    g.flows += 1
    s.totals[0].active += 1
    if head < 0:
        _set_out(s, group)
    else:
        _renumber(s, group, head)
    _touch_way(s, group)


@_compiled
def cancel(state: Arrays, now: float, flow: int) -> float:
    """What was left of the flow; negative when it had ended before."""
    s = State(*state)
    _pass(s, now)
    if s.flows[flow].group < 0:
        return -1.0
    left = _left(s, flow)
    group = s.flows[flow].group
    if _stop(s, flow):
        _retire(s, group)
        _place_those_left(s, group)
    return left


@_compiled
def remaining(state: Arrays, now: float, flow: int) -> float:
    s = State(*state)
    _pass(s, now)
    return _left(s, flow)


@_compiled
def rate(state: Arrays, flow: int) -> float:
    s = State(*state)
    _settle(s)
    group = s.flows[flow].group
    if group < 0:
        return 0.0
    return s.groups[group].weight * s.links[s.groups[group].limit].level


@_compiled
def set_capacity(state: Arrays, now: float, link: int, capacity: float) -> None:
    s = State(*state)
    _pass(s, now)
    line = s.links[link]
    old = line.capacity
    if old == capacity:
        return
    line.capacity = capacity
    if line.first < 0:
        return
    _touch(s, link)
    # A link that is infinite is shared by nobody, and one of a single group may be a cap. Those that are placed anew go
    # to the front of the list, or to its back, where they are found to be in place.
    if line.members == 1 or old == np.inf or capacity == np.inf:
        hop = line.first
        while hop >= 0:
            after = s.hops[hop].next
            _place(s, s.hops[hop].group, False)
            hop = after
    if capacity == np.inf:
        hop = line.first
        while _crossing(s, hop):
            group = s.hops[hop].group
            if s.groups[group].limit == link:
                _leave(s, group)
                _touch_way(s, group)
            hop = s.hops[hop].next
        _set_level(s, link, np.inf)
        _reschedule(s, link)


@_compiled
def next_time(state: Arrays) -> float:
    s = State(*state)
    if s.totals[0].ended > 0:
        return s.ended[0].time
    _settle(s)
    return max(s.ends[1], s.totals[0].clock)


@_compiled
def hand_out(state: Arrays, now: float) -> int:
    """Advance to `now`; returns how many flows of `ended` are to be handed out."""
    s = State(*state)
    _advance(s, now)
    count = s.totals[0].ended
    s.totals[0].ended = 0
    return count
