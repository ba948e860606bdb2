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
def test_all_models_are_averages_of_what_had_time_to_come(topology: Any, tmp_path: Path) -> None:
    described = experiment(RelaySum(ROUNDS), topology)
    shoal = Shoal(described)
    away = distances(shoal.adjacency())
    x, halves = shoal.start, []
    for r in range(ROUNDS):
        halves.append(x + shoal.steps(x))
        told = r - np.maximum(0, away - 1)  # the round of the model of j that i has heard of
        known = [[halves[told[i, j]][j] if told[i, j] >= 0 else shoal.start[j] for j in range(8)] for i in range(8)]
        x = np.mean(known, axis=1)
    agrees(described, x, tmp_path)


def test_processes_agree_with_the_simulation_to_the_bit(tmp_path: Path) -> None:
    same_in_both_engines(experiment(RelaySum(4), "tree", nodes=5), tmp_path)


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(RelaySum(25), "tree"), tmp_path)


def test_survivors_of_a_hang_learn(tmp_path: Path) -> None:
    survives_a_hang(experiment(RelaySum(60), "tree"), tmp_path)


# What nodes that always train to a model of their own find: its average


GIVEN = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)


def given(node: int, params: Any) -> Any:
    return GIVEN[node]


@pytest.mark.parametrize(
    ("topology", "diameter"), [(Tree(), 5), (Star(), 2), (Grid(rows=1), 8)], ids=["tree", "star", "chain"]
)
def test_all_hold_the_exact_average_from_the_diameter_on_and_not_before(topology: Any, diameter: int) -> None:
    start = np.zeros_like(GIVEN)
    ends = np.stack([node.params for node in play(RelaySum(diameter), start, topology, given)])
    np.testing.assert_allclose(ends, np.tile(GIVEN.mean(0), (9, 1)), atol=1e-6)
    early = np.stack([node.params for node in play(RelaySum(diameter - 1), start, topology, given)])
    assert np.abs(early - GIVEN.mean(0)).max() > 0.01


@pytest.mark.parametrize("lost", [1, 8], ids=["a branch", "a leaf"])
def test_what_a_death_leaves_of_the_tree_averages_in_parts(lost: int) -> None:
    nodes = play(RelaySum(14), np.zeros_like(GIVEN), Tree(), given, lost=lost)
    parts = {1: [(0, 2, 5, 6), (3, 7, 8), (4,)], 8: [tuple(range(8))]}[lost]
    for part in parts:
        for node in (node for node in nodes if node.id in part):
            np.testing.assert_allclose(node.params, GIVEN[list(part)].mean(0), atol=1e-6)


def test_relays_that_are_none_are_dropped_and_counted() -> None:
    def told(to: int, message: Message) -> Message:
        total = message.payload.arrays["sum"]
        broken: dict[int, dict[str, Any]] = {
            1: {"sum": total[:1]},
            2: {"sum": total * np.float32(np.nan)},
            3: {"count": 0},
            4: {"count": 9},
            5: {"count": 1.5},
        }
        return altered(message, **broken.get(message.sender, {}))

    nodes = play(RelaySum(3), np.zeros_like(GIVEN), Star(), given, told=told)
    assert nodes[0].rejected == 5 * 3
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
    ids=["a circle", "a changing graph", "a sampler", "changing pairs", "a circle and a chain"],
)
@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")
def test_only_a_tree_will_do(topology: Any) -> None:
    with pytest.raises(ExperimentError, match=r"relays sums along a tree.* use topology = { name = 'tree' }"):
        experiment(RelaySum(), topology)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_lone_node_and_a_pair_are_trees(nodes: int, tmp_path: Path) -> None:
    assert experiment(RelaySum(3), "tree", nodes=nodes).run(tmp_path).summary["status"] == "completed"
