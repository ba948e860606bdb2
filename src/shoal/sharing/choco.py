"""CHOCO-SGD: neighbours average public copies of their models, which compressed differences keep up to date.

Koloskova, Stich, Jaggi: Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication,
ICML 2019, arXiv:1902.00340. Koloskova, Lin, Stich, Jaggi: Decentralized Deep Learning with Arbitrary Communication
Compression, ICLR 2020, arXiv:1907.09356.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from shoal.compression.compressors import Compressor, Part, TopKCompressor
from shoal.compression.floats import FLOAT32_MAX
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.sharing.payload_cache import PayloadCache
from shoal.sharing.requirements import requires_static_neighbours
from shoal.sharing.sharing import NodeInfo, Outgoing
from shoal.state import State
from shoal.topologies.inspection import requires_symmetric
from shoal.traits import ExperimentView
from shoal.types import Bounds, Nested, NodeId, Params


@dataclass
class CHOCO:
    """Koloskova et al. 2019: compressed differences to a public copy of each model; nodes average the copies.

    With the public copies x̂, at first 0, the compressor Q and the model x after training, node i does

        sends q_i = Q(x_i − x̂_i);  x̂_j ← x̂_j + q_j for itself and each neighbour j
        x_i ← x_i + γ Σ_j w_ij (x̂_j − x̂_i)

    Doubly stochastic weights keep the mean of all models. `gamma` is the step size towards the neighbours: a coarser Q
    needs a smaller one, or models diverge. For 8 bits per value, 1 works; for the tenth of the coordinates that changed
    most, up to 0.2; for a random tenth, 0.1.

    As in the memory-efficient form of the paper, a node does not keep the copies of its neighbours. It keeps x̂_i and
    the pull g_i = Σ_j w_ij (x̂_j − x̂_i), which is the paper's s_i minus x̂_i and changes by Σ_j w_ij (q_j − q_i). A
    rounding error in the pull is permanent and moves the model in every round. So both are in double precision: in a
    thousand rounds the mean of all models then moves by no more than the rounding error of the models themselves.

    The pull is correct while it contains every q of the same neighbours with the same weights. When a neighbour fails,
    times out or sends an invalid payload, its copy cannot be removed from the pull, and the pull would move the model
    in a wrong direction in every later round. So the node resets its pull and reports `lost` to its neighbours in its
    next message. In the following round they send their full copies, in doubles, and the node computes its pull from
    these. That costs two full models per neighbour and two rounds without mixing. A neighbour that sends no copy,
    because it does not receive from this node or does not answer, is left out: the node averages with the others, with
    weights renormalised for them, and asks again every other round. While one of two neighbours leaves the other out,
    weights are not doubly stochastic, and the mean of all models moves; if both soon receive each other's messages
    again, this is a bounded step.

    Copies that are not finite are rejected. A neighbour that has diverged is visible in its q, as in full sharing, and
    a node that repairs its pull does not need it.
    """

    gamma: Annotated[float, Bounds(above=0, at_most=1)] = 0.2
    compressor: Annotated[Compressor, Nested("compressor")] = TopKCompressor()

    def __post_init__(self) -> None:
        self._cache: PayloadCache[Part] = PayloadCache(self.compressor.decompress)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        why = "a node follows the changes of each neighbour from the first round on"
        return requires_static_neighbours(experiment, why) or requires_symmetric(experiment, "sharing = 'choco'")

    def bind(self, info: NodeInfo) -> None:
        self._info = info
        self._cache.reject_non_finite = info.rejects_non_finite

    def start(self, params: Params) -> None:
        self.compressor.fit(params.size)
        self._copy = np.zeros(params.size)  # x̂ of this node
        self._pull = np.zeros(params.size)
        self._followed: dict[NodeId, float] | None = None  # the weights in the pull; None before the first round
        self._left_out: set[NodeId] = set()  # neighbours that are not in the pull
        self._asked: set[NodeId] = set()  # the left-out neighbours whose copies the last message requested
        self._asked_by: list[NodeId] = []
        self._sent: Part | None = None

    def outgoing(self, params: Params, round: int) -> Outgoing:
        if self._sent is not None:  # no merge since: the pull lacks the payloads of that round
            self._left_out |= self._reset()
        rng = self._info.rng("choco", round) if self.compressor.stochastic else None
        difference, self._sent = self.compressor.compress((params - self._copy).astype(np.float32), rng)
        self._sent.add_to(self._copy)
        asked = self._asked = self._left_out - self._asked  # a neighbour has one round to answer
        askers, self._asked_by = frozenset(self._asked_by), []
        if not asked and not askers:
            return difference
        copy = {"copy": self._copy.copy()} if askers else {}
        for array in copy.values():
            array.setflags(write=False)

        @functools.cache  # one payload for all peers that get the same
        def make_payload(asking: bool, answering: bool) -> Payload:
            arrays = {**difference.arrays, **copy} if answering else difference.arrays
            return Payload(arrays, {**difference.fields, "lost": True} if asking else difference.fields)

        return lambda peer: make_payload(peer in asked, peer in askers)

    def check(self, payload: Payload, params: Params) -> None:
        if type(payload.fields.get("lost", False)) is not bool:
            raise MessageError(f"field 'lost' is {payload.fields['lost']!r}, expected true or false")
        copy = payload.arrays.get("copy")
        if copy is not None:
            if copy.shape != params.shape or copy.dtype != np.float64:
                raise MessageError(
                    f"array 'copy' is {copy.dtype} of shape {copy.shape}, expected {params.size} float64"
                )
            if not (np.abs(copy) <= FLOAT32_MAX).all():
                raise MessageError("array 'copy' holds numbers that are not finite in float32")
        self._cache.check(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        differences = self._cache.take(received, params.size)
        sent, self._sent = self._sent, None
        self._asked_by = sorted(peer for peer, payload in received.items() if payload.fields.get("lost", False))
        if self._followed is None:
            self._followed = dict(weights)  # all copies are still 0, and so is the pull with any weights
        dropped = set() if _agree(self._followed, weights) else self._reset()
        for peer, weight in self._followed.items():
            differences[peer].add_to(self._pull, weight)
        if sent is not None:
            sent.add_to(self._pull, -sum(self._followed.values()))
        copies = {peer: payload.arrays["copy"] for peer, payload in received.items() if "copy" in payload.arrays}
        self._include({peer: copy for peer, copy in copies.items() if peer not in self._followed}, weights)
        self._left_out = (received.keys() | dropped) - self._followed.keys()
        if not self._followed:
            return params.copy()
        merged: Params = (params + self.gamma * self._pull).astype(np.float32)
        return merged

    def state(self) -> State:
        return {
            "copy": self._copy.copy(),
            "pull": self._pull.copy(),
            "followed": None if self._followed is None else {str(peer): w for peer, w in self._followed.items()},
            "left_out": sorted(self._left_out),
            "asked": sorted(self._asked),
            "asked_by": list(self._asked_by),
        }

    def restore(self, state: State) -> None:
        self._copy = np.array(state["copy"], np.float64)
        self._pull = np.array(state["pull"], np.float64)
        followed = state["followed"]
        self._followed = None if followed is None else {int(peer): weight for peer, weight in followed.items()}
        self._left_out = set(state["left_out"])
        self._asked = set(state["asked"])
        self._asked_by = list(state["asked_by"])
        self._sent = None

    def _reset(self) -> set[NodeId]:
        """Reset the pull. Returns the neighbours that were in it."""
        dropped = set(self._followed or ())
        self._followed = {}
        self._pull[:] = 0.0
        return dropped

    def _include(self, copies: Mapping[NodeId, NDArray[np.float64]], weights: Mapping[NodeId, float]) -> None:
        """Add the neighbours that sent their copies to the pull. The weights of the others shrink by one factor."""
        if not copies:
            return
        before = self._followed or {}
        self._followed = _renormalised(weights, [*before, *copies])
        if before:
            self._pull *= sum(self._followed[peer] for peer in before) / sum(before.values())
        for peer, copy in copies.items():
            self._pull += self._followed[peer] * (copy - self._copy)


def _renormalised(weights: Mapping[NodeId, float], peers: Collection[NodeId]) -> dict[NodeId, float]:
    """Return the weights of `peers`, scaled so that they and the own weight sum to 1."""
    own = 1.0 - sum(weights.values())
    total = own + sum(weights[peer] for peer in peers)
    return {peer: weights[peer] / total for peer in peers}


def _agree(followed: Mapping[NodeId, float], weights: Mapping[NodeId, float]) -> bool:
    """Return whether `weights` contain all of `followed` with the same proportions, up to rounding."""
    if not followed.keys() <= weights.keys():
        return False
    now = _renormalised(weights, followed)
    return all(math.isclose(weight, now[peer], rel_tol=1e-9) for peer, weight in followed.items())
