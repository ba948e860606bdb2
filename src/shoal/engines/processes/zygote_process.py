"""The zygote, seen from the supervisor that starts it."""

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
    # One heap for all threads of a node. It grows and shrinks only when nodes say so (`release_memory`): a node's
    # private memory is small between trainings, and a training does not pay for every allocation anew.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ZygoteProcess:
    """A process of its own, and the group of all nodes."""

    def __init__(self, folder: RunFolder) -> None:
        self.pipe, theirs = Pipe()
        environment = {**os.environ, **MALLOC, **ONE_THREAD}
        with open(folder.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.engines.processes.zygote", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal reaches the supervisor alone
            )
        self._log = folder.log
        theirs.close()

    def say(self, said: control.ToZygote) -> None:
        try:
            self.pipe.send_bytes(control.encode(said))
        except OSError as error:
            raise self._died() from error

    def hear(self) -> control.FromZygote:
        try:
            said: control.FromZygote = control.decode_from_zygote(self.pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died() from error
        return said

    def kill(self) -> None:
        """The zygote and every node, at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all gone already

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self.pipe.close()

    def _died(self) -> RunError:
        return RunError(f"the process that starts nodes died; its last words are in {self._log}")
