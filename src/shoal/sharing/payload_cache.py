"""For sharings whose payloads take some work to unfold, or hold some coordinates only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import numpy as np

from shoal.compression.compressors import Part
from shoal.message import Payload
from shoal.types import NodeId, Params

T = TypeVar("T")

KEPT = 64
"""Payloads of which is remembered what they unfold to: those of one round. Beyond, they are unfolded twice."""


class Heard(Generic[T]):
    """What payloads say. A payload is unfolded when it is checked, and the merge that follows need not do it again."""

    def __init__(self, unfold: Callable[[Payload, int], T]) -> None:
        """`unfold` is given a payload and the size of the model, and raises `MessageError`."""
        self._unfold = unfold
        self._kept: dict[int, tuple[Payload, T]] = {}  # by identity, which holds as long as the payload is held

    def check(self, payload: Payload, size: int) -> None:
        unfolded = self._unfold(payload, size)
        if len(self._kept) < KEPT:
            self._kept[id(payload)] = payload, unfolded

    def take(self, received: Mapping[NodeId, Payload], size: int) -> dict[NodeId, T]:
        """What each of `received` says; all that was remembered is forgotten."""
        kept, self._kept = self._kept, {}
        return {
            peer: kept[id(payload)][1] if id(payload) in kept else self._unfold(payload, size)
            for peer, payload in received.items()
        }


def fill_in(params: Params, parts: Mapping[NodeId, Part], weights: Mapping[NodeId, float]) -> Params:
    """The weighted average where coordinates that a peer did not send are taken to be as one's own.

    That is x[p] + Σ_j w_j (v_j[p] − x[p]) over the peers j that sent p.
    """
    merged = change(params, parts, weights)
    merged += params
    return merged


def change(params: Params, parts: Mapping[NodeId, Part], weights: Mapping[NodeId, float]) -> Params:
    """How far `fill_in` moves each coordinate."""
    moved = np.zeros_like(params)
    for peer, part in parts.items():
        own = params if part.positions is None else params[part.positions]
        weight = np.float32(weights[peer])
        # Weighted first, where the difference of two finite values could be infinite; of equals it still is 0.
        Part(part.values * weight - own * weight, part.positions).add_to(moved)
    return moved
