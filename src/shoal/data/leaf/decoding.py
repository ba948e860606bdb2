"""LEAF's files, decoded once into arrays.

LEAF's scripts write each data set as JSON, in several files per split:

    <folder>/train/*.json, <folder>/test/*.json     (.json.gz too; also below <folder>/data, where the scripts put them)

Users are numbered in the order of their first appearance: training files first, files sorted by name. A test user
without training data is kept; its number comes after those of all training users.

An invalid file is an error that names the file, the user and the sample. Known flaws of the files that LEAF's own
scripts write are counted and reported in one warning: wrong `num_samples` (the data are used), users without samples,
test users without training data.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Samples
from shoal.data.decoded import Arrays, load_decoded
from shoal.data.leaf.json_reader import read_sample_counts, read_users, shorten
from shoal.data.npy_writer import NpyWriter
from shoal.data.store import locate
from shoal.errors import DataError

VERSION = 2


class Flaws(Counter[str]):
    """How often the files had each known flaw; see `FLAWS`."""


FLAWS = (
    (
        "disagree",
        "num_samples is wrong for {disagree:,} users: it declares {declared:,} samples, and the files hold {held:,}; "
        "the samples in the files are used",
    ),
    ("declared", ""),
    ("held", ""),
    ("empty", "{empty:,} users have no samples in a file and are left out of it"),
    ("untrained", "{untrained:,} test users have no training data; their numbers follow those of training users"),
    ("unknown", "{unknown:,} characters are not in the alphabet; they count as its last character"),
    ("missing", "{missing:,} images are missing; their samples are left out"),
)
"""The name of each flaw, and its text in the warning. The order is part of the decoded form."""

Rows: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
Convert: TypeAlias = Callable[[list[Any], list[Any], Flaws], Rows]
"""Converts inputs and targets of one user to rows of arrays. Raises `ValueError` that names the sample."""
Prepare: TypeAlias = Callable[[Sequence[Path]], tuple[Convert, Arrays]]
"""Looks at all training files, for example to count words. Returns the conversion and further arrays to keep."""


def leaf_folder(name: str, path: Path | None) -> Path:
    """Return the folder that holds train and test."""
    train = locate(name, ["train", "data/train"], path)
    if not train.is_dir():
        raise DataError(
            f"dataset {shorten(name)}: {train} is a file; expected a folder with LEAF's train and test folders"
        )
    return train.parent


def decode_leaf(name: str, path: Path | None, prepare: Prepare, key: str = "", sources: Sequence[Path] = ()) -> Arrays:
    """Return the arrays of a data set.

    `key` distinguishes the results that different options give from the same files. `sources` are further files that
    the result depends on.
    """
    folder = leaf_folder(name, path)
    files = {split: _files(folder, split) for split in ("train", "test")}
    for source in sources:
        if not source.exists():
            raise DataError(f"dataset {shorten(name)}: there is no {source}")

    def decode(unfinished: Path) -> Arrays:
        flaws = Flaws()
        users: dict[str, int] = {}
        convert, found = prepare(files["train"])
        for split, of_split in files.items():
            known = len(users)
            found[f"owner_{split}"] = _decode_split(of_split, split, unfinished, convert, users, flaws)
            if split == "test":
                flaws["untrained"] = len(users) - known
        found["counts"] = np.array([flaws[flaw] for flaw, _ in FLAWS], dtype=np.int64)
        return found

    all_sources = [*files["train"], *files["test"], *sources]
    arrays = load_decoded(f"{name}-{key}" if key else name, VERSION, all_sources, decode)
    _warn(name, folder, dict(zip((flaw for flaw, _ in FLAWS), arrays["counts"].tolist(), strict=True)))
    return arrays


def conversion_only(convert: Convert) -> Prepare:
    """For a conversion that does not depend on the training files."""
    return lambda train: (convert, {})


def leaf_data(arrays: Arrays, classes: int, **options: Any) -> Data:
    """Return the data set of these arrays; `options` are further fields of `Data`."""
    train, test = (
        Samples(arrays[f"x_{split}"], arrays[f"y_{split}"], arrays[f"owner_{split}"]) for split in ("train", "test")
    )
    return Data(train, test, classes, **options)


def _files(folder: Path, split: str) -> list[Path]:
    found = sorted([*folder.glob(f"{split}/*.json"), *folder.glob(f"{split}/*.json.gz")])
    if not found:
        raise DataError(f"{folder / split}: no .json or .json.gz file in it; expected LEAF's JSON files")
    return found


def _decode_split(
    files: Sequence[Path], split: str, folder: Path, convert: Convert, users: dict[str, int], flaws: Flaws
) -> NDArray[np.int64]:
    """Write the samples of these files to x and y of the split. Return the user of each; number new users."""
    owners: list[tuple[int, int]] = []
    with NpyWriter(folder / f"x_{split}.npy") as inputs, NpyWriter(folder / f"y_{split}.npy") as targets:
        for file in files:
            declared = read_sample_counts(file)
            for user, x, y in read_users(file):
                count = declared.pop(user, len(y))
                if count != len(y):
                    flaws.update(disagree=1, declared=count, held=len(y))
                try:
                    rows = convert(x, y, flaws) if y else (np.empty(0), np.empty(0))
                    if not len(rows[1]):
                        flaws["empty"] += 1
                        continue
                    inputs.append(rows[0])
                    targets.append(rows[1])
                except (ValueError, TypeError, OverflowError) as error:
                    raise DataError(f"{file}: user {shorten(user)}: {error}") from error
                owners.append((users.setdefault(user, len(users)), len(rows[1])))
            # The remaining users are declared, but have no data.
            flaws.update(disagree=len(declared), declared=sum(declared.values()), empty=len(declared))
    if not owners:
        raise DataError(f"{files[0].parent}: no samples in {len(files)} files; is this LEAF's {split} data?")
    user_numbers, sample_counts = np.array(owners, dtype=np.int64).T
    return np.repeat(user_numbers, sample_counts)


def _warn(name: str, folder: Path, counts: dict[str, int]) -> None:
    """Report all flaws in one warning."""
    found = [text.format(**counts) for flaw, text in FLAWS if counts[flaw] and text]
    if found:
        warnings.warn(f"dataset {shorten(name)} in {folder}: {'; '.join(found)}", stacklevel=4)
