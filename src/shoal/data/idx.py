"""MNIST and Fashion-MNIST: 70,000 grey pictures of 28×28 pixels in 10 classes, as idx files.

LeCun, Cortes and Burges 1998, "The MNIST database of handwritten digits"; Xiao, Rasul and Vollgraf 2017,
"Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms".

An idx file consists of two zero bytes, the type of its values, the number of dimensions, their sizes as big-endian
32-bit numbers, and the values. Both data sets contain bytes only.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shoal.data import store
from shoal.data.dataset import Data, Samples, Scaling
from shoal.data.decoded import load_decoded
from shoal.errors import DataError

VERSION = 1
"""The version of the decoded form. Increase it if the output of `_decode` changes."""
CLASSES = 10
BYTES = 8
"""The code of the type of values in idx."""
GZIPPED = b"\x1f\x8b"
MAX_BYTES = 1 << 30
"""Bytes of an unpacked file. The largest, the training images, has 47 million."""


@dataclass(frozen=True)
class Mnist:
    """Handwritten digits of 1×28×28 pixels in 10 classes, 60,000 for training and 10,000 for testing.

    `path` is the folder of the four idx files, gzipped or not; by default the folder mnist below SHOAL_DATA.
    With `normalize`, pixels have mean 0 and standard deviation 1; without it, they range from 0 to 1.
    """

    path: Path | None = None
    normalize: bool = True

    def load(self, seed: int) -> Data:
        return _load("mnist", self.path, Scaling((255 * 0.1307,), (255 * 0.3081,)) if self.normalize else Scaling())


@dataclass(frozen=True)
class FashionMnist:
    """Pictures of clothes of 1×28×28 pixels in 10 classes, 60,000 for training and 10,000 for testing.

    `path` is the folder of the four idx files, gzipped or not; by default the folder fashion-mnist below SHOAL_DATA,
    or the folder of Debian's package dataset-fashion-mnist.
    With `normalize`, pixels have mean 0 and standard deviation 1; without it, they range from 0 to 1.
    """

    path: Path | None = None
    normalize: bool = True

    def load(self, seed: int) -> Data:
        scaling = Scaling((255 * 0.2860,), (255 * 0.3530,)) if self.normalize else Scaling()
        return _load("fashion-mnist", self.path, scaling)


def unpacked(source: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the md5 of an unpacked idx file."""
    digest = hashlib.md5(usedforsecurity=False)
    with _open(source) as stream:
        length = 0
        while chunk := stream.read(store.CHUNK):
            length += len(chunk)
            if length > MAX_BYTES:
                raise DataError(f"{source}: more than {MAX_BYTES:,} unpacked bytes; not the published file")
            digest.update(chunk)
    yield source.name, digest.hexdigest()


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Return the values of an idx file of bytes, gzipped or not. Raises `DataError` if they contradict the header."""
    with _open(path) as stream:
        shape = _shape(path, stream.read(4 + 4 * dimensions), dimensions)
        declared = f"{path}: byte 4: the header declares {' × '.join(map(str, shape))} = {math.prod(shape):,} bytes"
        if math.prod(shape) > MAX_BYTES:
            raise DataError(f"{declared}; expected at most {MAX_BYTES:,}")
        content = stream.read(math.prod(shape) + 1)  # one byte more than declared, to detect longer files
    if len(content) != math.prod(shape):
        raise DataError(f"{declared}, but {'at least ' * (len(content) > math.prod(shape))}{len(content):,} follow")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _shape(path: Path, header: bytes, dimensions: int) -> tuple[int, ...]:
    expected = f"00 00 {BYTES:02x} {dimensions:02x}"
    if header[:4] != bytes((0, 0, BYTES, dimensions)):
        raise DataError(
            f"{path}: byte 0: it starts with {header[:4].hex(' ') or 'no bytes'}; expected {expected}, "
            f"an idx file of bytes with {dimensions} dimension{'s' * (dimensions > 1)}"
        )
    if len(header) < 4 + 4 * dimensions:
        raise DataError(f"{path}: it ends within its header, after {len(header)} of {4 + 4 * dimensions} bytes")
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", header[4:])
    return shape


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked. Errors while reading become `DataError`."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIPPED
            file.seek(0)
            if not packed:
                yield file
                return
            with gzip.open(file) as stream:
                yield stream  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or incomplete ({error}); remove it and fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _load(name: str, path: Path | None, scaling: Scaling) -> Data:
    if path is not None and path.is_file():
        raise DataError(f"dataset {name!r}: path = {str(path)!r} is a file; expected the folder of the four idx files")
    files = store.sources(name, path)
    arrays = load_decoded(name, VERSION, files, lambda folder: _decode(files))
    return Data(
        train=Samples(arrays["train_x"], arrays["train_y"]),
        test=Samples(arrays["test_x"], arrays["test_y"]),
        classes=CLASSES,
        scaling=scaling,
    )


def _decode(files: Sequence[Path]) -> Mapping[str, NDArray[Any]]:
    """Decode the training images and labels, then the test images and labels."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, images, labels in (("train", files[0], files[1]), ("test", files[2], files[3])):
        x, y = read_idx(images, 3), read_idx(labels, 1)
        if len(x) != len(y) or not len(x):
            raise DataError(f"{images} has {len(x)} images and {labels} {len(y)} labels; expected one for each image")
        if not x.size:
            raise DataError(f"{images} has images of {x.shape[1]} × {x.shape[2]} pixels; expected at least one pixel")
        if y.max() >= CLASSES:
            row = int(np.argmax(y >= CLASSES))
            raise DataError(f"{labels}: the label of image {row} is {y[row]}; expected 0 to {CLASSES - 1}")
        arrays |= {f"{split}_x": x[:, None], f"{split}_y": y.astype(np.int64)}
    if arrays["train_x"].shape[1:] != arrays["test_x"].shape[1:]:
        shapes = (" × ".join(map(str, arrays[f"{split}_x"].shape[2:])) for split in ("train", "test"))
        raise DataError("{} has images of {}, and {} has {}; expected the same size".format(
            *(v for pair in zip(files[::2], shapes, strict=True) for v in pair)))  # fmt: skip
    return arrays
