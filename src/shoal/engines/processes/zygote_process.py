"""The zygote, seen from the agent that starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from multiprocessing.connection import Pipe

from shoal.engines.operating_system import is_stopped_child
from shoal.engines.processes import control
from shoal.errors import RunError
from shoal.results.records import RunFolder, writing_to

MALLOC = {
    # One heap for all threads of a node. It grows and shrinks only when a node calls `release_memory`: the private
    # memory of a node is small between trainings, and a training does not pay for every allocation again.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}
ZYGOTE = "shoal.engines.processes.zygote"
START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv.pop()); importlib.import_module(sys.argv[1]).main()"
)
"""Run a module in a process that looks for modules where this one does, and not in the working folder."""
PRELOAD = "--preload"
"""The option of a zygote that imports what runs need before it belongs to a run."""
WRITE_BYTES = 2**16
"""The most bytes of one write to the pipe."""
MAX_REQUEST_BYTES = 2**31 - 1
"""Longer messages have another header in `multiprocessing`."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ZygoteProcess:
    """The zygote's process, and the process group that it forms with all nodes."""

    def __init__(self, folder: RunFolder | None = None) -> None:
        """Start the zygote of the run in this folder. Without one, it imports what runs need, and waits for `begin`."""
        self._pipe, zygote_pipe = Pipe()
        self._folder = folder
        self._process = self._start(zygote_pipe.fileno())
        zygote_pipe.close()
        self._socket = socket.socket(fileno=os.dup(self._pipe.fileno()))  # a duplex pipe is a pair of sockets
        self._unsent = bytearray()
        """Requests that the zygote has not read yet, beyond what the pipe holds."""
        if folder is not None:
            self.begin(folder)

    def _start(self, pipe: int) -> subprocess.Popen[bytes]:
        options = [PRELOAD] if self._folder is None else []
        arguments = [ZYGOTE, str(pipe), str(os.getpid()), *options, json.dumps([str(path) for path in sys.path])]
        with ExitStack() as opened:
            log = None  # the output of this process
            if self._folder is not None:
                opened.enter_context(writing_to(self._folder.log))
                log = opened.enter_context(open(self._folder.log, "ab"))
            return subprocess.Popen(
                [sys.executable, "-P", "-c", START, *arguments],
                pass_fds=[pipe],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **MALLOC, **ONE_THREAD},
                start_new_session=True,  # a Ctrl-C in the terminal reaches the coordinator alone
            )

    def begin(self, folder: RunFolder) -> None:
        """Serve the run in this folder."""
        self._folder = folder
        self._send_bytes(str(folder.path.resolve()).encode())

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, request: control.ToZygote) -> None:
        """Send a request, or keep it for `flush`. Never waits: a stopped zygote must not stop the coordinator too."""
        self._send_bytes(control.encode(request))

    def _send_bytes(self, encoded: bytes) -> None:
        if len(encoded) > MAX_REQUEST_BYTES:
            raise RunError(f"a request of {len(encoded):,} bytes to the process that starts nodes: use a smaller model")
        self._unsent += struct.pack("!i", len(encoded))  # the framing of `Connection.recv_bytes`
        self._unsent += encoded
        self.flush()

    def flush(self) -> None:
        """Send what is left of earlier requests, as far as the pipe accepts it."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[:WRITE_BYTES], socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError as error:
            raise self._exited() from error

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def is_stopped(self) -> bool:
        return is_stopped_child(self._process.pid)

    def has_report(self) -> bool:
        return self._pipe.poll()

    def receive(self) -> control.FromZygote:
        try:
            report: control.FromZygote = control.decode_from_zygote(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._exited() from error
        return report

    def fileno(self) -> int:
        return self._pipe.fileno()

    def kill(self) -> None:
        """Kill the zygote and every node at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all of them have exited

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._socket.close()
        self._pipe.close()

    def _exited(self) -> RunError:
        assert self._folder is not None
        return RunError(f"the process that starts nodes exited unexpectedly; see {self._folder.log}")
