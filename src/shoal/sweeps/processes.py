"""The processes of a sweep's runs, seen from the sweep."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType

from shoal.engines.processes.interpreter import ONE_THREAD, module_command
from shoal.errors import RunError
from shoal.experiment import Experiment
from shoal.experiment.plugin_files import with_plugin_hashes
from shoal.results.records import RunFolder
from shoal.sweeps.messages import Exited, FromLauncher, Lines, StartRun, StopRun, ToLauncher, decode_report, encode_line

LAUNCHER = "shoal.sweeps.launcher"
STOP_SECONDS = 20.0
"""The time that interrupted runs have to write their results, before they are killed."""


class RunProcesses:
    """Starts runs in processes of their own, and receives their reports. No process outlives it."""

    def __init__(self, log: Path) -> None:
        """`log` is the file for what runs print."""
        self._log = log
        self._lines = Lines()
        self._going: set[int] = set()
        reports, theirs = os.pipe()
        self._reports = reports
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                module_command(LAUNCHER, str(theirs), str(os.getpid())),
                pass_fds=[theirs],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,  # a Ctrl-C in the terminal reaches the sweep alone
            )
        os.close(theirs)

    def __enter__(self) -> RunProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self, run: int, experiment: Experiment, out: Path, resumed: RunFolder | None = None) -> None:
        """Start a run in a new folder below `out`, or continue the run in `resumed`."""
        self._going.add(run)
        folder = None if resumed is None else str(resumed.path)
        self._send(StartRun(run, with_plugin_hashes(experiment), str(experiment.base), str(out), folder))

    def stop(self, runs: Iterable[int]) -> None:
        """Interrupt runs."""
        for run in runs:
            self._send(StopRun(run))

    def wait(self, seconds: float) -> list[FromLauncher]:
        """Return new reports as soon as there are any, or nothing after so many seconds."""
        ready = wait([self._reports], seconds)
        if not ready and self._process.poll() is None:
            return []
        content = os.read(self._reports, 2**20) if ready else b""
        if not content:
            raise RunError(
                f"the process that starts runs has ended: it was killed, or an error ended it; see {self._log}. Give "
                "the same command again to go on"
            )
        reports = [decode_report(line) for line in self._lines.add(content)]
        self._going -= {report.run for report in reports if isinstance(report, Exited)}
        return reports

    def close(self) -> None:
        """Interrupt all runs, wait until they have written their results, and end all processes."""
        deadline = time.monotonic() + STOP_SECONDS
        try:
            self.stop(self._going)
            while self._going and (left := deadline - time.monotonic()) > 0:
                self.wait(left)
        except RunError:
            pass  # all of them have ended
        finally:
            self._end()

    def _end(self) -> None:
        """Close the pipes: the launcher kills what is left, and exits."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            self._process.stdin = None
        self._process.wait()
        os.close(self._reports)

    def _send(self, request: ToLauncher) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode_line(request))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RunError(f"the process that starts runs has ended; see {self._log}") from None
