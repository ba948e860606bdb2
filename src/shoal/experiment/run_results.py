"""The results of a run in Python: its summary, records, final models and plots."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError
from shoal.experiment.experiment import Experiment
from shoal.experiment.final_models import Which, final_module, save_final_model
from shoal.experiment.plugin_files import locate_kept_files
from shoal.results.progress import main_metric
from shoal.results.records import RunFolder, latest_run
from shoal.results.summary import read_or_summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from shoal.results.plots import Axis


@dataclass(frozen=True, repr=False)
class Run:
    """A run that has ended, or that `open_run` has opened."""

    folder: RunFolder
    summary: dict[str, Any]
    """The content of summary.json."""
    _experiment: Experiment | None = field(default=None, compare=False)

    @property
    def status(self) -> str:
        """How the run ended: "completed", "incomplete", "failed", "interrupted", or "unfinished" if it has not."""
        return str(self.summary["status"])

    @functools.cached_property
    def experiment(self) -> Experiment:
        """The experiment of the run. Raises `ExperimentError` if a component does not exist any longer."""
        if self._experiment is not None:
            return self._experiment
        table = locate_kept_files(self.folder.read_experiment(), self.folder.path)
        return Experiment.from_table(table, source=str(self.folder.experiment))

    @property
    def table(self) -> Any:
        """All records of the run, as a `pyarrow.Table`: a column for each field and each metric."""
        from shoal.results.metrics_file import metrics_table

        return metrics_table(self.folder)

    @property
    def metrics(self) -> Any:
        """All records of the run, as a `pandas.DataFrame`. Needs pandas; `table` does not."""
        from shoal.results.loading import to_frame

        return to_frame(self.table, "pandas")

    def model(self, node: Which = "average") -> nn.Module:
        """Return a new module with the final parameters of a node, or of the average of all nodes, in evaluation mode.

        The data set is loaded, because the module is built for the shape of its inputs. Raises `DataError` if the run
        has no such model.
        """
        return final_module(self.experiment, self.folder, self.summary, node)

    def save_model(self, path: str | Path, node: Which = "average") -> None:
        """Write the state dict of `model(node)` to a safetensors file, which can be loaded without Shoal."""
        save_final_model(self.experiment, self.folder, self.summary, node, Path(path))

    def plot(self, metric: str | None = None, x: Axis | None = None) -> Figure:
        """Return a figure of a metric over "rounds", "time" or "bytes"; default: as `shoal plot`."""
        from shoal.results.plots import choose_axis, choose_metric, metric_figure

        return metric_figure([self.folder], choose_metric([self.folder], metric), x or choose_axis([self.folder]))

    def __repr__(self) -> str:
        metrics = self.summary["metrics"]
        name = main_metric(metrics)
        mean = None if name is None or metrics[name] is None else metrics[name]["mean"]
        score = "" if mean is None else f", {name} {mean:.4f}"
        count = len(self.summary.get("diverged") or ())
        diverged = f", {count} {'node' if count == 1 else 'nodes'} diverged" if count else ""
        return f"<Run {self.folder.path}: {self.status}, {self.summary['rounds']} rounds{score}{diverged}>"


def open_run(path: str | os.PathLike[str] = "runs") -> Run:
    """Open the run in the folder `path`, the latest run below it, or the latest run of the experiment of this name.

    The run may be in progress. Raises `DataError` if there is none.
    """
    folder = latest_run(Path(path))
    if folder is None:
        raise DataError(f"there is no run in {str(path)!r}; start one with 'shoal run FILE'")
    return Run(folder, read_or_summarize(folder))
