"""The time that a node without any message costs the others: a few timeouts in all, not one in every round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.experiment import Experiment
from shoal.experiment.registry import registry

ROUNDS, TIMEOUT = 20, 10.0
HUNG, HANGS_IN = 3, 2

ONE = 1.5
"""All peers meet the hung node in the same round. They wait for t, t/10, t/100 and t/1000 per receive: 1.111 t, and
0.02 t to 0.1 t in these rounds. The rest is for waits that are not shorter than a usual receive."""
CHANGING = 4.0
"""Each peer waits for 1.1 t after it has met the hung node for the first time. The graph of a round decides when: with
5 of 7 peers, 3 rounds are enough for 98 % of the nodes."""
PAIRS = 4.5
"""A request is sent three times, and once more after t/10. At the end, passive nodes wait three times for an active
node to finish, and between these times for 1.11 t in all for an answer to a probe."""
NEVER = 0.01
"""No node waits for a message."""

TIMEOUTS: dict[str, float] = {
    **dict.fromkeys(registry("algorithm"), ONE),
    **dict.fromkeys(("el-local", "el-oracle", "shatter"), CHANGING),
    "adpsgd": PAIRS,
    **dict.fromkeys(("adpsgd-artifact", "divshare", "gossip", "swift", "swift-artifact"), NEVER),
}
OPTIONS: dict[str, dict[str, Any]] = {"d-cliques": {"size": 4}, "shatter": {"virtual_nodes": 4}}
GRAPHS = {"relaysum": "star", "sgp": "exponential"}


def _virtual_seconds(folder: Path, name: str, *, hangs: bool, **table: Any) -> float:
    settings: dict[str, Any] = {
        "nodes": 8,
        "seed": 1,
        "algorithm": {"name": name, "rounds": ROUNDS, **OPTIONS.get(name, {})},
        "topology": {"name": GRAPHS.get(name, "full")},
        "dataset": {"name": "synthetic", "samples": 160, "test_samples": 20},
        "model": {"name": "logistic"},
        "training": {"batch_size": 4, "local_steps": 1},
        "evaluation": {"every": 0, "average": False},
        "speed": {"name": "constant", "step_seconds": 1.0},
        "network": {"name": "uniform", "latency": 0.01},
        "simulation": {"batching": "off", "receive_timeout": TIMEOUT},
        "fault": [{"kind": "hang", "node": HUNG, "round": HANGS_IN}] if hangs else [],
        **table,
    }
    run = Experiment.from_table(settings).run(folder)
    assert (str(HUNG) in map(str, run.summary["lost"])) == hangs
    seconds: float = run.summary["time"]["virtual_s"]
    return seconds


@pytest.mark.filterwarnings("ignore::shoal.topologies.graph.TopologyWarning")
@pytest.mark.parametrize("name", sorted(TIMEOUTS))
def test_a_hung_node_costs_a_few_timeouts(name: str, tmp_path: Path) -> None:
    undisturbed = _virtual_seconds(tmp_path, name, hangs=False)
    assert _virtual_seconds(tmp_path, name, hangs=True) < undisturbed + TIMEOUTS[name] * TIMEOUT


@pytest.mark.parametrize(
    ("table", "timeouts"),
    [
        ({"topology": {"name": "ring"}}, ONE),
        ({"topology": {"name": "one-peer-exponential"}}, ONE),
        ({"topology": {"name": "peer-sampler"}}, CHANGING),
        ({"topology": {"name": "gossip-sampler"}}, CHANGING),
        ({"topology": {"name": "regular", "degree": 5, "dynamic": True}}, CHANGING),
        ({"sharing": {"name": "secure"}}, ONE + 5),  # at the end, a node answers requests until five timeouts are over
    ],
    ids=str,
)
def test_a_hung_node_costs_dpsgd_a_few_timeouts(table: dict[str, Any], timeouts: float, tmp_path: Path) -> None:
    undisturbed = _virtual_seconds(tmp_path, "dpsgd", hangs=False, **table)
    assert _virtual_seconds(tmp_path, "dpsgd", hangs=True, **table) < undisturbed + timeouts * TIMEOUT


def test_a_sampled_client_that_hangs_costs_the_server_one_timeout(tmp_path: Path) -> None:
    table = {"algorithm": {"name": "fedavg", "rounds": ROUNDS, "fraction": 0.5}}
    undisturbed = _virtual_seconds(tmp_path, "fedavg", hangs=False, **table)
    assert _virtual_seconds(tmp_path, "fedavg", hangs=True, **table) < undisturbed + ONE * TIMEOUT
