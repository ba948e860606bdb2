"""The network model: exact arrival times of messages, and the messages that are lost."""

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
"""The size of a message that takes one second at 8 Mbit/s."""


def uniform(**options: Any) -> NetworkState:
    timeline = Uniform(**{"latency": 0.0, **options}).build(NODES, seed=0)
    return timeline.initial_state


class SharedLink:
    """A network in which all messages share one link. Node 0 owns the link, and no route leads to node 3."""

    def __init__(self, capacity: float, latency: float = 0.0) -> None:
        self.capacities = np.array([capacity])
        self._route = Route((0,), latency)

    def route(self, sender: int, receiver: int) -> Route | None:
        return None if receiver == 3 else self._route

    def access(self, node: int) -> tuple[int, ...]:
        return (0,) if node == 0 else ()


def sent(*times: float, size: int = MEGABYTE, pair: tuple[int, int] = (0, 1)) -> list[tuple[float, Delivery]]:
    return [(time, Delivery(*pair, size, i)) for i, time in enumerate(times)]


def deliver(
    network_state: NetworkState,
    sends: Iterable[tuple[float, Delivery]],
    events: Sequence[tuple[float, EnvironmentEvent]] = (),
    *,
    seed: int = 0,
    access_limits: Sequence[AccessLimit] = (),
) -> list[DeliveryUpdate]:
    """Return all delivery updates. At equal times, events are applied before messages are sent."""
    network_model = NetworkModel(network_state, NODES, seed, access_limits)
    updates: list[DeliveryUpdate] = []
    calls: list[tuple[float, EnvironmentEvent | Delivery]] = sorted([*events, *sends], key=lambda call: call[0])
    for time, call in calls:
        while (due := network_model.next_time()) <= time:
            updates += network_model.advance(due)
        if isinstance(call, Delivery):
            network_model.send(time, call)
        else:
            network_model.apply_event(time, call)
    while (due := network_model.next_time()) < math.inf:
        updates += network_model.advance(due)
    assert network_model.idle
    return updates


def times_of(updates: Iterable[DeliveryUpdate], status: str) -> dict[int, float]:
    """Return the time at which each message got this status."""
    return {delivery.content: pytest.approx(time, rel=1e-9) for time, found, delivery in updates if found == status}


def arrivals(*arguments: Any, **options: Any) -> dict[int, float]:
    return times_of(deliver(*arguments, **options), "delivered")


def fault(time: float, kind: Any, *nodes: int, **details: Any) -> tuple[float, EnvironmentEvent]:
    return time, FaultEvent(time, kind, nodes, **details)


def availability(time: float, node: int, online: bool) -> tuple[float, EnvironmentEvent]:
    return time, AvailabilityChange(time, node, online)


# When messages arrive


def test_without_links_every_message_takes_only_the_latency() -> None:
    assert arrivals(uniform(latency=0.25), sent(0.0, 0.0, 1.0)) == {0: 0.25, 1: 0.25, 2: 1.25}
    assert arrivals(Direct(), sent(0.5, 0.5)) == {0: 0.5, 1: 0.5}


def test_a_message_takes_its_size_divided_by_the_bandwidth_plus_the_latency() -> None:
    updates = deliver(uniform(latency=0.25, upload=8), sent(1.0))
    assert times_of(updates, "sent") == {0: 2.0}
    assert times_of(updates, "in_transit") == {0: 2.0}
    assert times_of(updates, "delivered") == {0: 2.25}
    ((_, _, delivery),) = [update for update in updates if update[1] == "in_transit"]
    assert delivery.arrival_time == pytest.approx(2.25)


def test_messages_of_one_pair_are_sent_one_after_another() -> None:
    assert arrivals(uniform(latency=0.1, upload=8), sent(0.0, 0.0, 0.5, 9.0)) == {0: 1.1, 1: 2.1, 2: 3.1, 3: 10.1}


def test_messages_share_the_upload_of_a_sender_and_the_download_of_a_receiver() -> None:
    for limit, (one, other) in (("upload", ((0, 1), (0, 2))), ("download", ((1, 0), (2, 0)))):
        sends = [(0.0, Delivery(*one, MEGABYTE, 0)), (0.0, Delivery(*other, 2 * MEGABYTE, 1))]
        # Both have half the rate until the first ends at 2 s. The rest of the other takes one more second.
        assert arrivals(uniform(**{limit: 8}), sends) == {0: 2.0, 1: 3.0}


def test_a_message_to_its_own_sender_takes_no_time() -> None:
    assert arrivals(uniform(latency=1.0, upload=1), sent(2.0, pair=(1, 1))) == {0: 2.0}


def test_a_message_without_a_route_is_lost_and_never_sent() -> None:
    updates = deliver(SharedLink(MEGABYTE), sent(1.0, pair=(0, 3)))
    assert times_of(updates, "lost") == {0: 1.0}
    assert not times_of(updates, "sent")


def test_devices_limit_and_slow_down_the_links_of_a_node() -> None:
    limits = [
        AccessLimit(bandwidth=8.0),
        AccessLimit(slowdown=4.0),
        AccessLimit(4.0, 2.0),
        AccessLimit(800.0, 0.5),
    ]
    sends = [
        (0.0, Delivery(0, 3, MEGABYTE, 0)),  # the phone's 8, not the network's 16 Mbit/s
        (10.0, Delivery(1, 3, MEGABYTE, 1)),  # 16 / 4
        (20.0, Delivery(3, 2, MEGABYTE, 2)),  # 4 / 2
    ]
    network_state = uniform(upload=16, download=16)
    assert arrivals(network_state, sends, access_limits=limits) == {0: 1.0, 1: 12.0, 2: 24.0}
    fast = [AccessLimit(slowdown=0.5)] * NODES
    assert arrivals(network_state, sent(0.0), access_limits=fast) == {0: 0.25}


def test_a_slow_network_fault_slows_down_the_links_of_a_node_and_a_slow_compute_fault_does_not() -> None:
    network_state = uniform(latency=0.25, upload=8)
    slow = fault(0.5, "slow", 0, value=4.0, what="network")
    assert arrivals(network_state, sent(0.0), [slow]) == {0: 0.5 + 0.5 * 4 + 0.25}
    recovered = fault(1.5, "slow", 0, value=1.0, what="network")
    assert arrivals(network_state, sent(0.0), [slow, recovered]) == {0: 1.5 + 0.25 + 0.25}
    assert arrivals(network_state, sent(0.0), [fault(0.5, "slow", 0, value=0.5)]) == {0: 0.5 + 0.25 + 0.25}
    for other in (fault(0.5, "slow", 0, value=4.0, what="compute"), fault(0.5, "slow", 1, value=4.0)):
        assert arrivals(network_state, sent(0.0), [other]) == {0: 1.25}


def test_a_slow_node_slows_down_other_messages_on_its_link() -> None:
    shared_link = SharedLink(MEGABYTE)
    assert arrivals(shared_link, sent(0.0, pair=(1, 2)), [fault(0.0, "slow", 0, value=2.0)]) == {0: 2.0}


# Randomness


def test_jitter_has_the_expected_mean_and_standard_deviation() -> None:
    count = 4000
    updates = deliver(uniform(latency=1.0, jitter=0.1), sent(*(10.0 * i for i in range(count))))
    durations = np.array(
        [time - 10.0 * delivery.content for time, status, delivery in updates if status == "delivered"]
    )
    assert len(durations) == count
    assert abs(durations.mean() - 1.0) < 5 * 0.1 / math.sqrt(count)
    assert abs(durations.std() - 0.1) < 5 * 0.1 / math.sqrt(2 * count)


def test_jitter_never_reorders_messages_of_a_pair_or_delivers_before_sending() -> None:
    updates = deliver(uniform(latency=0.1, jitter=1.0), sent(*(0.01 * i for i in range(300))))
    arrived = [(time, delivery.content) for time, status, delivery in updates if status == "delivered"]
    assert [number for _, number in arrived] == list(range(300))
    assert all(time >= 0.01 * number for time, number in arrived)


@pytest.mark.parametrize(("loss", "drop"), [(0.2, 0.0), (0.0, 0.3), (0.2, 0.3), (0.0, 1.0), (1.0, 0.0)])
def test_losses_and_drops_are_independent_and_binomial(loss: float, drop: float) -> None:
    count = 4000
    faults = [fault(0.0, "drop", 0, value=drop)] if drop else []
    updates = deliver(uniform(latency=0.1, loss=loss), sent(*(float(i) for i in range(count))), faults)
    lost, expected = len(times_of(updates, "lost")), 1 - (1 - loss) * (1 - drop)
    assert abs(lost - count * expected) <= 4.5 * math.sqrt(count * expected * (1 - expected))
    assert len(times_of(updates, "delivered")) == count - lost
    assert len(times_of(updates, "sent")) == count


def test_a_lost_message_uses_bandwidth() -> None:
    drop = [fault(0.0, "drop", 0, others=(1,), value=1.0)]
    sends = [(0.0, Delivery(0, 1, MEGABYTE, 0)), (0.0, Delivery(0, 2, MEGABYTE, 1))]
    updates = deliver(uniform(upload=8), sends, drop)
    assert times_of(updates, "lost") == {0: 2.0}
    assert times_of(updates, "delivered") == {1: 2.0}


# Faults between nodes


def test_held_messages_leave_the_sender_wait_and_are_released_in_order() -> None:
    network_state = uniform(latency=0.1, upload=8)
    hold = [fault(0.5, "hold", 0), fault(5.0, "release", 0)]
    updates = deliver(network_state, sent(0.0, 1.0, 1.5, 5.5), hold)
    assert times_of(updates, "sent") == {0: 1.0, 1: 1.0, 2: 1.5, 3: 8.0}
    assert times_of(updates, "delivered") == {0: 1.1, 1: 6.1, 2: 7.1, 3: 8.1}  # the first was in transit


def test_a_partition_loses_messages_in_transit_even_if_it_is_repaired_before_they_arrive() -> None:
    network_state = uniform(latency=1.0, upload=8)
    cut = [fault(1.5, "partition", 0, others=(1,)), fault(1.75, "repair", 0, others=(1,))]
    others = [(0.0, Delivery(0, 2, MEGABYTE // 2, "to another"))]
    updates = deliver(network_state, sent(0.0, 0.0, 0.0, 1.6, 2.0), cut)
    # In transit, being sent, queued; sent during the partition; sent after the repair.
    assert times_of(updates, "lost") == {0: 1.5, 1: 1.5, 2: 1.5, 3: 1.6}
    assert times_of(updates, "delivered") == {4: 4.0}
    assert set(times_of(updates, "sent")) == {0, 4}
    assert times_of(deliver(network_state, others, cut), "delivered") == {"to another": 1.5}


def test_a_partition_loses_held_messages() -> None:
    faults = [fault(0.0, "hold", 0), fault(1.0, "partition", 0, others=(1,)), fault(2.0, "release", 0)]
    assert times_of(deliver(uniform(latency=0.1), sent(0.5), faults), "lost") == {0: 1.0}


# Nodes that go offline


def test_messages_to_a_node_are_lost_when_it_goes_offline_even_for_a_moment() -> None:
    network_state = uniform(latency=1.0, upload=8)
    updates = deliver(
        network_state, sent(0.0, 0.0, 0.0, 1.7), [availability(1.5, 1, False), availability(1.6, 1, True)]
    )
    assert times_of(updates, "lost") == {0: 1.5, 1: 1.5, 2: 1.5}
    assert times_of(updates, "delivered") == {3: 3.7}


def test_when_a_node_goes_offline_its_sent_messages_arrive_and_its_unsent_messages_are_lost() -> None:
    network_state = uniform(latency=1.0, upload=8)
    updates = deliver(network_state, sent(0.0, 0.0, 0.0), [availability(1.5, 0, False)])
    assert times_of(updates, "delivered") == {0: 2.0}
    assert times_of(updates, "lost") == {1: 1.5, 2: 1.5}
    assert set(times_of(updates, "sent")) == {0}


def test_held_messages_arrive_even_if_their_sender_goes_offline() -> None:
    faults = [fault(0.0, "hold", 0), availability(1.0, 0, False), fault(2.0, "release", 0)]
    assert arrivals(uniform(latency=0.1, upload=8), sent(0.5), faults) == {0: 3.1}


def test_a_node_exchanges_no_messages_until_it_is_online_and_restarted() -> None:
    away = [availability(1.0, 1, False), fault(2.0, "crash", 1), availability(3.0, 1, True), fault(4.0, "restart", 1)]
    updates = deliver(uniform(latency=0.1), [*sent(1.5, 3.5, 4.5), (3.6, Delivery(1, 0, 9, "from node 1"))], away)
    assert times_of(updates, "lost") == {0: 1.5, 1: 3.5, "from node 1": 3.6}
    assert times_of(updates, "delivered") == {2: 4.6}


# Network changes


def test_after_a_network_change_the_rest_of_a_message_takes_the_new_route() -> None:
    slower = uniform(latency=0.5, upload=8, download=4)
    assert arrivals(uniform(upload=8), sent(0.0), [(0.25, NetworkChange(0.25, slower))]) == {0: 0.25 + 0.75 * 2 + 0.5}
    at_once = (0.25, NetworkChange(0.25, uniform(latency=0.5)))
    assert arrivals(uniform(upload=8), sent(0.0, 0.0), [at_once]) == {0: 0.75, 1: 0.75}


def test_after_a_change_to_a_route_without_links_or_to_no_route_queued_messages_do_not_wait() -> None:
    without = (0.25, NetworkChange(0.25, Direct()))
    assert arrivals(SharedLink(MEGABYTE), sent(0.0, 0.0, pair=(1, 2)), [without]) == {0: 0.25, 1: 0.25}

    class Cut(SharedLink):
        def route(self, sender: int, receiver: int) -> None:
            return None

    updates = deliver(SharedLink(MEGABYTE), sent(0.0, 0.0), [(0.25, NetworkChange(0.25, Cut(MEGABYTE)))])
    assert times_of(updates, "lost") == {0: 0.25, 1: 0.25}


def test_shares_follow_the_round_trip_times_of_the_new_network() -> None:
    near = [{"from": "0", "to": "2", "latency": 0.1}]
    before = uniform(latency=0.1, upload=8)
    after = uniform(latency=0.3, upload=8, links=tuple(near))
    sends = [(0.0, Delivery(0, 1, MEGABYTE, 0)), (0.0, Delivery(0, 2, MEGABYTE, 1))]
    # From 1 s on, the flow with a third of the round-trip time gets three quarters of the link: its half takes 2/3 s.
    updates = deliver(before, sends, [(1.0, NetworkChange(1.0, after))])
    assert times_of(updates, "sent") == {1: 1.0 + 0.5 / 0.75, 0: 2.0}


def test_a_message_on_a_link_without_capacity_continues_when_the_link_gets_capacity() -> None:
    network_model = NetworkModel(SharedLink(0.0), NODES, 0)
    network_model.send(0.0, Delivery(1, 2, MEGABYTE))
    assert network_model.idle
    network_model.apply_event(5.0, NetworkChange(5.0, SharedLink(MEGABYTE)))
    assert not network_model.idle
    assert network_model.next_time() == pytest.approx(6.0)


# Invariants for all events

TIMES = st.floats(0.0, 3.0).map(lambda time: round(time, 3))
IDS = st.integers(0, NODES - 1)
NETWORK_STATES = {
    "latency": lambda: uniform(latency=0.2, jitter=0.1, loss=0.1),
    "links": lambda: uniform(latency=0.1, upload=8, download=16, jitter=0.05, loss=0.1),
    "shared link": lambda: SharedLink(2.0 * MEGABIT, 0.05),
    "no capacity": lambda: SharedLink(0.0),
    "direct": Direct,
}


@st.composite
def events(draw: st.DrawFn) -> list[tuple[float, EnvironmentEvent]]:
    found: list[tuple[float, EnvironmentEvent]] = []
    for _ in range(draw(st.integers(0, 3))):  # every node that goes offline comes online again
        node, (offline, online) = draw(IDS), sorted((draw(TIMES), draw(TIMES)))
        found += [availability(offline, node, False), availability(online, node, True)]
    for _ in range(draw(st.integers(0, 5))):
        kind, time, node = (
            draw(st.sampled_from(["hold", "release", "partition", "repair", "drop", "slow"])),
            draw(TIMES),
            draw(IDS),
        )
        value = {"drop": 0.5, "slow": 3.0}.get(kind, 0.0)
        found.append(fault(time, kind, node, value=value))
    found.append(fault(4.0, "release"))
    return sorted(found, key=lambda each: each[0])


@given(
    networks=st.sampled_from([("latency", "links"), ("links", "latency"), ("shared link", "no capacity"), ("direct",)]),
    later=st.lists(st.tuples(TIMES, st.integers(0, 2)), max_size=2),
    sends=st.lists(st.tuples(TIMES, IDS, IDS, st.integers(0, MEGABYTE)), max_size=15),
    faults=events(),
)
@settings(max_examples=150, deadline=None)
def test_every_message_is_delivered_or_lost_once_in_order_of_time_and_reproducibly(
    networks: tuple[str, ...],
    later: list[tuple[float, int]],
    sends: list[tuple[float, int, int, int]],
    faults: list[tuple[float, EnvironmentEvent]],
) -> None:
    start, *_ = networks
    known = (*networks, "direct")  # all of them number the links alike, or have none
    later_states = [(time, known[which % len(known)]) for time, which in later] + [
        (4.0, start)
    ]  # all messages can continue at the end

    def run() -> list[tuple[float, str, int]]:
        deliveries = [(time, Delivery(a, b, size, i)) for i, (time, a, b, size) in enumerate(sends)]
        changes = [(time, NetworkChange(time, NETWORK_STATES[kind]())) for time, kind in later_states]
        return [
            (time, status, delivery.content)
            for time, status, delivery in deliver(NETWORK_STATES[start](), deliveries, [*faults, *changes], seed=3)
        ]

    updates = run()
    times = [time for time, _, _ in updates]
    assert times == sorted(times)
    ends = Counter(number for _, status, number in updates if status in ("delivered", "lost"))
    assert ends == Counter(range(len(sends)))
    for number, (sent_at, *_) in enumerate(sends):
        history = [(time, status) for time, status, which in updates if which == number]
        assert history[0][0] >= sent_at
        order = [status for _, status in history]
        assert order in (
            ["lost"],
            ["sent", "lost"],
            ["sent", "in_transit", "lost"],
            ["sent", "in_transit", "delivered"],
        )
    pairs: dict[tuple[int, int], list[int]] = {}
    for _, status, number in updates:
        if status == "delivered":
            pairs.setdefault(sends[number][1:3], []).append(number)
    for numbers in pairs.values():
        assert [sends[n][0] for n in numbers] == sorted(sends[n][0] for n in numbers)
    assert run() == updates
