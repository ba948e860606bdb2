"""The whole model, every round, in fewer bits a value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.compression import floats
from shoal.compression.compressors import sealed
from shoal.compression.floats import FloatCodec
from shoal.message import Payload
from shoal.sharing.full import FullSharing
from shoal.sharing.payload_cache import Heard
from shoal.sharing.sharing import NodeInfo
from shoal.traits import Traits
from shoal.types import Bounds, NodeId, Params


class WholeModel(ABC):
    """Full sharing by a codec of values, of which a subclass says which and with what parameters.

    x_i ← w_ii x_i + Σ_j w_ij C(x_j): the own model is taken as it is. So rounding moves the mean of all models, by
    less than it moves a value; if C is unbiased, not on average. Nothing is kept from round to round.
    """

    traits: ClassVar[Traits] = Traits(sends_whole_models=True)

    @abstractmethod
    def codec(self) -> FloatCodec: ...

    def __post_init__(self) -> None:
        self._codec = codec = self.codec()
        self._heard: Heard[Params] = Heard(lambda payload, size: codec.decode(payload.arrays, size))

    def bind(self, info: NodeInfo) -> None:
        self._info = info

    def start(self, params: Params) -> None:  # noqa: B027 - a subclass need not say more
        """Every model will do."""

    def outgoing(self, params: Params, round: int) -> Payload:
        rng = self._info.rng("quantized sharing", round) if self._codec.by_chance else None
        return Payload(sealed(self._codec.encode(params, rng)))

    def check(self, payload: Payload, params: Params) -> None:
        self._heard.check(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        models = self._heard.take(received, params.size)
        return FullSharing().merge(
            params, {peer: Payload({"params": model}) for peer, model in models.items()}, weights
        )


@dataclass
class Float16(WholeModel):
    """The whole model in IEEE half precision: half the bytes, 11 significant bits, values within ±65,504."""

    def codec(self) -> FloatCodec:
        return floats.Float16()


@dataclass
class BFloat16(WholeModel):
    """The whole model in bfloat16: half the bytes, 8 significant bits, the range of float32."""

    def codec(self) -> FloatCodec:
        return floats.BFloat16()


@dataclass
class Int8(WholeModel):
    """The whole model in a byte a value, relative to the largest of each block; unbiased rounding unless told.

    To speak takes as long as 35 copies of the model, 15 of them to make a generator for the round and draw 16 bits for
    each value: `unbiased = false` does without, and takes 20.
    """

    block: Annotated[int, Bounds(at_least=1)] = floats.Int8.block
    unbiased: bool = floats.Int8.unbiased

    def codec(self) -> FloatCodec:
        return floats.Int8(self.block, self.unbiased)


@dataclass
class QSGD(WholeModel):
    """Alistarh et al. 2017, QSGD: the whole model in `levels` parts of each bucket's norm; unbiased rounding.

    The paper codes gradients in this way; here it is the model itself. To speak takes as long as 40 copies of the
    model, 15 of them to make a generator for the round and draw 16 bits for each value, without which rounding would
    not be unbiased.
    """

    levels: Annotated[int, Bounds(at_least=1, at_most=2**15 - 1)] = floats.QSGD.levels
    bucket: Annotated[int, Bounds(at_least=1)] = floats.QSGD.bucket

    def codec(self) -> FloatCodec:
        return floats.QSGD(self.levels, self.bucket)
