"""Partitions: the usual ways to distribute training samples over nodes.

    iid         the same distribution on every node
    shards      sorted by label and cut: a few classes per node (McMahan et al. 2017)
    dirichlet   every class spread unevenly, more so for a small alpha (Hsu et al. 2019)
    classes     a fixed number of classes per node
    quantity    the same distribution on every node, but very different amounts (Li et al. 2022)
    natural     by the users of the data set (Caldas et al. 2018)

Every partition assigns each sample to exactly one node (`Classes` documents an exception), leaves no node empty, takes
any integers in any order as labels, and draws from the given generator only. The indices of a node are sorted. A
partition computes one node for every sample; nothing costs nodes × samples. Partitions that transform inputs are in
`shifts`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Indices, Samples
from shoal.errors import DataError
from shoal.traits import Traits
from shoal.types import Bounds

NO_NODE = -1


@dataclass(frozen=True)
class Iid:
    """Samples assigned at random: every node has the distribution of the data set. Sizes differ by at most one."""

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        _require_a_sample_each("iid", len(labels), nodes)
        return _samples_of_nodes(rng.permutation(np.arange(len(labels)) % nodes), nodes)


@dataclass(frozen=True)
class Shards:
    """Sorted by label, cut into nodes × `per_node` shards of nearly equal size, assigned at random.

    McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data". A node
    has about `per_node` classes: fewer if its shards have the same class, more if a shard has two.
    """

    per_node: Annotated[int, Bounds(at_least=1)] = 2

    traits: ClassVar[Traits] = Traits(splits_by_class=True)

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        samples, shards = len(labels), nodes * self.per_node
        _require_a_sample_each("shards", samples, nodes)
        if shards > samples:
            raise DataError(
                f"partition 'shards': {nodes} nodes with per_node = {self.per_node} make {shards} shards of "
                f"{samples} samples; use per_node of at most {samples // nodes}, fewer nodes "
                f"or a larger data set"
            )
        holder = rng.permutation(np.repeat(np.arange(nodes), self.per_node))
        owner = np.empty(samples, dtype=np.int64)
        owner[np.argsort(labels, kind="stable")] = holder[np.arange(samples) * shards // samples]
        return _samples_of_nodes(owner, nodes)


@dataclass(frozen=True)
class Dirichlet:
    """Each class divided among the nodes in proportions drawn from a symmetric Dirichlet distribution.

    Yurochkin et al. 2019, "Bayesian Nonparametric Federated Learning of Neural Networks"; after Hsu et al.
    2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification". A
    small `alpha` gives a class to few nodes, a large one to all nodes equally.

    The proportions are drawn once. Nodes with fewer than `minimum` samples then get random samples of the largest
    nodes, always from the currently largest one, so that the split succeeds even for an extreme `alpha`.
    """

    alpha: Annotated[float, Bounds(above=0, at_most=1e9)] = 0.5
    minimum: Annotated[int, Bounds(at_least=1)] = 1

    traits: ClassVar[Traits] = Traits(splits_by_class=True)

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        samples = len(labels)
        _require_a_sample_each("dirichlet", samples, nodes)
        _require_the_minimum("dirichlet", self.minimum, samples, nodes)
        owner = np.empty(samples, dtype=np.int64)
        for members in _samples_of_classes(labels):
            proportions = rng.dirichlet(np.full(nodes, self.alpha))
            owner[rng.permutation(members)] = _divide(len(members), proportions)
        _raise_to_minimum(owner, nodes, self.minimum, rng)
        return _samples_of_nodes(owner, nodes)


@dataclass(frozen=True)
class Classes:
    """Each node holds exactly `per_node` classes; a class is divided evenly among the nodes that hold it.

    All classes are on equally many nodes, as far as they have a sample for each. Every sample is assigned if nodes ×
    `per_node` is at least the number of classes; otherwise some classes, chosen at random, are on no node.
    """

    per_node: Annotated[int, Bounds(at_least=1)] = 2

    traits: ClassVar[Traits] = Traits(splits_by_class=True)

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        _require_a_sample_each("classes", len(labels), nodes)
        members = _samples_of_classes(labels)
        places = np.minimum([len(m) for m in members], nodes)  # the nodes that can hold each class, at most
        most = int(places.sum()) // nodes
        if self.per_node > len(members):
            raise DataError(
                f"partition 'classes': per_node = {self.per_node}, but there are {len(members)} classes; "
                f"use per_node of at most {most}"
            )
        if self.per_node > most:
            raise DataError(
                f"partition 'classes': per_node = {self.per_node} for {nodes} nodes, but the classes have "
                f"too few samples for so many nodes; use per_node of at most {most}, fewer nodes or "
                f"a larger data set"
            )
        holders = _fill_evenly(nodes * self.per_node, places, rng.permutation(len(members)))
        owner = np.full(len(labels), NO_NODE, dtype=np.int64)
        for samples, nodes_of_class in zip(members, _assign_classes(holders, nodes, self.per_node, rng), strict=True):
            if len(nodes_of_class):
                turns = np.arange(len(samples)) % len(nodes_of_class)
                owner[rng.permutation(samples)] = nodes_of_class[turns]
        return _samples_of_nodes(owner, nodes)


@dataclass(frozen=True)
class Quantity:
    """The same distribution on every node, in very different amounts.

    Li et al. 2022, "Federated Learning on Non-IID Data Silos". The shares are drawn from a symmetric Dirichlet
    distribution, more uneven for a small `alpha`; or they follow a power law, 1 to 2^−`exponent` to 3^−`exponent` …,
    assigned to the nodes at random. Nodes with fewer than `minimum` samples get samples of the
    largest nodes.
    """

    law: Literal["dirichlet", "power"] = "dirichlet"
    alpha: Annotated[float, Bounds(above=0, at_most=1e9)] = 0.5
    exponent: Annotated[float, Bounds(at_least=0, at_most=100)] = 1.0
    minimum: Annotated[int, Bounds(at_least=1)] = 1

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        samples = len(labels)
        _require_a_sample_each("quantity", samples, nodes)
        _require_the_minimum("quantity", self.minimum, samples, nodes)
        if self.law == "dirichlet":
            shares = rng.dirichlet(np.full(nodes, self.alpha))
        else:
            weights = np.arange(1.0, nodes + 1) ** -self.exponent
            shares = rng.permutation(weights / weights.sum())
        owner = rng.permutation(_divide(samples, shares))
        _raise_to_minimum(owner, nodes, self.minimum, rng)
        return _samples_of_nodes(owner, nodes)


@dataclass(frozen=True)
class Natural:
    """All samples of a user go to one node. For data sets with users.

    Caldas et al. 2018, "LEAF: A Benchmark for Federated Settings". If there are more users than nodes, nodes
    have nearly equal numbers of users (`by = "users"`) or of samples (`by = "samples"`). Users are assigned at random,
    or in blocks of consecutive users (`order = "contiguous"`), as decentralizepy and DivShare assign MovieLens.

    The test samples of a node are those of its users. Users without training samples are on no node.
    """

    by: Literal["users", "samples"] = "users"
    order: Literal["random", "contiguous"] = "random"

    def split_owned(
        self, train: Samples, test: Samples, nodes: int, rng: np.random.Generator
    ) -> tuple[list[Indices], list[Indices]]:
        if train.owner is None:
            raise DataError(
                "partition 'natural': this data set has no users; use 'iid' or another "
                "partition, or a data set with users"
            )
        users, place, counts = np.unique(train.owner, return_inverse=True, return_counts=True)
        if len(users) < nodes:
            raise DataError(
                f"partition 'natural': {nodes} nodes share {len(users)} users, but each needs at least one; "
                f"use at most {len(users)} nodes or another partition"
            )
        holder = self._holders(counts, nodes, rng)
        return _samples_of_nodes(holder[place], nodes), _samples_of_nodes(
            _user_nodes(test.owner, users, holder, len(test)), nodes
        )

    def _holders(self, counts: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the node of each user, from the number of samples of each."""
        users = len(counts)
        if self.by == "users":
            blocks = np.repeat(np.arange(nodes), [users // nodes + (n < users % nodes) for n in range(nodes)])
            return blocks if self.order == "contiguous" else rng.permutation(blocks)
        return _consecutive_users(counts, nodes) if self.order == "contiguous" else _balanced_users(counts, nodes, rng)


def _user_nodes(owner: Indices | None, users: Indices, holder: NDArray[np.int64], samples: int) -> NDArray[np.int64]:
    """Return the node of the user of each sample."""
    if owner is None:
        return np.full(samples, NO_NODE, dtype=np.int64)
    place = np.minimum(np.searchsorted(users, owner), len(users) - 1)
    return np.where(users[place] == owner, holder[place], NO_NODE)


def _consecutive_users(counts: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """Assign consecutive users to each node, with nearly equal numbers of samples; no node is empty."""
    before = np.cumsum(counts) - counts / 2  # the middle of a user's samples decides
    cuts = np.searchsorted(before, counts.sum() * np.arange(1, nodes) / nodes)
    turns = np.arange(1, nodes)
    cuts = np.maximum.accumulate(np.maximum(cuts - turns, 0)) + turns  # strictly increasing: at least one user each
    cuts = np.minimum(cuts, len(counts) - nodes + turns)
    return np.repeat(np.arange(nodes), np.diff(cuts, prepend=0, append=len(counts)))


def _balanced_users(counts: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Assign the largest users first, each to the node with the fewest samples; ties in random order."""
    shuffled = rng.permutation(len(counts))
    heap = [(0, rank, int(node)) for rank, node in enumerate(rng.permutation(nodes))]  # sorted, thus a heap
    holder = np.empty(len(counts), dtype=np.int64)
    for user in shuffled[np.argsort(-counts[shuffled], kind="stable")]:
        held, rank, node = heap[0]
        holder[user] = node
        heapq.heapreplace(heap, (held + int(counts[user]), rank, node))
    return holder


def _divide(count: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return a node for each of `count` samples, in these shares, which add up to 1."""
    ends = np.floor(np.cumsum(shares) * count).astype(np.int64)
    ends[-1] = count  # rounding: the sum of the shares may differ from 1
    return np.repeat(np.arange(len(shares)), np.diff(np.minimum(ends, count), prepend=0))


def _assign_classes(holders: NDArray[np.int64], nodes: int, per_node: int, rng: np.random.Generator) -> list[Indices]:
    """Return the nodes of each class, so that class c is on `holders[c]` nodes and each node has `per_node` classes.

    Each node in turn takes the classes that lack the most nodes; ties at random. That always succeeds: with m nodes
    left, no class lacks more than m nodes, and the classes that lack m, at most `per_node`, are taken first.
    """
    lacking = holders.astype(np.float64)
    taken = np.empty((nodes, per_node), dtype=np.int64)
    for classes in taken:
        classes[:] = np.argpartition(-lacking - rng.random(len(lacking)), per_node - 1)[:per_node]
        lacking[classes] -= 1
    by_class = np.argsort(taken, axis=None, kind="stable") // per_node
    return np.split(rng.permutation(nodes)[by_class], np.cumsum(holders)[:-1])


def _raise_to_minimum(owner: NDArray[np.int64], nodes: int, minimum: int, rng: np.random.Generator) -> None:
    """Reassign samples in `owner`, from the largest nodes to nodes with fewer than `minimum`."""
    sizes = np.bincount(owner, minlength=nodes)
    missing = np.maximum(minimum - sizes, 0)
    if not missing.any():
        return
    kept = _fill_evenly(len(owner) - missing.sum(), sizes, np.arange(nodes))
    shuffled = rng.permutation(len(owner))
    grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]  # by node, each in random order
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # position among the samples of the node
    given = grouped[place >= np.repeat(kept, sizes)]
    owner[given] = np.repeat(np.arange(nodes), missing)


def _fill_evenly(total: int, capacity: NDArray[np.int64], order: Indices) -> NDArray[np.int64]:
    """Distribute `total` units as evenly as the `capacity` of each entry allows.

    The remainder of the last level goes to the first entries in `order` with free capacity.
    """
    low, high = 0, int(capacity.max())
    while low < high:  # the highest level that `total` reaches
        level = (low + high + 1) // 2
        low, high = (level, high) if np.minimum(capacity, level).sum() <= total else (low, level - 1)
    amounts: NDArray[np.int64] = np.minimum(capacity, low)
    amounts[order[capacity[order] > low][: total - amounts.sum()]] += 1
    return amounts


def _samples_of_classes(labels: NDArray[np.int64]) -> list[Indices]:
    """Return the samples of each occurring label, in ascending order of label."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _samples_of_nodes(owner: NDArray[np.int64], nodes: int) -> list[Indices]:
    """Return the samples of each node, in ascending order; without those of NO_NODE."""
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner == NO_NODE) :]
    sizes = np.bincount(owner[order], minlength=nodes)
    return np.split(order, np.cumsum(sizes)[:-1])


def _require_a_sample_each(name: str, samples: int, nodes: int) -> None:
    if samples < nodes:
        raise DataError(
            f"partition '{name}': {nodes} nodes share {samples} samples, but each needs at least one; "
            f"use at most {samples} nodes or a larger data set"
        )


def _require_the_minimum(name: str, minimum: int, samples: int, nodes: int) -> None:
    if nodes * minimum > samples:
        raise DataError(
            f"partition '{name}': minimum = {minimum} for {nodes} nodes needs {nodes * minimum} samples, but there are "
            f"{samples}; use a minimum of at most {samples // nodes}, fewer nodes or a larger data set"
        )
