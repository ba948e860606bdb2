"""Networks round one switch: every node has a connection of its own, up and down, and shares no other link."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal import schema
from shoal.environment.network.network import HERE, MEGABIT, NetworkTimeline, Route, capacity
from shoal.types import Bounds, NodeId, parse_node_ids

Pair: TypeAlias = tuple[NodeId, NodeId]
"""Who sends, and to whom."""


@dataclass(frozen=True)
class Between:
    """What is different about the ways from some nodes to others, and back unless `oneway`. None: what all have.

    Latency and jitter are in seconds, one way. `bandwidth`, in Mbit/s, is that of a link which each of these pairs has
    for itself in each direction, between the sender's upload and the receiver's download.
    """

    from_: str
    to: str
    latency: Annotated[float, Bounds(at_least=0)] | None = None
    jitter: Annotated[float, Bounds(at_least=0)] | None = None
    bandwidth: Annotated[float, Bounds(above=0)] | None = None
    loss: Annotated[float, Bounds(at_least=0, at_most=1)] | None = None
    oneway: bool = False

    def __post_init__(self) -> None:
        if not self.said:
            raise ValueError("it says nothing of these nodes; give latency, jitter, bandwidth or loss")

    @property
    def said(self) -> dict[str, float]:
        """What is different, by name."""
        every = {name: getattr(self, name) for name in ("latency", "jitter", "bandwidth", "loss")}
        return {name: value for name, value in every.items() if value is not None}


class Accessed(ABC):
    """Nodes that have a connection of their own: link 2i is the upload of node i, link 2i + 1 its download. The links
    of `between` follow. How one node gets to another is worked out when that is first asked for."""

    def __init__(self, upload: NDArray[np.float64], download: NDArray[np.float64], between: ArrayLike = ()) -> None:
        own = np.column_stack([upload, download]).ravel()
        self._capacities = np.concatenate([own, np.asarray(between, np.float64).ravel()])
        self._routes: dict[Pair, Route] = {}

    @property
    def capacities(self) -> NDArray[np.float64]:
        return self._capacities

    def route(self, sender: NodeId, receiver: NodeId) -> Route:
        if sender == receiver:
            return HERE
        pair = (sender, receiver)
        if pair not in self._routes:
            self._routes[pair] = self._made(sender, receiver)
        return self._routes[pair]

    def access(self, node: NodeId) -> tuple[int, ...]:
        return (2 * node, 2 * node + 1)

    @abstractmethod
    def _made(self, sender: NodeId, receiver: NodeId) -> Route: ...


class Star(Accessed):
    """Nodes round one switch. Links of `between` are those that single pairs have for themselves.

    What is given of each node is what two nodes like it have between them, each being half of the way. So two that
    differ have the mean of their latencies, the root of the mean of their squared jitters, and a message gets through
    with the root of the product of their two probabilities. Latencies and jitters are in seconds, upload and download
    in bytes per second.
    """

    def __init__(
        self,
        *,
        latency: NDArray[np.float64],
        jitter: NDArray[np.float64],
        loss: NDArray[np.float64],
        upload: NDArray[np.float64],
        download: NDArray[np.float64],
        between: Mapping[Pair, Mapping[str, float]] | None = None,
    ) -> None:
        """`between` has what pairs have for themselves, by the names that `Between` gives it."""
        self._latency, self._jitter, self._loss = latency.tolist(), jitter.tolist(), loss.tolist()
        self._between = between or {}
        limited = [pair for pair, said in self._between.items() if "bandwidth" in said]
        self._own = {pair: 2 * len(upload) + i for i, pair in enumerate(limited)}
        super().__init__(upload, download, [self._between[pair]["bandwidth"] * MEGABIT for pair in limited])

    def _made(self, sender: NodeId, receiver: NodeId) -> Route:
        a, b = pair = (sender, receiver)
        said = self._between.get(pair, {})
        own = (self._own[pair],) if pair in self._own else ()
        return Route(
            links=(2 * a, *own, 2 * b + 1),
            latency=said.get("latency", (self._latency[a] + self._latency[b]) / 2),
            jitter=said.get("jitter", math.sqrt((self._jitter[a] ** 2 + self._jitter[b] ** 2) / 2)),
            loss=said.get("loss", 1 - math.sqrt((1 - self._loss[a]) * (1 - self._loss[b]))),
        )


@dataclass(frozen=True)
class Ideal:
    """Messages take no time."""

    def build(self, nodes: int, seed: int) -> None:
        return None


@dataclass(frozen=True)
class Uniform:
    """Every node has the same link: `latency` in seconds one way, bandwidths in Mbit/s (0: unlimited).

    `jitter` is the standard deviation of the latency, `loss` the probability that a message is lost. `links` says what
    is different between single nodes: { from = "0-3", to = "4", latency = 0.1 }, with any of latency, jitter, bandwidth
    and loss, in both directions unless `oneway = true`. Where two of them speak of the same pair, the later one holds.
    """

    latency: Annotated[float, Bounds(at_least=0)] = 0.001
    upload: Annotated[float, Bounds(at_least=0)] = 0.0
    download: Annotated[float, Bounds(at_least=0)] = 0.0
    jitter: Annotated[float, Bounds(at_least=0)] = 0.0
    loss: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.0
    links: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _exceptions(self.links)

    def build(self, nodes: int, seed: int) -> NetworkTimeline:
        return NetworkTimeline([(0.0, star([self] * nodes, self.links))])


def star(each: Sequence[Uniform], links: Sequence[Mapping[str, Any]] = ()) -> Star:
    """Node i with the connection that each[i] describes, and what `links` says of single pairs.

    Raises ValueError, which names the place in `links`, for nodes that are not there.
    """

    def of_all(parameter: str) -> NDArray[np.float64]:
        return np.array([getattr(one, parameter) for one in each], np.float64)

    return Star(
        latency=of_all("latency"),
        jitter=of_all("jitter"),
        loss=of_all("loss"),
        upload=capacity(of_all("upload")),
        download=capacity(of_all("download")),
        between=_by_pair(_exceptions(links), len(each)),
    )


def _exceptions(links: Sequence[Mapping[str, Any]]) -> list[Between]:
    problems: list[str] = []
    made = [schema.build(Between, table, f"links[{i}]", problems) for i, table in enumerate(links)]
    if problems:
        raise ValueError("; ".join(problems))
    return made


def _by_pair(links: Sequence[Between], nodes: int) -> dict[Pair, dict[str, float]]:
    found: dict[Pair, dict[str, float]] = {}
    for i, one in enumerate(links):
        senders = _nodes(one.from_, nodes, f"links[{i}].from")
        receivers = _nodes(one.to, nodes, f"links[{i}].to")
        pairs = [(a, b) for a in senders for b in receivers if a != b]
        if not pairs:
            raise ValueError(f"links[{i}]: from = {one.from_!r} and to = {one.to!r} are one node, and it has no link")
        if not one.oneway:
            pairs += [(b, a) for a, b in pairs]
        for pair in pairs:
            found.setdefault(pair, {}).update(one.said)
    return found


def _nodes(spelt: str, nodes: int, place: str) -> list[NodeId]:
    try:
        return parse_node_ids(spelt, nodes)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
