"""Epidemic Learning: every node averages its own and the received models, on a new graph in each round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import Shoal, agrees, experiment, same_in_both_engines, survives_a_crash
from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.el_local import ELLocal
from shoal.algorithms.el_oracle import ELOracle
from shoal.errors import ExperimentError
from shoal.topologies.random_out import RandomOut
from shoal.topologies.regular import Regular

ROUNDS = 5
BOTH = pytest.mark.parametrize(
    ("algorithm", "topology"),
    [(ELOracle(ROUNDS, degree=3), Regular(3, dynamic=True)), (ELLocal(ROUNDS, peers=3), RandomOut(3))],
    ids=["oracle", "local"],
)


@BOTH
def test_models_are_means_of_own_and_received_models(algorithm: Any, topology: Any, tmp_path: Path) -> None:
    described = experiment(algorithm)
    shoal, graph = Shoal(described), topology.build(8, described.seed)
    x = shoal.start
    for r in range(ROUNDS):
        summed = np.eye(8) + shoal.adjacency(r, graph)
        x = summed / summed.sum(1, keepdims=True) @ (x + shoal.steps(x))
    agrees(described, x, tmp_path)


@BOTH
def test_processes_and_simulation_give_identical_models(algorithm: Any, topology: Any, tmp_path: Path) -> None:
    same_in_both_engines(experiment(algorithm, nodes=6), tmp_path)


@BOTH
def test_survivors_of_a_crash_learn(algorithm: Any, topology: Any, tmp_path: Path) -> None:
    survives_a_crash(experiment(type(algorithm)(12, 3)), tmp_path)


@BOTH
def test_only_models_are_sent(algorithm: Any, topology: Any, tmp_path: Path) -> None:
    assert experiment(algorithm).run(tmp_path).summary["messages_sent"] == 8 * 3 * ROUNDS


def test_oracle_equals_dpsgd_on_a_random_regular_graph(tmp_path: Path) -> None:
    regular = {"name": "regular", "degree": 3, "dynamic": True}
    runs = [
        experiment(ELOracle(ROUNDS, degree=3)).run(tmp_path),
        experiment(DPSGD(ROUNDS), topology=regular, weights="uniform").run(tmp_path),
    ]
    assert runs[0].summary["digest"] == runs[1].summary["digest"]


def test_in_degrees_are_equal_with_the_oracle_and_random_without() -> None:
    oracle, local = Regular(3, dynamic=True).build(60, 1), RandomOut(3).build(60, 1)
    assert {oracle.degree(node, r) for node in range(60) for r in range(4)} == {3}
    in_degrees = [local.degree(node, r) for node in range(60) for r in range(4)]
    assert np.mean(in_degrees) == 3
    assert {0, 3, 6} <= set(in_degrees)


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        ({"name": "el-oracle", "degree": 8}, "algorithm.degree: 8-regular on 8 nodes: .* try degree = 7"),
        ({"name": "el-oracle", "degree": 0}, "algorithm.degree = 0: expected integer at least 1"),
        ({"name": "el-local", "peers": 9}, "algorithm.peers: 9 random peers on 8 nodes: .* try peers = 7"),
        ({"name": "el-local", "peers": 0}, "algorithm.peers = 0: expected integer at least 1"),
        ({"name": "el-local", "rounds": 0}, "algorithm.rounds = 0: expected integer at least 1"),
    ],
)
def test_invalid_options_are_rejected_before_the_run_starts(algorithm: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment(algorithm)
