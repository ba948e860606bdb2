"""A process that this process starts, with a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Protocol

from shoal.engines.operating_system import is_stopped_child


class ChildProcess(Protocol):
    """The process, and the group that it forms with all processes that it forks."""

    @property
    def pid(self) -> int:
        """Its id, and that of its group."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped the process."""
        ...

    def kill_group(self) -> None:
        """Kill the process and every other process of its group at once. Safe in a signal handler."""
        ...

    def wait(self) -> None:
        """Wait for the end of the process, and release what the system keeps of it."""
        ...


class StartedProcess:
    """A process with a new interpreter."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_stopped(self) -> bool:
        return is_stopped_child(self.pid)

    def kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all of them have ended

    def wait(self) -> None:
        self._process.wait()
