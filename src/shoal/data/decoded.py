"""Data sets decoded once, into arrays that every process maps into its memory: one copy, and no time to load.

The decoded form lives in a cache folder of its own, never beside the source files, which may be read-only. It is found
by the sources' names, sizes and times of change, and by the version of what decoded them; when one of these changes,
it is decoded anew. A folder is written under another name and renamed when it is whole: it is never half there. The
last file in it lists the others with their sizes; where one was lost or damaged since, all are decoded anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

from shoal.data.publishers import PUBLISHERS
from shoal.errors import DataError

MANIFEST = "manifest.json"
"""The names of the other files, and how many bytes each has."""
LEFT_OVER = 24 * 3600.0
"""Seconds after which a folder that was never finished is taken for one that nobody will finish."""
WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that reading does not have."""
Arrays = dict[str, NDArray[Any]]


def cache_folder() -> Path:
    """Where decoded data sets are kept: SHOAL_CACHE, or the platform's place for caches."""
    return Path(os.environ.get("SHOAL_CACHE") or platformdirs.user_cache_dir("shoal")) / "decoded"


def load_decoded(
    name: str, version: int, sources: Sequence[Path], decode: Callable[[Path], Mapping[str, NDArray[Any]]]
) -> Arrays:
    """The arrays of a data set, read-only and memory-mapped.

    `decode` is called when they are not there yet, with an empty folder to work in; large arrays it may write there
    itself as `<array>.npy` and leave out of what it returns. Raises `DataError` when the cache cannot be written or
    a source not be read, and whatever else `decode` raises.
    """
    try:
        fingerprint = _fingerprint(name, version, sources)
    except OSError as error:
        raise DataError(f"dataset {name!r}: cannot read {error.filename}: {error.strerror}") from error
    folder = cache_folder() / f"{name}-{fingerprint}"
    if not _whole(folder):
        _write(name, folder, decode)
    return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(folder.glob("*.npy"))}


def is_decoded(name: str) -> bool:
    """Whether a decoded form of the data set is there, of whatever source."""
    named = re.compile(f"{re.escape(name)}(-.*)?-[0-9a-f]{{16}}")
    others = tuple(f"{other}-" for other in PUBLISHERS if other.startswith(f"{name}-"))
    return any(
        named.fullmatch(folder.name) and not folder.name.startswith(others)
        for folder in cache_folder().glob(f"{name}-*")
    )


def _whole(folder: Path) -> bool:
    """Whether each of its files is there, and as long as it was when it was written."""
    try:
        return bool(json.loads((folder / MANIFEST).read_text()) == _sizes(folder))
    except (OSError, ValueError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != MANIFEST}


def _write(name: str, folder: Path, decode: Callable[[Path], Mapping[str, NDArray[Any]]]) -> None:
    unfinished = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        unfinished.mkdir()
    except OSError as error:
        raise DataError(
            f"cannot write the decoded data set to {folder.parent}: {error.strerror}; set SHOAL_CACHE to a folder "
            "that can be written"
        ) from error
    try:
        try:
            arrays = decode(unfinished)
        except OSError as error:
            if error.errno in WRITING or str(error.filename).startswith(str(unfinished)):
                raise
            raise DataError(f"dataset {name!r}: its files cannot be read: {error}") from error
        for array_name, array in arrays.items():
            np.save(unfinished / f"{array_name}.npy", np.ascontiguousarray(array), allow_pickle=False)
        (unfinished / MANIFEST).write_text(json.dumps(_sizes(unfinished)))
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        _put(unfinished, folder)
    except OSError as error:
        raise DataError(f"cannot write the decoded data set to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put(unfinished: Path, folder: Path) -> None:
    """Give it its name, in the place of a damaged one."""
    if folder.is_dir() and not _whole(folder):
        aside = unfinished.with_name(f"{unfinished.name}-damaged")
        folder.rename(aside)  # those who have it mapped keep what they have
        shutil.rmtree(aside, ignore_errors=True)
    try:
        unfinished.rename(folder)
    except OSError:
        if not _whole(folder):  # otherwise another process was first, and wrote the same
            raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """To the disk itself, so that a loss of power does not leave a name without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove what processes left behind that were killed while they decoded."""
    for folder in parent.glob(".*"):
        try:
            if folder.is_dir() and time.time() - folder.stat().st_mtime > LEFT_OVER:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another process removed it


def _fingerprint(name: str, version: int, sources: Sequence[Path]) -> str:
    facts = [name, str(version)]
    for source in sorted(sources):
        status = source.stat()
        facts.append(f"{source.resolve()} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
