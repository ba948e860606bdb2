"""The graphs of an experiment: a sampler stands for the graph that it samples from, any other topology for its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shoal import Experiment
from shoal.experiment.mixing_factory import CachedMixingFactory
from shoal.topologies.graph import Graph, Topology
from shoal.topologies.sampling.central import PeerSampler
from shoal.topologies.static import Ring, Star

NODES = 6


@dataclass(frozen=True)
class Reinforced:
    """A plug-in with a part named `inner`; its graph is its own."""

    inner: Topology = field(default_factory=Ring)

    def build(self, nodes: int, seed: int) -> Graph:
        return Star().build(nodes, seed)


def degrees(topology: Topology) -> list[int]:
    mixing_factory = CachedMixingFactory(Experiment(nodes=NODES), lambda: np.zeros((NODES, 2), np.int64))
    graph = mixing_factory.build(topology).graph
    return [graph.degree(node, 0) for node in range(NODES)]


def test_a_sampler_uses_the_graph_that_it_samples_from() -> None:
    assert degrees(PeerSampler(graph=Star())) == [5, 1, 1, 1, 1, 1]


def test_a_topology_with_a_field_named_inner_builds_its_own_graph() -> None:
    assert degrees(Reinforced()) == [5, 1, 1, 1, 1, 1]
