"""What the nodes that speak to one receiver in one round have agreed upon, and what travels between them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError
from shoal.message import Payload
from shoal.privacy.circles import circle, connected
from shoal.privacy.masks import SEED_BYTES, TAG_BYTES
from shoal.privacy.ring import Words
from shoal.topologies.graph import NodeId

KEY = "secure-key"
"""A public key, for one whom this node masks with."""
VOTE, SUPPORT = "secure-vote", "secure-support"
"""The coordinates that a node would say, to a receiver; and those that all are to say to it."""
OPEN, OPENED = "secure-open", "secure-opened"
"""The receiver says whose words it has; each of them says what takes off its masks."""
HELP, HELPED = "secure-help", "secure-helped"
"""The receiver asks for shares of what one that has died since would have said."""
BYE = "secure-bye"
"""The receiver has ended, and asks for nothing any more."""

WORDS, SEALS, SHARES, PLAIN = "words", "seals", "shares", "plain"
SPEAKERS, OWN, PAIRS, OF, REFUSED = "speakers", "own", "pairs", "of", "refused"
NO_SEAL = bytes(SEED_BYTES)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Gathering:
    """All who speak to one receiver in one round. Everyone of them, and the receiver, works it out alike."""

    receiver: NodeId
    round: int
    weights: Mapping[NodeId, float]
    """How much each counts at the receiver."""
    reach: int
    """With how many others each masks, if there are more."""
    threshold: float
    seed: int

    @property
    def masked(self) -> bool:
        """Whether there is a sum to hide in."""
        return len(self.weights) >= 2

    @cached_property
    def partners(self) -> dict[NodeId, tuple[NodeId, ...]]:
        """With whom each masks, in ascending order. They also hold the shares of its secrets."""
        return circle(self.weights, self.reach, self.receiver, self.seed)

    @property
    def quorum(self) -> int:
        """How many must be in a sum that is opened."""
        return max(2, math.ceil(self.threshold * len(self.weights)))

    def shares_needed(self, node: NodeId) -> int:
        """How many shares of a node's secrets suffice."""
        holders = len(self.partners[node])
        return max(min(2, holders), math.ceil(self.threshold * holders))

    def links_needed(self, node: NodeId) -> int:
        """With how many others in a sum a node must have masked for its words to be hidden in it."""
        return min(self.shares_needed(node), self.quorum - 1)

    def why_not(self, speakers: Collection[NodeId]) -> str | None:
        """Why a sum of these must not be opened; None where it may be."""
        if not set(speakers) <= self.weights.keys():
            return "some of them do not speak to the receiver in this round"
        if len(speakers) < self.quorum:
            return f"{len(speakers)} of {len(self.weights)} are in the sum, and it takes {self.quorum}"
        if not connected(self.partners, speakers):
            return "so many are missing that the masks of the others cancel in parts of the sum"
        return None


@dataclass(frozen=True)
class Statement:
    """What one node says to a receiver."""

    words: Words
    """Its model, weighted, encoded, and masked."""
    seals: Sequence[bytes]
    """Commitments to its secrets: the seed of its own mask, then those that it shares with each partner. `NO_SEAL`
    where it did not mask with a partner."""
    shares: Sequence[bytes]
    """For each partner its share of all these secrets, sealed."""

    def payload(self) -> Payload:
        return Payload({WORDS: self.words, SEALS: rows(self.seals), SHARES: rows(self.shares)})

    @classmethod
    def read(cls, payload: Payload, partners: int) -> Statement:
        """Raises `MessageError` for what no node with so many partners would say."""
        seals, shares = payload.arrays.get(SEALS), payload.arrays.get(SHARES)
        secrets = 1 + partners
        if seals is None or seals.dtype != np.uint8 or seals.shape != (secrets, SEED_BYTES):
            raise MessageError(f"expected {secrets} commitments {SEALS!r}, of {SEED_BYTES} bytes each")
        length = secrets * SEED_BYTES + TAG_BYTES
        if shares is None or shares.dtype != np.uint8 or shares.shape != (partners, length):
            raise MessageError(f"expected {partners} sealed shares {SHARES!r}, of {length} bytes each")
        return cls(payload.arrays[WORDS], [bytes(row) for row in seals], [bytes(row) for row in shares])


def rows(parts: Sequence[bytes]) -> Bytes:
    """Equally long strings of bytes as an array, one in each row."""
    array = np.frombuffer(b"".join(parts), np.uint8)
    return array.reshape(len(parts), -1) if parts else array.reshape(0, 0)


def strings(payload: Payload, name: str, length: int) -> list[bytes]:
    """The rows of an array of bytes. Raises `MessageError` where it has others than of this length."""
    array = payload.arrays.get(name)
    if array is None or array.dtype != np.uint8 or array.ndim != 2 or (len(array) and array.shape[1] != length):
        raise MessageError(f"expected an array {name!r} of rows of {length} bytes")
    return [bytes(row) for row in array]


def ids(payload: Payload, name: str) -> tuple[NodeId, ...]:
    """The nodes that an array names, in ascending order. Raises `MessageError` for anything else."""
    array = payload.arrays.get(name)
    if array is None or array.dtype != np.uint32 or array.ndim != 1 or (np.diff(array.astype(np.int64)) <= 0).any():
        raise MessageError(f"expected an array {name!r} of increasing numbers of nodes")
    return tuple(array.tolist())


def naming(nodes: Collection[NodeId]) -> NDArray[np.uint32]:
    return np.array(sorted(nodes), np.uint32)
