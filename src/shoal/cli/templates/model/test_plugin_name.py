"""PluginName builds networks of the declared size, and nodes learn with it."""

from pathlib import Path

import pytest
import torch
from shoal import Experiment

from plugin_name import PluginName

EXPERIMENT = Path(__file__).with_name("plugin_name.toml")


@pytest.mark.parametrize("shape", [(64,), (1, 8, 8), (3, 4, 5)])
def test_it_takes_inputs_of_any_shape(shape: tuple[int, ...]) -> None:
    network = PluginName(width=8).build(shape, outputs=10)
    assert network(torch.zeros(5, *shape)).shape == (5, 10)


def test_it_has_the_declared_width_and_blocks() -> None:
    network = PluginName(width=8, blocks=2).build((64,), outputs=10)
    expected = (64 + 1) * 8 + 2 * (8 + 1) * 8 + (8 + 1) * 10
    assert sum(parameter.numel() for parameter in network.parameters()) == expected


def test_without_blocks_it_is_linear() -> None:
    network = PluginName(blocks=0).build((4,), outputs=3)
    one, two = torch.randn(2, 1, 4)
    assert torch.allclose(network(one) + network(two), network(one + two) + network(torch.zeros(1, 4)), atol=1e-5)


def test_four_nodes_learn_with_it(tmp_path: Path) -> None:
    # Both engines build the network in the same way, before they start nodes: testing one of them is enough.
    run = Experiment.from_file(EXPERIMENT, {"engine": "simulation", "nodes": 4}).run(tmp_path)
    assert run.status == "completed"
    assert run.summary["accuracy"]["mean"] > 0.8
