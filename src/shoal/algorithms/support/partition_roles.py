"""Roles: the peers that average each partition of a model. Every node computes them itself."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.types import NodeId


@dataclass(frozen=True, eq=False)
class PartitionRoles:
    """The peers responsible for each partition, and the peer that each node sends each of its slices to."""

    holders: tuple[tuple[NodeId, ...], ...]
    """The peers responsible for each partition, in ascending order."""
    destinations: NDArray[np.int32]
    """[node, partition]: the holder that the node sends its slice to. A holder sends to itself."""

    def held_by(self, node: NodeId) -> list[int]:
        """Return the partitions that `node` is responsible for."""
        return [p for p, holders in enumerate(self.holders) if node in holders]

    def replicas(self, node: NodeId) -> dict[NodeId, list[int]]:
        """Return the other holders of the partitions of `node`, with the partitions they share with it."""
        return _group((peer, p) for p in self.held_by(node) for peer in self.holders[p] if peer != node)

    def receivers(self, node: NodeId) -> dict[NodeId, list[int]]:
        """Return the peers that `node` sends its slices to, itself included, with the partitions of each."""
        return _group((peer, p) for p, peer in enumerate(self.destinations[node].tolist()))

    def senders(self, node: NodeId) -> dict[NodeId, list[int]]:
        """Return the peers that send slices to `node`, itself included, with the partitions of each.

        Absent peers are included: they may run and be late.
        """
        return _group(
            (peer, p) for p in self.held_by(node) for peer in np.flatnonzero(self.destinations[:, p] == node).tolist()
        )


@lru_cache(maxsize=16)
def assign_roles(nodes: int, partitions: int, per_node: int, absent: frozenset[NodeId]) -> PartitionRoles:
    """Assign at least `per_node` partitions to every present node. At least one node must be present.

    The result depends only on the set of absent nodes, not on the order in which they became absent. Present nodes keep
    the partitions that they hold when no node is absent; only partitions without a present holder move.
    """
    present = [node for node in range(nodes) if node not in absent]
    share = min(per_node, partitions)
    all_holders: list[list[NodeId]] = [[] for _ in range(partitions)]
    for node in range(nodes):
        for k in range(share):  # nodes join in turn and take the least replicated partitions: round robin
            all_holders[(node * share + k) % partitions].append(node)
    _fill_unheld(all_holders, range(nodes))
    all_holders = [sorted(set(holders) - absent) for holders in all_holders]
    _fill_unheld(all_holders, present)

    destinations = np.empty((nodes, partitions), np.int32)
    by_presence = np.array([*present, *sorted(absent)], np.int32)  # spreads the slices of present nodes evenly
    for p, holders in enumerate(all_holders):
        others = by_presence[~np.isin(by_presence, holders)]
        destinations[others, p] = np.take(holders, np.arange(p, p + len(others)), mode="wrap")
        destinations[holders, p] = holders
    return PartitionRoles(tuple(tuple(holders) for holders in all_holders), destinations)


def _fill_unheld(all_holders: list[list[NodeId]], candidates: Iterable[NodeId]) -> None:
    """Give every partition without a holder to the candidate with the fewest partitions."""
    loads = dict.fromkeys(candidates, 0)
    for holders in all_holders:
        for node in holders:
            loads[node] += 1
    least_loaded = [(load, node) for node, load in loads.items()]
    heapq.heapify(least_loaded)
    for holders in all_holders:
        if not holders:
            load, node = least_loaded[0]
            holders.append(node)
            heapq.heapreplace(least_loaded, (load + 1, node))


def _group(pairs: Iterable[tuple[NodeId, int]]) -> dict[NodeId, list[int]]:
    """Group partitions by peer."""
    groups: dict[NodeId, list[int]] = {}
    for peer, partition in pairs:
        groups.setdefault(peer, []).append(partition)
    return groups
