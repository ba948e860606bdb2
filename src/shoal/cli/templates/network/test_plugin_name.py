"""PluginName has the described links, makes messages slow, and runs on both engines."""

from pathlib import Path

import numpy as np
import pytest
from shoal import Experiment

from plugin_name import PluginName

EXPERIMENT = Path(__file__).with_name("plugin_name.toml")


def test_messages_between_the_sites_share_a_link() -> None:
    state = PluginName(bandwidth=80, between=8).build(4, seed=0).initial_state
    assert state.capacities.tolist() == [10e6] * 8 + [1e6] * 2  # bytes per second
    assert state.route(0, 1).links == (0, 3)
    assert state.route(0, 2).links == (0, 5, 8)
    assert state.route(1, 3).links == (2, 7, 8)
    assert state.route(3, 1).links == (6, 3, 9)
    assert state.route(0, 2).latency > state.route(0, 1).latency


@pytest.mark.parametrize("nodes", [1, 2, 5, 8])
def test_it_fulfils_the_contract(nodes: int) -> None:
    state = PluginName().build(nodes, seed=0).initial_state
    for sender, receiver in np.ndindex(nodes, nodes):
        route = state.route(sender, receiver)
        assert route is state.route(sender, receiver)
        assert max(route.links, default=0) < len(state.capacities)
        assert (route.links == ()) == (sender == receiver)


def test_a_slow_link_makes_a_run_longer(tmp_path: Path) -> None:
    settings = {"engine": "simulation", "nodes": 4, "algorithm.rounds": 5}
    seconds = []
    for between in (1.0, 20.0):
        run = Experiment.from_file(EXPERIMENT, {**settings, "network.between": between}).run(tmp_path)
        seconds.append(run.summary["time"]["virtual_s"])
    assert seconds[0] > 2 * seconds[1]


def test_both_engines_end_with_the_same_models(tmp_path: Path) -> None:
    digests = []
    for engine in ("simulation", "processes"):
        settings = {"engine": engine, "nodes": 4, "algorithm.rounds": 5, "simulation.batching": "off"}
        run = Experiment.from_file(EXPERIMENT, settings).run(tmp_path)
        assert run.status == "completed"
        digests.append(run.summary["digest"])
    assert digests[0] == digests[1]
