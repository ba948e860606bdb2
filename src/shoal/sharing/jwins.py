"""JWINS: the most important changes, in the wavelet domain.

Dhasade, Kermarrec, Pires, Sharma, Vujasinovic, Wigger: Get More for Less in Decentralized Learning Systems,
ICDCS 2023, arXiv:2306.04377.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from shoal.compression.compressors import Fraction, Indices, Part, SparseCode, Values
from shoal.compression.floats import Float32
from shoal.compression.indices import GolombRice
from shoal.compression.sparse import kept_count, top_positions
from shoal.message import Payload
from shoal.schema import nearest
from shoal.sharing.payload_cache import PayloadCache
from shoal.sharing.sharing import NodeInfo
from shoal.sharing.sparse_merge import weighted_change
from shoal.state import State
from shoal.types import Bounds, NodeId, Params

INEXACT = frozenset({"dmey"})
"""Wavelets of PyWavelets with truncated filters: their transform is not invertible."""


@dataclass
class JWINS:
    """Dhasade et al. 2023: the wavelet coefficients of the model that changed most, a random fraction in each round.

    With the wavelet transform T of the flat model, the trained model x and c = T x of the previous round, every round
    a node

        adds its change to the scores    V ← V + T x − c
        draws a fraction                 α from `fractions`, independently
        sends, and resets the scores     (T x)[k] and k, and V[k] ← 0, for the fraction α of k with the largest |V[k]|
        averages, coefficient by         y[k] = (T x)[k] + Σ_j w_j (y_j[k] − (T x)[k]), the sum over the neighbours
        coefficient                      that sent it
        and transforms back              x ← T⁻¹ y

    A change includes the average and the training since the node last sent, as in the paper: the part from neighbours
    counts because it is new to the node's other neighbours. A coefficient that a neighbour did not send counts as the
    node's own, so weights are correct for any set of senders, also on changing graphs. Such an average does not keep
    the mean over all nodes.

    The mean of `fractions` is the average fraction that is sent, 0.4 by default; a single value is a fixed budget.
    Models that are too short for `level` get the largest possible level.

    Encoding takes the time of 95 copies of the model: 45 for the transform, 20 to find the largest scores, 20 to encode
    their positions. Merging takes 25 for the inverse transform and 20 for each neighbour, nearly all of it to decode
    positions. `indices = "raw"` takes 15 less for each, and positions need seven times the bytes.
    """

    wavelet: str = "sym2"
    level: Annotated[int, Bounds(at_least=1)] = 4
    fractions: tuple[Fraction, ...] = (0.1, 0.2, 0.3, 0.4, 1.0)
    values: Values = Float32()
    indices: Indices = GolombRice()

    def __post_init__(self) -> None:
        import pywt

        known = set(pywt.wavelist(kind="discrete")) - INEXACT
        if self.wavelet not in known:
            raise ValueError(f"wavelet = {self.wavelet!r}: unknown{nearest(self.wavelet, known)}")
        if not self.fractions:
            raise ValueError("fractions = []: expected at least one")
        self._code = SparseCode(self.values, self.indices)
        self._cache: PayloadCache[Part] = PayloadCache(self._decode)

    def bind(self, info: NodeInfo) -> None:
        self._info = info
        self._cache.reject_non_finite = info.rejects_non_finite

    def start(self, params: Params) -> None:
        self._transform = Wavelets(self.wavelet, self.level, params.size)
        for fraction in self.fractions:
            kept_count(self._transform.size, fraction)
        self._coefficients = self._transform.forward(params)
        self._scores = np.zeros_like(self._coefficients)
        self._params = params
        """The model of the kept coefficients."""

    def outgoing(self, params: Params, round: int) -> Payload:
        rng = self._info.rng("jwins", round)
        fraction = self.fractions[int(rng.integers(len(self.fractions)))]
        before, size = self._coefficients, self._transform.size
        self._keep(params)
        self._scores += self._coefficients - before  # difference first, which keeps small scores
        chosen = top_positions(self._scores, kept_count(size, fraction))
        self._scores[chosen] = 0.0
        return self._code.pack(Part(self._coefficients[chosen], chosen), size, rng)

    def check(self, payload: Payload, params: Params) -> None:
        self._cache.check(payload, self._transform.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        if not received:
            return params.copy()
        own = self._coefficients if params is self._params else self._transform.forward(params)
        change = weighted_change(own, self._cache.take(received, own.size), weights)
        return params + self._transform.inverse(change)  # exact where nothing changed

    def state(self) -> State:
        return {"scores": self._scores.copy(), "params": self._params.copy()}

    def restore(self, state: State) -> None:
        self._scores = np.array(state["scores"], np.float32)
        self._keep(np.array(state["params"], np.float32))

    def _keep(self, params: Params) -> None:
        self._params, self._coefficients = params, self._transform.forward(params)

    def _decode(self, payload: Payload, size: int) -> Part:
        part = self._code.unpack(payload, size)
        return Part(part.values) if len(part.values) == size else part  # a complete vector needs no positions


class Wavelets:
    """A discrete wavelet transform of vectors of one length, as one vector.

    Vectors are mirrored at their ends. This is exactly invertible for any length, but has more coefficients than
    values: at every level a few less than the filter length. A mode of PyWavelets without them takes three times as
    long.
    """

    MODE = "symmetric"

    def __init__(self, wavelet: str, level: int, length: int) -> None:
        import pywt

        self._pywt: Any = pywt
        self._length = length
        self._wavelet = pywt.Wavelet(wavelet)
        self._level = min(level, pywt.dwt_max_level(length, self._wavelet.dec_len))
        lengths = [length]
        for _ in range(self._level):
            lengths[:1] = [pywt.dwt_coeff_len(lengths[0], self._wavelet.dec_len, self.MODE)] * 2
        self._ends = np.cumsum(lengths)[:-1]
        self.size = sum(lengths)
        """The number of coefficients."""

    def forward(self, values: Params) -> Params:
        writable = values.copy()  # PyWavelets accepts only writable arrays, although it does not write
        found: Params = np.concatenate(self._pywt.wavedec(writable, self._wavelet, self.MODE, self._level))
        return found

    def inverse(self, coefficients: Params) -> Params:
        parts = np.split(coefficients, self._ends)
        values: Params = self._pywt.waverec(parts, self._wavelet, self.MODE)
        return values[: self._length]
