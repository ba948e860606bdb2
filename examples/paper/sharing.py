"""The method of the paper: top-k sharing whose fraction changes from round to round, with the same bytes in total."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from shoal import Bounds, NodeId, Params, Payload
from shoal.compression.compressors import Part, SparseCode
from shoal.compression.floats import Float32
from shoal.compression.indices import GolombRice
from shoal.compression.sparse import top_positions
from shoal.sharing.sparse_merge import merge_sparse
from shoal.state import State

CODE = SparseCode(Float32(), GolombRice())
"""The encoding that `topk` uses by default: the bytes of a coordinate are comparable."""


@dataclass
class RampedTopK:
    """Send the coordinates that changed most since this node last sent them: few in early rounds, many in late ones.

    In round r of `rounds`, nodes send the fraction `fraction` · (1 + `ramp` · t) of the coordinates, where t increases
    linearly from −1 in the first round to 1 in the last round. The mean fraction is `fraction`. With `ramp = 0` this is
    the sharing `topk`; with a negative `ramp`, nodes send most in early rounds.
    """

    rounds: Annotated[int, Bounds(at_least=1)]
    fraction: Annotated[float, Bounds(above=0, at_most=0.5)] = 0.1
    ramp: Annotated[float, Bounds(at_least=-1, at_most=1)] = 0.5

    def start(self, params: Params) -> None:
        self._sent = params.copy()

    def outgoing(self, params: Params, round: int) -> Payload:
        positions = top_positions(params - self._sent, self._count(params.size, round))
        self._sent[positions] = params[positions]
        return CODE.pack(Part(params[positions], positions), params.size, None)

    def check(self, payload: Payload, params: Params) -> None:
        CODE.unpack(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        parts = {peer: CODE.unpack(payload, params.size) for peer, payload in received.items()}
        return merge_sparse(params, parts, weights)

    def state(self) -> State:
        return {"sent": self._sent.copy()}

    def restore(self, state: State) -> None:
        self._sent = np.array(state["sent"], np.float32)

    def _count(self, size: int, round: int) -> int:
        """Return how many coordinates are sent in a round: at least one."""
        t = 2 * min(round, self.rounds - 1) / max(1, self.rounds - 1) - 1
        return max(1, int(size * self.fraction * (1 + self.ramp * t)))
