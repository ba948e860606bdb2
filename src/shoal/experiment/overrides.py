"""Keys of an experiment: `--set key=value`, and keys that are in the wrong table."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal import schema
from shoal.errors import ExperimentError
from shoal.experiment.registry import REGISTRIES, Component, find
from shoal.experiment.resolving import absolute_name
from shoal.experiment.tables import DEFAULT_NAMES, NOT_IN_TABLES, PARENT_TABLES, location
from shoal.plugins import forget_changed

TOP_LEVEL = "the top of the file, above every [table]"


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `key=value` of the command line: a dotted key and a TOML value; a bare word is a string."""
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not all(re.fullmatch(r"[\w-]+", part) for part in key.split(".")):
        raise ExperimentError([f"{text!r}: expected key=value, such as topology.degree=5"], "--set")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        if re.fullmatch(r"[\w./:+-]*", value.strip()):
            return key, value.strip()
        raise ExperimentError([f"{text!r}: {error}"], "--set") from None


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Parse several `key=value` of the command line; the last value of a key counts."""
    return dict(parse_override(text) for text in texts)


def current_tables(table: Mapping[str, Any], parameters: Mapping[str, schema.Parameter]) -> dict[str, Any]:
    """Replace earlier names of tables in a table or in dotted keys, with a warning.

    A text is no table: `device = "cuda"` is not the earlier name of `speed`, but meant for `training`.
    """
    names = {p.former.name: p.name for p in parameters.values() if p.former is not None}
    current: dict[str, Any] = {}
    for key, value in table.items():
        first, separator, rest = key.partition(".")
        name = key
        if first in names and (separator or not isinstance(value, str)):
            name = f"{names[first]}{separator}{rest}"
            warnings.warn(f"{key}: this table has a new name; write {name}", FutureWarning, stacklevel=3)
        current[name] = value
    return current


def apply_overrides(table: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return a copy of `table` with dotted keys set. A component that is given by its name becomes a table."""
    result: dict[str, Any] = _copy_tables(table)
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        inner: Any = result
        for parent in parents:
            if parent in REGISTRIES and isinstance(name := inner.get(parent), str):
                inner[parent] = {"name": name}
            if not isinstance(inner.setdefault(parent, {}), dict):
                problems.append(f"{dotted}: {parent!r} is not a table")
                break
            inner = inner[parent]
        else:
            inner[last] = value
    return {key: {"name": v} if key in REGISTRIES and isinstance(v, str) else v for key, v in result.items()}


def _copy_tables(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy_tables(v) for k, v in value.items()}
    return value


def remove_misplaced(
    table: dict[str, Any], parameters: Mapping[str, schema.Parameter], base: Path, problems: list[str]
) -> None:
    """Remove and report the keys that belong to another table, and the unknown keys at the top level."""
    known = parameters.keys() - PARENT_TABLES.keys()
    keys_by_table = _keys_by_table(table, parameters, base)
    owners = _owners(keys_by_table)
    for key in [k for k in table if k not in known]:
        belongs = f"; it belongs to {' or '.join(owners[key])}" if key in owners else schema.nearest(key, known)
        problems.append(f"{key}: unknown key{belongs}")
        del table[key]
    owners.update({key: [TOP_LEVEL] for key in known - owners.keys()})
    for name, keys in keys_by_table.items():
        given = table.get(name)
        if not isinstance(given, dict):
            continue
        for key in [k for k in given if k != "name" and k not in keys and k in owners]:
            problems.append(f"{name}.{key}: unknown key; it belongs to {' or '.join(owners[key])}")
            del given[key]


def unknown_parameters(given: Mapping[str, Any], parameters: Mapping[str, schema.Parameter], base: Path) -> list[str]:
    """List the parameters of `Experiment(…)` in `given` that do not exist, and what to write in their place."""
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    table = {key: _as_table(key, value, defaults.get(key)) for key, value in (defaults | dict(given)).items()}
    owners = _owners(_keys_by_table(table, parameters, base))
    problems = []
    for key in (k for k in given if k not in parameters and k not in NOT_IN_TABLES):
        if key not in owners:
            problems.append(f"{key}: unknown key{schema.nearest(key, parameters)}")
            continue
        settings = {name: table[name] for name in (place.partition(".")[0] for place in owners[key])}
        written = [f"{name}={ {**known, key: given[key]}!r}" for name, known in settings.items()]
        problems.append(f"{key}: unknown key; it belongs to {' or '.join(owners[key])}: write {' or '.join(written)}")
    return problems


def _as_table(key: str, value: Any, default: Any) -> Any:
    """Return a component, or a table that is an instance of its class, as a mapping without defaults."""
    if isinstance(value, Component):
        known: Mapping[str, schema.Parameter] = {}
        with contextlib.suppress(ValueError):  # it exists only in this process
            known = schema.parameters(find(value.kind, value.name))
        defaults = {name: parameter.default for name, parameter in known.items()}
        return _changed(value.to_table(), defaults)
    if isinstance(value, str) and key in REGISTRIES:
        return {"name": value}
    if dataclasses.is_dataclass(default) and not isinstance(value, Mapping):
        return _changed(vars(value), vars(default)) if type(value) is type(default) else {}
    return value


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not the defaults. A value of another type, such as an array, is not compared."""
    return {
        name: value
        for name, value in values.items()
        if type(value) is not type(defaults.get(name)) or value != defaults.get(name)
    }


def _owners(keys_by_table: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return the places of each key, such as `training.lr`."""
    owners: dict[str, list[str]] = {}
    for name, keys in keys_by_table.items():
        for key in keys:
            owners.setdefault(key, []).append(f"{name}.{key}")
    return owners


def _keys_by_table(
    table: Mapping[str, Any], parameters: Mapping[str, schema.Parameter], base: Path
) -> dict[str, set[str]]:
    """Return the keys that each table may have; a table of an unknown component is left out."""
    hints = {name: parameter.hint for name, parameter in parameters.items()}
    keys = {
        name: set(schema.parameters(hint))
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }
    for kind in REGISTRIES.keys() & parameters.keys() - PARENT_TABLES.keys():
        given = table.get(kind, parameters[kind].default)
        name = given.get("name", DEFAULT_NAMES.get(kind)) if isinstance(given, Mapping) else None
        with contextlib.suppress(ValueError):  # no such component: the resolver reports it
            component = absolute_name(str(name), base)
            forget_changed(component)
            keys[kind] = set(schema.parameters(find(kind, component)))
            keys[kind].update(key for key, parent in PARENT_TABLES.items() if parent == kind)
    return keys


def lift_nested_keys(table: dict[str, Any]) -> None:
    """Move `dataset.partition` and `topology.weights` to the top level: every data set and topology has them."""
    for key, parent in PARENT_TABLES.items():
        if isinstance(table.get(parent), dict) and key in table[parent]:
            table[key] = table[parent].pop(key)


def lift_nested_values(values: dict[str, Any], parameters: Mapping[str, schema.Parameter], problems: list[str]) -> None:
    """Do the same for an experiment that is written in Python, where these are parameters of their own too."""
    for key, parent in PARENT_TABLES.items():
        table = values[parent]
        if not isinstance(table, Mapping) or key not in table:
            continue
        values[parent] = {k: v for k, v in table.items() if k != key}
        if not isinstance(values[key], Component) and values[key] != parameters[key].default:
            problems.append(f"{location(key)}: given here, and as {key} = {values[key]!r} too; remove one of them")
        values[key] = table[key]
