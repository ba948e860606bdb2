"""An experiment as plain data and as TOML: what `Experiment.from_table` and `Experiment.from_file` read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tomli_w

from shoal.experiment.plugin_files import hash_plugin_file, rename_plugin_files
from shoal.experiment.registry import plain
from shoal.experiment.tables import NOT_IN_TABLES, PARENT_TABLES
from shoal.results.records import replacing
from shoal.types import format_node_ids

if TYPE_CHECKING:
    from shoal.experiment.experiment import Experiment

VERSIONED = ("shoal", "torch", "numpy", "pyzmq", "msgspec")
"""Packages whose versions are written into the folder of a run."""


def experiment_to_table(experiment: Experiment) -> dict[str, Any]:
    """Return the fields of an experiment, with defaults, as TOML can hold them.

    Keys without a value are left out: None, and an empty list of augmentations.
    """
    table: dict[str, Any] = {}
    for field in dataclasses.fields(experiment):
        value = plain(getattr(experiment, field.name), keep_none=False)
        if field.name in PARENT_TABLES:
            if value is None or value == []:
                continue
            table[PARENT_TABLES[field.name]][field.name] = value
        elif value is not None and field.name not in NOT_IN_TABLES:
            table[field.name] = value
    return table


def write_mapping(path: Path, placement: Mapping[str, Collection[int]]) -> None:
    """Write the nodes of each machine."""
    table = {machine: format_node_ids(nodes) for machine, nodes in placement.items()}
    with replacing(path) as unfinished:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2) + b"\n")


@functools.cache
def software_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that run an experiment."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in VERSIONED}


def experiment_hash(experiment: Experiment) -> str:
    """Return a hash of an experiment, without keys that may change when a run is resumed."""
    return table_hash(experiment.to_table(), experiment.base)


def table_hash(table: Mapping[str, Any], base: Path) -> str:
    """Return the hash of the experiment in a resolved table, whose relative paths of plug-ins start from `base`.

    The simulation chooses how to batch nodes after the experiment is known, and writes it into the run's
    experiment.toml. A run that is resumed on several machines has sealed links. Of a plug-in file the content counts,
    not the path: a run that is resumed uses its own copies.
    """
    table = rename_plugin_files(table, base, hash_plugin_file)
    simulation = {k: v for k, v in table["simulation"].items() if k != "batching"}
    processes = {k: v for k, v in table["processes"].items() if k != "sealed"}
    hashed = {**table, "simulation": simulation, "processes": processes}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def write_experiment(path: Path, table: Mapping[str, Any]) -> None:
    """Write the table of an experiment with the versions of Python and of the packages that run it."""
    with replacing(path) as unfinished:
        unfinished.write_text(tomli_w.dumps({**table, "versions": software_versions()}))
