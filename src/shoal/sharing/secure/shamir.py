"""Secrets in shares, of which some suffice and fewer say nothing (Shamir, "How to share a secret", CACM 1979).

Every byte of a secret is the value at 0 of a polynomial over GF(2⁸) with random coefficients, of a degree one less than
the shares that suffice; share x is its value at x. So a share is as long as the secret, and with fewer shares every
secret is as likely as before.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

MOST = 255
"""Shares of one secret: as many as there are places other than 0."""
_GENERATOR, _MODULUS = 3, 0x11B


def _tables() -> tuple[Bytes, NDArray[np.int64]]:
    """Powers of a generator, twice over so that a sum of two logarithms needs no remainder; and logarithms."""
    powers, logs = np.zeros(510, np.uint8), np.zeros(256, np.int64)
    element = 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = element
        logs[element] = exponent
        element ^= element << 1  # times 3
        if element & 0x100:
            element ^= _MODULUS
    return powers, logs


_POWERS, _LOGS = _tables()


def _times(a: Bytes, b: int) -> Bytes:
    """Each of `a` times `b`, in GF(2⁸)."""
    if b == 0:
        return np.zeros_like(a)
    product: Bytes = _POWERS[_LOGS[a] + _LOGS[b]]
    product[a == 0] = 0
    return product


def _divided(a: int, b: int) -> int:
    return 0 if a == 0 else int(_POWERS[_LOGS[a] - _LOGS[b] + 255])


def split(secret: Bytes, holders: int, threshold: int) -> Bytes:
    """The shares of `secret`, of any shape, one for each of `holders`: holder h (from 0) has place h + 1."""
    if not 1 <= threshold <= holders <= MOST:
        raise ValueError(f"{threshold} of {holders} shares; expected 1 of 1 at the least, and at most {MOST} shares")
    random = np.frombuffer(secrets.token_bytes(secret.size * (threshold - 1)), np.uint8)
    coefficients = random.reshape(threshold - 1, *secret.shape)
    shares = np.empty((holders, *secret.shape), np.uint8)
    for holder in range(holders):
        value = np.zeros(secret.shape, np.uint8)
        for coefficient in coefficients:
            value = _times(value ^ coefficient, holder + 1)
        shares[holder] = value ^ secret
    return shares


def combine(shares: Mapping[int, Bytes]) -> Bytes:
    """The secret, from the shares of as many holders as suffice. From fewer, or from a forged one, it is noise."""
    places = [holder + 1 for holder in shares]
    secret: Bytes | None = None
    for place, share in zip(places, shares.values(), strict=True):
        above = below = 1  # of Lagrange's polynomial at 0: products of x / (x − place), and minus is plus
        for other in places:
            if other != place:
                above = int(_times(np.array([above], np.uint8), other)[0])
                below = int(_times(np.array([below], np.uint8), other ^ place)[0])
        term = _times(share, _divided(above, below))
        secret = term if secret is None else secret ^ term
    if secret is None:
        raise ValueError("no share at all")
    return secret
