"""Augmentation: what it does to images, the same draws in every engine and batching, and data that it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_runs import stopped_after
from conftest import models_of
from shoal import resume
from shoal.data import Data, Indices, Samples, Scaling
from shoal.data.augmentations import Crop, Cutout, Flip, Normalize
from shoal.engines.processes.remote.shipping import Shipment
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.state import Stateful
from shoal.training.torch_factory import TorchTrainerFactory

IMAGES = {"name": "synthetic", "shape": [2, 6, 6], "classes": 3, "samples": 120, "test_samples": 30}
ALL: list[Any] = [{"name": "crop", "padding": 2}, "flip", {"name": "cutout", "size": 2}, "normalize"]


def experiment(**changed: Any) -> Experiment:
    defaults: dict[str, Any] = {
        "nodes": 4,
        "seed": 2,
        "algorithm": {"name": "dpsgd", "rounds": 3},
        "dataset": IMAGES,
        "augmentation": ALL,
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"batch_size": 8, "local_steps": 2, "momentum": 0.9},
        "evaluation": {"every": 0},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**defaults, **changed})


def images(seed: int, count: int, height: int, width: int) -> torch.Tensor:
    """Images without a value twice, and without a 0."""
    values = np.random.default_rng(seed).permutation(count * 2 * height * width) + 1
    return torch.from_numpy(values.reshape(count, 2, height, width).astype(np.float32))


# What each one does

sides = st.integers(3, 7)


@settings(max_examples=30)
@given(seed=st.integers(0, 99), count=st.integers(1, 6), height=sides, width=sides, padding=st.integers(1, 2))
def test_a_crop_is_a_window_of_the_padded_image(seed: int, count: int, height: int, width: int, padding: int) -> None:
    x = images(seed, count, height, width)
    cropped = Crop(padding).apply(x, np.random.default_rng(seed)).numpy()
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), (2, 3))
    for image, own in zip(cropped, windows, strict=True):
        assert (own == image[:, None, None]).all((0, 3, 4)).any()


@settings(max_examples=30)
@given(seed=st.integers(0, 99), count=st.integers(1, 6), height=sides, width=sides, size=st.integers(1, 3))
def test_cutout_sets_one_square_to_zero(seed: int, count: int, height: int, width: int, size: int) -> None:
    x = images(seed, count, height, width)
    cut = Cutout(size).apply(x, np.random.default_rng(seed))
    for before, after in zip(x.numpy(), cut.numpy(), strict=True):
        zero = after == 0
        assert (zero[0] == zero[1]).all(), "the same pixels in all channels"
        assert np.array_equal(after[~zero], before[~zero])
        rows, columns = zero[0].any(1), zero[0].any(0)
        assert np.array_equal(zero[0], np.outer(rows, columns)), "a rectangle"
        for side in (rows, columns):
            assert 1 <= side.sum() <= size, "a part of the square may be outside"
            assert np.abs(np.diff(side.astype(int))).sum() <= 2, "without gaps"


def test_all_crops_and_squares_are_drawn() -> None:
    x = images(0, 1, 4, 4).repeat(3000, 1, 1, 1)
    for augmentation, different in ((Crop(2), 25), (Cutout(2), 16), (Flip(), 2)):
        drawn = augmentation.apply(x, np.random.default_rng(1)).numpy()
        _, counts = np.unique(drawn.reshape(3000, -1), axis=0, return_counts=True)
        assert len(counts) == different
        assert counts.min() > 3000 / different / 2, "about equally often"


@pytest.mark.parametrize(("direction", "axis"), [("horizontal", 3), ("vertical", 2)])
def test_a_flip_mirrors_some_images(direction: Any, axis: int) -> None:
    x = images(3, 40, 3, 5)
    assert torch.equal(Flip(direction, 1.0).apply(x, np.random.default_rng(0)), x.flip(axis))
    assert torch.equal(Flip(direction, 0.0).apply(x, np.random.default_rng(0)), x)
    some = Flip(direction).apply(x, np.random.default_rng(0))
    mirrored = [torch.equal(a, b) for a, b in zip(some, x.flip(axis), strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(some, x, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 0 < sum(mirrored) < 40


# Normalisation

BYTES = """
import numpy as np
from shoal.data import Data, Samples, Scaling

class Bytes:
    '''Images of bytes; the second channel is constant.'''

    def load(self, seed):
        x = np.random.default_rng(5).integers(0, 90, (80, 2, 3, 3)).astype(np.uint8)
        x[:, 1] = 7
        y = np.arange(80) % 2
        return Data(Samples(x[:60], y[:60]), Samples(x[60:] // 2, y[60:]), 2, scaling=Scaling())
"""


def inputs_of(experiment: Experiment) -> Any:
    factory = Setup(experiment).trainer_factory
    assert isinstance(factory, TorchTrainerFactory)
    return factory.inputs


def test_inputs_are_normalised_by_the_training_samples_of_all_nodes(tmp_path: Path) -> None:
    (tmp_path / "raw.py").write_text(BYTES)
    own = {"dataset": {"name": "raw.py:Bytes"}, "base": tmp_path, "validation": 0.2}
    inputs = inputs_of(experiment(**own, augmentation=["normalize"]))
    trained = np.concatenate(inputs.parts)
    assert len(trained) == 48
    x = inputs.batch(0, trained).x.astype(np.float64)
    assert x.mean((0, 2, 3)) == pytest.approx([0, 0], abs=1e-6)
    assert x.std((0, 2, 3)) == pytest.approx([1, 0], abs=1e-6)
    raw = inputs.data.train.x[trained, 0] / 1.0
    expected = (inputs.data.test.x[:, 0] - raw.mean()) / raw.std()
    assert inputs.test_batch(None, np.arange(20)).x[:, 0] == pytest.approx(expected, abs=1e-5), "test inputs as well"


def test_given_numbers_refer_to_the_inputs_as_the_data_set_scales_them(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(BYTES)
    table = {"name": "normalize", "mean": [0.5, 0.25], "std": 0.2}
    own = {"dataset": {"name": "given.py:Bytes"}, "base": tmp_path}
    inputs = inputs_of(experiment(**own, augmentation=[table]))
    expected = (inputs.data.train.x[:5] / 255 - np.array([0.5, 0.25])[:, None, None]) / 0.2
    assert inputs.batch(0, np.arange(5)).x == pytest.approx(expected, abs=1e-5)


# In a run


def test_the_same_draws_in_all_engines_and_batchings(tmp_path: Path) -> None:
    (tmp_path / "brighter.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Brighter:\n    '''Adds a random number.'''\n"
        "    most: float = 1.0\n    def apply(self, x, rng):\n        return x + float(rng.random()) * self.most\n"
    )
    own = {"base": tmp_path, "augmentation": [*ALL, {"name": "brighter.py:Brighter", "most": 0.5}]}
    alone = experiment(**own).run(tmp_path)
    pool = experiment(**own, simulation={"batching": "pool", "workers": 2}).run(tmp_path)
    real = experiment(**own, engine="processes").run(tmp_path)
    assert alone.summary["digest"] == pool.summary["digest"] == real.summary["digest"]
    assert alone.summary["accuracy"] == pool.summary["accuracy"] == real.summary["accuracy"]
    stacked = experiment(**own, simulation={"batching": "vmap"}).run(tmp_path)
    assert models_of(stacked) == pytest.approx(models_of(alone), abs=1e-5)
    for fewer in (ALL, ["normalize"]):
        other = experiment(augmentation=fewer).run(tmp_path)
        assert np.abs(models_of(other) - models_of(alone)).max() > 1e-3, "or the comparison shows nothing"


def test_a_resumed_run_ends_with_the_same_models(tmp_path: Path) -> None:
    whole = experiment(checkpoint={"every": 1, "keep": 9}).run(tmp_path / "whole")
    folder = stopped_after(whole.folder, 1, tmp_path / "stopped")
    assert resume(folder.path).summary["digest"] == whole.summary["digest"]


SEEN: list[tuple[bytes, float]] = []


@dataclass(frozen=True)
class Noting:
    """Notes the inputs that it gets, and a draw."""

    def apply(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        SEEN.append((x.numpy().tobytes(), rng.random()))
        return x


@dataclass(frozen=True)
class OneImage:
    """All samples are the same image, so that different inputs are different draws."""

    def load(self, seed: int) -> Data:
        x = np.tile(np.arange(1.0, 37.0, dtype=np.float32).reshape(1, 1, 6, 6), (40, 1, 1, 1))
        samples = Samples(x, np.arange(40) % 2)
        return Data(samples, samples[:4], 2)


@pytest.mark.parametrize("trainer", ["torch", "scikit"])
def test_nodes_and_steps_have_different_draws_and_evaluations_none(trainer: str) -> None:
    own = {"dataset": OneImage(), "augmentation": [*ALL[:3], Noting()], "training": {"batch_size": 4}}
    setup = Setup(experiment(**own, trainer=trainer, nodes=2))
    SEEN.clear()
    for one in (setup.trainer(0), setup.trainer(1)):
        for _ in range(2):
            one.train(setup.initial, 2)
    assert len(SEEN) == 8, "two nodes, two trainings, two steps"
    assert len({x for x, _ in SEEN}) == len({draw for _, draw in SEEN}) == 8
    setup.evaluate(setup.initial)
    setup.trainer(0).evaluate(setup.initial)
    assert len(SEEN) == 8


def test_scikit_trains_on_augmented_batches_and_continues_from_its_state() -> None:
    own = {"trainer": {"name": "scikit"}, "training": {"lr": 0.05, "batch_size": 8}}
    setup, plain = Setup(experiment(**own)), Setup(experiment(**own, augmentation=["normalize"]))
    one, other, without = setup.trainer(0), setup.trainer(0), plain.trainer(0)
    params = one.train(setup.initial).params
    assert not np.array_equal(params, without.train(setup.initial).params)
    assert isinstance(one, Stateful)
    assert isinstance(other, Stateful)
    other.restore(one.state())
    assert np.array_equal(one.train(params).params, other.train(params).params)


@dataclass(frozen=True)
class HalvedAndAdded:
    """Halves all inputs, and adds 1 to those of training batches."""

    def input_scaling(self, data: Data, samples: Indices) -> Scaling:
        return Scaling((0.0,), (2.0,))

    def apply(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        return x + 1


def test_an_entry_can_rescale_inputs_and_transform_batches() -> None:
    inputs = inputs_of(experiment(augmentation=[HalvedAndAdded()]))
    rows, rng = np.arange(3), np.random.default_rng(0)
    assert np.array_equal(inputs.batch(0, rows, rng).x, inputs.data.train.x[rows] / 2 + 1)
    assert np.array_equal(inputs.test_batch(0, rows).x, inputs.test.x[rows] / 2)


def test_every_trainer_has_rescaled_inputs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Own:\n    def create_factory(self, inputs): ...\n")
    own = {"trainer": {"name": "own.py:Own"}, "base": tmp_path}
    assert experiment(**own, augmentation=["normalize"]).augmentation
    with pytest.raises(ExperimentError, match="does not transform its batches"):
        experiment(**own, augmentation=["normalize", HalvedAndAdded()])


# Tables and errors


def test_names_tables_and_instances_are_the_same_experiment() -> None:
    table = {"dataset": {**IMAGES, "augmentation": ["crop", {"name": "flip"}]}}
    found = Experiment.from_table(table)
    assert found == Experiment(dataset=IMAGES, augmentation=(Crop(), Flip()))
    assert Experiment.from_table(found.to_table()) == found
    assert found.to_table()["dataset"]["augmentation"][0] == {"name": "crop", "padding": 4}
    assert "augmentation" not in Experiment(dataset=IMAGES).to_table()["dataset"]


def test_agents_get_the_files_of_plug_ins(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Own:\n    def apply(self, x, rng):\n        return x\n")
    shipment = Shipment(experiment(augmentation=["flip", "own.py:Own"], base=tmp_path))
    names = [entry["name"] for entry in shipment.table["dataset"]["augmentation"]]
    assert names == ["flip", f"{shipment.files[0].name}:Own"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"augmentation": "crop"}, r"dataset\.augmentation = 'crop': expected a list of names or tables"),
        ({"augmentation": ["flip", "corp"]}, r"augmentation\[1\].* unknown augmentation 'corp'; did you mean 'crop'"),
        ({"augmentation": [{"name": "crop", "padding": 0}]}, r"augmentation\[0\]\.padding = 0: expected integer"),
        ({"augmentation": [{"name": "normalize", "mean": [0.5]}]}, "must both be 'auto', or both numbers or lists"),
        ({"augmentation": [{"name": "normalize", "mean": [], "std": []}]}, r"augmentation\[0\]: mean = \[\]: expected"),
        ({"augmentation": [{"name": "normalize", "mean": 0, "std": 0}]}, r"augmentation\[0\]\.std = 0: expected"),
        ({"trainer": {"name": "own.py:Own"}}, r"dataset\.augmentation: trainer = .* does not transform its batches"),
    ],
)
def test_wrong_augmentations_are_rejected(changed: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Own:\n    def create_factory(self, inputs): ...\n")
    with pytest.raises(ExperimentError, match=problem):
        experiment(**changed, base=tmp_path)


@pytest.mark.parametrize(
    ("dataset", "augmentation", "problem"),
    [
        ({"name": "digits"}, "flip", r"\[0\] = 'flip': inputs have shape \[64\]; expected images.*dataset\.images"),
        (IMAGES, {"name": "crop", "padding": 6}, r"padding = 6: .* less than the sides of an image, 6×6"),
        (IMAGES, {"name": "cutout", "size": 7}, r"size = 7: larger than an image, 6×6; use at most 6"),
        (IMAGES, {"name": "normalize", "mean": [0.0] * 3, "std": [1.0]}, r"mean has 3 numbers .* each of 2 channels"),
        (IMAGES, "own.py:Smaller", r"apply returned torch.float32 of shape \[2, 2, 6, 5\] for .*; expected the same"),
        (IMAGES, "own.py:Fails", "apply raised KeyError: 'no'"),
        (IMAGES, "own.py:Nothing", "Nothing has no method 'def apply"),
        (IMAGES, "own.py:ScalesBadly", r"\[0\] = '.*own.py:ScalesBadly': input_scaling raised KeyError: 'no'"),
        (IMAGES, {"name": "own.py:Scales", "std": "5"}, r"input_scaling returned '5'; expected a shoal\.data\.Scaling"),
        (IMAGES, {"name": "own.py:Scales", "std": (1.0, 0.0)}, r"for inputs of shape \[2, 6, 6\]; expected two tuples"),
        (IMAGES, {"name": "own.py:Scales", "std": (1.0,) * 3}, "expected two tuples of finite numbers"),
        ({"name": "own.py:Ids"}, {"name": "own.py:Scales"}, "ids, which cannot be scaled"),
        ({"name": "own.py:Ids"}, "own.py:Smaller", "the inputs of this data set are ids"),
        ({"name": "own.py:Ids"}, "normalize", "the inputs of this data set are ids"),
    ],
)
def test_data_that_cannot_be_augmented_are_rejected_before_the_run(
    dataset: dict[str, Any], augmentation: Any, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\nfrom shoal.data import Data, Samples, Scaling\n"
        "class ScalesBadly:\n    def input_scaling(self, data, samples):\n        raise KeyError('no')\n"
        "class Scales:\n    def __init__(self, std=(1.0,)):\n        self.std = std\n"
        "    def input_scaling(self, data, samples):\n"
        "        return self.std if isinstance(self.std, str) else Scaling((0.0,) * len(self.std), tuple(self.std))\n"
        "class Smaller:\n    def apply(self, x, rng):\n        return x[..., 1:]\n"
        "class Fails:\n    def apply(self, x, rng):\n        raise KeyError('no')\n"
        "class Nothing:\n    pass\n"
        "class Ids:\n    def load(self, seed):\n"
        "        s = Samples(np.zeros((20, 2), np.int64), np.zeros(20, np.int64))\n"
        "        return Data(s, s, 2, sizes=(3,))\n"
    )
    with pytest.raises(ExperimentError, match=problem):
        Setup(experiment(dataset=dataset, augmentation=[augmentation], base=tmp_path))


def test_normalisation_of_a_vector_uses_one_number() -> None:
    inputs = inputs_of(experiment(dataset={"name": "digits"}, augmentation=[Normalize()]))
    x = inputs.batch(0, np.concatenate(inputs.parts)).x
    assert (x.mean(), x.std()) == pytest.approx((0.0, 1.0), abs=1e-4)
