"""Slots for training: how many nodes of a machine compute at the same time.

A machine with c cores trains c nodes as fast as it trains a thousand at once, but a thousand half-done trainings hold
their activations in memory, and push each other out of the caches. So a node takes a slot to train, and waits for one
where all are taken. A slot is a lock on a byte of a nameless file: when a process dies, the system frees what it held.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.types import NodeId


class Slots:
    """`count` slots, common to this process and all that it forks."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or usable_cores()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process

    @contextmanager
    def taken(self, node: NodeId) -> Iterator[None]:
        """Hold a slot. Blocks the calling thread; one thread of a process at a time."""
        slot = self._take(node)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)

    def _take(self, node: NodeId) -> int:
        """A free slot, or else a place in the queue for one of them."""
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
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
