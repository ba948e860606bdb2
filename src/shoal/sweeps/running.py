"""The runs of a sweep in its folder: only missing runs are started."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shoal.results.records import RunFolder
from shoal.sweeps.execution import Execution, RunState, SweepListener
from shoal.sweeps.folder import check_versions, find_progress, remove_unfinished
from shoal.sweeps.plan import Combination
from shoal.sweeps.processes import RunProcesses

LOG = "sweep.log"
"""The file in the folder of a sweep for what runs print."""


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep runs; no result depends on it."""

    jobs: int | None = None
    """The most runs at once; default: one for each core."""
    any_version: bool = False
    """Whether finished runs of other versions of the software count as done."""


@dataclass(frozen=True)
class SweepResult:
    """The runs of a sweep."""

    folders: dict[str, RunFolder]
    """The run of each combination that reached its end, by identity."""
    failed: tuple[RunState, ...]
    """Combinations that did not reach their end."""


class SweepRunner:
    """Runs combinations. The processes that it starts have ended when it is closed."""

    def __init__(self, log: Path, listener: SweepListener, options: SweepOptions) -> None:
        self._log = log
        self._listener = listener
        self._options = options
        self._stack = ExitStack()
        self._processes: RunProcesses | None = None

    def __enter__(self) -> SweepRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, combinations: Sequence[Combination], out: Path) -> SweepResult:
        """Run the combinations that are not done in the folder `out`, which is open.

        Raises `ExperimentError` if runs of other versions of the software are done.
        """
        notice, any_version = self._listener.notice, self._options.any_version
        found = find_progress(combinations, out, any_version)
        check_versions(found, out, notice, any_version)
        remove_unfinished(found, out, notice)
        done = {identity: run.folder for identity, run in found.done.items()}
        if done:
            notice(f"{len(done)} of {len(combinations)} runs are done already, in {out}")
        missing = [combination for combination in combinations if combination.identity not in done]
        if not missing:
            return SweepResult(done, ())
        if self._processes is None:
            self._processes = self._stack.enter_context(RunProcesses(self._log))
        resumed = {identity: run.folder for identity, run in found.resumable.items()}
        execution = Execution(self._processes, out, self._listener, self._options.jobs, len(done))
        failed = []
        for state in execution.run(missing, resumed):
            if state.folder is not None and state.has_ended:
                done[state.combination.identity] = state.folder
            else:
                failed.append(state)
        return SweepResult(done, tuple(failed))
