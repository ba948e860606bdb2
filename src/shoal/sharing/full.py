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
        merged = params * np.float32(1.0 - sum(weights.values()))
        terms = [(payload.arrays["params"], np.float32(weights[peer])) for peer, payload in received.items()]
        scaled = np.empty(min(BLOCK, merged.size), np.float32)
        for start in range(0, merged.size, BLOCK):
            part = merged[start : start + BLOCK]
            for vector, weight in terms:
                part += np.multiply(vector[start : start + BLOCK], weight, out=scaled[: part.size])
        return merged
