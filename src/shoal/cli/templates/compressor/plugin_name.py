"""A compressor: a vector as a small payload. The sharings `choco` and `deepsqueeze` use one."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from shoal import Bounds, Params, Payload
from shoal.compression.compressors import Part
from shoal.errors import MessageError


@dataclass(frozen=True)
class PluginName:
    """One bit per value, its sign, and the mean magnitude of each `block` of values (Seide et al. 2014)."""

    block: Annotated[int, Bounds(at_least=1)] = 256

    stochastic: ClassVar[bool] = False  # True: `compress` draws from `rng`, which is then not None

    def fit(self, size: int) -> None:
        """Raise ValueError, with the reason, if vectors of `size` cannot be compressed. All sizes can."""

    def compress(self, vector: Params, rng: np.random.Generator | None) -> tuple[Payload, Part]:
        # One instance serves all nodes: it has no state. The approximation must not be further from the vector than
        # zero is, or errors that the sharing keeps would grow.
        starts = np.arange(0, vector.size, self.block)
        counts = np.minimum(vector.size - starts, self.block)
        scales = (np.add.reduceat(np.abs(vector), starts, dtype=np.float64) / counts).astype(np.float32)
        payload = Payload({"signs": np.packbits(vector >= 0), "scales": scales})
        return payload, self.decompress(payload, vector.size)

    def decompress(self, payload: Payload, size: int) -> Part:
        # The payload may come from the network: check it completely before it is used.
        signs, scales = payload.arrays.get("signs"), payload.arrays.get("scales")
        blocks = -(-size // self.block)
        if signs is None or signs.dtype != np.uint8 or signs.shape != (-(-size // 8),):
            raise MessageError(f"array 'signs': expected {size} bits in bytes")
        if scales is None or scales.dtype != np.float32 or scales.shape != (blocks,) or not (scales >= 0).all():
            raise MessageError(f"array 'scales': expected {blocks} numbers of float32 that are not negative")
        positive = np.unpackbits(signs, count=size).astype(bool)
        magnitudes = np.repeat(scales, self.block)[:size]
        return Part(np.where(positive, magnitudes, -magnitudes))  # all positions; Part(values, positions) for some
