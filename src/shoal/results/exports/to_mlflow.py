"""Runs of MLflow, in a database in a folder or at the tracking server that the user has set."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from shoal.errors import DataError
from shoal.results.exports.points import Point
from shoal.results.exports.run_info import RunInfo, plain_name, summary_values

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow would report to its own server

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

METRICS_AT_ONCE = 1000
PARAMETERS_AT_ONCE = 100
"""The most that MLflow takes in one call."""
LONGEST_PARAMETER = 6000
STATUSES = {"completed": "FINISHED", "incomplete": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
"""The status in MLflow, by the status of the run."""


class MLflowTarget:
    """Writes one run of the MLflow experiment of the same name.

    The store is `out/mlflow.db`, or the one in the environment variable MLFLOW_TRACKING_URI if it is set.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = (MlflowException,)

    def __init__(self, out: Path, run: RunInfo) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._run = run
        self._last = Point(0, 0.0, {})
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            out.mkdir(parents=True, exist_ok=True)
            (out / "mlflow.db").open("ab").close()  # the error of an unwritable folder is clearer than that of SQLite
            uri = f"sqlite:///{out.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(uri)
        experiment = self._experiment(None if os.environ.get("MLFLOW_TRACKING_URI") else out)
        self._check_new(experiment, uri)
        self._id = self._create_run(experiment)
        self.place = f"run {self._id} of {uri}; show it with: mlflow ui --backend-store-uri {uri}"

    def _experiment(self, out: Path | None) -> str:
        """Return the id of the MLflow experiment. Its files are in `out`, unless a server has them."""
        name = plain_name(self._run.name)
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        artifacts = None if out is None else (out / "artifacts" / name).resolve().as_uri()
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _check_new(self, experiment: str, uri: str) -> None:
        title = self._run.tags["shoal.run"].replace("'", "_")
        for found in self._client.search_runs([experiment], f"tags.`shoal.run` = '{title}'", max_results=1):
            raise DataError(
                f"{uri} already has this run, as the MLflow run {found.info.run_id}; delete that run to export it "
                "again, or choose another store with --out"
            )

    def _create_run(self, experiment: str) -> str:
        tags = {key: value.replace("'", "_") for key, value in self._run.tags.items()}
        began = int(self._run.began * 1000)
        created = self._client.create_run(experiment, start_time=began, tags=tags, run_name=self._run.id)
        id = str(created.info.run_id)
        parameters = [
            Param(plain_name(key), str(value)[:LONGEST_PARAMETER]) for key, value in self._run.parameters.items()
        ]
        for some in _batches(parameters, PARAMETERS_AT_ONCE):
            self._client.log_batch(id, params=some)
        self._client.log_text(id, self._run.text, "experiment.toml")
        return id

    def write(self, points: Iterable[Point]) -> None:
        for some in _batches(self._metrics(points), METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=some)

    def _metrics(self, points: Iterable[Point]) -> Iterator[Metric]:
        for point in points:
            self._last = max(self._last, point, key=lambda point: point.time)
            for name, value in point.values.items():
                yield Metric(plain_name(name), value, self._milliseconds(point), point.step)

    def _milliseconds(self, point: Point) -> int:
        """The start of the run plus the seconds of the run's clock: MLflow's time axis shows this clock."""
        return int((self._run.began + point.time) * 1000)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.write([Point(self._last.step, self._last.time, summary_values(summary))])
        self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_tag(self._id, "status", str(summary.get("status")))
        status = STATUSES.get(str(summary.get("status")))
        if status is not None:
            self._client.set_terminated(self._id, status, self._milliseconds(self._last))

    def close(self) -> None:
        """Nothing to close: every call is complete when it returns."""


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while part := list(itertools.islice(iterator, size)):
        yield part
