"""From the tables of an experiment, or instances in their place, to typed values and components.

A `Resolver` does not raise: it adds each problem, with its location, to one list, so that a user sees all of them.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import schema
from shoal.experiment.registry import REGISTRIES, Component, find, shallow_table
from shoal.experiment.tables import DEFAULT_NAMES, Group, NodeSettings, ProcessesPlan, location
from shoal.plugins import forget_changed, split_file
from shoal.training.settings import Training
from shoal.traits import traits_of

if TYPE_CHECKING:
    from shoal.experiment.experiment import Experiment


@dataclass(frozen=True)
class Resolver:
    """Converts values to their declared types."""

    base: Path
    """The folder that relative paths start from: that of the experiment file."""
    problems: list[str] = field(default_factory=list)

    def values(self, given: Mapping[str, Any], parameters: Mapping[str, schema.Parameter]) -> dict[str, Any]:
        """Return the fields of an experiment that are in `given`, as their `parameters` declare them."""
        resolved: dict[str, Any] = {}
        for key in (key for key in given if key in parameters):
            value = given[key]
            if key == "dataset" and isinstance(value, Mapping) and "otherwise" in value:
                value = _available_dataset(value)
            if key in REGISTRIES:
                resolved[key] = self.component(key, value, location(key))
            else:
                resolved[key] = schema.convert(value, parameters[key].hint, location(key), self.problems)
        if isinstance(plan := resolved.get("processes"), ProcessesPlan) and plan.keys is not None:
            resolved["processes"] = dataclasses.replace(plan, keys=locate(plan.keys, self.base))
        if isinstance(name := resolved.get("name"), str) and not re.fullmatch(r"\w[\w.+-]*", name):
            self.problems.append(
                f"name = {name!r}: expected letters, digits and . _ + -, starting with a letter, a digit or _ "
                "(it names a folder)"
            )
        return resolved

    def component(self, kind: str, value: Any, place: str) -> Component | None:
        """Return a component from its table or from an instance of its class, or None after a problem."""
        if isinstance(value, Component):
            return value
        table = self._table(kind, value, place)
        if table is None:
            return None
        options = {k: v for k, v in table.items() if k != "name"}
        name = absolute_name(table["name"], self.base)
        try:
            forget_changed(name)
            cls = find(kind, name)
            traits_of(cls, kind)
        except ValueError as error:
            self.problems.append(f"{place}.name = {table['name']!r}: {error}")
            return None
        before = len(self.problems)
        try:
            options = schema.current_names(options, schema.parameters(cls), place)
        except ValueError as error:
            self.problems.append(f"{place}: {error}")
            return None
        nested = self._nested_components(cls, options, place)
        options.update({k: None if c is None else c.build() for k, c in nested.items()})
        arguments = schema.arguments(cls, options, place, self.problems)
        if arguments is schema.INVALID or None in nested.values():
            return None
        # Nodes may start in another folder.
        arguments = {k: locate(v, self.base) if isinstance(v, Path) else v for k, v in arguments.items()}
        for path in (v for v in arguments.values() if isinstance(v, Path)):
            forget_changed(str(path))  # it may name code, such as a Flower client
        schema.build(cls, arguments, place, self.problems)
        if len(self.problems) > before:
            return None
        defaults = {p.name: p.default for p in schema.parameters(cls).values() if not p.required}
        return Component(kind, name, {**defaults, **arguments, **nested})

    def _table(self, kind: str, value: Any, place: str) -> Mapping[str, Any] | None:
        """Return the table of a component that is given as a table, an instance or a networkx graph."""
        if type(value).__module__.startswith("networkx"):
            from shoal.topologies.given import from_networkx

            value = from_networkx(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return shallow_table(kind, value)
        if isinstance(value, Mapping) and kind in DEFAULT_NAMES:
            value = {"name": DEFAULT_NAMES[kind], **value}
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            self.problems.append(f"{place} = {value!r}: expected a table with a name, such as {{ name = … }}")
            return None
        return value

    def _nested_components(self, cls: type, options: Mapping[str, Any], place: str) -> dict[str, Component | None]:
        """Return the parameters of `cls` that are components themselves; a string in place of a table is a name."""
        nested = {p.name: p for p in schema.parameters(cls).values() if p.nested is not None}
        found = {}
        for key, parameter in nested.items():
            value = options.get(key, parameter.default)
            if value is not None and value is not schema.REQUIRED:
                table = {"name": value} if isinstance(value, str) else value
                found[key] = self.component(parameter.nested or "", table, f"{place}.{key}")
        return found

    def node_settings(self, experiment: Experiment, groups: Mapping[int, Group]) -> NodeSettings | None:
        """Return the settings of a node in these groups, by their index; a later group overrides an earlier one."""
        values: dict[str, Any] = {}
        for key in (f.name for f in dataclasses.fields(NodeSettings)):
            value = getattr(experiment, key)
            for i, group in groups.items():
                override = getattr(group, key)
                if override is not None and value is not None:
                    value = self._overridden(key, value, override, f"group[{i}].{key}")
            values[key] = value
        if None in values.values():
            return None
        training: Training = values["training"]
        if training.keep_state is None and values["algorithm"].traits.stateless_nodes:
            values["training"] = dataclasses.replace(training, keep_state=False)
        return NodeSettings(**values)

    def _overridden(self, key: str, value: Any, override: Mapping[str, Any], place: str) -> Any:
        if isinstance(value, Component):
            replaced = override.get("name", value.name) != value.name
            return self.component(key, override if replaced else {**value.to_table(), **override}, place)
        merged = {**dataclasses.asdict(value), **override}
        converted = schema.convert(merged, type(value), place, self.problems)
        return None if converted is schema.INVALID else converted


def absolute_name(name: str, base: Path) -> str:
    """Make the path of a plug-in file absolute: nodes may start in another folder."""
    found = split_file(name)
    return name if found is None else f"{locate(found[0], base)}:{found[1]}"


def locate(path: Path, base: Path) -> Path:
    """Return the absolute path of a file: beside the experiment or, as for --set, in the working folder."""
    beside = (base / path).resolve()
    return path.resolve() if not beside.exists() and path.exists() else beside


def _available_dataset(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of the data set or, if its files are missing on this machine, the table in `otherwise`."""
    from shoal.data.store import is_available

    preferred = {key: value for key, value in dataset.items() if key != "otherwise"}
    path = preferred.get("path")
    if is_available(str(preferred.get("name")), None if path is None else Path(path)):
        return preferred
    other = dataset["otherwise"]
    table = {"name": other} if isinstance(other, str) else dict(other)
    warnings.warn(
        f"dataset {preferred['name']!r} is not on this machine ('shoal data fetch {preferred['name']}' downloads it): "
        f"using {table.get('name')!r} instead",
        stacklevel=2,
    )
    return table
