"""D-Cliques: x ← W(x + C u), where C averages over cliques and W has Metropolis-Hastings weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import Shoal, agrees, experiment, same_in_both_engines, survives_a_crash
from shoal.algorithms.d_cliques import DCliquesSGD
from shoal.errors import ExperimentError
from shoal.topologies.d_cliques import DCliques

ROUNDS = 4


@pytest.mark.parametrize(
    "options",
    [
        {"size": 3, "between": "ring"},
        {"size": 3, "between": "full"},
        {"size": 8, "between": "small-world"},
        {"size": 2, "between": "small-world", "steps": 0, "links": 1},
    ],
    ids=["ring", "full", "one clique", "no swaps"],
)
def test_models_follow_the_matrices(options: dict[str, Any], tmp_path: Path) -> None:
    described = experiment({"name": "d-cliques", "rounds": ROUNDS, **options})
    shoal = Shoal(described)
    graph = DCliques(**options).build_from(shoal.setup.label_counts(), described.seed)
    c = np.zeros((8, 8))
    for members in graph.cliques:
        c[np.ix_(members, members)] = 1 / len(members)
    x = shoal.start
    for _ in range(ROUNDS):
        x = shoal.metropolis(graph=graph) @ (x + c @ shoal.steps(x))
    if len(graph.cliques) > 1:
        run = agrees(described, x, tmp_path)
        assert run.summary["messages_sent"] == ROUNDS * (
            sum(len(members) * (len(members) - 1) for members in graph.cliques) + shoal.adjacency(graph=graph).sum()
        )
    else:  # one clique of all nodes: all models are equal
        assert np.ptp(x, axis=0).max() < 1e-12
        models = [np.load(file) for file in sorted(described.run(tmp_path).folder.path.glob("checkpoints/*.npy"))]
        np.testing.assert_allclose(np.stack(models), x, atol=2e-5)


def test_processes_and_simulation_give_identical_models(tmp_path: Path) -> None:
    same_in_both_engines(experiment(DCliquesSGD(3, size=3), nodes=6), tmp_path)


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(DCliquesSGD(12, size=4)), tmp_path)


def test_invalid_clique_size_and_links_are_rejected() -> None:
    with pytest.raises(ExperimentError, match=r"algorithm.size = 1: expected integer at least 2"):
        experiment({"name": "d-cliques", "size": 1})
    with pytest.raises(ExperimentError, match=r"algorithm.between = 'rings': .* did you mean 'ring'"):
        experiment({"name": "d-cliques", "between": "rings"})
