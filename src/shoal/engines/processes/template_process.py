"""The template of zygotes, seen from the process that starts runs. A script or a notebook may start many.

A new zygote takes two seconds of processor time for its imports. A template has imported what almost every run needs,
and forks a zygote for each later run. It ends with the process that started it, and its zygotes end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading

from shoal.engines.operating_system import inherited_attributes, is_stopped_process
from shoal.engines.processes.interpreter import module_command, zygote_environment

TEMPLATE = "shoal.engines.processes.zygote_template"
READY = b"r"
"""What the template sends when it has imported everything."""
LENGTH = struct.Struct("!I")
"""The length of a request, which follows as JSON. The files for a zygote are attached to the length."""
REPLY = struct.Struct("!i")
"""The id of the zygote; 0 if none could be forked and prepared."""
REPLY_SECONDS = 5.0
"""The longest wait for a zygote. A fork takes some milliseconds."""
CHANGEABLE = ("COLUMNS", "LINES", "PYTEST_CURRENT_TEST")
"""Variables that no module reads when it is imported, and which change often; beside those of Shoal (SHOAL_…)."""


class TemplateProcess:
    """A template, and the zygotes that are forked from it."""

    def __init__(self, state: dict[str, object]) -> None:
        """Start the template, without waiting for its imports. `state` is what it gets from this process."""
        self.state = state
        self._forked: int | None = None
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._ready = False
        with theirs:
            try:
                self._process = subprocess.Popen(
                    module_command(TEMPLATE, str(theirs.fileno()), str(os.getpid())),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=zygote_environment(),
                    start_new_session=True,  # a Ctrl-C in the terminal reaches the coordinator alone
                )
            except BaseException:
                self._socket.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether the template has imported everything."""
        if not self._ready:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self._ready = self._socket.recv(len(READY)) == READY
                self._socket.settimeout(REPLY_SECONDS)
        return self._ready

    @property
    def is_used(self) -> bool:
        """Whether a zygote of this template exists."""
        return self._forked is not None

    def fork(self, pipe: int, log: int) -> ForkedProcess:
        """Fork a zygote at this end of the pipe. Raises `OSError` if that is impossible: then the template must end."""
        request: dict[str, object] = {
            "environment": zygote_environment(),
            "folder": os.getcwd(),
            "path": [str(path) for path in sys.path],
        }
        self._send(request, [pipe, log])
        reply = self._socket.recv(REPLY.size, socket.MSG_WAITALL)
        if len(reply) < REPLY.size:
            raise ConnectionError("the template has ended")
        (pid,) = REPLY.unpack(reply)
        if not pid:
            raise ChildProcessError("the template cannot fork a zygote")
        self._forked = pid
        return ForkedProcess(pid, self)

    def reap(self, pid: int) -> None:
        """Release what the system keeps of a zygote that has ended. Until then, no other process can have its id."""
        self._forked = None
        self._send({"reap": pid})

    def _send(self, request: dict[str, object], files: list[int] | None = None) -> None:
        encoded = json.dumps(request).encode()
        socket.send_fds(self._socket, [LENGTH.pack(len(encoded))], files or [])
        self._socket.sendall(encoded)

    def close(self) -> None:
        """End the template. The kernel ends its zygotes."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


class ForkedProcess:
    """A zygote that a template has forked."""

    def __init__(self, pid: int, template: TemplateProcess) -> None:
        self.pid = pid
        self._template = template
        self._file = os.pidfd_open(pid)
        self._is_reaped = False

    @property
    def is_running(self) -> bool:
        return not self._is_reaped and not self._poll(0)

    @property
    def is_stopped(self) -> bool:
        return self.is_running and is_stopped_process(self.pid)

    def kill_group(self) -> None:
        # Otherwise the id may belong to another process: the system has reaped the zygote after the template's end.
        if not self._is_reaped and (self.is_running or self._template.is_running):
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self._is_reaped:
            return
        self._poll(None)
        self._is_reaped = True
        os.close(self._file)
        try:
            self._template.reap(self.pid)
        except OSError:
            self._template.close()  # it does not respond, or has ended

    def _poll(self, milliseconds: int | None) -> bool:
        """Wait for the end of the zygote. Returns whether it has ended."""
        poll = select.poll()  # not `select.select`, which fails if many files are open
        poll.register(self._file, select.POLLIN)
        return bool(poll.poll(milliseconds))


class ZygoteTemplates:
    """Decides when this process starts a template, and when it uses it. There is at most one at a time.

    A template is started beside a run if the run before would have used the same template. So the third run of a
    process is the first that may use it, and a command that makes one run never starts one. After one failed fork, or a
    template that ended before it was ready, this process starts no other template.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._template: TemplateProcess | None = None
        self._latest: dict[str, object] = {}
        """What the zygote of the latest run got from this process."""
        self._failed = False
        atexit.register(self.close)

    @property
    def is_ready(self) -> bool:
        """Whether a template can fork the zygote of the next run."""
        template = self._template
        return template is not None and template.is_running and template.is_ready

    def fork(self, pipe: int, log: int) -> ForkedProcess | None:
        """Fork the zygote of a run, at this end of the pipe to its agent; None if it must be started without template.

        Never waits for the imports of a template.
        """
        # The kernel ends a template with the thread that started it, and only its parent process can reap it.
        main = threading.current_thread() is threading.main_thread() and os.getpid() == self._owner
        if sys.platform != "linux" or not hasattr(os, "pidfd_open") or not main or self._failed:
            return None
        if self._template is not None and self._template.is_used:
            return None  # this run is started during another one, whose template must not be closed below
        try:
            state = _fixed_state()
        except OSError:  # such as too many open files
            return None
        try:
            return self._fork(state, pipe, log)
        except OSError:
            self._failed = True
            self.close()
        except BaseException:  # such as an interruption before the reply, which the next request would get
            self.close()
            raise
        return None

    def _fork(self, state: dict[str, object], pipe: int, log: int) -> ForkedProcess | None:
        latest, self._latest = self._latest, state
        if self._template is not None and not self._template.is_running:
            self._failed = not self._template.is_ready  # the next one would probably end before it is ready, too
            self.close()
            if self._failed:
                return None
        if self._template is not None and self._template.state == state:
            return self._template.fork(pipe, log) if self._template.is_ready else None
        if state == latest:
            self.close()
            self._template = TemplateProcess(state)
        return None

    def close(self) -> None:
        """End the template, if this process has started one."""
        if self._template is not None and os.getpid() == self._owner:
            self._template.close()
            self._template = None


def _fixed_state() -> dict[str, object]:
    """What a zygote gets from this process when it is started, and what a request to a template cannot change.

    Python and libraries read variables of the environment when they start. So only a few of them may change.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SHOAL_") and name not in CHANGEABLE
    }
    return {"environment": environment, "interpreter": sys.executable, **inherited_attributes()}
