"""Decoded payloads that wait for their merge, and the merge of models of which some coordinates were received."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import numpy as np

from shoal.compression.compressors import Part
from shoal.message import Payload
from shoal.types import NodeId, Params

T = TypeVar("T")

MAX_CACHED = 64
"""The most payloads in a cache: those of one round. Further payloads are decoded twice."""


class PayloadCache(Generic[T]):
    """Decodes a payload when it is checked, so that the merge does not decode it again."""

    def __init__(self, decode: Callable[[Payload, int], T]) -> None:
        """`decode` takes a payload and the size of the model, and raises `MessageError`."""
        self._decode = decode
        self._decoded: dict[int, tuple[Payload, T]] = {}  # by identity, which is valid while the payload exists

    def check(self, payload: Payload, size: int) -> None:
        decoded = self._decode(payload, size)
        if len(self._decoded) < MAX_CACHED:
            self._decoded[id(payload)] = payload, decoded

    def take(self, received: Mapping[NodeId, Payload], size: int) -> dict[NodeId, T]:
        """Return the decoded payloads by sender, and empty the cache."""
        decoded, self._decoded = self._decoded, {}
        return {
            peer: decoded[id(payload)][1] if id(payload) in decoded else self._decode(payload, size)
            for peer, payload in received.items()
        }


def merge_sparse(params: Params, parts: Mapping[NodeId, Part], weights: Mapping[NodeId, float]) -> Params:
    """Return the weighted average in which a coordinate that a peer did not send counts as the node's own.

    This is x[p] + Σ_j w_j (v_j[p] − x[p]) over the peers j that sent p.
    """
    merged = weighted_change(params, parts, weights)
    merged += params
    return merged


def weighted_change(params: Params, parts: Mapping[NodeId, Part], weights: Mapping[NodeId, float]) -> Params:
    """Return the change of each coordinate by `merge_sparse`."""
    change = np.zeros_like(params)
    for peer, part in parts.items():
        own = params if part.positions is None else params[part.positions]
        weight = np.float32(weights[peer])
        # Multiply first: the difference of two finite values could be infinite. For equal values the result is still 0.
        Part(part.values * weight - own * weight, part.positions).add_to(change)
    return change
