"""Networks around one switch: every node has its own upload and download link, and shares no other link."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal import schema
from shoal.environment.network.network import LOOPBACK, MEGABIT, NetworkTimeline, Route, capacity
from shoal.types import Bounds, NodeId, NodeIds, parse_node_ids

Pair: TypeAlias = tuple[NodeId, NodeId]
"""Sender and receiver."""


@dataclass(frozen=True)
class LinkOverride:
    """Values for the routes from some nodes to others, in both directions unless `oneway`. None: the default value.

    Latency and jitter are in seconds, one way. `bandwidth`, in Mbit/s, adds a link for each of these pairs and each
    direction, between the sender's upload and the receiver's download.
    """

    from_: NodeIds
    to: NodeIds
    latency: Annotated[float, Bounds(at_least=0)] | None = None
    jitter: Annotated[float, Bounds(at_least=0)] | None = None
    bandwidth: Annotated[float, Bounds(above=0)] | None = None
    loss: Annotated[float, Bounds(at_least=0, at_most=1)] | None = None
    oneway: bool = False

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("it changes nothing; add latency, jitter, bandwidth or loss")

    @property
    def values(self) -> dict[str, float]:
        """The values that are given, by name."""
        values = {name: getattr(self, name) for name in ("latency", "jitter", "bandwidth", "loss")}
        return {name: value for name, value in values.items() if value is not None}


class AccessNetwork(ABC):
    """A network in which every node has its own links: link 2i is the upload of node i, link 2i + 1 its download.

    The links of `between` follow. Routes are created on first use.
    """

    def __init__(self, upload: NDArray[np.float64], download: NDArray[np.float64], between: ArrayLike = ()) -> None:
        own = np.column_stack([upload, download]).ravel()
        self._capacities = np.concatenate([own, np.asarray(between, np.float64).ravel()])
        self._routes: dict[Pair, Route] = {}

    @property
    def capacities(self) -> NDArray[np.float64]:
        return self._capacities

    def route(self, sender: NodeId, receiver: NodeId) -> Route:
        if sender == receiver:
            return LOOPBACK
        pair = (sender, receiver)
        if pair not in self._routes:
            self._routes[pair] = self._create_route(sender, receiver)
        return self._routes[pair]

    def access(self, node: NodeId) -> tuple[int, ...]:
        return (2 * node, 2 * node + 1)

    @abstractmethod
    def _create_route(self, sender: NodeId, receiver: NodeId) -> Route: ...


class StarNetwork(AccessNetwork):
    """Nodes around one switch, with extra links `between` single pairs.

    Each node contributes half of a route. Two nodes with the same values have a route with these values. So the latency
    between different nodes is the mean of their latencies, the jitter is the root of the mean of their squared jitters,
    and the probability of delivery is the root of the product of their probabilities. Latencies and jitters are in
    seconds, upload and download in bytes per second.
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
        """`between` has the values of single pairs, keyed by field names of `LinkOverride`."""
        self._latency, self._jitter, self._loss = latency.tolist(), jitter.tolist(), loss.tolist()
        self._between = between or {}
        limited_pairs = [pair for pair, values in self._between.items() if "bandwidth" in values]
        self._pair_links = {pair: 2 * len(upload) + i for i, pair in enumerate(limited_pairs)}
        super().__init__(upload, download, [self._between[pair]["bandwidth"] * MEGABIT for pair in limited_pairs])

    def _create_route(self, sender: NodeId, receiver: NodeId) -> Route:
        a, b = pair = (sender, receiver)
        values = self._between.get(pair, {})
        own = (self._pair_links[pair],) if pair in self._pair_links else ()
        return Route(
            links=(2 * a, *own, 2 * b + 1),
            latency=values.get("latency", (self._latency[a] + self._latency[b]) / 2),
            jitter=values.get("jitter", math.sqrt((self._jitter[a] ** 2 + self._jitter[b] ** 2) / 2)),
            loss=values.get("loss", 1 - math.sqrt((1 - self._loss[a]) * (1 - self._loss[b]))),
        )


@dataclass(frozen=True)
class Ideal:
    """Messages take no time."""

    def build(self, nodes: int, seed: int) -> None:
        return None


@dataclass(frozen=True)
class Uniform:
    """Every node has the same link: `latency` in seconds one way, bandwidths in Mbit/s (0: unlimited).

    `jitter` is the standard deviation of the latency, `loss` the probability that a message is lost. `links` has
    different values for single pairs: { from = "0-3", to = "4", latency = 0.1 }, with any of latency, jitter, bandwidth
    and loss, in both directions unless `oneway = true`. For a pair in two of them, each
    value is that of the last one that has it.
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


def star(each: Sequence[Uniform], links: Sequence[Mapping[str, Any]] = ()) -> StarNetwork:
    """A star in which node i has the access links of each[i], with the values in `links` for single pairs.

    Raises ValueError, with the index in `links`, for nodes that do not exist.
    """

    def values(parameter: str) -> NDArray[np.float64]:
        return np.array([getattr(link, parameter) for link in each], np.float64)

    return StarNetwork(
        latency=values("latency"),
        jitter=values("jitter"),
        loss=values("loss"),
        upload=capacity(values("upload")),
        download=capacity(values("download")),
        between=_by_pair(_exceptions(links), len(each)),
    )


def _exceptions(links: Sequence[Mapping[str, Any]]) -> list[LinkOverride]:
    problems: list[str] = []
    built = [schema.build(LinkOverride, table, f"links[{i}]", problems) for i, table in enumerate(links)]
    if problems:
        raise ValueError("; ".join(problems))
    return built


def _by_pair(links: Sequence[LinkOverride], nodes: int) -> dict[Pair, dict[str, float]]:
    values_by_pair: dict[Pair, dict[str, float]] = {}
    for i, link in enumerate(links):
        senders = _parse_nodes(link.from_, nodes, f"links[{i}].from")
        receivers = _parse_nodes(link.to, nodes, f"links[{i}].to")
        pairs = [(a, b) for a in senders for b in receivers if a != b]
        if not pairs:
            raise ValueError(f"links[{i}]: from = {link.from_!r} and to = {link.to!r} are the same node")
        if not link.oneway:
            pairs += [(b, a) for a, b in pairs]
        for pair in pairs:
            values_by_pair.setdefault(pair, {}).update(link.values)
    return values_by_pair


def _parse_nodes(text: str, nodes: int, key: str) -> list[NodeId]:
    try:
        return parse_node_ids(text, nodes)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
