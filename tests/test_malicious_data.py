"""Malicious data files are rejected in little memory."""

from __future__ import annotations

import gzip
import pickle
import re
import resource
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.data import Dataset, store
from shoal.data.arrays import ArrayFiles
from shoal.data.cifar import Cifar10
from shoal.data.decoded import cache_folder
from shoal.data.idx import Mnist
from shoal.data.leaf import Femnist, LeafSynthetic, Reddit, Sent140, Shakespeare
from shoal.data.movielens import Movielens
from shoal.errors import DataError

pytestmark = pytest.mark.usefixtures("data_folders")


# Malicious files


DEEP = "[" * 100_000 + "]" * 100_000


def leaf(folder: Path, x: str, y: str) -> Path:
    for split in ("train", "test"):
        (folder / split).mkdir()
        text = f'{{"users": ["u"], "num_samples": [1], "user_data": {{"u": {{"x": [{x}], "y": [{y}]}}}}}}'
        (folder / split / "a.json").write_text(text)
    return folder


def reddit(folder: Path, vocabulary: str) -> Reddit:
    (folder / "v.json").write_text(vocabulary)
    return Reddit(leaf(folder, '[["a"]]', '{"target_tokens": [["a"]]}'), vocab=folder / "v.json")


def counts(folder: Path, count: str) -> Reddit:
    return Reddit(leaf(folder, '[["a"]]', f'{{"target_tokens": [["a"]], "count_tokens": {count}}}'))


def batches(folder: Path, content: bytes) -> Cifar10:
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(content)
    return Cifar10(folder)


def deep_label() -> bytes:
    data = pickle.dumps(np.zeros((1, 3072), np.uint8), 2)[2:-1]
    nested = b"]" * 100_000 + b"a" * 99_999
    return b"\x80\x02}(X\x04\x00\x00\x00data" + data + b"X\x06\x00\x00\x00labels]" + nested + b"au."


def tar(folder: Path, **headers: str) -> Cifar10:
    member = tarfile.TarInfo("data_batch_1")
    member.pax_headers = {f"GNU.sparse.{name}": value for name, value in headers.items()}
    (folder / "c.tar").write_bytes(member.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    return Cifar10(folder / "c.tar")


def long_header(folder: Path) -> Cifar10:
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, 8 << 30
    (folder / "c.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    return Cifar10(folder / "c.tar")


def images(folder: Path, side: int, values: int) -> Mnist:
    for split in ("train", "t10k"):
        content = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, side, side) + bytes(values)
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 2) + b"\0\1")
    return Mnist(folder)


def npy(shape: str, content: bytes = b"") -> bytes:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def npz(folder: Path, x: bytes) -> Path:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("x.npy", x)
        archive.writestr("y.npy", npy("(10,)", bytes(10)))
    return folder / "a.npz"


def ratings(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "ml-latest-small.zip", "w") as archive:
        archive.writestr("ratings.csv", "userId,movieId,rating\n" + "1,1,4\n" * 10)
    return folder / "ml-latest-small.zip"


def changed(file: Path, flag: int = 0, method: int | None = None) -> Path:
    """A zip whose headers contain a false flag or compression method."""
    content = bytearray(file.read_bytes())
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in re.finditer(re.escape(signature), bytes(content)):
            content[found.start() + place] |= flag
            if method is not None:
                content[found.start() + place + 2] = method
    file.write_bytes(content)
    return file


HOSTILE: dict[str, Callable[[Path], Dataset]] = {
    "deep inputs": lambda f: Shakespeare(leaf(f, DEEP, '"a"')),
    "deep labels": lambda f: Femnist(leaf(f, str([0.0] * 784), DEEP)),
    "deep after quotes": lambda f: Shakespeare(leaf(f, '"\\\\\\"[", ' + DEEP, '"a"')),
    "numbers as text": lambda f: LeafSynthetic(leaf(f, '["1.5", 2]', "1")),
    "numbers as truth": lambda f: LeafSynthetic(leaf(f, "[true, 2]", "1")),
    "huge number": lambda f: LeafSynthetic(leaf(f, f"[{10**400}, 2]", "1")),
    "number of 5000 digits": lambda f: LeafSynthetic(leaf(f, f"[{'9' * 5000}, 2]", "1")),
    "huge label": lambda f: LeafSynthetic(leaf(f, "[1, 2]", str(10**30))),
    "sentiment as a list": lambda f: Sent140(leaf(f, '"good"', "[1]")),
    "sentiment as truth": lambda f: Sent140(leaf(f, '"good"', "true")),
    "one number as counts": lambda f: counts(f, "5"),
    "text as counts": lambda f: counts(f, '["0"]'),
    "deep vocabulary": lambda f: reddit(f, DEEP),
    "vocabulary beyond int32": lambda f: reddit(f, f'{{"<PAD>": 0, "<UNK>": 1, "a": {2**31 + 5}}}'),
    "deep label of an image": lambda f: batches(f, deep_label()),
    "pickle with a huge memo": lambda f: batches(f, b"\x80\x02]r\xff\xff\xff\x7f."),
    "sparse tar": lambda f: tar(f, major="0", minor="1", map="0,0", size=str(1 << 42), realsize=str(1 << 42)),
    "tar with a wrong map": lambda f: tar(f, major="0", minor="1", map="x,y", size="5", realsize="5"),
    "tar with a long header": long_header,
    "gzip bomb": lambda f: images(f, 2, 50_000_000),
    "images without pixels": lambda f: images(f, 0, 0),
    "npz that promises too much": lambda f: ArrayFiles(npz(f, npy("(1099511627776, 2)"))),
    "npz without numbers": lambda f: ArrayFiles(npz(f, npy("(10, 0)"))),
    "npz with a deep header": lambda f: ArrayFiles(npz(f, npy("(" * 5000))),
    "npz encrypted": lambda f: ArrayFiles(changed(npz(f, npy("(10, 1)", bytes(10))), flag=1)),
    "npz compressed otherwise": lambda f: ArrayFiles(changed(npz(f, npy("(10, 1)", bytes(10))), method=99)),
    "zip encrypted": lambda f: Movielens(path=changed(ratings(f), flag=1)),
    "zip compressed otherwise": lambda f: Movielens(path=changed(ratings(f), method=99)),
    "zip damaged": lambda f: Movielens(path=changed(ratings(f), method=8)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_malicious_files_are_rejected_in_little_memory(kind: str, tmp_path: Path) -> None:
    dataset = HOSTILE[kind](tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError) as caught:
        dataset.load(seed=0)
    assert len(str(caught.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB


def test_one_long_word_does_not_widen_all_words(tmp_path: Path) -> None:
    text = " ".join(["a" * 1_000_000, *(f"w{i}" for i in range(3000))])
    assert Sent140(leaf(tmp_path, f'"{text}"', "1")).load(seed=0).sizes == (3002,)
    assert sum(file.stat().st_size for file in cache_folder().rglob("*")) < 2_000_000


@pytest.mark.parametrize("change", [{"flag": 1}, {"method": 99}, {"method": 8}])
def test_a_zip_that_cannot_be_unpacked_is_invalid(change: dict[str, int], tmp_path: Path) -> None:
    assert not next(store.verify("movielens", changed(ratings(tmp_path), **change))).valid
