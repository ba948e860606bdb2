"""PluginName gives every sample to one node, and nodes learn with it."""

from pathlib import Path

import numpy as np
import pytest
from shoal import Experiment
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.testing import check_partition

from plugin_name import PluginName

EXPERIMENT = Path(__file__).with_name("plugin_name.toml")
LABELS = np.arange(1000) % 10


@pytest.mark.parametrize("mixed", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("nodes", [1, 7, 20])
def test_it_fulfils_the_contract(nodes: int, mixed: float) -> None:
    # Every sample has one node, no node is empty, and equal seeds give equal parts.
    check_partition(PluginName(mixed), LABELS, nodes)


def classes_per_node(mixed: float) -> float:
    parts = PluginName(mixed).split(LABELS, 10, generator(0, "test"))
    return float(np.mean([len(set(LABELS[part])) for part in parts]))


def test_mixing_adds_classes_to_nodes() -> None:
    assert classes_per_node(0.0) == 1
    assert 1 < classes_per_node(0.05) < classes_per_node(1.0)


def test_more_nodes_than_samples_are_rejected() -> None:
    with pytest.raises(DataError, match="3 samples for 4 nodes"):
        PluginName().split(LABELS[:3], 4, generator(0, "test"))


def test_four_nodes_learn_with_it(tmp_path: Path) -> None:
    # Both engines split the data in the same way, before they start nodes: testing one of them is enough.
    run = Experiment.from_file(EXPERIMENT, {"engine": "simulation", "nodes": 4}).run(tmp_path)
    assert run.status == "completed"
    assert run.summary["accuracy"]["mean"] > 0.8
