"""Transfers that share links, each as fast as its fair share of them.

`Flows` keeps the names of flows and the room for them; the compiled module `max_min` works out rates and ends.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal.environment.network import max_min as filling
from shoal.environment.network.max_min import NONE, Arrays, Records, State


class Flows:
    """The flows of a network. Times are seconds, sizes bytes, capacities and rates bytes per second.

    Calls come in order of time, and take the flows to `now` first. A flow that ends on the way is kept for the next
    `advance`. What starts, stops or changes at one and the same time is worked out once, when it is asked for.
    """

    def __init__(self, capacities: NDArray[np.float64]) -> None:
        capacities = np.asarray(capacities, dtype=np.float64)
        for link, capacity in enumerate(capacities):
            _check_capacity(link, float(capacity))
        links = np.zeros(len(capacities), filling.LINK)
        links["capacity"] = capacities
        links["level"] = np.inf
        for name in ("limited", "first", "last", "loose", "tight"):
            links[name] = NONE
        leaves = 1 << (len(links) - 1).bit_length() if len(links) else 1
        room = 1024
        self._links = len(links)
        self._longest = 2
        """The links of the longest way so far: each group has room for so many hops."""
        self._arrays: Arrays = ()
        self._hold(
            State(
                links=links,
                groups=_fresh_groups(room),
                flows=np.zeros(room, filling.FLOW),
                hops=np.zeros(2 * room, filling.HOP),
                caps=np.zeros(room, filling.CAP),
                ends=np.full(2 * leaves, np.inf),
                events=np.zeros(2 * len(links) + 3 * room, filling.EVENT),
                ended=np.zeros(room, filling.END),
                totals=np.zeros(1, filling.TOTALS),
            )
        )
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
        filling.start(self._arrays, now, place, id, group, float(size))  # an int would be compiled for once more
        return id

    def cancel(self, now: float, flow: int) -> float:
        """End a flow; returns how many of its bytes were still to be carried.

        That is 0 for one that has ended by itself by now; the next `advance` tells of it all the same.
        """
        self._come_to(now)
        left = filling.cancel(self._arrays, now, self._place(flow))
        if left < 0.0:
            return 0.0
        self._free_places.append(self._places.pop(flow))
        return left

    def remaining(self, now: float, flow: int) -> float:
        """How many of a flow's bytes are still to be carried."""
        self._come_to(now)
        return filling.remaining(self._arrays, now, self._place(flow))

    def rate(self, flow: int) -> float:
        """At the time of the last call; 0 once the flow has ended."""
        return filling.rate(self._arrays, self._place(flow))

    def set_capacity(self, now: float, link: int, capacity: float) -> None:
        """From `now` on. Flows over a link of capacity 0 stand still."""
        self._come_to(now)
        self._check_link(link)
        _check_capacity(link, capacity)
        filling.set_capacity(self._arrays, now, link, capacity)

    def next_time(self) -> float:
        """When the next flow ends, if nothing else happens; infinite if none does."""
        return filling.next_time(self._arrays)

    def advance(self, now: float) -> list[tuple[float, int]]:
        """To `now`: the flows that have ended since they were last asked for, each with its time, in order of time and
        of their ids. From then on they are not known any more."""
        self._come_to(now)
        count = filling.hand_out(self._arrays, now)
        if not count:
            return []
        ended: list[tuple[float, int]] = self._ended[:count].tolist()
        ended.sort()
        for _, flow in ended:
            self._free_places.append(self._places.pop(flow))
        return ended

    def _hold(self, state: State) -> None:
        """Have this state from now on."""
        self._state = state
        self._arrays = tuple(state)
        # A field is looked up once: that takes longer than to set an item of it.
        self._weights, self._lengths = state.groups["weight"], state.groups["length"]
        self._hop_links = state.hops["link"]
        self._ended = state.ended
        # Each group has its hops to itself.
        groups = np.arange(len(state.groups))
        state.groups["first"] = groups * self._longest
        state.hops["group"] = np.repeat(groups, self._longest)

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
        if not 0 <= link < self._links:
            raise ValueError(f"link is {link}; expected one of the {self._links} links, numbered from 0")

    def _new_group(self, links: tuple[int, ...], weight: float) -> int:
        if links and not 0 <= min(links) <= max(links) < self._links:
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
        self._weights[group], self._lengths[group] = weight, len(way)
        for hop, link in enumerate(way, start=group * self._longest):
            self._hop_links[hop] = link
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
        self._hold(
            state._replace(
                groups=np.concatenate([state.groups, _fresh_groups(room)]),
                hops=_longer(state.hops),
                caps=_longer(state.caps),
                events=np.zeros(2 * self._links + 2 * room * (1 + self._longest), filling.EVENT),
            )
        )

    def _grow_flows(self) -> None:
        room = len(self._state.flows)
        self._free_places = list(range(2 * room - 1, room - 1, -1))
        self._hold(self._state._replace(flows=_longer(self._state.flows), ended=_longer(self._state.ended)))

    def _widen(self, longest: int) -> None:
        """Have room for ways of so many links."""
        state, old = self._state, self._longest
        hops = np.zeros((len(state.groups), longest), filling.HOP)
        hops[:, :old] = state.hops.reshape(-1, old)
        links = state.links
        for numbers in (hops["next"], hops["previous"], links["first"], links["last"]):
            numbers[:] = np.where(numbers >= 0, numbers // old * longest + numbers % old, NONE)
        self._longest = longest
        events = np.zeros(2 * self._links + len(state.groups) * (1 + longest), filling.EVENT)
        self._hold(state._replace(hops=hops.reshape(-1), events=events))


def _check_capacity(link: int, capacity: float) -> None:
    if not capacity >= 0.0:
        raise ValueError(f"the capacity of link {link} is {capacity}; expected bytes per second, at least 0")


def _fresh_groups(room: int) -> Records:
    groups = np.zeros(room, filling.GROUP)
    groups["head"] = NONE
    groups["limit"] = NONE
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
