"""Secure aggregation of some coordinates: all senders of a receiver send the same ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from secure_world import (
    ONE_MAY_FAIL,
    RecordingSharing,
    SecureWorld,
    one_receiver,
    recording_sharings,
)
from shoal.algorithms.dpsgd import DPSGD
from shoal.engines.simulation.kernel import park
from shoal.environment.network.links import Uniform
from shoal.message import Payload
from shoal.node import Node
from shoal.sharing.random import Random
from shoal.sharing.secure.coordinates import CoordinateChooser
from shoal.sharing.secure.secure import POSITIONS, SUM, WEIGHT, Secure
from shoal.sharing.sharing import NodeInfo
from shoal.sharing.topk import TopK
from shoal.topologies.static import Full as FullGraph

# Some coordinates


@pytest.mark.parametrize(
    "inner", [lambda: TopK(0.25), lambda: Random(0.25)],
    ids=["topk", "random"],
)  # fmt: skip
@pytest.mark.parametrize("failures", [None, 3, 9, 14, 20])
def test_all_senders_send_the_same_coordinates_and_sums_are_exact(inner: Any, failures: int | None) -> None:
    sharings = [RecordingSharing(inner=inner(), **ONE_MAY_FAIL) for _ in range(5)]
    world = SecureWorld(DPSGD(3), sharings, topology=FullGraph())
    if failures is not None:
        world.fails(4, failures)
    world.run()
    assert world.check_sums() >= 12
    for sharing in sharings[:4]:
        assert {len(positions) for positions in sharing.positions.values()} == {8}
    assert failures is not None or not any(node.rejected_count for node in world.nodes)


def test_coordinates_that_are_not_sent_stay_unchanged() -> None:
    world = one_receiver(
        recording_sharings(3, inner=Random(0.25)), inner=Random(0.25), models=lambda node: np.full(32, node)
    ).run()
    sharing = world.sharings[0]
    payload = np.isin(np.arange(32), sharing.positions[0])
    assert np.flatnonzero(world.nodes[0].params).tolist() == np.flatnonzero(payload).tolist()
    np.testing.assert_allclose(world.nodes[0].params[payload], 1.5, rtol=1e-6)


def changed_at(*places: int) -> Any:
    model = np.zeros(32)
    model[list(places)] = 5.0
    return model


def test_the_coordinates_are_those_that_have_changed_most_at_the_receiver() -> None:
    sharings = [RecordingSharing(inner=TopK(0.0625)) for _ in range(5)]
    world = SecureWorld(DPSGD(1), sharings, topology=FullGraph(), models=lambda node: changed_at(node, 31)).run()
    for node, sharing in enumerate(sharings):
        assert sharing.positions[0].tolist() == [node, 31]
        # Coordinates that it requested are averages; all others are its own, even if they changed at other nodes.
        assert np.flatnonzero(world.nodes[node].params).tolist() == [node, 31]
        np.testing.assert_allclose(world.nodes[node].params[[node, 31]], [1.0, 5.0], rtol=1e-6)
        # From now on change is measured from the average.
        assert np.array_equal(sharing.state()["coordinates"]["averaged"], world.nodes[node].params)


def test_coordinates_of_a_sum_that_stays_masked_are_requested_again() -> None:
    sharings = [RecordingSharing(inner=TopK(0.0625), threshold=1.0) for _ in range(5)]
    world = SecureWorld(DPSGD(2), sharings, topology=FullGraph(), models=lambda node: changed_at(node, 31))
    world.fails(4, after=8).run()  # four keys and four coordinate requests
    for node, sharing in enumerate(sharings[:4]):
        assert not sharing.sums
        assert not sharing.state()["coordinates"]["averaged"].any()
        assert sharing.requested[1].tolist() == [node, 31]


def test_a_receiver_that_requests_no_coordinates_in_time_gets_no_updates_in_that_round() -> None:
    sharings = [RecordingSharing(inner=TopK(0.25)) for _ in range(5)]
    world = SecureWorld(DPSGD(3), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0)
    world.withhold(4, lambda to, message: message.kind == "secure-support" and message.round == 1).run()
    assert {round: len(found.senders) for round, found in sharings[4].sums.items()} == {0: 4, 2: 4}
    for sharing in sharings[:4]:
        assert {round: len(found.senders) for round, found in sharing.sums.items()} == {0: 4, 1: 4, 2: 4}
    assert world.check_sums() == 14


def test_nodes_wait_less_and_less_often_for_the_coordinates_of_a_receiver_that_hangs() -> None:
    sharings = [RecordingSharing(inner=TopK(0.25)) for _ in range(6)]
    world = SecureWorld(DPSGD(6), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=5.0)
    train, trained = world.nodes[3].train, itertools.count()

    async def hang(params: Any, steps: int | None = None) -> Any:
        if next(trained) == 1:
            world.world.runtimes[3].hang()
            await park()
        return await train(params, steps)

    world.nodes[3].train = hang  # type: ignore[method-assign]
    world.run()
    for node in (0, 1, 2, 4, 5):
        assert {round: len(found.senders) for round, found in sharings[node].sums.items()} == dict(
            zip(range(6), [5, 4, 4, 4, 4, 4], strict=True)
        )
    # Nodes wait once for its coordinates, and then less and less, for its updates as well, as with any sharing; at the
    # end five times as long for its final message.
    assert 7 * 5.0 < world.world.kernel.now < 8.5 * 5.0
    world.check_sums()


@pytest.mark.parametrize("lost", [{1}, {1, 2, 3}])
@pytest.mark.parametrize("to_it", [True, False])
def test_a_node_that_was_cut_off_during_the_coordinate_exchange_takes_part_again(to_it: bool, lost: set[int]) -> None:
    sharings = [RecordingSharing(inner=TopK(0.25)) for _ in range(6)]
    world = SecureWorld(DPSGD(8), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0)
    for node in (0, 1, 2, 3, 5) if to_it else (4,):
        world.withhold(node, lambda to, m: 4 in (to, m.sender) and m.kind == "secure-support" and m.round in lost)
    world.run()
    # After three timeouts in a row, its neighbours wait for it only as long as its messages usually take: they find it
    # again when it has caught up.
    back = max(lost) + (1 if len(lost) == 1 else 3)
    for node in range(6):
        assert [len(sharings[node].sums[round].senders) for round in range(back, 8)] == [5] * (8 - back)
    assert world.check_sums() >= 6 * (8 - back)


@pytest.mark.parametrize("arrays", [{}, {"secure-support": np.zeros(3, np.uint8)}, {"secure-support": np.zeros(1)}])
def test_invalid_coordinates_are_rejected(arrays: Any) -> None:
    class Malformed(RecordingSharing):
        async def _agree_on_coordinates(self, node: Node, to: Any, round: int) -> Any:
            await node.send(to, Payload(arrays), round=round, kind="secure-support")
            return ()

    sharings = [
        *(RecordingSharing(inner=TopK(0.25), **ONE_MAY_FAIL) for _ in range(4)),
        Malformed(inner=TopK(0.25), **ONE_MAY_FAIL),
    ]
    world = SecureWorld(DPSGD(1), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0).run()
    for node in range(4):
        assert world.events(node)[0][0] == "payload rejected"
        assert len(sharings[node].sums[0].senders) == 3
    assert world.check_sums() == 4


def test_the_state_determines_the_next_coordinates() -> None:
    assert Secure().state() == {}
    Secure().restore({})
    one, other = Secure(inner=TopK(0.5)), Secure(inner=TopK(0.5))
    for sharing in (one, other):
        sharing.bind(NodeInfo(0, 3, 0, ((4,),)))
        sharing.start(np.zeros(4, np.float32))
    model = np.array([1, 2, 3, 4], np.float32)
    unmasked = Payload({SUM: np.array([1.0, 2.0]), POSITIONS: np.array([2, 3])}, {WEIGHT: 0.5})
    merged = one.merge(model, {1: unmasked, 2: unmasked}, {1: 0.25, 2: 0.25})
    other.restore(one.state())
    for sharing in (one, other):
        chooser = CoordinateChooser(np.zeros(4, np.float32), 2)
        chooser.restore(sharing.state()["coordinates"])
        assert chooser.choose(merged, 1).tolist() == [0, 1]
