"""JWINS: just what is needed, in the wavelet domain.

Dhasade, Kermarrec, Pires, Sharma, Vujasinovic, Wigger: Get More for Less in Decentralized Learning Systems,
ICDCS 2023, arXiv:2306.04377.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from shoal.compression.compressors import Fraction, Indices, Part, SparseCode, Values, kept_count
from shoal.compression.floats import Float32
from shoal.compression.indices import GolombRice
from shoal.compression.sparse import top_positions
from shoal.message import Payload
from shoal.schema import nearest
from shoal.sharing.payload_cache import PayloadCache, weighted_change
from shoal.sharing.sharing import NodeInfo
from shoal.state import State
from shoal.types import Bounds, NodeId, Params

INEXACT = frozenset({"dmey"})
"""Wavelets of PyWavelets whose filters are cut off, so that the transform does not invert."""


@dataclass
class JWINS:
    """Dhasade et al. 2023: those wavelet coefficients of the model that changed most, a random share in each round.

    With T the wavelet transform of the flat model, x the trained model, and c the T x of the round before, every
    round a node

        adds its change to the scores    V ← V + T x − c
        draws a cut-off                  α from `fractions`, on its own
        sends, and forgets the scores    (T x)[k] and k, and V[k] ← 0, for the share α of all k with the largest |V[k]|
        averages, coefficient by         y[k] = (T x)[k] + Σ_j w_j (y_j[k] − (T x)[k]), the sum over those neighbours
        coefficient                      that sent theirs
        and transforms back              x ← T⁻¹ y

    A change is all that happened since the node last spoke, first its averaging, then its training, as in the paper:
    what the neighbours moved counts, since it is news to the node's other neighbours. A coefficient that a neighbour
    did not send counts as the node's own, so weights are right whoever speaks, on graphs that change as well. What
    this gives up is the mean over all nodes, which such an average does not keep.

    The mean of `fractions` is the share that is sent on average, 0.4 by default; a single one is a plain budget.
    Models that are too short for `level` are transformed as often as they can be.

    To speak takes as long as 95 copies of the model: 45 of them for the transform, 20 to find the largest scores, 20 to
    code their positions. To hear takes 25 for the transform back and 20 for each neighbour, nearly all of it to decode
    positions. `indices = "raw"` takes 15 less for each, and seven times the bytes for positions.
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
            raise ValueError("fractions = []: expected one at least")
        self._code = SparseCode(self.values, self.indices)
        self._cache: PayloadCache[Part] = PayloadCache(self._decode)

    def bind(self, info: NodeInfo) -> None:
        self._info = info

    def start(self, params: Params) -> None:
        self._transform = _Wavelets(self.wavelet, self.level, params.size)
        for fraction in self.fractions:
            kept_count(self._transform.size, fraction)
        self._coefficients = self._transform.forward(params)
        self._scores = np.zeros_like(self._coefficients)
        self._params = params
        """The model whose coefficients are kept."""

    def outgoing(self, params: Params, round: int) -> Payload:
        rng = self._info.rng("jwins", round)
        fraction = self.fractions[int(rng.integers(len(self.fractions)))]
        before, size = self._coefficients, self._transform.size
        self._keep(params)
        self._scores += self._coefficients - before  # the difference first: beside a coefficient small scores vanish
        chosen = top_positions(self._scores, kept_count(size, fraction))
        self._scores[chosen] = 0.0
        return self._code.pack(Part(self._coefficients[chosen], chosen), size, rng)

    def check(self, payload: Payload, params: Params) -> None:
        self._cache.check(payload, self._transform.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        if not received:
            return params.copy()
        own = self._coefficients if params is self._params else self._transform.forward(params)
        moved = weighted_change(own, self._cache.take(received, own.size), weights)
        return params + self._transform.inverse(moved)  # exact where nothing changed, as the inverse of all is not

    def state(self) -> State:
        return {"scores": self._scores.copy(), "params": self._params.copy()}

    def restore(self, state: State) -> None:
        self._scores = np.array(state["scores"], np.float32)
        self._keep(np.array(state["params"], np.float32))

    def _keep(self, params: Params) -> None:
        self._params, self._coefficients = params, self._transform.forward(params)

    def _decode(self, payload: Payload, size: int) -> Part:
        part = self._code.unpack(payload, size)
        return Part(part.values) if len(part.values) == size else part  # all of them need no positions


class _Wavelets:
    """A discrete wavelet transform of vectors of one length, as one vector.

    At the ends vectors are mirrored, which inverts exactly at any length, for some coefficients more than values: a
    few less than the filter is long, at every level. PyWavelets has a mode without these, at thrice the time.
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
        """How many coefficients there are."""

    def forward(self, values: Params) -> Params:
        writable = values.copy()  # PyWavelets takes no other, though it does not write
        found: Params = np.concatenate(self._pywt.wavedec(writable, self._wavelet, self.MODE, self._level))
        return found

    def inverse(self, coefficients: Params) -> Params:
        parts = np.split(coefficients, self._ends)
        values: Params = self._pywt.waverec(parts, self._wavelet, self.MODE)
        return values[: self._length]
