"""Who holds which training samples: the usual ways to spread a data set over nodes.

    iid         the same mixture everywhere
    shards      sorted by label and cut: a few classes each (McMahan et al. 2017)
    dirichlet   every class spread unevenly, more so for a small alpha (Hsu et al. 2019)
    classes     exactly so many classes each
    quantity    the same mixture everywhere, and much for some nodes where others have little (Li et al. 2022)
    natural     whole users, as the data set has them (Caldas et al. 2018)

All give every sample to exactly one node (`Classes` says when it cannot), leave no node empty, take labels as
they are — any integers, in any order — and draw from the generator they are given and nothing else. A node's
indices ascend. Each works out an owner for every sample; nothing costs nodes × samples. Partitions whose nodes see
their samples differently are in `shifts`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Indices, Samples
from shoal.errors import DataError
from shoal.types import Bounds

NOBODY = -1


@dataclass(frozen=True)
class Iid:
    """Samples dealt at random: every node has the mixture of the whole. Sizes differ by at most one."""

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        _require_a_sample_each("iid", len(labels), nodes)
        return _by_owner(rng.permutation(np.arange(len(labels)) % nodes), nodes)


@dataclass(frozen=True)
class Shards:
    """Sorted by label, cut into nodes × `per_node` shards of nearly equal size, dealt at random.

    McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data". A node
    sees about `per_node` classes: fewer when its shards are of one class, more when they straddle two.
    """

    per_node: Annotated[int, Bounds(at_least=1)] = 2

    by_class: ClassVar[bool] = True

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
        return _by_owner(owner, nodes)


@dataclass(frozen=True)
class Dirichlet:
    """Each class divided among the nodes in proportions drawn from a symmetric Dirichlet distribution.

    Yurochkin et al. 2019, "Bayesian Nonparametric Federated Learning of Neural Networks"; after Hsu et al.
    2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification". A
    small `alpha` gives a class to few nodes, a large one to all alike.

    The proportions are drawn once. Nodes left with fewer than `minimum` samples then get random samples of
    the largest holders, one by one from whoever is largest, so that even an extreme `alpha` comes to an end.
    """

    alpha: Annotated[float, Bounds(above=0, at_most=1e9)] = 0.5
    minimum: Annotated[int, Bounds(at_least=1)] = 1

    by_class: ClassVar[bool] = True

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        samples = len(labels)
        _require_a_sample_each("dirichlet", samples, nodes)
        _require_the_minimum("dirichlet", self.minimum, samples, nodes)
        owner = np.empty(samples, dtype=np.int64)
        for members in _by_class(labels):
            proportions = rng.dirichlet(np.full(nodes, self.alpha))
            owner[rng.permutation(members)] = _in_shares(len(members), proportions)
        _raise_to_minimum(owner, nodes, self.minimum, rng)
        return _by_owner(owner, nodes)


@dataclass(frozen=True)
class Classes:
    """Each node holds exactly `per_node` classes; a class is divided evenly among the nodes that hold it.

    Classes have as many holders as each other, as far as they have a sample for each holder. Every sample has
    an owner when nodes × `per_node` is at least the number of classes; otherwise some classes, chosen at
    random, are held by nobody.
    """

    per_node: Annotated[int, Bounds(at_least=1)] = 2

    by_class: ClassVar[bool] = True

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        _require_a_sample_each("classes", len(labels), nodes)
        members = _by_class(labels)
        places = np.minimum([len(m) for m in members], nodes)  # how many nodes could hold each class
        most = int(places.sum()) // nodes
        if self.per_node > len(members):
            raise DataError(
                f"partition 'classes': per_node = {self.per_node}, and {len(members)} classes are present; "
                f"use per_node of at most {most}"
            )
        if self.per_node > most:
            raise DataError(
                f"partition 'classes': per_node = {self.per_node} for {nodes} nodes, and the classes have "
                f"too few samples to give one to each holder; use per_node of at most {most}, fewer nodes or "
                f"a larger data set"
            )
        holders = _poured(nodes * self.per_node, places, rng.permutation(len(members)))
        owner = np.full(len(labels), NOBODY, dtype=np.int64)
        for samples, nodes_of_class in zip(members, _deal(holders, nodes, self.per_node, rng), strict=True):
            if len(nodes_of_class):
                turns = np.arange(len(samples)) % len(nodes_of_class)
                owner[rng.permutation(samples)] = nodes_of_class[turns]
        return _by_owner(owner, nodes)


@dataclass(frozen=True)
class Quantity:
    """The same mixture everywhere, in very different quantities.

    Li et al. 2022, "Federated Learning on Non-IID Data Silos". The shares are drawn from a symmetric Dirichlet
    distribution, more uneven for a small `alpha`; or they follow a power law, 1 to 2^−`exponent` to 3^−`exponent` …,
    dealt to the nodes at random. Nodes left with fewer than `minimum` samples get some of the largest holders'.
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
            falling = np.arange(1.0, nodes + 1) ** -self.exponent
            shares = rng.permutation(falling / falling.sum())
        owner = rng.permutation(_in_shares(samples, shares))
        _raise_to_minimum(owner, nodes, self.minimum, rng)
        return _by_owner(owner, nodes)


@dataclass(frozen=True)
class Natural:
    """Whole users to nodes: who a sample came from decides who holds it. For data sets that know their users.

    Caldas et al. 2018, "LEAF: A Benchmark for Federated Settings". Where there are more users than nodes, nodes hold
    nearly as many users (`by = "users"`) or samples (`by = "samples"`) as each other: users at random, or blocks of
    consecutive users (`order = "contiguous"`), as decentralizepy and DivShare give out MovieLens.

    A node's own test samples are those of its users; users that have none to train on are nobody's.
    """

    by: Literal["users", "samples"] = "users"
    order: Literal["random", "contiguous"] = "random"

    def split_owned(
        self, train: Samples, test: Samples, nodes: int, rng: np.random.Generator
    ) -> tuple[list[Indices], list[Indices]]:
        if train.owner is None:
            raise DataError(
                "partition 'natural': this data set does not say whom its samples came from; use 'iid' or another "
                "partition, or a data set with users"
            )
        users, place, counts = np.unique(train.owner, return_inverse=True, return_counts=True)
        if len(users) < nodes:
            raise DataError(
                f"partition 'natural': {nodes} nodes share {len(users)} users, and each needs one at least; "
                f"use at most {len(users)} nodes or another partition"
            )
        holder = self._holders(counts, nodes, rng)
        return _by_owner(holder[place], nodes), _by_owner(_followed(test.owner, users, holder, len(test)), nodes)

    def _holders(self, counts: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The node of each user, given how many samples each has."""
        users = len(counts)
        if self.by == "users":
            blocks = np.repeat(np.arange(nodes), [users // nodes + (n < users % nodes) for n in range(nodes)])
            return blocks if self.order == "contiguous" else rng.permutation(blocks)
        return _in_blocks(counts, nodes) if self.order == "contiguous" else _balanced(counts, nodes, rng)


def _followed(owner: Indices | None, users: Indices, holder: NDArray[np.int64], samples: int) -> NDArray[np.int64]:
    """The node that holds the user of each sample."""
    if owner is None:
        return np.full(samples, NOBODY, dtype=np.int64)
    place = np.minimum(np.searchsorted(users, owner), len(users) - 1)
    return np.where(users[place] == owner, holder[place], NOBODY)


def _in_blocks(counts: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """Consecutive users to each node, cut where the samples so far come nearest to its share; none is left empty."""
    before = np.cumsum(counts) - counts / 2  # a user goes where the middle of its samples lies
    cuts = np.searchsorted(before, counts.sum() * np.arange(1, nodes) / nodes)
    turns = np.arange(1, nodes)
    cuts = np.maximum.accumulate(np.maximum(cuts - turns, 0)) + turns  # ascending, a user each
    cuts = np.minimum(cuts, len(counts) - nodes + turns)
    return np.repeat(np.arange(nodes), np.diff(cuts, prepend=0, append=len(counts)))


def _balanced(counts: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The largest users first, each to whoever has fewest samples so far; equals, of both, in random order."""
    shuffled = rng.permutation(len(counts))
    waiting = [(0, rank, int(node)) for rank, node in enumerate(rng.permutation(nodes))]  # sorted, and so a heap
    holder = np.empty(len(counts), dtype=np.int64)
    for user in shuffled[np.argsort(-counts[shuffled], kind="stable")]:
        held, rank, node = waiting[0]
        holder[user] = node
        heapq.heapreplace(waiting, (held + int(counts[user]), rank, node))
    return holder


def _in_shares(count: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """`count` places, divided among nodes in these shares, which add up to 1."""
    ends = np.floor(np.cumsum(shares) * count).astype(np.int64)
    ends[-1] = count  # the sum of the shares may miss 1 by a rounding
    return np.repeat(np.arange(len(shares)), np.diff(np.minimum(ends, count), prepend=0))


def _deal(holders: NDArray[np.int64], nodes: int, per_node: int, rng: np.random.Generator) -> list[Indices]:
    """The nodes that hold each class, so that class c has `holders[c]` and each node holds `per_node`.

    Each node in turn takes the classes with most holders still to find, at random among equals. That never
    gets stuck: with m nodes to go no class lacks more than m holders, and those that lack m, at most
    `per_node` of them, are taken first.
    """
    lacking = holders.astype(np.float64)
    taken = np.empty((nodes, per_node), dtype=np.int64)
    for hand in taken:
        hand[:] = np.argpartition(-lacking - rng.random(len(lacking)), per_node - 1)[:per_node]
        lacking[hand] -= 1
    by_class = np.argsort(taken, axis=None, kind="stable") // per_node
    return np.split(rng.permutation(nodes)[by_class], np.cumsum(holders)[:-1])


def _raise_to_minimum(owner: NDArray[np.int64], nodes: int, minimum: int, rng: np.random.Generator) -> None:
    """Reassign samples in `owner`, from the largest holders to those below `minimum`."""
    sizes = np.bincount(owner, minlength=nodes)
    missing = np.maximum(minimum - sizes, 0)
    if not missing.any():
        return
    kept = _poured(len(owner) - missing.sum(), sizes, np.arange(nodes))
    shuffled = rng.permutation(len(owner))
    grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]  # by owner, in random order for each
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # among the owner's own
    given = grouped[place >= np.repeat(kept, sizes)]
    owner[given] = np.repeat(np.arange(nodes), missing)


def _poured(total: int, room: NDArray[np.int64], order: Indices) -> NDArray[np.int64]:
    """`total` units poured into vessels that have `room` for so many: all full or at one level.

    What does not make another full level goes to the first in `order` that have room.
    """
    low, high = 0, int(room.max())
    while low < high:  # the highest level that `total` reaches
        level = (low + high + 1) // 2
        low, high = (level, high) if np.minimum(room, level).sum() <= total else (low, level - 1)
    amounts: NDArray[np.int64] = np.minimum(room, low)
    amounts[order[room[order] > low][: total - amounts.sum()]] += 1
    return amounts


def _by_class(labels: NDArray[np.int64]) -> list[Indices]:
    """The samples of each label that occurs, in ascending order of label."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _by_owner(owner: NDArray[np.int64], nodes: int) -> list[Indices]:
    """The samples of each node, in ascending order; those of NOBODY are left out."""
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner == NOBODY) :]
    sizes = np.bincount(owner[order], minlength=nodes)
    return np.split(order, np.cumsum(sizes)[:-1])


def _require_a_sample_each(name: str, samples: int, nodes: int) -> None:
    if samples < nodes:
        raise DataError(
            f"partition '{name}': {nodes} nodes share {samples} samples, and each needs at least one; "
            f"use at most {samples} nodes or a larger data set"
        )


def _require_the_minimum(name: str, minimum: int, samples: int, nodes: int) -> None:
    if nodes * minimum > samples:
        raise DataError(
            f"partition '{name}': minimum = {minimum} for {nodes} nodes needs {nodes * minimum} samples, and there are "
            f"{samples}; use a minimum of at most {samples // nodes}, fewer nodes or a larger data set"
        )
