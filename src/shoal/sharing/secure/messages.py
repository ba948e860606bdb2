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
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.fixed_point import Words
from shoal.sharing.secure.mask_graph import circle, connected
from shoal.sharing.secure.masks import SEED_BYTES, TAG_BYTES, Keys, commitment
from shoal.types import NodeId

KEY = "secure-key"
"""A public key, for one whom this node masks with."""
AGAIN = "again"
"""With a key: the other's has not come, and is asked for."""
SUPPORT = "secure-support"
"""The coordinates that a receiver wants to hear, to those that speak to it."""
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
    company: Collection[NodeId]
    reach: int
    """With how many others each masks, if there are more."""
    threshold: float
    seed: int

    @property
    def masked(self) -> bool:
        """Whether there is a sum to hide in."""
        return len(self.company) >= 2

    @cached_property
    def partners(self) -> Mapping[NodeId, tuple[NodeId, ...]]:
        """With whom each masks, in ascending order. They also hold the shares of its secrets."""
        return circle(self.company, self.reach, self.receiver, self.seed)

    @property
    def holders(self) -> int:
        """How many partners each has: all have equally many."""
        return len(next(iter(self.partners.values())))

    @property
    def shares_needed(self) -> int:
        """How many shares of a node's secrets suffice."""
        return max(min(2, self.holders), math.ceil(self.threshold * self.holders))

    @property
    def links_needed(self) -> int:
        """With how many others in a sum a node must have masked for its words to be hidden in it: with as many as it
        takes to put its secrets together, so that fewer colluders leave one whose mask they do not know."""
        return self.shares_needed

    @property
    def quorum(self) -> int:
        """How many must be in a sum that is opened. Two more than there may be colluders, who subtract their own: a
        sum of what is left is then of two others at the least."""
        return max(2, math.ceil(self.threshold * len(self.company)), 1 + self.shares_needed)

    def why_not(self, speakers: Collection[NodeId]) -> str | None:
        """Why a sum of these must not be opened; None where it may be."""
        if not set(speakers) <= set(self.company):
            return "some of them do not speak to the receiver in this round"
        if len(speakers) < self.quorum:
            return f"{len(speakers)} of {len(self.company)} are in the sum, and it takes {self.quorum}"
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


def masked(words: Words, speaker: NodeId, gathering: Gathering, keys: Keys, maskers: Collection[NodeId]) -> Statement:
    """What `speaker` says of its encoded model, which it masks in place: with `maskers`, of its partners."""
    receiver, round, partners = gathering.receiver, gathering.round, gathering.partners[speaker]
    secrets, pairs = [keys.own_seed(receiver, round)], {}
    masks.add(words, secrets[0])
    for partner in partners:
        if partner not in maskers:
            secrets.append(NO_SEAL)
            continue
        pair = pairs[partner] = keys.with_peer(partner, receiver, round)
        (masks.add if speaker < partner else masks.subtract)(words, pair.seed)
        secrets.append(pair.seed)
    seals = [NO_SEAL if secret == NO_SEAL else commitment(secret, receiver, round) for secret in secrets]
    shares = shamir.split(rows(secrets), gathering.holders, gathering.shares_needed)
    sealed = [
        pairs[holder].seal(share.tobytes(), from_lower=speaker < holder)
        if holder in pairs
        else bytes(share.size + TAG_BYTES)
        for holder, share in zip(partners, shares, strict=True)
    ]
    return Statement(words, seals, sealed)


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
