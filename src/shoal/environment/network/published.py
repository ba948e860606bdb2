"""The networks of published experiments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from typing import Annotated

import numpy as np

from shoal.environment.network.links import StarNetwork
from shoal.environment.network.matrix import Sites
from shoal.environment.network.network import NetworkTimeline, capacity
from shoal.types import Bounds

STRAGGLERS = 7 / 60
"""The share of slow nodes in DivShare's experiments."""

REGIONS = (
    "Cape Town", "Tokyo", "Mumbai", "Sydney", "Stockholm", "Milan", "Bahrain", "São Paulo", "Ohio", "Oregon",
)  # fmt: skip
BANDWIDTHS = (
    (26, 36, 21, 60, 67, 34, 27, 44, 36),
    (89, 112, 42, 48, 67, 39, 86, 109),
    (76, 81, 103, 336, 31, 53, 49),
    (32, 42, 60, 31, 57, 81),
    (405, 82, 48, 95, 68),
    (106, 49, 105, 70),
    (30, 49, 39),
    (92, 61),
    (105,),
)
"""Mbit/s from each region to the following regions."""


@dataclass(frozen=True)
class DivShareStragglers:
    """A switch with few slow and many fast nodes (DivShare, Biswas et al. 2025): 60 nodes, 7 of them slow.

    `fast` and `slow` are the bandwidths of their links in Mbit/s, up and down. `latency`, in seconds, is that of one
    link; a message crosses two. With another number of nodes, the same share is slow, at least one: the first nodes,
    with the bandwidths in `slow` in turn. `stragglers = false`: all nodes are fast.
    """

    fast: Annotated[float, Bounds(above=0)] = 60.0
    slow: tuple[Annotated[float, Bounds(above=0)], ...] = (12.0, 12.0, 12.0, 13.0, 10.0, 13.0, 11.0)
    latency: Annotated[float, Bounds(at_least=0)] = 0.001
    stragglers: bool = True

    def __post_init__(self) -> None:
        if not self.slow:
            raise ValueError("slow = []: expected at least one bandwidth; stragglers = false makes all nodes fast")

    def build(self, nodes: int, seed: int) -> NetworkTimeline:
        # The first nodes: servers have the last ids, so they are fast and do not change the other nodes.
        count = max(1, round(nodes * STRAGGLERS)) if self.stragglers else 0
        bandwidth = np.full(nodes, self.fast)
        bandwidth[:count] = list(islice(cycle(self.slow), count))
        none = np.zeros(nodes)
        network_state = StarNetwork(
            latency=np.full(nodes, 2 * self.latency),
            jitter=none,
            loss=none,
            upload=capacity(bandwidth),
            download=capacity(bandwidth),
        )
        return NetworkTimeline([(0.0, network_state)])


@dataclass(frozen=True)
class TenRegions:
    """Ten regions of the world and the bandwidths measured between them (DivShare, Biswas et al. 2025).

    Nodes are spread evenly: a block of consecutive ones in each region, in the order Cape Town, Tokyo, Mumbai, Sydney,
    Stockholm, Milan, Bahrain, São Paulo, Ohio, Oregon. All messages from one region to another share the link between
    them; `shared = false`: each pair of nodes has its own link. `within` is the bandwidth inside a region in Mbit/s
    (0: unlimited). Latencies, in seconds one way, were not published: `latency` is between any two regions.
    """

    shared: bool = True
    within: Annotated[float, Bounds(at_least=0)] = 0.0
    latency: Annotated[float, Bounds(at_least=0)] = 0.1
    latency_within: Annotated[float, Bounds(at_least=0)] = 0.001

    def build(self, nodes: int, seed: int) -> NetworkTimeline:
        regions = len(REGIONS)
        bandwidth = np.zeros((regions, regions))
        for i, row in enumerate(BANDWIDTHS):
            bandwidth[i, i + 1 :] = bandwidth[i + 1 :, i] = row
        np.fill_diagonal(bandwidth, self.within)
        latency = np.full((regions, regions), self.latency)
        np.fill_diagonal(latency, self.latency_within)
        unlimited = np.full(nodes, np.inf)
        network_state = Sites(
            [node * regions // nodes for node in range(nodes)],
            latency=latency,
            jitter=np.zeros_like(latency),
            loss=0.0,
            upload=unlimited,
            download=unlimited,
            bandwidth=capacity(bandwidth),
            shared=self.shared,
        )
        return NetworkTimeline([(0.0, network_state)])
