"""The zygote, seen from the agent that starts it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from multiprocessing.connection import Pipe
from typing import IO

from shoal.engines.processes import control
from shoal.engines.processes.child_process import ChildProcess, StartedProcess
from shoal.engines.processes.interpreter import module_command, zygote_environment
from shoal.engines.processes.template_process import ZygoteTemplates
from shoal.errors import RunError
from shoal.results.records import RunFolder, writing_to

ZYGOTE = "shoal.engines.processes.zygote"
PRELOAD = "--preload"
"""The option of a zygote that imports what runs need before it belongs to a run."""
WRITE_BYTES = 2**16
"""The most bytes of one write to the pipe."""
MAX_REQUEST_BYTES = 2**31 - 1
"""Longer messages have another header in `multiprocessing`."""


class ZygoteProcess:
    """The zygote's process, and the process group that it forms with all nodes."""

    def __init__(self, folder: RunFolder | None = None, templates: ZygoteTemplates | None = None) -> None:
        """Start the zygote of the run in this folder. Without one, it imports what runs need, and waits for `begin`.

        The zygote is forked from a template if `templates` has one.
        """
        self._pipe, zygote_pipe = Pipe()
        self._folder = folder
        self._unsent = bytearray()
        """Requests that the zygote has not read yet, beyond what the pipe holds."""
        with zygote_pipe:
            self._socket = socket.socket(fileno=os.dup(self._pipe.fileno()))  # a duplex pipe is a pair of sockets
            try:
                self._process = self._start(zygote_pipe.fileno(), templates)
            except BaseException:
                self._close_pipe()
                raise
        try:
            if folder is not None:
                self.begin(folder)
        except BaseException:
            self.close()
            raise

    def _start(self, pipe: int, templates: ZygoteTemplates | None) -> ChildProcess:
        if self._folder is None:
            return self._start_interpreter(pipe, None, PRELOAD)
        with writing_to(self._folder.log), open(self._folder.log, "ab") as log:
            forked = None if templates is None else templates.fork(pipe, log.fileno())
            return forked or self._start_interpreter(pipe, log)

    @staticmethod
    def _start_interpreter(pipe: int, log: IO[bytes] | None, *options: str) -> StartedProcess:
        """Start the zygote as a new interpreter. It prints to `log`; None: to the output of this process."""
        return StartedProcess(
            subprocess.Popen(
                module_command(ZYGOTE, str(pipe), str(os.getpid()), *options),
                pass_fds=[pipe],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=zygote_environment(),
                start_new_session=True,  # a Ctrl-C in the terminal reaches the coordinator alone
            )
        )

    def begin(self, folder: RunFolder) -> None:
        """Serve the run in this folder."""
        self._folder = folder
        self._send_bytes(str(folder.path.resolve()).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_running

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
        return self._process.is_stopped

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
        self._process.kill_group()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._close_pipe()

    def _close_pipe(self) -> None:
        self._socket.close()
        self._pipe.close()

    def _exited(self) -> RunError:
        assert self._folder is not None
        return RunError(f"the process that starts nodes exited unexpectedly; see {self._folder.log}")
