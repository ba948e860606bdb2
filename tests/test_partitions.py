"""Partitions cover every sample once, leave no node empty, and raise an error when that is impossible."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shoal.data import PARTITIONS, OwnerPartition, Partition, Samples
from shoal.data.partitions import Classes, Dirichlet, Iid, Natural, Quantity, Shards
from shoal.data.shifts import Noise, Rotation
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.testing import check_partition

few = st.integers(1, 4)
naturals = st.builds(Natural, by=st.sampled_from(["users", "samples"]), order=st.sampled_from(["random", "contiguous"]))
CASES: dict[str, st.SearchStrategy[Partition | OwnerPartition]] = {
    "iid": st.just(Iid()),
    "shards": st.builds(Shards, per_node=few),
    "dirichlet": st.builds(Dirichlet, alpha=st.sampled_from([1e-300, 1e-3, 0.1, 0.5, 10.0, 1e9]), minimum=few),
    "classes": st.builds(Classes, per_node=few),
    "quantity": st.builds(
        Quantity,
        law=st.sampled_from(["dirichlet", "power"]),
        alpha=st.sampled_from([1e-300, 0.1, 10.0]),
        exponent=st.sampled_from([0.0, 1.0, 100.0]),
        minimum=few,
    ),
    "natural": naturals,
    "rotation": st.builds(Rotation, of=st.one_of(naturals, st.just(Iid()), st.just(Shards(1)))),
    "noise": st.builds(Noise, of=st.one_of(naturals, st.just(Iid()), st.just(Dirichlet(0.1)))),
}
ONE_OF_EACH = {
    "iid": Iid(),
    "shards": Shards(),
    "dirichlet": Dirichlet(),
    "classes": Classes(),
    "quantity": Quantity(),
    "natural": Natural(),
    "rotation": Rotation(),
    "noise": Noise(),
}

# Any integers, in any order, in classes of any sizes.
label_arrays = st.builds(
    lambda sizes, seed: np.random.default_rng(seed).permutation(
        np.repeat(np.array([3, -7, 10**12, 0, 1, 2])[: len(sizes)], sizes)
    ),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    seed=st.integers(0, 100),
)
# A busy machine is no failure, and many of the drawn combinations are rightly rejected.
law = settings(
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
DIGITS = np.random.default_rng(0).integers(0, 10, 3000)


def split(partition: Partition | OwnerPartition, labels: np.ndarray, nodes: int, seed: int = 0) -> list[np.ndarray]:
    """Split the samples, with one user per sample if the partition goes by users."""
    rng = generator(seed, "partition")
    if isinstance(partition, OwnerPartition):
        return partition.split_owned(owned(np.arange(len(labels))), owned([]), nodes, rng)[0]
    return partition.split(labels, nodes, rng)


def owned(owner: object) -> Samples:
    owner = np.array(owner, np.int64)
    return Samples(np.zeros((len(owner), 1), np.float32), np.zeros(len(owner), np.int64), owner)


def test_every_registered_partition_has_a_case():
    assert set(CASES) == set(ONE_OF_EACH) == set(PARTITIONS)
    for target in PARTITIONS.values():
        module, _, name = target.partition(":")
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", PARTITIONS)
@law
@given(data=st.data(), labels=label_arrays, nodes=st.integers(1, 30), seed=st.integers(0, 5))
def test_partitions_conform(name, data, labels, nodes, seed):
    partition = data.draw(CASES[name])
    try:
        split(partition, labels, nodes)
    except DataError:
        assume(False)  # another test checks that only impossible splits are rejected
    covering = name != "classes" or nodes * partition.per_node >= len(np.unique(labels))
    check_partition(partition, labels, nodes, seed, covering)


@pytest.mark.parametrize("name", PARTITIONS)
@law
@given(data=st.data(), nodes=st.integers(1, 60), seed=st.integers(0, 5))
def test_sufficient_data_are_never_rejected(name, data, nodes, seed):
    partition = data.draw(CASES[name])
    covering = name != "classes" or nodes * partition.per_node >= 10
    check_partition(partition, DIGITS, nodes, seed, covering)


@pytest.mark.parametrize("partition", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_another_seed_gives_a_different_split(partition):
    first, second = (np.concatenate(split(partition, DIGITS, 10, seed)) for seed in (0, 1))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    "partition",
    [Iid(), Dirichlet(1.0), Dirichlet(0.01, minimum=150), Classes(1), Quantity(), Quantity("power")],
    ids=repr,
)
def test_the_samples_of_a_node_come_from_the_whole_file(partition):
    count = 3000
    for part in split(partition, np.zeros(count, np.int64), 10):
        deviation = count / np.sqrt(12 * len(part))  # of the mean of as many random positions
        assert abs(part.mean() - count / 2) < 5 * deviation


def test_iid_parts_differ_by_at_most_one_sample_and_hold_every_class():
    parts = split(Iid(), DIGITS, 7)
    assert {len(part) for part in parts} <= {3000 // 7, 3000 // 7 + 1}
    assert all(len(np.unique(DIGITS[part])) == 10 for part in parts)


@law
@given(labels=label_arrays, nodes=st.integers(1, 20), per_node=few)
def test_shards_are_contiguous_runs_of_the_sorted_labels(labels, nodes, per_node):
    assume(nodes * per_node <= len(labels))
    place = np.empty(len(labels), dtype=np.int64)
    place[np.argsort(labels, kind="stable")] = np.arange(len(labels))
    for part in split(Shards(per_node), labels, nodes):
        runs = np.split(np.sort(place[part]), np.flatnonzero(np.diff(np.sort(place[part])) > 1) + 1)
        assert len(runs) <= per_node
        assert per_node * (len(labels) // (nodes * per_node)) <= len(part)
        assert len(part) <= per_node * -(-len(labels) // (nodes * per_node))


@law
@given(alpha=st.sampled_from([1e-6, 0.01, 0.5]), nodes=st.integers(1, 40), minimum=st.integers(1, 70), seed=few)
def test_dirichlet_gives_every_node_its_minimum(alpha, nodes, minimum, seed):
    assume(nodes * minimum <= len(DIGITS))
    assert min(map(len, split(Dirichlet(alpha, minimum), DIGITS, nodes, seed))) >= minimum


def test_dirichlet_takes_missing_samples_from_the_largest_nodes():
    drawn, raised = (np.array([*map(len, split(Dirichlet(0.3, minimum), DIGITS, 20))]) for minimum in (1, 120))
    assert drawn.min() > 1, "choose another seed: this draw was itself repaired"
    assert (raised[drawn < 120] == 120).all()
    gave = raised < drawn
    assert 1 < gave.sum() < 20
    assert (raised[gave] >= raised.max() - 1).all()
    assert (raised == drawn)[~gave & (drawn >= 120)].all()


def test_a_smaller_alpha_is_more_skewed():
    def largest_share(alpha: float) -> float:
        parts = split(Dirichlet(alpha), DIGITS, 10)
        return float(np.mean([np.bincount(DIGITS[part]).max() / len(part) for part in parts]))

    assert largest_share(0.05) > largest_share(0.5) > largest_share(100.0)


@law
@given(labels=label_arrays, nodes=st.integers(1, 30), per_node=few, seed=few)
def test_every_node_has_the_requested_number_of_evenly_divided_classes(labels, nodes, per_node, seed):
    present, counts = np.unique(labels, return_counts=True)
    possible = np.minimum(counts, nodes).sum() >= nodes * per_node and len(labels) >= nodes
    if not possible:
        with pytest.raises(DataError, match="partition 'classes'"):
            split(Classes(per_node), labels, nodes, seed)
        return
    held = [np.unique(labels[part], return_counts=True) for part in split(Classes(per_node), labels, nodes, seed)]
    assert all(len(classes) == per_node for classes, _ in held)
    for label in present:
        shares = [counts[classes == label].item() for classes, counts in held if label in classes]
        assert max(shares, default=0) - min(shares, default=0) <= 1
        assert shares or nodes * per_node < len(present)


def test_nodes_are_spread_evenly_over_the_classes():
    parts = split(Classes(3), DIGITS, 20)
    holders = np.bincount(np.concatenate([np.unique(DIGITS[part]) for part in parts]))
    assert holders.tolist() == [6] * 10


def test_classes_without_a_node_are_left_out_completely():
    parts = split(Classes(2), DIGITS, 3)
    held = np.unique(DIGITS[np.concatenate(parts)])
    assert len(held) == 6
    assert sum(map(len, parts)) == np.isin(DIGITS, held).sum()


# Quantities


@law
@given(data=st.data(), nodes=st.integers(1, 40), minimum=st.integers(1, 70), seed=few)
def test_every_node_has_the_minimum_quantity(data, nodes, minimum, seed):
    assume(nodes * minimum <= len(DIGITS))
    partition = data.draw(st.sampled_from([Quantity("power", exponent=3, minimum=minimum), Quantity(minimum=minimum)]))
    assert min(map(len, split(partition, DIGITS, nodes, seed))) >= minimum


def test_quantities_follow_their_distribution_and_every_node_has_the_global_class_mixture():
    sizes = sorted(map(len, split(Quantity("power", exponent=1.0), DIGITS, 4)), reverse=True)
    assert sizes == pytest.approx([3000 * share / 25 for share in (12, 6, 4, 3)], abs=1)
    even, uneven = (np.std([*map(len, split(Quantity(alpha=alpha), DIGITS, 10))]) for alpha in (100, 0.1))
    assert uneven > 4 * even
    largest = max(split(Quantity(alpha=0.1), DIGITS, 10), key=len)
    assert np.bincount(DIGITS[largest]) / len(largest) == pytest.approx(np.bincount(DIGITS) / 3000, abs=0.03)


# By owner

user_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def of_users(sizes: list[int]) -> np.ndarray:
    """Owners of the samples: users 0, 3, 6, … with the given numbers of samples, in any order."""
    return np.random.default_rng(0).permutation(np.repeat(3 * np.arange(len(sizes)), sizes))


@law
@given(partition=naturals, sizes=user_sizes, nodes=st.integers(1, 40), seed=few)
def test_users_are_never_divided_and_keep_their_test_samples(partition, sizes, nodes, seed):
    assume(len(sizes) >= nodes)
    owner = of_users(sizes)
    check_partition(partition, np.zeros(len(owner), np.int64), nodes, seed, owners=owner)
    tests = np.append(owner[::2], [1, 10**6])  # two belong to users without training samples
    parts, own = partition.split_owned(owned(owner), owned(tests), nodes, generator(seed, "partition"))
    held = [set(owner[part]) for part in parts]
    assert sum(map(len, held)) == len(sizes), "a user is on two nodes"
    assert [set(tests[mine]) <= users for mine, users in zip(own, held, strict=True)] == [True] * nodes
    assert sum(map(len, own)) == len(tests) - 2
    if partition.by == "users":
        assert max(map(len, held)) - min(map(len, held)) <= 1
    if partition.order == "contiguous":
        assert [user for users in held for user in sorted(users)] == sorted(set(owner))


@law
@given(sizes=user_sizes, nodes=st.integers(1, 10), order=st.sampled_from(["random", "contiguous"]))
def test_balanced_nodes_have_nearly_equal_numbers_of_samples(sizes, nodes, order):
    assume(len(sizes) >= nodes)
    owner = of_users(sizes)
    parts, _ = Natural("samples", order).split_owned(owned(owner), owned([]), nodes, generator(0, "partition"))
    held = [*map(len, parts)]
    assert max(held) - sum(sizes) / nodes <= (1 if order == "random" else 2) * max(sizes)


def test_the_seed_decides_which_nodes_get_an_additional_user():
    owner = owned(np.arange(6))
    found = set()
    for seed in range(60):
        parts, _ = Natural("samples").split_owned(owner, owned([]), 4, generator(seed, "partition"))
        found.add(tuple(map(len, parts)))
    assert {tuple(sorted(sizes)) for sizes in found} == {(1, 1, 2, 2)}
    assert len(found) == 6, "any two of four nodes"


def test_blocks_of_users_equal_those_of_decentralizepy():
    owner = np.repeat(np.arange(11), 2)
    parts, _ = Natural(order="contiguous").split_owned(owned(owner), owned([]), 4, generator(0, "partition"))
    assert [sorted(set(owner[part])) for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


def test_data_without_enough_users_are_rejected():
    unowned = Samples(np.zeros((4, 1), np.float32), np.zeros(4, np.int64))
    with pytest.raises(DataError, match="this data set has no users; use 'iid'"):
        Natural().split_owned(unowned, unowned, 2, generator(0, "partition"))
    with pytest.raises(DataError, match=r"3 nodes share 2 users.* use at most 2 nodes"):
        Natural().split_owned(owned([0, 0, 0, 1]), owned([]), 3, generator(0, "partition"))


def test_test_samples_without_owners_belong_to_no_node():
    common = Samples(np.zeros((4, 1), np.float32), np.zeros(4, np.int64))
    _, own = Natural().split_owned(owned([0, 1, 2]), common, 2, generator(0, "partition"))
    assert [*map(len, own)] == [0, 0]


LABELS = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])


@pytest.mark.parametrize(
    ("partition", "nodes", "expected"),
    [
        (Iid(), 11, ["'iid'", "11 nodes", "10 samples", "at most 10 nodes"]),
        (Shards(), 11, ["'shards'", "11 nodes", "10 samples"]),
        (Dirichlet(), 11, ["'dirichlet'", "11 nodes", "10 samples"]),
        (Classes(), 11, ["'classes'", "11 nodes", "10 samples"]),
        (Quantity(), 11, ["'quantity'", "11 nodes", "10 samples"]),
        (Natural(), 11, ["'natural'", "11 nodes", "10 users", "at most 10 nodes"]),
        (Quantity(minimum=4), 3, ["'quantity'", "minimum = 4", "12 samples", "at most 3"]),
        (Shards(4), 3, ["'shards'", "per_node = 4", "12 shards", "10 samples", "per_node of at most 3"]),
        (Dirichlet(0.5, 4), 3, ["'dirichlet'", "minimum = 4", "12 samples", "there are 10", "at most 3"]),
        (Classes(4), 2, ["'classes'", "per_node = 4", "there are 3 classes", "per_node of at most 3"]),
        (Classes(3), 4, ["'classes'", "per_node = 3", "4 nodes", "per_node of at most 2"]),
    ],
    ids=str,
)
def test_an_impossible_split_is_rejected_with_valid_values(partition, nodes, expected):
    with pytest.raises(DataError) as caught:
        split(partition, LABELS, nodes)
    assert [text for text in expected if text not in str(caught.value)] == []


class Careless:
    """A partition that breaks its contract in one way."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.calls = 0

    def __repr__(self) -> str:
        return "careless"

    def split(self, labels: np.ndarray, nodes: int, rng: np.random.Generator) -> list[np.ndarray]:
        self.calls += 1
        if len(labels) < nodes and self.fault != "accepts anything":
            raise DataError("too few")
        parts = np.array_split(np.arange(max(len(labels), nodes)), nodes)
        if self.fault == "shares":
            parts[0] = np.append(parts[0], parts[1][0])
        elif self.fault == "forgets":
            parts[0] = parts[0][1:]
        elif self.fault == "starves":
            parts[0] = parts[0][:0]
        elif self.fault == "invents":
            parts[0] = np.append(parts[0], len(labels))
        elif self.fault == "miscounts":
            parts.pop()
        elif self.fault == "wavers" and self.calls > 1:
            parts.reverse()
        elif self.fault == "scribbles":
            labels[0] += 1
        elif self.fault == "narrow":
            parts = [part.astype(np.int32) for part in parts]
        return parts


@pytest.mark.parametrize(
    ("fault", "expected_error"),
    [
        ("shares", "more than one node: 4"),
        ("forgets", "1 samples to no node: 0"),
        ("starves", "node 0: it has no sample"),
        ("invents", "index 12; there are 12 samples"),
        ("miscounts", "2 parts for 3 nodes"),
        ("wavers", "parts differ"),
        ("scribbles", "changed the labels"),
        ("narrow", "int32; expected int64"),
        ("accepts anything", "2 samples over 3 nodes"),
    ],
)
def test_the_conformance_suite_detects_a_faulty_partition(fault, expected_error):
    with pytest.raises(AssertionError, match=expected_error):
        check_partition(Careless(fault), np.arange(12) % 3, 3)


@pytest.mark.parametrize(
    "partition",
    [Iid(), Shards(), Dirichlet(0.05, 20), Classes(), Quantity(), Natural("samples"), Natural("samples", "contiguous")],
    ids=repr,
)
def test_ten_thousand_nodes_share_a_million_samples(partition):
    labels = np.random.default_rng(0).integers(0, 10, 1_000_000)
    parts = split(partition, labels, 10_000)
    assert sum(map(len, parts)) == 1_000_000


class CarelessByOwner:
    """A partition by owner that breaks its contract in one way."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __repr__(self) -> str:
        return "careless"

    def split_owned(self, train, test, nodes, rng):
        parts, tests = Natural(order="contiguous").split_owned(train, test, nodes, rng)
        if self.fault == "tests unknown users":
            tests.reverse()
        elif self.fault == "tests twice":
            tests[0] = np.append(tests[0], tests[0][0])
        elif self.fault == "forgets":
            parts[0] = parts[0][1:]
        return parts, tests


@pytest.mark.parametrize(
    ("fault", "expected_error"),
    [
        ("tests unknown users", "node 0: it has test samples of 9, but no training samples of them"),
        ("tests twice", "1 test samples to more than one node: 0"),
        ("forgets", "1 samples to no node: 0"),
    ],
)
def test_the_conformance_suite_detects_a_faulty_owner_partition(fault, expected_error):
    with pytest.raises(AssertionError, match=expected_error):
        check_partition(CarelessByOwner(fault), np.arange(12) % 3, 3)
