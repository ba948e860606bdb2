"""Random generators: every draw comes from (experiment seed, purpose, ids), never from a global generator.

Draws with different purposes or ids are independent, and no draw depends on the order of others. So a run can be
reproduced from its seed, in one process or in a thousand.
"""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return a new generator for `purpose` and for `ids` within it: node, round, …"""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, ids)))


def derived_seed(seed: int, purpose: str, *ids: int) -> int:
    """Return a 63-bit seed for libraries that need one, drawn like `generator`."""
    numbers = _sequence(seed, purpose, ids).generate_state(2, np.uint32)
    return (int(numbers[0]) << 31) ^ int(numbers[1])


def _sequence(seed: int, purpose: str, ids: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *ids))
