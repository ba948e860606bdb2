"""CIFAR is read from any packing without running pickled code; errors name the file; no partial cache stays."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data import store
from shoal.data.cifar import Cifar10, Cifar100
from shoal.data.decoded import cache_folder
from shoal.data.partitions import Iid
from shoal.data.pickles import read_pickle
from shoal.errors import DataError

REAL = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parent.parent / "../shared/data")
CACHE = os.environ.get("SHOAL_CACHE")
NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
ROWS = 12


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def batch(seed: int, key: str = "labels", classes: int = 10, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    made = {
        "batch_label": f"batch {seed}",
        key: rng.integers(classes, size=ROWS).tolist(),
        "data": rng.integers(256, size=(ROWS, 3072), dtype=np.uint8),
        "filenames": [f"{i}.png" for i in range(ROWS)],
    }
    return {**made, **changes}


def batches(**changes: Any) -> dict[str, bytes]:
    """Tiny CIFAR-10 files; `changes` apply to the third file."""
    return {name: pickle.dumps(batch(i, **(changes if i == 2 else {})), 2) for i, name in enumerate(NAMES)}


def tar(path: Path, files: Mapping[str, bytes], folder: str = "cifar-10-batches-py") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    packing = {"gz": "gz", "tgz": "gz", "xz": "xz", "bz2": "bz2"}.get(path.name.rpartition(".")[2], "")
    with tarfile.open(path, f"w:{packing}") as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def nothing_cached() -> bool:
    return not cache_folder().exists() or not list(cache_folder().iterdir())


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-batches-py.tar.xz", "cifar-10.tgz",
                                  "cifar-10.tar.bz2", "cifar-10.tar"])  # fmt: skip
def test_any_packing_gives_the_same_images(name: str, tmp_path: Path) -> None:
    shuffled = dict(reversed(batches().items()))
    tar(tmp_path / "data/cifar-10" / name, {"readme.html": b"hello", **shuffled})
    data = Cifar10().load(seed=0)
    made = [batch(i) for i in range(6)]
    assert np.array_equal(data.train.x, np.concatenate([b["data"] for b in made[:5]]).reshape(-1, 3, 32, 32))
    assert data.train.y.tolist() == [label for b in made[:5] for label in b["labels"]]
    assert np.array_equal(data.test.x, made[5]["data"].reshape(-1, 3, 32, 32))
    assert data.test.y.tolist() == made[5]["labels"]
    assert (data.classes, data.task, data.shape) == (10, "classification", (3, 32, 32))
    assert (data.train.x.dtype, data.train.y.dtype) == (np.uint8, np.int64)
    assert not data.train.x.flags.writeable


@pytest.mark.parametrize("inner", ["cifar-10-batches-py", "."])
def test_an_unpacked_folder_is_accepted(inner: str, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / inner
    folder.mkdir(parents=True)
    for name, content in batches().items():
        (folder / name).write_bytes(content)
    assert len(Cifar10(tmp_path / "elsewhere").load(0).train) == 5 * ROWS
    assert len(Cifar10(folder).load(0).train) == 5 * ROWS


def test_pickles_of_python_2_and_3_give_the_same_data() -> None:
    for protocol in range(5):
        found = read_pickle(pickle.dumps(batch(0), protocol), "here")
        assert np.array_equal(found.get("data", found.get(b"data")), batch(0)["data"])
    # As Python 2 wrote them: byte strings, and the array's content in one.
    data = bytes(range(256)) * 12
    old = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01M\x00\x01K\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<i", len(data)) + data + b"tbu."
    )
    assert read_pickle(old, "here")[b"data"].tobytes() == data


def test_cifar_100_has_its_fine_labels(tmp_path: Path) -> None:
    files = {n: pickle.dumps(batch(i, "fine_labels", 100, coarse_labels=[0] * ROWS), 2)
             for i, n in enumerate(("train", "test"))}  # fmt: skip
    tar(tmp_path / "data/cifar-100/cifar-100-python.tar.gz", files, "cifar-100-python")
    data = Cifar100().load(seed=0)
    assert data.classes == 100
    assert data.train.y.tolist() == batch(0, "fine_labels", 100)["fine_labels"]
    assert data.test.x.shape == (ROWS, 3, 32, 32)


def test_scaling_is_by_channel_or_to_one(tmp_path: Path) -> None:
    path = tar(tmp_path / "cifar.tar", batches())
    normal, plain = Cifar10(path).load(0).scaling, Cifar10(path, normalize=False).load(0).scaling
    assert normal is not None
    assert plain is not None
    assert len(normal.mean) == len(normal.std) == 3
    assert (plain.mean, plain.std) == ((0.0,), (255.0,))


def test_decoded_data_are_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tar(tmp_path / "cifar.tar", batches())
    first = Cifar10(path).load(0)
    monkeypatch.setattr("shoal.data.cifar.read_pickle", None)
    assert np.array_equal(Cifar10(path).load(0).train.x, first.train.x)
    assert isinstance(first.train.x, np.memmap)
    assert [p.name for p in path.parent.iterdir() if "cifar" in p.name] == ["cifar.tar"]  # nothing beside the source


def test_the_error_of_missing_data_names_the_download_command(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"^dataset 'cifar10': cifar-10-python\.tar\.gz is not in .*; 'shoal data fetch cifar10'.*\n.*named",
    ):
        Cifar10().load(0)
    (tmp_path / "data/cifar-10").mkdir(parents=True)
    (tmp_path / "data/cifar-10/cifar-10-python.tar.gz.part").write_bytes(b"half")
    with pytest.raises(DataError, match="shoal data fetch cifar10"):
        Cifar10().load(0)


def test_the_error_of_a_wrong_path_names_what_the_folder_must_contain_and_how_to_get_it(tmp_path: Path) -> None:
    wanted = r"expected a folder that contains cifar-10-python\.tar\.gz"
    fetched = rf"'shoal data fetch cifar10' downloads it to {tmp_path}/data/cifar-10; to use this copy, remove the path"
    with pytest.raises(DataError, match=rf"^dataset 'cifar10': {tmp_path}/absent does not exist; {wanted}\. {fetched}"):
        Cifar10(tmp_path / "absent").load(0)
    with pytest.raises(DataError, match=rf"tar\.gz is not in {tmp_path}; put it there\. {fetched}\n.*data_batch_1\.$"):
        Cifar10(tmp_path).load(0)
    tar(tmp_path / "data/cifar-10/cifar-10.tar.xz", batches())
    with pytest.raises(DataError, match=rf"did you mean the path {tmp_path}/data/cifar-10\?"):
        Cifar10(tmp_path / "data").load(0)
    (tmp_path / "notes.txt").write_text("my notes")
    with pytest.raises(
        DataError, match=r"expected a tar with any compression\. If it is the right file, fetch it again"
    ):
        Cifar10(tmp_path / "notes.txt").load(0)


@pytest.mark.parametrize("packing", ["tar", "tar.gz", "tar.xz", "tar.bz2"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.97])
def test_a_truncated_archive_is_rejected_and_leaves_nothing(packing: str, share: float, tmp_path: Path) -> None:
    path = tar(tmp_path / f"cifar.{packing}", batches())
    content = path.read_bytes()
    end = content.rindex(b"data") if packing == "tar" else len(content)
    path.write_bytes(content[: int(share * end)])
    with pytest.raises(DataError, match=f"cifar.{packing}"):
        Cifar10(path).load(0)
    assert nothing_cached()
    assert not next(store.verify("cifar10", path)).valid


@pytest.mark.parametrize(
    ("changes", "expected_error"),
    [
        ({"labels": [*range(10), 10, 0]}, r"data_batch_3: the label of image 10 is 10; expected 0 to 9"),
        ({"labels": [-1] * ROWS}, r"the label of image 0 is -1"),
        ({"labels": ["1"] * ROWS}, r"the label of image 0 is '1'; expected 0 to 9"),
        ({"labels": [1]}, r"12 images and 1 labels"),
        ({"labels": None}, r"no list of labels"),
        ({"data": np.zeros((ROWS, 3071), np.uint8)}, r"data is of shape \(12, 3071\)"),
        ({"data": np.zeros((0, 3072), np.uint8)}, r"data is of shape \(0, 3072\)|__builtin__\.bytes"),
        ({"data": [1, 2]}, r"data is missing"),
        ({"data": np.zeros((ROWS, 3072), np.float32)}, r"an array of another type than bytes"),
        ({"data": np.array([print], object)}, r"data_batch_3: the pickle names builtins\.print|__builtin__\.print"),
    ],
)
def test_errors_name_the_file_and_batch(changes: dict[str, Any], expected_error: str, tmp_path: Path) -> None:
    path = tar(tmp_path / "cifar.tar", batches(**changes))
    with pytest.raises(DataError, match=expected_error) as caught:
        Cifar10(path).load(0)
    assert str(path) in str(caught.value)
    assert nothing_cached()


def test_the_error_names_a_missing_batch(tmp_path: Path) -> None:
    files = batches()
    del files["data_batch_4"]
    with pytest.raises(DataError, match=r"data_batch_4 missing"):
        Cifar10(tar(tmp_path / "cifar.tar", files)).load(0)


def test_fewer_samples_than_nodes_are_rejected(tmp_path: Path) -> None:
    data = Cifar10(tar(tmp_path / "cifar.tar", batches())).load(0)
    with pytest.raises(DataError, match="61 nodes share 60 samples"):
        Iid().split(data.labels, 61, np.random.default_rng(0))


# Pickles that call functions


class Calls:
    """An object whose pickle calls `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def calls(mark: Path) -> dict[str, bytes]:
    shell = f"touch {mark}"
    return {
        "os.system": pickle.dumps(Calls(os.system, shell)),
        "in the data": pickle.dumps(batch(0, data=Calls(os.system, shell)), 2),
        "in a list of a list": pickle.dumps({"labels": [[Calls(os.system, shell)]]}),
        "as a key": pickle.dumps({Calls(os.system, shell): 1}),
        "builtins.eval": pickle.dumps(Calls(eval, f"open({str(mark)!r}, 'w')")),
        "builtins.open": pickle.dumps(Calls(open, str(mark), "w")),
        "builtins.getattr": pickle.dumps(Calls(getattr, "x", "upper")),
        "protocol 0": b"cposix\nsystem\n(S'" + shell.encode() + b"'\ntR.",
        "inst": b"(S'" + shell.encode() + b"'\niposix\nsystem\n.",
        "obj": b"(cposix\nsystem\nS'" + shell.encode() + b"'\no.",
        "a dotted name": b"\x80\x04\x8c\x05numpy\x8c\x14ndarray.__init__.sub\x93.",
        "a name of numpy": b"cnumpy\nload\n(S'" + str(mark).encode() + b"'\ntR.",
        "numpy's own way out": b"cnumpy.testing._private.utils\nrunstring\n(S'1'\n}tR.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"Pos.system\n.",
        "another class of array": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS'b'\ntR.",
        "another codec": b"c_codecs\nencode\n(Vabc\nVrot13\ntR.",
        "attributes of what is admitted": b"c_codecs\nencode\n(dS'x'\nI1\nsb.",
        "attributes of the array's class": b"cnumpy\nndarray\n(N(dS'__setstate__'\nI1\nstb.",
        "a huge array": b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.",
        "an endless frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "nothing": b"",
        "no pickle": b"hello",
        "no array content": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R.",
    }


@pytest.mark.parametrize("kind", calls(Path("x")))
def test_a_pickle_with_other_content_is_rejected_and_runs_nothing(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    before = dict(os.environ)
    with pytest.raises(DataError, match=r"^here: "):
        read_pickle(calls(mark)[kind], "here")
    path = tar(tmp_path / "cifar.tar", {**batches(), "data_batch_2": calls(mark)[kind]})
    with pytest.raises(DataError, match="data_batch_2"):
        Cifar10(path).load(0)
    assert not mark.exists()
    assert dict(os.environ) == before
    assert nothing_cached()
    assert np.array_equal(read_pickle(pickle.dumps(batch(0), 2), "here")["data"], batch(0)["data"])  # unharmed


def test_nothing_is_imported_for_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"evil\.attack"):
        read_pickle(b"cevil\nattack\n.", "here")


# Verification


def test_a_changed_batch_is_invalid(tmp_path: Path) -> None:
    verification = next(store.verify("cifar10", tar(tmp_path / "cifar.tar", batches())))
    assert not verification.valid
    assert "data_batch_1" in verification.reason


def test_the_real_cifar_10_is_complete_balanced_and_as_published(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    archives = sorted((REAL / "cifar-10").glob("*.tar*")) if REAL.is_dir() else []
    if not archives:
        pytest.skip("no CIFAR-10 in SHOAL_DATA or ../shared/data; 'shoal data fetch cifar10' gets it")
    # Decoding takes long, so the tests keep the result in their own cache.
    assert pytestconfig.cache is not None
    monkeypatch.setenv("SHOAL_CACHE", CACHE or str(pytestconfig.cache.mkdir("shoal")))
    data = Cifar10(archives[0]).load(seed=0)
    assert data.train.x.shape == (50_000, 3, 32, 32)
    assert data.test.x.shape == (10_000, 3, 32, 32)
    assert np.bincount(data.train.y).tolist() == [5000] * 10
    assert np.bincount(data.test.y).tolist() == [1000] * 10
    published = store.publisher("cifar10").files[0].contents
    x, y = (np.concatenate(parts) for parts in ((data.train.x, data.test.x), (data.train.y, data.test.y)))
    for i, name in enumerate(NAMES):
        rows = slice(10_000 * i, 10_000 * (i + 1))
        records = np.concatenate([y[rows].astype(np.uint8)[:, None], x[rows].reshape(-1, 3072)], axis=1)
        assert hashlib.md5(records.tobytes()).hexdigest() == published[name]
    assert data.scaling is not None
    pixels = data.train.x[::10].astype(np.float64)
    assert np.allclose(pixels.mean(axis=(0, 2, 3)), data.scaling.mean, atol=2)
    assert np.allclose(pixels.std(axis=(0, 2, 3)), data.scaling.std, atol=2)
