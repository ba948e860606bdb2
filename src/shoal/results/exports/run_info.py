"""The properties of a run that an export has beside its curves: name, experiment and summary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal.errors import DataError
from shoal.results.records import RunFolder

Parameter: TypeAlias = str | int | float | bool


@dataclass(frozen=True)
class RunInfo:
    """One run."""

    name: str
    """The name of its experiment: that of the folder, so it is safe as a part of a path."""
    id: str
    """The name of its own folder."""
    parameters: Mapping[str, Parameter]
    """The resolved experiment, by dotted keys."""
    text: str
    """The content of experiment.toml."""
    nodes: int
    """The number of training nodes."""
    evaluated: int
    """The number of nodes that are evaluated."""
    began: float
    """About when the run started, as `time.time`."""

    @classmethod
    def read(cls, folder: RunFolder) -> RunInfo:
        """Read the experiment of a run. Raises `DataError` if it is missing or damaged."""
        table = folder.read_experiment()
        nodes = table.get("nodes")
        if not isinstance(nodes, int) or nodes < 1:
            raise DataError(f"{folder.experiment}: nodes = {nodes!r}, so the file was not written by a run")
        evaluation = table.get("evaluation")
        evaluated = evaluation.get("nodes") if isinstance(evaluation, dict) else None
        path = folder.path.resolve()
        return cls(
            path.parent.name,
            path.name,
            dict(flatten(table)),
            folder.experiment.read_text(errors="replace"),
            nodes,
            min(evaluated, nodes) if isinstance(evaluated, int) else nodes,
            folder.experiment.stat().st_mtime,
        )

    @property
    def tags(self) -> dict[str, str]:
        """The name of the run, and settings to select runs by."""
        chosen = {key: str(self.parameters[key]) for key in ("engine", "seed") if key in self.parameters}
        return {"shoal.run": f"{self.name}/{self.id}", **chosen}


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Parameter]]:
    """Yield the values of a nested table with dotted keys. A list becomes JSON."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, str | int | float):
            yield f"{prefix}{key}", value
        elif value is not None:
            yield f"{prefix}{key}", json.dumps(value, default=str)


def summary_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return all numbers of a summary, such as `summary/accuracy/mean`."""
    numbers = {key: value for key, value in flatten(summary) if isinstance(value, int | float)}
    return {f"summary/{key.replace('.', '/')}": float(value) for key, value in numbers.items()}


def plain_name(text: str) -> str:
    """Return a text with only the characters that all targets allow in names."""
    return re.sub(r"[^\w\-./ ]", "_", text, flags=re.ASCII)
