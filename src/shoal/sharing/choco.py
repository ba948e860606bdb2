"""CHOCO-SGD: neighbours gossip on public copies of their models, which compressed differences keep up to date.

Koloskova, Stich, Jaggi: Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication,
ICML 2019, arXiv:1902.00340. Koloskova, Lin, Stich, Jaggi: Decentralized Deep Learning with Arbitrary Communication
Compression, ICLR 2020, arXiv:1907.09356.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from shoal.components import Whole
from shoal.compression.compressors import Compressor, Part, TopKCompressor
from shoal.errors import MessageError
from shoal.message import Params, Payload
from shoal.schema import Bounds, Nested
from shoal.sharing.heard import Heard
from shoal.sharing.lasting import without_lasting_neighbours
from shoal.sharing.sharing import Member, Outgoing
from shoal.state import State
from shoal.topologies.graph import NodeId


@dataclass
class CHOCO:
    """Koloskova et al. 2019: compressed differences to a public copy of each model; nodes gossip on the copies.

    With x̂ the public copies, at first 0, Q the compressor and x the model after training, node i does

        sends q_i = Q(x_i − x̂_i);  x̂_j ← x̂_j + q_j for itself and each neighbour j
        x_i ← x_i + γ Σ_j w_ij (x̂_j − x̂_i)

    Doubly stochastic weights keep the mean of all models. `gamma` is how far nodes step towards each other: the
    coarser Q, the smaller it has to be, or models swing apart. For 8 bits a value, 1 will do; for the tenth of the
    coordinates that changed most, up to 0.2; for a random tenth, 0.1.

    As in the paper's memory-efficient form, a node does not keep the copies of its neighbours. It keeps x̂_i and the
    pull g_i = Σ_j w_ij (x̂_j − x̂_i), which is the paper's s_i less x̂_i and moves by Σ_j w_ij (q_j − q_i). The pull
    vanishes as nodes agree, and its rounding errors with it, where those of s_i would add up over the rounds.

    The pull is right as long as it has every q of the same neighbours, under the same weights. When one of them dies,
    keeps silent or sends nonsense, its copy cannot be taken out of the pull, and going on would drag the
    model off in every round from then on. So the node keeps its trained model and says in its next message that it
    is `lost`; in the round after, its neighbours send it their copies whole, and from these it makes its
    pull anew, for those that are left. That costs one full model per neighbour and two rounds without mixing.
    In them its neighbours still step towards it, and weights that were renormalised for a missing node are not doubly
    stochastic: the mean moves once, by a bounded step.
    """

    gamma: Annotated[float, Bounds(above=0, at_most=1)] = 0.2
    compressor: Annotated[Compressor, Nested("compressor")] = TopKCompressor()

    def __post_init__(self) -> None:
        self._heard: Heard[Part] = Heard(self.compressor.decompress)

    def misfits(self, whole: Whole) -> list[str]:
        return without_lasting_neighbours(whole, "a node follows the changes of each neighbour from the first round on")

    def join(self, member: Member) -> None:
        self._member = member

    def start(self, params: Params) -> None:
        self.compressor.fit(params.size)
        self._copy = np.zeros_like(params)  # x̂ of this node
        self._pull = np.zeros_like(params)
        self._weights: dict[NodeId, float] | None = None  # those in the pull; None before the first round
        self._lost = False
        self._asked = False  # for copies, in this round's message
        self._asked_by: list[NodeId] = []
        self._said: Part | None = None

    def outgoing(self, params: Params, round: int) -> Outgoing:
        self._lost |= self._said is not None  # no merge since: what was heard then is not in the pull
        difference, self._said = self.compressor.compress(params - self._copy, self._member.rng("choco", round))
        self._said.add_to(self._copy)
        self._asked = self._lost and not self._asked  # who has asked waits a round for the answers
        common = Payload(difference.arrays, {**difference.fields, "lost": True} if self._asked else difference.fields)
        if not self._asked_by:
            return common
        asked, self._asked_by = frozenset(self._asked_by), []
        copy = self._copy.copy()
        copy.flags.writeable = False
        whole = Payload({**common.arrays, "copy": copy}, common.fields)
        return lambda peer: whole if peer in asked else common

    def check(self, payload: Payload, params: Params) -> None:
        if type(payload.fields.get("lost", False)) is not bool:
            raise MessageError(f"field 'lost' is {payload.fields['lost']!r}, expected true or false")
        copy = payload.arrays.get("copy")
        if copy is not None and (copy.shape != params.shape or copy.dtype != np.float32):
            raise MessageError(f"array 'copy' is {copy.dtype} of shape {copy.shape}, expected {params.size} float32")
        self._heard.check(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        differences = self._heard.take(received, params.size)
        said, self._said = self._said, None
        self._asked_by = sorted(peer for peer, payload in received.items() if payload.fields.get("lost", False))
        if self._weights is None:
            self._weights = dict(weights)  # all copies are 0 so far, and so is the pull under any weights
        if not self._lost and weights == self._weights:
            for peer, difference in differences.items():
                difference.add_to(self._pull, weights[peer])
            if said is not None:
                said.add_to(self._pull, -sum(weights.values()))
        elif self._lost and all("copy" in payload.arrays for payload in received.values()):
            self._pull = self._copy * np.float32(-sum(weights.values()))
            for peer, payload in received.items():
                Part(payload.arrays["copy"]).add_to(self._pull, weights[peer])
            self._lost, self._weights = False, dict(weights)
        else:
            self._lost = True
            return params.copy()
        merged = self._pull * np.float32(self.gamma)
        merged += params
        return merged

    def state(self) -> State:
        return {
            "copy": self._copy.copy(),
            "pull": self._pull.copy(),
            "weights": None if self._weights is None else {str(peer): w for peer, w in self._weights.items()},
            "lost": self._lost,
            "asked": self._asked,
            "asked_by": self._asked_by,
        }

    def restore(self, state: State) -> None:
        self._copy = np.array(state["copy"], np.float32)
        self._pull = np.array(state["pull"], np.float32)
        weights = state["weights"]
        self._weights = None if weights is None else {int(peer): weight for peer, weight in weights.items()}
        self._lost = state["lost"]
        self._asked = state["asked"]
        self._asked_by = list(state["asked_by"])
        self._said = None
