"""The files of data sets as published: one folder for each data set below SHOAL_DATA."""

from __future__ import annotations

import hashlib
import importlib
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from shoal.data.publishers import PUBLISHERS, PublishedFile, Publisher, publisher
from shoal.errors import DataError

UNFINISHED = ".part"
"""The suffix of a file that is not downloaded completely."""
CHUNK = 1 << 20
UNREADABLE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
"""Exceptions of reading a zip. RuntimeError: it is encrypted, or (NotImplementedError) the compression is unknown."""


def data_folder() -> Path:
    """Return the folder of all data sets: SHOAL_DATA, or the platform's folder for data."""
    return Path(os.environ.get("SHOAL_DATA") or Path(platformdirs.user_data_dir("shoal"), "data"))


def dataset_folder(dataset: str) -> Path:
    """Return the folder that this data set is downloaded to."""
    known = PUBLISHERS.get(dataset)
    return data_folder() / (dataset if known is None else known.folder)


def locate(dataset: str, names: Sequence[str], path: Path | None = None) -> Path:
    """Return the first existing file or folder of `names`, in `path` or in the folder of the data set.

    Names may be shell patterns. `path` may be the file itself. Without `path`, folders of packages of the operating
    system are searched too.

    Raises `DataError` with the folder that was searched and how to get the data set.
    """
    if path is not None and path.is_file():
        return path
    default = dataset_folder(dataset)
    places = [path] if path is not None else [default, *_system_folders(dataset)]
    if (found := _first(places, names)) is not None:
        return found
    text = f"{names[0]} is not in {places[0]}"
    if path is None or path == default:
        advice = _how_to_get(dataset)
    else:
        text, advice = text if path.exists() else f"{path} does not exist", _where_to_look(dataset, names, path)
    others = f"\n  It may also be named {', '.join(names[1:])}." if len(names) > 1 else ""
    raise DataError(f"dataset {dataset!r}: {text}; {advice}{others}")


def _first(places: Sequence[Path], names: Sequence[str]) -> Path | None:
    """Return the first file or folder in `places` that has one of these names or patterns."""
    for place in places:
        for name in names:
            found = sorted(p for p in place.glob(name) if p.suffix != UNFINISHED)
            if found:
                return found[0]
    return None


def is_available(dataset: str, path: Path | None = None) -> bool:
    """Whether the files of a data set are on this machine. A data set without files is always available."""
    known = PUBLISHERS.get(dataset)
    if known is None:
        return True
    if not known.files:
        return (path or dataset_folder(dataset)).exists()
    try:
        sources(dataset, path)
    except DataError:
        return False
    return True


def sources(dataset: str, path: Path | None = None) -> list[Path]:
    """Return the local path of each published file of the data set, in the order of `PUBLISHERS`."""
    return [source(dataset, file, path) for file in publisher(dataset).files]


def source(dataset: str, file: PublishedFile, path: Path | None = None) -> Path:
    """Return the local path of one published file, under any of its names."""
    return locate(dataset, (file.name, *file.other_names), path)


def _system_folders(dataset: str) -> tuple[Path, ...]:
    known = PUBLISHERS.get(dataset)
    return () if known is None else known.system_folders


def _how_to_get(dataset: str) -> str:
    """Return how to get a data set that is not in its folder below SHOAL_DATA."""
    known = PUBLISHERS.get(dataset)
    if known is not None and not known.files:
        return f"{known.instructions} into that folder (SHOAL_DATA is the folder of all data sets)"
    return (
        f"'shoal data fetch {dataset}' downloads it, or put it there yourself (SHOAL_DATA is the folder of all data "
        "sets)"
    )


def _where_to_look(dataset: str, names: Sequence[str], path: Path) -> str:
    """Return what to do if a data set is not at the path that the user gives."""
    known = PUBLISHERS.get(dataset)
    if known is not None and _first([path / known.folder], names) is not None:
        return f"did you mean the path {path / known.folder}?"
    wanted = "put it there" if path.exists() else f"expected a folder that contains {names[0]}"
    if known is not None and not known.files:
        return f"{wanted}. {known.instructions} into the folder"
    return (
        f"{wanted}. 'shoal data fetch {dataset}' downloads it to {dataset_folder(dataset)}; to use this copy, remove "
        "the path"
    )


@dataclass(frozen=True)
class Verification:
    """The result of verifying one file or folder."""

    path: Path
    valid: bool
    """Whether it equals the published file."""
    reason: str


def verify(dataset: str, path: Path | None = None) -> Iterator[Verification]:
    """Compare each file with the published one: by its checksum or, if it was repacked, by its contents.

    Raises `DataError` if a file is missing. A file that cannot be read is invalid.
    """
    known = publisher(dataset)
    if not known.files:
        raise DataError(
            f"dataset {dataset!r}: no checksums are published, because every user generates it; {known.instructions}"
        )
    for file, found in zip(known.files, sources(dataset, path), strict=True):
        yield _verify_file(known, file, found)


def _verify_file(known: Publisher, file: PublishedFile, source: Path) -> Verification:
    if source.is_file() and file.md5 is not None and md5(source) == file.md5:
        return Verification(source, True, "as published")
    if known.description is not None:
        return _verify_readable(known.description, file, source)
    if known.reader is None:
        return Verification(source, False, _differs(file, source))
    read: Callable[[Path], Iterator[tuple[str, str]]] = _import(known.reader)
    try:
        found = dict(read(source))
    except DataError as error:
        return Verification(source, False, str(error))
    differs = [name for name, expected in file.contents.items() if _checksum_of(found, name, file) != expected]
    if differs:
        return Verification(source, False, f"differs from the published file in {', '.join(differs)}")
    return Verification(source, True, "packed differently; its contents are identical to the published ones")


def _checksum_of(found: dict[str, str], name: str, file: PublishedFile) -> str | None:
    """Return the checksum of a part. If a file has only one part, its name does not matter."""
    return next(iter(found.values()), None) if len(file.contents) == 1 else found.get(name)


def _verify_readable(description: str, file: PublishedFile, source: Path) -> Verification:
    """Verify that a file is complete and readable, if no checksum of it or of its contents is published."""
    describe: Callable[[Path], str] = _import(description)
    try:
        if source.is_file() and zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                return Verification(source, False, f"the member {damaged} is damaged")
        found = describe(source)
    except DataError as error:
        return Verification(source, False, str(error))
    except UNREADABLE as error:
        return Verification(source, False, f"damaged: {error}")
    published = "no checksum" if file.md5 is None else "a checksum of the archive only"
    return Verification(source, True, f"undamaged: {found}; its publisher gives {published}, so it cannot be compared")


def _differs(file: PublishedFile, source: Path) -> str:
    if file.md5 is None:
        return "its publisher gives no checksum, so it cannot be compared"
    if source.is_dir():
        return "the published checksum is that of the archive"
    return f"its md5 is {md5(source)}; expected {file.md5}, as published"


def _import(place: str) -> Callable[[Path], Any]:
    """Return the function that `module:function` names."""
    module, function = place.split(":")
    read: Callable[[Path], Any] = getattr(importlib.import_module(module), function)
    return read


def md5(path: Path) -> str:
    """Return the md5 of a file. Publishers give md5; it does not protect against deliberate changes."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()
