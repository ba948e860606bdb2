"""Secure aggregation: which secrets a sender reveals, to whom, and what colluders learn from them."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from secure_world import ONE_MAY_FAIL, PlayedPeers, SecureWorld, one_receiver, recording_sharings, unevenness
from shoal.algorithms.dpsgd import DPSGD
from shoal.environment.network.links import Uniform
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.masks import SEED_BYTES, commitment
from shoal.sharing.secure.messages import MaskedUpdate, ProtocolRound, mask_update
from shoal.sharing.secure.responder import REMEMBERED_ROUNDS
from shoal.topologies.static import Full as FullGraph

# Dishonest receivers


def test_a_sender_reveals_its_self_mask_and_masks_with_absent_partners_only() -> None:
    peers = PlayedPeers(**ONE_MAY_FAIL).ask_to_unmask(1, 2, 4).send()
    (answer,) = peers.answers()
    update = peers.update()
    own, (pair,) = answer.arrays["own"].tobytes(), answer.arrays["pairs"]
    assert commitment(own, 0, 0) == update.commitments[0]
    assert pair.tobytes() == peers.secrets(3).seed
    values = np.array(update.values)
    masks.subtract(values, own)
    masks.subtract(values, pair.tobytes())
    encoded = FixedPoint(32, 64.0).encode(peers.model, 0.2)
    assert not np.array_equal(values, encoded)  # still masked with 2 and 4
    for present in (2, 4):
        masks.subtract(values, peers.secrets(present).seed)
    assert np.array_equal(values, encoded)


@pytest.mark.parametrize(
    ("senders", "why"),
    [
        ((2, 3, 4), "this node's update is not in the sum: there is nothing to unmask"),
        ((1, 2), "2 of 4 updates are in the sum, and 3 are needed"),
        ((1, 2, 9), "some of them do not send to the receiver in this round"),
        ((0, 1, 2), "some of them do not send to the receiver in this round"),
    ],
)
def test_a_sum_that_would_reveal_a_model_is_not_unmasked(senders: tuple[int, ...], why: str) -> None:
    peers = PlayedPeers(**ONE_MAY_FAIL).ask_to_unmask(*senders).send()
    (answer,) = peers.answers()
    assert answer.fields == {"refused": why}
    assert not answer.arrays
    assert peers.rejections() == [f"from node 0: {why}"]


def test_a_second_sum_of_a_round_is_not_unmasked_because_of_the_difference() -> None:
    peers = (
        PlayedPeers(**ONE_MAY_FAIL)
        .ask_to_unmask(1, 2, 3, 4)
        .ask_to_unmask(1, 2, 3, at=51.0)
        .ask_to_unmask(1, 2, 3, 4, at=52.0)
        .send()
    )
    first, second, third = peers.answers()
    assert "difference would be visible" in str(second.fields["refused"])
    assert not second.arrays
    assert first.arrays["own"].tobytes() == third.arrays["own"].tobytes()
    assert len(third.arrays["pairs"]) == 0


def test_an_earlier_round_is_not_unmasked_after_a_later_one() -> None:
    peers = (
        PlayedPeers()
        .ask_to_unmask(1, 2, 3, 4, round=1)
        .ask_to_unmask(1, 2, 3, 4, at=51.0)
        .ask_to_unmask(1, 2, 3, 4, at=52.0, round=7)
    )
    peers.ask_to_unmask(1, 2, 3, 4, at=53.0, sender=3).send(rounds=2)
    assert [sorted(answer.arrays) for answer in peers.answers()] == [["own", "pairs"], [], [], []]
    assert peers.rejections()[0] == (
        "from node 0: nothing was sent to it in round 0, or a later sum was unmasked since"
    )
    assert peers.rejections()[2].startswith("from node 3: nothing was sent to it in round 0")


@pytest.mark.parametrize(
    "arrays",
    [{}, {"speakers": np.array([1, 2], np.int64)}, {"speakers": np.array([2, 1], np.uint32)},
     {"speakers": np.array([1, 1, 2], np.uint32)}, {"speakers": np.array([[1, 2]], np.uint32)},
     {"speakers": np.array(3, np.uint32)}],
)  # fmt: skip
def test_an_invalid_request_is_rejected(arrays: Any) -> None:
    peers = PlayedPeers()
    peers.fake.deliver(peers.message(0, "secure-open", **arrays), at=50.0)
    peers.ask_to_unmask(1, 2, 3, 4, at=51.0).send()
    rejected, answered = peers.answers()
    assert "increasing node ids" in str(rejected.fields["refused"])
    assert "own" in answered.arrays


def test_a_sum_in_disconnected_parts_is_not_unmasked() -> None:
    peers = PlayedPeers(9, partners=2, threshold=0.2)
    order = [1]  # on the circle
    while len(order) < 9:
        order.append(next(p for p in peers.protocol_round.partners[order[-1]] if p not in order))
    peers.ask_to_unmask(order[0], order[1], order[4], order[5]).send()
    (answer,) = peers.answers()
    assert (
        answer.fields["refused"]
        == "so many updates are missing that the masks of the others cancel in parts of the sum"
    )


@pytest.mark.parametrize("how", ["missing", "invalid"])
def test_a_sum_with_too_few_mask_partners_is_not_unmasked(how: str) -> None:
    peers = PlayedPeers(**ONE_MAY_FAIL)
    if how == "invalid":
        peers.fake.deliver(peers.message(2, "secure-key", **{"secure-key": np.zeros(32, np.uint8)}))
    peers.ask_to_unmask(1, 2, 3).ask_to_unmask(1, 3, 4, at=51.0).send(without=[2])
    rejected, answered = peers.answers()
    assert rejected.fields["refused"] == "this node has masked with fewer than 2 of them: its update would be visible"
    assert not rejected.arrays
    assert len(answered.arrays["pairs"]) == 0  # it has not masked with the only absent sender


def encrypted_by(peers: PlayedPeers, owner: int, plain: bytes) -> bytes:
    """Return the key share of `owner` for node 1."""
    keys = peers.keys[owner]
    if 1 not in keys:
        keys.agree(1, peers.sharing.key_exchange.keys(peers.node).public)
    return peers.secrets(owner).encrypt(plain, from_lower=False)


SHARE = bytes(range(64))
"""A key share of four secrets: the self mask and three pairwise masks."""


def test_a_helper_reveals_only_the_part_of_a_key_share_that_is_needed() -> None:
    peers = PlayedPeers(**ONE_MAY_FAIL)
    peers.ask_to_unmask(1, 2, 3).ask_for_shares([3], [encrypted_by(peers, 3, SHARE)]).send()
    (answer,) = peers.answers("secure-helped")
    assert answer.arrays["of"].tolist() == [3]
    # The seed of its self mask and of the mask with node 4, which is absent; not those with 1 and 2.
    assert answer.arrays["shares"].tobytes() == SHARE[:16] + SHARE[48:]


@pytest.mark.parametrize(
    ("of", "plain", "why"),
    [
        ([4], SHARE, "this node holds no key share of node 4 for it"),  # not in the sum
        ([1], SHARE, "this node holds no key share of node 1 for it"),
        ([77], SHARE, "this node holds no key share of node 77 for it"),
        ([3], SHARE[:-1], "expected an array 'shares' of rows of 80 bytes"),
        ([3], None, "decryption failed: the data was altered, or encrypted with another key"),
    ],
)
def test_requests_for_other_key_shares_are_rejected(of: list[int], plain: bytes | None, why: str) -> None:
    peers = PlayedPeers(**ONE_MAY_FAIL)
    encrypted = bytes(80) if plain is None else encrypted_by(peers, 3, plain)
    peers.ask_to_unmask(1, 2, 3).ask_for_shares(of, [encrypted]).send()
    (answer,) = peers.answers("secure-helped")
    assert not answer.arrays["of"].size
    assert not answer.arrays["shares"].size
    assert peers.rejections() == [f"from node 0: {why}"]


def test_a_request_with_more_nodes_than_key_shares_is_rejected() -> None:
    peers = PlayedPeers()
    peers.ask_to_unmask(1, 2, 3, 4).ask_for_shares([2, 3], [encrypted_by(peers, 2, SHARE)]).send()
    (answer,) = peers.answers("secure-helped")
    assert not answer.arrays["shares"].size
    assert peers.rejections() == ["from node 0: expected a key share for each of 2 nodes, not 1"]


def test_a_sender_remembers_the_last_rounds_of_a_receiver_whose_sums_stay_masked() -> None:
    world = (
        SecureWorld(DPSGD(30), recording_sharings(5)).fails(2, after=2).run()
    )  # on a ring: it has sent its key to both others
    for node, closed in ((0, 1), (4, 3)):
        assert world.sharings[node].responder.remembered_rounds(closed) == list(range(30 - REMEMBERED_ROUNDS, 30))


def test_no_key_share_is_revealed_before_the_sum_is_unmasked() -> None:
    peers = PlayedPeers(**ONE_MAY_FAIL)
    peers.ask_for_shares([3], [encrypted_by(peers, 3, SHARE)], at=40.0).ask_to_unmask(1, 2, 3, at=50.0).send()
    (answer,) = peers.answers("secure-helped")
    assert not answer.arrays["shares"].size
    assert peers.rejections() == ["from node 0: no sum of round 0 was unmasked for it, or a later one was since"]


# Colluders


def shares_of(peers: PlayedPeers, holders: Collection[int], update: MaskedUpdate | None = None) -> dict[int, Any]:
    """Return the shares of node 1's secrets that holders can decrypt, by place: one row for each secret."""
    shares = (update or peers.update()).key_shares
    partners = peers.protocol_round.partners[1]
    opened = {}
    for holder in holders:
        place = partners.index(holder)
        plain = peers.secrets(holder).decrypt(shares[place], from_lower=True)
        opened[place] = np.frombuffer(plain, np.uint8).reshape(-1, SEED_BYTES)
    return opened


def test_a_receiver_and_a_threshold_of_share_holders_can_see_a_model() -> None:
    peers = PlayedPeers(6, threshold=0.6).send()
    assert peers.protocol_round.shares_needed == 3
    secrets = shamir.combine(shares_of(peers, [2, 4, 6]))
    values = np.array(peers.update().values)
    for secret in secrets:
        masks.subtract(values, secret.tobytes())
    assert np.array_equal(values, FixedPoint(32, 64.0).encode(peers.model, 1 / 7))


def test_a_receiver_and_one_holder_less_learn_nothing_about_any_seed() -> None:
    """For new shares of the same seeds, two holders combine uniformly distributed bytes, and never a whole seed."""
    peers = PlayedPeers(6, threshold=0.6).send()
    keys = peers.sharing.key_exchange.keys(peers.node)
    partners = peers.protocol_round.partners[1]
    seeds = [keys.self_mask_seed(0, 0), *(peers.secrets(partner).seed for partner in partners)]
    assert [seed.tobytes() for seed in shamir.combine(shares_of(peers, [2, 4, 6]))] == seeds
    made = []
    for _ in range(400):
        update = mask_update(np.zeros(1, np.uint32), 1, peers.protocol_round, keys, partners)
        known = shares_of(peers, [2, 4], update)
        made.append(shamir.combine(known))
        assert not {seed.tobytes() for seed in made[-1]} & set(seeds)
        assert not any(share.tobytes() in seeds for shares in known.values() for share in shares)
    assert unevenness(np.array(made).ravel(), 256) < 8.0
    # They also know the seeds of their own masks with the node, and still its update is masked.
    values = np.array(peers.update().values)
    for holder in (2, 4):
        masks.subtract(values, peers.secrets(holder).seed)
    assert not np.array_equal(values, FixedPoint(32, 64.0).encode(peers.model, 1 / 7))


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 9])
def test_a_receiver_with_too_few_colluders_sees_no_model_however_many_nodes_fail(count: int, threshold: float) -> None:
    """They subtract their own models from the smallest unmasked sum: at least two other models are left."""
    weights = dict.fromkeys(range(1, count + 1), 1 / (count + 1))
    protocol_round = ProtocolRound(0, 0, weights, 8, threshold, 0)
    colluders = set(range(2, protocol_round.shares_needed + 1))  # one fewer than can recover the secrets of node 1
    opened = 0
    for failed in range(count):
        world = one_receiver(recording_sharings(count, threshold=threshold))
        for node in range(count - failed + 1, count + 1):
            world.fails(node, after=count - 1)  # all have its key
        world.run()
        for found in world.sharings[0].sums.values():
            assert len(set(found.senders) - colluders) >= 2
            opened += 1
    assert opened == count - protocol_round.senders_needed + 1
    assert world.check_sums() == 0  # a single sender


def test_without_key_shares_even_all_others_cannot_see_an_update_that_is_in_no_sum() -> None:
    peers = PlayedPeers(4).send()
    values = np.array(peers.update().values)
    for peer in peers.keys:
        masks.subtract(values, peers.secrets(peer).seed)
    encoded = FixedPoint(32, 64.0).encode(peers.model, 0.2)
    assert not np.array_equal(values, encoded)
    masks.subtract(values, peers.sharing.key_exchange.keys(peers.node).self_mask_seed(0, 0))
    assert np.array_equal(values, encoded)


def test_a_late_update_stays_hidden_although_its_pairwise_masks_are_revealed() -> None:
    slow = Uniform(0.1, links=({"from": "4", "to": "0", "latency": 50.0, "oneway": True},))
    world = one_receiver(recording_sharings(4, **ONE_MAY_FAIL), network=slow, receive_timeout=5.0).run()
    assert world.sharings[0].sums[0].senders == (1, 2, 3)
    assert world.check_sums() == 1
    answers = [message for to, message in world.sent if message.kind == "secure-opened"]
    assert [len(answer.payload.arrays["pairs"]) for answer in answers] == [1, 1, 1]
    late = next(m.payload for to, m in world.sent if m.kind == "model" and m.sender == 4)
    values = np.array(late.arrays["words"])
    for answer in answers:
        masks.add(values, answer.payload.arrays["pairs"].tobytes())  # node 4 is the higher one and has subtracted them
    encoded = FixedPoint(32, 64.0).encode(world.sharings[4].models[0], 0.2)
    assert not np.array_equal(values, encoded)
    masks.subtract(values, world.sharings[4].key_exchange.keys(world.nodes[4]).self_mask_seed(0, 0))
    assert np.array_equal(values, encoded)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("value", [0.0, 1.0, -64.0])
def test_single_messages_and_differences_of_two_are_uniformly_distributed(bits: Any, value: float) -> None:
    size = 2**15
    world = SecureWorld(
        DPSGD(2),
        recording_sharings(3, bits=bits),
        topology=FullGraph(),
        size=size,
        models=lambda _: np.full(size, value),
    ).run()
    payload = [m.payload.arrays["words"] for _, m in world.sent if m.kind == "model"]
    assert len(payload) == 12
    for values in [*payload, *(one - other for one, other in itertools.combinations(payload, 2))]:
        for byte in range(bits // 8):
            assert unevenness(values.view(np.uint8)[byte :: bits // 8], 256) < 8
