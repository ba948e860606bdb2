"""Validation samples: no node trains on them, and evaluation.split = "validation" hides the test samples."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.data import Data, Samples
from shoal.data.validation import draw_stratified
from shoal.errors import DataError, ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.partitioned_data import PartitionedData, load_data
from shoal.results.comparison import compare_times

TRAINING, TEST, USERS = 120, 30, 12


@dataclass(frozen=True)
class Numbered:
    """Sample i is the number i: first the training samples, then the test samples."""

    task: str = "classification"
    hidden: bool = False
    """Whether the test samples are not numbers, so that each evaluation on them gives NaN."""

    def load(self, seed: int) -> Data:
        x = np.arange(TRAINING + TEST, dtype=np.float32)[:, None]
        y, owner = np.random.default_rng(1).integers(0, 4, len(x)), np.arange(len(x)) % USERS
        test = Samples(x[TRAINING:] * (np.nan if self.hidden else 1), y[TRAINING:], owner[TRAINING:])
        if self.task == "classification":
            return Data(Samples(x[:TRAINING], y[:TRAINING], owner[:TRAINING]), test, 4)
        train = Samples(x[:TRAINING], x[:TRAINING, 0], owner[:TRAINING])
        return Data(train, Samples(test.x, test.x[:, 0], test.owner), 1, "regression")


PARTITIONS: list[dict[str, Any]] = [
    {"name": "iid"},
    {"name": "shards"},
    {"name": "dirichlet", "alpha": 0.1},
    {"name": "classes"},
    {"name": "quantity", "law": "power"},
    {"name": "natural"},
    {"name": "noise", "of": {"name": "natural", "by": "samples"}},
]


def experiment(**changed: Any) -> Experiment:
    defaults: dict[str, Any] = {
        "nodes": 5,
        "seed": 3,
        "dataset": Numbered(),
        "algorithm": {"name": "dpsgd", "rounds": 2},
        "model": {"name": "logistic"},
        "training": {"batch_size": 4, "lr": 1e-4},
        "evaluation": {"split": "validation"},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**defaults, **changed})


def numbers(samples: Samples) -> list[int]:
    return [int(value) for value in samples.x[:, 0]]


def trained(found: PartitionedData, node: int) -> list[int]:
    return numbers(found.data.train[found.parts[node]])


def evaluated(found: PartitionedData, node: int) -> list[int]:
    return numbers(found.test if found.test_parts is None else found.test[found.test_parts[node]])


@settings(max_examples=60)
@given(
    partition=st.sampled_from(PARTITIONS),
    fraction=st.sampled_from([0.01, 0.1, 1 / 3, 0.5, 0.9]),
    per=st.sampled_from(["dataset", "node"]),
    nodes=st.integers(1, 8),
    seed=st.integers(0, 9),
    plan=st.sampled_from([{}, {"samples": 7}, {"data": "own"}]),
)
def test_no_sample_is_in_two_of_training_validation_and_test(
    partition: dict[str, Any], fraction: float, per: str, nodes: int, seed: int, plan: dict[str, Any]
) -> None:
    own = {"partition": partition, "nodes": nodes, "seed": seed, "validation": {"fraction": fraction, "per": per}}
    try:
        validated = load_data(experiment(**own, evaluation={**plan, "split": "validation"}))
    except DataError:
        assume(False)  # too few samples are left for the partition
    tested = load_data(experiment(**own, evaluation=plan))
    for node in range(nodes):
        assert trained(validated, node) == trained(tested, node), "training does not depend on the split"
    everywhere = [sample for node in range(nodes) for sample in trained(validated, node)]
    seen = {sample for node in range(nodes) for sample in evaluated(validated, node)}
    assert len(everywhere) == len(set(everywhere))
    assert not seen & set(everywhere), "a validation sample is trained on"
    assert max(seen | set(numbers(validated.data.test))) < TRAINING, "a test sample is used"
    assert {sample for node in range(nodes) for sample in evaluated(tested, node)} <= set(range(TRAINING, 150))


@settings(max_examples=20)
@given(partition=st.sampled_from(PARTITIONS), fraction=st.sampled_from([0.01, 0.1, 0.5]), seed=st.integers(0, 9))
def test_each_node_holds_out_its_own_samples(partition: dict[str, Any], fraction: float, seed: int) -> None:
    whole = load_data(experiment(partition=partition, seed=seed, evaluation={}))
    plan = {"fraction": fraction, "per": "node"}
    found = load_data(experiment(partition=partition, seed=seed, validation=plan))
    for node, part in enumerate(whole.parts):
        held_out = evaluated(found, node)
        assert sorted(trained(found, node) + held_out) == part.tolist()
        assert len(held_out) == min(max(1, round(fraction * len(part) + 1e-9)), len(part) - 1)
    assert sorted(numbers(found.test)) == sorted(n for node in range(5) for n in evaluated(found, node))


@pytest.mark.parametrize("partition", [{"name": "quantity", "law": "power", "exponent": 3}, {"name": "natural"}])
def test_samples_limits_the_validation_samples_of_each_node(partition: dict[str, Any]) -> None:
    own = {"partition": partition, "validation": {"fraction": 0.5, "per": "node"}}
    whole = load_data(experiment(**own))
    found = load_data(experiment(**own, evaluation={"split": "validation", "samples": 2}))
    for node in range(5):
        every = evaluated(whole, node)
        assert len(evaluated(found, node)) == min(2, len(every))
        assert set(evaluated(found, node)) <= set(every)
    assert sorted(numbers(found.test)) == sorted(n for node in range(5) for n in evaluated(found, node))


@dataclass(frozen=True)
class Wide:
    """Samples with large inputs that take no memory unless they are copied."""

    def load(self, seed: int) -> Data:
        x, y, owner = np.broadcast_to(np.float32(1), (100, 100_000)), np.arange(100) % 2, np.arange(100) % 10
        return Data(Samples(x, y, owner), Samples(x[:5], y[:5], owner[:5]), 2)


def test_training_inputs_are_not_copied_to_partition_them_by_user() -> None:
    own = experiment(dataset=Wide(), partition={"name": "natural"}, validation=0.1, evaluation={})
    tracemalloc.start()
    try:
        found = load_data(own)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, found.parts)) == 90
    assert peak < found.data.train.x.nbytes / 4, f"{peak} bytes"


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(0, 99),
)
def test_every_class_has_its_share(sizes: list[int], fraction: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    drawn = draw_stratified(labels, fraction, rng)
    assert len(set(drawn.tolist())) == len(drawn)
    if len(labels) < 2:
        assert not len(drawn)
        return
    assert 1 <= len(drawn) < len(labels)
    assert abs(len(drawn) - fraction * len(labels)) <= 1
    counts = np.bincount(labels[drawn], minlength=len(sizes))
    assert (np.abs(counts - len(drawn) * np.array(sizes) / len(labels)) < 1).all()


def test_every_sample_is_drawn_equally_often() -> None:
    """Also where every node draws one sample: the class with the most samples is not always drawn."""
    labels = np.array([0, 0, 0, 1, 1, 2])
    rng = np.random.default_rng(0)
    drawn = np.concatenate([draw_stratified(labels, 0.1, rng) for _ in range(6000)])
    assert np.bincount(drawn) == pytest.approx([1000] * 6, rel=0.15)


def test_tasks_without_classes_have_validation_samples_too() -> None:
    found = load_data(experiment(dataset=Numbered("regression"), validation=0.25))
    assert len(found.test) == 30
    assert not set(numbers(found.test)) & {n for node in range(5) for n in trained(found, node)}


# In a run


@pytest.mark.parametrize("validation", [0.2, {"fraction": 0.2, "per": "node"}], ids=["common", "per node"])
def test_both_engines_evaluate_on_validation_samples_only(validation: Any, tmp_path: Path) -> None:
    plan = {"split": "validation", "data": "own"}
    own = {"dataset": {"name": f"{__file__}:Numbered", "hidden": True}, "validation": validation, "evaluation": plan}
    runs = [experiment(**own, engine=engine).run(tmp_path) for engine in ("simulation", "processes")]
    for run in runs:
        assert run.summary["split"] == "validation"
        assert run.summary["loss"]["mean"] is not None, "test samples are not numbers"
        assert run.summary["averaged_model"]["loss"] < 1000
    for key in ("digest", "metrics", "averaged_model"):
        assert runs[0].summary[key] == runs[1].summary[key]


def test_the_average_is_evaluated_on_the_validation_samples_of_all_nodes(tmp_path: Path) -> None:
    """With one class per sample of a node, the accuracy of the average is the mean over samples, not over nodes."""
    plan = {"fraction": 0.3, "per": "node"}
    own = {"validation": plan, "partition": {"name": "quantity", "law": "power"}, "topology": {"name": "full"}}
    run = experiment(**own).run(tmp_path)
    found = load_data(experiment(**own))
    records = [list(run.folder.read(node)) for node in range(5)]
    scores = [next(r.scores for r in reversed(rows) if hasattr(r, "scores")) for rows in records]
    sizes = [len(evaluated(found, node)) for node in range(5)]
    mean = np.average([s["accuracy"] for s in scores], weights=sizes)
    assert run.summary["averaged_model"]["accuracy"] == pytest.approx(mean), "in a full graph all models are equal"


def test_a_test_split_is_the_default_and_splits_are_not_compared(tmp_path: Path) -> None:
    test = experiment(evaluation={}).run(tmp_path)
    assert test.summary["split"] == "test"
    validated = experiment(validation=0.1).run(tmp_path)
    with pytest.raises(DataError, match="runs have different splits, test and validation"):
        compare_times({"a": [test.folder], "b": [validated.folder]}, 0.5)


def test_show_names_the_split(tmp_path: Path, shoal: Any) -> None:
    (tmp_path / "own.toml").write_text(
        'nodes = 3\nalgorithm = { name = "dpsgd", rounds = 1 }\ndataset = { name = "digits", validation = 0.1 }\n'
        'evaluation = { split = "validation" }\nsimulation = { batching = "off" }\n'
    )
    assert shoal("run", tmp_path / "own.toml").code == 0
    assert "validation loss" in shoal("show").out


# Tables and errors


def test_a_number_and_a_table_are_written_and_read() -> None:
    for validation in (0.1, {"fraction": 0.2, "per": "node"}):
        found = Experiment.from_table({"dataset": {"name": "digits", "validation": validation}})
        assert Experiment.from_table(found.to_table()) == found
        assert found.to_table()["dataset"]["validation"] == validation
    assert "validation" not in Experiment().to_table()["dataset"]
    assert Experiment.from_table({"dataset": {"name": "digits", "validation": 0}}) == Experiment(validation=0)
    assert Experiment(validation=0) == Experiment()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (
            {"evaluation": {"split": "validation"}, "dataset": {"name": "digits", "validation": 0}},
            r"evaluation\.split = 'validation': .* dataset\.validation = 0\.1",
        ),
        (
            {"dataset": {"name": "digits", "validation": 1.5}},
            r"dataset\.validation = 1\.5: expected number at least 0",
        ),
        ({"dataset": {"name": "digits", "validation": {"per": "user"}}}, r"dataset\.validation\.per = 'user'"),
    ],
)
def test_wrong_settings_are_rejected(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        Experiment.from_table(table)


def test_a_data_set_that_is_too_small_is_rejected() -> None:
    for validation in (0.5, {"fraction": 0.5, "per": "node"}):
        own = {"dataset": {"name": "synthetic", "samples": 1, "classes": 2}, "nodes": 1, "validation": validation}
        with pytest.raises(ExperimentError, match=r"dataset\.validation: .* none can be held out"):
            load_data(experiment(**own))
