"""Full sharing: the full model, every round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError
from shoal.message import Payload
from shoal.traits import Traits
from shoal.types import NodeId, Params

BLOCK = 2**14
"""Values that are merged at a time. A buffer of the size of the model would cause page faults in every round."""


@dataclass
class FullSharing:
    """The full model, every round; merged by a weighted average."""

    traits: ClassVar[Traits] = Traits(sends_whole_models=True)

    def start(self, params: Params) -> None:
        """Keep nothing: there is no state."""

    def outgoing(self, params: Params, round: int) -> Payload:
        return Payload({"params": params})

    def check(self, payload: Payload, params: Params) -> None:
        vector = payload.arrays.get("params")
        if vector is None or vector.shape != params.shape or vector.dtype != params.dtype:
            raise MessageError(f"expected one float32 vector 'params' of {params.size} values")

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        """Return x + Σ_j w_j (x_j − x), in the precision of `params`.

        Differences: the weights, rounded to float32, do not sum to 1 exactly, and a sum of models with these weights
        would scale the model in every round.
        """
        merged = params.copy()
        terms = [(payload.arrays["params"], weights[peer]) for peer, payload in received.items()]
        buffer = np.empty(min(BLOCK, merged.size), merged.dtype)
        if merged.size <= BLOCK:
            _add_differences(merged, params, terms, buffer)
            return merged
        for start in range(0, merged.size, BLOCK):
            block = slice(start, start + BLOCK)
            parts = [(vector[block], weight) for vector, weight in terms]
            _add_differences(merged[block], params[block], parts, buffer[: merged.size - start])
        return merged


def _add_differences(
    merged: Params, params: Params, terms: Iterable[tuple[NDArray[Any], float]], buffer: Params
) -> None:
    """Add w_j (x_j − x) of each term (x_j, w_j) to `merged`; x is `params`. Weights are rounded to their precision."""
    for vector, weight in terms:
        np.subtract(vector, params, buffer)
        np.multiply(buffer, weight, buffer)
        np.add(merged, buffer, merged)
