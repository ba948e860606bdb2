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
from shoal.experiment.given import Given, read_given
from shoal.experiment.interfaces import INTERFACES, missing_members, missing_methods
from shoal.experiment.registry import REGISTRIES, Component, MemoryComponent, find, plain
from shoal.experiment.tables import DEFAULT_NAMES, PARENT_TABLES, Group, NodeSettings, ProcessesPlan, location
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
            if key == "augmentation":
                resolved[key] = self.components(key, value, location(key))
            elif key in REGISTRIES:
                resolved[key] = self.component(key, value, location(key))
            elif key == "training":
                resolved[key] = self.training(value, location(key))
            else:
                resolved[key] = schema.convert(value, parameters[key].hint, location(key), self.problems)
        if resolved.get("validation") == 0:
            resolved["validation"] = None
        if isinstance(groups := resolved.get("group"), tuple):
            resolved["group"] = tuple(self._group(group, i) for i, group in enumerate(groups))
        if isinstance(plan := resolved.get("processes"), ProcessesPlan) and plan.keys is not None:
            resolved["processes"] = dataclasses.replace(plan, keys=locate(plan.keys, self.base))
        if isinstance(name := resolved.get("name"), str) and not re.fullmatch(r"\w[\w.+-]*", name):
            self.problems.append(
                f"name = {name!r}: expected letters, digits and . _ + -, starting with a letter, a digit or _ "
                "(it names a folder)"
            )
        return resolved

    def component(self, kind: str, value: Any, place: str) -> Component | None:
        """Return a component from its name, its table, its class or an instance, or None after a problem."""
        if isinstance(value, Component):
            return value
        given = self._given(kind, value, place)
        if given is None or isinstance(given, MemoryComponent):
            return given
        table = given.table
        options = {k: v for k, v in table.items() if k != "name"}
        name = absolute_name(table["name"], self.base)
        try:
            forget_changed(name)
            cls = given.cls or find(kind, name)
            traits_of(cls, kind)
        except ValueError as error:
            self.problems.append(f"{place}.name = {table['name']!r}: {error}")
            return None
        before = len(self.problems)
        try:
            known = schema.parameters(cls)
            options = schema.current_names(options, known, place)
        except ValueError as error:
            self.problems.append(f"{place}: {error}")
            return None
        self.problems.extend(
            f"{place}.name = {table['name']!r}: {cls.__name__} has a parameter {key!r}, but {place}.{key} is a key of "
            "every experiment, which the class would not get; rename the parameter"
            for key, parent in PARENT_TABLES.items()
            if parent == kind and key in known
        )
        nested = self._nested_components(cls, options, place)
        options.update({k: None if c is None else c.build() for k, c in nested.items()})
        arguments = schema.arguments(cls, options, place, self.problems)
        if arguments is schema.INVALID or None in nested.values():
            # The parameters of a class of another kind do not matter.
            if (missing := missing_methods(cls, INTERFACES[kind])) is not None:
                self.problems[before:] = [f"{place}.name = {table['name']!r}: {missing}"]
            return None
        # Nodes may start in another folder.
        arguments = {k: locate(v, self.base) if isinstance(v, Path) else v for k, v in arguments.items()}
        for path in (v for v in arguments.values() if isinstance(v, Path)):
            forget_changed(str(path))  # it may name code, such as a Flower client
        instance = schema.build(cls, arguments, place, self.problems)
        if len(self.problems) > before:
            return None
        if (missing := missing_members(instance, INTERFACES[kind])) is not None:
            self.problems.append(f"{place}.name = {table['name']!r}: {missing}")
            return None
        defaults = {p.name: p.default for p in schema.parameters(cls).values() if not p.required}
        options = {**defaults, **arguments, **nested}
        self.problems.extend(
            f"{schema.join(place, key)} = {option!r}: an experiment cannot hold a {type(option).__name__}; "
            "use numbers, strings, lists or tables"
            for key, option in options.items()
            if key not in nested and not _is_plain(option)
        )
        return Component(kind, name, options) if given.cls is None else MemoryComponent(kind, name, options, cls)

    def components(self, kind: str, values: Any, place: str) -> tuple[Component | None, ...]:
        """Return a list of components."""
        if not isinstance(values, list | tuple):
            self.problems.append(f"{place} = {values!r}: expected a list of names or tables, such as ['crop', 'flip']")
            return ()
        return tuple(self.component(kind, value, f"{place}[{i}]") for i, value in enumerate(values))

    def training(self, value: Any, place: str) -> Any:
        """Return the settings of a table or an instance; a schedule is a component, paths of plug-ins are absolute."""
        given = value if isinstance(value, Mapping) else vars(value) if isinstance(value, Training) else {}
        changed: dict[str, Any] = {**self._nested_components(Training, given, place), **self._absolute_plugins(given)}
        if isinstance(value, Training):
            return dataclasses.replace(value, **changed)
        table = {**value, **changed} if isinstance(value, Mapping) else value
        return schema.convert(table, Training, place, self.problems)

    def _absolute_plugins(self, training: Mapping[str, Any]) -> dict[str, str]:
        """Return the plug-ins that settings name, with absolute paths."""
        names = {key: training.get(key) for key in ("optimizer", "loss")}
        found = {k: absolute_name(v, self.base) for k, v in names.items() if isinstance(v, str) and ":" in v}
        for name in found.values():
            forget_changed(name)
        return found

    def _given(self, kind: str, value: Any, place: str) -> Given | MemoryComponent | None:
        """Return a component as a table with a name or, if it is in memory, as it is; None after a problem."""
        try:
            given = read_given(kind, value)
        except ValueError as error:
            self.problems.append(f"{place}: {error}")
            return None
        if isinstance(given, MemoryComponent):
            return given
        if given is not None and kind in DEFAULT_NAMES:
            given = given._replace(table={"name": DEFAULT_NAMES[kind], **given.table})
        if given is None or not isinstance(given.table.get("name"), str):
            name = _default_name(kind)
            text = f"{place} = {schema.shown(value)}: expected a table with a name, such as {{ name = {name} }}"
            self.problems.append(f"{text}, or a torch.nn.Module" if kind == "model" and callable(value) else text)
            return None
        return given

    def _group(self, group: Group, number: int) -> Group:
        """Return a group whose components are tables. A table need not have a name: it changes some keys."""
        tables: dict[str, Any] = {}
        for key in (f.name for f in dataclasses.fields(group) if f.name in REGISTRIES):
            value = getattr(group, key)
            if isinstance(value, str):
                tables[key] = {"name": value}
            elif value is not None and not isinstance(value, Mapping):
                component = self.component(key, value, f"group[{number}].{key}")
                tables[key] = None if component is None else component.to_table()
        if group.training is not None:
            tables["training"] = self._training_of_group(group.training, f"group[{number}].training")
        return dataclasses.replace(group, **tables)

    def _training_of_group(self, given: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the settings of a group as a table: a schedule is a table or a name, paths are absolute."""
        table = {**given, **self._absolute_plugins(given)}
        schedule = table.get("schedule")
        if schedule is not None and not isinstance(schedule, str | Mapping):
            component = self.component("schedule", schedule, f"{place}.schedule")
            table["schedule"] = None if component is None else component.to_table()
        return table

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
        if value.schedule is not None and isinstance(override.get("schedule"), Mapping):
            place_of_schedule = f"{place}.schedule"
            schedule = self._overridden("schedule", value.schedule, override["schedule"], place_of_schedule)
            override = {**override, "schedule": schedule}
        converted = self.training({**vars(value), **override}, place)
        return None if converted is schema.INVALID else converted


def _is_plain(value: Any) -> bool:
    """Whether the file of an experiment can hold a value."""
    value = plain(value, keep_none=False)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _default_name(kind: str) -> str:
    """Return the name of the component that an experiment has by default, quoted; … if there is none."""
    from shoal.experiment.experiment import Experiment

    field = next((f for f in dataclasses.fields(Experiment) if f.name == kind), None)
    if field is None or not callable(field.default_factory):
        return "…"
    return repr(field.default_factory()["name"])


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
