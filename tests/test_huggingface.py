"""Hugging Face data sets from local folders; no test needs a network."""

from __future__ import annotations

import builtins
import contextlib
import csv
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.data.huggingface import HuggingFace
from shoal.errors import DataError
from shoal.experiment import Experiment

needed = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the library 'datasets' is not installed: shoal[huggingface]"
)


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def saved(folder: Path, train: dict[str, Any], test: dict[str, Any] | None = None, features: Any = None) -> Path:
    import datasets

    splits = {"train": datasets.Dataset.from_dict(train, features=features)}
    if test is not None:
        splits["test"] = datasets.Dataset.from_dict(test, features=features)
    datasets.DatasetDict(splits).save_to_disk(str(folder / "saved"))
    return folder / "saved"


@needed
def test_images_with_named_classes(tmp_path: Path) -> None:
    import datasets
    from PIL import Image

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "owl"])})
    pictures = [Image.new("RGB", (6, 4), (i, 2 * i, 255)) for i in range(6)]
    path = saved(tmp_path, {"image": pictures, "label": [0, 1, 0, 1, 0, 1]},
                 {"image": pictures[:2], "label": [1, 0]}, features)  # fmt: skip
    data = HuggingFace(path=path).load(seed=0)
    assert (data.shape, data.train.x.dtype, data.classes) == ((3, 4, 6), np.uint8, 3)
    assert data.scaling is not None
    assert data.train.x[5, :, 0, 0].tolist() == [5, 10, 255]
    assert HuggingFace(path=path, size=(8, 8)).load(seed=0).shape == (3, 8, 8)
    mixed = saved(tmp_path / "mixed", {"image": [Image.new("L", (2, 2)), Image.new("L", (3, 3))], "label": [0, 1]},
                  {"image": pictures[:1], "label": [0]}, features)  # fmt: skip
    with pytest.raises(DataError, match=r"images differ in size or channels; set dataset\.size = "):
        HuggingFace(path=mixed).load(seed=0)


@needed
def test_texts_with_words_as_classes_and_owners(tmp_path: Path) -> None:
    train = {"text": ["a b b", "b c"], "mood": ["sad", "glad"], "who": ["z", "y"]}
    path = saved(tmp_path, train, {"text": ["c never"], "mood": ["sad"], "who": ["z"]})
    data = HuggingFace(path=path, target="mood", owner="who", vocabulary=4, length=3).load(seed=0)
    assert data.sizes == (4,)  # padding, unknown word, b, a
    assert data.train.x.tolist() == [[3, 2, 2], [2, 1, 0]]
    assert data.test.x.tolist() == [[1, 1, 0]]
    assert (data.train.y.tolist(), data.classes, data.task) == ([1, 0], 2, "classification")
    assert data.train.owner is not None
    assert data.train.owner.tolist() == [0, 1]


@needed
def test_csv_files_with_numbers_and_no_test_split(tmp_path: Path) -> None:
    (tmp_path / "numbers").mkdir()
    with open(tmp_path / "numbers" / "train.csv", "w", newline="") as file:
        csv.writer(file).writerows([["speed", "cost"], *([i, i / 2 + 0.25] for i in range(10))])
    data = HuggingFace(path=tmp_path / "numbers", target="cost", test_fraction=0.3).load(seed=0)
    assert (len(data.train), len(data.test), data.task, data.classes) == (7, 3, "regression", 1)
    assert np.allclose(data.train.y, data.train.x[:, 0] / 2 + 0.25)


@needed
def test_parquet_files_run_in_an_experiment_and_later_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "files").mkdir()
    for split, count in (("train", 40), ("test", 10)):
        table = {"pixels": np.eye(4)[np.arange(count) % 4].tolist(), "label": [i % 4 for i in range(count)]}
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "files" / f"{split}.parquet")
    dataset = {"name": "huggingface", "path": str(tmp_path / "files")}

    def run() -> Any:
        return Experiment(
            nodes=4, algorithm={"name": "dpsgd", "rounds": 20}, topology={"name": "ring"}, dataset=dataset,
            model={"name": "logistic"}, training={"lr": 1.0}, evaluation={"every": 0},
        ).run(tmp_path / "runs")  # fmt: skip

    assert run().summary["accuracy"]["mean"] == 1.0
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert run().status == "completed"


@needed
def test_invalid_options_and_columns_are_rejected(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": [1.0, 2.0], "b": [1.0, 2.0], "label": [0, -1]})
    for options, expected_error in (
        ({"input": "c"}, "no column 'c' of inputs; .*'a', 'b', 'label'"),
        ({}, "no column None of inputs"),
        ({"input": "a", "target": "y"}, "no column 'y'"),
        ({"input": "a"}, "label is -1; expected 0 to"),
        ({"input": "a", "train": "learn"}, "no split 'learn'; it has 'train'"),
        ({"input": "a", "test": "exam"}, "no split 'exam'"),
    ):
        with pytest.raises(DataError, match=expected_error):
            HuggingFace(path=path, test_fraction=0.5, **options).load(seed=0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"cannot be loaded: .*; without a network, set dataset\.path to a folder"):
        HuggingFace(dataset="missing/missing").load(seed=0)


def test_a_name_and_a_path_together_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set either dataset"):
        HuggingFace()
    with pytest.raises(ValueError, match="set either dataset"):
        HuggingFace(dataset="mnist", path=tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        HuggingFace(path=tmp_path / "nowhere").load(seed=0)


def test_without_the_library_the_error_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def import_without_datasets(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", import_without_datasets)
    with pytest.raises(DataError, match=r"pip install 'shoal\[huggingface\]'"):
        HuggingFace(dataset="mnist").load(seed=0)


@needed
@pytest.mark.parametrize("named", ["sly.py", "dataset.py"])
def test_a_script_of_a_data_set_is_never_run(named: str, tmp_path: Path) -> None:
    folder, ran = tmp_path / "sly", tmp_path / "ran"
    folder.mkdir()
    (folder / named).write_text(f"open({str(ran)!r}, 'w').close()\n")
    for split in ("train", "test"):
        (folder / f"{split}.csv").write_text("speed,label\n1.0,0\n2.0,1\n")
    with contextlib.suppress(DataError):  # the library may reject the folder or ignore the script
        HuggingFace(path=folder, input="speed").load(seed=0)
    assert not ran.exists()


def test_a_library_version_that_may_run_scripts_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(__version__="3.6.0"))
    with pytest.raises(DataError, match=r"version 3\.6\.0 .* may run code .* expected 4 or newer; pip install"):
        HuggingFace(path=tmp_path).load(seed=0)
