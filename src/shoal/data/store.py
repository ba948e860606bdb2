"""Where data sets lie, as their publishers give them: a folder for each below SHOAL_DATA."""

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

from shoal.data.publishers import PUBLISHERS, Published, Publisher, publisher
from shoal.errors import DataError

UNFINISHED = ".part"
"""How the name of a file ends that is still being downloaded."""
CHUNK = 1 << 20
UNREADABLE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
"""What reading a zip raises: RuntimeError is an encrypted one, or (NotImplementedError) a compression nobody knows."""


def data_folder() -> Path:
    """Where data sets are looked for and downloaded to: SHOAL_DATA, or the platform's place for data."""
    return Path(os.environ.get("SHOAL_DATA") or Path(platformdirs.user_data_dir("shoal"), "data"))


def dataset_folder(dataset: str) -> Path:
    """Where this data set is downloaded to."""
    known = PUBLISHERS.get(dataset)
    return data_folder() / (dataset if known is None else known.folder)


def located(dataset: str, names: Sequence[str], path: Path | None = None) -> Path:
    """The first of `names`, files or folders, that is there: in `path`, or in the folder of the data set.

    Names may be patterns, as the shell has them. `path` may be the file itself. Without it, the folders in which a
    package of the operating system puts the data set are looked in too.

    Raises `DataError` that says where it was looked for and how to get it.
    """
    if path is not None and path.is_file():
        return path
    folder = path or dataset_folder(dataset)
    for place in [folder] if path is not None else [folder, *_elsewhere(dataset)]:
        for name in names:
            found = sorted(p for p in place.glob(name) if p.suffix != UNFINISHED)
            if found:
                return found[0]
    others = f"\n  It may also be named {', '.join(names[1:])}." if len(names) > 1 else ""
    raise DataError(f"dataset {dataset!r}: {names[0]} is not in {folder}; {_how_to_get(dataset, folder)}{others}")


def at_hand(dataset: str, path: Path | None = None) -> bool:
    """Whether the files of a data set that is published are here; one that needs none always is."""
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
    """What is there of each file that the data set is published as, in the order of `PUBLISHERS`."""
    return [source(dataset, file, path) for file in publisher(dataset).files]


def source(dataset: str, file: Published, path: Path | None = None) -> Path:
    """What is there of one file of a data set, under whatever name."""
    return located(dataset, (file.name, *file.also), path)


def _elsewhere(dataset: str) -> tuple[Path, ...]:
    known = PUBLISHERS.get(dataset)
    return () if known is None else known.elsewhere


def _how_to_get(dataset: str, folder: Path) -> str:
    known = PUBLISHERS.get(dataset)
    if known is not None and not known.files:
        return f"{known.by_hand} into that folder (SHOAL_DATA is where data sets are looked for)"
    return (
        f"'shoal data fetch {dataset}' downloads it, or put it there by hand (SHOAL_DATA is where data sets are "
        "looked for)"
    )


@dataclass(frozen=True)
class Verdict:
    """What was found out about one file or folder."""

    path: Path
    sound: bool
    """Whether it is what was published."""
    reason: str


def verified(dataset: str, path: Path | None = None) -> Iterator[Verdict]:
    """Compares each file with what was published: by its checksum or, where it was packed anew, by its contents.

    Raises `DataError` when a file is not there. One that cannot be read is not sound; so much for it.
    """
    known = publisher(dataset)
    if not known.files:
        raise DataError(f"dataset {dataset!r}: no checksums are published, for everyone makes it anew; {known.by_hand}")
    for file, found in zip(known.files, sources(dataset, path), strict=True):
        yield _verdict(known, file, found)


def _verdict(known: Publisher, file: Published, source: Path) -> Verdict:
    if source.is_file() and file.md5 is not None and md5(source) == file.md5:
        return Verdict(source, True, "as published")
    if known.description is not None:
        return _described(known.description, file, source)
    if known.reader is None:
        return Verdict(source, False, _differs(file, source))
    read: Callable[[Path], Iterator[tuple[str, str]]] = _named(known.reader)
    try:
        found = dict(read(source))
    except DataError as error:
        return Verdict(source, False, str(error))
    differs = [name for name, expected in file.contents.items() if _part(found, name, file) != expected]
    if differs:
        return Verdict(source, False, f"not what was published: {', '.join(differs)} differ{'s' * (len(differs) == 1)}")
    return Verdict(source, True, "packed differently; every byte of its contents is as published")


def _part(found: dict[str, str], name: str, file: Published) -> str | None:
    """The checksum of a part; where a file is one part, whatever that is called."""
    return next(iter(found.values()), None) if len(file.contents) == 1 else found.get(name)


def _described(description: str, file: Published, source: Path) -> Verdict:
    """What can be said where no checksum of this, or of its contents, is published: that it is whole, and reads."""
    describe: Callable[[Path], str] = _named(description)
    try:
        if source.is_file() and zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                return Verdict(source, False, f"{damaged} in it is damaged")
        found = describe(source)
    except DataError as error:
        return Verdict(source, False, str(error))
    except UNREADABLE as error:
        return Verdict(source, False, f"damaged: {error}")
    of = "" if file.md5 is None else " but of the archive itself"
    return Verdict(source, True, f"undamaged: {found}; its publisher gives no checksum{of} to compare it with")


def _differs(file: Published, source: Path) -> str:
    if file.md5 is None:
        return "its publisher gives no checksum to compare it with"
    if source.is_dir():
        return "the checksum of what was published is of the archive"
    return f"its md5 is {md5(source)}, and {file.md5} was published"


def _named(place: str) -> Callable[[Path], Any]:
    """The function that `module:function` names."""
    module, function = place.split(":")
    read: Callable[[Path], Any] = getattr(importlib.import_module(module), function)
    return read


def md5(path: Path) -> str:
    """The md5 of a file: a checksum as publishers give it, no protection against malice."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()
