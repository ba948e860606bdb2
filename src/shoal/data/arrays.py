"""Arrays of one's own, as numpy writes them.

    <path>/train.npz, <path>/test.npz          each with x and y, and owner where samples have one
    <path>.npz, or the only .npz in <path>     with x_train, y_train, x_test, y_test (owner_train, owner_test)
                                               or with x and y alone: `test_fraction` of them are the test
    <path>/x_train.npy, …                      the same names, a file each

Files are mapped into memory where they are as they should be, and decoded once where not: .npz, float64, …
Nothing is unpickled.
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
AT_ONCE = 1 << 22  # values that are looked at together
DENSEST = 1032
"""How many bytes deflate can make of one."""


@dataclass(frozen=True)
class ArrayFiles:
    """Arrays of one's own: .npz or .npy files with inputs x, targets y and, where known, owners.

    Inputs of bytes are scaled to 0–1; other numbers are taken as float32, or as ids where `sizes` says how many of
    them there are. Targets are integers, or numbers for a regression.
    """

    path: Path
    """A folder, or an .npz file."""
    task: Task = "classification"
    classes: Annotated[int, Bounds(at_least=1)] | None = None
    """As many as the targets show, when not given; a regression has 1."""
    sizes: tuple[Annotated[int, Bounds(at_least=1)], ...] = ()
    """Of inputs that are ids, how many there are: one number for tokens, one for each column otherwise."""
    padding: int | None = None
    """The target that does not count, in sequences."""
    test_fraction: Annotated[float, Bounds(above=0, below=1)] = 0.2
    """How much is the test when the files do not say: a random part, the same whatever the seed."""

    def __post_init__(self) -> None:
        if self.task == "regression" and self.classes not in (None, 1):
            raise ValueError(f"classes = {self.classes}: a regression has one output")
        if self.padding is not None and self.task != "sequence":
            raise ValueError(f"padding = {self.padding}: only sequences are filled up")

    def load(self, seed: int) -> Data:
        found = _found(self.path)
        if not any(name.endswith("_test") for name in found):
            found = {name.removesuffix("_train"): where for name, where in found.items()}
            whole = self._samples(found, "")
            test = _chosen(len(whole), self.test_fraction, self.path)
            train, tests = whole[~test], whole[test]
        else:
            train, tests = (self._samples(found, suffix) for suffix in ("_train", "_test"))
        self._check_alike(train, tests)
        classes = 1 if self.task == "regression" else self._classes(train, tests)
        scaling = Scaling() if train.x.dtype == np.uint8 and not self.sizes else None
        return Data(train, tests, classes, self.task, scaling, self.sizes, self.padding)

    def _samples(self, found: dict[str, Where], suffix: str) -> Samples:
        """The samples of a split, of the types that they should have, and nothing in them that should not be there."""
        for part in ("x", "y"):
            if part + suffix not in found:
                names = ", ".join(sorted(found)) or "none"
                raise DataError(f"{self.path}: no array {part + suffix}; expected {EXPECTED}, and found {names}")
        x, y = (found[part + suffix] for part in ("x", "y"))
        targets = self._targets(y)
        inputs = self._inputs(x)
        if len(inputs) != len(targets):
            raise DataError(f"{x}: {len(inputs)} inputs, and {y}: {len(targets)} targets; expected one for each")
        if not len(inputs):
            raise DataError(f"{x}: no samples in it")
        for where, array in ((x, inputs), (y, targets)):
            if not array.size:
                raise DataError(f"{where}: shape {array.shape}; expected something in each sample")
        self._check_inputs(x, inputs)
        owner = self._owner(found["owner" + suffix], len(targets)) if "owner" + suffix in found else None
        return Samples(inputs, targets, owner)

    def _inputs(self, where: Where) -> NDArray[Any]:
        """Mapped into memory: the file itself where it is as it should be, or else its decoded form."""
        if where.member is None:
            mapped = where.read()
            if mapped.dtype == self._input_type(where, mapped.dtype) and mapped.flags.c_contiguous:
                return mapped

        def decode(folder: Path) -> Arrays:
            array = where.read()
            return {"x": array.astype(self._input_type(where, array.dtype), copy=False)}

        key = f"arrays-{where.member or where.file.stem}-{'ids' if self.sizes else 'numbers'}"
        return load_decoded(key, VERSION, [where.file], decode)["x"]

    def _input_type(self, where: Where, kind: np.dtype[Any]) -> np.dtype[Any]:
        if self.sizes:
            if kind.kind not in "iu":
                raise DataError(f"{where}: {kind}; expected integers, as dataset.sizes says that inputs are ids")
            return kind if kind in (np.uint8, np.int32) else np.dtype(np.int64)  # what torch can gather
        if kind.kind not in "fiub":
            raise DataError(f"{where}: {kind}; expected numbers")
        return np.dtype(np.uint8 if kind == np.uint8 else np.float32)

    def _check_inputs(self, where: Where, x: NDArray[Any]) -> None:
        if x.ndim < 2:
            raise DataError(f"{where}: shape {x.shape}; expected (samples, …): inputs of one number are (samples, 1)")
        if self.sizes and len(self.sizes) > 1 and x.shape[1:] != (len(self.sizes),):
            raise DataError(f"{where}: shape {x.shape}; expected (samples, {len(self.sizes)}), an id for each of sizes")
        step = max(1, AT_ONCE // max(1, int(np.prod(x.shape[1:]))))
        for start in range(0, len(x), step) if self.sizes or x.dtype.kind == "f" else ():
            part = x[start : start + step]
            wrong = (part < 0) | (part >= np.array(self.sizes)) if self.sizes else ~np.isfinite(part)
            if wrong.any():
                place = np.argwhere(wrong)[0]
                expected = f"ids below {self.sizes}" if self.sizes else "finite numbers"
                raise DataError(f"{where}: sample {start + place[0]} has {part[tuple(place)]}; expected {expected}")

    def _targets(self, where: Where) -> NDArray[Any]:
        y = where.read()
        dimensions = 2 if self.task == "sequence" else 1
        if y.ndim == dimensions + 1 and y.shape[-1] == 1:
            y = y[..., 0]
        if y.ndim != dimensions:
            raise DataError(f"{where}: shape {y.shape}; a {self.task} task has {dimensions} axes")
        if self.task == "regression":
            if y.dtype.kind not in "fiub" or not np.isfinite(y).all():
                raise DataError(f"{where}: {y.dtype}; expected finite numbers")
            return y.astype(np.float32)
        if y.dtype.kind not in "iub":
            raise DataError(f"{where}: {y.dtype}; expected integers, the numbers of classes (or task = 'regression')")
        limit = np.iinfo(np.int64).max if self.classes is None else self.classes
        wrong = ((y < 0) | (y >= limit)) & (y != self.padding if self.padding is not None else True)
        if wrong.any():
            place = int(np.argwhere(wrong)[0][0])
            above = "" if self.classes is None else f" to {self.classes - 1}"
            raise DataError(f"{where}: the target of sample {place} is {y[wrong][0]}; expected classes from 0{above}")
        return y.astype(np.int64)

    def _owner(self, where: Where, samples: int) -> NDArray[np.int64]:
        owner = where.read()
        if owner.shape != (samples,) or owner.dtype.kind not in "iu" or (owner < 0).any():
            raise DataError(f"{where}: {owner.dtype} of shape {owner.shape}; expected {samples} integers from 0")
        return owner.astype(np.int64)

    def _check_alike(self, train: Samples, test: Samples) -> None:
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
class Where:
    """An array in a file: an .npy file, or a member of an .npz."""

    file: Path
    member: str | None = None

    def __str__(self) -> str:
        return str(self.file) if self.member is None else f"{self.file}: {self.member}"

    def read(self) -> NDArray[Any]:
        """The array, mapped into memory when it is a file of its own."""
        try:
            if self.member is not None:
                return self._unpacked(self.member)
            mapped: NDArray[Any] = np.lib.format.open_memmap(self.file, mode="r")
            return mapped
        except Exception as error:  # the headers of a damaged file raise what they like
            objects = "pickle" in str(error) or "Python objects" in str(error)
            reason = "it holds Python objects" if objects else str(error)[:200] or type(error).__name__
            raise DataError(f"{self}: cannot be read: {reason}; expected an array as numpy.save writes it") from error

    def _unpacked(self, member: str) -> NDArray[Any]:
        """Room is made for an array only when what its header promises can be in the file."""
        with zipfile.ZipFile(self.file) as archive:
            packed = archive.getinfo(f"{member}.npy")
            if packed.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"compressed in way {packed.compress_type}, which numpy.savez does not use")
            with archive.open(packed) as stream:
                version = np.lib.format.read_magic(stream)
                header = (
                    np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                )
                shape, _, kind = header(stream)
                promised, there = math.prod(shape) * kind.itemsize, packed.file_size - stream.tell()
            if not kind.hasobject and promised != there:
                raise ValueError(f"its header says {shape} of {kind}, {promised:,} bytes, and {there:,} follow it")
            if packed.file_size > DENSEST * (min(packed.compress_size, self.file.stat().st_size) + 1):
                raise ValueError(f"{packed.file_size:,} bytes cannot be in {packed.compress_size:,}")
            with archive.open(packed) as stream:
                found: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
            return found


def _found(path: Path) -> dict[str, Where]:
    """The arrays at `path`, by name: x_train, …"""
    if path.is_file():
        return _members(path)
    if not path.is_dir():
        raise DataError(f"dataset 'arrays': there is no {path}; expected a folder, or an .npz file")
    if (path / "train.npz").is_file():
        if not (path / "test.npz").is_file():
            return _members(path / "train.npz")
        return {
            f"{name}_{split}": where
            for split in ("train", "test")
            for name, where in _members(path / f"{split}.npz").items()
        }
    files = {file.stem: Where(file) for file in sorted(path.glob("*.npy"))}
    archives = sorted(path.glob("*.npz"))
    if not files and len(archives) == 1:
        return _members(archives[0])
    if not files:
        raise DataError(f"{path}: no train.npz, no .npy files and not just one .npz in it; expected {EXPECTED}")
    return files


def _members(file: Path) -> dict[str, Where]:
    try:
        with zipfile.ZipFile(file) as archive:
            return {name[:-4]: Where(file, name[:-4]) for name in archive.namelist() if name.endswith(".npy")}
    except (*UNREADABLE, ValueError) as error:
        raise DataError(f"{file}: not an .npz file, or cut short: {error}") from error


def _chosen(samples: int, fraction: float, path: Path) -> NDArray[np.bool_]:
    """Which samples are the test."""
    count = round(samples * fraction)
    if not 0 < count < samples:
        raise DataError(f"{path}: a test_fraction of {fraction} leaves no test or nothing else of {samples} samples")
    test = np.zeros(samples, dtype=bool)
    test[generator(0, "arrays test samples").permutation(samples)[:count]] = True
    return test
