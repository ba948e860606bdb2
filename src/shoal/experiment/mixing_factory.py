"""Graphs with mixing weights for the nodes of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shoal.experiment.experiment import Experiment
from shoal.experiment.registry import from_table, to_table
from shoal.topologies.graph import FromLabels, Mixing, Topology, TopologyWrapper, WeightScheme
from shoal.traits import traits_of


class CachedMixingFactory:
    """A `shoal.node_context.MixingFactory` that builds each graph once: nodes with equal topologies share it."""

    def __init__(self, experiment: Experiment, label_counts: Callable[[], NDArray[np.int64]]) -> None:
        """`label_counts` returns the training samples of each class on each node: nodes × classes."""
        self._experiment = experiment
        self._label_counts = label_counts
        self._built: dict[tuple[str, WeightScheme], Mixing] = {}

    def build(self, topology: Topology, weights: WeightScheme | None = None) -> Mixing:
        while isinstance(topology, TopologyWrapper):
            topology = topology.sampled_topology
        experiment = self._experiment
        key = (repr(topology), weights or experiment.weights)
        if key not in self._built:
            if traits_of(topology, "topology").needs_labels:
                graph = cast(FromLabels, topology).build_from(self._label_counts(), experiment.seed)
            else:
                graph = topology.build(experiment.nodes, experiment.seed)
            self._built[key] = Mixing(graph, key[1])
        return self._built[key]

    def to_table(self, topology: Topology) -> dict[str, Any]:
        return to_table("topology", topology)

    def from_table(self, table: Mapping[str, Any]) -> Topology:
        topology: Topology = from_table("topology", table)
        return topology
