"""The estimated time of a sweep, from short calibration runs.

A calibration run is a run of the sweep that is stopped after its first evaluation, or after a few seconds. The time of
its training so far, divided by the finished fraction of its rounds or of its duration, is the time of the whole
training; the time until nodes began to train is added. Calibration runs share the machine as the runs of the sweep do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.sweeps.execution import Admission, Execution, RunState, SweepListener, SweepState, cores_needed
from shoal.sweeps.plan import Combination
from shoal.sweeps.processes import RunProcesses
from shoal.sweeps.values import describe_settings

MAX_CALIBRATED = 6
"""Combinations that are calibrated, at equal distances in the plan. Others take the mean time of these."""
CALIBRATION_SECONDS = 5.0
"""Seconds of training after which a calibration run is stopped, if a round has ended but no evaluation."""
MAX_SECONDS = 30.0
"""Seconds of training after which a calibration run is stopped in any case."""


@dataclass(frozen=True)
class Estimate:
    """How long runs take."""

    seconds: float | None
    """Wall time of all runs; None if no calibration run showed a speed."""
    at_once: int
    """The most runs at once."""
    calibrated: int
    """Combinations of settings that were calibrated."""
    combinations: int
    """Combinations of settings, without their seeds."""
    failed: tuple[RunState, ...]
    """Calibration runs that failed: the sweep would fail too."""


def estimate(combinations: Sequence[Combination], listener: SweepListener, jobs: int | None = None) -> Estimate:
    """Run some of the combinations for a short time in a temporary folder, and estimate the time of all of them."""
    groups: dict[str, Combination] = {}
    for combination in combinations:
        groups.setdefault(describe_settings(combination.settings), combination)
    names = list(groups)
    count = min(MAX_CALIBRATED, len(names))
    chosen = [names[i * (len(names) - 1) // max(1, count - 1)] for i in range(count)]
    with tempfile.TemporaryDirectory(prefix="shoal-calibration-") as scratch:
        folder = Path(scratch)
        with RunProcesses(folder / "calibration.log") as processes:
            execution = Execution(processes, folder, _Quiet(listener), jobs, is_enough=_is_enough)
            states = execution.run([groups[name] for name in chosen])
    seconds = {name: _total_seconds(state) for name, state in zip(chosen, states, strict=True)}
    known = [found for found in seconds.values() if found is not None]
    failed = tuple(state for state in states if state.status == "failed")
    limit = Admission(jobs).limit
    shares_machine = any(cores_needed(combination.experiment) is not None for combination in combinations)
    at_once = min(limit, len(combinations)) if shares_machine else 1
    if not known:
        return Estimate(None, at_once, count, len(names), failed)
    mean = sum(known) / len(known)
    total = 0.0
    for combination in combinations:
        taken = seconds.get(describe_settings(combination.settings)) or mean
        cores = cores_needed(combination.experiment)
        total += taken if cores is None else taken * min(cores, limit) / min(limit, len(combinations))
    return Estimate(total, at_once, count, len(names), failed)


class _Quiet:
    """Shows the calibration runs while they are going, and not that they were interrupted."""

    def __init__(self, listener: SweepListener) -> None:
        self.update, self.notice = listener.update, listener.notice

    def run_ended(self, state: SweepState, run: RunState) -> None: ...


def _is_enough(run: RunState) -> bool:
    progress = run.training
    if progress is None:
        return False
    if progress.round >= 1 and (progress.score is not None or progress.seconds >= CALIBRATION_SECONDS):
        return True
    return progress.seconds >= MAX_SECONDS


def _total_seconds(run: RunState) -> float | None:
    """Return the time of the whole run; None if it showed no speed."""
    if run.has_ended:
        return run.seconds
    progress = run.training
    if run.status != "interrupted" or progress is None or run.startup is None or not progress.done:
        return None
    return run.startup + progress.seconds / progress.done
