"""Vectors in the payloads that algorithms build themselves: checks and averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError
from shoal.message import Payload
from shoal.types import NodeId, Params

Vector = TypeVar("Vector", Params, NDArray[np.float64])


def check_vectors(payload: Payload, size: int, names: tuple[str, ...]) -> None:
    """Raise `MessageError` unless the named arrays are float32 vectors of `size` values."""
    for name in names:
        vector = payload.arrays.get(name)
        if vector is None or vector.shape != (size,) or vector.dtype != np.float32:
            raise MessageError(f"expected a float32 vector {name!r} of {size} values")


def average(own: Vector, others: Mapping[NodeId, Params], weights: Mapping[NodeId, float]) -> Vector:
    """Return own + Σ_j w_j (x_j − own), in the precision of `own`; the weight of `own` is 1 minus those of `others`.

    Weights that are rounded to float32 do not sum to 1 exactly: a sum of vectors with these weights would scale them in
    every round.
    """
    mixed = own.copy()
    for peer, vector in others.items():
        mixed += (vector - own) * own.dtype.type(weights[peer])
    return mixed


def lazy_weights(weights: Mapping[NodeId, float]) -> dict[NodeId, float]:
    """Return the weights of (W + I)/2, given those of W."""
    return {peer: weight / 2 for peer, weight in weights.items()}
