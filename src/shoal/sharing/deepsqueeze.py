"""DeepSqueeze: compressed models, with what compression left out added to the next.

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
from shoal.sharing.requirements import without_neighbours
from shoal.sharing.sharing import NodeInfo
from shoal.state import State
from shoal.traits import ExperimentView
from shoal.types import Bounds, Nested, NodeId, Params


@dataclass
class DeepSqueeze:
    """Tang et al. 2019: the model and all that was left out of it before, compressed; nodes step towards each other.

    With δ the error so far, at first 0, C the compressor and x the model after training, node i does

        v_i ← x_i + δ_i,  sends C(v_i),  δ_i ← v_i − C(v_i)
        x_i ← x_i + γ Σ_j w_ij (C(v_j) − C(v_i))

    where C(v_i) is what the others read. Doubly stochastic weights keep the mean of all models.

    `gamma` is how far nodes step towards each other: 1 is plain averaging, which only a fine compressor bears. A
    coordinate that C leaves out counts as zero, not as unchanged, and δ then grows by the model in every round: the
    coarser C, the smaller γ has to be, or models swing apart. For 8 bits a value, 1 will do; for a tenth of the
    coordinates, start at 0.01. Neighbours may change from round to round.

    What it costs to speak is what the compressor costs: for top-k as long as 50 copies of the model, as in `TopK`.
    """

    gamma: Annotated[float, Bounds(above=0, at_most=1)] = 1.0
    compressor: Annotated[Compressor, Nested("compressor")] = QuantizedCompressor()

    def __post_init__(self) -> None:
        self._cache: PayloadCache[Part] = PayloadCache(self.compressor.decompress)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return without_neighbours(experiment, "nodes step towards each other, in pairs")

    def bind(self, info: NodeInfo) -> None:
        self._info = info

    def start(self, params: Params) -> None:
        self.compressor.fit(params.size)
        self._error = np.zeros_like(params)
        self._said: Part | None = None

    def outgoing(self, params: Params, round: int) -> Payload:
        self._error += params
        rng = self._info.rng("deepsqueeze", round) if self.compressor.stochastic else None
        payload, self._said = self.compressor.compress(self._error, rng)
        self._said.add_to(self._error, -1.0)
        return payload

    def check(self, payload: Payload, params: Params) -> None:
        self._cache.check(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        merged = params.copy()
        for peer, part in self._cache.take(received, params.size).items():
            part.add_to(merged, self.gamma * weights[peer])
        said, self._said = self._said or Part(params), None  # who has not spoken is taken at its model
        said.add_to(merged, -self.gamma * sum(weights.values()))
        return merged

    def state(self) -> State:
        return {"error": self._error.copy()}

    def restore(self, state: State) -> None:
        self._error = np.array(state["error"], np.float32)
        self._said = None
