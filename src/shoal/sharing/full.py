"""Full sharing: the full model, every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

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
        terms = [(payload.arrays["params"], merged.dtype.type(weights[peer])) for peer, payload in received.items()]
        buffer = np.empty(min(BLOCK, merged.size), merged.dtype)
        for start in range(0, merged.size, BLOCK):
            own, part = params[start : start + BLOCK], merged[start : start + BLOCK]
            difference = buffer[: part.size]
            for vector, weight in terms:
                np.subtract(vector[start : start + BLOCK], own, out=difference)
                part += np.multiply(difference, weight, out=difference)
        return merged
