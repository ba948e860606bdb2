"""Full sharing: the whole vector, every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shoal.errors import MessageError
from shoal.message import Params, Payload
from shoal.topologies.graph import NodeId


@dataclass
class Full:
    """The whole model, every round; merged as a weighted average."""

    def start(self, params: Params) -> None:
        """Nothing is kept."""

    def outgoing(self, params: Params, round: int) -> Payload:
        return Payload({"params": params})

    def check(self, payload: Payload, params: Params) -> None:
        vector = payload.arrays.get("params")
        if vector is None or vector.shape != params.shape or vector.dtype != params.dtype:
            raise MessageError(f"expected one float32 vector 'params' of {params.size} values")

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        merged = params * np.float32(1.0 - sum(weights.values()))
        scaled = np.empty_like(merged)
        for peer, payload in received.items():
            merged += np.multiply(payload.arrays["params"], np.float32(weights[peer]), out=scaled)
        return merged
