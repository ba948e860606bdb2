"""Partial views: each node knows a few others, and keeps its view fresh by gossip.

Jelasity, Voulgaris, Guerraoui, Kermarrec, van Steen: Gossip-based Peer Sampling, ACM Transactions on Computer
Systems 25(3), 2007. Nodes exchange parts of their views; the resulting links are close to those of a random graph, and
follow nodes that join and leave. This module sends nothing and waits for nothing. One exchange, push and pull:

    the node that starts it                   its peer
    peer = view.select_peer(rng)
    sent = view.to_send(rng)
    ... send `sent` to the peer ...           answer = view.to_send(rng)
    ... receive `answer` ...                  view.absorb(sent, rng)
    view.absorb(answer, rng)                  view.increase_age()
    view.increase_age()

`shoal.topologies.overlay.measure_overlay` measures how random the links are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError, TopologyError
from shoal.state import State
from shoal.types import Bounds, NodeId

Numbers: TypeAlias = NDArray[np.uint32]


class Descriptors(NamedTuple):
    """Nodes and the ages of their entries, in exchanges: arrays of equal length, as in a message."""

    ids: Numbers
    ages: Numbers


@dataclass(frozen=True)
class ViewPolicy:
    """The rules of a view (gossip-based peer sampling, Jelasity et al. 2007); the same on all nodes.

    The paper's letters: size c, healer H, swapper S. A healer drops the oldest entries first, so that failed nodes soon
    disappear; a swapper drops the entries that it has just sent, so that every node is in about as many views. With
    neither, random entries are dropped. The paper's extremes are healer = size/2 and swapper = size/2.
    """

    size: Annotated[int, Bounds(at_least=2)] = 30
    healer: Annotated[int, Bounds(at_least=0)] = 1
    swapper: Annotated[int, Bounds(at_least=0)] = 14
    select: Literal["random", "oldest"] = "random"
    """The peer to exchange with: any known node, or the one with the oldest entry (the paper's "tail")."""

    def __post_init__(self) -> None:
        if self.size < 2 or min(self.healer, self.swapper) < 0 or self.healer + self.swapper > self.size // 2:
            raise TopologyError(
                f"a view with size = {self.size}, healer = {self.healer}, swapper = {self.swapper}: size must be at"
                " least 2, healer and swapper at least 0, and their sum at most half of size;"
                f" try healer = 0, swapper = {max(self.size, 2) // 2}"
            )


class View:
    """A node's view: at most `policy.size` distinct others, never the node itself.

    All random choices use the generator that is passed. Between `to_send` and `absorb` of one exchange, the head of the
    view holds the entries that were sent: do not call `to_send` for another exchange in between.
    """

    def __init__(self, node: NodeId, policy: ViewPolicy, known: Iterable[NodeId] = ()) -> None:
        """Start with the first `policy.size` of the `known` nodes, with age 0."""
        self.node = node
        self.policy = policy
        first = [peer for peer in dict.fromkeys(known) if peer != node][: policy.size]
        self._ids = np.array(first, dtype=np.uint32)
        self._ages = np.zeros(len(first), dtype=np.uint32)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def peers(self) -> tuple[NodeId, ...]:
        """The nodes in the view, in no particular order: an algorithm samples its peers from them."""
        return tuple(self._ids.tolist())

    @property
    def descriptors(self) -> Descriptors:
        """The whole view, head first."""
        return Descriptors(self._ids.copy(), self._ages.copy())

    def select_peer(self, rng: np.random.Generator) -> NodeId | None:
        """Return the peer for the next exchange; None if the view is empty."""
        if not len(self._ids):
            return None
        if self.policy.select == "random":
            return int(self._ids[rng.integers(len(self._ids))])
        oldest = np.flatnonzero(self._ages == self._ages.max())
        return int(self._ids[oldest[rng.integers(len(oldest))]])

    def to_send(self, rng: np.random.Generator) -> Descriptors:
        """Return the node itself, with age 0, and size/2 - 1 random others, if possible without the `healer` oldest.

        Reorders the view: the entries sent are at its head, and the oldest at its end.
        """
        self._keep(rng.permutation(len(self._ids)))
        count = len(self._ids)
        if self.policy.healer:
            aged = np.argsort(self._ages, kind="stable")[max(0, count - self.policy.healer) :]
            others = np.ones(count, dtype=np.bool_)
            others[aged] = False
            self._keep(np.concatenate([np.flatnonzero(others), aged]))
        head = self.policy.size // 2 - 1
        own = np.array([self.node], dtype=np.uint32)
        return Descriptors(
            np.concatenate([own, self._ids[:head]]), np.concatenate([np.zeros_like(own), self._ages[:head]])
        )

    def absorb(self, received: Descriptors, rng: np.random.Generator) -> None:
        """Add the entries that a peer sent, and keep the youngest entry of each node.

        Then, while there are too many: drop the oldest, at most `healer`; drop from the head, at most `swapper`; drop
        random ones. Raises `MessageError` for invalid entries.
        """
        ids, ages = _checked(received, self.policy.size)
        self._ids = np.concatenate([self._ids, ids])
        self._ages = np.concatenate([self._ages, ages])
        self._keep_youngest()
        size, healer, swapper = self.policy.size, self.policy.healer, self.policy.swapper
        excess = len(self._ids) - size
        if excess > 0 and healer:
            mixed = rng.permutation(len(self._ids))  # the order of equally old entries is random
            young = mixed[np.argsort(self._ages[mixed], kind="stable")][: -min(healer, excess)]
            self._keep(np.sort(young))
        excess = len(self._ids) - size
        if excess > 0 and swapper:
            self._keep(slice(min(swapper, excess), None))
        if len(self._ids) > size:
            self._keep(np.sort(rng.permutation(len(self._ids))[:size]))

    def increase_age(self) -> None:
        """Count an exchange that has ended, started by this node or by a peer."""
        self._ages = self._ages + np.uint32(1)

    def drop(self, peer: NodeId) -> None:
        """Drop a peer, such as one that did not answer. The paper leaves this to the healer.

        With `select = "oldest"` a node that never drops a failed peer may select it forever.
        """
        self._keep(self._ids != peer)

    def state(self) -> State:
        return {"ids": self._ids.tolist(), "ages": self._ages.tolist()}

    def restore(self, state: State) -> None:
        self._ids = np.array(state["ids"], dtype=np.uint32)
        self._ages = np.array(state["ages"], dtype=np.uint32)

    def _keep_youngest(self) -> None:
        """Keep one entry per other node at its position: the youngest, and of equally young ones the first."""
        by_id = np.lexsort((self._ages, self._ids))
        ordered = self._ids[by_id]
        youngest = ordered != self.node
        youngest[1:] &= ordered[1:] != ordered[:-1]
        self._keep(np.sort(by_id[youngest]))

    def _keep(self, which: Any) -> None:
        self._ids, self._ages = self._ids[which], self._ages[which]


def _checked(received: Descriptors, most: int) -> Descriptors:
    ids, ages = np.asarray(received.ids), np.asarray(received.ages)
    for name, numbers in (("ids", ids), ("ages", ages)):
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise MessageError(f"{name} of a view: expected a list of integers, got {numbers.dtype}{numbers.shape}")
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < 2**31:
            raise MessageError(f"{name} of a view: {numbers.min()} to {numbers.max()}; expected 0 to 2^31 - 1")
    if len(ids) != len(ages) or len(ids) > most:
        raise MessageError(f"{len(ids)} ids and {len(ages)} ages of a view: expected as many of each, at most {most}")
    return Descriptors(ids.astype(np.uint32), ages.astype(np.uint32))
