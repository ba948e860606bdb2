"""Data sets have the documented shapes, types and balance, and depend only on the seed."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from shoal.data import DATASETS, Data, Dataset, Samples
from shoal.data.digits import Digits
from shoal.data.synthetic import Synthetic
from shoal.errors import DataError

CASES: dict[str, Dataset] = {"digits": Digits(), "synthetic": Synthetic(shape=(3, 8, 8), classes=4)}
"""Data sets that need no files; the others have their own test files."""


def same(one: Samples, other: Samples) -> bool:
    return np.array_equal(one.x, other.x) and np.array_equal(one.y, other.y)


def nearest_centre_accuracy(data: Data) -> float:
    """Accuracy of a linear model: the test samples are classified by the nearest class mean of the training samples."""
    x, test = (samples.x.reshape(len(samples), -1) for samples in (data.train, data.test))
    means = np.stack([x[data.train.y == label].mean(axis=0) for label in range(data.classes)])
    guesses = np.argmin((means**2).sum(axis=1) - 2 * test @ means.T, axis=1)
    return float((guesses == data.test.y).mean())


def test_every_registered_name_is_a_data_set_class():
    assert set(CASES) <= set(DATASETS)
    for name, target in DATASETS.items():
        module, _, attribute = target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert callable(found.load), name
        assert name not in CASES or found is type(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_data_sets_conform(name):
    data = CASES[name].load(seed=3)
    for samples in (data.train, data.test):
        assert samples.x.dtype == np.float32
        assert samples.y.dtype == np.int64
        assert samples.x.shape == (len(samples), *data.shape)
        assert np.isfinite(samples.x).all()
        assert samples.y.min() == 0
        assert samples.y.max() == data.classes - 1
        assert not samples.x.flags.writeable
        assert not samples.y.flags.writeable
    again = CASES[name].load(seed=3)
    assert same(data.train, again.train)
    assert same(data.test, again.test)


def test_samples_need_a_target_for_each_input():
    with pytest.raises(ValueError, match="3 inputs and 2 targets"):
        Samples(np.zeros((3, 4), np.float32), np.zeros(2, np.int64))


def test_digits_equal_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    theirs = load_digits()
    data = Digits().load(seed=0)
    ours = np.concatenate([data.train.x, data.test.x]) * 16
    assert data.shape == (64,)
    assert data.classes == 10
    assert sorted(map(bytes, ours.astype(np.uint8))) == sorted(map(bytes, theirs.data.astype(np.uint8)))
    assert (data.train.x.min(), data.train.x.max()) == (0.0, 1.0)


@pytest.mark.parametrize("fraction", [0.001, 0.2, 0.5, 0.999])
def test_digits_are_split_evenly_within_each_class_for_every_seed(fraction):
    first, second = (Digits(fraction).load(seed) for seed in (0, 1))
    assert same(first.test, second.test)
    train, test = (np.bincount(samples.y, minlength=10) for samples in (first.train, first.test))
    assert train.min() >= 1
    assert test.min() >= 1
    assert np.abs(test - fraction * (train + test)).max() <= 1


def test_without_scikit_learn_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        Digits().load(seed=0)


def test_the_error_names_a_digits_file_that_cannot_be_read(monkeypatch, tmp_path):
    spec = importlib.util.find_spec("sklearn")
    monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match=r"digits\.csv\.gz"):
        Digits().load(seed=0)


def test_data_can_be_imported_without_torch_or_scikit_learn():
    program = (
        "import sys, shoal.data, shoal.models\n"
        "from shoal.data.digits import Digits; from shoal.data.synthetic import Synthetic\n"
        "Digits().load(0); Synthetic().load(0)\n"
        "print(sorted({'torch', 'sklearn', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_synthetic_data_have_the_requested_shape_and_number():
    data = Synthetic(shape=(2, 5, 7), classes=3, samples=31, test_samples=11).load(seed=0)
    assert data.train.x.shape == (31, 2, 5, 7)
    assert data.test.x.shape == (11, 2, 5, 7)
    assert sorted(np.bincount(data.train.y)) == [10, 10, 11]


def test_another_seed_gives_different_synthetic_data():
    first, second = (Synthetic().load(seed) for seed in (0, 1))
    assert not same(first.train, second.train)


def test_the_test_set_does_not_depend_on_the_number_of_training_samples():
    first, second = (Synthetic(samples=samples).load(seed=0) for samples in (10, 1000))
    assert same(first.test, second.test)


def test_synthetic_data_do_not_depend_on_the_chunk_size(monkeypatch):
    default = Synthetic().load(seed=0)
    monkeypatch.setattr("shoal.data.synthetic.CHUNK_VALUES", 77)
    assert same(Synthetic().load(seed=0).train, default.train)


def test_noise_is_the_standard_deviation_around_the_centres():
    still, noisy = (Synthetic(samples=5000, noise=noise).load(seed=0) for noise in (0.0, 0.7))
    noise = noisy.train.x - still.train.x
    assert len(np.unique(still.train.x, axis=0)) == 10
    assert noise.std() == pytest.approx(0.7, rel=0.01)
    assert noise.mean() == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("shape", [(32,), (784,), (1, 28, 28), (3, 32, 32)], ids=str)
def test_synthetic_data_are_learnable_but_not_trivial(shape):
    assert 0.6 < nearest_centre_accuracy(Synthetic(shape=shape).load(seed=1)) < 0.98
    assert nearest_centre_accuracy(Synthetic(shape=shape, noise=0.1).load(seed=1)) == 1.0
    assert nearest_centre_accuracy(Synthetic(shape=shape, noise=20.0).load(seed=1)) < 0.4
