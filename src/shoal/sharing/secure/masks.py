"""Keys that pairs of nodes agree on, and the masks derived from them.

Each node has one X25519 key per run, from the system's random source. Results do not depend on masks, so a run is still
reproducible. From the key of a pair, HKDF derives one seed for the terms of each sum: its receiver, its round and all
else that its senders agree on. A mask is the AES-128 key stream in counter mode under a seed. No seed is used twice.
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
from shoal.sharing.secure.fixed_point import RingVector
from shoal.types import NodeId

KEY_BYTES = 32
SEED_BYTES = 16
TAG_BYTES = 16
_ZERO_NONCE = bytes(12)
_ZEROS = bytes(1 << 16)
_RECEIVER_AND_ROUND = struct.Struct("<QQ")


@dataclass(frozen=True, repr=False)
class PairSecrets:
    """The secrets that two nodes share for one sum: one receiver and one round."""

    seed: bytes
    """The seed of the pairwise mask, which one of the two adds and the other subtracts."""
    _encryption_keys: tuple[bytes, bytes]

    def encrypt(self, plain: bytes, from_lower: bool) -> bytes:
        """Encrypt data from one node of the pair for the other. Each of the two may call this once."""
        return AESGCM(self._encryption_keys[from_lower]).encrypt(_ZERO_NONCE, plain, None)

    def decrypt(self, encrypted: bytes, from_lower: bool) -> bytes:
        """Raises `MessageError` for data that the other node did not encrypt under the same terms."""
        try:
            return AESGCM(self._encryption_keys[from_lower]).decrypt(_ZERO_NONCE, encrypted, None)
        except InvalidTag as error:
            raise MessageError("decryption failed: the data was altered, or encrypted with another key") from error


class Keys:
    """The key of one node, and the keys that it has agreed on with other nodes."""

    def __init__(self, run: str) -> None:
        self._run = run.encode()
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        self._self_mask_key = secrets.token_bytes(KEY_BYTES)
        self._publics: dict[NodeId, bytes] = {}
        self._pairs: dict[NodeId, bytes] = {}

    def __contains__(self, peer: NodeId) -> bool:
        return peer in self._pairs

    def agree(self, peer: NodeId, public: bytes) -> None:
        """Agree on a key with `peer`. Raises `MessageError` if `public` is another node's key, or not a valid key."""
        if public == self.public:
            raise MessageError("its key is this node's own key; every node needs its own key")
        if (owner := self.owner(public)) is not None and owner != peer:
            raise MessageError(f"its key is also the key of node {owner}; every node needs its own key")
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # a point of low order: the shared secret would be public
            raise MessageError(f"its key is not valid for a key agreement: {error}") from error
        both = b"".join(sorted((self.public, public)))
        kdf = HKDF(hashes.SHA256(), KEY_BYTES, salt=both, info=b"shoal secure aggregation, pair " + self._run)
        self._publics[peer] = public
        self._pairs[peer] = kdf.derive(secret)

    def owner(self, public: bytes) -> NodeId | None:
        """Return the node that this node agreed on a key with by means of `public`."""
        return next((node for node, known in self._publics.items() if known == public), None)

    def pair_secrets(self, peer: NodeId, terms: bytes) -> PairSecrets:
        """Return the secrets shared with `peer` for one sum. Both nodes get the same ones only for the same `terms`."""
        expanded = _expand(self._pairs[peer], b"masks and shares" + terms, 3 * SEED_BYTES)
        seed, low, high = (expanded[i : i + SEED_BYTES] for i in range(0, len(expanded), SEED_BYTES))
        return PairSecrets(seed, (high, low))

    def self_mask_seed(self, receiver: NodeId, round: int) -> bytes:
        """Return the seed of the self mask. The node reveals it only when its update is in the sum."""
        return _expand(self._self_mask_key, b"own mask" + _RECEIVER_AND_ROUND.pack(receiver, round), SEED_BYTES)


def _expand(key: bytes, purpose: bytes, length: int) -> bytes:
    return HKDFExpand(hashes.SHA256(), length, purpose).derive(key)


def commitment(seed: bytes, receiver: NodeId, round: int) -> bytes:
    """Return a hash that commits a node to a seed without revealing it."""
    return hashlib.sha256(b"shoal seed" + _RECEIVER_AND_ROUND.pack(receiver, round) + seed).digest()[:SEED_BYTES]


def mask(seed: bytes, count: int, dtype: np.dtype[Any]) -> RingVector:
    """Return `count` integers that look random without the seed."""
    size = count * dtype.itemsize
    stream = bytearray(size + 15)  # the cipher may write up to one block more than its input
    encryptor = Cipher(AES(seed), CTR(bytes(16))).encryptor()
    view = memoryview(stream)
    for start in range(0, size, len(_ZEROS)):
        length = min(len(_ZEROS), size - start)
        encryptor.update_into(_ZEROS[:length] if length < len(_ZEROS) else _ZEROS, view[start:])
    return np.frombuffer(stream, dtype, count)


def add(values: RingVector, seed: bytes) -> None:
    """Add the mask of `seed` to `values`, in place."""
    values += mask(seed, values.size, values.dtype)


def subtract(values: RingVector, seed: bytes) -> None:
    """Subtract the mask of `seed` from `values`, in place."""
    values -= mask(seed, values.size, values.dtype)
