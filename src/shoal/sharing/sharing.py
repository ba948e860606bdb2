"""What a sharing is: what a node says of its model, and how it merges what it hears."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

from shoal.message import Params, Payload
from shoal.topologies.graph import NodeId

Outgoing: TypeAlias = Payload | Callable[[NodeId], Payload]
"""One payload for every peer, or a function that says for a peer what to tell it."""


class Sharing(Protocol):
    """Synchronous; one instance per node; its state, if any, lives in it from `start` on.

    Parameters are one flat float32 vector, and read-only: `merge` returns a new one.
    """

    def start(self, params: Params) -> None:
        """The model before the first round, the same on every node unless the experiment says otherwise."""
        ...

    def outgoing(self, params: Params, round: int) -> Outgoing: ...

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        """The model after hearing from `received`. The own weight is what `weights` leave of 1."""
        ...


@runtime_checkable
class Checks(Protocol):
    """A sharing that looks at a payload before it is merged. Payloads come from the network: check what you rely on."""

    def check(self, payload: Payload, params: Params) -> None:
        """Raise `MessageError` for a payload that cannot be merged into `params`; it is dropped and counted."""
        ...
