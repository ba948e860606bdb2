"""An experiment as plain data and as TOML: what `Experiment.from_table` and `Experiment.from_file` read."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from shoal.experiment.registry import Component
from shoal.experiment.tables import PARENT_TABLES

if TYPE_CHECKING:
    from shoal.experiment.experiment import Experiment

VERSIONED = ("shoal", "torch", "numpy", "pyzmq", "msgspec")
"""Packages whose versions are written into the folder of a run."""


def experiment_to_table(experiment: Experiment) -> dict[str, Any]:
    """Return every field of an experiment, with defaults, as TOML can hold it."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(experiment):
        value = _plain(getattr(experiment, field.name))
        if field.name in PARENT_TABLES:
            table[PARENT_TABLES[field.name]][field.name] = value
        elif value is not None and field.name != "base":
            table[field.name] = value
    return table


def write_experiment(path: Path, table: Mapping[str, Any]) -> None:
    """Write the table of an experiment with the versions of Python and of the packages that run it."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in VERSIONED}
    path.write_text(tomli_w.dumps({**table, "versions": versions}))


def _plain(value: Any) -> Any:
    """Convert to what TOML can hold: no None, tables for components and dataclasses, lists for tuples."""
    if isinstance(value, Component):
        return _plain(value.to_table())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
