"""Nodes with rotated or noisy samples: reproducible and equal on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.dataset import OwnerPartition, ShiftingPartition
from shoal.data.partitions import Dirichlet, Iid, Natural
from shoal.data.shifts import AddNoise, Noise, RotateInputs, Rotation
from shoal.errors import DataError, ExperimentError, ShoalError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.randomness import generator
from shoal.training.torch_factory import TorchTrainerFactory
from shoal.traits import traits_of

IMAGES = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).reshape(2, 3, 4, 4)
NUMBERS = torch.tensor([5, 9])


def experiment(**changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": 4,
        "seed": 2,
        "algorithm": {"name": "dpsgd", "rounds": 2},
        "dataset": {"name": "synthetic", "shape": [1, 6, 6], "classes": 3, "samples": 120, "test_samples": 30},
        "model": {"name": "mlp"},
        "training": {"batch_size": 8},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed})


# Rotation


def test_rotations_by_90_degrees_are_exact_and_counterclockwise() -> None:
    turned = RotateInputs(90.0).apply(IMAGES, NUMBERS)
    assert torch.equal(turned, torch.rot90(IMAGES, 1, (2, 3)))
    assert torch.equal(turned[0, 0, -1], IMAGES[0, 0, :, 0]), "what was at the left is below"
    assert torch.equal(RotateInputs(180.0).apply(IMAGES[..., :2], NUMBERS), IMAGES[..., :2].flip(2, 3))


@pytest.mark.parametrize("degrees", [90.0, 180.0, 270.0])
def test_other_angles_rotate_in_the_same_direction(degrees: float) -> None:
    near = RotateInputs(degrees + 1e-4).apply(IMAGES, NUMBERS)
    assert torch.allclose(near, RotateInputs(degrees).apply(IMAGES, NUMBERS), atol=1e-2)


def test_images_that_are_not_square_keep_their_shape() -> None:
    wide = torch.zeros(1, 1, 5, 9)
    wide[0, 0, 2, 2:7] = 1.0  # a horizontal line near the centre
    stands = RotateInputs(90.0).apply(wide, NUMBERS[:1])
    assert stands.shape == wide.shape
    assert torch.allclose(stands[0, 0, :, 4], torch.ones(5), atol=1e-4)
    assert stands.sum() == pytest.approx(5.0, abs=1e-3)


def test_nodes_get_the_angles_in_turn_or_at_random() -> None:
    rotation = Rotation((0.0, 90.0, 450.0))
    assert rotation.shifts(4, (1, 4, 4), generator(0, "shifts")) == [None, RotateInputs(90.0), RotateInputs(90.0), None]
    drawn = Rotation(assign="random").shifts(50, (1, 4, 4), generator(0, "shifts"))
    assert len(set(drawn)) == 4
    assert drawn == Rotation(assign="random").shifts(50, (1, 4, 4), generator(0, "shifts"))
    assert drawn[:4] != Rotation().shifts(4, (1, 4, 4), generator(0, "shifts"))


def test_only_images_can_be_rotated() -> None:
    with pytest.raises(DataError, match=r"'rotation': inputs have shape \[64\]; expected images"):
        Rotation().shifts(4, (64,), generator(0, "shifts"))
    with pytest.raises(ValueError, match="expected at least one angle"):
        Rotation(())


# Noise


def test_noise_increases_from_node_to_node() -> None:
    shifts = Noise(0.4).shifts(4, (3,), generator(0, "shifts"))
    assert shifts[0] is None
    deviations = [float(s.apply(torch.zeros(1, 20000), NUMBERS[:1]).std()) for s in shifts[1:] if s is not None]
    assert deviations == pytest.approx([0.1, 0.2, 0.3], rel=0.05)


def test_the_noise_of_a_sample_is_fixed_and_differs_between_samples() -> None:
    seen = AddNoise(7, 1, 0.5).apply(IMAGES, NUMBERS)
    assert torch.equal(seen[1:], AddNoise(7, 1, 0.5).apply(IMAGES[1:], NUMBERS[1:]))
    noises = [
        AddNoise(seed, node, 0.5).apply(torch.zeros(1, 4), torch.tensor([number]))
        for seed, node, number in [(7, 1, 5), (8, 1, 5), (7, 2, 5), (7, 1, 6), (7, 1, -5), (7, 1, -6)]
    ]
    assert len({tuple(noise.ravel().tolist()) for noise in noises}) == len(noises)


def test_noise_on_ids_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "ids.py").write_text(
        "import numpy as np\nfrom shoal.data import Data, Samples\n"
        "class Ids:\n    '''Ids.'''\n    def load(self, seed):\n"
        "        s = Samples(np.zeros((20, 2), np.int64), np.zeros(20, np.int64))\n"
        "        return Data(s, s, 2, sizes=(3,))\n"
    )
    with pytest.raises(ShoalError, match="inputs of this data set are ids"):
        experiment(dataset={"name": "ids.py:Ids"}, partition={"name": "noise"}, base=tmp_path).run(tmp_path)


# Wrapping another partition


@pytest.mark.parametrize("kind", [Rotation, Noise])
def test_samples_are_assigned_by_the_inner_partition(kind: Any) -> None:
    labels = np.arange(60) % 3
    inside = Dirichlet(0.1)
    parts = kind(of=inside).split(labels, 5, generator(0, "partition"))
    expected = inside.split(labels, 5, generator(0, "partition"))
    assert all(map(np.array_equal, parts, expected))
    assert isinstance(kind(), ShiftingPartition)
    assert traits_of(kind(of=inside), "partition").splits_by_class
    assert traits_of(kind(of=kind(of=inside)), "partition").splits_by_class
    assert not traits_of(kind(of=Iid()), "partition").splits_by_class
    assert isinstance(kind(of=Natural()), OwnerPartition)
    assert not isinstance(kind(of=Iid()), OwnerPartition)


def test_an_experiment_table_contains_both_partitions() -> None:
    found = Experiment.from_table(
        {"dataset": {"name": "digits", "partition": {"name": "noise", "sigma": 0.5, "of": {"name": "shards"}}}}
    )
    assert found.partition.to_table()["of"] == {"name": "shards", "per_node": 2}
    assert Experiment.from_table(found.to_table()) == found
    with pytest.raises(ExperimentError, match=r"dataset\.partition\.of"):
        Experiment.from_table({"dataset": {"name": "digits", "partition": {"name": "noise", "of": "shard"}}})


SHIFTED = [
    {"name": "rotation", "angles": [0, 90, 37.5], "of": {"name": "shards"}},
    {"name": "noise", "sigma": 2.0, "of": {"name": "quantity", "law": "power"}},
]


@pytest.mark.parametrize("partition", SHIFTED, ids=lambda p: str(p["name"]))
def test_both_engines_give_the_same_models(partition: dict[str, Any], tmp_path: Path) -> None:
    simulated = experiment(partition=partition).run(tmp_path)
    real = experiment(partition=partition, engine="processes").run(tmp_path)
    assert real.status == simulated.status == "completed"
    assert real.summary["digest"] == simulated.summary["digest"]
    assert real.summary["accuracy"] == simulated.summary["accuracy"]
    plain = experiment(partition=partition["of"]).run(tmp_path)
    assert simulated.summary["digest"] != plain.summary["digest"]


def test_other_trainers_receive_the_same_samples_as_torch() -> None:
    setup = Setup(experiment(partition=SHIFTED[0]))
    assert isinstance(setup.trainer_factory, TorchTrainerFactory)
    inputs = setup.trainer_factory.inputs
    part = inputs.part(1)[:3]
    x = torch.from_numpy(inputs.data.train.x[part].copy())
    assert np.array_equal(inputs.batch(1, part).x, torch.rot90(x, 1, (2, 3)).numpy())
    assert np.array_equal(inputs.batch(0, part).x, x.numpy())


def test_test_samples_have_other_noise_than_training_samples() -> None:
    """The same index in both sets, for torch and for other trainers."""
    setup = Setup(experiment(partition={"name": "noise", "sigma": 2.0}, model={"name": "logistic"}))
    assert isinstance(setup.trainer_factory, TorchTrainerFactory)
    inputs, numbers = setup.trainer_factory.inputs, np.arange(30)

    def noise(batch: Any) -> Any:
        return batch(3, numbers).x - batch(0, numbers).x  # node 0 has no noise

    of_training, of_test = noise(inputs.batch), noise(inputs.test_batch)
    assert of_test.std() == pytest.approx(of_training.std(), rel=0.1)
    correlation = np.corrcoef(of_training.ravel(), of_test.ravel())[0, 1]
    assert abs(correlation) < 0.15, "1080 pairs: a deviation of 0.03"

    weights, bias = setup.initial[:108].reshape(3, 36), setup.initial[108:]
    x, y = inputs.test_batch(3, numbers).x.reshape(30, 36), inputs.test.y
    logits = torch.from_numpy(x @ weights.T + bias)
    loss = float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)))
    trainer = setup.trainer_factory.trainer(3, setup.experiment.training, 0.0)
    assert trainer.evaluate(setup.initial)["loss"] == pytest.approx(loss, rel=1e-4)
