"""A sweep from its plan to its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.results.records import RunFolder
from shoal.sweeps.execution import Execution, RunState, SweepListener
from shoal.sweeps.folder import find_progress
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
    """The runs of a sweep, in the order of combinations."""

    folders: dict[str, RunFolder]
    """The run of each combination that reached its end, by identity."""
    failed: tuple[RunState, ...]
    """Combinations that did not reach their end."""


def run_combinations(
    combinations: Sequence[Combination], out: Path, listener: SweepListener, options: SweepOptions
) -> SweepResult:
    """Run the combinations that are not done. The folder of the sweep is open."""
    found = find_progress(combinations, out, listener.notice, options.any_version)
    done = {identity: run.folder for identity, run in found.done.items()}
    missing = [combination for combination in combinations if combination.identity not in done]
    if done:
        listener.notice(f"{len(done)} of {len(combinations)} runs are done already, in {out}")
    if not missing:
        return SweepResult(done, ())
    resumed = {identity: run.folder for identity, run in found.resumable.items()}
    with RunProcesses(out / LOG) as processes:
        states = Execution(processes, out, listener, options.jobs, len(done)).run(missing, resumed)
    failed = []
    for state in states:
        if state.folder is None or not state.has_ended:
            failed.append(state)
        else:
            done[state.combination.identity] = state.folder
    return SweepResult(done, tuple(failed))
