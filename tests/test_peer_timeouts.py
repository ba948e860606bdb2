"""How long a node waits for peers that have timed out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shoal.peer_timeouts import PeerTimeouts
from shoal.testing import FakeRuntime


class Peers:
    """Waits for the peers 1 and 2; 2 is always in time."""

    def __init__(self) -> None:
        self.late: Counter[int] = Counter()
        self.timeouts = PeerTimeouts(lambda peer: self.late[peer])

    def wait(self, timeout: float = 1000.0) -> float:
        """Peer 1 times out: return the seconds that the node waits for it."""
        slow, wait = self.timeouts.wait_for([1, 2])
        self.timeouts.timed_out([1], timeout if 1 not in slow else 0.5)
        assert slow in ((), (1,))
        return wait if slow else timeout


def test_the_wait_shrinks_to_a_thousandth_of_the_first() -> None:
    peers = Peers()
    assert [peers.wait() for _ in range(6)] == pytest.approx([1000.0, 100.0, 10.0, 1.0, 1.0, 1.0])


def test_a_peer_that_responds_is_awaited_as_at_the_start() -> None:
    peers = Peers()
    assert [peers.wait(), peers.wait()] == [1000.0, 100.0]
    peers.timeouts.responded([2])
    assert peers.wait() == pytest.approx(10.0)
    peers.timeouts.responded([1])
    assert peers.timeouts.wait_for([1, 2]) == ((), 0.0)
    assert [peers.wait(), peers.wait()] == [1000.0, 100.0]


def test_the_next_wait_is_as_long_as_a_usual_receive_and_then_halves() -> None:
    peers = Peers()
    for seconds in (100.0, 500.0, 300.0):
        peers.timeouts.complete(seconds)  # 100, then the longer 500, then the mean of 500 and 300
    assert [peers.wait() for _ in range(5)] == pytest.approx([1000.0, 400.0, 200.0, 100.0, 50.0])


def test_the_usual_time_does_not_extend_the_wait() -> None:
    peers = Peers()
    peers.timeouts.complete(5000.0)
    assert [peers.wait() for _ in range(4)] == pytest.approx([1000.0, 1000.0, 500.0, 250.0])


def test_complete_receives_after_a_timeout_do_not_extend_the_wait() -> None:
    peers = Peers()
    waits = []
    for _ in range(5):
        waits.append(peers.wait())
        peers.timeouts.complete(900.0)  # of other peers, which were waiting as well
    assert waits == pytest.approx([1000.0, 100.0, 10.0, 1.0, 1.0])


def test_the_whole_timeout_is_used_again_after_1_2_and_4_late_messages() -> None:
    peers = Peers()
    waits = []
    for _ in range(16):
        waits.append(peers.wait())
        peers.late[1] += 1
    assert [number for number, wait in enumerate(waits) if wait == 1000.0] == [0, 1, 3, 7, 15]


def test_late_messages_of_others_do_not_count() -> None:
    peers = Peers()
    peers.wait()
    peers.late[2] += 5
    assert peers.wait() == 100.0


def test_the_longest_wait_of_several_peers_counts() -> None:
    timeouts = PeerTimeouts(lambda _: 0)
    timeouts.timed_out([1], 1000.0)
    timeouts.timed_out([1], 0.0)
    timeouts.timed_out([4], 1000.0)
    assert timeouts.wait_for([1]) == ((1,), pytest.approx(10.0))
    assert timeouts.wait_for([1, 2, 4]) == ((1, 4), pytest.approx(100.0))


@pytest.mark.parametrize(("timeout", "ends"), [(None, [10.0, 11.0, 11.1]), (10.0, [10.0, 20.0, 30.0])])
def test_a_receive_from_a_list_waits_less_unless_it_has_a_timeout(timeout: float | None, ends: list[float]) -> None:
    fake = FakeRuntime()
    node = fake.node(nodes=3, params=np.zeros(1, np.float32), receive_timeout=10.0)

    async def receive() -> list[float]:
        times = []
        for round in range(3):
            assert not await node.receive_each([1], round=round, timeout=timeout)
            times.append(node.now())
        return times

    assert fake.run(receive()) == pytest.approx(ends)


def test_a_rejoined_peer_is_awaited_for_the_whole_timeout() -> None:
    fake = FakeRuntime()
    node = fake.node(nodes=3, params=np.zeros(1, np.float32), receive_timeout=10.0)

    async def receive() -> list[float]:
        times = []
        for round in range(3):
            if round == 2:
                node.mark_rejoined(1, 2)
            await node.receive_each([1], round=round)
            times.append(node.now())
        return times

    assert fake.run(receive()) == pytest.approx([10.0, 11.0, 21.0])


@pytest.mark.parametrize(("id", "ends"), [(0, [10.0, 11.0, 11.1]), (3, [10.0, 20.0, 30.0])], ids=["node", "server"])
def test_a_server_waits_for_the_whole_timeout_if_all_clients_time_out(id: int, ends: list[float]) -> None:
    """It does not train, so its rounds would take no time: they would be over before a client has trained once."""
    fake = FakeRuntime()
    node = fake.node(id, nodes=3, params=np.zeros(1, np.float32), receive_timeout=10.0)

    async def receive() -> list[float]:
        times = []
        for round in range(3):
            assert not await node.receive_each([1, 2], round=round)
            times.append(node.now())
        return times

    assert fake.run(receive()) == pytest.approx(ends)
