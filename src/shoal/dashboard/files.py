"""Reads files of runs that anyone may have written: no links, no devices, a limit on the size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import DataError

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Without O_NONBLOCK, opening a named pipe waits for its writer."""


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Open a folder that is not a link. Raises `OSError`."""
    descriptor = os.open(path, READ_FLAGS | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_file(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file that is not a link. Raises `OSError`."""
    descriptor = os.open(path, READ_FLAGS)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path}: not a regular file")
        yield descriptor, found
    finally:
        os.close(descriptor)


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises `OSError`, or `DataError` if it is larger."""
    with opened_file(path) as (descriptor, found):
        if found.st_size > limit:
            raise DataError(f"{path}: the file has {found.st_size:,} bytes; expected at most {limit:,}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(limit)
