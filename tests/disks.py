"""Disks of limited size, which tests fill and free."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.results.progress import NullProgressListener


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A disk of this size at `folder`, which is created."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "shoal-test", str(folder)]
    if (made := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"a disk of limited size needs root: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Use all the space that is left, and return the file that takes it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**16, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return filler


class FreesTheDisk(NullProgressListener):
    """Deletes a file when a notice contains `at`, as a user does who reads that the disk is full."""

    def __init__(self, filler: Path, at: str) -> None:
        self.notices: list[str] = []
        self._filler = filler
        self._at = at

    def notice(self, text: str) -> None:
        self.notices.append(text)
        if self._at in text:
            self._filler.unlink(missing_ok=True)
