"""Vectors in the payloads that algorithms build themselves: checks and averages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.errors import MessageError
from shoal.message import Payload
from shoal.types import NodeId, Params


def check_vectors(payload: Payload, size: int, names: tuple[str, ...]) -> None:
    """Raise `MessageError` unless the named arrays are float32 vectors of `size` finite values."""
    for name in names:
        vector = payload.arrays.get(name)
        if vector is None or vector.shape != (size,) or vector.dtype != np.float32:
            raise MessageError(f"expected a float32 vector {name!r} of {size} values")
        if not np.isfinite(vector).all():
            raise MessageError(f"{name!r} holds values that are not finite")


def average(own: Params, others: Mapping[NodeId, Params], weights: Mapping[NodeId, float]) -> Params:
    """Return the weighted average. The weight of `own` is 1 minus the weights of `others`."""
    mixed = own * np.float32(1.0 - sum(weights[peer] for peer in others))
    for peer, vector in others.items():
        mixed += vector * np.float32(weights[peer])
    return mixed


def lazy_weights(weights: Mapping[NodeId, float]) -> dict[NodeId, float]:
    """Return the weights of (W + I)/2, given those of W."""
    return {peer: weight / 2 for peer, weight in weights.items()}
