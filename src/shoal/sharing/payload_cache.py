"""A cache of decoded payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from shoal.message import Payload
from shoal.types import NodeId

T = TypeVar("T")

MAX_CACHED = 64
"""The most payloads in a cache: those of one round. Further payloads are decoded twice."""


class PayloadCache(Generic[T]):
    """Decodes a payload when it is checked, so that the merge does not decode it again."""

    def __init__(self, decode: Callable[[Payload, int], T]) -> None:
        """`decode` takes a payload and the size of the model, and raises `MessageError`."""
        self._decode = decode
        self._decoded: dict[int, tuple[Payload, T]] = {}  # by identity, which is valid while the payload exists

    def check(self, payload: Payload, size: int) -> None:
        decoded = self._decode(payload, size)
        if len(self._decoded) < MAX_CACHED:
            self._decoded[id(payload)] = payload, decoded

    def take(self, received: Mapping[NodeId, Payload], size: int) -> dict[NodeId, T]:
        """Return the decoded payloads by sender, and empty the cache."""
        decoded, self._decoded = self._decoded, {}
        return {
            peer: decoded[id(payload)][1] if id(payload) in decoded else self._decode(payload, size)
            for peer, payload in received.items()
        }
