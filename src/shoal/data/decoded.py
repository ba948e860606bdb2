"""A cache of decoded data sets: arrays that every process maps into memory. There is one copy, and loading is instant.

The decoded form is in a cache folder, never beside the source files, which may be read-only. Its name depends on the
names, sizes and modification times of the sources and on the version of the decoder. If one of these changes, the data
set is decoded again. A folder is written under a temporary name and renamed when it is complete. Its last file lists
the others with their sizes; if one is missing or damaged later, all are decoded again.
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
"""The names of the other files, with their sizes in bytes."""
ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which an incomplete folder counts as abandoned."""
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that only writing raises."""
Arrays = dict[str, NDArray[Any]]


def cache_folder() -> Path:
    """Return the folder of decoded data sets: in SHOAL_CACHE, or in the platform's cache folder."""
    return Path(os.environ.get("SHOAL_CACHE") or platformdirs.user_cache_dir("shoal")) / "decoded"


def load_decoded(
    name: str, version: int, sources: Sequence[Path], decode: Callable[[Path], Mapping[str, NDArray[Any]]]
) -> Arrays:
    """Return the arrays of a data set, read-only and memory-mapped.

    If they are not in the cache, `decode` is called with an empty folder. It may write large arrays there itself, as
    `<array>.npy`, in place of returning them. Raises `DataError` if the cache cannot be written or a source cannot be
    read, and any other error of `decode`.
    """
    try:
        fingerprint = _fingerprint(name, version, sources)
    except OSError as error:
        raise DataError(f"dataset {name!r}: cannot read {error.filename}: {error.strerror}") from error
    folder = cache_folder() / f"{name}-{fingerprint}"
    if not _is_complete(folder):
        _write(name, folder, decode)
    return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(folder.glob("*.npy"))}


def is_decoded(name: str) -> bool:
    """Whether the cache has a decoded form of the data set, from any source."""
    named = re.compile(f"{re.escape(name)}(-.*)?-[0-9a-f]{{16}}")
    others = tuple(f"{other}-" for other in PUBLISHERS if other.startswith(f"{name}-"))
    return any(
        named.fullmatch(folder.name) and not folder.name.startswith(others)
        for folder in cache_folder().glob(f"{name}-*")
    )


def _is_complete(folder: Path) -> bool:
    """Whether every file exists and has the size that it had when it was written."""
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
        _remove_abandoned(folder.parent)
        unfinished.mkdir()
    except OSError as error:
        raise DataError(
            f"cannot write the decoded data set to {folder.parent}: {error.strerror}; set SHOAL_CACHE to a folder "
            "with write access"
        ) from error
    try:
        try:
            arrays = decode(unfinished)
        except OSError as error:
            if error.errno in WRITE_ERRORS or str(error.filename).startswith(str(unfinished)):
                raise
            raise DataError(f"dataset {name!r}: cannot read its files: {error}") from error
        for array_name, array in arrays.items():
            np.save(unfinished / f"{array_name}.npy", np.ascontiguousarray(array), allow_pickle=False)
        (unfinished / MANIFEST).write_text(json.dumps(_sizes(unfinished)))
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        _move_into_place(unfinished, folder)
    except OSError as error:
        raise DataError(f"cannot write the decoded data set to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _move_into_place(unfinished: Path, folder: Path) -> None:
    """Rename the new folder. It replaces a damaged one."""
    if folder.is_dir() and not _is_complete(folder):
        aside = unfinished.with_name(f"{unfinished.name}-damaged")
        folder.rename(aside)  # processes that have mapped it keep their mapping
        shutil.rmtree(aside, ignore_errors=True)
    try:
        unfinished.rename(folder)
    except OSError:
        if not _is_complete(folder):  # otherwise another process was faster and wrote the same
            raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Flush to the disk, so that a power failure does not leave a name without content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed while they decoded."""
    for folder in parent.glob(".*"):
        try:
            if folder.is_dir() and time.time() - folder.stat().st_mtime > ABANDONED_AFTER:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another process removed it


def _fingerprint(name: str, version: int, sources: Sequence[Path]) -> str:
    facts = [name, str(version)]
    for source in sorted(sources):
        status = source.stat()
        facts.append(f"{source.resolve()} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
