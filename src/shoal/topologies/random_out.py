"""Each node sends to a few random others, new ones each round; who hears from how many is left to chance.

De Vos, Farhadkhani, Guerraoui, Kermarrec, Pires, Sharma: Epidemic Learning: Boosting Decentralized Learning with
Randomized Communication, NeurIPS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import TopologyError
from shoal.randomness import generator
from shoal.topologies.graph import Links
from shoal.topologies.regular import REMEMBERED_ROUNDS
from shoal.topologies.static import Layout
from shoal.types import Bounds, NodeId

Words: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True)
class RandomOut:
    """Each round every node sends to random others, drawn anew (EL-Local, de Vos et al. 2023).

    In the paper a node draws its peers alone, and nobody can tell how many models will come. Here all draw from
    the seed of the experiment, so a node also knows whom it will hear from, and when a round is complete. With
    weights "uniform" a node averages its own model and those received alike, as in the paper.
    """

    peers: Annotated[int, Bounds(at_least=1)] = 5

    def build(self, nodes: int, seed: int) -> RandomOutRounds:
        if self.peers >= nodes:
            advice = f"try peers = {nodes - 1}" if nodes > 1 else "at least 2 nodes are needed"
            raise TopologyError(
                f"{self.peers} random peers on {nodes} node{'s' if nodes != 1 else ''}: there must be fewer peers"
                f" than nodes; {advice}"
            )
        return RandomOutRounds(nodes, self.peers, seed)


class RandomOutRounds:
    """A new directed graph each round: out-degrees are equal, in-degrees are binomial.

    Who sends to a node is known only when everyone's draw is, so a round is computed whole.
    """

    static = False
    layout: Layout = "circle"

    def __init__(self, nodes: int, peers: int, seed: int) -> None:
        self.nodes = nodes
        self._peers = peers
        self._seed = seed
        self._rounds: dict[int, _Round] = {}

    def links(self, node: NodeId, round: int) -> Links:
        return self._round(round).links(node)

    def degree(self, node: NodeId, round: int) -> int:
        return self._round(round).heard(node)

    def _round(self, round: int) -> _Round:
        found = self._rounds.get(round)
        if found is None:
            found = self._rounds[round] = _Round(self.nodes, self._peers, self._seed, round)
            if len(self._rounds) > REMEMBERED_ROUNDS:
                del self._rounds[next(iter(self._rounds))]
        return found


class _Round:
    """One round: the receivers of each node, and behind each other the senders to node 0, to node 1, …"""

    def __init__(self, nodes: int, peers: int, seed: int, round: int) -> None:
        key = int(generator(seed, "topology", round).integers(1 << 64, dtype=np.uint64))
        self._to = receivers(nodes, peers, key)
        # Sorting numbers of receiver and sender in one is several times as fast as a stable sort of the receivers.
        pairs = self._to * nodes + np.arange(nodes)[:, None]
        self._senders = np.sort(pairs, axis=None) % nodes
        counts = np.bincount(self._to.ravel(), minlength=nodes)
        self._starts: list[int] = [0, *np.cumsum(counts).tolist()]

    def links(self, node: NodeId) -> Links:
        senders = self._senders[self._starts[node] : self._starts[node + 1]]
        return Links(to=tuple(self._to[node].tolist()), of=tuple(senders.tolist()))

    def heard(self, node: NodeId) -> int:
        return self._starts[node + 1] - self._starts[node]


def receivers(nodes: int, peers: int, key: int) -> NDArray[np.int64]:
    """Row i: `peers` distinct nodes other than i, in ascending order, every such set equally likely.

    Floyd's sampling for all nodes at once: the k-th draw is among one more than the draw before, and who draws what
    it has already takes the newest instead.
    """
    node = np.arange(nodes, dtype=np.int64)
    chosen = np.empty((peers, nodes), dtype=np.int64)
    for k in range(peers):
        last = nodes - 1 - peers + k
        words = scattered(key, np.arange(k * nodes, (k + 1) * nodes, dtype=np.uint64))
        drawn = ((words >> np.uint64(32)) * np.uint64(last + 1) >> np.uint64(32)).astype(np.int64)
        repeated = (chosen[:k] == drawn).any(axis=0)
        chosen[k] = np.where(repeated, last, drawn)
    chosen += chosen >= node  # nobody draws itself
    return np.sort(chosen.T, axis=1)


def scattered(key: int, counters: Words) -> Words:
    """64 random bits for each counter: SplitMix64 (Steele, Lea, Flood: Fast Splittable Generators, OOPSLA 2014)."""
    x = counters * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
