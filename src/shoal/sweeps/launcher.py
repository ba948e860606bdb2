"""The process that starts the runs of a sweep: it imports torch once, and forks a process for every run.

It is a new interpreter, so that no thread of the caller is forked with it. It ends, and kills its runs, when the
process of the sweep ends, however that ends.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import math
import os
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

from shoal.engines.operating_system import exit_with_parent, resident_memory
from shoal.errors import ShoalError
from shoal.experiment import Experiment
from shoal.experiment.resuming import resume
from shoal.experiment.run_results import Run
from shoal.experiment.running import run
from shoal.experiment.setup import Setup
from shoal.results.progress import Progress
from shoal.sweeps.messages import (
    Advanced,
    Ended,
    Exited,
    Lines,
    Noticed,
    StartRun,
    decode_request,
    shorten,
    write_report,
)

REQUESTS = 0
"""The file with requests: the standard input."""
KIB = 1 if sys.platform == "darwin" else 1024
"""The unit of `ru_maxrss`."""


class Launcher:
    """Forks runs on request, and reports their ends."""

    def __init__(self, reports: int) -> None:
        self._reports = reports
        self._runs: dict[int, int] = {}
        """Run by process id."""
        self._memory = 0
        self._child_exited, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Handle requests until the sweep closes the pipe. Runs that are still going are killed then."""
        _preload()
        gc.collect()
        gc.freeze()  # the collector would write to memory that all runs share
        self._memory = resident_memory()
        lines = Lines()
        while True:
            ready = wait([REQUESTS, self._child_exited])
            if self._child_exited in ready:
                os.read(self._child_exited, 4096)
                self._reap()
            if REQUESTS in ready:
                content = os.read(REQUESTS, 2**16)
                if not content:
                    break
                for line in lines.add(content):
                    self._handle(line)
        for process in self._runs:
            os.kill(process, signal.SIGKILL)

    def _handle(self, line: bytes) -> None:
        request = decode_request(line)
        if isinstance(request, StartRun):
            self._fork(request)
            return
        for process, number in self._runs.items():
            if number == request.run:
                os.kill(process, signal.SIGTERM)

    def _fork(self, request: StartRun) -> None:
        launcher = os.getpid()
        process = os.fork()
        if process != 0:
            self._runs[process] = request.run
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            exit_with_parent(launcher)
            os.dup2(os.open(os.devnull, os.O_RDONLY), REQUESTS)
            for file in (self._child_exited, self._wakeup):
                os.close(file)
            code = run_in_this_process(request, self._reports)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for process in list(self._runs):
            ended, status, usage = os.wait4(process, os.WNOHANG)
            if ended:
                peak = max(0, usage.ru_maxrss * KIB - self._memory)
                number = self._runs.pop(process)
                write_report(self._reports, Exited(number, os.waitstatus_to_exitcode(status), peak))


class Reporter:
    """A `ProgressListener` that sends everything to the sweep."""

    def __init__(self, run: int, reports: int) -> None:
        self._run = run
        self._reports = reports

    def progress(self, progress: Progress) -> None:
        if progress.score is not None and not math.isfinite(progress.score[1]):
            progress = dataclasses.replace(progress, score=None)  # JSON has no such numbers
        write_report(self._reports, Advanced(self._run, progress))

    def notice(self, text: str) -> None:
        write_report(self._reports, Noticed(self._run, shorten(text)))


def run_in_this_process(request: StartRun, reports: int) -> int:
    """Run to the end, and report it. Returns the exit code of the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    listener = Reporter(request.run, reports)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: listener.notice(str(message))
        try:
            done = _run(request, listener)
        except KeyboardInterrupt:
            write_report(reports, Ended(request.run, "interrupted"))
            return 1
        except ShoalError as error:
            write_report(reports, Ended(request.run, "failed", error=shorten(str(error))))
            return 1
        except BaseException:
            write_report(reports, Ended(request.run, "failed", error=shorten(traceback.format_exc())))
            return 1
    write_report(reports, Ended(request.run, done.status, str(done.folder.path)))
    return 0


def _preload() -> None:
    """Import and initialise what almost every run needs, up to the writing of its results."""
    import pyarrow as pa
    import pyarrow.parquet

    importlib.import_module("shoal.engines.simulation.engine")

    Setup(Experiment(nodes=2)).warm_up()
    pa.table({"round": [0]})  # imports pandas, if it is installed


def _run(request: StartRun, listener: Reporter) -> Run:
    if request.resumed is not None:
        return resume(Path(request.resumed), listener)
    experiment = Experiment.from_table(request.table, base=Path(request.base))
    return run(experiment, Path(request.out), listener)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def main() -> None:
    exit_with_parent(int(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep decides what a Ctrl-C means
    Launcher(int(sys.argv[2])).serve()
