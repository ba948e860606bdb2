"""An experiment as plain data and as TOML: what `Experiment.from_table` and `Experiment.from_file` read."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from shoal.experiment.registry import plain
from shoal.experiment.tables import PARENT_TABLES
from shoal.results.records import replacing

if TYPE_CHECKING:
    from shoal.experiment.experiment import Experiment

VERSIONED = ("shoal", "torch", "numpy", "pyzmq", "msgspec")
"""Packages whose versions are written into the folder of a run."""


def experiment_to_table(experiment: Experiment) -> dict[str, Any]:
    """Return every field of an experiment, with defaults, as TOML can hold it."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(experiment):
        value = plain(getattr(experiment, field.name), keep_none=False)
        if field.name in PARENT_TABLES:
            table[PARENT_TABLES[field.name]][field.name] = value
        elif value is not None and field.name != "base":
            table[field.name] = value
    return table


def write_experiment(path: Path, table: Mapping[str, Any]) -> None:
    """Write the table of an experiment with the versions of Python and of the packages that run it."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in VERSIONED}
    with replacing(path) as unfinished:
        unfinished.write_text(tomli_w.dumps({**table, "versions": versions}))
