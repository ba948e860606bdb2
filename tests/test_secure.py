"""Secure aggregation: sums are exact despite failures and invalid messages, and no model is visible."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secure_world import RUN, PlayedPeers, RandomGraph, RecordingSharing, SecureWorld, one_receiver, recording_sharings
from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.el_local import ELLocal
from shoal.algorithms.fedavg import FedAvg
from shoal.engines.simulation.kernel import park
from shoal.environment.network.links import Uniform
from shoal.errors import PrivacyError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.full import FullSharing
from shoal.sharing.random import Random
from shoal.sharing.secure import shamir
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.key_exchange import KeyExchange
from shoal.sharing.secure.masks import Keys, commitment
from shoal.sharing.secure.messages import ProtocolRound, to_node_ids, to_rows
from shoal.sharing.secure.responder import UnmaskingResponder
from shoal.sharing.secure.secure import Secure
from shoal.sharing.sharing import NodeInfo
from shoal.sharing.topk import TopK
from shoal.topologies.static import Full as FullGraph
from test_secure_parts import unevenness

# Sums are exact


@st.composite
def worlds(draw: Any) -> tuple[SecureWorld, dict[int, int], Any]:
    nodes = draw(st.integers(3, 8))
    options = {
        "bits": draw(st.sampled_from([32, 64])),
        "range": draw(st.sampled_from([16.0, 100.0])),
        "threshold": draw(st.sampled_from([0.1, 0.5, 0.75, 1.0])),
        "partners": draw(st.sampled_from([2, 4, 6])),
        "few": draw(st.sampled_from(["plain", "refuse"])),
    }
    algorithm = draw(st.sampled_from([DPSGD(3), DPSGD(3, overlap=True), FedAvg(3, 0.7), ELLocal(3, 2)]))
    network = draw(st.sampled_from([None, Uniform(0.1), Uniform(0.1, upload=0.01, jitter=0.05)]))
    topology = RandomGraph(draw(st.floats(0.3, 1.0)), draw(st.booleans()))
    failures = draw(st.dictionaries(st.integers(0, nodes - 1), st.integers(0, 30), max_size=2))
    inners = [FullSharing, lambda: Random(0.5)]
    if not hasattr(algorithm, "serve"):
        inners += [lambda: TopK(0.5)]
    inner = draw(st.sampled_from(inners))
    sharings = [RecordingSharing(**options, inner=inner()) for _ in range(nodes + hasattr(algorithm, "serve"))]
    seed = draw(st.integers(0, 2**32))
    world = SecureWorld(algorithm, sharings, topology=topology, network=network, size=512, seed=seed)
    for node, after in failures.items():
        world.fails(node, after)
    return world, failures, algorithm


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds())
def test_sums_are_exact_and_masked_updates_look_random_for_all_graphs_weights_and_failures(drawn: Any) -> None:
    world, failures, algorithm = drawn
    world.run()  # raises if a node waits forever
    world.check_sums()
    for receiver, sharing in enumerate(world.sharings):
        if receiver in failures or (receiver == world.training_nodes) != hasattr(algorithm, "serve"):
            continue
        for round, received in sharing.received.items():
            senders = sharing.weights[round]
            protocol_round = ProtocolRound(
                receiver, round, senders, sharing.partners, sharing.threshold, world.nodes[0].seed
            )
            assert protocol_round.masked or sharing.few == "plain" or not received
            if not protocol_round.masked:
                continue
            if round in sharing.sums:
                assert len(sharing.sums[round].senders) >= protocol_round.senders_needed
                assert failures or set(sharing.sums[round].senders) == senders.keys()
            else:
                assert failures
                assert any(
                    w == "sum not unmasked" and d.startswith(f"round {round}:") for w, d in world.events(receiver)
                )
            for sender, payload in received.items():
                values = payload.arrays["words"]
                # The sign and the free bit are equal in all unmasked values: for 256 values the statistic is at least
                # 100. For masked values it exceeds 25 less often than once in 10¹² times.
                assert unevenness((values >> (sharing.bits - 2)).astype(np.int64), 4) < 25
                if round in sharing.sums:
                    assert np.count_nonzero(values == world.expected(receiver, round, [sender])) <= 2
    # A node that fails while its key is in transit has masked with a node that does not have it: a mismatch.
    assert failures or not any(node.rejected_count for node in world.nodes)


@pytest.mark.parametrize(("nodes", "threshold"), [(5, 0.5), (6, 0.75)])
def test_a_failure_at_any_moment_removes_at_most_the_failed_node_from_sums(nodes: int, threshold: float) -> None:
    recovered = included = 0
    failing, others = nodes - 1, set(range(nodes - 1))
    for after in itertools.count():
        world = SecureWorld(DPSGD(2), recording_sharings(nodes, threshold=threshold), topology=FullGraph()).fails(
            failing, after
        )
        world.run()
        world.check_sums()
        for node in others:
            sums = world.sharings[node].sums
            assert set(sums) == {0, 1}
            assert all(others <= {*found.senders, node} for found in sums.values())
            included += failing in sums[1].senders
        recovered += any(message.kind == "secure-help" for _, message in world.sent)
        if not world.world.runtimes[failing].failed:
            break
    assert after > 20  # messages: keys, updates, seeds, final messages
    assert recovered > 5
    assert included > 20


@pytest.mark.parametrize("failed", [(3, 4), (1, 4), (1, 2)])
def test_nodes_that_fail_after_their_updates_are_in_the_sum(failed: tuple[int, int]) -> None:
    world = one_receiver(recording_sharings(5))
    for node in failed:
        world.fails(node, after=5)  # four keys and the update; the seeds come next
    world.run()
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4, 5)
    assert world.check_sums() == 1


def test_below_the_threshold_the_model_stays_unchanged_and_an_event_is_recorded() -> None:
    world = one_receiver(recording_sharings(4, threshold=0.75), models=lambda node: np.full(32, node + 1.0))
    world.fails(3, after=3).fails(4, after=3).run()
    assert world.events(0) == [
        ("sum not unmasked", "round 0: 2 of 4 updates are in the sum, and 4 are needed; the model stays unchanged")
    ]
    assert (world.nodes[0].params == 1.0).all()
    assert not any(message.kind == "secure-open" for _, message in world.sent)


def test_the_model_stays_unchanged_if_too_few_key_shares_are_left() -> None:
    world = one_receiver(recording_sharings(4, threshold=0.6), models=lambda node: np.full(32, node + 1.0))
    for node in (2, 3, 4):
        world.fails(node, after=4)
    world.run()
    (_, why) = world.events(0)[0]
    assert why == (
        "round 0: node 2 did not unmask its update, and 1 of its key shares arrived, but 2 are needed; "
        "the model stays unchanged"
    )
    assert (world.nodes[0].params == 1.0).all()


def test_on_a_ring_the_neighbours_of_a_failed_node_keep_their_models_and_do_not_hang() -> None:
    world = SecureWorld(DPSGD(3), recording_sharings(5)).fails(2, after=2)  # it has sent its key to both others
    world.run()
    for node in (1, 3):
        assert [what for what, _ in world.events(node)] == ["sum not unmasked"] * 3
    assert set(world.sharings[0].sums) == set(world.sharings[4].sums) == {0, 1, 2}
    world.check_sums()


def test_keys_are_exchanged_with_partners_of_late_rounds() -> None:
    """In a changing graph, long after the first keys were sent."""
    world = SecureWorld(ELLocal(25, 2), recording_sharings(30)).run()
    late = [message.sender for _, message in world.sent[len(world.sent) // 2 :] if message.kind == "secure-key"]
    assert len(late) > 20
    world.check_sums()


def test_a_node_that_hangs_before_it_sends_its_key_delays_the_others_once() -> None:
    world = SecureWorld(FedAvg(4), recording_sharings(5), receive_timeout=5.0)

    async def hang(params: Any, steps: int | None = None) -> Any:
        world.world.runtimes[3].hang()
        await park()

    world.nodes[3].train = hang  # type: ignore[method-assign]
    world.run()
    assert world.events(0)[0] == ("key timed out", "no key from node 3: this node does not mask with it")
    server = world.sharings[4]
    assert [server.sums[r].senders for r in (1, 2, 3)] == [(0, 1, 2)] * 3
    world.check_sums()


def test_a_lost_key_is_requested_again_and_excludes_a_node_only_briefly() -> None:
    world = SecureWorld(
        DPSGD(6), recording_sharings(6), topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0
    )
    lost = iter([True])
    world.withhold(1, lambda to, message: message.kind == "secure-key" and to == 4 and next(lost, False)).run()
    again = [(m.sender, to) for to, m in world.sent if m.kind == "secure-key" and "again" in m.payload.fields]
    assert set(again) == {(4, 1)}
    assert len(again) <= 3  # until the answer arrives
    for sharing in world.sharings:
        assert [len(sharing.sums[round].senders) for round in (4, 5)] == [5, 5]
    assert [what for what, _ in world.events(4)].count("key timed out") == 1
    # No node is at fault.
    left_out = ("excluded from sum", "round 0: node 4 and 1 have not masked with each other: a key is missing")
    assert world.events(0)[0] == left_out
    assert {what for what, _ in world.events(0)} == {"excluded from sum"}
    assert not any(node.rejected_count for node in world.nodes)
    world.check_sums()


def test_two_nodes_whose_keys_are_both_lost_exchange_them_later() -> None:
    world = SecureWorld(
        DPSGD(6), recording_sharings(6), topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0
    )
    for node, other in ((1, 4), (4, 1)):
        lost = iter([True])
        world.withhold(node, lambda to, m, o=other, lost=lost: m.kind == "secure-key" and to == o and next(lost, False))
    world.run()
    for sharing in world.sharings:
        assert len(sharing.sums[5].senders) == 5
    world.check_sums()


def test_a_second_key_changes_nothing_and_a_different_one_is_rejected() -> None:
    peers = PlayedPeers()
    for public in (Keys(RUN).public, b"short", peers.keys[2].public):
        payload = {"secure-key": np.frombuffer(public, np.uint8)}
        peers.fake.deliver(peers.message(2, "secure-key", **payload), at=1.0)
    peers.ask_to_unmask(1, 2, 3, 4).send(rounds=2, pause=5.0)
    assert peers.rejections() == [
        "from node 2: a second, different key; the first one stays in use",
        "from node 2: expected a public key, 32 bytes",
    ]
    assert peers.update(1).commitments[1] == commitment(peers.keys[2].pair_secrets(1, 0, 1).seed, 0, 1)


# Against plain averaging


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("algorithm", [DPSGD(1), DPSGD(1, overlap=True), ELLocal(1, 3), FedAvg(1)], ids=repr)
def test_models_equal_those_of_plain_averaging_up_to_rounding(algorithm: Any, bits: Any) -> None:
    count = 6 + hasattr(algorithm, "serve")
    drawn = np.random.default_rng(3).uniform(-40, 40, (count, 500)).astype(np.float32)
    some = {"topology": FullGraph(), "size": 500, "models": lambda node: drawn[node]}
    plain = SecureWorld(algorithm, [FullSharing() for _ in range(count)], **some)
    for node in plain.nodes:
        plain.world.runtimes[node.id].start(plain._live(node))
    plain.world.kernel.run()
    hidden = SecureWorld(algorithm, recording_sharings(count, bits=bits, few="plain"), **some).run()
    for one, other in zip(plain.nodes, hidden.nodes, strict=True):
        assert np.abs(one.params).max() > 10
        # Most of the difference comes from plain averaging in single precision.
        assert np.abs(one.params - other.params).max() <= 64 * 2.0**-18


def test_after_a_failure_the_others_have_the_weights_of_plain_averaging() -> None:
    drawn = np.random.default_rng(3).uniform(-40, 40, (5, 100)).astype(np.float32)
    world = one_receiver(recording_sharings(4), size=100, models=lambda node: drawn[node]).fails(2, after=3).run()
    # Node 0 and its four neighbours have weight 1/5 each, so with three of them it is 1/4 each.
    np.testing.assert_allclose(world.nodes[0].params, drawn[[0, 1, 3, 4]].astype(np.float64).mean(0), atol=64 * 2**-18)


# Some coordinates


@pytest.mark.parametrize(
    "inner", [lambda: TopK(0.25), lambda: Random(0.25)],
    ids=["topk", "random"],
)  # fmt: skip
@pytest.mark.parametrize("failures", [None, 3, 9, 14, 20])
def test_all_senders_send_the_same_coordinates_and_sums_are_exact(inner: Any, failures: int | None) -> None:
    sharings = [RecordingSharing(inner=inner()) for _ in range(5)]
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
        assert np.array_equal(sharing._coordinates.chooser._averaged, world.nodes[node].params)


def test_coordinates_of_a_sum_that_stays_masked_are_requested_again() -> None:
    sharings = [RecordingSharing(inner=TopK(0.0625), threshold=1.0) for _ in range(5)]
    world = SecureWorld(DPSGD(2), sharings, topology=FullGraph(), models=lambda node: changed_at(node, 31))
    world.fails(4, after=8).run()  # four keys and four coordinate requests
    for node, sharing in enumerate(sharings[:4]):
        assert not sharing.sums
        assert not sharing._coordinates.chooser._averaged.any()
        assert sharing._positions[node].tolist() == [node, 31]


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
    # Nodes wait for its updates in each of five rounds, as with any sharing; in three of them also for its coordinates,
    # and at the end five times as long for its final message.
    assert 13 * 5.0 < world.world.kernel.now < 15 * 5.0
    world.check_sums()


@pytest.mark.parametrize("lost", [{1}, {1, 2, 3}])
@pytest.mark.parametrize("to_it", [True, False])
def test_a_node_that_was_cut_off_during_the_coordinate_exchange_takes_part_again(to_it: bool, lost: set[int]) -> None:
    sharings = [RecordingSharing(inner=TopK(0.25)) for _ in range(6)]
    world = SecureWorld(DPSGD(8), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0)
    for node in (0, 1, 2, 3, 5) if to_it else (4,):
        world.withhold(node, lambda to, m: 4 in (to, m.sender) and m.kind == "secure-support" and m.round in lost)
    world.run()
    back = max(lost) + 1
    for node in range(6):
        assert [len(sharings[node].sums[round].senders) for round in range(back, 8)] == [5] * (8 - back)
    assert world.check_sums() >= 6 * (8 - back)


@pytest.mark.parametrize("arrays", [{}, {"secure-support": np.zeros(3, np.uint8)}, {"secure-support": np.zeros(1)}])
def test_invalid_coordinates_are_rejected(arrays: Any) -> None:
    class Malformed(RecordingSharing):
        async def _agree_on_coordinates(self, node: Node, to: Any, round: int) -> Any:
            await node.send(to, Payload(arrays), round=round, kind="secure-support")
            return ()

    sharings = [*(RecordingSharing(inner=TopK(0.25)) for _ in range(4)), Malformed(inner=TopK(0.25))]
    world = SecureWorld(DPSGD(1), sharings, topology=FullGraph(), network=Uniform(0.1), receive_timeout=3.0).run()
    for node in range(4):
        assert world.events(node)[0][0] == "payload rejected"
        assert len(sharings[node].sums[0].senders) == 3
    assert world.check_sums() == 4


class LyingSharing(RecordingSharing):
    """Changes its payloads with the function `lie`."""

    lie: Any = None

    def _update(self, receiver: int, params: Any, round: int) -> Payload:
        payload = super()._update(receiver, params, round)
        return payload if self.lie is None else self.lie(payload, receiver, round)


def lying(lie: Callable[..., Payload], **options: Any) -> LyingSharing:
    sharing = LyingSharing(**options)
    sharing.lie = lie
    return sharing


def altered(**arrays: Any) -> Callable[..., Payload]:
    """Return a function that replaces arrays, removes those given as None, and sets fields given as booleans."""

    def lie(payload: Payload, receiver: int, round: int) -> Payload:
        made = {**payload.arrays, **{k: v(payload.arrays[k]) for k, v in arrays.items() if callable(v)}}
        fields = {k: v for k, v in arrays.items() if isinstance(v, bool)}
        return Payload({k: v for k, v in made.items() if arrays.get(k, 0) is not None}, fields)

    return lie


NOT_MASKS = "its masks do not match those of 1, 3, 4: another key, or another round"


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (altered(words=lambda a: a.astype(np.uint64)), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(words=lambda a: a.astype(np.float32)), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(words=lambda a: a[:-1]), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(words=lambda a: a.reshape(2, 16)), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(words=None), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(seals=None), "expected 'seals', or the field 'plain' if the update is not masked"),
        (altered(plain=True), "expected 'seals', or the field 'plain' if the update is not masked"),
        (altered(plain=True, seals=None), "its update is not masked"),
        (altered(seals=lambda a: a[:-1]), "expected 4 commitments 'seals' of 16 bytes each"),
        (altered(seals=lambda a: a.astype(np.int8)), "expected 4 commitments 'seals' of 16 bytes each"),
        (altered(seals=lambda a: a[:, 0]), "expected 4 commitments 'seals' of 16 bytes each"),
        (altered(shares=None), "expected 3 encrypted key shares 'shares' of 80 bytes each"),
        (altered(shares=lambda a: a[:, :-1]), "expected 3 encrypted key shares 'shares' of 80 bytes each"),
        (altered(shares=lambda a: a.astype(np.uint16)), "expected 3 encrypted key shares 'shares' of 80 bytes each"),
        (altered(seals=lambda a: a ^ np.uint8(1)), NOT_MASKS),
    ],
)  # fmt: skip
def test_invalid_updates_are_rejected_and_the_sum_of_the_others_is_unmasked(lie: Any, why: str) -> None:
    senders = [RecordingSharing(), lying(lie), RecordingSharing(), RecordingSharing()]
    world = one_receiver(senders).run()
    assert world.events(0) == [("payload rejected", f"from node 2: {why}")]
    assert world.nodes[0].rejected_count == 1
    assert world.sharings[0].sums[0].senders == (1, 3, 4)
    assert world.check_sums() == 1


def test_updates_of_another_round_are_rejected() -> None:
    kept: list[Payload] = []

    def replay(payload: Payload, receiver: int, round: int) -> Payload:
        kept.append(payload)
        return kept[0]

    world = one_receiver([RecordingSharing(), lying(replay), RecordingSharing(), RecordingSharing()], rounds=3).run()
    assert [found.senders for found in world.sharings[0].sums.values()] == [(1, 2, 3, 4), (1, 3, 4), (1, 3, 4)]
    assert world.events(0) == [("payload rejected", f"from node 2: {NOT_MASKS}")] * 2
    assert world.check_sums() == 3


def test_updates_for_another_receiver_are_rejected() -> None:
    kept: list[Payload] = []

    def misdirect(payload: Payload, receiver: int, round: int) -> Payload:
        kept.append(payload)
        return kept[0]  # the update for node 0, for all receivers

    world = SecureWorld(DPSGD(1), [*recording_sharings(4), lying(misdirect)], topology=FullGraph()).run()
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4)
    for node in (1, 2, 3):
        assert set(world.sharings[node].sums[0].senders) == {0, 1, 2, 3} - {node}
    assert world.check_sums() == 5


def test_a_repeated_message_changes_nothing() -> None:
    world = SecureWorld(DPSGD(3), recording_sharings(5), topology=FullGraph())
    for runtime in world.world.runtimes:

        async def twice(to: int, message: Message, send: Any = runtime.send) -> bool:
            await send(to, message)
            return bool(await send(to, message))

        runtime.send = twice  # type: ignore[method-assign]
    world.run()
    assert world.check_sums() == 15
    assert all(len(found.senders) == 4 for sharing in world.sharings for found in sharing.sums.values())
    assert not any(node.rejected_count for node in world.nodes)


# Keys


class AnotherKey(KeyExchange):
    """Sends one key and masks with another."""

    async def run(self, node: Node, partners: set[int]) -> None:
        await super().run(node, partners)
        assert self._keys is not None
        told, self._keys = self._keys, Keys(RUN)
        for peer, public in told._publics.items():
            self._keys.agree(peer, public)


class WithKey(KeyExchange):
    """Sends the given key."""

    def __init__(self, told: Keys | bytes) -> None:
        super().__init__()
        self._keys = Keys(RUN)
        if isinstance(told, Keys):
            self._keys._private, self._keys.public = told._private, told.public
        else:
            self._keys.public = told


def exchanging(exchange: KeyExchange) -> RecordingSharing:
    sharing = RecordingSharing()
    sharing._key_exchange = exchange
    return sharing


def test_a_node_that_masks_with_another_key_than_it_sent_is_excluded() -> None:
    world = one_receiver(
        [RecordingSharing(), exchanging(AnotherKey()), RecordingSharing(), RecordingSharing()], rounds=2
    ).run()
    assert world.events(0) == [("payload rejected", f"from node 2: {NOT_MASKS}")] * 2
    assert [found.senders for found in world.sharings[0].sums.values()] == [(1, 3, 4)] * 2
    assert world.check_sums() == 2


def test_the_sum_of_two_updates_that_do_not_match_stays_masked() -> None:
    world = one_receiver([RecordingSharing(), exchanging(AnotherKey())]).run()
    assert world.events(0)[0] == (
        "payload rejected", "from node 2: its masks do not match those of 1: another key, or another round",
    )  # fmt: skip
    assert world.events(0)[1][1].startswith("round 0: 1 of 2 updates are in the sum, and 2 are needed")
    assert not world.sharings[0].sums


def test_a_key_that_two_nodes_send_is_rejected_for_both() -> None:
    twin = Keys(RUN)
    world = one_receiver(
        [RecordingSharing(), exchanging(WithKey(twin)), exchanging(WithKey(twin)), *recording_sharings(2)], rounds=2
    ).run()
    for node in (1, 4, 5):
        assert world.events(node) == [
            ("payload rejected", "from node 2: its key is also the key of node 3: the true owner is unknown"),
            ("payload rejected", "from node 3: its key is also the key of node 2; every node needs its own key"),
        ]
    assert world.events(2)[0][1] == ("from node 3: its key is this node's own key; every node needs its own key")
    assert [found.senders for found in world.sharings[0].sums.values()] == [(1, 4, 5)] * 2
    assert world.check_sums() == 2


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (bytes(32), "its key is not valid for a key agreement"),
        (b"short", "expected a public key, 32 bytes"),
    ],
)
def test_an_invalid_key_is_rejected_and_its_owner_excluded(told: bytes, why: str) -> None:
    world = one_receiver(
        [RecordingSharing(), exchanging(WithKey(told)), RecordingSharing(), RecordingSharing()], rounds=2
    ).run()
    for node in (1, 3, 4):
        ((what, detail),) = world.events(node)
        assert what == "payload rejected"
        assert detail.startswith(f"from node 2: {why}")
    assert [found.senders for found in world.sharings[0].sums.values()] == [(1, 3, 4)] * 2
    assert world.check_sums() == 2


def test_a_node_without_mask_partners_is_excluded_and_stays_hidden() -> None:
    class Isolated(WithKey):
        """Rejects all keys, and sends an invalid one."""

        async def run(self, node: Node, partners: set[int]) -> None:
            self.rejected.update(partners)
            await super().run(node, partners)

    world = one_receiver(
        [RecordingSharing(), exchanging(Isolated(bytes(32))), RecordingSharing(), RecordingSharing()]
    ).run()
    assert world.events(0) == [("excluded from sum", "round 0: too few partners have masked with 2")]
    assert world.sharings[0].sums[0].senders == (1, 3, 4)
    assert world.check_sums() == 1
    values, model = world.sharings[0].received[0][2].arrays["words"], world.sharings[2].models[0]
    assert not np.array_equal(values, FixedPoint(32, 64.0).encode(model, 0.2))


# Seeds and key shares


def test_two_halves_that_have_not_masked_with_each_other_are_not_unmasked_as_one_sum() -> None:
    """Each half would be a separate sum with too few senders."""
    senders = recording_sharings(6, threshold=0.3)
    for node, sharing in enumerate(senders, 1):
        sharing._key_exchange.rejected.update({4, 5, 6} if node <= 3 else {1, 2, 3})
    world = one_receiver(senders).run()
    (closed,) = world.events(0)
    assert closed[0] == "sum not unmasked"
    assert "some senders did not mask with others, and parts of the sum would be visible" in closed[1]
    assert not any(message.kind == "secure-open" for _, message in world.sent)


class LyingResponder(UnmaskingResponder):
    """Changes its answers with the given functions."""

    def __init__(self, opened: Any = None, recovered: Any = None) -> None:
        super().__init__()
        self.lies = opened, recovered

    def seeds(self, node: Node, keys: Keys, asked: Message) -> Payload:
        payload = super().seeds(node, keys, asked)
        return payload if self.lies[0] is None else self.lies[0](payload)

    def key_shares(self, node: Node, keys: Keys, asked: Message) -> Payload:
        payload = super().key_shares(node, keys, asked)
        return payload if self.lies[1] is None else self.lies[1](payload)


def with_answers(opened: Any = None, recovered: Any = None, **options: Any) -> RecordingSharing:
    sharing = RecordingSharing(**options)
    sharing._responder = LyingResponder(opened, recovered)
    return sharing


def forging(**options: Any) -> RecordingSharing:
    """Reveals forged key shares."""
    return with_answers(
        recovered=lambda p: Payload({**p.arrays, "shares": p.arrays["shares"] ^ np.uint8(1)}), **options
    )


FAILS_AFTER_UPDATE = 4
"""Messages of one of four senders: three keys and its update."""


def test_a_forged_key_share_is_found_and_its_holder_reported() -> None:
    world = one_receiver([forging(), *recording_sharings(3)]).fails(4, FAILS_AFTER_UPDATE).run()
    assert world.events(0) == [("payload rejected", "from node 1: a forged key share of node 4")]
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4)
    assert world.check_sums() == 1


def test_key_shares_are_requested_only_from_nodes_that_masked_with_the_owner() -> None:
    senders = recording_sharings(6, threshold=0.6)
    senders[0]._key_exchange.rejected.add(5)
    senders[4]._key_exchange.rejected.add(1)
    world = one_receiver(senders).fails(5, after=6).fails(6, after=6).run()
    asked = {to: m.payload.arrays["of"].tolist() for to, m in world.sent if m.kind == "secure-help"}
    assert asked == {1: [6], 2: [5, 6], 3: [5, 6], 4: [5, 6]}
    assert not any(node.rejected_count for node in world.nodes)
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4, 5, 6)
    assert world.check_sums() == 1


def test_too_many_forged_key_shares_keep_the_sum_masked() -> None:
    world = one_receiver([forging(), forging(), *recording_sharings(2)]).fails(4, FAILS_AFTER_UPDATE).run()
    assert world.events(0) == [
        ("sum not unmasked", "round 0: node 4 did not unmask its update, and its key shares do not fit together: one "
         "is forged; the model stays unchanged")
    ]  # fmt: skip
    assert not world.sharings[0].sums


def test_a_forged_key_share_among_many_is_found_with_few_trials() -> None:
    senders = [forging(partners=24), *recording_sharings(23, partners=24)]
    world = one_receiver(senders, size=4).fails(24, after=24)
    with mock.patch.object(shamir, "combine", wraps=shamir.combine) as combine:
        world.run()
    assert world.events(0) == [("payload rejected", "from node 1: a forged key share of node 24")]
    assert world.check_sums() == 1
    assert combine.call_count < 50


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda payload: Payload({"of": payload.arrays["of"]}), "expected an array 'shares' of rows of 16 bytes"),
        (lambda payload: Payload({**payload.arrays, "shares": payload.arrays["shares"][:0]}),
         "expected 1 seeds in the key share of node 4"),
        (lambda payload: Payload({**payload.arrays, "of": to_node_ids([3])}),
         "a key share of node 3, which was not requested"),
        (lambda payload: Payload({"shares": payload.arrays["shares"]}),
         "expected an array 'of' of increasing node ids"),
        (lambda payload: Payload({}), "expected an array 'shares' of rows of 16 bytes"),
    ],
)  # fmt: skip
def test_an_invalid_key_share_answer_is_rejected_and_the_others_suffice(lie: Any, why: str) -> None:
    world = one_receiver([with_answers(recovered=lie), *recording_sharings(3)]).fails(4, FAILS_AFTER_UPDATE).run()
    ((what, detail),) = world.events(0)
    assert what == "payload rejected"
    assert detail.startswith(f"from node 1: {why}")
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4)
    assert world.check_sums() == 1


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda payload: Payload({**payload.arrays, "own": payload.arrays["own"] ^ np.uint8(1)}),
         "a seed does not match its commitment (with node 2)"),
        (lambda payload: Payload({**payload.arrays, "pairs": to_rows([bytes(16)])}),
         "expected the seed of its self mask and 0 others"),
        (lambda payload: Payload({**payload.arrays, "own": to_rows([])}),
         "expected the seed of its self mask and 0 others"),
        (lambda payload: Payload({**payload.arrays, "own": payload.arrays["own"][0]}),
         "expected an array 'own' of rows"),
        (lambda payload: Payload({}), "expected an array 'own' of rows of 16 bytes"),
        (lambda payload: Payload({}, {"refused": 7}), "expected an array 'own' of rows of 16 bytes"),
    ],
)  # fmt: skip
def test_wrong_seeds_are_rejected_and_key_shares_give_the_right_ones(lie: Any, why: str) -> None:
    world = one_receiver([RecordingSharing(), with_answers(opened=lie), *recording_sharings(2)]).run()
    ((what, detail),) = world.events(0)
    assert what == "payload rejected"
    assert detail.startswith(f"from node 2: {why}")
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4)
    assert world.check_sums() == 1


def test_wrong_seeds_of_an_absent_partner_are_found_too() -> None:
    misleading = with_answers(
        lambda payload: Payload({**payload.arrays, "pairs": payload.arrays["pairs"] ^ np.uint8(1)})
    )
    world = (
        one_receiver([RecordingSharing(), misleading, *recording_sharings(2)]).fails(4, after=3).run()
    )  # all have its key
    assert ("payload rejected", "from node 2: a seed does not match its commitment (with node 4)") in (world.events(0))
    assert world.sharings[0].sums[0].senders == (1, 2, 3)
    assert world.check_sums() == 1


def test_a_node_that_refuses_to_unmask_keeps_the_sum_masked() -> None:
    unwilling = with_answers(lambda _: Payload({}, {"refused": "I would rather not" + 1000 * "!"}))
    world = one_receiver([unwilling, *recording_sharings(3)]).run()
    assert world.events(0)[0][1] == (
        "round 0: node 1 does not unmask its update: I would rather not" + 182 * "!" + "; the model stays unchanged"
    )


def test_altered_key_shares_recover_nothing() -> None:
    garbled = lying(altered(shares=lambda a: a ^ np.uint8(1)))
    world = one_receiver([*recording_sharings(3), garbled], models=lambda node: np.full(32, node)).fails(
        4, FAILS_AFTER_UPDATE
    )
    world.run()
    for node in (1, 2, 3):
        assert world.events(node) == [
            ("payload rejected", "from node 0: decryption failed: the data was altered, or encrypted with another key")
        ]
    assert world.events(0)[0][1].startswith("round 0: node 4 did not unmask its update, and 0 of its key shares")
    assert not world.nodes[0].params.any()


# Limits


def test_a_model_outside_the_range_ends_its_node_before_it_sends() -> None:
    world = one_receiver(recording_sharings(3, range=2.0), models=lambda node: np.full(32, 2.5 if node == 2 else 1.0))
    with pytest.raises(
        PrivacyError, match=r"node 2, round 0: a parameter is 2.5, expected within ±2: it would corrupt the sum; set a"
    ):
        world.run()
    assert not any(message.sender == 2 for _, message in world.sent)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_model_that_is_not_finite_ends_its_node(value: float) -> None:
    sharing = Secure()
    sharing.bind(NodeInfo(4, 5, 0, ((2,),)))
    with pytest.raises(PrivacyError, match=r"node 4, round 7: a parameter is -?(nan|inf), expected a finite number"):
        sharing.outgoing(np.array([0.0, value], np.float32), 7)


def test_a_node_cannot_send_twice_to_a_receiver_in_a_round() -> None:
    peers = PlayedPeers().send()
    with pytest.raises(PrivacyError, match="node 1 would send to node 0 twice in round 0: two updates under"):
        peers.sharing.outgoing(peers.model, 0)(0)


def test_a_single_sender_sends_nothing() -> None:
    world = one_receiver(recording_sharings(1), rounds=2).run()
    assert world.events(0) == [
        ("receive skipped", f"round {r}: fewer than two nodes send to this node, so none may send") for r in (0, 1)
    ]
    assert world.events(1) == [("receiver skipped", f"round {r}: no other node sends to 0") for r in (0, 1)]
    assert not world.sent
    with pytest.raises(PrivacyError, match="node 1 would send to node 0 unmasked in round 2"):
        world.sharings[1].outgoing(world.nodes[1].params, 2)(0)


def test_a_single_sender_sends_unmasked_if_the_experiment_allows_it() -> None:
    world = one_receiver(recording_sharings(1, few="plain"), models=lambda node: np.full(32, 2.0 * node)).run()
    assert world.events(1) == [("sent unmasked", "round 0: no other node sends to 0")]
    assert (world.nodes[0].params == 1.0).all()
    ((_, message),) = world.sent
    assert message.payload.fields == {"plain": True}


def test_a_masked_update_of_a_single_sender_is_rejected() -> None:
    masked = lying(lambda payload, *_: Payload({**payload.arrays, "seals": np.zeros((1, 16), np.uint8)}), few="plain")
    world = one_receiver([masked]).run()
    assert world.events(0) == [
        ("payload rejected", "from node 1: its update is masked, and there is no other update that cancels the mask")
    ]


def test_in_a_changing_graph_some_rounds_have_single_senders() -> None:
    for few in ("refuse", "plain"):
        world = SecureWorld(ELLocal(6, 1), recording_sharings(6, few=few)).run()
        payload = Counter(what for node in range(6) for what, _ in world.events(node))
        plain = [m for _, m in world.sent if m.payload.fields.get("plain")]
        assert payload[{"refuse": "receiver skipped", "plain": "sent unmasked"}[few]] > 5
        assert bool(plain) == (few == "plain")
        assert world.check_sums() > 5


def test_no_message_is_left_over_and_final_messages_go_to_all_waiting_nodes() -> None:
    world = SecureWorld(DPSGD(3), recording_sharings(5), topology=FullGraph()).run()
    assert Counter(m.kind for _, m in world.sent) == {
        "secure-key": 20, "model": 60, "secure-open": 60, "secure-opened": 60, "secure-bye": 20
    }  # fmt: skip
    for runtime in world.world.runtimes:
        assert not runtime.mailbox._unclaimed
    for sharing in world.sharings:
        assert all(list(kept) == [2] for kept in sharing._responder._sent.values())  # of the last round only


def test_the_state_determines_the_next_coordinates() -> None:
    assert Secure().state() == {}
    Secure().restore({})
    one, other = Secure(inner=TopK(0.5)), Secure(inner=TopK(0.5))
    for sharing in (one, other):
        sharing.bind(NodeInfo(0, 3, 0, ((4,),)))
        sharing.start(np.zeros(4, np.float32))
    model = np.array([1, 2, 3, 4], np.float32)
    assert one._coordinates is not None
    assert other._coordinates is not None
    one._coordinates.chooser.update(model, one._coordinates.chooser.choose(model, 0), np.array([1.0, 2.0]), senders=2)
    other.restore(one.state())
    assert (
        one._coordinates.chooser.choose(model, 1).tolist()
        == other._coordinates.chooser.choose(model, 1).tolist()
        == [0, 1]
    )
