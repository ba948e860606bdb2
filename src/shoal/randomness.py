"""Every random draw comes from (experiment seed, purpose, who), never from a global generator.

Two draws with different purposes or owners are independent, and no draw depends on the order in which others
are made. So a run replays from its seed, in one process or in a thousand.
"""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, purpose: str, *who: int) -> np.random.Generator:
    """A fresh generator for `purpose` (a plain word), and for `who` within it: node, round, …"""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, who)))


def derived_seed(seed: int, purpose: str, *who: int) -> int:
    """A 63-bit number drawn like `generator`, for libraries that want a seed of their own."""
    words = _sequence(seed, purpose, who).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def _sequence(seed: int, purpose: str, who: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *who))
