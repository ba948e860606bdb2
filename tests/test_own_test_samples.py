"""evaluation.data = "own": test samples in the proportions of the classes that a node trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.experiment import Experiment
from shoal.experiment.partitioned_data import load_data, proportional_samples
from shoal.experiment.setup import Setup
from shoal.results.records import Evaluation
from shoal.training.torch_factory import TorchTrainerFactory

IMAGES = {"name": "synthetic", "shape": [1, 4, 4], "classes": 5, "samples": 200, "test_samples": 100}


def experiment(**changed: Any) -> Experiment:
    defaults: dict[str, Any] = {
        "nodes": 4,
        "seed": 2,
        "algorithm": {"name": "dpsgd", "rounds": 1},
        "dataset": IMAGES,
        "partition": {"name": "shards"},
        "model": {"name": "logistic"},
        "evaluation": {"data": "own", "metrics": ["accuracy", "per-class"]},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**defaults, **changed})


@given(
    classes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8),
    seed=st.integers(0, 9),
)
def test_the_distribution_differs_by_rounding_only(classes: list[tuple[int, int]], seed: int) -> None:
    held, available = (np.array(column) for column in zip(*classes, strict=True))
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(classes)), available))
    drawn = proportional_samples(labels, held, rng)
    assert len(set(drawn.tolist())) == len(drawn)
    assert len(drawn) or not len(labels), "never empty"
    known = np.where(available > 0, held, 0)
    if not known.any():
        assert len(drawn) == len(labels), "no class of the node has a test sample"
        return
    counts = np.bincount(labels[drawn], minlength=len(classes))
    assert not counts[known == 0].any(), "only classes that the node holds"
    assert (counts == available)[known > 0].any(), "a larger subset would need more samples of some class"
    distance = np.abs(counts / counts.sum() - known / known.sum()).sum() / 2
    assert distance <= np.count_nonzero(known) / (2 * counts.sum()) + 1e-12


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"partition": {"name": "dirichlet", "alpha": 0.1}},
        {"partition": {"name": "quantity"}},
        {"validation": 0.2, "evaluation": {"data": "own", "split": "validation"}},
        {"evaluation": {"data": "own", "samples": 40}},
    ],
    ids=["shards", "dirichlet", "quantity", "validation", "samples"],
)
def test_nodes_are_evaluated_on_the_classes_that_they_hold(changed: dict[str, Any]) -> None:
    found = load_data(experiment(**changed))
    assert found.test_parts is not None
    available = np.bincount(found.test.y, minlength=5)
    for counts, own in zip(found.label_counts(), found.test_parts, strict=True):
        drawn = np.bincount(found.test.y[own], minlength=5)
        assert set(np.flatnonzero(drawn)) <= set(np.flatnonzero(counts))
        shares = counts / counts.sum()
        assert np.abs(drawn / drawn.sum() - shares).sum() / 2 <= 5 / (2 * drawn.sum())
        assert (drawn == available)[counts > 0].any()


def test_the_scores_of_a_node_are_those_of_its_classes(tmp_path: Path) -> None:
    run = experiment().run(tmp_path)
    counts = Setup(experiment()).label_counts()
    for node in range(4):
        last = [record for record in run.folder.read(node) if isinstance(record, Evaluation)][-1]
        assert "class 4" in last.scores or not counts[node][4]
        assert {name for name in last.scores if name.startswith("class")} <= {
            f"class {c}" for c in np.flatnonzero(counts[node])
        }


def test_another_seed_draws_other_samples_and_shifts_are_kept() -> None:
    plain, again, other = (load_data(experiment(seed=seed)).test_parts for seed in (2, 2, 3))
    assert plain is not None
    assert again is not None
    assert other is not None
    assert all(map(np.array_equal, plain, again))
    assert not all(map(np.array_equal, plain, other))
    rotation = {"name": "rotation", "angles": [0, 90], "of": {"name": "shards"}}
    factory = Setup(experiment(partition=rotation)).trainer_factory
    assert isinstance(factory, TorchTrainerFactory)
    for node in (0, 1):
        own = factory.inputs.part_of_test(node)
        assert np.array_equal(own, plain[node])
        turned = np.rot90(factory.inputs.test.x[own], node, (2, 3))
        assert np.array_equal(factory.inputs.test_batch(node, own).x, turned)
