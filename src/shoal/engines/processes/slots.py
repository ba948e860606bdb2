"""Training slots: how many nodes of a machine compute at the same time.

A machine with c cores trains few more than c nodes as fast as a thousand at once, but a thousand trainings under way
hold their activations in memory, and evict each other from the caches. So a node takes a slot to train, and waits if
all slots are taken. There are a few more slots than cores: between the training of one node and that of the next, a
core has another training to go on with.

The free slots are numbers in a pipe: a node reads one, and writes it back after training. So a node that waits gets
whichever slot is free first, and a stopped node occupies no more than its own slot. While a node holds a slot, it also
holds a lock on that byte of a file without a name, which the system releases when the process ends. If a node was
killed, its slot is neither in the pipe nor locked: the zygote puts it back (`restore_lost`).
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

MAX_SLOTS = 1024
"""The numbers of so many slots fit into any pipe: the smallest pipes of Linux have one page."""
_NUMBER = struct.Struct("<I")


class Slots:
    """`count` slots that this process shares with all processes that it forks."""

    def __init__(self, count: int | None = None) -> None:
        """`count` None: `slots_for` the cores of this machine."""
        self.count = min(count or slots_for(usable_cores()), MAX_SLOTS)
        self._locks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "slots")
            os.mkfifo(path)
            # All processes share the flags of an open file, so a read that does not block needs one of its own.
            self._free_now = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._returned = os.open(path, os.O_WRONLY)
            self._free = os.open(path, os.O_RDONLY)
        for slot in range(self.count):
            self._put_back(slot)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold a slot. Blocks the calling thread. Only one thread of a process may hold a slot at a time."""
        slot = self._take()
        try:
            yield
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, slot)
            self._put_back(slot)

    def restore_lost(self) -> None:
        """Put back the slots of processes that ended while they held one. Call it when a process has ended.

        A process that has read a number, and has not locked it yet, looks as if it had ended. Then a number is in the
        pipe twice, until a process reads it that cannot lock it.
        """
        for slot in set(range(self.count)).difference(self._free_slots()):
            if self._lock(slot):
                fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, slot)
                self._put_back(slot)

    def _take(self) -> int:
        while True:
            slot = self._read(self._free)
            if self._lock(slot):
                return slot

    def _free_slots(self) -> set[int]:
        """The numbers in the pipe, each of which is put back once."""
        free = set()
        try:
            while True:
                free.add(self._read(self._free_now))
        except BlockingIOError:
            for slot in free:
                self._put_back(slot)
        return free

    def _lock(self, slot: int) -> bool:
        """Lock the slot. Returns False if another process holds it."""
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except BlockingIOError:
            return False
        return True

    def _read(self, pipe: int) -> int:
        (slot,) = _NUMBER.unpack(os.read(pipe, _NUMBER.size))
        return int(slot)

    def _put_back(self, slot: int) -> None:
        os.write(self._returned, _NUMBER.pack(slot))


def slots_for(cores: int) -> int:
    """The number of slots that keeps so many cores busy: a quarter more, at least one more."""
    return cores + math.ceil(cores / 4)


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
