"""A cache of decoded payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import numpy as np

from shoal.compression.compressors import Part
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.types import NodeId, Params

T = TypeVar("T", bound=Params | Part)

MAX_CACHED = 64
"""The most payloads in a cache: those of one round. Further payloads are decoded twice."""


class PayloadCache(Generic[T]):
    """Decodes a payload when it is checked, so that the merge does not decode it again."""

    def __init__(self, decode: Callable[[Payload, int], T]) -> None:
        """`decode` takes a payload and the size of the model, and raises `MessageError`."""
        self._decode = decode
        self._decoded: dict[int, tuple[Payload, T]] = {}  # by identity, which is valid while the payload exists
        self.reject_non_finite = False
        """Whether infinities and NaN are invalid. Some are visible only after decoding, as in bfloat16 or zstd."""

    def check(self, payload: Payload, size: int) -> None:
        """Decode the payload. Raises `MessageError`."""
        decoded = self._decode(payload, size)
        values = decoded.values if isinstance(decoded, Part) else decoded
        if self.reject_non_finite and not np.isfinite(values).all():
            raise MessageError("it holds values that are not finite")
        if len(self._decoded) < MAX_CACHED:
            self._decoded[id(payload)] = payload, decoded

    def take(self, received: Mapping[NodeId, Payload], size: int) -> dict[NodeId, T]:
        """Return the decoded payloads by sender, and empty the cache."""
        decoded, self._decoded = self._decoded, {}
        return {
            peer: decoded[id(payload)][1] if id(payload) in decoded else self._decode(payload, size)
            for peer, payload in received.items()
        }
