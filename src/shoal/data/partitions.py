"""Who holds which training samples: the usual ways to spread a data set over nodes.

    iid         the same mixture everywhere
    shards      sorted by label and cut: a few classes each (McMahan et al. 2017)
    dirichlet   every class spread unevenly, more so for a small alpha (Hsu et al. 2019)
    classes     exactly so many classes each

All give every sample to exactly one node (`Classes` says when it cannot), leave no node empty, take labels as
they are — any integers, in any order — and draw from the generator they are given and nothing else. A node's
indices ascend. Each works out an owner for every sample; nothing costs nodes × samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Indices
from shoal.errors import DataError
from shoal.schema import Bounds

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
        if nodes * self.minimum > samples:
            raise DataError(
                f"partition 'dirichlet': minimum = {self.minimum} for {nodes} nodes needs "
                f"{nodes * self.minimum} samples, and there are {samples}; use a minimum of at most "
                f"{samples // nodes}, fewer nodes or a larger data set"
            )
        owner = np.empty(samples, dtype=np.int64)
        for members in _by_class(labels):
            proportions = rng.dirichlet(np.full(nodes, self.alpha))
            ends = np.floor(np.cumsum(proportions) * len(members)).astype(np.int64)
            ends[-1] = len(members)  # the sum of the proportions may miss 1 by a rounding
            owner[rng.permutation(members)] = np.repeat(np.arange(nodes), np.diff(ends, prepend=0))
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
