"""RelaySum: on a tree, node i averages the model that j had d(i, j) − 1 rounds ago, for all j."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest

from oracle import Shoal, agrees, altered, experiment, play, same_in_both_engines, survives_a_crash, survives_a_hang
from shoal.algorithms.relaysum import RelaySum
from shoal.errors import ExperimentError
from shoal.message import Message
from shoal.topologies.static import Grid, Star, Tree

ROUNDS = 6
CHAIN = {"name": "grid", "rows": 1}


def distances(adjacency: Any) -> Any:
    lengths = dict(networkx.all_pairs_shortest_path_length(networkx.from_numpy_array(adjacency)))
    return np.array([[lengths[i][j] for j in range(len(adjacency))] for i in range(len(adjacency))])


@pytest.mark.parametrize("topology", ["tree", "star", CHAIN], ids=["tree", "star", "chain"])
def test_models_are_averages_of_all_that_could_have_latest(topology: Any, tmp_path: Path) -> None:
    described = experiment(RelaySum(ROUNDS), topology)
    shoal = Shoal(described)
    away = distances(shoal.adjacency())
    x, halves = shoal.start, []
    for r in range(ROUNDS):
        halves.append(x + shoal.steps(x))
        latest = r - np.maximum(0, away - 1)  # the round of the latest model of j that i has
        known = [[halves[latest[i, j]][j] if latest[i, j] >= 0 else shoal.start[j] for j in range(8)] for i in range(8)]
        x = np.mean(known, axis=1)
    agrees(described, x, tmp_path)


def test_processes_and_simulation_give_identical_models(tmp_path: Path) -> None:
    same_in_both_engines(experiment(RelaySum(4), "tree", nodes=5), tmp_path)


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(RelaySum(25), "tree"), tmp_path)


def test_survivors_of_a_hang_learn(tmp_path: Path) -> None:
    survives_a_hang(experiment(RelaySum(60), "tree"), tmp_path)


# Nodes whose training always gives the same model find the average of these models


GIVEN = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)


def given(node: int, params: Any) -> Any:
    return GIVEN[node]


@pytest.mark.parametrize(
    ("topology", "diameter"), [(Tree(), 5), (Star(), 2), (Grid(rows=1), 8)], ids=["tree", "star", "chain"]
)
def test_average_is_exact_from_the_diameter_on_and_not_before(topology: Any, diameter: int) -> None:
    start = np.zeros_like(GIVEN)
    ends = np.stack([node.params for node in play(RelaySum(diameter), start, topology, given)])
    np.testing.assert_allclose(ends, np.tile(GIVEN.mean(0), (9, 1)), atol=1e-6)
    early = np.stack([node.params for node in play(RelaySum(diameter - 1), start, topology, given)])
    assert np.abs(early - GIVEN.mean(0)).max() > 0.01


@pytest.mark.parametrize("failing", [1, 8], ids=["a branch", "a leaf"])
def test_parts_of_the_tree_average_separately_after_a_failure(failing: int) -> None:
    nodes = play(RelaySum(14), np.zeros_like(GIVEN), Tree(), given, failing=failing)
    parts = {1: [(0, 2, 5, 6), (3, 7, 8), (4,)], 8: [tuple(range(8))]}[failing]
    for part in parts:
        for node in (node for node in nodes if node.id in part):
            np.testing.assert_allclose(node.params, GIVEN[list(part)].mean(0), atol=1e-6)


def test_invalid_relayed_sums_are_rejected_and_counted() -> None:
    def tamper(to: int, message: Message) -> Message:
        total = message.payload.arrays["sum"]
        broken: dict[int, dict[str, Any]] = {
            1: {"sum": total[:1]},
            2: {"sum": total * np.float32(np.nan)},
            3: {"count": 0},
            4: {"count": 9},
            5: {"count": 1.5},
        }
        return altered(message, **broken.get(message.sender, {}))

    nodes = play(RelaySum(3), np.zeros_like(GIVEN), Star(), given, tamper=tamper)
    assert nodes[0].rejected_count == 5 * 3
    np.testing.assert_allclose(nodes[0].params, GIVEN[[0, 6, 7, 8]].mean(0), atol=1e-6)


@pytest.mark.parametrize(
    "topology",
    [
        "ring",
        "one-peer-exponential",
        "gossip-sampler",
        {"name": "regular", "degree": 1, "dynamic": True},
        {"name": "edges", "edges": ((0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 6), (6, 7))},
    ],
    ids=["a cycle", "a dynamic graph", "a sampler", "dynamic pairs", "a cycle and a chain"],
)
@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")
def test_graph_that_is_not_a_tree_is_rejected(topology: Any) -> None:
    with pytest.raises(ExperimentError, match=r"needs a tree.* use topology = { name = 'tree' }"):
        experiment(RelaySum(), topology)


@pytest.mark.parametrize("nodes", [1, 2])
def test_single_node_and_a_pair_are_trees(nodes: int, tmp_path: Path) -> None:
    assert experiment(RelaySum(3), "tree", nodes=nodes).run(tmp_path).summary["status"] == "completed"
