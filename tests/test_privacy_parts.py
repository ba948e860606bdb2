"""What secure aggregation is made of: a ring in which sums are exact, masks, shares of secrets, who masks with whom."""

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

from shoal.errors import MessageError
from shoal.message import Payload
from shoal.sharing.secure import mask_graph as circles
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.coordinates import Wanted
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.mask_graph import circle, connected
from shoal.sharing.secure.masks import KEY_BYTES, Keys, commitment
from shoal.sharing.secure.messages import Gathering, Statement, ids, naming, rows, strings
from shoal.sharing.secure.unmasking import _parts

RUN = "0" * 16
RINGS = st.builds(FixedPoint, st.sampled_from([32, 64]), st.sampled_from([1.0, 3.7, 64.0, 1000.0]))


def unevenness(symbols: Any, kinds: int) -> float:
    """How many standard deviations chi-square is above what equally likely symbols give: 8 or more by chance less
    often than once in a thousand million times."""
    counts = np.bincount(symbols, minlength=kinds)
    expected = counts.sum() / kinds
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float((chi_square - (kinds - 1)) / math.sqrt(2 * (kinds - 1)))


# The ring


@st.composite
def models(draw: Any) -> tuple[FixedPoint, Any, Any]:
    """A ring, models within its range, and weights that add up to 1 at most."""
    ring = draw(RINGS)
    count, size = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    inside = st.floats(-1, 1, width=32).map(lambda share: np.float32(share * ring.range * 0.999999))
    values = draw(hnp.arrays(np.float32, (count, size), elements=inside))
    weights = draw(hnp.arrays(np.float64, count, elements=st.floats(0.001, 1)))
    return ring, values, weights / max(1.0, weights.sum())


@given(models(), st.randoms())
def test_a_sum_is_near_that_of_the_numbers_and_the_same_in_any_order(drawn: Any, random: Any) -> None:
    ring, values, weights = drawn
    encoded = [ring.encode(v, w) for v, w in zip(values, weights, strict=True)]
    total = sum(encoded, np.zeros_like(encoded[0]))
    random.shuffle(encoded)
    assert np.array_equal(total, sum(encoded, np.zeros_like(encoded[0])))
    assert total.dtype == ring.dtype
    off = np.abs(ring.decode(total) - weights @ values.astype(np.float64)).max()
    # A term is off by half a unit; a double holds 53 bits of what it is a sum of.
    assert off <= ring.range * len(values) * (2.0 ** -(ring.bits - 1) + 2.0**-51)
    assert off <= ring.range * 2.0**-16


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_a_sum_of_weights_of_1_does_not_wrap_at_the_very_end_of_the_range(bits: Any, sign: int, count: int) -> None:
    ring = FixedPoint(bits, 8.0)
    end = np.full(3, sign * 8.0, np.float32)
    total = sum((ring.encode(end, 1 / count) for _ in range(count)), np.zeros(3, ring.dtype))
    np.testing.assert_allclose(ring.decode(total), end, rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "outside"),
    [(8.0, None), (-8.0, None), (0.0, None), (8.0001, 8.0001), (-9.0, -9.0), (math.inf, math.inf),
     (-math.inf, -math.inf), (math.nan, math.nan)],
)  # fmt: skip
def test_what_cannot_be_encoded_is_named(value: float, outside: float | None) -> None:
    found = FixedPoint(32, 8.0).outside(np.array([1.0, value, -2.0], np.float32))
    assert found is None if outside is None else found == pytest.approx(outside, nan_ok=True)


def test_of_several_that_cannot_be_encoded_the_farthest_is_named_and_of_nothing_nothing() -> None:
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
def test_a_mask_that_is_put_on_and_taken_off_leaves_nothing(seed: bytes, dtype: str, size: int) -> None:
    words = np.arange(size, dtype=dtype)
    masks.add(words, seed)
    assert size < 4 or not np.array_equal(words, np.arange(size, dtype=dtype))
    masks.subtract(words, seed)
    assert np.array_equal(words, np.arange(size, dtype=dtype))


def agreed() -> tuple[Keys, Keys]:
    low, high = Keys(RUN), Keys(RUN)
    low.agree(9, high.public)
    high.agree(2, low.public)
    return low, high


def test_two_nodes_agree_upon_a_seed_for_each_receiver_and_round_and_nobody_else_does() -> None:
    low, high = agreed()
    places = list(itertools.product(range(3), range(3)))
    assert [low.with_peer(9, *place) for place in places] == [high.with_peer(2, *place) for place in places]
    seeds = [low.with_peer(9, *place).seed for place in places]
    own = [keys.own_seed(*place) for place in places for keys in (low, high)]
    assert len({*seeds, *own}) == len(seeds) + len(own)
    assert seeds[0] not in {one.with_peer(9, 0, 0).seed for one in (agreed()[0] for _ in range(3))}
    assert seeds[0].hex() not in repr(low.with_peer(9, 0, 0))
    assert 9 in low
    assert 2 not in low


def test_a_key_of_one_run_gives_other_seeds_in_another() -> None:
    low, high = agreed()
    low._run = b"another"
    low.agree(9, high.public)
    assert low.with_peer(9, 0, 0) != high.with_peer(2, 0, 0)


def test_what_is_sealed_is_for_the_other_of_the_two_for_this_receiver_and_round() -> None:
    low, high = agreed()
    sealed = low.with_peer(9, 5, 3).seal(b"a share", from_lower=True)
    assert high.with_peer(2, 5, 3).unseal(sealed, from_lower=True) == b"a share"
    assert b"a share" not in sealed
    other = Keys(RUN)
    other.agree(2, low.public)
    for pair, from_lower in [
        (high.with_peer(2, 5, 3), False),
        (high.with_peer(2, 4, 3), True),
        (high.with_peer(2, 5, 2), True),
        (other.with_peer(2, 5, 3), True),
    ]:
        with pytest.raises(MessageError, match="tampered with, or under another key"):
            pair.unseal(sealed, from_lower)
    for place in range(len(sealed)):
        tampered = bytes([*sealed[:place], sealed[place] ^ 1, *sealed[place + 1 :]])
        with pytest.raises(MessageError, match="tampered"):
            high.with_peer(2, 5, 3).unseal(tampered, from_lower=True)


def test_keys_that_are_no_keys_or_somebody_else_s_are_refused() -> None:
    keys, other = Keys(RUN), Keys(RUN)
    keys.agree(1, other.public)
    keys.agree(1, other.public)  # the same once more changes nothing
    assert keys.owner(other.public) == 1
    with pytest.raises(MessageError, match="its key is this node's own; every node must have a key of its own"):
        keys.agree(2, keys.public)
    with pytest.raises(MessageError, match="its key is that of node 1; every node must have a key of its own"):
        keys.agree(2, other.public)
    for low_order in (bytes(KEY_BYTES), bytes([1, *bytes(31)])):
        with pytest.raises(MessageError, match="not one to agree upon a secret with"):
            keys.agree(2, low_order)
    with pytest.raises(MessageError, match="not one to agree upon a secret with"):
        keys.agree(2, b"short")
    assert 2 not in keys


def test_a_commitment_is_to_one_seed_for_one_receiver_and_round() -> None:
    seeds = [bytes([i]) * 16 for i in range(4)]
    made = {commitment(seed, receiver, round) for seed in seeds for receiver in range(4) for round in range(4)}
    assert len(made) == 64
    assert {len(one) for one in made} == {16}


def test_masks_are_evenly_spread() -> None:
    words = masks.mask(Keys(RUN).own_seed(0, 0), 2**18, np.dtype("<u4"))
    for byte in range(4):
        assert unevenness(words.view(np.uint8)[byte::4], 256) < 8


# Shares of secrets


def times(a: int, b: int) -> int:
    """In GF(2⁸) with x⁸ + x⁴ + x³ + x + 1, bit by bit."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = a << 1 ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def value(coefficients: list[int], x: int) -> int:
    """Of a polynomial, the constant first."""
    total, power = 0, 1
    for coefficient in coefficients:
        total ^= times(coefficient, power)
        power = times(power, x)
    return total


def test_products_are_those_of_the_field() -> None:
    everything = np.arange(256, dtype=np.uint8)
    for b in range(256):
        products = shamir._times(everything, b)
        assert products.tolist() == [times(a, b) for a in range(256)]
        if b:
            assert [shamir._divided(int(p), b) for p in products] == list(range(256))


@settings(deadline=None)
@given(st.data())
def test_any_that_suffice_give_the_secret_back(data: Any) -> None:
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
def test_one_share_fewer_than_suffice_fits_every_secret_and_each_equally_often(first: int, second: int) -> None:
    shares = shamir.split(np.array([42], np.uint8), 255, 3)
    seen = int(shares[first - 1, 0]), int(shares[second - 1, 0])
    fitting = [
        seen[0] ^ times(a, first) ^ times(b, times(first, first))
        for a in range(256)
        for b in range(256)
        if seen[0] ^ times(a, first) ^ times(b, times(first, first))
        == seen[1] ^ times(a, second) ^ times(b, times(second, second))
    ]
    assert sorted(fitting) == list(range(256))  # of all polynomials, one for every secret


@pytest.mark.parametrize("threshold", [2, 3, 5])
@pytest.mark.parametrize("secret", [0, 1, 255])
def test_fewer_shares_than_suffice_are_spread_alike_whatever_the_secret(threshold: int, secret: int) -> None:
    shares = shamir.split(np.full(2**16, secret, np.uint8), 6, threshold)
    for share in shares:
        assert unevenness(share, 256) < 8
    if threshold > 2:  # also two of them together
        for one, other in itertools.combinations(shares >> 4, 2):
            assert unevenness(one.astype(np.int64) << 4 | other, 256) < 8


def test_with_a_forged_share_or_too_few_it_is_another_secret() -> None:
    secret = np.arange(16, dtype=np.uint8)
    shares = shamir.split(secret, 5, 3)
    forged = shares[2] ^ np.uint8(1)
    assert not np.array_equal(shamir.combine({0: shares[0], 1: shares[1], 2: forged}), secret)
    assert not np.array_equal(shamir.combine({0: shares[0], 1: shares[1]}), secret)
    with pytest.raises(ValueError, match="no share at all"):
        shamir.combine({})


@pytest.mark.parametrize(("holders", "threshold"), [(0, 0), (3, 0), (3, 4), (256, 2)])
def test_shares_that_cannot_be_are_refused(holders: int, threshold: int) -> None:
    with pytest.raises(ValueError, match=f"{threshold} of {holders} shares; expected 1 of 1 at the least"):
        shamir.split(np.zeros(1, np.uint8), holders, threshold)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_tried_in_every_part_once_and_soon_without_any_one(count: int) -> None:
    holders = [2, 3, 5, 7, 11, 13, 17]
    parts = list(_parts(holders, count))
    assert sorted(parts) == list(itertools.combinations(holders, count))
    assert parts[0] == tuple(holders[:count])
    if count < len(holders):
        soon = parts[: 1 + count]
        assert all(any(holder not in part for part in soon) for holder in holders)


# Who masks with whom


COMPANIES = st.sets(st.integers(0, 10_000), min_size=2, max_size=40)


@given(COMPANIES, st.integers(2, 12), st.integers(0, 99), st.integers(0, 2**63 - 1))
def test_partners_are_mutual_and_all_are_linked(company: set[int], reach: int, receiver: int, seed: int) -> None:
    partners = circle(company, reach, receiver, seed)
    assert partners == circle(sorted(company, reverse=True), reach, receiver, seed)
    assert partners.keys() == company
    for node, others in partners.items():
        assert list(others) == sorted(set(others) - {node})
        assert all(node in partners[other] for other in others)
        assert len(others) == (len(company) - 1 if len(company) - 1 <= reach else reach // 2 * 2)
    assert connected(partners, company)


def test_a_circle_is_worked_out_once_for_all_who_stand_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    once = circles._circle
    monkeypatch.setattr(circles, "_latest", {})
    monkeypatch.setattr(circles, "_circle", lambda *asked: made.append(asked[2]) or once(*asked))
    for _ in range(3):  # each of these goes through all receivers
        for receiver in range(1000):
            circle(range(20), 4, receiver, 7)
    assert made == list(range(1000))
    for company, partners, seed in ((range(21), 4, 7), (range(20), 6, 7), (range(20), 4, 8)):
        assert circle(company, partners, 0, seed) == once(company, partners, 0, seed)


def test_the_order_on_the_circle_is_another_for_every_receiver() -> None:
    assert len({tuple(circle(range(30), 4, receiver, 0).values()) for receiver in range(5)}) == 5


@given(COMPANIES, st.integers(2, 4), st.data())
def test_they_are_connected_if_all_can_be_reached_from_one(company: set[int], reach: int, data: Any) -> None:
    partners = circle(company, reach, 0, 0)
    among = data.draw(st.sets(st.sampled_from(sorted(company))))
    groups = [{node} for node in among]
    for node, other in itertools.product(among, among):
        if other in partners[node]:
            one, two = (next(g for g in groups if n in g) for n in (node, other))
            if one is not two:
                groups.remove(two)
                one |= two
    assert connected(partners, among) == (len(groups) <= 1)


@given(st.integers(2, 60), st.integers(2, 12), st.floats(0.01, 1))
def test_a_sum_takes_two_at_least_and_a_node_is_hidden_among_as_many_as_could_tell_its_secrets(
    count: int, reach: int, threshold: float
) -> None:
    gathering = Gathering(99, 0, dict.fromkeys(range(count), 1 / count), reach, threshold, 0)
    assert gathering.masked
    assert 2 <= gathering.quorum <= count
    assert gathering.quorum >= threshold * count
    (holders,) = {len(partners) for partners in gathering.partners.values()}
    assert min(2, holders) <= gathering.shares_needed <= holders
    assert gathering.shares_needed >= threshold * holders
    # Colluders are one fewer: of those in a sum, two are honest, and one of those that a node has masked with is.
    colluders = gathering.shares_needed - 1
    assert gathering.quorum - colluders >= 2
    assert gathering.links_needed - colluders >= 1
    assert gathering.why_not(range(count)) is None


def test_sums_that_must_not_be_opened_are_known_with_the_reason() -> None:
    gathering = Gathering(9, 0, dict.fromkeys(range(8), 0.1), 2, 0.25, 0)
    order = [0]
    while len(order) < 8:
        order.append(next(p for p in gathering.partners[order[-1]] if p not in order[-2:]))
    assert gathering.why_not([0, 8]) == "some of them do not speak to the receiver in this round"
    assert gathering.why_not(order[:2]) == "2 of 8 are in the sum, and it takes 3"
    assert gathering.why_not(order[:3]) is None
    assert gathering.why_not([order[0], order[1], order[4]]) == (
        "so many are missing that the masks of the others cancel in parts of the sum"
    )
    assert not Gathering(9, 0, {1: 1.0}, 2, 0.5, 0).masked


# What travels


ARRAYS = st.one_of(
    st.none(),
    hnp.arrays(st.sampled_from([np.uint8, np.uint32, np.float32, np.int64]), hnp.array_shapes(min_dims=0, max_dims=3)),
)


@given(ARRAYS, ARRAYS)
def test_what_is_read_is_what_was_written_or_is_refused(one: Any, other: Any) -> None:
    payload = Payload({name: a for name, a in (("seals", one), ("shares", other)) if a is not None})
    for read in (
        lambda: ids(payload, "seals"),
        lambda: strings(payload, "shares", 16),
        lambda: Statement.read(Payload({**payload.arrays, "words": np.zeros(1, np.uint32)}), 2),
    ):
        with contextlib.suppress(MessageError):
            read()
    if one is None or one.ndim != 1 or one.dtype != np.uint32:
        with pytest.raises(MessageError, match="increasing numbers of nodes"):
            ids(payload, "seals")


@given(st.sets(st.integers(0, 2**32 - 1)), st.lists(st.binary(min_size=5, max_size=5)))
def test_numbers_of_nodes_and_strings_of_bytes_come_back(nodes: set[int], parts: list[bytes]) -> None:
    payload = Payload({"of": naming(nodes), "parts": rows(parts)})
    assert ids(payload, "of") == tuple(sorted(nodes))
    assert strings(payload, "parts", 5) == parts
    if parts:
        with pytest.raises(MessageError, match="rows of 4 bytes"):
            strings(payload, "parts", 4)


@pytest.mark.parametrize("order", [[1, 1], [2, 1]])
def test_nodes_named_twice_or_out_of_order_are_refused(order: list[int]) -> None:
    with pytest.raises(MessageError, match="increasing"):
        ids(Payload({"of": np.array(order, np.uint32)}), "of")


# The coordinates that a receiver names


def model(*values: float) -> Any:
    return np.array(values, np.float32)


def test_at_first_those_are_named_that_have_moved_most_here() -> None:
    wanted = Wanted(model(0, 0, 10, 0), 2)
    assert wanted.name(model(3, 1, 10, -2), 0).tolist() == [0, 3]


def test_what_was_averaged_counts_from_the_average() -> None:
    wanted = Wanted(np.zeros(3, np.float32), 1)
    assert wanted.name(model(9, 4, 3), 0).tolist() == [0]
    wanted.hear(model(5, 4, 3), np.array([0]), np.array([0.0]), 4)  # nothing has moved there
    assert wanted.name(model(8, 4, 3), 1).tolist() == [1]
    assert wanted.name(model(14, 4, 3), 1).tolist() == [0]  # a round after it was averaged; the others wait for two


def test_what_moves_at_the_neighbours_alone_is_heard_of_again() -> None:
    still = np.zeros(4, np.float32)
    wanted = Wanted(still, 1)
    wanted.name(still, 0)
    wanted.hear(still, np.array([0, 1, 2]), np.array([1.0, 0.0, 3.0]), 4)
    assert wanted.name(still, 1).tolist() == [2]
    wanted.hear(still, np.array([2]), np.array([6.0]), 4)
    # Half of what each of four moves by if their mean moves by 1; of 3, twice, half and then half of what is left.
    assert wanted._pace.tolist() == [1.0, 0.0, 4.5, 0.0]


def test_what_moves_slowly_gets_its_turn_and_seldom() -> None:
    still, paces = np.zeros(2, np.float32), np.array([1.0, 4.0])
    wanted, turns = Wanted(still, 1), list[int]()
    wanted.name(still, 0)
    wanted.hear(still, np.array([0, 1]), paces, 1)
    for round in range(1, 41):
        named = wanted.name(still, round)
        turns += named.tolist()
        wanted.hear(still, named, paces[named] * (round + 1), 1)
    assert 8 <= turns.count(0) <= 16  # beside one that moves four times as fast: after two rounds it has its turn


def test_what_is_heard_twice_in_a_round_leaves_numbers() -> None:
    wanted = Wanted(np.zeros(3, np.float32), 1)
    for _ in range(2):
        wanted.name(np.zeros(3, np.float32), 0)
        wanted.hear(np.zeros(3, np.float32), np.array([0, 1]), np.array([1.0, 0.0]), 2)
    assert np.isfinite(wanted._pace).all()


@given(st.data())
def test_as_many_are_named_as_are_wanted_and_a_copy_names_the_same(data: Any) -> None:
    size = data.draw(st.integers(1, 20))
    count = data.draw(st.integers(1, size))
    models = hnp.arrays(np.float32, size, elements=st.floats(-100, 100, width=32))
    wanted = Wanted(data.draw(models), count)
    for round in data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True).map(sorted)):
        named = wanted.name(data.draw(models), round)
        assert named.size == count
        assert np.all(np.diff(named) > 0)
        if data.draw(st.booleans()):
            wanted.hear(
                data.draw(models), named, data.draw(models)[named].astype(np.float64), data.draw(st.integers(2, 9))
            )
        copy = Wanted(np.zeros(size, np.float32), count)
        copy.restore(wanted.state())
        after = data.draw(models)
        assert copy.name(after, round + 1).tolist() == wanted.name(after, round + 1).tolist()
