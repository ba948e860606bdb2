"""What Shoal asks of the operating system beyond Python's own: kept in one place because it differs between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_c_library = ctypes.CDLL(None)
_malloc_trim = getattr(_c_library, "malloc_trim", None)
MIB = 2**20


def exit_with_parent(parent: int) -> None:
    """Have the kernel end this process when process `parent`, which made it, ends, however that happens (Linux).

    Elsewhere a child learns of its parent's end by the end of the pipe between them.
    """
    if sys.platform == "linux":
        _c_library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we could say so
        os._exit(1)


@dataclass(frozen=True)
class Memory:
    """Memory of one process in MiB: what is its own, and its share of what it shares."""

    uss: float
    pss: float


def process_memory() -> Memory | None:
    """Of this process, where the system tells."""
    try:
        rollup = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return None
    kib: dict[str, int] = {}
    for line in rollup.splitlines()[1:]:
        key, value, *_ = line.split()
        kib[key.rstrip(":")] = int(value)
    return Memory(uss=(kib["Private_Clean"] + kib["Private_Dirty"]) / 1024, pss=kib["Pss"] / 1024)


def release_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def available_memory() -> int:
    """Bytes that new processes may use: free memory, or what is left of the control group's limit if that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit there
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(free, 0)


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS reports a hard limit that it does not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def process_limit() -> int:
    """How many more processes and threads may exist, as far as the system tells."""
    import psutil

    limits = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    for path in ("/proc/sys/kernel/threads-max", "/proc/sys/kernel/pid_max", "/sys/fs/cgroup/pids.max"):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(Path(path).read_text()))
    return min((limit for limit in limits if limit > 0), default=2**31) - len(psutil.pids())


def processor_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def process_start_time() -> float:
    """When this process began, on the clock of `time.time`."""
    import psutil

    return float(psutil.Process(os.getpid()).create_time())
