"""The heap of the C library (glibc), as processes share it after a fork. On other systems nothing happens here.

A forked process shares the pages of its parent until it writes to them. If there are free chunks between the objects of
the parent, the child allocates its own objects there, and a shared page becomes private with each of them.
`occupy_free_chunks` allocates these chunks before the fork, for good. A child then allocates in new pages.
"""

from __future__ import annotations

import ctypes

from shoal.engines.operating_system import release_memory

_c_library = ctypes.CDLL(None)
_mallinfo = getattr(_c_library, "mallinfo2", None)
SMALL_CHUNKS = range(2040, 8, -16)
"""Every size of chunk below 2 KiB, as glibc rounds them."""

CACHED_BYTES = 2**20
"""More than glibc keeps in a thread's cache of small chunks. It does not count them as free."""


class _MallocInfo(ctypes.Structure):
    """The result of `mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def free_bytes() -> int:
    """Bytes in free chunks between allocated ones; 0 if the C library does not report it."""
    if _mallinfo is None:
        return 0
    found = _malloc_info(_mallinfo)
    return int(found.fordblks - found.keepcost)  # without the free memory at the end of the heap


def heap_free_bytes() -> int:
    """Bytes that are free in the heap, at its end too; 0 if the C library does not report it."""
    return 0 if _mallinfo is None else int(_malloc_info(_mallinfo).fordblks)


def occupy_free_chunks() -> None:
    """Allocate all free chunks between allocated ones, and never free them."""
    if _mallinfo is None:
        return
    release_memory()  # so that almost no free memory is at the end of the heap
    malloc, free, sbrk = _c_library.malloc, _c_library.free, _c_library.sbrk
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None
    sbrk.argtypes, sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    end = sbrk(0) - _malloc_info(_mallinfo).keepcost
    left = free_bytes() + CACHED_BYTES  # a limit, in case that the heap is not what this function expects
    # Larger chunks are split, so that one pass from large to small sizes leaves almost none.
    for size in (*(2**power for power in range(left.bit_length(), 10, -1)), *SMALL_CHUNKS):
        while left >= size:
            chunk = malloc(size)
            if chunk is None or chunk >= end:  # there is no free chunk of this size
                free(chunk)
                break
            left -= size
    release_memory()


def _malloc_info(mallinfo: ctypes._FuncPointer) -> _MallocInfo:
    mallinfo.restype = _MallocInfo
    found: _MallocInfo = mallinfo()
    return found
