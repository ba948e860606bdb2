"""Training slots: how many nodes of a machine compute at the same time.

A machine with c cores trains c nodes as fast as a thousand at once, but a thousand trainings under way hold their
activations in memory, and evict each other from the caches. So a node takes a slot to train, and waits if all slots are
taken. A slot is a lock on one byte of a file without a name: the system releases the locks of a process that ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.types import NodeId


class Slots:
    """`count` slots that this process shares with all processes that it forks."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or usable_cores()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs

    @contextmanager
    def taken(self, node: NodeId) -> Iterator[None]:
        """Hold a slot. Blocks the calling thread. Only one thread of a process may hold a slot at a time."""
        slot = self._take(node)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)

    def _take(self, node: NodeId) -> int:
        """Take a free slot, or wait for one."""
        first = node % self.count
        for slot in range(first, first + self.count):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot % self.count)
            except BlockingIOError:
                continue
            return slot % self.count
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, first)
        return first


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
