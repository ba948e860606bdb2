"""The free chunks of the C library's heap, which forked processes would write to."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from shoal.engines.heap import POOL_BYTES, free_bytes
from shoal.engines.processes.interpreter import MALLOC

if not hasattr(ctypes.CDLL(None), "mallinfo2"):
    pytest.skip("only the C library of GNU reports its free memory", allow_module_level=True)

PROGRAM = """
import ctypes
import random
from shoal.engines.heap import POOL_BYTES, free_bytes, occupy_free_chunks

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
random.seed(1)
chunks = [library.malloc(random.choice([24, 100, 700, 3000, 20_000])) for _ in range(4000)]
for chunk in chunks[::2]:
    library.free(chunk)
end = max(chunks)
before = free_bytes()
occupy_free_chunks()
after = free_bytes()
inside = sum(library.malloc(random.choice([40, 500, 5000])) < end for _ in range(1000))
print(before, after, inside)
"""


def test_no_free_chunk_is_left_between_allocated_ones() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **MALLOC})
    before, after, inside = map(int, done.stdout.split())
    assert before > 5_000_000
    assert after < 0.01 * before
    assert inside <= 10, "new chunks are allocated after all earlier ones"


def test_free_bytes_counts_what_was_freed() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    chunks = [library.malloc(50_000) for _ in range(200)]
    before = free_bytes()
    for chunk in chunks[:-1:2]:
        library.free(chunk)
    assert free_bytes() - before > 3_000_000
    for chunk in chunks[1::2]:
        library.free(chunk)


BLOCKS_PROGRAM = """
import os
import random
import sys
import tempfile
from shoal.engines.heap import BLOCK_SIZES, occupy_free_blocks

def free_blocks():
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        sys._debugmallocstats()
        file.seek(0)
        rows = (line.split() for line in file.read().decode().splitlines())
        return {int(row[1]): int(row[4]) for row in rows if len(row) == 5 and all(map(str.isdigit, row))}

random.seed(1)
kept = [bytes(random.choice(range(1, 470))) for _ in range(100_000)]
random.shuffle(kept)
del kept[::3]
before = free_blocks()
occupy_free_blocks()
after = free_blocks()
assert list(before) == list(BLOCK_SIZES)
print(sum(before.values()), max(after[size] * size for size in BLOCK_SIZES))
"""


def test_no_free_block_of_python_is_left_in_a_pool_that_is_in_use() -> None:
    command = [sys.executable, "-c", BLOCKS_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, largest_after = map(int, done.stdout.split())
    assert before > 30_000
    assert largest_after <= POOL_BYTES, "at most one pool of each size has free blocks, for the objects of the search"
