"""Secret sharing: a threshold of shares gives the secret, and fewer shares reveal nothing.

Shamir: How to share a secret, CACM 1979. Every byte of a secret is the value at 0 of a polynomial over GF(2⁸) with
random coefficients. Its degree is the threshold minus one, and share x is its value at x. So a share is as long as the
secret, and with fewer shares than the threshold all secrets are equally likely.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

MAX_SHARES = 255
"""The most shares of one secret: one for each field element except 0."""
_MODULUS = 0x11B


def _tables() -> tuple[Bytes, NDArray[np.int64]]:
    """Return powers of the generator 3 and logarithms. Powers repeat: a sum of two logarithms needs no modulo."""
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


def multiply(a: Bytes, b: int) -> Bytes:
    """Return each of `a` times `b` in GF(2⁸)."""
    if b == 0:
        return np.zeros_like(a)
    product: Bytes = _POWERS[_LOGS[a] + _LOGS[b]]
    product[a == 0] = 0
    return product


def divide(a: int, b: int) -> int:
    """Return `a` divided by `b` in GF(2⁸)."""
    return 0 if a == 0 else int(_POWERS[_LOGS[a] - _LOGS[b] + 255])


def split(secret: Bytes, holders: int, threshold: int) -> Bytes:
    """Return one share of `secret`, an array of any shape, for each holder: holder h (from 0) has place h + 1."""
    if not 1 <= threshold <= holders <= MAX_SHARES:
        raise ValueError(f"{threshold} of {holders} shares; expected at least 1 of 1, and at most {MAX_SHARES} shares")
    random = np.frombuffer(secrets.token_bytes(secret.size * (threshold - 1)), np.uint8)
    coefficients = random.reshape(threshold - 1, *secret.shape)
    shares = np.empty((holders, *secret.shape), np.uint8)
    for holder in range(holders):
        value = np.zeros(secret.shape, np.uint8)
        for coefficient in coefficients:
            value = multiply(value ^ coefficient, holder + 1)
        shares[holder] = value ^ secret
    return shares


def combine(shares: Mapping[int, Bytes]) -> Bytes:
    """Return the secret from a threshold of shares. Fewer shares, or a forged one, give a random result."""
    places = [holder + 1 for holder in shares]
    secret: Bytes | None = None
    for place, share in zip(places, shares.values(), strict=True):
        above = below = 1  # Lagrange's polynomial at 0: products of x / (x − place); in GF(2⁸), minus is plus
        for other in places:
            if other != place:
                above = int(multiply(np.array([above], np.uint8), other)[0])
                below = int(multiply(np.array([below], np.uint8), other ^ place)[0])
        term = multiply(share, divide(above, below))
        secret = term if secret is None else secret ^ term
    if secret is None:
        raise ValueError("no shares given")
    return secret
