"""Parts of secure aggregation: fixed-point sums, masks, secret sharing, the mask graph, coordinates."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from secure_world import unevenness
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.coordinates import CoordinateChooser
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.mask_graph import connected, mask_partners
from shoal.sharing.secure.masks import KEY_BYTES, Keys, commitment
from shoal.sharing.secure.messages import MaskedUpdate, ProtocolRound, read_node_ids, read_rows, to_node_ids, to_rows
from shoal.sharing.secure.secure import Secure
from shoal.sharing.secure.unmasking import subsets

RUN = "0" * 16
RINGS = st.builds(FixedPoint, st.sampled_from([32, 64]), st.sampled_from([1.0, 3.7, 64.0, 1000.0]))


# Fixed-point numbers


@st.composite
def models(draw: Any) -> tuple[FixedPoint, Any, Any]:
    """A codec, models within its range, and weights that add up to at most 1."""
    ring = draw(RINGS)
    count, size = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    inside = st.floats(-1, 1, width=32).map(lambda share: np.float32(share * ring.range * 0.999999))
    values = draw(hnp.arrays(np.float32, (count, size), elements=inside))
    weights = draw(hnp.arrays(np.float64, count, elements=st.floats(0.001, 1)))
    return ring, values, weights / max(1.0, weights.sum())


@given(models(), st.randoms())
def test_a_sum_is_close_to_the_exact_one_and_equal_in_any_order(drawn: Any, random: Any) -> None:
    ring, values, weights = drawn
    encoded = [ring.encode(v, w) for v, w in zip(values, weights, strict=True)]
    total = sum(encoded, np.zeros_like(encoded[0]))
    random.shuffle(encoded)
    assert np.array_equal(total, sum(encoded, np.zeros_like(encoded[0])))
    assert total.dtype == ring.dtype
    off = np.abs(ring.decode(total) - weights @ values.astype(np.float64)).max()
    # The error of a term is half a unit; a double holds 53 bits of the sum.
    assert off <= ring.range * len(values) * (2.0 ** -(ring.bits - 1) + 2.0**-51)
    assert off <= ring.range * 2.0**-16


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_a_weighted_average_does_not_wrap_at_the_end_of_the_range(bits: Any, sign: int, count: int) -> None:
    ring = FixedPoint(bits, 8.0)
    end = np.full(3, sign * 8.0, np.float32)
    total = sum((ring.encode(end, 1 / count) for _ in range(count)), np.zeros(3, ring.dtype))
    np.testing.assert_allclose(ring.decode(total), end, rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "outside"),
    [(8.0, None), (-8.0, None), (0.0, None), (8.0001, 8.0001), (-9.0, -9.0), (math.inf, math.inf),
     (-math.inf, -math.inf), (math.nan, math.nan)],
)  # fmt: skip
def test_a_value_that_cannot_be_encoded_is_returned(value: float, outside: float | None) -> None:
    found = FixedPoint(32, 8.0).outside(np.array([1.0, value, -2.0], np.float32))
    assert found is None if outside is None else found == pytest.approx(outside, nan_ok=True)


def test_the_largest_value_that_cannot_be_encoded_is_returned_and_none_for_no_values() -> None:
    ring = FixedPoint(32, 8.0)
    assert ring.outside(np.array([9.0, -10.0], np.float32)) == -10.0
    assert np.isnan(ring.outside(np.array([9.0, math.nan, -10.0], np.float32)) or 0.0)
    assert ring.outside(np.empty(0, np.float32)) is None


# Masks


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 16383, 16384, 16385, 40000])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_mask_is_the_key_stream_of_aes_in_counter_mode(count: int, bits: Any) -> None:
    seed, dtype = bytes(range(16)), FixedPoint(bits, 1.0).dtype
    stream = Cipher(AES(seed), CTR(bytes(16))).encryptor().update(bytes(count * dtype.itemsize))
    assert masks.mask(seed, count, dtype).tobytes() == stream


@given(st.binary(min_size=16, max_size=16), st.sampled_from(["<u4", "<u8"]), st.integers(0, 100))
def test_subtracting_a_mask_undoes_adding_it(seed: bytes, dtype: str, size: int) -> None:
    values = np.arange(size, dtype=dtype)
    masks.add(values, seed)
    assert size < 4 or not np.array_equal(values, np.arange(size, dtype=dtype))
    masks.subtract(values, seed)
    assert np.array_equal(values, np.arange(size, dtype=dtype))


def agreed() -> tuple[Keys, Keys]:
    low, high = Keys(RUN), Keys(RUN)
    low.agree(9, high.public)
    high.agree(2, low.public)
    return low, high


def test_two_nodes_agree_on_one_secret_seed_for_the_same_terms() -> None:
    low, high = agreed()
    terms = [bytes([i]) * 32 for i in range(9)]
    assert [low.pair_secrets(9, t) for t in terms] == [high.pair_secrets(2, t) for t in terms]
    seeds = [low.pair_secrets(9, t).seed for t in terms]
    own = [keys.self_mask_seed(*place) for place in itertools.product(range(3), range(3)) for keys in (low, high)]
    assert len({*seeds, *own}) == len(seeds) + len(own)
    assert seeds[0] not in {one.pair_secrets(9, terms[0]).seed for one in (agreed()[0] for _ in range(3))}
    assert seeds[0].hex() not in repr(low.pair_secrets(9, terms[0]))
    assert 9 in low
    assert 2 not in low


def test_the_same_keys_give_other_seeds_in_another_run() -> None:
    low, high = agreed()
    low._run = b"another"  # a node has new keys in every run: no public way leads to this
    low.agree(9, high.public)
    assert low.pair_secrets(9, bytes(32)) != high.pair_secrets(2, bytes(32))


def test_only_the_partner_can_decrypt_and_only_for_the_same_terms() -> None:
    low, high = agreed()
    encrypted = low.pair_secrets(9, b"terms").encrypt(b"a share", from_lower=True)
    assert high.pair_secrets(2, b"terms").decrypt(encrypted, from_lower=True) == b"a share"
    assert b"a share" not in encrypted
    other = Keys(RUN)
    other.agree(2, low.public)
    for pair, from_lower in [
        (high.pair_secrets(2, b"terms"), False),
        (high.pair_secrets(2, b"other terms"), True),
        (other.pair_secrets(2, b"terms"), True),
    ]:
        with pytest.raises(MessageError, match="altered, or encrypted with another key"):
            pair.decrypt(encrypted, from_lower)
    for place in range(len(encrypted)):
        tampered = bytes([*encrypted[:place], encrypted[place] ^ 1, *encrypted[place + 1 :]])
        with pytest.raises(MessageError, match="altered"):
            high.pair_secrets(2, b"terms").decrypt(tampered, from_lower=True)


def test_invalid_keys_and_keys_of_other_nodes_are_rejected() -> None:
    keys, other = Keys(RUN), Keys(RUN)
    keys.agree(1, other.public)
    keys.agree(1, other.public)  # repeating it changes nothing
    assert keys.owner(other.public) == 1
    with pytest.raises(MessageError, match="its key is this node's own key; every node needs its own key"):
        keys.agree(2, keys.public)
    with pytest.raises(MessageError, match="its key is also the key of node 1; every node needs its own key"):
        keys.agree(2, other.public)
    for low_order in (bytes(KEY_BYTES), bytes([1, *bytes(31)])):
        with pytest.raises(MessageError, match="not valid for a key agreement"):
            keys.agree(2, low_order)
    with pytest.raises(MessageError, match="not valid for a key agreement"):
        keys.agree(2, b"short")
    assert 2 not in keys


def test_commitments_differ_by_seed_receiver_and_round() -> None:
    seeds = [bytes([i]) * 16 for i in range(4)]
    made = {commitment(seed, receiver, round) for seed in seeds for receiver in range(4) for round in range(4)}
    assert len(made) == 64
    assert {len(one) for one in made} == {16}


def test_masks_are_uniformly_distributed() -> None:
    values = masks.mask(Keys(RUN).self_mask_seed(0, 0), 2**18, np.dtype("<u4"))
    for byte in range(4):
        assert unevenness(values.view(np.uint8)[byte::4], 256) < 8


# Secret sharing


def times(a: int, b: int) -> int:
    """Multiply in GF(2⁸) with x⁸ + x⁴ + x³ + x + 1, bit by bit."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = a << 1 ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def value(coefficients: list[int], x: int) -> int:
    """Evaluate a polynomial; the constant comes first."""
    total, power = 0, 1
    for coefficient in coefficients:
        total ^= times(coefficient, power)
        power = times(power, x)
    return total


def test_products_equal_those_of_the_field() -> None:
    everything = np.arange(256, dtype=np.uint8)
    for b in range(256):
        products = shamir.multiply(everything, b)
        assert products.tolist() == [times(a, b) for a in range(256)]
        if b:
            assert [shamir.divide(int(p), b) for p in products] == list(range(256))


@settings(deadline=None)
@given(st.data())
def test_any_threshold_of_shares_gives_the_secret(data: Any) -> None:
    holders = data.draw(st.integers(1, 20))
    threshold = data.draw(st.integers(1, holders))
    secret = data.draw(hnp.arrays(np.uint8, st.sampled_from([(1,), (16,), (3, 16), (9, 16)])))
    shares = shamir.split(secret, holders, threshold)
    assert shares.shape == (holders, *secret.shape)
    several = data.draw(st.permutations(range(holders)))[: data.draw(st.integers(threshold, holders))]
    assert np.array_equal(shamir.combine({holder: shares[holder] for holder in several}), secret)


def test_shares_are_values_of_a_random_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, random = np.array([7, 0, 255], np.uint8), bytes([1, 2, 3, 0, 200, 17])
    monkeypatch.setattr(shamir.secrets, "token_bytes", lambda count: random[:count])
    shares = shamir.split(secret, 255, 3)
    for byte in range(3):
        # Horner's rule takes the highest coefficient first.
        coefficients = [int(secret[byte]), random[3 + byte], random[byte]]
        assert shares[:, byte].tolist() == [value(coefficients, x) for x in range(1, 256)]


@pytest.mark.parametrize(("first", "second"), [(1, 2), (3, 200), (255, 254)])
def test_one_share_less_than_the_threshold_fits_every_secret_equally_often(first: int, second: int) -> None:
    shares = shamir.split(np.array([42], np.uint8), 255, 3)
    seen = int(shares[first - 1, 0]), int(shares[second - 1, 0])
    fitting = [
        seen[0] ^ times(a, first) ^ times(b, times(first, first))
        for a in range(256)
        for b in range(256)
        if seen[0] ^ times(a, first) ^ times(b, times(first, first))
        == seen[1] ^ times(a, second) ^ times(b, times(second, second))
    ]
    assert sorted(fitting) == list(range(256))  # one polynomial for every secret


@pytest.mark.parametrize("threshold", [2, 3, 5])
@pytest.mark.parametrize("secret", [0, 1, 255])
def test_fewer_shares_than_the_threshold_are_uniform_for_every_secret(threshold: int, secret: int) -> None:
    shares = shamir.split(np.full(2**16, secret, np.uint8), 6, threshold)
    for share in shares:
        assert unevenness(share, 256) < 8
    if threshold > 2:  # also for pairs of shares
        for one, other in itertools.combinations(shares >> 4, 2):
            assert unevenness(one.astype(np.int64) << 4 | other, 256) < 8


def test_a_forged_share_or_too_few_shares_give_another_secret() -> None:
    secret = np.arange(16, dtype=np.uint8)
    shares = shamir.split(secret, 5, 3)
    forged = shares[2] ^ np.uint8(1)
    assert not np.array_equal(shamir.combine({0: shares[0], 1: shares[1], 2: forged}), secret)
    assert not np.array_equal(shamir.combine({0: shares[0], 1: shares[1]}), secret)
    with pytest.raises(ValueError, match="no shares given"):
        shamir.combine({})


@pytest.mark.parametrize(("holders", "threshold"), [(0, 0), (3, 0), (3, 4), (256, 2)])
def test_impossible_numbers_of_shares_are_rejected(holders: int, threshold: int) -> None:
    with pytest.raises(ValueError, match=f"{threshold} of {holders} shares; expected at least 1 of 1"):
        shamir.split(np.zeros(1, np.uint8), holders, threshold)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_subset_of_shares_is_tried_once_and_each_share_is_soon_left_out(count: int) -> None:
    holders = [2, 3, 5, 7, 11, 13, 17]
    parts = list(subsets(holders, count))
    assert sorted(parts) == list(itertools.combinations(holders, count))
    assert parts[0] == tuple(holders[:count])
    if count < len(holders):
        soon = parts[: 1 + count]
        assert all(any(holder not in part for part in soon) for holder in holders)


# The mask graph


SENDERS = st.sets(st.integers(0, 10_000), min_size=2, max_size=40)


@given(SENDERS, st.integers(2, 12), st.integers(0, 99), st.integers(0, 2**63 - 1))
def test_partners_are_mutual_and_the_mask_graph_is_connected(
    senders: set[int], max_partners: int, receiver: int, seed: int
) -> None:
    partners = mask_partners(senders, max_partners, receiver, seed)
    assert partners == mask_partners(sorted(senders, reverse=True), max_partners, receiver, seed)
    assert partners.keys() == senders
    for node, others in partners.items():
        assert list(others) == sorted(set(others) - {node})
        assert all(node in partners[other] for other in others)
        assert len(others) == (len(senders) - 1 if len(senders) - 1 <= max_partners else max_partners // 2 * 2)
    assert connected(partners, senders)


def test_a_circle_is_computed_once_for_all_its_senders() -> None:
    circles = [mask_partners(range(20), 4, receiver, 7) for receiver in range(1000)]
    for _ in range(2):  # every sender asks for all receivers
        assert all(mask_partners(range(20), 4, receiver, 7) is circles[receiver] for receiver in range(1000))
    for senders, partners, seed in ((range(21), 4, 7), (range(20), 6, 7), (range(20), 4, 8)):
        other = mask_partners(senders, partners, 0, seed)
        assert other != circles[0]
        assert mask_partners(range(20), 4, 0, 7) == circles[0]
        assert mask_partners(senders, partners, 0, seed) == other


def test_the_order_on_the_circle_differs_between_receivers() -> None:
    assert len({tuple(mask_partners(range(30), 4, receiver, 0).values()) for receiver in range(5)}) == 5


@given(SENDERS, st.integers(2, 4), st.data())
def test_senders_are_connected_if_all_can_be_reached_from_one(senders: set[int], max_partners: int, data: Any) -> None:
    partners = mask_partners(senders, max_partners, 0, 0)
    among = data.draw(st.sets(st.sampled_from(sorted(senders))))
    groups = [{node} for node in among]
    for node, other in itertools.product(among, among):
        if other in partners[node]:
            one, two = (next(g for g in groups if n in g) for n in (node, other))
            if one is not two:
                groups.remove(two)
                one |= two
    assert connected(partners, among) == (len(groups) <= 1)


@given(st.integers(2, 60), st.integers(2, 12), st.floats(0.01, 1))
def test_a_sum_needs_two_honest_senders_and_a_sender_one_honest_partner(
    count: int, max_partners: int, threshold: float
) -> None:
    protocol_round = ProtocolRound(99, 0, dict.fromkeys(range(count), 1 / count), max_partners, threshold, 0)
    assert protocol_round.masked
    assert 2 <= protocol_round.senders_needed <= count
    assert protocol_round.senders_needed >= threshold * count
    (holders,) = {len(partners) for partners in protocol_round.partners.values()}
    assert min(2, holders) <= protocol_round.shares_needed <= holders
    assert protocol_round.shares_needed >= threshold * holders
    # Colluders are one fewer: two senders in a sum are honest, and so is one of the partners of a sender.
    colluders = protocol_round.shares_needed - 1
    assert protocol_round.senders_needed - colluders >= 2
    assert protocol_round.masks_needed - colluders >= 1
    assert protocol_round.objection(range(count)) is None


@pytest.mark.parametrize(
    ("threshold", "needed"),
    [
        (0.5, {2: 2, 3: 3, 4: 3, 5: 3, 6: 4, 8: 5, 12: 6, 16: 8}),
        (Secure.threshold, {2: 2, 3: 3, 4: 4, 5: 4, 6: 5, 8: 7, 12: 9, 16: 12}),
        (1.0, {count: count for count in (2, 3, 4, 5, 6, 8, 12, 16)}),
    ],
)
def test_a_sum_needs_this_many_updates(threshold: float, needed: dict[int, int]) -> None:
    """The table in docs/privacy.md."""
    found = {
        count: ProtocolRound(99, 0, range(count), Secure.partners, threshold, 0).senders_needed for count in needed
    }
    assert found == needed


def test_sums_that_must_not_be_unmasked_have_an_objection() -> None:
    protocol_round = ProtocolRound(9, 0, dict.fromkeys(range(8), 0.1), 2, 0.25, 0)
    order = [0]
    while len(order) < 8:
        order.append(next(p for p in protocol_round.partners[order[-1]] if p not in order[-2:]))
    assert protocol_round.objection([0, 8]) == "some of them do not send to the receiver in this round"
    assert protocol_round.objection(order[:2]) == "2 of 8 updates are in the sum, and 3 are needed"
    assert protocol_round.objection(order[:3]) is None
    assert protocol_round.objection([order[0], order[1], order[4]]) == (
        "so many updates are missing that the masks of the others cancel in parts of the sum"
    )
    assert not ProtocolRound(9, 0, {1: 1.0}, 2, 0.5, 0).masked


# Payloads


ARRAYS = st.one_of(
    st.none(),
    hnp.arrays(st.sampled_from([np.uint8, np.uint32, np.float32, np.int64]), hnp.array_shapes(min_dims=0, max_dims=3)),
)


@given(ARRAYS, ARRAYS)
def test_invalid_payloads_are_rejected(one: Any, other: Any) -> None:
    payload = Payload({name: a for name, a in (("seals", one), ("shares", other)) if a is not None})
    for read in (
        lambda: read_node_ids(payload, "seals"),
        lambda: read_rows(payload, "shares", 16),
        lambda: MaskedUpdate.from_payload(Payload({**payload.arrays, "words": np.zeros(1, np.uint32)}), 2),
    ):
        with contextlib.suppress(MessageError):
            read()
    if one is None or one.ndim != 1 or one.dtype != np.uint32:
        with pytest.raises(MessageError, match="increasing node ids"):
            read_node_ids(payload, "seals")


@given(st.sets(st.integers(0, 2**32 - 1)), st.lists(st.binary(min_size=5, max_size=5)))
def test_node_ids_and_rows_survive_a_round_trip(nodes: set[int], parts: list[bytes]) -> None:
    payload = Payload({"of": to_node_ids(nodes), "parts": to_rows(parts)})
    assert read_node_ids(payload, "of") == tuple(sorted(nodes))
    assert read_rows(payload, "parts", 5) == parts
    if parts:
        with pytest.raises(MessageError, match="rows of 4 bytes"):
            read_rows(payload, "parts", 4)


@pytest.mark.parametrize("order", [[1, 1], [2, 1]])
def test_repeated_or_unordered_node_ids_are_rejected(order: list[int]) -> None:
    with pytest.raises(MessageError, match="increasing"):
        read_node_ids(Payload({"of": np.array(order, np.uint32)}), "of")


# The coordinates that a receiver chooses


def model(*values: float) -> Any:
    return np.array(values, np.float32)


def test_at_first_the_coordinates_with_the_largest_own_change_are_chosen() -> None:
    chooser = CoordinateChooser(model(0, 0, 10, 0), 2)
    assert chooser.choose(model(3, 1, 10, -2), 0).tolist() == [0, 3]


def test_change_is_measured_from_the_last_average() -> None:
    chooser = CoordinateChooser(np.zeros(3, np.float32), 1)
    assert chooser.choose(model(9, 4, 3), 0).tolist() == [0]
    chooser.update(model(5, 4, 3), np.array([0]), np.array([0.0]), 4)  # no change at the neighbours
    assert chooser.choose(model(8, 4, 3), 1).tolist() == [1]
    assert chooser.choose(model(14, 4, 3), 1).tolist() == [0]  # averaged one round ago; the others two


def test_coordinates_that_change_only_at_neighbours_are_chosen_again() -> None:
    still = np.zeros(4, np.float32)
    chooser = CoordinateChooser(still, 1)
    chooser.choose(still, 0)
    chooser.update(still, np.array([0, 1, 2]), np.array([1.0, 0.0, 3.0]), 4)
    assert chooser.choose(still, 1).tolist() == [2]
    chooser.update(still, np.array([2]), np.array([6.0]), 4)
    # If the mean of four models moves by 1, each moves by 2; smoothing takes half of it. For 3, it does so twice.
    assert chooser.state()["speed"].tolist() == [1.0, 0.0, 4.5, 0.0]


def test_slow_coordinates_are_chosen_but_rarely() -> None:
    still, speeds = np.zeros(2, np.float32), np.array([1.0, 4.0])
    chooser, turns = CoordinateChooser(still, 1), list[int]()
    chooser.choose(still, 0)
    chooser.update(still, np.array([0, 1]), speeds, 1)
    for round in range(1, 41):
        chosen = chooser.choose(still, round)
        turns += chosen.tolist()
        chooser.update(still, chosen, speeds[chosen] * (round + 1), 1)
    assert 8 <= turns.count(0) <= 16  # the other coordinate moves four times as fast


def test_two_averages_in_one_round_leave_finite_speeds() -> None:
    chooser = CoordinateChooser(np.zeros(3, np.float32), 1)
    for _ in range(2):
        chooser.choose(np.zeros(3, np.float32), 0)
        chooser.update(np.zeros(3, np.float32), np.array([0, 1]), np.array([1.0, 0.0]), 2)
    assert np.isfinite(chooser.state()["speed"]).all()


@given(st.data())
def test_the_requested_number_is_chosen_and_a_restored_copy_chooses_the_same(data: Any) -> None:
    size = data.draw(st.integers(1, 20))
    count = data.draw(st.integers(1, size))
    models = hnp.arrays(np.float32, size, elements=st.floats(-100, 100, width=32))
    chooser = CoordinateChooser(data.draw(models), count)
    for round in data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True).map(sorted)):
        chosen = chooser.choose(data.draw(models), round)
        assert chosen.size == count
        assert np.all(np.diff(chosen) > 0)
        if data.draw(st.booleans()):
            chooser.update(
                data.draw(models), chosen, data.draw(models)[chosen].astype(np.float64), data.draw(st.integers(2, 9))
            )
        copy = CoordinateChooser(np.zeros(size, np.float32), count)
        copy.restore(chooser.state())
        after = data.draw(models)
        assert copy.choose(after, round + 1).tolist() == chooser.choose(after, round + 1).tolist()
