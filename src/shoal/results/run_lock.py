"""The lock of a folder of a run or of a sweep: no two processes write to it at the same time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import CheckpointError
from shoal.results.records import RunFolder, writing_to


def is_locked(folder: RunFolder) -> bool:
    """Whether a process of this machine holds the lock: the run is still going."""
    file = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


@contextmanager
def lock(folder: RunFolder) -> Iterator[None]:
    """Hold the lock of a run. Raises `CheckpointError` if the run is still going."""
    problem = "the run is still going; wait until it ends, or stop it, before you resume it"
    with lock_folder(folder.path, problem):
        yield


@contextmanager
def lock_folder(path: Path, problem: str) -> Iterator[None]:
    """Hold the lock of a folder. Raises `CheckpointError` with the problem if another process holds it.

    The system releases the lock when the process ends, however it ends.
    """
    with writing_to(path):
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{path}: {problem}") from None
        yield
    finally:
        os.close(file)
