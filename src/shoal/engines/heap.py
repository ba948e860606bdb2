"""The heaps of the C library (glibc) and of Python, as processes share them after a fork.

A forked process shares the pages of its parent until it writes to them. If there is free memory between the objects of
the parent, the child allocates its own objects there, and a shared page becomes private with each of them.
`occupy_free_chunks` (of glibc; on other systems it does nothing) and `occupy_free_blocks` (of Python) allocate this
memory before the fork, for good. A child then allocates in new pages.
"""

from __future__ import annotations

import ctypes

import numpy as np

from shoal.engines.operating_system import release_memory

_c_library = ctypes.CDLL(None)
_mallinfo = getattr(_c_library, "mallinfo2", None)
SMALL_CHUNKS = range(2040, 8, -16)
"""Every size of chunk below 2 KiB, as glibc rounds them."""

CACHED_BYTES = 2**20
"""More than glibc keeps in a thread's cache of small chunks. It does not count them as free."""


BLOCK_SIZES = range(16, 513, 16)
"""The sizes of the blocks that Python allocates in pools. A pool has blocks of one size."""

POOL_BYTES = 2**14
POOL_HEADER_BYTES = 48
TEMPORARY_BLOCKS = 4
"""At most this many blocks of a new pool hold objects of the search itself."""

BLOCKS_LIMIT_BYTES = 2**22
"""At most this much is allocated for a size. Without a new pool by then, Python has another allocator."""


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


def occupy_free_blocks() -> None:
    """Allocate all free blocks in pools that are partly in use, and never free them."""
    for size in BLOCK_SIZES:
        if not _occupy_free_blocks(size):
            return  # Python has another allocator


def _occupy_free_blocks(size: int) -> bool:
    """Returns whether Python has taken a new pool, as it does when all pools of this size are full."""
    malloc, free = ctypes.pythonapi.PyObject_Malloc, ctypes.pythonapi.PyObject_Free
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None
    blocks_per_pool = (POOL_BYTES - POOL_HEADER_BYTES) // size
    for _ in range(0, BLOCKS_LIMIT_BYTES, 2 * POOL_BYTES):
        blocks = np.fromiter((malloc(size) or 0 for _ in range(2 * blocks_per_pool)), np.uint64)
        pools, counts = np.unique(blocks // POOL_BYTES, return_counts=True)
        new = pools[counts >= blocks_per_pool - TEMPORARY_BLOCKS]
        if new.size:
            first = int(np.argmax(np.isin(blocks // POOL_BYTES, new)))
            for block in blocks[first:].tolist():  # of new pools only
                free(block)
            return True
    return False


def _malloc_info(mallinfo: ctypes._FuncPointer) -> _MallocInfo:
    mallinfo.restype = _MallocInfo
    found: _MallocInfo = mallinfo()
    return found
