"""DeepSqueeze: compressed models with error feedback.

Tang, Lian, Qiu, Yuan, Zhang, Zhang, Liu: DeepSqueeze: Decentralization Meets Error-Compensated Compression, 2019,
arXiv:1907.07346.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from shoal.compression.compressors import Compressor, Part, QuantizedCompressor
from shoal.message import Payload
from shoal.sharing.payload_cache import PayloadCache
from shoal.sharing.requirements import requires_neighbours
from shoal.sharing.sharing import NodeInfo
from shoal.state import State
from shoal.topologies.inspection import requires_symmetric
from shoal.traits import ExperimentView
from shoal.types import Bounds, Nested, NodeId, Params


@dataclass
class DeepSqueeze:
    """Tang et al. 2019: the model plus the accumulated compression error, compressed; nodes step towards each other.

    With the accumulated error δ, at first 0, the compressor C and the model x after training, node i does

        v_i ← x_i + δ_i,  sends C(v_i),  δ_i ← v_i − C(v_i)
        x_i ← x_i + γ Σ_j w_ij (C(v_j) − C(v_i))

    where C(v_i) is the decoded payload. Doubly stochastic weights keep the mean of all models.

    `gamma` is the step size towards the neighbours: 1 is plain averaging, which works only with a fine compressor. A
    coordinate that C leaves out counts as zero, not as unchanged, and δ then grows by the model in every round. So a
    coarser C needs a smaller γ, or models diverge. For 8 bits per value, 1 works; for a tenth of the coordinates, start
    at 0.01. Neighbours may change from round to round.

    Encoding takes as long as the compressor does: for top-k, the time of 50 copies of the model, as in `TopK`.
    """

    gamma: Annotated[float, Bounds(above=0, at_most=1)] = 1.0
    compressor: Annotated[Compressor, Nested("compressor")] = QuantizedCompressor()

    def __post_init__(self) -> None:
        self._cache: PayloadCache[Part] = PayloadCache(self.compressor.decompress)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        why = "nodes step towards each other, in pairs"
        return requires_neighbours(experiment, why) or requires_symmetric(experiment, "sharing = 'deepsqueeze'")

    def bind(self, info: NodeInfo) -> None:
        self._info = info
        self._cache.reject_non_finite = info.rejects_non_finite

    def start(self, params: Params) -> None:
        self.compressor.fit(params.size)
        self._error = np.zeros_like(params)
        self._sent: Part | None = None

    def outgoing(self, params: Params, round: int) -> Payload:
        self._error += params
        rng = self._info.rng("deepsqueeze", round) if self.compressor.stochastic else None
        payload, self._sent = self.compressor.compress(self._error, rng)
        self._sent.add_to(self._error, -1.0)
        return payload

    def check(self, payload: Payload, params: Params) -> None:
        self._cache.check(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        step = np.zeros(params.size)  # in double precision: rounding of large terms would move the mean of all models
        for peer, part in self._cache.take(received, params.size).items():
            part.add_to(step, weights[peer])
        sent, self._sent = self._sent or Part(params), None  # without an outgoing payload, use the model itself
        sent.add_to(step, -sum(weights.values()))
        merged: Params = (params + self.gamma * step).astype(np.float32)
        return merged

    def state(self) -> State:
        return {"error": self._error.copy()}

    def restore(self, state: State) -> None:
        self._error = np.array(state["error"], np.float32)
        self._sent = None
