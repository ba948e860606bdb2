"""The results of a run in Python: its summary, records, final models and plots."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.errors import DataError
from shoal.experiment.experiment import Experiment
from shoal.experiment.final_models import Which, final_module, save_final_model
from shoal.experiment.plugin_files import locate_kept_files
from shoal.results.progress import main_metric
from shoal.results.records import RunFolder, latest_run, runs_below
from shoal.results.summary import read_or_summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from shoal.results.figures import Kind
    from shoal.results.plot_curves import Axis, Spread
    from shoal.results.plot_style import Columns
    from shoal.results.plots import LogAxis

RunPath: TypeAlias = str | os.PathLike[str]
"""The path of a run, or of a folder of runs."""


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
        import pyarrow.parquet as pq

        from shoal.results.metrics_file import write_metrics

        if not self.folder.metrics.exists():
            write_metrics(self.folder)
        return pq.read_table(self.folder.metrics)

    @property
    def metrics(self) -> Any:
        """All records of the run, as a `pandas.DataFrame`. Needs pandas; `table` does not."""
        try:
            import pandas  # noqa: F401
        except ImportError as error:
            raise DataError(
                "run.metrics is a pandas.DataFrame, and pandas is not installed: pip install 'shoal[pandas]'; "
                "run.table has the same records as a pyarrow.Table"
            ) from error
        return self.table.to_pandas()

    def model(self, node: Which = "average") -> nn.Module:
        """Return a new module with the final parameters of a node, or of the average of all nodes, in evaluation mode.

        The data set is loaded, because the module is built for the shape of its inputs. Raises `DataError` if the run
        has no such model.
        """
        return final_module(self.experiment, self.folder, self.summary, node)

    def save_model(self, path: str | Path, node: Which = "average") -> None:
        """Write the state dict of `model(node)` to a safetensors file, which can be loaded without Shoal."""
        save_final_model(self.experiment, self.folder, self.summary, node, Path(path))

    def plot(
        self,
        y: str | None = None,
        x: Axis | None = None,
        *,
        panels: Sequence[Axis] = (),
        kind: Kind = "lines",
        spread: Spread | None = None,
        columns: Columns | None = None,
        log: Sequence[LogAxis] = (),
        round: int | None = None,
        start: float | None = None,
        end: float | None = None,
        metric: str | None = None,
    ) -> Figure:
        """Return a figure of this run: see `plot`. `metric` is an earlier name of `y`.

        `round` is that of a topology, `start` and `end` are the times of a timeline.
        """
        from shoal.results.figures import FigureOptions, draw_figure

        y = metric if y is None else y
        options = FigureOptions(y, _axes(x, panels), kind, spread, columns, (), log, round, start, end)
        return draw_figure([self.folder], options).figure

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


def plot(
    runs: RunPath | Run | Sequence[RunPath | Run],
    y: str | None = None,
    x: Axis | None = None,
    *,
    panels: Sequence[Axis] = (),
    spread: Spread | None = None,
    columns: Columns | None = None,
    labels: Sequence[str] = (),
    log: Sequence[LogAxis] = (),
) -> Figure:
    """Return a figure of runs, as `shoal plot` draws it. Runs that differ only in the seed are one line.

    `runs` are runs, paths of runs, or folders that stand for all runs in them. `y` is a metric, "consensus", "drift",
    "training-loss" or, for the averaged model, "averaged-accuracy"; default: the main metric. `x` is "rounds", "time"
    or "bytes"; `panels` are several of these. `log` are the axes with a logarithmic scale, such as "bytes" or "y".
    Raises `DataError` if the runs do not have what the figure shows.
    """
    from shoal.results.figures import FigureOptions, draw_figure

    several = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    folders = [folder for run in several for folder in _folders(run)]
    options = FigureOptions(y, _axes(x, panels), "lines", spread, columns, labels, log)
    return draw_figure(folders, options).figure


def _axes(x: Axis | None, panels: Sequence[Axis]) -> tuple[Axis, ...]:
    if x is not None and panels:
        raise DataError(f"x = {x!r} and panels = {panels!r}: give one of them")
    return tuple(panels) if x is None else (x,)


def _folders(run: RunPath | Run) -> list[RunFolder]:
    if isinstance(run, Run):
        return [run.folder]
    found = sorted(runs_below(Path(run)), key=lambda run: run.path)
    if not found:
        raise DataError(f"there is no run in {str(Path(run))!r}; start one with 'shoal run FILE'")
    return found
