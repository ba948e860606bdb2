"""The component registry: the names that an experiment may use, and the classes that they stand for."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import schema
from shoal.plugins import import_path, load_class
from shoal.traits import Traits, traits_of

REGISTRIES = {
    "algorithm": "shoal.algorithms:ALGORITHMS",
    "server-optimizer": "shoal.algorithms.support.server_optimizers:SERVER_OPTIMIZERS",
    "sharing": "shoal.sharing:SHARINGS",
    "topology": "shoal.topologies:TOPOLOGIES",
    "dataset": "shoal.data:DATASETS",
    "partition": "shoal.data:PARTITIONS",
    "model": "shoal.models:MODELS",
    "network": "shoal.environment.network:NETWORKS",
    "speed": "shoal.environment.devices:DEVICES",
    "availability": "shoal.environment.availability:AVAILABILITIES",
    "trainer": "shoal.training:TRAINERS",
    "mapping": "shoal.experiment.mapping:MAPPINGS",
    "compressor": "shoal.compression:COMPRESSORS",
    "values": "shoal.compression:VALUES",
    "indices": "shoal.compression:INDICES",
}
"""The registry of each kind of component, as `module:name`."""


@dataclass(frozen=True)
class Component:
    """An algorithm, a sharing, a topology, … of an experiment: its name and its parameters.

    A parameter may itself be a component.
    """

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def traits(self) -> Traits:
        """The traits that the component's class declares.

        An instance may have others: a partition with an inner partition `of` has the traits of the inner one.
        """
        return traits_of(find(self.kind, self.name), self.kind)

    def build(self) -> Any:
        """Return a new instance."""
        built = {k: v.build() if isinstance(v, Component) else v for k, v in self.options.items()}
        return find(self.kind, self.name)(**built)

    def to_table(self) -> dict[str, Any]:
        """Return the component as the table of an experiment."""
        options = {k: v.to_table() if isinstance(v, Component) else v for k, v in self.options.items()}
        return {"name": self.name, **options}


def registry(kind: str) -> Mapping[str, str]:
    """Return the built-in names of `kind`, and the import path of each class."""
    module, name = REGISTRIES[kind].split(":")
    found: Mapping[str, str] = getattr(importlib.import_module(module), name)
    return found


def find(kind: str, name: str) -> Any:
    """Return the class of a built-in name, of `module:Class` or of `file.py:Class`. Raises ValueError with the reason.

    A relative path of a file starts from the working folder.
    """
    known = registry(kind)
    if name in known:
        module, attribute = known[name].split(":")
        return getattr(importlib.import_module(module), attribute)
    if ":" not in name:
        raise ValueError(f"unknown {kind} {name!r}{schema.nearest(name, known)}")
    return load_class(name)


def component_name(kind: str, instance: Any) -> str:
    """Return the name of an instance's class in an experiment: a built-in name, or its import path."""
    path = import_path(type(instance))
    return next((name for name, where in registry(kind).items() if where == path), path)


def shallow_table(kind: str, instance: Any) -> dict[str, Any]:
    """Return the name of an instance of a dataclass, and its parameters as they are."""
    options = {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance) if f.init}
    return {"name": component_name(kind, instance), **options}


def to_table(kind: str, instance: Any) -> dict[str, Any]:
    """Return the name and the parameters of an instance as plain data, which `from_table` reads.

    Raises ValueError if it is not an instance of a dataclass.
    """
    if not dataclasses.is_dataclass(instance) or isinstance(instance, type):
        raise ValueError(f"{instance!r} is not an instance of a dataclass, so its parameters are unknown")
    nested = {p.name: p.nested for p in schema.parameters(type(instance)).values() if p.nested is not None}
    return {
        k: to_table(nested[k], v) if k in nested and v is not None else plain(v, keep_none=True)
        for k, v in shallow_table(kind, instance).items()
    }


def from_table(kind: str, table: Mapping[str, Any]) -> Any:
    """Return the instance that `to_table` described. Raises ValueError for an unknown class or wrong parameters."""
    cls = find(kind, table["name"])
    nested = {p.name: p.nested for p in schema.parameters(cls).values() if p.nested is not None}
    options = {
        k: from_table(nested[k], v) if k in nested and v is not None else v for k, v in table.items() if k != "name"
    }
    problems: list[str] = []
    instance = schema.build(cls, options, kind, problems)
    if problems:
        raise ValueError("; ".join(problems))
    return instance


def plain(value: Any, *, keep_none: bool) -> Any:
    """Convert to plain data: tables for components and dataclasses, lists for tuples, strings for paths.

    TOML cannot hold None: without `keep_none` a table lacks the keys whose value is None.
    """
    if isinstance(value, Component):
        value = value.to_table()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {k: plain(v, keep_none=keep_none) for k, v in value.items() if keep_none or v is not None}
    if isinstance(value, list | tuple):
        return [plain(v, keep_none=keep_none) for v in value]
    return str(value) if isinstance(value, Path) else value


def components(kind: str) -> Iterator[tuple[str, Any]]:
    """Yield every built-in name of `kind` and its class."""
    for name in registry(kind):
        yield name, find(kind, name)
