"""What a sharing is: what a node says of its model, and how it merges what it hears.

`Sharing` is all that a sharing must do. The other protocols here are what it may do as well: look at payloads before
they are merged (`PayloadChecker`), know the node that it speaks for (`NodeAware`), hand out its state
(`shoal.state.Stateful`), talk with the sharings of other nodes (`shoal.node.InteractiveSharing`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from shoal.compression.indices import Positions
from shoal.data.dataset import LocalData
from shoal.message import Payload
from shoal.randomness import generator
from shoal.types import NodeId, Params

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
class PayloadChecker(Protocol):
    """A sharing that looks at a payload before it is merged. Payloads come from the network: check what you rely on."""

    def check(self, payload: Payload, params: Params) -> None:
        """Raise `MessageError` for a payload that cannot be merged into `params`; it is dropped and counted."""
        ...


@dataclass(frozen=True)
class NodeInfo:
    """The node that a sharing speaks for."""

    id: NodeId
    nodes: int
    seed: int
    """The experiment's: equal on all nodes."""
    shapes: tuple[tuple[int, ...], ...]
    """The tensors that lie behind each other in the flat vector."""
    data: LocalData | None = None
    """The samples that the node holds; None where its trainer does not show them."""

    def rng(self, purpose: str, *more: int) -> np.random.Generator:
        """A generator of this node's own. For one that is equal on all nodes, use `generator(seed, purpose, …)`."""
        return generator(self.seed, purpose, self.id, *more)


@runtime_checkable
class NodeAware(Protocol):
    """A sharing that wants to know whom it speaks for: for random draws, for the shapes of tensors, for the data."""

    def bind(self, info: NodeInfo) -> None:
        """Called once, before `start`."""
        ...


@dataclass(frozen=True)
class SenderGroup:
    """The nodes that send their models to one receiver in one round."""

    senders: Collection[NodeId]
    weights: Mapping[NodeId, float]
    """The weight of each sender's model at the receiver. A sender may know no weight but its own."""


@runtime_checkable
class CoordinateSelector(Protocol):
    """A sharing that says some coordinates of the model as they are: those that are not said are as the receiver's own.

    Whoever wraps it may have others said in their place, and as many.
    """

    @property
    def common(self) -> bool:
        """Whether all nodes select alike in a round."""
        ...

    def select(self, params: Params, round: int) -> Positions:
        """The coordinates to say, in increasing order; equally many every round."""
        ...
