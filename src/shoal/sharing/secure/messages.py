"""The parameters of one protocol round, and the messages of secure aggregation."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoal.compression.indices import Positions
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.fixed_point import FixedPoint, RingVector
from shoal.sharing.secure.mask_graph import connected, mask_partners
from shoal.sharing.secure.masks import SEED_BYTES, TAG_BYTES, Keys, commitment
from shoal.types import NodeId

# Kinds of messages

PUBLIC_KEY = "secure-key"
"""A public key, for a mask partner."""
COORDINATES = "secure-support"
"""The coordinates that a receiver requests from its senders."""
UNMASK_REQUEST, UNMASK_ANSWER = "secure-open", "secure-opened"
"""The receiver names the senders whose updates it has; each of them answers with the seeds that remove its masks."""
SHARES_REQUEST, SHARES_ANSWER = "secure-help", "secure-helped"
"""The receiver asks for the key shares of a sender that has failed since it sent its update."""
FINISHED = "secure-bye"
"""The receiver has ended and sends no more requests."""

# Names of arrays and fields

RESEND = "again"
"""A field of a public key: the sender has not received the receiver's key and asks for it."""
VALUES, COMMITMENTS, KEY_SHARES, UNMASKED = "words", "seals", "shares", "plain"
INCLUDED, SELF_SEED, PAIR_SEEDS, OWNERS, REFUSAL = "speakers", "own", "pairs", "of", "refused"

NO_COMMITMENT = bytes(SEED_BYTES)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class ProtocolRound:
    """All senders of one receiver in one round. Every sender and the receiver compute the same mask graph from it."""

    receiver: NodeId
    round: int
    senders: Collection[NodeId]
    max_partners: int
    threshold: float
    seed: int
    content: bytes = b""
    """What the senders' values mean: their encoding, weights and coordinates. See `describe_content`."""

    @cached_property
    def terms(self) -> bytes:
        """A digest of all that the senders must agree on. The masks of two senders cancel only if theirs are equal.

        The receiver sends each sender the coordinates that it wants and, as a server, the list of senders. If one
        sender got other coordinates than the rest, the receiver could read its values in a sum whose other values it
        knows. With different terms, the masks do not cancel, and a sender cannot decrypt the key shares of the other.
        """
        senders = np.array(sorted(self.senders), np.uint64).tobytes()
        options = struct.pack("<QQqd", self.receiver, self.round, self.max_partners, self.threshold)
        return hashlib.sha256(b"shoal terms" + options + hashlib.sha256(senders).digest() + self.content).digest()

    @property
    def masked(self) -> bool:
        """Whether a sum of two or more updates can hide each of them."""
        return len(self.senders) >= 2

    @cached_property
    def partners(self) -> Mapping[NodeId, tuple[NodeId, ...]]:
        """The mask partners of each sender, in ascending order. They also hold its key shares."""
        return mask_partners(self.senders, self.max_partners, self.receiver, self.seed)

    @property
    def partner_count(self) -> int:
        """The number of partners, equal for all senders."""
        return len(next(iter(self.partners.values())))

    @property
    def shares_needed(self) -> int:
        """The number of key shares that recover the secrets of a sender."""
        return max(min(2, self.partner_count), math.ceil(self.threshold * self.partner_count))

    @property
    def masks_needed(self) -> int:
        """The number of senders in a sum that a sender must have masked with.

        It equals the number of shares that recover its secrets: fewer colluders leave a mask that they do not know.
        """
        return self.shares_needed

    @property
    def senders_needed(self) -> int:
        """The number of senders in a sum that may be unmasked.

        If fewer senders collude than recover a secret, it is two more than the colluders. They can subtract their own
        updates, and the rest is a sum of at least two others.
        """
        return max(2, math.ceil(self.threshold * len(self.senders)), 1 + self.shares_needed)

    def objection(self, included: Collection[NodeId]) -> str | None:
        """Return why a sum of these senders' updates must not be unmasked; None if it may be."""
        if not set(included) <= set(self.senders):
            return "some of them do not send to the receiver in this round"
        if len(included) < self.senders_needed:
            return (
                f"{len(included)} of {len(self.senders)} updates are in the sum, and {self.senders_needed} are needed"
            )
        if not connected(self.partners, included):
            return "so many updates are missing that the masks of the others cancel in parts of the sum"
        return None


def describe_content(codec: FixedPoint, weights: Mapping[NodeId, float], positions: Positions | None) -> bytes:
    """Return a digest of the encoding, the senders' weights and the coordinates; `positions` None: all of them."""
    encoding = struct.pack("<qd", codec.bits, codec.range)
    weighted = b"".join(struct.pack("<Qd", sender, weights[sender]) for sender in sorted(weights))
    chosen = b"all" if positions is None else np.asarray(positions, np.int64).tobytes()
    return b"".join(hashlib.sha256(part).digest() for part in (encoding, weighted, chosen))


@dataclass(frozen=True)
class MaskedUpdate:
    """The payload of one sender for a receiver."""

    values: RingVector
    """The model: weighted, encoded and masked."""
    commitments: Sequence[bytes]
    """Commitments to the sender's secrets: the seed of its self mask, then the seed of each pairwise mask.
    `NO_COMMITMENT` for a partner that the sender did not mask with."""
    key_shares: Sequence[bytes]
    """For each partner its share of all these secrets, encrypted."""

    def payload(self) -> Payload:
        arrays = {VALUES: self.values, COMMITMENTS: to_rows(self.commitments), KEY_SHARES: to_rows(self.key_shares)}
        return Payload(arrays)

    @classmethod
    def from_payload(cls, payload: Payload, partners: int) -> MaskedUpdate:
        """Raises `MessageError` if the payload does not fit a sender with this number of partners."""
        commitments, shares = payload.arrays.get(COMMITMENTS), payload.arrays.get(KEY_SHARES)
        secrets = 1 + partners
        if commitments is None or commitments.dtype != np.uint8 or commitments.shape != (secrets, SEED_BYTES):
            raise MessageError(f"expected {secrets} commitments {COMMITMENTS!r} of {SEED_BYTES} bytes each")
        length = secrets * SEED_BYTES + TAG_BYTES
        if shares is None or shares.dtype != np.uint8 or shares.shape != (partners, length):
            raise MessageError(f"expected {partners} encrypted key shares {KEY_SHARES!r} of {length} bytes each")
        return cls(payload.arrays[VALUES], [bytes(row) for row in commitments], [bytes(row) for row in shares])


def mask_update(
    values: RingVector, sender: NodeId, protocol_round: ProtocolRound, keys: Keys, partners_with_key: Collection[NodeId]
) -> MaskedUpdate:
    """Mask `values`, the encoded model of `sender`, in place. `partners_with_key` share a key with it."""
    receiver, round, partners = protocol_round.receiver, protocol_round.round, protocol_round.partners[sender]
    terms = protocol_round.terms
    secrets, pairs = [keys.self_mask_seed(receiver, round)], {}
    masks.add(values, secrets[0])
    for partner in partners:
        if partner not in partners_with_key:
            secrets.append(NO_COMMITMENT)
            continue
        pair = pairs[partner] = keys.pair_secrets(partner, terms)
        (masks.add if sender < partner else masks.subtract)(values, pair.seed)
        secrets.append(pair.seed)
    commitments = [NO_COMMITMENT if s == NO_COMMITMENT else commitment(s, receiver, round) for s in secrets]
    shares = shamir.split(to_rows(secrets), protocol_round.partner_count, protocol_round.shares_needed)
    encrypted = [
        pairs[holder].encrypt(share.tobytes(), from_lower=sender < holder)
        if holder in pairs
        else bytes(share.size + TAG_BYTES)
        for holder, share in zip(partners, shares, strict=True)
    ]
    return MaskedUpdate(values, commitments, encrypted)


def to_rows(parts: Sequence[bytes]) -> Bytes:
    """Return byte strings of equal length as the rows of an array."""
    array = np.frombuffer(b"".join(parts), np.uint8)
    return array.reshape(len(parts), -1) if parts else array.reshape(0, 0)


def read_rows(payload: Payload, name: str, length: int) -> list[bytes]:
    """Return the rows of an array of bytes. Raises `MessageError` if they do not have this length."""
    array = payload.arrays.get(name)
    if array is None or array.dtype != np.uint8 or array.ndim != 2 or (len(array) and array.shape[1] != length):
        raise MessageError(f"expected an array {name!r} of rows of {length} bytes")
    return [bytes(row) for row in array]


def to_node_ids(nodes: Collection[NodeId]) -> NDArray[np.uint32]:
    return np.array(sorted(nodes), np.uint32)


def read_node_ids(payload: Payload, name: str) -> tuple[NodeId, ...]:
    """Return the node ids in an array, in ascending order. Raises `MessageError` for anything else."""
    array = payload.arrays.get(name)
    if array is None or array.dtype != np.uint32 or array.ndim != 1 or (np.diff(array.astype(np.int64)) <= 0).any():
        raise MessageError(f"expected an array {name!r} of increasing node ids")
    return tuple(array.tolist())
