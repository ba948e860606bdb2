"""Messages under way: when each arrives, in closed form, and what becomes of those that do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.environment.faults import FaultEvent
from shoal.environment.network.links import Uniform
from shoal.environment.network.model import AccessLimit, Delivery, DeliveryUpdate, EnvironmentEvent, NetworkModel
from shoal.environment.network.network import MEGABIT, AvailabilityChange, Direct, NetworkChange, NetworkState, Route

NODES = 4
MEGABYTE = 1_000_000
"""Takes a second over 8 Mbit/s."""


def uniform(**options: Any) -> NetworkState:
    timeline = Uniform(**{"latency": 0.0, **options}).build(NODES, seed=0)
    return timeline.initial_state


class Road:
    """All messages share one link, which belongs to node 0; there is no way to node 3, and none back to oneself."""

    def __init__(self, capacity: float, latency: float = 0.0) -> None:
        self.capacities = np.array([capacity])
        self._route = Route((0,), latency)

    def route(self, sender: int, receiver: int) -> Route | None:
        return None if receiver == 3 else self._route

    def access(self, node: int) -> tuple[int, ...]:
        return (0,) if node == 0 else ()


def sent(*times: float, size: int = MEGABYTE, way: tuple[int, int] = (0, 1)) -> list[tuple[float, Delivery]]:
    return [(time, Delivery(*way, size, i)) for i, time in enumerate(times)]


def deliver(
    network_state: NetworkState,
    posts: Iterable[tuple[float, Delivery]],
    occurrences: Sequence[tuple[float, EnvironmentEvent]] = (),
    *,
    seed: int = 0,
    access_limits: Sequence[AccessLimit] = (),
) -> list[DeliveryUpdate]:
    """All that becomes of messages; what occurs at a time comes before what is sent at it."""
    network_model = NetworkModel(network_state, NODES, seed, access_limits)
    news: list[DeliveryUpdate] = []
    calls: list[tuple[float, EnvironmentEvent | Delivery]] = sorted([*occurrences, *posts], key=lambda call: call[0])
    for time, call in calls:
        while (due := network_model.next_time()) <= time:
            news += network_model.advance(due)
        if isinstance(call, Delivery):
            network_model.send(time, call)
        else:
            network_model.apply_event(time, call)
    while (due := network_model.next_time()) < math.inf:
        news += network_model.advance(due)
    assert network_model.idle
    return news


def fates(news: Iterable[DeliveryUpdate], fate: str) -> dict[int, float]:
    """When each message had this fate."""
    return {delivery.content: pytest.approx(time, rel=1e-9) for time, found, delivery in news if found == fate}


def arrivals(*arguments: Any, **options: Any) -> dict[int, float]:
    return fates(deliver(*arguments, **options), "delivered")


def happens(time: float, kind: Any, *nodes: int, **details: Any) -> tuple[float, EnvironmentEvent]:
    return time, FaultEvent(time, kind, nodes, **details)


def attends(time: float, node: int, online: bool) -> tuple[float, EnvironmentEvent]:
    return time, AvailabilityChange(time, node, online)


# When messages arrive


def test_without_links_a_message_takes_the_latency_alone_however_many_there_are() -> None:
    assert arrivals(uniform(latency=0.25), sent(0.0, 0.0, 1.0)) == {0: 0.25, 1: 0.25, 2: 1.25}
    assert arrivals(Direct(), sent(0.5, 0.5)) == {0: 0.5, 1: 0.5}


def test_a_message_takes_its_size_over_the_bandwidth_and_then_the_latency() -> None:
    news = deliver(uniform(latency=0.25, upload=8), sent(1.0))
    assert fates(news, "sent") == {0: 2.0}
    assert fates(news, "in_transit") == {0: 2.0}
    assert fates(news, "delivered") == {0: 2.25}
    ((_, _, delivery),) = [said for said in news if said[1] == "in_transit"]
    assert delivery.arrival_time == pytest.approx(2.25)


def test_messages_of_one_pair_go_one_after_another() -> None:
    assert arrivals(uniform(latency=0.1, upload=8), sent(0.0, 0.0, 0.5, 9.0)) == {0: 1.1, 1: 2.1, 2: 3.1, 3: 10.1}


def test_those_to_two_receivers_share_the_sender_s_link_and_those_of_two_senders_the_receiver_s() -> None:
    for limit, (one, other) in (("upload", ((0, 1), (0, 2))), ("download", ((1, 0), (2, 0)))):
        posts = [(0.0, Delivery(*one, MEGABYTE, 0)), (0.0, Delivery(*other, 2 * MEGABYTE, 1))]
        # Both at half the rate until the first is done at 2 s; what is left of the other takes a second more.
        assert arrivals(uniform(**{limit: 8}), posts) == {0: 2.0, 1: 3.0}


def test_messages_to_oneself_take_no_time() -> None:
    assert arrivals(uniform(latency=1.0, upload=1), sent(2.0, way=(1, 1))) == {0: 2.0}


def test_a_network_without_a_way_loses_messages_and_they_do_not_get_out() -> None:
    news = deliver(Road(MEGABYTE), sent(1.0, way=(0, 3)))
    assert fates(news, "lost") == {0: 1.0}
    assert not fates(news, "sent")


def test_devices_limit_and_divide_a_node_s_own_links() -> None:
    limits = [
        AccessLimit(bandwidth=8.0),
        AccessLimit(slowdown=4.0),
        AccessLimit(4.0, 2.0),
        AccessLimit(800.0, 0.5),
    ]
    posts = [
        (0.0, Delivery(0, 3, MEGABYTE, 0)),  # the phone's 8, not the network's 16 Mbit/s
        (10.0, Delivery(1, 3, MEGABYTE, 1)),  # 16 / 4
        (20.0, Delivery(3, 2, MEGABYTE, 2)),  # 4 / 2
    ]
    network_state = uniform(upload=16, download=16)
    assert arrivals(network_state, posts, access_limits=limits) == {0: 1.0, 1: 12.0, 2: 24.0}
    fast = [AccessLimit(slowdown=0.5)] * NODES
    assert arrivals(network_state, sent(0.0), access_limits=fast) == {0: 0.25}


def test_a_slow_network_divides_the_node_s_own_links_from_that_moment_on_and_computing_does_not() -> None:
    network_state = uniform(latency=0.25, upload=8)
    slow = happens(0.5, "slow", 0, value=4.0, what="network")
    assert arrivals(network_state, sent(0.0), [slow]) == {0: 0.5 + 0.5 * 4 + 0.25}
    again = happens(1.5, "slow", 0, value=1.0, what="network")
    assert arrivals(network_state, sent(0.0), [slow, again]) == {0: 1.5 + 0.25 + 0.25}
    assert arrivals(network_state, sent(0.0), [happens(0.5, "slow", 0, value=0.5)]) == {0: 0.5 + 0.25 + 0.25}
    for other in (happens(0.5, "slow", 0, value=4.0, what="compute"), happens(0.5, "slow", 1, value=4.0)):
        assert arrivals(network_state, sent(0.0), [other]) == {0: 1.25}


def test_one_of_two_who_share_a_link_may_be_slow() -> None:
    road = Road(MEGABYTE)
    assert arrivals(road, sent(0.0, way=(1, 2)), [happens(0.0, "slow", 0, value=2.0)]) == {0: 2.0}


# Chance


def test_jitter_has_the_right_mean_and_deviation() -> None:
    many = 4000
    news = deliver(uniform(latency=1.0, jitter=0.1), sent(*(10.0 * i for i in range(many))))
    took = np.array([time - 10.0 * delivery.content for time, fate, delivery in news if fate == "delivered"])
    assert len(took) == many
    assert abs(took.mean() - 1.0) < 5 * 0.1 / math.sqrt(many)
    assert abs(took.std() - 0.1) < 5 * 0.1 / math.sqrt(2 * many)


def test_jitter_never_reorders_two_nodes_messages_nor_makes_them_early() -> None:
    news = deliver(uniform(latency=0.1, jitter=1.0), sent(*(0.01 * i for i in range(300))))
    arrived = [(time, delivery.content) for time, fate, delivery in news if fate == "delivered"]
    assert [number for _, number in arrived] == list(range(300))
    assert all(time >= 0.01 * number for time, number in arrived)


@pytest.mark.parametrize(("loss", "drop"), [(0.2, 0.0), (0.0, 0.3), (0.2, 0.3), (0.0, 1.0), (1.0, 0.0)])
def test_losses_and_drops_are_within_the_error_of_a_binomial_and_independent(loss: float, drop: float) -> None:
    many = 4000
    faults = [happens(0.0, "drop", 0, value=drop)] if drop else []
    news = deliver(uniform(latency=0.1, loss=loss), sent(*(float(i) for i in range(many))), faults)
    lost, expected = len(fates(news, "lost")), 1 - (1 - loss) * (1 - drop)
    assert abs(lost - many * expected) <= 4.5 * math.sqrt(many * expected * (1 - expected))
    assert len(fates(news, "delivered")) == many - lost
    assert len(fates(news, "sent")) == many


def test_a_lost_message_takes_its_bandwidth() -> None:
    drop = [happens(0.0, "drop", 0, others=(1,), value=1.0)]
    posts = [(0.0, Delivery(0, 1, MEGABYTE, 0)), (0.0, Delivery(0, 2, MEGABYTE, 1))]
    news = deliver(uniform(upload=8), posts, drop)
    assert fates(news, "lost") == {0: 2.0}
    assert fates(news, "delivered") == {1: 2.0}


# What stands between nodes


def test_what_is_held_leaves_and_waits_and_is_released_in_order() -> None:
    network_state = uniform(latency=0.1, upload=8)
    hold = [happens(0.5, "hold", 0), happens(5.0, "release", 0)]
    news = deliver(network_state, sent(0.0, 1.0, 1.5, 5.5), hold)
    assert fates(news, "sent") == {0: 1.0, 1: 1.0, 2: 1.5, 3: 8.0}
    assert fates(news, "delivered") == {0: 1.1, 1: 6.1, 2: 7.1, 3: 8.1}  # the first was under way


def test_a_partition_loses_all_that_is_under_way_also_if_it_is_mended_before_it_would_arrive() -> None:
    network_state = uniform(latency=1.0, upload=8)
    cut = [happens(1.5, "partition", 0, others=(1,)), happens(1.75, "repair", 0, others=(1,))]
    others = [(0.0, Delivery(0, 2, MEGABYTE // 2, "to another"))]
    news = deliver(network_state, sent(0.0, 0.0, 0.0, 1.6, 2.0), cut)
    # Travelling, flowing, waiting its turn; sent during the cut; sent after it.
    assert fates(news, "lost") == {0: 1.5, 1: 1.5, 2: 1.5, 3: 1.6}
    assert fates(news, "delivered") == {4: 4.0}
    assert set(fates(news, "sent")) == {0, 4}
    assert fates(deliver(network_state, others, cut), "delivered") == {"to another": 1.5}


def test_a_partition_loses_what_is_held() -> None:
    faults = [happens(0.0, "hold", 0), happens(1.0, "partition", 0, others=(1,)), happens(2.0, "release", 0)]
    assert fates(deliver(uniform(latency=0.1), sent(0.5), faults), "lost") == {0: 1.0}


# Nodes that come and go


def test_what_is_under_way_to_a_node_is_lost_when_it_goes_also_if_it_is_back_in_a_moment() -> None:
    network_state = uniform(latency=1.0, upload=8)
    news = deliver(network_state, sent(0.0, 0.0, 0.0, 1.7), [attends(1.5, 1, False), attends(1.6, 1, True)])
    assert fates(news, "lost") == {0: 1.5, 1: 1.5, 2: 1.5}
    assert fates(news, "delivered") == {3: 3.7}


def test_of_a_node_that_goes_what_has_left_arrives_and_what_has_not_is_lost() -> None:
    network_state = uniform(latency=1.0, upload=8)
    news = deliver(network_state, sent(0.0, 0.0, 0.0), [attends(1.5, 0, False)])
    assert fates(news, "delivered") == {0: 2.0}
    assert fates(news, "lost") == {1: 1.5, 2: 1.5}
    assert set(fates(news, "sent")) == {0}


def test_what_waits_at_the_network_has_left_and_outlives_its_sender_s_absence() -> None:
    faults = [happens(0.0, "hold", 0), attends(1.0, 0, False), happens(2.0, "release", 0)]
    assert arrivals(uniform(latency=0.1, upload=8), sent(0.5), faults) == {0: 3.1}


def test_nothing_gets_to_or_from_a_node_before_it_is_back_for_every_reason() -> None:
    away = [attends(1.0, 1, False), happens(2.0, "crash", 1), attends(3.0, 1, True), happens(4.0, "restart", 1)]
    news = deliver(uniform(latency=0.1), [*sent(1.5, 3.5, 4.5), (3.6, Delivery(1, 0, 9, "from it"))], away)
    assert fates(news, "lost") == {0: 1.5, 1: 3.5, "from it": 3.6}
    assert fates(news, "delivered") == {2: 4.6}


# A network that changes


def test_a_change_in_the_midst_of_a_message_carries_the_rest_over_the_new_way() -> None:
    slower = uniform(latency=0.5, upload=8, download=4)
    assert arrivals(uniform(upload=8), sent(0.0), [(0.25, NetworkChange(0.25, slower))]) == {0: 0.25 + 0.75 * 2 + 0.5}
    at_once = (0.25, NetworkChange(0.25, uniform(latency=0.5)))
    assert arrivals(uniform(upload=8), sent(0.0, 0.0), [at_once]) == {0: 0.75, 1: 0.75}


def test_a_change_to_a_way_without_links_or_to_none_frees_those_that_wait() -> None:
    without = (0.25, NetworkChange(0.25, Direct()))
    assert arrivals(Road(MEGABYTE), sent(0.0, 0.0, way=(1, 2)), [without]) == {0: 0.25, 1: 0.25}

    class Cut(Road):
        def route(self, sender: int, receiver: int) -> None:
            return None

    news = deliver(Road(MEGABYTE), sent(0.0, 0.0), [(0.25, NetworkChange(0.25, Cut(MEGABYTE)))])
    assert fates(news, "lost") == {0: 0.25, 1: 0.25}


def test_shares_follow_the_round_trip_times_of_the_new_network() -> None:
    near = [{"from": "0", "to": "2", "latency": 0.1}]
    before = uniform(latency=0.1, upload=8)
    after = uniform(latency=0.3, upload=8, links=tuple(near))
    posts = [(0.0, Delivery(0, 1, MEGABYTE, 0)), (0.0, Delivery(0, 2, MEGABYTE, 1))]
    # From 1 s on the one with a third of the round-trip time gets three quarters of the link: its half in 2/3 s.
    news = deliver(before, posts, [(1.0, NetworkChange(1.0, after))])
    assert fates(news, "sent") == {1: 1.0 + 0.5 / 0.75, 0: 2.0}


def test_what_stands_still_on_a_link_that_carries_nothing_goes_on_when_it_does() -> None:
    network_model = NetworkModel(Road(0.0), NODES, 0)
    network_model.send(0.0, Delivery(1, 2, MEGABYTE))
    assert network_model.idle
    network_model.apply_event(5.0, NetworkChange(5.0, Road(MEGABYTE)))
    assert not network_model.idle
    assert network_model.next_time() == pytest.approx(6.0)


# Whatever happens

TIMES = st.floats(0.0, 3.0).map(lambda time: round(time, 3))
IDS = st.integers(0, NODES - 1)
WIRINGS = {
    "latency": lambda: uniform(latency=0.2, jitter=0.1, loss=0.1),
    "links": lambda: uniform(latency=0.1, upload=8, download=16, jitter=0.05, loss=0.1),
    "road": lambda: Road(2.0 * MEGABIT, 0.05),
    "no capacity": lambda: Road(0.0),
    "direct": Direct,
}


@st.composite
def occurrences(draw: st.DrawFn) -> list[tuple[float, EnvironmentEvent]]:
    found: list[tuple[float, EnvironmentEvent]] = []
    for _ in range(draw(st.integers(0, 3))):  # who goes comes back
        node, (gone, back) = draw(IDS), sorted((draw(TIMES), draw(TIMES)))
        found += [attends(gone, node, False), attends(back, node, True)]
    for _ in range(draw(st.integers(0, 5))):
        kind, time, node = (
            draw(st.sampled_from(["hold", "release", "partition", "repair", "drop", "slow"])),
            draw(TIMES),
            draw(IDS),
        )
        value = {"drop": 0.5, "slow": 3.0}.get(kind, 0.0)
        found.append(happens(time, kind, node, value=value))
    found.append(happens(4.0, "release"))
    return sorted(found, key=lambda each: each[0])


@given(
    networks=st.sampled_from([("latency", "links"), ("links", "latency"), ("road", "no capacity"), ("direct",)]),
    later=st.lists(st.tuples(TIMES, st.integers(0, 2)), max_size=2),
    posts=st.lists(st.tuples(TIMES, IDS, IDS, st.integers(0, MEGABYTE)), max_size=15),
    faults=occurrences(),
)
@settings(max_examples=150, deadline=None)
def test_every_message_ends_once_as_arrived_or_lost_in_order_of_time_and_the_same_for_a_seed(
    networks: tuple[str, ...],
    later: list[tuple[float, int]],
    posts: list[tuple[float, int, int, int]],
    faults: list[tuple[float, EnvironmentEvent]],
) -> None:
    start, *_ = networks
    known = (*networks, "direct")  # links have the same numbers in all of them, or there are none
    stages = [(time, known[which % len(known)]) for time, which in later] + [(4.0, start)]  # in the end all goes on

    def run() -> list[tuple[float, str, int]]:
        deliveries = [(time, Delivery(a, b, size, i)) for i, (time, a, b, size) in enumerate(posts)]
        changes = [(time, NetworkChange(time, WIRINGS[kind]())) for time, kind in stages]
        return [
            (time, fate, delivery.content)
            for time, fate, delivery in deliver(WIRINGS[start](), deliveries, [*faults, *changes], seed=3)
        ]

    news = run()
    times = [time for time, _, _ in news]
    assert times == sorted(times)
    ends = Counter(number for _, fate, number in news if fate in ("delivered", "lost"))
    assert ends == Counter(range(len(posts)))
    for number, (posted, *_) in enumerate(posts):
        fated = [(time, fate) for time, fate, which in news if which == number]
        assert fated[0][0] >= posted
        order = [fate for _, fate in fated]
        assert order in (
            ["lost"],
            ["sent", "lost"],
            ["sent", "in_transit", "lost"],
            ["sent", "in_transit", "delivered"],
        )
    pairs: dict[tuple[int, int], list[int]] = {}
    for _, fate, number in news:
        if fate == "delivered":
            pairs.setdefault(posts[number][1:3], []).append(number)
    for numbers in pairs.values():
        assert [posts[n][0] for n in numbers] == sorted(posts[n][0] for n in numbers)
    assert run() == news
