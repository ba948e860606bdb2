"""PluginName can be loaded, partitioned and learnt."""

from pathlib import Path

import numpy as np
from shoal import Experiment
from shoal.data.partitions import Dirichlet
from shoal.testing import check_partition

from plugin_name import PluginName

EXPERIMENT = Path(__file__).with_name("plugin_name.toml")


def test_it_has_the_declared_shape_and_classes() -> None:
    data = PluginName(classes=4, samples=100, test_samples=40).load(seed=0)
    assert (data.shape, data.classes) == ((2,), 4)
    assert (len(data.train), len(data.test)) == (100, 40)
    assert data.train.x.dtype == np.float32
    assert data.train.y.dtype == np.int64
    assert np.bincount(data.train.y).tolist() == [25] * 4


def test_it_depends_on_the_seed_only() -> None:
    one, same, other = (PluginName().load(seed) for seed in (1, 1, 2))
    assert np.array_equal(one.train.x, same.train.x)
    assert not np.array_equal(one.train.x, other.train.x)
    assert not np.array_equal(one.train.x[:300], one.test.x)


def test_it_can_be_partitioned() -> None:
    check_partition(Dirichlet(alpha=0.5), PluginName().load(seed=0).train.y, nodes=8)


def test_four_nodes_learn_it(tmp_path: Path) -> None:
    # Both engines load the data in the same way, before they start nodes: testing one of them is enough.
    run = Experiment.from_file(EXPERIMENT, {"engine": "simulation", "nodes": 4}).run(tmp_path)
    assert run.status == "completed"
    assert run.summary["accuracy"]["mean"] > 0.8
