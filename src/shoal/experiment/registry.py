"""The component registry: the names that an experiment may use, and the classes that they stand for."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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
    "augmentation": "shoal.data:AUGMENTATIONS",
    "model": "shoal.models:MODELS",
    "network": "shoal.environment.network:NETWORKS",
    "speed": "shoal.environment.devices:DEVICES",
    "availability": "shoal.environment.availability:AVAILABILITIES",
    "trainer": "shoal.training:TRAINERS",
    "schedule": "shoal.training.schedules:SCHEDULES",
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

    @cached_property
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


IN_MEMORY = "memory:"
"""How the names of components begin that exist only in the process that created the experiment."""
ONLY_HERE = (IN_MEMORY, "__main__:")
"""How the names of components begin that other processes cannot import. A class of a notebook is in `__main__`."""


@dataclass(frozen=True)
class MemoryComponent(Component):
    """A component without an import path: a module that was given as an instance, or a class inside a function."""

    source: Any = None
    """The instance, of which every `build` returns a copy, or the class."""

    @cached_property
    def traits(self) -> Traits:
        return traits_of(self.source, self.kind)

    def build(self) -> Any:
        if not isinstance(self.source, type):
            return copy.deepcopy(self.source)
        return self.source(**{k: v.build() if isinstance(v, Component) else v for k, v in self.options.items()})


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
    if name.startswith(IN_MEMORY):
        raise ValueError(
            f"this {kind} existed only in the process that created the experiment; write its class to a file, and name "
            f"it as 'file.py:{name.removeprefix(IN_MEMORY)}'"
        )
    if ":" not in name:
        raise ValueError(f"unknown {kind} {name!r}{_advice(kind, name)}")
    try:
        return load_class(name)
    except ValueError as error:
        if not name.startswith("__main__:"):
            raise
        file = f"'file.py:{name.removeprefix('__main__:')}'"
        raise ValueError(
            f"{error}: the class is of the notebook or session that created the experiment; write it to a file, and "
            f"name it as {file}"
        ) from error


def _advice(kind: str, name: str) -> str:
    """Return the advice for an unknown name. A built-in component may have this name in another project."""
    known = registry(kind)
    module, dot, attribute = name.rpartition(".")
    if dot and attribute == "py":
        return f"; for a class of your own, write '{name}:' and the name of the class"
    if dot and attribute.isidentifier():
        return f"; for a class of your own, write '{module.replace('.', '/')}.py:{attribute}' or '{module}:{attribute}'"
    elsewhere = [own for own in known if f"`{name.lower()}`" in _first_line(find(kind, own)).lower()]
    if not elsewhere:
        return schema.nearest(name, known)
    closest = schema.closest(name, sorted(known))
    found = dict.fromkeys([*([] if closest is None else [closest]), *elsewhere])
    described = (f"'{own}' ({_first_line(find(kind, own))})" for own in found)
    return f"; did you mean {' or '.join(described)}?"


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")


def component_name(kind: str, instance: Any) -> str:
    """Return the name of an instance's class in an experiment: a built-in name, or its import path."""
    cls = type(instance)
    return class_name(kind, cls) or f"{cls.__module__}:{cls.__qualname__}"


def class_name(kind: str, cls: type) -> str | None:
    """Return the name of a class in an experiment: a built-in name, or its import path; None if it has none."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, where in registry(kind).items() if where == path), import_path(cls))


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
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: plain(v, keep_none=keep_none) for k, v in value.items() if keep_none or v is not None}
    if isinstance(value, list | tuple):
        return [plain(v, keep_none=keep_none) for v in value]
    return str(value) if isinstance(value, Path) else value


def components(kind: str) -> Iterator[tuple[str, Any]]:
    """Yield every built-in name of `kind` and its class."""
    for name in registry(kind):
        yield name, find(kind, name)
