"""Flows: transfers that share links by max-min fair allocation.

`Flows` checks arguments, maps the ids of flows to places in arrays, and grows these. The compiled module `max_min`
computes rates and ends.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.environment.network import max_min
from shoal.environment.network.max_min import NONE, Arrays, State


class Flows:
    """The flows of a network. Times are seconds, sizes bytes, capacities and rates bytes per second.

    Calls come in order of time. Each call advances all flows to `now` first. A flow that ends by that is kept for the
    next `advance`. Rates are computed once for all changes at the same time, when a call needs them.
    """

    def __init__(self, capacities: NDArray[np.float64]) -> None:
        capacities = np.asarray(capacities, dtype=np.float64)
        for link, capacity in enumerate(capacities):
            _check_capacity(link, float(capacity))
        links = np.zeros(len(capacities), max_min.LINK)
        links["capacity"] = capacities
        links["first"] = links["next_end"] = NONE
        places = 1024
        tree = 2 ** (1 + len(links).bit_length())
        totals = np.zeros(1, max_min.TOTALS)
        totals["longest_route"] = 2
        self._links = len(links)
        self._longest_route = 2
        """In links. Each place has as many hops."""
        self._use(
            State(
                links=links,
                flows=np.zeros(places, max_min.FLOW),
                hops=np.zeros(2 * places, max_min.HOP),
                ends=np.full(tree, np.inf),
                levels=np.full(tree, np.inf),
                ended=np.zeros(places, max_min.END),
                changed=np.zeros(len(links), np.int64),
                selected=np.zeros(places, np.int64),
                totals=totals,
            )
        )
        self._places: dict[int, int] = {}
        """The place of each flow that is active, or whose end was not returned yet, by its id."""
        self._free_places = list(range(places - 1, -1, -1))
        self._started = 0
        self._now = 0.0

    @property
    def active(self) -> int:
        """The number of flows that have not ended."""
        return int(self._state.totals["active"][0])

    def start(self, now: float, links: tuple[int, ...], weight: float, size: float) -> int:
        """Start a flow of `size` bytes over `links`, in any order; returns its id, higher than all before it.

        A flow without links, or with infinite ones only, ends at once.
        """
        now = self._check_time(now)
        if links and not 0 <= min(links) <= max(links) < self._links:
            for link in links:
                self._check_link(link)
        if not 0.0 < weight < math.inf:
            raise ValueError(f"weight is {weight}; expected a positive number, such as one over the round trip time")
        if not 0.0 <= size < math.inf:
            raise ValueError(f"size is {size}; expected a number of bytes, at least 0")
        if len(set(links)) < len(links):
            links = tuple(dict.fromkeys(links))
        if len(links) > self._longest_route:
            self._lengthen_routes(len(links))
        if not self._free_places:
            self._double_places()
        place = self._free_places.pop()
        first = place * self._longest_route
        for hop, link in enumerate(links, first):
            self._hop_links[hop] = link
        id = self._started
        self._started += 1
        self._places[id] = place
        # As floats: numba would compile the function once more for integers.
        max_min.start(self._arrays, now, place, id, len(links), float(weight), float(size))
        return id

    def cancel(self, now: float, flow: int) -> float:
        """End a flow; returns how many of its bytes were still to be carried.

        This is 0 for a flow that has ended by itself; the next `advance` returns its end all the same.
        """
        now = self._check_time(now)
        left = max_min.cancel(self._arrays, now, self._place(flow))
        if left < 0.0:
            return 0.0
        self._free_places.append(self._places.pop(flow))
        return left

    def remaining(self, now: float, flow: int) -> float:
        """The number of a flow's bytes that are still to be carried."""
        now = self._check_time(now)
        return max_min.remaining(self._arrays, now, self._place(flow))

    def rate(self, flow: int) -> float:
        """The rate of a flow at the time of the last call; 0 after its end."""
        return max_min.rate(self._arrays, self._place(flow))

    def set_capacity(self, now: float, link: int, capacity: float) -> None:
        """Change the capacity of a link from `now` on. With a capacity of 0, its flows stand still."""
        now = self._check_time(now)
        self._check_link(link)
        _check_capacity(link, capacity)
        max_min.set_capacity(self._arrays, now, link, float(capacity))

    def next_time(self) -> float:
        """When the next flow ends if nothing else changes; infinite if none does.

        This is in the past for a flow that has ended and that `advance` has not returned yet.
        """
        return max_min.next_time(self._arrays)

    def advance(self, now: float) -> list[tuple[float, int]]:
        """Advance to `now`; returns the flows that have ended since the last call, each with its time.

        They are sorted by time and id. Their ids are not valid any more.
        """
        now = self._check_time(now)
        count = max_min.advance(self._arrays, now)
        if not count:
            return []
        ended: list[tuple[float, int]] = self._state.ended[:count].tolist()
        ended.sort()
        for _, flow in ended:
            self._free_places.append(self._places.pop(flow))
        return ended

    def _use(self, state: State) -> None:
        self._state = state
        self._arrays: Arrays = tuple(state)
        self._hop_links = state.hops["link"]  # the look-up of a field takes longer than setting an item

    def _check_time(self, now: float) -> float:
        """Return the time as a float. Raises ValueError if it is before that of the last call."""
        if not self._now <= now < math.inf:
            raise ValueError(f"now is {now}; expected a time that is not before {self._now}, that of the last call")
        self._now = float(now)
        return self._now

    def _place(self, flow: int) -> int:
        try:
            return self._places[flow]
        except KeyError:
            raise KeyError(f"flow {flow} is not active: it was never started, was cancelled, or has ended") from None

    def _check_link(self, link: int) -> None:
        if not 0 <= link < self._links:
            raise ValueError(f"link is {link}; expected one of the {self._links} links, numbered from 0")

    def _double_places(self) -> None:
        state = self._state
        places = len(state.flows)
        self._free_places = list(range(2 * places - 1, places - 1, -1))
        self._use(
            state._replace(
                flows=_doubled(state.flows),
                hops=_doubled(state.hops),
                ended=_doubled(state.ended),
                selected=_doubled(state.selected),
            )
        )

    def _lengthen_routes(self, longest: int) -> None:
        state, old = self._state, self._longest_route
        hops = np.zeros((len(state.flows), longest), max_min.HOP)
        hops[:, :old] = state.hops.reshape(-1, old)
        for numbers in (hops["next"], hops["previous"], state.links["first"]):
            numbers[:] = np.where(numbers >= 0, numbers // old * longest + numbers % old, NONE)
        self._longest_route = state.totals["longest_route"][0] = longest
        self._use(state._replace(hops=hops.reshape(-1)))


def _check_capacity(link: int, capacity: float) -> None:
    if not capacity >= 0.0:
        raise ValueError(f"the capacity of link {link} is {capacity}; expected bytes per second, at least 0")


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([array, np.zeros_like(array)])


def load() -> None:
    """Load the compiled code, or compile it where that was never done: the first flow would wait for it otherwise."""
    flows = Flows(np.ones(1))
    flows.start(0.0, (0,), 1.0, 1.0)
    flows.set_capacity(0.0, 0, 2.0)
    flows.cancel(0.0, flows.start(0.0, (0,), 1.0, 1.0))
    flows.advance(flows.next_time())
