"""Averaged models that wait for their evaluation, in files, so that a resumed run can evaluate them."""

from __future__ import annotations

import contextlib
import shutil

from shoal.engines.processes import control
from shoal.errors import CheckpointError
from shoal.results.checkpoints import Checkpoints, Manifest
from shoal.results.records import Average, RunFolder
from shoal.results.state_files import read_state, write_state


class KeptAverages:
    """One file for each requested evaluation, deleted when it has been made. Without `enabled` it does nothing."""

    def __init__(self, folder: RunFolder, enabled: bool) -> None:
        self._folder = folder
        self._path = Checkpoints(folder).kept_averages()
        self.enabled = enabled

    def keep(self, request: control.EvaluateAverage) -> None:
        """Raises `StorageError` if the file cannot be written."""
        if self.enabled:
            fields = {name: getattr(request, name) for name in ("round", "time", "nodes", "consensus_distance", "tick")}
            write_state(self._path / f"{request.round}.safetensors", {**fields, "params": request.array})

    def remove(self, round: int) -> None:
        if self.enabled:
            (self._path / f"{round}.safetensors").unlink(missing_ok=True)

    def remove_all(self) -> None:
        """The run has ended: nothing is left to evaluate."""
        if self.enabled:
            shutil.rmtree(self._path.parent, ignore_errors=True)

    def restore(self, resumed: Manifest) -> list[control.EvaluateAverage]:
        """Return the evaluations that were requested before the checkpoint and have no record, in order."""
        records = [record for record in self._folder.read_averages() if isinstance(record, Average)]
        recorded = {record.moment for record in records}
        requests = []
        for path in self._path.glob("*.safetensors"):
            with contextlib.suppress(CheckpointError, TypeError):
                kept = read_state(path)
                moment, tick = kept["round"], kept["tick"]
                if moment in recorded or moment > (resumed.round if tick is None else resumed.ticks):
                    path.unlink(missing_ok=True)
                    continue
                params = kept.pop("params").tobytes()
                requests.append(control.EvaluateAverage(**kept, params=params))
        return sorted(requests, key=lambda request: request.round)
