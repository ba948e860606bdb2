"""The interface of a sharing: what a node sends of its model, and how it merges what it receives.

Every sharing implements `Sharing`. It may also check payloads before they are merged (`PayloadChecker`), use data about
its node (`NodeAware`), provide its state (`shoal.state.Stateful`), or exchange messages with the sharings of other
nodes (`shoal.node.InteractiveSharing`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from shoal.compression.floats import FloatCodec
from shoal.compression.indices import Positions
from shoal.data.dataset import LocalData
from shoal.message import Payload
from shoal.randomness import generator
from shoal.types import NodeId, Params

Outgoing: TypeAlias = Payload | Callable[[NodeId], Payload]
"""One payload for all peers, or a function that returns the payload for a peer."""


def payload_for(outgoing: Outgoing, peer: NodeId) -> Payload:
    """Return the payload for one peer."""
    return outgoing if isinstance(outgoing, Payload) else outgoing(peer)


class Sharing(Protocol):
    """Defines the payloads of one node and how they are merged. Synchronous; one instance per node.

    Its state, if any, begins with `start`. Parameters are a flat, read-only float32 vector; `merge` returns a new one.
    """

    def start(self, params: Params) -> None:
        """Take the model before the first round. It is equal on all nodes unless the experiment differs by node."""
        ...

    def outgoing(self, params: Params, round: int) -> Outgoing: ...

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        """Return the model after the merge. The node's own weight is 1 minus the sum of `weights`.

        A sharing with the trait `sends_whole_models` merges `params` in double precision if they are doubles.
        """
        ...


@runtime_checkable
class PayloadChecker(Protocol):
    """A sharing that checks payloads before they are merged. They come from the network: check all you rely on."""

    def check(self, payload: Payload, params: Params) -> None:
        """Raise `MessageError` if `payload` cannot be merged into `params`. The node drops and counts it."""
        ...


@dataclass(frozen=True)
class NodeInfo:
    """Data about the node of a sharing."""

    id: NodeId
    nodes: int
    seed: int
    """The seed of the experiment, equal on all nodes."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the model's tensors, in their order in the flat vector."""
    data: LocalData | None = None
    """The samples of the node; None if its trainer does not give access to them."""
    rejects_non_finite: bool = False
    """Whether payloads with infinities or NaN are rejected: the experiment's `non_finite`."""

    def rng(self, purpose: str, *more: int) -> np.random.Generator:
        """Return this node's generator. For one that is equal on all nodes, use `generator(seed, purpose, …)`."""
        return generator(self.seed, purpose, self.id, *more)


@runtime_checkable
class NodeAware(Protocol):
    """A sharing that needs data about its node: for random draws, the shapes of tensors or the samples."""

    def bind(self, info: NodeInfo) -> None:
        """Take data about the node. Called once, before `start`."""
        ...


@dataclass(frozen=True)
class SenderGroup:
    """The nodes that send their models to one receiver in one round."""

    senders: Collection[NodeId]
    weights: Mapping[NodeId, float]
    """The weight of each sender's model at the receiver. A sender may know no weight but its own."""


@runtime_checkable
class CoordinateSelector(Protocol):
    """A sharing that sends some coordinates of the model unchanged. Receivers use their own values for the others.

    A sharing that wraps it may send other coordinates in their place, in equal number.
    """

    @property
    def common(self) -> bool:
        """Whether all nodes select the same coordinates in a round."""
        ...

    def select(self, params: Params, round: int) -> Positions:
        """Return the coordinates to send, in increasing order; their number is the same in every round."""
        ...


@runtime_checkable
class ValueEncoder(Protocol):
    """A sharing that encodes the values that it sends."""

    @property
    def values(self) -> FloatCodec: ...
