"""MNIST and Fashion-MNIST: idx files, gzipped or not; invalid headers are rejected."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from shoal.data import store
from shoal.data.decoded import cache_folder
from shoal.data.idx import FashionMnist, Mnist, read_idx
from shoal.data.publishers import PUBLISHERS
from shoal.errors import DataError

REAL = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parent.parent / "../shared/data")
STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def arrays(train: int = 20, test: int = 10) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {}
    for stem, count in zip(STEMS, (train, train, test, test), strict=True):
        shape = (count, 28, 28) if "images" in stem else (count,)
        made[stem] = rng.integers(256 if "images" in stem else 10, size=shape, dtype=np.uint8)
    return made


def written(folder: Path, packed: bool = True, **changes: bytes) -> Path:
    """Write tiny files; `changes` replaces the content of some files, by number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (stem, array) in enumerate(arrays().items()):
        content = changes.get(f"file{number}", idx(array))
        if packed:
            (folder / f"{stem}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / stem).write_bytes(content)
    return folder


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("cls", "name"), [(Mnist, "mnist"), (FashionMnist, "fashion-mnist")])
def test_images_and_labels_equal_those_of_the_files(cls: type[Mnist], name: str, packed: bool, tmp_path: Path) -> None:
    written(tmp_path / "data" / name, packed)
    made = list(arrays().values())
    for data in (cls().load(0), cls(path=tmp_path / "data" / name).load(0)):
        assert np.array_equal(data.train.x, made[0][:, None])
        assert np.array_equal(data.train.y, made[1])
        assert np.array_equal(data.test.x, made[2][:, None])
        assert np.array_equal(data.test.y, made[3])
        assert (data.classes, data.shape, data.train.x.dtype, data.train.y.dtype) == (10, (1, 28, 28), "uint8", "int64")
        assert data.scaling is not None
        assert len(data.scaling.mean) == 1
    plain = cls(normalize=False).load(0).scaling
    assert plain is not None
    assert (plain.mean, plain.std) == ((0.0,), (255.0,))


def test_names_with_a_dot_are_accepted(tmp_path: Path) -> None:
    folder = written(tmp_path / "data/mnist", packed=False)
    for file in list(folder.iterdir()):
        file.rename(folder / file.name.replace("-idx", ".idx"))
    assert len(Mnist().load(0).train) == 20


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    folder = written(tmp_path / "data/mnist")
    (folder / f"{STEMS[3]}.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz.*shoal data fetch mnist"):
        Mnist().load(0)


def test_the_path_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected the folder of the four idx files"):
        Mnist(written(tmp_path / "x") / f"{STEMS[0]}.gz").load(0)


images, labels = idx(arrays()[STEMS[0]]), idx(arrays()[STEMS[1]])


@pytest.mark.parametrize(
    ("number", "content", "expected_error"),
    [
        (0, b"", r"byte 0: it starts with no bytes; expected 00 00 08 03"),
        (0, b"\x89PNG" + images[4:], r"byte 0: it starts with 89 50 4e 47"),
        (0, b"\0\0\x0d\x03" + images[4:], r"byte 0: it starts with 00 00 0d 03"),
        (0, labels, r"expected 00 00 08 03, an idx file of bytes with 3 dimensions"),
        (1, images, r"expected 00 00 08 01, an idx file of bytes with 1 dimension"),
        (0, images[:9], r"it ends within its header, after 9 of 16 bytes"),
        (0, images[:-1], r"byte 4: the header declares 20 × 28 × 28 = 15,680 bytes, but 15,679 follow"),
        (0, images + b"x", r"15,681 follow"),
        (0, b"\0\0\x08\x03" + b"\xff" * 12 + images[16:], r"4294967295 × 4294967295 × 4294967295"),
        (1, idx(np.zeros(19)), r"20 images and .*train-labels.* 19 labels"),
        (1, idx(np.array([3] * 19 + [10])), r"the label of image 19 is 10; expected 0 to 9"),
        (2, idx(np.zeros((10, 14, 14))), r"images of 28 × 28, and .*t10k-images.* has 14 × 14"),
        (0, idx(np.zeros((0, 28, 28))), r"0 images"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_the_error_names_a_file_with_an_invalid_header(
    number: int, content: bytes, expected_error: str, packed: bool, tmp_path: Path
) -> None:
    written(tmp_path / "data/mnist", packed, **{f"file{number}": content})
    with pytest.raises(DataError, match=expected_error) as caught:
        Mnist().load(0)
    assert STEMS[number] in str(caught.value)
    assert not cache_folder().exists() or not list(cache_folder().iterdir())


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_the_error_names_a_truncated_or_damaged_gz(share: float, tmp_path: Path) -> None:
    file = written(tmp_path / "data/mnist") / f"{STEMS[0]}.gz"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=rf"{STEMS[0]}\.gz: damaged or incomplete"):
        Mnist().load(0)
    file.write_bytes(content[:200] + b"\0\0\0\0" + content[204:])
    with pytest.raises(DataError, match=STEMS[0]):
        Mnist().load(0)
    assert not next(store.verify("mnist")).valid


def test_the_real_fashion_mnist_is_balanced_and_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(REAL))
    try:
        store.sources("fashion-mnist")
    except DataError:
        pytest.skip("no Fashion-MNIST in SHOAL_DATA, ../shared/data or Debian's package dataset-fashion-mnist")
    data = FashionMnist().load(0)
    assert data.train.x.shape == (60_000, 1, 28, 28)
    assert np.bincount(data.train.y).tolist() == [6000] * 10
    assert np.bincount(data.test.y).tolist() == [1000] * 10
    assert data.scaling is not None
    assert data.train.x[::10].mean() == pytest.approx(data.scaling.mean[0], abs=2)
    assert data.train.x[::10].std() == pytest.approx(data.scaling.std[0], abs=2)
    verifications = list(store.verify("fashion-mnist"))
    assert len(verifications) == 4
    assert all(verification.valid for verification in verifications), verifications


def test_repacked_files_are_verified_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses
    import hashlib

    folder = written(tmp_path / "data/mnist")
    known = PUBLISHERS["mnist"]
    files = tuple(
        dataclasses.replace(file, contents={stem: hashlib.md5(idx(array)).hexdigest()})
        for file, (stem, array) in zip(known.files, arrays().items(), strict=True)
    )
    monkeypatch.setitem(PUBLISHERS, "mnist", dataclasses.replace(known, files=files))
    assert [v.reason.split(";")[0] for v in store.verify("mnist")] == ["packed differently"] * 4
    assert all(v.valid for v in store.verify("mnist"))
    (folder / f"{STEMS[2]}.gz").write_bytes(gzip.compress(idx(np.zeros((10, 28, 28)))))
    assert [v.valid for v in store.verify("mnist")] == [True, True, False, True]


def test_both_engines_give_the_same_models(tmp_path: Path) -> None:
    from shoal.experiment import Experiment

    written(tmp_path / "data/fashion-mnist")
    table = {
        "name": "tiny",
        "nodes": 3,
        "algorithm": {"name": "dpsgd", "rounds": 2},
        "topology": {"name": "ring"},
        "dataset": {"name": "fashion-mnist", "partition": {"name": "iid"}},
        "training": {"batch_size": 4},
        "evaluation": {"every": 1},
        "simulation": {"batching": "off"},
    }
    runs = [Experiment.from_table({**table, "engine": e}).run(tmp_path / e) for e in ("simulation", "processes")]
    assert [run.summary["status"] for run in runs] == ["completed"] * 2
    assert runs[0].summary["digest"] == runs[1].summary["digest"]
    assert runs[0].summary["accuracy"] == runs[1].summary["accuracy"]


def test_read_idx_inverts_writing(tmp_path: Path) -> None:
    for array in (np.arange(7), np.arange(24).reshape(2, 3, 4), np.zeros((3, 0, 2))):
        (tmp_path / "x").write_bytes(idx(array))
        assert np.array_equal(read_idx(tmp_path / "x", array.ndim), array)
