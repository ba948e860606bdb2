"""evaluation.data = "own": test samples in the proportions of the classes that a node trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ExperimentError
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
    known = np.where(available > 0, held, 0)
    assert len(drawn) or not known.any(), "empty only if no class of the node has a test sample"
    if not known.any():
        assert not len(drawn)
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
    ],
    ids=["shards", "dirichlet", "quantity", "validation"],
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


@pytest.mark.parametrize("samples", [1, 5, 12])
def test_samples_limits_the_own_samples_of_each_node_and_keeps_their_proportions(samples: int) -> None:
    own = {"partition": {"name": "dirichlet", "alpha": 0.5}}
    whole = load_data(experiment(**own))
    found = load_data(experiment(**own, evaluation={"data": "own", "samples": samples}))
    assert whole.test_parts is not None
    assert found.test_parts is not None
    for every, part in zip(whole.test_parts, found.test_parts, strict=True):
        assert len(part) == min(samples, len(every))
        limited, all_own = (np.bincount(y, minlength=5) for y in (found.test.y[part], whole.test.y[every]))
        assert (np.abs(limited - len(part) * all_own / len(every)) < 1).all()
        assert {tuple(x) for x in found.test.x[part].reshape(len(part), -1)} <= {
            tuple(x) for x in whole.test.x[every].reshape(len(every), -1)
        }
    assert sorted(set(np.concatenate(found.test_parts))) == list(range(len(found.test))), "no others are evaluated"


TWO_CLASSES = """
import numpy as np
from shoal.data import Data, Samples

class Missing:
    # Four classes, of which the test samples have 0 and `also` only; with also = 0, none.
    def __init__(self, also: int = 1):
        self.also = also

    def load(self, seed):
        x = np.arange(80, dtype=np.float32)[:, None]
        test = np.array([0, self.also] * 5) if self.also else np.full(10, 9)
        return Data(Samples(x, np.arange(80) % 4), Samples(x[:10], test), 10)
"""


def test_a_node_without_test_samples_of_its_classes_has_no_score(tmp_path: Path) -> None:
    (tmp_path / "missing.py").write_text(TWO_CLASSES)
    own = {"base": tmp_path, "partition": {"name": "classes", "per_node": 1}, "evaluation": {"data": "own"}}
    changed = experiment(**own, dataset={"name": "missing.py:Missing"})
    with pytest.warns(UserWarning, match="2 of 4 nodes have no test samples of their own"):
        run = changed.run(tmp_path)
    counts = load_data(changed).label_counts()
    for node in range(4):
        scores = [record.scores for record in run.folder.read(node) if isinstance(record, Evaluation)]
        assert all(map(bool, scores)) == bool(counts[node][:2].any())
    assert run.summary["accuracy"]["mean"] is not None
    with pytest.raises(ExperimentError, match="no test samples of the classes that the nodes hold"):
        Setup(experiment(**own, dataset={"name": "missing.py:Missing", "also": 0}))


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
