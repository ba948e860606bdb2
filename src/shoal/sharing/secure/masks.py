"""Keys that two nodes agree upon, and the masks that follow from them.

Each node has an X25519 key of its own for a run, from the system's randomness: results do not depend on masks, so a
run replays all the same. From the key that a pair agrees upon, HKDF gives a seed of its own for each receiver and
round. A mask is the stream of AES-128 in counter mode under a seed, which is never used twice.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from shoal.errors import MessageError
from shoal.sharing.secure.fixed_point import Words
from shoal.types import NodeId

KEY_BYTES = 32
SEED_BYTES = 16
TAG_BYTES = 16
_ZERO_NONCE = bytes(12)
_BLOCK = bytes(1 << 16)
_PLACE = struct.Struct("<QQ")


@dataclass(frozen=True, repr=False)
class PairSecrets:
    """What two nodes share for one receiver and one round."""

    seed: bytes
    """Of the mask that one of them adds and the other subtracts."""
    _seals: tuple[bytes, bytes]

    def seal(self, plain: bytes, from_lower: bool) -> bytes:
        """Encrypt what one of the two has for the other. Each of them may do so once."""
        return AESGCM(self._seals[from_lower]).encrypt(_ZERO_NONCE, plain, None)

    def unseal(self, sealed: bytes, from_lower: bool) -> bytes:
        """Raises `MessageError` for anything that the other has not sealed for this receiver and round."""
        try:
            return AESGCM(self._seals[from_lower]).decrypt(_ZERO_NONCE, sealed, None)
        except InvalidTag as error:
            raise MessageError("not what the other has sealed: tampered with, or under another key") from error


class Keys:
    """A node's own key, and those that it has agreed upon with others."""

    def __init__(self, run: str) -> None:
        self._run = run.encode()
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        self._root = secrets.token_bytes(KEY_BYTES)
        self._publics: dict[NodeId, bytes] = {}
        self._pairs: dict[NodeId, bytes] = {}

    def __contains__(self, peer: NodeId) -> bool:
        return peer in self._pairs

    def agree(self, peer: NodeId, public: bytes) -> None:
        """Agree with `peer` upon a key. Raises `MessageError` for a public key that is another node's, or no key."""
        if public == self.public:
            raise MessageError("its key is this node's own; every node must have a key of its own")
        if (owner := self.owner(public)) is not None and owner != peer:
            raise MessageError(f"its key is that of node {owner}; every node must have a key of its own")
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # a point of low order, with which everybody knows the outcome
            raise MessageError(f"its key is not one to agree upon a secret with: {error}") from error
        both = b"".join(sorted((self.public, public)))
        kdf = HKDF(hashes.SHA256(), KEY_BYTES, salt=both, info=b"shoal secure aggregation, pair " + self._run)
        self._publics[peer] = public
        self._pairs[peer] = kdf.derive(secret)

    def owner(self, public: bytes) -> NodeId | None:
        """With whom a key was agreed upon by means of `public`."""
        return next((node for node, known in self._publics.items() if known == public), None)

    def with_peer(self, peer: NodeId, receiver: NodeId, round: int) -> PairSecrets:
        made = _expanded(self._pairs[peer], b"masks and shares", receiver, round, 3 * SEED_BYTES)
        seed, low, high = (made[i : i + SEED_BYTES] for i in range(0, len(made), SEED_BYTES))
        return PairSecrets(seed, (high, low))

    def own_seed(self, receiver: NodeId, round: int) -> bytes:
        """Of the mask that this node alone knows, until it is told that its words are in the sum."""
        return _expanded(self._root, b"own mask", receiver, round, SEED_BYTES)


def _expanded(key: bytes, purpose: bytes, receiver: NodeId, round: int, length: int) -> bytes:
    return HKDFExpand(hashes.SHA256(), length, purpose + _PLACE.pack(receiver, round)).derive(key)


def commitment(seed: bytes, receiver: NodeId, round: int) -> bytes:
    """What holds a node to a seed without telling it."""
    return hashlib.sha256(b"shoal seed" + _PLACE.pack(receiver, round) + seed).digest()[:SEED_BYTES]


def mask(seed: bytes, count: int, dtype: np.dtype[Any]) -> Words:
    """`count` words that nobody can tell from random ones without the seed."""
    size = count * dtype.itemsize
    stream = bytearray(size + 15)  # a cipher may write up to a block beyond what it was given
    encryptor = Cipher(AES(seed), CTR(bytes(16))).encryptor()
    view = memoryview(stream)
    for start in range(0, size, len(_BLOCK)):
        length = min(len(_BLOCK), size - start)
        encryptor.update_into(_BLOCK[:length] if length < len(_BLOCK) else _BLOCK, view[start:])
    return np.frombuffer(stream, dtype, count)


def add(words: Words, seed: bytes) -> None:
    """Put the mask of `seed` on `words`, in place."""
    words += mask(seed, words.size, words.dtype)


def subtract(words: Words, seed: bytes) -> None:
    words -= mask(seed, words.size, words.dtype)
