"""Secure aggregation: sums are exact despite failures, and masked updates look random."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secure_world import (
    ONE_MAY_FAIL,
    RUN,
    PlayedPeers,
    RandomGraph,
    RecordingSharing,
    SecureWorld,
    lying,
    one_receiver,
    recording_sharings,
    unevenness,
)
from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.el_local import ELLocal
from shoal.algorithms.fedavg import FedAvg
from shoal.engines.simulation.kernel import park
from shoal.environment.network.links import Uniform
from shoal.errors import PrivacyError
from shoal.message import Payload
from shoal.sharing.full import FullSharing
from shoal.sharing.random import Random
from shoal.sharing.secure.masks import Keys, commitment
from shoal.sharing.secure.messages import ProtocolRound
from shoal.sharing.secure.secure import Secure
from shoal.sharing.sharing import NodeInfo
from shoal.sharing.topk import TopK
from shoal.topologies.static import Full as FullGraph

# Sums are exact


@st.composite
def worlds(draw: Any) -> tuple[SecureWorld, dict[int, int], Any]:
    nodes = draw(st.integers(3, 8))
    options = {
        "bits": draw(st.sampled_from([32, 64])),
        "range": draw(st.sampled_from([16.0, 100.0])),
        "threshold": draw(st.sampled_from([0.1, 0.5, 0.75, 1.0])),
        "partners": draw(st.sampled_from([2, 4, 6])),
        "single_sender": draw(st.sampled_from(["unmasked", "reject"])),
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
            assert protocol_round.masked or sharing.single_sender == "unmasked" or not received
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
    world = SecureWorld(FedAvg(4), recording_sharings(5, **ONE_MAY_FAIL), receive_timeout=5.0)

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
    assert peers.update(1).commitments[1] == commitment(peers.secrets(2, round=1).seed, 0, 1)


# Against plain averaging


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("algorithm", [DPSGD(1), DPSGD(1, overlap=True), ELLocal(1, 3), FedAvg(1)], ids=repr)
def test_models_equal_those_of_plain_averaging_up_to_rounding(algorithm: Any, bits: Any) -> None:
    count = 6 + hasattr(algorithm, "serve")
    drawn = np.random.default_rng(3).uniform(-40, 40, (count, 500)).astype(np.float32)
    some = {"topology": FullGraph(), "size": 500, "models": lambda node: drawn[node]}
    plain = SecureWorld(algorithm, [FullSharing() for _ in range(count)], **some)
    for node in plain.nodes:
        plain.world.runtimes[node.id].start(plain.life(node))
    plain.world.kernel.run()
    hidden = SecureWorld(algorithm, recording_sharings(count, bits=bits, single_sender="unmasked"), **some).run()
    for one, other in zip(plain.nodes, hidden.nodes, strict=True):
        assert np.abs(one.params).max() > 10
        # Most of the difference comes from plain averaging in single precision.
        assert np.abs(one.params - other.params).max() <= 64 * 2.0**-18


def test_after_a_failure_the_others_have_the_weights_of_plain_averaging() -> None:
    drawn = np.random.default_rng(3).uniform(-40, 40, (5, 100)).astype(np.float32)
    world = (
        one_receiver(recording_sharings(4, **ONE_MAY_FAIL), size=100, models=lambda node: drawn[node])
        .fails(2, after=3)
        .run()
    )
    # Node 0 and its four neighbours have weight 1/5 each, so with three of them it is 1/4 each.
    np.testing.assert_allclose(world.nodes[0].params, drawn[[0, 1, 3, 4]].astype(np.float64).mean(0), atol=64 * 2**-18)


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
    world = one_receiver(
        recording_sharings(1, single_sender="unmasked"), models=lambda node: np.full(32, 2.0 * node)
    ).run()
    assert world.events(1) == [("sent unmasked", "round 0: no other node sends to 0")]
    assert (world.nodes[0].params == 1.0).all()
    ((_, message),) = world.sent
    assert message.payload.fields == {"plain": True}


def test_a_masked_update_of_a_single_sender_is_rejected() -> None:
    masked = lying(
        lambda payload, *_: Payload({**payload.arrays, "seals": np.zeros((1, 16), np.uint8)}), single_sender="unmasked"
    )
    world = one_receiver([masked]).run()
    assert world.events(0) == [
        ("payload rejected", "from node 1: its update is masked, and there is no other update that cancels the mask")
    ]


def test_in_a_changing_graph_some_rounds_have_single_senders() -> None:
    for single_sender, event in (("reject", "receiver skipped"), ("unmasked", "sent unmasked")):
        world = SecureWorld(ELLocal(6, 1), recording_sharings(6, single_sender=single_sender)).run()
        events = Counter(what for node in range(6) for what, _ in world.events(node))
        plain = [m for _, m in world.sent if m.payload.fields.get("plain")]
        assert events[event] > 5
        assert bool(plain) == (single_sender == "unmasked")
        assert world.check_sums() > 5


def test_no_message_is_left_over_and_final_messages_go_to_all_waiting_nodes() -> None:
    world = SecureWorld(DPSGD(3), recording_sharings(5), topology=FullGraph()).run()
    assert Counter(m.kind for _, m in world.sent) == {
        "secure-key": 20, "model": 60, "secure-open": 60, "secure-opened": 60, "secure-bye": 20
    }  # fmt: skip
    for runtime in world.world.runtimes:
        assert not any(runtime.mailbox.receive_available(kind) for kind in {m.kind for _, m in world.sent})
    for sharing in world.sharings:
        assert len(sharing.responder.receivers) == 4
        for receiver in sharing.responder.receivers:
            assert sharing.responder.remembered_rounds(receiver) == [2]  # the last one only
