"""The zygote, seen from the agent that starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Pipe

from shoal.engines.processes import control
from shoal.errors import RunError
from shoal.results.records import RunFolder

MALLOC = {
    # One heap for all threads of a node. It grows and shrinks only when a node calls `release_memory`: the private
    # memory of a node is small between trainings, and a training does not pay for every allocation again.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ZygoteProcess:
    """The zygote's process, and the process group that it forms with all nodes."""

    def __init__(self, folder: RunFolder) -> None:
        self._pipe, zygote_pipe = Pipe()
        environment = {**os.environ, **MALLOC, **ONE_THREAD}
        with open(folder.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.engines.processes.zygote", str(zygote_pipe.fileno()), str(os.getpid())],
                pass_fds=[zygote_pipe.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal reaches the coordinator alone
            )
        self._log = folder.log
        zygote_pipe.close()

    def send(self, request: control.ToAgent) -> None:
        try:
            self._pipe.send_bytes(control.encode(request))
        except OSError as error:
            raise self._exited() from error

    def has_report(self) -> bool:
        return self._pipe.poll()

    def receive(self) -> control.FromAgent:
        try:
            report: control.FromAgent = control.decode_from_agent(self._pipe.recv_bytes())
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
        self._pipe.close()

    def _exited(self) -> RunError:
        return RunError(f"the process that starts nodes exited unexpectedly; see {self._log}")
