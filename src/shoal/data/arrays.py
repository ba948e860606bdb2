"""Your own arrays, in files that numpy writes.

    <path>/train.npz, <path>/test.npz          each with x and y, and owner if samples have owners
    <path>.npz, or the only .npz in <path>     with x_train, y_train, x_test, y_test (owner_train, owner_test)
                                               or with x and y only: `test_fraction` of them is the test set
    <path>/x_train.npy, …                      the same names, one file each

Files that have the right type are mapped into memory. Others (.npz, float64, …) are decoded once. Nothing is unpickled.
"""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Samples, Scaling, Task
from shoal.data.decoded import Arrays, load_decoded
from shoal.data.store import UNREADABLE
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.types import Bounds

VERSION = 1
CHECKED_VALUES = 1 << 22  # values that are checked at once
MAX_EXPANSION = 1032
"""The bytes that deflate can unpack from one byte, at most."""


@dataclass(frozen=True)
class ArrayFiles:
    """Your own arrays: .npz or .npy files with inputs x, targets y and, if known, owners.

    Bytes are scaled to 0–1. Other inputs become float32, or stay ids if `sizes` gives the number of ids. Targets are
    integers, or numbers for a regression.
    """

    path: Path
    """A folder, or an .npz file."""
    task: Task = "classification"
    classes: Annotated[int, Bounds(at_least=1)] | None = None
    """By default the largest target plus 1; a regression has 1."""
    sizes: tuple[Annotated[int, Bounds(at_least=1)], ...] = ()
    """The number of ids, if inputs are ids: one number for tokens, otherwise one for each column."""
    padding: int | None = None
    """The target of padded positions in sequences. It does not count."""
    test_fraction: Annotated[float, Bounds(above=0, below=1)] = 0.2
    """The size of the test set, if the files have none: a random part that does not depend on the seed."""

    def __post_init__(self) -> None:
        if self.task == "regression" and self.classes not in (None, 1):
            raise ValueError(f"classes = {self.classes}: a regression has one output")
        if self.padding is not None and self.task != "sequence":
            raise ValueError(f"padding = {self.padding}: only sequences have padding")

    def load(self, seed: int) -> Data:
        found = _find_arrays(self.path)
        if not any(name.endswith("_test") for name in found):
            found = {name.removesuffix("_train"): location for name, location in found.items()}
            whole = self._samples(found, "")
            test = _choose_test(len(whole), self.test_fraction, self.path)
            train, tests = whole[~test], whole[test]
        else:
            train, tests = (self._samples(found, suffix) for suffix in ("_train", "_test"))
        self._check_same_shapes(train, tests)
        classes = 1 if self.task == "regression" else self._classes(train, tests)
        scaling = Scaling() if train.x.dtype == np.uint8 and not self.sizes else None
        return Data(train, tests, classes, self.task, scaling, self.sizes, self.padding)

    def _samples(self, found: dict[str, ArrayLocation], suffix: str) -> Samples:
        """Return the samples of a split, converted and checked."""
        for part in ("x", "y"):
            if part + suffix not in found:
                names = ", ".join(sorted(found)) or "none"
                raise DataError(f"{self.path}: no array {part + suffix}; expected {EXPECTED}; found {names}")
        x, y = (found[part + suffix] for part in ("x", "y"))
        targets = self._targets(y)
        inputs = self._inputs(x)
        if len(inputs) != len(targets):
            raise DataError(
                f"{x}: {len(inputs)} inputs, and {y}: {len(targets)} targets; expected one target for each input"
            )
        if not len(inputs):
            raise DataError(f"{x}: it has no samples")
        for location, array in ((x, inputs), (y, targets)):
            if not array.size:
                raise DataError(f"{location}: shape {array.shape}; expected at least one value per sample")
        self._check_inputs(x, inputs)
        owner = self._owner(found["owner" + suffix], len(targets)) if "owner" + suffix in found else None
        return Samples(inputs, targets, owner)

    def _inputs(self, location: ArrayLocation) -> NDArray[Any]:
        """Return the inputs mapped into memory: the file itself if its type fits, else its decoded form."""
        if location.member is None:
            mapped = location.read()
            if mapped.dtype == self._input_type(location, mapped.dtype) and mapped.flags.c_contiguous:
                return mapped

        def decode(folder: Path) -> Arrays:
            array = location.read()
            return {"x": array.astype(self._input_type(location, array.dtype), copy=False)}

        key = f"arrays-{location.member or location.file.stem}-{'ids' if self.sizes else 'numbers'}"
        return load_decoded(key, VERSION, [location.file], decode)["x"]

    def _input_type(self, location: ArrayLocation, kind: np.dtype[Any]) -> np.dtype[Any]:
        if self.sizes:
            if kind.kind not in "iu":
                raise DataError(f"{location}: {kind}; expected integers, because dataset.sizes declares inputs as ids")
            return kind if kind in (np.uint8, np.int32) else np.dtype(np.int64)  # the types that torch can index with
        if kind.kind not in "fiub":
            raise DataError(f"{location}: {kind}; expected numbers")
        return np.dtype(np.uint8 if kind == np.uint8 else np.float32)

    def _check_inputs(self, location: ArrayLocation, x: NDArray[Any]) -> None:
        if x.ndim < 2:
            raise DataError(f"{location}: shape {x.shape}; expected (samples, …); use (samples, 1) for numbers")
        if self.sizes and len(self.sizes) > 1 and x.shape[1:] != (len(self.sizes),):
            raise DataError(
                f"{location}: shape {x.shape}; expected (samples, {len(self.sizes)}), an id per entry of sizes"
            )
        step = max(1, CHECKED_VALUES // max(1, int(np.prod(x.shape[1:]))))
        for start in range(0, len(x), step) if self.sizes or x.dtype.kind == "f" else ():
            part = x[start : start + step]
            wrong = (part < 0) | (part >= np.array(self.sizes)) if self.sizes else ~np.isfinite(part)
            if wrong.any():
                place = np.argwhere(wrong)[0]
                expected = f"ids below {self.sizes}" if self.sizes else "finite numbers"
                raise DataError(f"{location}: sample {start + place[0]} has {part[tuple(place)]}; expected {expected}")

    def _targets(self, location: ArrayLocation) -> NDArray[Any]:
        y = location.read()
        dimensions = 2 if self.task == "sequence" else 1
        if y.ndim == dimensions + 1 and y.shape[-1] == 1:
            y = y[..., 0]
        if y.ndim != dimensions:
            one_hot = y.ndim == dimensions + 1 and self.task != "sequence"
            advice = "; for one-hot targets, write the classes: y.argmax(1)" if one_hot else ""
            raise DataError(f"{location}: shape {y.shape}; expected {dimensions} axes for a {self.task} task{advice}")
        if self.task == "regression":
            if y.dtype.kind not in "fiub" or not np.isfinite(y).all():
                raise DataError(f"{location}: {y.dtype}; expected finite numbers")
            return y.astype(np.float32)
        if y.dtype.kind not in "iub":
            raise DataError(f"{location}: {y.dtype}; expected integers (or task = 'regression')")
        limit = np.iinfo(np.int64).max if self.classes is None else self.classes
        wrong = ((y < 0) | (y >= limit)) & (y != self.padding if self.padding is not None else True)
        if wrong.any():
            place = int(np.argwhere(wrong)[0][0])
            expected = "0 or more" if self.classes is None else f"0 to {self.classes - 1}"
            raise DataError(f"{location}: the target of sample {place} is {y[wrong][0]}; expected {expected}")
        return y.astype(np.int64)

    def _owner(self, location: ArrayLocation, samples: int) -> NDArray[np.int64]:
        owner = location.read()
        if owner.shape != (samples,) or owner.dtype.kind not in "iu" or (owner < 0).any():
            raise DataError(f"{location}: {owner.dtype} of shape {owner.shape}; expected {samples} integers from 0")
        return owner.astype(np.int64)

    def _check_same_shapes(self, train: Samples, test: Samples) -> None:
        for part, one, other in (("x", train.x, test.x), ("y", train.y, test.y)):
            if one.shape[1:] != other.shape[1:]:
                raise DataError(
                    f"{self.path}: training {part} have shape {one.shape[1:]}, test {part} {other.shape[1:]}; expected "
                    "the same"
                )
        if (train.x.dtype == np.uint8) != (test.x.dtype == np.uint8):
            raise DataError(f"{self.path}: training x are {train.x.dtype}, test x {test.x.dtype}; expected the same")

    def _classes(self, *splits: Samples) -> int:
        if self.classes is not None:
            return self.classes
        return max(2, 1 + max(int(samples.y.max()) for samples in splits))


EXPECTED = "x_train, y_train, x_test and y_test, or x and y alone"


@dataclass(frozen=True)
class ArrayLocation:
    """An array in a file: an .npy file, or a member of an .npz."""

    file: Path
    member: str | None = None

    def __str__(self) -> str:
        return str(self.file) if self.member is None else f"{self.file}: {self.member}"

    def read(self) -> NDArray[Any]:
        """Return the array; an .npy file is mapped into memory."""
        try:
            if self.member is not None:
                return self._unpacked(self.member)
            mapped: NDArray[Any] = np.lib.format.open_memmap(self.file, mode="r")
            return mapped
        except Exception as error:  # the headers of a damaged file may raise anything
            objects = "pickle" in str(error) or "Python objects" in str(error)
            reason = "it holds Python objects" if objects else str(error)[:200] or type(error).__name__
            raise DataError(f"{self}: cannot be read: {reason}; expected an array as numpy.save writes it") from error

    def _unpacked(self, member: str) -> NDArray[Any]:
        """Read a member of an .npz. Memory is allocated only if the file can contain what the header declares."""
        with zipfile.ZipFile(self.file) as archive:
            packed = archive.getinfo(f"{member}.npy")
            if packed.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"compression method {packed.compress_type}; expected one that numpy.savez uses")
            with archive.open(packed) as stream:
                version = np.lib.format.read_magic(stream)
                header = (
                    np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                )
                shape, _, kind = header(stream)
                declared, present = math.prod(shape) * kind.itemsize, packed.file_size - stream.tell()
            if not kind.hasobject and declared != present:
                raise ValueError(f"its header declares {shape} of {kind}, {declared:,} bytes, but {present:,} follow")
            if packed.file_size > MAX_EXPANSION * (min(packed.compress_size, self.file.stat().st_size) + 1):
                raise ValueError(f"{packed.compress_size:,} bytes cannot unpack to {packed.file_size:,}")
            with archive.open(packed) as stream:
                found: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
            return found


def _find_arrays(path: Path) -> dict[str, ArrayLocation]:
    """Return the locations of the arrays at `path`, by name: x_train, …"""
    if path.is_file():
        return _members(path)
    if not path.is_dir():
        raise DataError(f"dataset 'arrays': there is no {path}; expected a folder, or an .npz file")
    if (path / "train.npz").is_file():
        if not (path / "test.npz").is_file():
            return _members(path / "train.npz")
        return {
            f"{name}_{split}": location
            for split in ("train", "test")
            for name, location in _members(path / f"{split}.npz").items()
        }
    files = {file.stem: ArrayLocation(file) for file in sorted(path.glob("*.npy"))}
    archives = sorted(path.glob("*.npz"))
    if not files and len(archives) == 1:
        return _members(archives[0])
    if not files:
        raise DataError(f"{path}: expected train.npz, .npy files, or exactly one .npz, with {EXPECTED}")
    return files


def _members(file: Path) -> dict[str, ArrayLocation]:
    try:
        with zipfile.ZipFile(file) as archive:
            return {name[:-4]: ArrayLocation(file, name[:-4]) for name in archive.namelist() if name.endswith(".npy")}
    except (*UNREADABLE, ValueError) as error:
        raise DataError(f"{file}: not an .npz file, or incomplete: {error}") from error


def _choose_test(samples: int, fraction: float, path: Path) -> NDArray[np.bool_]:
    """Mark the samples of the test set."""
    count = round(samples * fraction)
    if not 0 < count < samples:
        raise DataError(
            f"{path}: with test_fraction = {fraction}, the training or test set of {samples} samples is empty"
        )
    test = np.zeros(samples, dtype=bool)
    test[generator(0, "arrays test samples").permutation(samples)[:count]] = True
    return test
