"""Flows that share links: cases worked out by hand, the laws of max-min fairness, and a plain solver as the oracle."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.environment.network.flows import Flows

INFINITE = math.inf


def flows_over(*capacities: float) -> Flows:
    return Flows(np.array(capacities, dtype=np.float64))


# The oracle: progressive filling from scratch, event by event.


@dataclass
class Transfer:
    links: tuple[int, ...]
    weight: float
    size: float
    left: float


def fair_rates(capacities: list[float], transfers: dict[int, Transfer]) -> dict[int, float]:
    """All levels rise together; a link that is full fixes its flows."""
    rates: dict[int, float] = {}
    free = list(capacities)
    waiting = dict(transfers)
    while waiting:
        shares = {}
        for link in range(len(free)):
            weight = sum(t.weight for t in waiting.values() if link in t.links)
            if weight and free[link] < INFINITE:
                shares[link] = max(free[link], 0.0) / weight
        if not shares:
            return rates | dict.fromkeys(waiting, INFINITE)
        full = min(shares, key=lambda link: shares[link])
        for id in [id for id, t in waiting.items() if full in t.links]:
            transfer = waiting.pop(id)
            rates[id] = transfer.weight * shares[full]
            for link in set(transfer.links):
                free[link] -= rates[id]
    return rates


class Oracle:
    def __init__(self, capacities: list[float]) -> None:
        self.capacities = list(capacities)
        self.transfers: dict[int, Transfer] = {}
        self.now = 0.0
        self.started = 0
        self.ended: list[tuple[float, int]] = []

    def start(self, now: float, links: tuple[int, ...], weight: float, size: float) -> int:
        self._pass(now)
        if all(self.capacities[link] == INFINITE for link in links):
            self.ended.append((now, self.started))
        else:
            self.transfers[self.started] = Transfer(links, weight, size, size)
        self.started += 1
        return self.started - 1

    def cancel(self, now: float, flow: int) -> float:
        self._pass(now)
        return self.transfers.pop(flow).left

    def set_capacity(self, now: float, link: int, capacity: float) -> None:
        self._pass(now)
        self.capacities[link] = capacity

    def _pass(self, now: float) -> None:
        """What happens at one time happens at once: only the last of it counts."""
        if now > self.now:
            self.go(now)

    def go(self, now: float) -> None:
        while self.transfers:
            rates = fair_rates(self.capacities, self.transfers)
            lasts = {id: self._lasts(t.left, rates[id]) for id, t in self.transfers.items()}
            step = min(min(lasts.values()), now - self.now)
            for id, t in list(self.transfers.items()):
                t.left -= rates[id] * step if step else 0.0
                # A rest of rounding must not stand still if its link goes down just then.
                if lasts[id] <= step + 4e-16 * (self.now + step) or t.left <= 1e-12 * t.size:
                    self.ended.append((self.now + step, id))
                    del self.transfers[id]
            self.now += step
            if self.now >= now * (1 - 1e-15) and step < min(lasts.values()):
                break
        self.now = max(self.now, now)

    @staticmethod
    def _lasts(left: float, rate: float) -> float:
        if left <= 0.0 or rate == INFINITE:
            return 0.0
        return left / rate if rate else INFINITE


# Worked out by hand


def test_two_flows_share_a_link_and_the_one_that_stays_takes_what_is_released() -> None:
    flows = flows_over(100.0)
    short, long = flows.start(0.0, (0,), 1.0, 100.0), flows.start(0.0, (0,), 1.0, 300.0)
    assert flows.rate(short) == flows.rate(long) == 50.0
    assert flows.next_time() == 2.0
    assert flows.remaining(1.0, long) == 250.0
    assert flows.advance(2.0) == [(2.0, short)]
    assert flows.rate(long) == 100.0
    assert flows.next_time() == 4.0
    assert flows.advance(10.0) == [(4.0, long)]
    assert flows.next_time() == INFINITE
    assert flows.active == 0


def test_shares_are_in_proportion_to_weights() -> None:
    flows = flows_over(90.0)
    far, near = flows.start(0.0, (0,), 1 / 0.2, 1e6), flows.start(0.0, (0,), 1 / 0.1, 1e6)
    assert flows.rate(far) == pytest.approx(30.0)
    assert flows.rate(near) == pytest.approx(60.0)


def test_the_parking_lot() -> None:
    flows = flows_over(10.0, 30.0)
    both, first, second = (flows.start(0.0, links, 1.0, 1e6) for links in ((0, 1), (0,), (1,)))
    assert [flows.rate(flow) for flow in (both, first, second)] == [5.0, 5.0, 25.0]
    flows.cancel(1.0, first)
    assert [flows.rate(flow) for flow in (both, second)] == [10.0, 20.0]
    flows.set_capacity(2.0, 0, 100.0)
    assert [flows.rate(flow) for flow in (both, second)] == [15.0, 15.0]


def test_a_capacity_that_changes_on_the_way() -> None:
    flows = flows_over(100.0)
    flow = flows.start(0.0, (0,), 2.0, 1000.0)
    flows.set_capacity(5.0, 0, 50.0)
    assert flows.remaining(5.0, flow) == 500.0
    assert flows.advance(20.0) == [(15.0, flow)]


def test_flows_stand_still_while_a_link_is_down() -> None:
    flows = flows_over(100.0, 100.0)
    flow, other = flows.start(0.0, (0, 1), 1.0, 1000.0), flows.start(0.0, (1,), 1.0, 5000.0)
    flows.set_capacity(10.0, 0, 0.0)
    assert flows.rate(flow) == 0.0
    assert flows.rate(other) == 100.0
    assert flows.remaining(20.0, flow) == 500.0
    flows.set_capacity(30.0, 0, 100.0)
    assert flows.rate(flow) == 50.0
    assert flows.advance(100.0) == [(40.0, flow), (60.0, other)]


def test_a_flow_without_limits_ends_at_once() -> None:
    flows = flows_over(INFINITE, 10.0)
    without = flows.start(1.0, (), 1.0, 1e9)
    unlimited = flows.start(1.0, (0,), 1.0, 1e9)
    nothing = flows.start(1.0, (1,), 1.0, 0.0)
    limited = flows.start(1.0, (0, 1), 1.0, 100.0)
    assert flows.next_time() == 1.0
    assert flows.advance(1.0) == [(1.0, without), (1.0, unlimited), (1.0, nothing)]
    flows.set_capacity(3.0, 1, INFINITE)
    assert flows.remaining(3.0, limited) == 80.0
    assert flows.rate(limited) == INFINITE
    assert flows.advance(3.0) == [(3.0, limited)]


def test_ends_on_the_way_are_kept_until_the_next_advance() -> None:
    flows = flows_over(10.0)
    first = flows.start(0.0, (0,), 1.0, 10.0)
    second = flows.start(5.0, (0,), 1.0, 10.0)
    assert flows.remaining(5.0, first) == 0.0
    assert flows.rate(first) == 0.0
    assert flows.cancel(5.0, first) == 0.0
    assert flows.next_time() == 1.0
    assert flows.advance(6.0) == [(1.0, first), (6.0, second)]


def test_ids_are_never_used_again() -> None:
    flows = flows_over(10.0)
    first = flows.start(0.0, (0,), 1.0, 10.0)
    flows.cancel(0.0, first)
    assert flows.start(0.0, (0,), 1.0, 10.0) > first


def test_a_link_that_is_named_twice_is_one() -> None:
    flows = flows_over(10.0)
    assert flows.rate(flows.start(0.0, (0, 0), 1.0, 10.0)) == 10.0


def test_flows_that_should_end_together_do() -> None:
    """Thirds and sevenths, over ways of different lengths: no two ends an ulp apart."""
    flows = flows_over(*[1e8 / 3] * 7, 1e9 / 7, *[1e8 / 7] * 10)
    same = [flows.start(0.1, (link,), 0.3, 1e9 / 3) for link in range(7)]
    shared = [flows.start(0.1, (7, 8 + link), 0.7, 1e9 / 7) for link in range(10)]
    assert flows.advance(1e3) == [(pytest.approx(10.1, rel=1e-15), flow) for flow in same + shared]


def test_small_flows_end_on_time_beside_large_ones_after_a_long_time() -> None:
    """A group that has carried 1e15 bytes still counts a hundred of them."""
    flows = flows_over(1e11)
    large = flows.start(0.0, (0,), 1.0, 2e15)
    flows.advance(1e4)
    flows.set_capacity(1e4, 0, 1e2)
    small = flows.start(1e4, (0,), 1.0, 100.0)
    assert flows.advance(2e4) == [(pytest.approx(1e4 + 2.0, abs=1e-9), small)]
    assert flows.remaining(2e4, large) == pytest.approx(1e15)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda flows: flows.start(0.0, (7,), 1.0, 1.0), "link is 7; expected one of the 1 links"),
        (lambda flows: flows.start(0.0, (0,), 0.0, 1.0), "weight is 0.0; expected a positive number"),
        (lambda flows: flows.start(0.0, (0,), 1.0, -1.0), "size is -1.0; expected a number of bytes"),
        (lambda flows: flows.set_capacity(0.0, 0, -1.0), "capacity of link 0 is -1.0; expected bytes per second"),
        (lambda flows: flows.set_capacity(0.0, 0, math.nan), "capacity of link 0 is nan"),
        (lambda flows: (flows.advance(2.0), flows.advance(1.0)), "now is 1.0; expected a time that is not before 2.0"),
        (lambda flows: flows_over(-5.0), "capacity of link 0 is -5.0"),
    ],
)
def test_invalid_arguments_are_rejected(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(flows_over(10.0))  # type: ignore[operator]


def test_a_flow_that_is_not_active_is_named() -> None:
    with pytest.raises(KeyError, match="flow 3 is not active"):
        flows_over(10.0).cancel(0.0, 3)


# Laws


Route = tuple[int, ...]
Network = tuple[list[float], int, list[Route]]
"""Capacities, a seed, and the routes of flows."""


@st.composite
def meshes(draw: st.DrawFn) -> Network:
    """A few links, and routes over up to four of them."""
    capacity = st.sampled_from([1e2, 1e5, 1e6, 2e6, 1e7, 1e11, INFINITE, 0.0])
    capacities = draw(st.lists(capacity, min_size=1, max_size=10))
    seed = draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    lengths = range(1, min(len(capacities), 4) + 1)
    routes = [
        tuple(rng.sample(range(len(capacities)), rng.choice(lengths))) for _ in range(draw(st.sampled_from([2, 6, 20])))
    ]
    return capacities, seed, routes


@st.composite
def servers(draw: st.DrawFn) -> Network:
    """A server, and clients with equal, different or slow links. Each has a link for each direction.

    Most flows run between the server and a client. A few run between clients, or over a backbone.
    """
    clients = draw(st.sampled_from([1, 4, 12]))
    server = draw(st.sampled_from([1e5, 1e6, 3.3e6, 1e7, 1e9, INFINITE]))
    seed = draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    different = draw(st.booleans())
    slow = [10 ** rng.uniform(4, 7) if different else 1e6 for _ in range(2 * clients)]
    backbone = 2 + 2 * clients
    routes: list[Route] = []
    for client in range(clients):
        up, down = 2 + client, 2 + clients + client
        routes += [(0, down), (up, 1)]
    for _ in range(draw(st.integers(0, 3))):
        up, down = 2 + rng.randrange(clients), 2 + clients + rng.randrange(clients)
        routes += [rng.choice([(up, down), (up, backbone, down), (0, backbone, down), (backbone,)])]
    return [server, server, *slow, draw(st.sampled_from([1e6, 1e8, INFINITE]))], seed, routes


def networks() -> st.SearchStrategy[Network]:
    return meshes() | servers()


class Scenario:
    """Random starts, cancels and changes of capacity, applied to the flows and to the oracle alike."""

    def __init__(self, capacities: list[float], seed: int, routes: list[Route], late: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.capacities = list(capacities)
        self.late = late
        """How far beyond the end of a flow to go, in parts of the time. If a link goes down the very moment that a flow
        ends over it, rounding decides whether it still does, for the flows and for the oracle each on its own."""
        self.flows, self.oracle = flows_over(*capacities), Oracle(capacities)
        self.active: dict[int, tuple[Route, float, float]] = {}
        self.now = 0.0
        self.routes = routes
        self.weights = self.random.choice([[1.0], [1.0, 2.0, 50.0], [0.1, 3.7, 1e3]])
        self.ended: list[tuple[float, int]] = []

    def step(self) -> None:
        what = self.random.random()
        if what < 0.35 and self.flows.next_time() < INFINITE:
            self.go(self.flows.next_time() * (1 + self.late))
        elif what < 0.5:
            self.go(self.now + 10 ** self.random.uniform(-3, 3))
        elif what < 0.9:
            for _ in range(self.random.choice([1, 1, 5])):
                self.start(10 ** self.random.uniform(0, 12))
        elif what < 0.95 and self.active:
            self.cancel()
        else:
            self.set_capacity(
                self.random.randrange(len(self.capacities)),
                self.random.choice([0.0, 1e3, 1e6, 3e6, 1e9, INFINITE]),
            )

    def start(self, size: float) -> None:
        route, weight = self.random.choice(self.routes), self.random.choice(self.weights)
        flow = self.flows.start(self.now, route, weight, size)
        self.active[flow] = (route, weight, size)
        if self.late:
            assert flow == self.oracle.start(self.now, route, weight, size)

    def cancel(self) -> None:
        flow = self.random.choice(list(self.active))
        left = self.flows.cancel(self.now, flow)
        size = self.active.pop(flow)[2]
        if self.late:
            theirs = self.oracle.cancel(self.now, flow) if flow in self.oracle.transfers else 0.0
            finest = 1e-15 * self.now * 1e11  # what the fastest link carries in less time than a float can represent
            assert left == pytest.approx(theirs, rel=1e-6, abs=1e-6 * size + finest)

    def set_capacity(self, link: int, capacity: float) -> None:
        self.capacities[link] = capacity
        self.flows.set_capacity(self.now, link, capacity)
        if self.late:
            self.oracle.set_capacity(self.now, link, capacity)

    def go(self, now: float) -> None:
        self.now = now
        if self.late:
            self.oracle.go(now)
        for end, flow in self.flows.advance(now):
            assert end <= now
            self.ended.append((end, flow))
            self.active.pop(flow, None)

    def check_fairness(self) -> None:
        """No link carries more than it can; each flow has a full link on which no level is higher than its own."""
        capacities = self.capacities
        self.go(self.now)
        rates = {flow: self.flows.rate(flow) for flow in self.active}
        assert INFINITE not in rates.values()  # such flows have ended
        carried = [sum(rate for flow, rate in rates.items() if link in self.active[flow][0])
                   for link in range(len(capacities))]  # fmt: skip
        for link, capacity in enumerate(capacities):
            assert carried[link] <= capacity * (1 + 1e-9)
        for flow, rate in rates.items():
            route, weight, _ = self.active[flow]
            assert any(
                carried[link] >= capacities[link] * (1 - 1e-9)
                and all(
                    other / self.active[id][1] <= rate / weight * (1 + 1e-6) + 1e-9 * capacities[link]
                    for id, other in rates.items()
                    if link in self.active[id][0]
                )
                for link in route
            ), (flow, rate)

    def check_rates(self) -> None:
        """The rates are those of the oracle."""
        self.go(self.now)
        transfers = {flow: Transfer(*self.active[flow], left=0.0) for flow in self.active}
        rates = {flow: self.flows.rate(flow) for flow in self.active}
        assert rates == pytest.approx(fair_rates(self.capacities, transfers), rel=1e-9, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(networks())
def test_rates_are_max_min_fair_whatever_happened_before(network: Network) -> None:
    scenario = Scenario(*network)
    for _ in range(40):
        scenario.step()
        scenario.check_fairness()


@settings(max_examples=10, deadline=None)
@given(servers(), st.sampled_from([5, 30]), st.booleans())
def test_rates_stay_exact_in_a_long_run(network: Network, concurrent: int, unequal: bool) -> None:
    """Thousands of changes of a busy network, with a start for each end: rounding errors do not add up."""
    scenario = Scenario(*network)
    scenario.weights = [1.0, 2.7, 1e3] if unequal else [1.0]
    rng = scenario.random
    for event in range(3000):
        while len(scenario.active) < concurrent:
            scenario.start(10 ** rng.uniform(4, 6))
            if rng.random() < 0.5:
                scenario.go(scenario.now)  # otherwise rates are computed once for several starts
        what = rng.random()
        if what < 0.05:
            scenario.cancel()
        elif what < 0.06 or scenario.flows.next_time() == INFINITE:
            for link, capacity in enumerate(network[0]):
                scenario.set_capacity(link, capacity)
        elif what < 0.07:
            link = rng.randrange(len(network[0]))
            scenario.set_capacity(link, rng.choice([0.0, 5e5, 1e6, 3e6, INFINITE]))
        else:
            scenario.go(scenario.flows.next_time())
        if event % 50 == 0:
            scenario.check_rates()


@settings(max_examples=150, deadline=None)
@given(networks())
def test_flows_end_at_the_times_of_the_oracle(network: Network) -> None:
    scenario = Scenario(*network, late=1e-7)
    for _ in range(30):
        scenario.step()
    for link in range(len(network[0])):
        scenario.set_capacity(link, 1e6)
    scenario.go(1e12)
    assert scenario.flows.active == 0
    assert not scenario.oracle.transfers
    ours, theirs = {f: t for t, f in scenario.ended}, {f: t for t, f in scenario.oracle.ended}
    assert ours.keys() == theirs.keys()
    for flow, end in theirs.items():
        assert ours[flow] == pytest.approx(end, rel=1e-7, abs=1e-7)
    assert [end for end, _ in scenario.ended] == sorted(end for end, _ in scenario.ended)


@settings(max_examples=100, deadline=None)
@given(networks())
def test_the_bytes_carried_are_the_sizes(network: Network) -> None:
    """What rates carry from event to event adds up to the sizes: the finish times and the rates agree."""
    scenario = Scenario([max(capacity, 1.0) for capacity in network[0]], *network[1:])
    started = {}
    for route in scenario.routes:
        size = 10 ** scenario.random.uniform(0, 12)
        started[scenario.flows.start(0.0, route, scenario.random.choice(scenario.weights), size)] = size
    carried = dict.fromkeys(started, 0.0)
    active = set(started) - {flow for _, flow in scenario.flows.advance(0.0)}
    finite = set(active)
    now = 0.0
    while active:
        then = scenario.flows.next_time()
        for flow in active:
            carried[flow] += scenario.flows.rate(flow) * (then - now)
        active -= {flow for _, flow in scenario.flows.advance(then)}
        now = then
    for flow in finite:
        assert carried[flow] == pytest.approx(started[flow], rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(networks())
def test_the_order_of_starts_at_one_time_makes_no_difference(network: Network) -> None:
    scenario = Scenario(*network)
    rng = scenario.random
    transfers = [(route, rng.choice(scenario.weights), 10 ** rng.uniform(0, 9)) for route in scenario.routes]
    order = list(range(len(transfers)))
    scenario.random.shuffle(order)
    rates, ends = [], []
    for sequence in (range(len(transfers)), order):
        flows = flows_over(*network[0])
        number = {flows.start(0.0, *transfers[i]): i for i in sequence}
        rates.append({i: flows.rate(flow) for flow, i in number.items()})
        ends.append({number[flow]: end for end, flow in flows.advance(1e15)})
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(networks())
def test_a_scenario_is_reproducible(network: Network) -> None:
    ended = []
    for _ in range(2):
        scenario = Scenario(*network)
        for _ in range(30):
            scenario.step()
        ended.append(scenario.ended)
    assert ended[0] == ended[1]


@pytest.mark.parametrize("ratio", [1e3, 1e9, 1e15])
def test_rates_are_exact_after_a_flow_of_a_much_larger_weight_has_ended(ratio: float) -> None:
    flows = Flows(np.array([100.0]))
    small = [flows.start(0.0, (0,), 1 / 3, 1e6)]
    flows.start(0.0, (0,), ratio / 3, 1.0)
    now = flows.next_time()
    assert len(flows.advance(now)) == 1
    small += [flows.start(now, (0,), 1 / 3, 1e6) for _ in range(4)]
    assert [flows.rate(flow) for flow in small] == pytest.approx([20.0] * 5, rel=1e-12)
