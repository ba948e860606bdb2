"""MNIST and Fashion-MNIST: 70,000 grey pictures of 28×28 pixels in 10 classes, as idx files.

LeCun, Cortes and Burges 1998, "The MNIST database of handwritten digits"; Xiao, Rasul and Vollgraf 2017,
"Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms".

An idx file is two zero bytes, the type of its values, the number of its dimensions, their sizes as big-endian 32-bit
numbers, and the values. Both data sets have bytes only.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data import store
from shoal.data.dataset import Data, Samples, Scaling
from shoal.data.decoded import decoded
from shoal.errors import DataError

VERSION = 1
"""Of the decoded form: raise it when `_decode` gives something else."""
CLASSES = 10
BYTES = 8
"""The type of values, as idx numbers them."""
GZIPPED = b"\x1f\x8b"


@dataclass(frozen=True)
class Mnist:
    """Handwritten digits of 1×28×28 pixels in 10 classes, 60,000 to train and 10,000 to test.

    `path` is the folder of the four idx files, gzipped or not; without it, the folder mnist below SHOAL_DATA.
    `normalize` gives pixels the mean 0 and the standard deviation 1; without it, they go from 0 to 1.
    """

    path: Path | None = None
    normalize: bool = True

    def load(self, seed: int) -> Data:
        return _load("mnist", self.path, Scaling((255 * 0.1307,), (255 * 0.3081,)) if self.normalize else Scaling())


@dataclass(frozen=True)
class FashionMnist:
    """Pictures of clothes of 1×28×28 pixels in 10 classes, 60,000 to train and 10,000 to test.

    `path` is the folder of the four idx files, gzipped or not; without it, the folder fashion-mnist below SHOAL_DATA,
    or where Debian's package dataset-fashion-mnist puts them.
    `normalize` gives pixels the mean 0 and the standard deviation 1; without it, they go from 0 to 1.
    """

    path: Path | None = None
    normalize: bool = True

    def load(self, seed: int) -> Data:
        scaling = Scaling((255 * 0.2860,), (255 * 0.3530,)) if self.normalize else Scaling()
        return _load("fashion-mnist", self.path, scaling)


def unpacked(source: Path) -> Iterator[tuple[str, str]]:
    """The md5 of an idx file without its compression."""
    yield source.name, hashlib.md5(_content(source), usedforsecurity=False).hexdigest()


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The values of an idx file of bytes, gzipped or not. Raises `DataError` where it is not what its header says."""
    content = _content(path)
    size = 4 + 4 * dimensions
    expected = f"00 00 {BYTES:02x} {dimensions:02x}"
    if content[:4] != bytes((0, 0, BYTES, dimensions)):
        raise DataError(
            f"{path}: byte 0: it begins with {content[:4].hex(' ') or 'nothing'}; expected {expected}, "
            f"an idx file of bytes with {dimensions} dimension{'s' * (dimensions > 1)}"
        )
    if len(content) < size:
        raise DataError(f"{path}: it ends within its header, after {len(content)} of {size} bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:size])
    if len(content) - size != math.prod(shape):
        raise DataError(
            f"{path}: byte 4: the header says {' × '.join(map(str, shape))} = {math.prod(shape):,} bytes, and "
            f"{len(content) - size:,} follow it"
        )
    return np.frombuffer(content, np.uint8, offset=size).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIPPED
        if not packed:
            return path.read_bytes()
        with gzip.open(path) as stream:
            return stream.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged, or cut short ({error}); remove it and fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _load(name: str, path: Path | None, scaling: Scaling) -> Data:
    if path is not None and path.is_file():
        raise DataError(f"dataset {name!r}: path = {str(path)!r} is a file; expected the folder of the four idx files")
    files = store.sources(name, path)
    arrays = decoded(name, VERSION, files, lambda folder: _decode(files))
    return Data(
        train=Samples(arrays["train_x"], arrays["train_y"]),
        test=Samples(arrays["test_x"], arrays["test_y"]),
        classes=CLASSES,
        scaling=scaling,
    )


def _decode(files: Sequence[Path]) -> Mapping[str, NDArray[Any]]:
    """From images and labels to train with, and then those to test with."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, images, labels in (("train", files[0], files[1]), ("test", files[2], files[3])):
        x, y = read_idx(images, 3), read_idx(labels, 1)
        if len(x) != len(y) or not len(x):
            raise DataError(f"{images} has {len(x)} images and {labels} {len(y)} labels; expected a label for each")
        if y.max() >= CLASSES:
            row = int(np.argmax(y >= CLASSES))
            raise DataError(f"{labels}: the label of image {row} is {y[row]}; expected 0 to {CLASSES - 1}")
        arrays |= {f"{split}_x": x[:, None], f"{split}_y": y.astype(np.int64)}
    if arrays["train_x"].shape[1:] != arrays["test_x"].shape[1:]:
        shapes = (" × ".join(map(str, arrays[f"{split}_x"].shape[2:])) for split in ("train", "test"))
        raise DataError("{} has images of {}, and {} of {}; expected the same".format(
            *(v for pair in zip(files[::2], shapes, strict=True) for v in pair)))  # fmt: skip
    return arrays
