"""The interface of export targets, and their names."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from shoal.errors import DataError
from shoal.results.exports.points import Point
from shoal.results.exports.run_info import RunInfo


class Target(Protocol):
    """Writes one run."""

    errors: ClassVar[tuple[type[Exception], ...]]
    """The exceptions of the target's library."""
    place: str
    """Where the run is exported to, and how to look at it."""

    def __init__(self, out: Path, run: RunInfo) -> None:
        """Begin the export of `run` to the folder `out`. Raises `DataError` if it was exported there before."""
        ...

    def write(self, points: Iterable[Point]) -> None:
        """Write points so that they can be seen now."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary. There are no more points."""
        ...

    def close(self) -> None:
        """Close all files; also if `finish` was not called, because the export was interrupted."""
        ...


TARGETS = {
    "tensorboard": "shoal.results.exports.to_tensorboard:TensorBoardTarget",
    "mlflow": "shoal.results.exports.to_mlflow:MLflowTarget",
    "wandb": "shoal.results.exports.to_wandb:WandbTarget",
}
"""The class of each target. Each has an extra of the same name in pyproject.toml."""


def load_target(name: str) -> type[Target]:
    """Return the class of a target. Raises `DataError` if its library is not installed."""
    module, _, cls = TARGETS[name].partition(":")
    try:
        found: type[Target] = getattr(importlib.import_module(module), cls)
    except ModuleNotFoundError as error:
        raise DataError(
            f"--to {name}: the Python package {error.name!r} is not installed; pip install 'shoal[{name}]'"
        ) from error
    return found
