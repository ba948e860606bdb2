"""Data sets decoded once, into arrays that every process maps into its memory: one copy, and no time to load.

The decoded form lives in a cache folder of its own, never beside the source files, which may be read-only. It is found
by the sources' names, sizes and times of change, and by the version of what decoded them; when one of these changes,
it is decoded anew. A folder is written under another name and renamed when it is whole: it is never half there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

from shoal.errors import DataError

Arrays = dict[str, NDArray[Any]]


def cache_folder() -> Path:
    """Where decoded data sets are kept: SHOAL_CACHE, or the platform's place for caches."""
    return Path(os.environ.get("SHOAL_CACHE") or platformdirs.user_cache_dir("shoal")) / "decoded"


def decoded(
    name: str, version: int, sources: Sequence[Path], decode: Callable[[Path], Mapping[str, NDArray[Any]]]
) -> Arrays:
    """The arrays of a data set, read-only and memory-mapped.

    `decode` is called when they are not there yet, with an empty folder to work in; large arrays it may write there
    itself as `<array>.npy` and leave out of what it returns. Raises `DataError` when the cache cannot be written, and
    whatever `decode` raises.
    """
    folder = cache_folder() / f"{name}-{_fingerprint(name, version, sources)}"
    if not folder.is_dir():
        _write(folder, decode)
    return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(folder.glob("*.npy"))}


def is_decoded(name: str) -> bool:
    """Whether a decoded form of the data set is there, of whatever source."""
    named = re.compile(f"{re.escape(name)}(-.*)?-[0-9a-f]{{16}}")
    return any(named.fullmatch(folder.name) for folder in cache_folder().glob(f"{name}-*"))


def _write(folder: Path, decode: Callable[[Path], Mapping[str, NDArray[Any]]]) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise DataError(
            f"cannot write the decoded data set to {folder.parent}: {error.strerror}; set SHOAL_CACHE to a folder "
            "that can be written"
        ) from error
    try:
        for name, array in decode(unfinished).items():
            np.save(unfinished / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, and wrote the same
                raise
    except OSError as error:
        raise DataError(f"cannot write the decoded data set to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fingerprint(name: str, version: int, sources: Sequence[Path]) -> str:
    facts = [name, str(version)]
    for source in sorted(sources):
        status = source.stat()
        facts.append(f"{source.resolve()} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
