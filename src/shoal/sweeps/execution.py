"""The runs of a sweep: as many at once as cores and memory allow, until all have ended."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal.engines.operating_system import MIB, available_memory
from shoal.engines.processes.capacity import SHARED_MIB
from shoal.engines.processes.slots import usable_cores
from shoal.experiment import Experiment
from shoal.experiment.resuming import ENDED
from shoal.results.progress import Progress
from shoal.results.records import RunFolder
from shoal.sweeps.messages import Advanced, Ended, Exited, FromLauncher, Noticed
from shoal.sweeps.plan import Combination
from shoal.sweeps.processes import RunProcesses

POLL_SECONDS = 0.25
"""The longest time between two updates of the progress."""
MIN_RUN_MIB = 50.0
"""Memory that a run needs in any case."""


@dataclass
class RunState:
    """A combination that runs or has ended."""

    combination: Combination
    started: float
    """When the run began to load its data, on the monotonic clock."""
    progress: Progress | None = None
    training: Progress | None = None
    """The latest progress of the training. When results are written, `progress` is about that."""
    startup: float | None = None
    """Seconds until its nodes began to train; None before that."""
    seconds: float | None = None
    """How long it took; None while it runs."""
    status: str | None = None
    """That of the run; "failed" if it could not start, or if its process was killed."""
    folder: RunFolder | None = None
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the run reached its end."""
        return self.status in ENDED


@dataclass
class SweepState:
    """What is shown of a sweep."""

    total: int
    skipped: int
    """Combinations that were done before."""
    running: dict[int, RunState] = field(default_factory=dict)
    ended: list[RunState] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> list[RunState]:
        return [run for run in self.ended if not run.has_ended]

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the mean duration of the runs that reached their end; None before the first one.

        As many runs as are going now go on at once: one, if each uses the whole machine.
        """
        durations = [run.seconds for run in self.ended if run.has_ended and run.seconds is not None]
        if not durations:
            return None
        mean = sum(durations) / len(durations)
        now = time.monotonic()
        waiting = self.total - self.skipped - len(self.ended) - len(self.running)
        going = sum(max(0.0, mean - (now - run.started)) for run in self.running.values())
        return (waiting * mean + going) / max(1, len(self.running))


class SweepListener(Protocol):
    """Shows a sweep."""

    def update(self, state: SweepState) -> None:
        """Called a few times per second."""
        ...

    def run_ended(self, state: SweepState, run: RunState) -> None: ...

    def notice(self, text: str) -> None: ...


def cores_needed(experiment: Experiment) -> int | None:
    """Return the cores that a run uses; None for all cores. Such a run has the machine for itself."""
    if experiment.engine == "processes" or experiment.simulation.batching == "ray":
        return None
    return experiment.simulation.workers if experiment.simulation.batching in ("auto", "pool") else 1


class Admission:
    """Decides whether another run may start now."""

    def __init__(self, jobs: int | None) -> None:
        self.cores = usable_cores()
        self.limit = min(self.cores, jobs or self.cores)
        self._memory = available_memory()
        """Bytes that are free before the first run."""
        self._peak = 0
        """The most memory that a run of this sweep needed."""

    def run_exited(self, peak_bytes: int) -> None:
        self._peak = max(self._peak, peak_bytes, int(MIN_RUN_MIB * MIB))

    def allows(self, experiment: Experiment, running: Sequence[Experiment]) -> bool:
        """Whether cores and memory suffice. A run always starts if no other is going: it may report an error itself."""
        if not running:
            return True
        needed = [cores_needed(other) for other in (experiment, *running)]
        if None in needed or len(running) >= self.limit or sum(cores or 0 for cores in needed) > self.cores:
            return False
        per_run = self._peak or int(SHARED_MIB * MIB)
        # Runs that have just started have not taken their memory yet; other programs may have taken some.
        return per_run * (1 + len(running)) <= self._memory and per_run <= available_memory()


class Execution:
    """Runs combinations to their ends, each in a process of its own."""

    def __init__(
        self,
        processes: RunProcesses,
        out: Path,
        listener: SweepListener,
        jobs: int | None = None,
        skipped: int = 0,
        is_enough: Callable[[RunState], bool] | None = None,
    ) -> None:
        """`skipped` is the number of combinations that were done before. A run is interrupted if it `is_enough`."""
        self._processes = processes
        self._out = out
        self._listener = listener
        self._admission = Admission(jobs)
        self._skipped = skipped
        self._is_enough = is_enough
        self._stopped: set[int] = set()

    def run(
        self, combinations: Sequence[Combination], resumed: Mapping[str, RunFolder] | None = None
    ) -> list[RunState]:
        """Run all combinations, and return their states in the order of combinations.

        `resumed` are runs that continue, by the identity of their combination. If the caller is interrupted, the runs
        go on until the processes are closed.
        """
        waiting = deque(enumerate(combinations))
        state = SweepState(self._skipped + len(combinations), self._skipped)
        ended: dict[int, RunState] = {}
        while waiting or state.running:
            while waiting and self._admission.allows(
                waiting[0][1].experiment, [run.combination.experiment for run in state.running.values()]
            ):
                number, combination = waiting.popleft()
                folder = (resumed or {}).get(combination.identity)
                self._processes.start(number, combination.experiment, self._out, folder)
                state.running[number] = RunState(combination, time.monotonic())
            for report in self._processes.wait(POLL_SECONDS):
                self._handle(report, state, ended)
            self._listener.update(state)
        return [ended[number] for number in range(len(combinations))]

    def _handle(self, report: FromLauncher, state: SweepState, ended: dict[int, RunState]) -> None:
        run = state.running[report.run]
        if isinstance(report, Advanced):
            self._advance(report, run)
        elif isinstance(report, Noticed) and report.run not in self._stopped:
            self._listener.notice(f"{run.combination.label}: {report.text}")
        elif isinstance(report, Ended):
            run.status, run.error = report.status, report.error
            run.folder = None if report.folder is None else RunFolder(Path(report.folder))
        elif isinstance(report, Exited):
            self._admission.run_exited(report.peak_bytes)
            if run.status is None:
                run.status, run.error = "failed", _describe_exit(report.code)
            run.seconds = time.monotonic() - run.started
            ended[report.run] = state.running.pop(report.run)
            state.ended.append(run)
            self._listener.run_ended(state, run)

    def _advance(self, report: Advanced, run: RunState) -> None:
        now = time.monotonic()
        if run.progress is None:
            run.started = now  # not the time of the first import of torch
        run.progress = report.progress
        if report.progress.phase == "running":
            run.training = report.progress
            if run.startup is None:
                run.startup = max(0.0, now - run.started - report.progress.seconds)
        if self._is_enough is not None and report.run not in self._stopped and self._is_enough(run):
            self._stopped.add(report.run)
            self._processes.stop([report.run])


def _describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL); the system does this if memory is short"
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
