"""CIFAR-10 and CIFAR-100: 60,000 colour photographs of 32×32 pixels.

Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images". Read from the "python version" that
https://www.cs.toronto.edu/~kriz/cifar.html offers: in its archive, in a repacked archive, or in a folder.
"""

from __future__ import annotations

import hashlib
import reprlib
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shoal.data import store
from shoal.data.dataset import Data, Samples, Scaling
from shoal.data.decoded import load_decoded
from shoal.data.npy_writer import NpyWriter
from shoal.data.pickles import read_pickle
from shoal.errors import DataError

VERSION = 1
"""The version of the decoded variant. Increase it if the output of `_decode` changes."""
SHAPE = (3, 32, 32)
PIXELS = 3072
MAX_BATCH = 1 << 28
"""Bytes of a batch. The largest, the training set of CIFAR-100, has 155 million."""
MAX_HEADER = 1 << 20
"""Bytes of the metadata of a file in a tar: a long name, …"""


@dataclass(frozen=True)
class _Variant:
    """The differences between the two data sets."""

    name: str
    classes: int
    train: tuple[str, ...]
    test: str
    labels: str
    scaling: Scaling
    """Mean and standard deviation of each channel of the training pixels."""


def _scaling(mean: Sequence[float], std: Sequence[float]) -> Scaling:
    return Scaling(tuple(255 * v for v in mean), tuple(255 * v for v in std))


CIFAR10 = _Variant(
    "cifar10", 10, tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "labels",
    _scaling((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)  # fmt: skip
CIFAR100 = _Variant(
    "cifar100", 100, ("train",), "test", "fine_labels",
    _scaling((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)  # fmt: skip


@dataclass(frozen=True)
class Cifar10:
    """Photographs of 3×32×32 pixels in 10 classes, 50,000 for training and 10,000 for testing.

    `path` is the archive, a tar with any compression, or a folder; by default the folder cifar-10 below SHOAL_DATA.
    With `normalize`, each channel has mean 0 and standard deviation 1; without it, pixels range from 0 to 1.
    """

    path: Path | None = None
    normalize: bool = True

    def load(self, seed: int) -> Data:
        return _load(CIFAR10, self.path, self.normalize)


@dataclass(frozen=True)
class Cifar100:
    """Photographs of 3×32×32 pixels in 100 classes (the fine ones), 50,000 for training and 10,000 for testing.

    `path` is the archive, a tar with any compression, or a folder; by default the folder cifar-100 below SHOAL_DATA.
    With `normalize`, each channel has mean 0 and standard deviation 1; without it, pixels range from 0 to 1.
    """

    path: Path | None = None
    normalize: bool = True

    def load(self, seed: int) -> Data:
        return _load(CIFAR100, self.path, self.normalize)


def records(source: Path) -> Iterator[tuple[str, str]]:
    """Yield the md5 of each batch of CIFAR-10 in the format of the binary version: label and pixels of each image."""
    for name, content in _members(_folder_or_tar(source), (*CIFAR10.train, CIFAR10.test)):
        x, y = _batch(CIFAR10, content, f"{source}: {name}")
        table = np.concatenate([y.astype(np.uint8)[:, None], x], axis=1)
        yield name, hashlib.md5(table.tobytes(), usedforsecurity=False).hexdigest()


def pickles(source: Path) -> Iterator[tuple[str, str]]:
    """Yield the md5 of each batch of CIFAR-100, as in the archive."""
    for name, content in _members(_folder_or_tar(source), (*CIFAR100.train, CIFAR100.test)):
        yield name, hashlib.md5(content, usedforsecurity=False).hexdigest()


def _load(variant: _Variant, path: Path | None, normalize: bool) -> Data:
    source = _folder_or_tar(store.sources(variant.name, path)[0])
    names = (*variant.train, variant.test)
    files = [source] if source.is_file() else [source / name for name in names if (source / name).is_file()]
    arrays = load_decoded(variant.name, VERSION, files, lambda folder: _decode(variant, source, folder))
    return Data(
        train=Samples(arrays["train_x"], arrays["train_y"]),
        test=Samples(arrays["test_x"], arrays["test_y"]),
        classes=variant.classes,
        scaling=variant.scaling if normalize else Scaling(),
    )


def _folder_or_tar(found: Path) -> Path:
    """Return what contains the batches: `found`, or its folder if `found` is a batch."""
    return found.parent if found.name in (CIFAR10.train[0], CIFAR100.train[0]) and found.is_file() else found


def _decode(variant: _Variant, source: Path, folder: Path) -> Mapping[str, NDArray[Any]]:
    """Write the pixels to `folder` and return the labels."""
    batches = {
        name: _batch(variant, content, f"{source}: {name}")
        for name, content in _members(source, (*variant.train, variant.test))
    }
    labels = {}
    for split, names in (("train", variant.train), ("test", (variant.test,))):
        parts = [batches.pop(name) for name in names]
        labels[f"{split}_y"] = np.concatenate([y for _, y in parts])
        with NpyWriter(folder / f"{split}_x.npy") as x:
            for pixels, _ in parts:
                x.append(pixels.reshape(-1, *SHAPE))
    return labels


def _batch(variant: _Variant, content: bytes, place: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the pixels, one row per image, and the labels."""
    table = read_pickle(content, place)
    if not isinstance(table, dict):
        raise DataError(f"{place}: a {type(table).__name__}; expected a dictionary of data and {variant.labels}")
    found = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in table.items()}
    x, y = found.get("data"), found.get(variant.labels)
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != PIXELS or not len(x):
        shape = f"of shape {x.shape}" if isinstance(x, np.ndarray) else "missing"
        raise DataError(f"{place}: data is {shape}; expected a row of {PIXELS} bytes for each image")
    if not isinstance(y, list) or len(y) != len(x):
        count = f"{len(y)} {variant.labels}" if isinstance(y, list) else f"no list of {variant.labels}"
        raise DataError(f"{place}: {len(x)} images and {count}; expected a label for each image")
    for row, label in enumerate(y):
        if type(label) is not int or not 0 <= label < variant.classes:
            raise DataError(
                f"{place}: the label of image {row} is {_short(label)}; expected 0 to {variant.classes - 1}"
            )
    return x, np.array(y, np.int64)


def _short(value: Any) -> str:
    """Return a short representation. Strings of Python 2 are read as bytes."""
    return reprlib.repr(value.decode("latin-1") if isinstance(value, bytes) else value)


def _members(source: Path, wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the content of each `wanted` file, in any order. Raises `DataError` if one is missing."""
    missing = set(wanted)
    for name, content in _from_folder(source, wanted) if source.is_dir() else _from_tar(source, missing):
        missing.discard(name)
        yield name, content
    if missing:
        raise DataError(f"{source}: {', '.join(sorted(missing))} missing; expected {', '.join(wanted)}")


def _from_folder(folder: Path, wanted: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for name in wanted:
        if (folder / name).is_file():
            try:
                _check_size(str(folder / name), (folder / name).stat().st_size)
                content = (folder / name).read_bytes()
            except OSError as error:
                raise DataError(f"cannot read {folder / name}: {error.strerror}") from error
            yield name, content


def _check_size(place: str, size: int) -> None:
    if not 0 <= size <= MAX_BATCH:
        raise DataError(f"{place}: {size:,} bytes; expected at most {MAX_BATCH:,} for a batch")


class _Member(tarfile.TarInfo):
    """A member of a tar with a limit on its metadata, which tarfile reads at once."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if not member.isreg() and not 0 <= member.size <= MAX_HEADER:
            raise tarfile.ReadError(f"{member.size:,} bytes of metadata; expected at most {MAX_HEADER:,}")
        return member


def _from_tar(source: Path, missing: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the files from the stream. Nothing is unpacked to disk."""
    after = "the start"
    try:
        with tarfile.open(source, "r|*", bufsize=1 << 20, tarinfo=_Member) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if member.isfile() and name in missing:
                    _check_size(f"{source}: {name}", member.size)
                    opened = archive.extractfile(member)
                    assert opened is not None
                    content = opened.read()
                    if len(content) < member.size:
                        raise EOFError(f"{name} ends after {len(content):,} of {member.size:,} bytes")
                    yield name, content
                after = member.name
                if not missing:
                    return
    except DataError:
        raise
    except Exception as error:  # the headers of a damaged tar may raise anything
        raise DataError(
            f"{source}: damaged or incomplete after {after[:200]} ({error}); expected a tar with any compression. "
            "If it is the right file, fetch it again"
        ) from error
