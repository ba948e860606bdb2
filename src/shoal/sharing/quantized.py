"""Sharings of the full model in fewer bits per value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.compression.compressors import read_only
from shoal.compression.floats import BFloat16, Float16, FloatCodec
from shoal.compression.quantizers import QSGD, Int8
from shoal.message import Payload
from shoal.sharing.full import FullSharing
from shoal.sharing.payload_cache import PayloadCache
from shoal.sharing.sharing import NodeInfo
from shoal.traits import Traits
from shoal.types import Bounds, NodeId, Params


class QuantizedSharing(ABC):
    """Full sharing with a value codec, which a subclass defines.

    x_i ← w_ii x_i + Σ_j w_ij C(x_j): a node uses its own model without rounding. So rounding changes the mean of all
    models, by less than it changes a value; if C is unbiased, the expected change is zero. There is no state.
    """

    traits: ClassVar[Traits] = Traits(sends_whole_models=True)

    @abstractmethod
    def codec(self) -> FloatCodec: ...

    def __post_init__(self) -> None:
        self._codec = codec = self.codec()
        self._cache: PayloadCache[Params] = PayloadCache(lambda payload, size: codec.decode(payload.arrays, size))

    def bind(self, info: NodeInfo) -> None:
        self._info = info
        self._cache.reject_non_finite = info.rejects_non_finite

    def start(self, params: Params) -> None:  # noqa: B027 - subclasses need not override it
        """Accept every model."""

    def outgoing(self, params: Params, round: int) -> Payload:
        rng = self._info.rng("quantized sharing", round) if self._codec.stochastic else None
        return Payload(read_only(self._codec.encode(params, rng)))

    def check(self, payload: Payload, params: Params) -> None:
        self._cache.check(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        models = self._cache.take(received, params.size)
        return FullSharing().merge(
            params, {peer: Payload({"params": model}) for peer, model in models.items()}, weights
        )


@dataclass
class Float16Sharing(QuantizedSharing):
    """The full model in IEEE half precision: half the bytes, 11 significant bits, values within ±65,504."""

    def codec(self) -> FloatCodec:
        return Float16()


@dataclass
class BFloat16Sharing(QuantizedSharing):
    """The full model in bfloat16: half the bytes, 8 significant bits, the range of float32."""

    def codec(self) -> FloatCodec:
        return BFloat16()


@dataclass
class Int8Sharing(QuantizedSharing):
    """The full model in one byte per value, relative to the largest value of each block; unbiased by default.

    Encoding takes the time of 35 copies of the model; 15 of them create a generator for the round and draw 16 bits for
    each value. `unbiased = false` needs no generator and takes 20.
    """

    block: Annotated[int, Bounds(at_least=1)] = Int8.block
    unbiased: bool = Int8.unbiased

    def codec(self) -> FloatCodec:
        return Int8(self.block, self.unbiased)


@dataclass
class QSGDSharing(QuantizedSharing):
    """Alistarh et al. 2017, QSGD: the full model in `levels` fractions of the norm of each bucket; unbiased rounding.

    The paper encodes gradients; here it is the model itself. Encoding takes the time of 40 copies of the model; 15 of
    them create a generator for the round and draw 16 bits for each value, which unbiased rounding needs.
    """

    levels: Annotated[int, Bounds(at_least=1, at_most=2**15 - 1)] = QSGD.levels
    bucket: Annotated[int, Bounds(at_least=1)] = QSGD.bucket

    def codec(self) -> FloatCodec:
        return QSGD(self.levels, self.bucket)
