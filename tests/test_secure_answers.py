"""Secure aggregation: what a speaker hands out, to whom, and what colluders can make of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from shoal.algorithms.dpsgd import DPSGD
from shoal.environment.network.links import Uniform
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.masks import SEED_BYTES, commitment
from shoal.sharing.secure.messages import Gathering, Statement, masked
from shoal.sharing.secure.responder import REMEMBERED
from shoal.topologies.static import Full as FullGraph
from test_privacy_parts import unevenness
from together import Peers, Together, audience, witnesses

# A receiver that lies


def test_a_speaker_takes_off_its_own_mask_and_those_with_the_absent_and_no_other() -> None:
    peers = Peers().asks(1, 2, 4).speak()
    (answer,) = peers.answers()
    statement = peers.statement()
    own, (pair,) = answer.arrays["own"].tobytes(), answer.arrays["pairs"]
    assert commitment(own, 0, 0) == statement.seals[0]
    assert pair.tobytes() == peers.keys[3].with_peer(1, 0, 0).seed
    words = np.array(statement.words)
    masks.subtract(words, own)
    masks.subtract(words, pair.tobytes())
    encoded = FixedPoint(32, 64.0).encode(peers.model, 0.2)
    assert not np.array_equal(words, encoded)  # masked with 2 and 4 still
    for present in (2, 4):
        masks.subtract(words, peers.keys[present].with_peer(1, 0, 0).seed)
    assert np.array_equal(words, encoded)


@pytest.mark.parametrize(
    ("speakers", "why"),
    [
        ((2, 3, 4), "this node's words are not in the sum: it has nothing to take off"),
        ((1, 2), "2 of 4 are in the sum, and it takes 3"),
        ((1, 2, 9), "some of them do not speak to the receiver in this round"),
        ((0, 1, 2), "some of them do not speak to the receiver in this round"),
    ],
)
def test_a_sum_that_would_show_something_is_not_opened(speakers: tuple[int, ...], why: str) -> None:
    peers = Peers().asks(*speakers).speak()
    (answer,) = peers.answers()
    assert answer.fields == {"refused": why}
    assert not answer.arrays
    assert peers.refusals() == [f"from node 0: {why}"]


def test_a_second_sum_of_a_round_is_not_opened_since_the_difference_would_show() -> None:
    peers = Peers().asks(1, 2, 3, 4).asks(1, 2, 3, at=51.0).asks(1, 2, 3, 4, at=52.0).speak()
    first, second, third = peers.answers()
    assert "difference would show" in str(second.fields["refused"])
    assert not second.arrays
    assert first.arrays["own"].tobytes() == third.arrays["own"].tobytes()
    assert len(third.arrays["pairs"]) == 0


def test_an_earlier_round_is_not_opened_after_a_later_one_nor_what_was_not_said() -> None:
    peers = Peers().asks(1, 2, 3, 4, round=1).asks(1, 2, 3, 4, at=51.0).asks(1, 2, 3, 4, at=52.0, round=7)
    peers.asks(1, 2, 3, 4, at=53.0, sender=3).speak(rounds=2)
    assert [sorted(answer.arrays) for answer in peers.answers()] == [["own", "pairs"], [], [], []]
    assert peers.refusals()[0] == ("from node 0: nothing was said to it in round 0, or a later round was opened since")
    assert peers.refusals()[2].startswith("from node 3: nothing was said to it in round 0")


@pytest.mark.parametrize(
    "arrays",
    [{}, {"speakers": np.array([1, 2], np.int64)}, {"speakers": np.array([2, 1], np.uint32)},
     {"speakers": np.array([1, 1, 2], np.uint32)}, {"speakers": np.array([[1, 2]], np.uint32)},
     {"speakers": np.array(3, np.uint32)}],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_refused(arrays: Any) -> None:
    peers = Peers()
    peers.fake.deliver(peers.message(0, "secure-open", **arrays), at=50.0)
    peers.asks(1, 2, 3, 4, at=51.0).speak()
    refused, answered = peers.answers()
    assert "increasing numbers of nodes" in str(refused.fields["refused"])
    assert "own" in answered.arrays


def test_a_sum_in_parts_is_not_opened() -> None:
    peers = Peers(9, partners=2, threshold=0.2)
    order = [1]  # on the circle
    while len(order) < 9:
        order.append(next(p for p in peers.gathering.partners[order[-1]] if p not in order))
    peers.asks(order[0], order[1], order[4], order[5]).speak()
    (answer,) = peers.answers()
    assert answer.fields["refused"] == "so many are missing that the masks of the others cancel in parts of the sum"


@pytest.mark.parametrize("how", ["silent", "refused"])
def test_a_sum_with_too_few_that_it_has_masked_with_is_not_opened(how: str) -> None:
    peers = Peers()
    if how == "refused":
        peers.fake.deliver(peers.message(2, "secure-key", **{"secure-key": np.zeros(32, np.uint8)}))
    peers.asks(1, 2, 3).asks(1, 3, 4, at=51.0).speak(without=[2])
    refused, answered = peers.answers()
    assert refused.fields["refused"] == "this node has masked with fewer than 2 of them: its words would show"
    assert not refused.arrays
    assert len(answered.arrays["pairs"]) == 0  # the only one that is absent is one that it has not masked with


def sealed_by(peers: Peers, dealer: int, plain: bytes) -> bytes:
    """A share that `dealer` has for node 1."""
    keys = peers.keys[dealer]
    if 1 not in keys:
        keys.agree(1, peers.sharing._exchange.keys(peers.node).public)
    return keys.with_peer(1, 0, 0).seal(plain, from_lower=False)


SHARE = bytes(range(64))
"""Of a secret of one's own and of three that are shared with others."""


def test_a_helper_hands_out_of_its_share_what_the_dead_would_have_said_and_no_more() -> None:
    peers = Peers()
    peers.asks(1, 2, 3).asks_help([3], [sealed_by(peers, 3, SHARE)]).speak()
    (answer,) = peers.answers("secure-helped")
    assert answer.arrays["of"].tolist() == [3]
    # Its own seed, and that with node 4, which is absent; not those with 1 and 2.
    assert answer.arrays["shares"].tobytes() == SHARE[:16] + SHARE[48:]


@pytest.mark.parametrize(
    ("of", "plain", "why"),
    [
        ([4], SHARE, "there is no share here of what node 4 said to it"),  # not in the sum
        ([1], SHARE, "there is no share here of what node 1 said to it"),
        ([77], SHARE, "there is no share here of what node 77 said to it"),
        ([3], SHARE[:-1], "expected an array 'shares' of rows of 80 bytes"),
        ([3], None, "not what the other has sealed: tampered with, or under another key"),
    ],
)
def test_help_that_nobody_may_ask_for_is_refused(of: list[int], plain: bytes | None, why: str) -> None:
    peers = Peers()
    sealed = bytes(80) if plain is None else sealed_by(peers, 3, plain)
    peers.asks(1, 2, 3).asks_help(of, [sealed]).speak()
    (answer,) = peers.answers("secure-helped")
    assert not answer.arrays["of"].size
    assert not answer.arrays["shares"].size
    assert peers.refusals() == [f"from node 0: {why}"]


def test_help_with_more_nodes_than_shares_is_refused() -> None:
    peers = Peers()
    peers.asks(1, 2, 3, 4).asks_help([2, 3], [sealed_by(peers, 2, SHARE)]).speak()
    (answer,) = peers.answers("secure-helped")
    assert not answer.arrays["shares"].size
    assert peers.refusals() == ["from node 0: expected a share for each of 2 nodes, not 1"]


def test_of_a_receiver_whose_sums_stay_closed_the_last_rounds_are_remembered() -> None:
    world = Together(DPSGD(30), witnesses(5)).dies(2, after=2).run()  # on a ring: it has told both others its key
    for node, closed in ((0, 1), (4, 3)):
        assert list(world.sharings[node]._answers._said[closed]) == list(range(30 - REMEMBERED, 30))


def test_nobody_helps_before_a_sum_was_opened() -> None:
    peers = Peers()
    peers.asks_help([3], [sealed_by(peers, 3, SHARE)], at=40.0).asks(1, 2, 3, at=50.0).speak()
    (answer,) = peers.answers("secure-helped")
    assert not answer.arrays["shares"].size
    assert peers.refusals() == ["from node 0: no sum was opened to it in round 0, or a later one since"]


# Those who put together what they know


def shares_of(peers: Peers, holders: Collection[int], statement: Statement | None = None) -> dict[int, Any]:
    """What holders can read of node 1's secrets: by their places, as arrays of one row for each secret."""
    shares = (statement or peers.statement()).shares
    partners = peers.gathering.partners[1]
    opened = {}
    for holder in holders:
        place = partners.index(holder)
        plain = peers.keys[holder].with_peer(1, 0, 0).unseal(shares[place], from_lower=True)
        opened[place] = np.frombuffer(plain, np.uint8).reshape(-1, SEED_BYTES)
    return opened


def test_the_receiver_and_enough_holders_of_shares_see_a_model_and_this_is_what_the_threshold_is_for() -> None:
    peers = Peers(6, threshold=0.6).speak()
    assert peers.gathering.shares_needed == 3
    secrets = shamir.combine(shares_of(peers, [2, 4, 6]))
    words = np.array(peers.statement().words)
    for secret in secrets:
        masks.subtract(words, secret.tobytes())
    assert np.array_equal(words, FixedPoint(32, 64.0).encode(peers.model, 1 / 7))


def test_the_receiver_and_one_holder_fewer_learn_nothing_of_any_seed() -> None:
    """Of shares that are dealt again and again, with the same seeds: what two of them make of a byte is evenly spread,
    and so, but by chance, never the whole seed."""
    peers = Peers(6, threshold=0.6).speak()
    keys = peers.sharing._exchange.keys(peers.node)
    partners = peers.gathering.partners[1]
    seeds = [keys.own_seed(0, 0), *(keys.with_peer(partner, 0, 0).seed for partner in partners)]
    assert [seed.tobytes() for seed in shamir.combine(shares_of(peers, [2, 4, 6]))] == seeds
    made = []
    for _ in range(400):
        statement = masked(np.zeros(1, np.uint32), 1, peers.gathering, keys, partners)
        known = shares_of(peers, [2, 4], statement)
        made.append(shamir.combine(known))
        assert not {seed.tobytes() for seed in made[-1]} & set(seeds)
        assert not any(share.tobytes() in seeds for shares in known.values() for share in shares)
    assert unevenness(np.array(made).ravel(), 256) < 8.0
    # They also know the seeds of the masks that they share with the node, and still its words are masked.
    words = np.array(peers.statement().words)
    for holder in (2, 4):
        masks.subtract(words, peers.keys[holder].with_peer(1, 0, 0).seed)
    assert not np.array_equal(words, FixedPoint(32, 64.0).encode(peers.model, 1 / 7))


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 9])
def test_the_receiver_with_too_few_colluders_gets_no_model_however_many_die(count: int, threshold: float) -> None:
    """They subtract their own models from the smallest sum that is opened: what is left is of two at the least."""
    weights = dict.fromkeys(range(1, count + 1), 1 / (count + 1))
    gathering = Gathering(0, 0, weights, 8, threshold, 0)
    colluders = set(range(2, gathering.shares_needed + 1))  # one fewer than can put node 1's secrets together
    opened = 0
    for dead in range(count):
        world = audience(witnesses(count, threshold=threshold))
        for node in range(count - dead + 1, count + 1):
            world.dies(node, after=count - 1)  # all have its key
        world.run()
        for found in world.sharings[0].sums.values():
            assert len(set(found.speakers) - colluders) >= 2
            opened += 1
    assert opened == count - gathering.quorum + 1
    assert world.check_sums() == 0  # one that is left alone


def test_even_all_others_do_not_see_words_that_were_in_no_sum_but_by_their_shares() -> None:
    peers = Peers(4).speak()
    words = np.array(peers.statement().words)
    for keys in peers.keys.values():
        masks.subtract(words, keys.with_peer(1, 0, 0).seed)
    encoded = FixedPoint(32, 64.0).encode(peers.model, 0.2)
    assert not np.array_equal(words, encoded)
    masks.subtract(words, peers.sharing._exchange.keys(peers.node).own_seed(0, 0))
    assert np.array_equal(words, encoded)


def test_late_words_stay_hidden_though_the_masks_with_their_speaker_were_given_away() -> None:
    slow = Uniform(0.1, links=({"from": "4", "to": "0", "latency": 50.0, "oneway": True},))
    world = audience(witnesses(4), network=slow, receive_timeout=5.0).run()
    assert world.sharings[0].sums[0].speakers == (1, 2, 3)
    assert world.check_sums() == 1
    answers = [message for to, message in world.sent if message.kind == "secure-opened"]
    assert [len(answer.payload.arrays["pairs"]) for answer in answers] == [1, 1, 1]
    late = next(m.payload for to, m in world.sent if m.kind == "model" and m.sender == 4)
    words = np.array(late.arrays["words"])
    for answer in answers:
        masks.add(words, answer.payload.arrays["pairs"].tobytes())  # node 4, the higher one, has subtracted them
    encoded = FixedPoint(32, 64.0).encode(world.sharings[4].models[0], 0.2)
    assert not np.array_equal(words, encoded)
    masks.subtract(words, world.sharings[4]._exchange._keys.own_seed(0, 0))
    assert np.array_equal(words, encoded)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("value", [0.0, 1.0, -64.0])
def test_a_single_message_is_evenly_spread_and_so_is_the_difference_of_two(bits: Any, value: float) -> None:
    size = 2**15
    world = Together(
        DPSGD(2), witnesses(3, bits=bits), topology=FullGraph(), size=size, models=lambda _: np.full(size, value)
    ).run()
    said = [m.payload.arrays["words"] for _, m in world.sent if m.kind == "model"]
    assert len(said) == 12
    for words in [*said, *(one - other for one, other in itertools.combinations(said, 2))]:
        for byte in range(bits // 8):
            assert unevenness(words.view(np.uint8)[byte :: bits // 8], 256) < 8
