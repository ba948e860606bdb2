"""PluginName is a valid graph, and runs on both engines."""

from pathlib import Path

import pytest
from shoal import Experiment
from shoal.errors import TopologyError
from shoal.testing import check_topology
from shoal.topologies.graph import Mixing
from shoal.topologies.measures import measure
from shoal.topologies.static import Ring

from plugin_name import PluginName

EXPERIMENT = Path(__file__).with_name("plugin_name.toml")


@pytest.mark.parametrize(("nodes", "hop"), [(3, 2), (4, 2), (16, 3), (16, 15), (33, 8)])
def test_it_fulfils_the_contract(nodes: int, hop: int) -> None:
    # Links have two ends, equal seeds give equal graphs, and the mixing weights of each node sum to 1.
    check_topology(PluginName(hop), nodes)


def test_nodes_are_linked_to_both_sides() -> None:
    assert PluginName(hop=3).build(10, seed=0).links(0, round=0).receivers == (1, 3, 7, 9)


def test_models_mix_faster_than_on_a_ring() -> None:
    topologies = PluginName(hop=6), Ring()
    own, ring = (measure(Mixing(topology.build(32, seed=0))) for topology in topologies)
    assert own.diameter is not None
    assert ring.diameter is not None
    assert own.diameter < ring.diameter
    assert own.spectral_gap > 2 * ring.spectral_gap


def test_a_hop_beyond_the_last_node_is_rejected() -> None:
    with pytest.raises(TopologyError, match="hop = 5 on 5 nodes"):
        PluginName(hop=5).build(5, seed=0)


def test_both_engines_end_with_the_same_models(tmp_path: Path) -> None:
    digests = []
    for engine in ("simulation", "processes"):
        settings = {"engine": engine, "nodes": 4, "algorithm.rounds": 5, "simulation.batching": "off"}
        run = Experiment.from_file(EXPERIMENT, settings).run(tmp_path)
        assert run.status == "completed"
        digests.append(run.summary["digest"])
    assert digests[0] == digests[1]
