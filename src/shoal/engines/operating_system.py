"""Calls to the operating system that Python does not offer, in one place because systems differ."""

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
    """Let the kernel kill this process when its parent process `parent` ends, for whatever reason (Linux).

    On other systems a child detects the end of its parent by the end of the pipe between them.
    """
    if sys.platform == "linux":
        _c_library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def is_stopped_child(child: int) -> bool:
    """Whether a child process was stopped by a signal (SIGSTOP) and has not been continued.

    False where the system cannot report it (macOS). Does not reap the child if it has ended.
    """
    if not hasattr(os, "waitid"):
        return False
    # Without WEXITED, the call would raise an error for a child that has ended.
    status = os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return status is not None and status.si_code == os.CLD_STOPPED


def is_stopped_process(process: int) -> bool:
    """Whether a process, which need not be a child, was stopped by a signal and has not been continued (Linux)."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False  # it has ended


_INHERITED_STATUS = (
    *("Uid", "Gid", "Groups", "Umask", "SigBlk", "SigIgn", "Cpus_allowed", "Mems_allowed"),
    *("NoNewPrivs", "Seccomp", "Seccomp_filters", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)


def inherited_attributes() -> dict[str, object]:
    """What a new child of this process inherits beside the environment and the working folder (Linux).

    This covers limits, rights, priority, processors and namespaces, but not everything: not the input/output priority,
    keyrings and security labels, for example, and only the number of seccomp filters. Only for the main thread.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    attributes: dict[str, object] = {name: status.get(name) for name in _INHERITED_STATUS}
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            attributes[name] = resource.getrlimit(getattr(resource, name))
    for name in os.listdir("/proc/self/ns"):
        attributes[f"namespace {name}"] = os.readlink(f"/proc/self/ns/{name}")
    root = os.stat("/proc/self/root/")  # the link itself is "/" after a chroot, too
    attributes["root"] = root.st_dev, root.st_ino
    for name in ("cgroup", "oom_score_adj"):
        attributes[name] = Path(f"/proc/self/{name}").read_text()
    attributes["priority"] = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    return attributes


@dataclass(frozen=True)
class Memory:
    """Memory of one process in MiB: its private memory (USS), and with its share of shared memory (PSS)."""

    uss: float
    pss: float


def process_memory() -> Memory | None:
    """The memory of this process; None if the system does not report it."""
    try:
        rollup = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return None
    kib: dict[str, int] = {}
    for line in rollup.splitlines()[1:]:
        key, value, *_ = line.split()
        kib[key.rstrip(":")] = int(value)
    return Memory(uss=(kib["Private_Clean"] + kib["Private_Dirty"]) / 1024, pss=kib["Pss"] / 1024)


def resident_memory() -> int:
    """Bytes of this process that are in the machine's memory; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def release_memory() -> None:
    """Return freed memory to the system, if the C library can (glibc)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def available_memory() -> int:
    """Bytes that new processes may use: free memory, or the rest of the control group's limit if that is less."""
    free = _machine_memory()
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit there
            free = min(free, int(_read(limit)) - int(_read(used)))
    return max(free, 0)


def _machine_memory() -> int:
    """Bytes of the machine's memory that new processes may use. Nodes ask often: psutil takes five times as long."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(_read("/proc/meminfo").split(b"MemAvailable:", 1)[1].split(None, 1)[0]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def _read(path: str) -> bytes:
    """Read a small file of the system, at once."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 2**16)
    finally:
        os.close(file)


def raise_file_limit() -> int:
    """Raise the limit of open files to the hard limit. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS reports a hard limit that it does not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def process_limit() -> int:
    """How many more processes and threads may exist, as far as the system reports it."""
    import psutil

    limits = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    for path in ("/proc/sys/kernel/threads-max", "/proc/sys/kernel/pid_max", "/sys/fs/cgroup/pids.max"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(Path(path).read_text()))
    return min((limit for limit in limits if limit > 0), default=2**31) - len(psutil.pids())


def processor_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def process_start_time() -> float:
    """When this process started, on the clock of `time.time`."""
    import psutil

    return float(psutil.Process(os.getpid()).create_time())
