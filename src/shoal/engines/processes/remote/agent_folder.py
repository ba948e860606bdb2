"""The folder of one agent process, which ends with the process.

A process that is killed cannot remove its folder. The next agent with the same parent folder does: the process holds a
lock on its folder, which the kernel releases when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import LaunchError

PREFIX = "shoal-agent-"
ATTEMPTS = 10


@contextmanager
def agent_folder(parent: Path) -> Iterator[Path]:
    """Create a folder of this process in `parent`, and remove it at the end. Removes folders of dead processes.

    Raises `LaunchError` if the file system has no locks.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent)
    path, lock = _create(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _create(parent: Path) -> tuple[Path, int]:
    """Create a folder and lock it. Another agent may take a folder for abandoned before it is locked: try again."""
    for _ in range(ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        if (lock := _lock(path)) is not None:
            return path, lock
        shutil.rmtree(path, ignore_errors=True)
    raise LaunchError(f"folders in {str(parent)!r} cannot be locked; give a folder on a local disk with --folder")


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        if (lock := _lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock a folder of this user. Returns None if another process has locked or removed it."""
    with suppress(OSError):
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            return None
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
    return None
