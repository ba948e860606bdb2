"""Conversion of plain data to typed objects, with a list of all problems and their locations.

The parameters of a component are those of its constructor; their types and bounds are its annotations:

    @dataclass(frozen=True)
    class Regular:
        degree: Annotated[int, Bounds(at_least=1)] = 5

`convert` turns values from TOML or Python into the annotated types. It adds problems to a list and does not raise, so
that a user sees all of them at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import keyword
import math
import re
import types
import typing
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.errors import ShoalError
from shoal.types import Bounds, FormerOption, Nested, NodeIdText, format_node_ids

REQUIRED: Any = inspect.Parameter.empty
INVALID: Any = object()  # the result of `convert` after it has added a problem
SHOWN_CHARACTERS = 200  # of a value in an error


@dataclass(frozen=True)
class Parameter:
    """One parameter of a constructor."""

    name: str
    hint: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def nested(self) -> str | None:
        """The kind of component of this parameter; None if it is not a component."""
        return next((a.kind for a in typing.get_args(self.hint)[1:] if isinstance(a, Nested)), None)

    @property
    def former(self) -> FormerOption | None:
        """The earlier name of this parameter; None if it has none."""
        return next((a for a in typing.get_args(self.hint)[1:] if isinstance(a, FormerOption)), None)

    def __str__(self) -> str:
        shown = f"{self.name}: {describe(self.hint)}"
        return shown if self.required else f"{shown} = {self.default!r}"


_signatures: weakref.WeakKeyDictionary[type, tuple[Mapping[str, inspect.Parameter], dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)
"""The constructor parameters and annotations of each class. To resolve them takes most of the time of a validation."""


def parameters(cls: type) -> dict[str, Parameter]:
    """Return the parameters of `cls(...)` by their names in an experiment, with resolved annotations.

    A Python keyword as a name has an underscore in Python and none in an experiment: `from_`.

    Raises ValueError if an annotation cannot be resolved, for example because of an import for type checks only.
    """
    if cls not in _signatures:
        _signatures[cls] = inspect.signature(cls).parameters, _hints(cls)
    signature, hints = _signatures[cls]
    fields = {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    found = {}
    for name, parameter in signature.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        default = parameter.default
        if name in fields and (make := fields[name].default_factory) is not dataclasses.MISSING:
            default = make()
        hint = hints.get(name, Any)
        key = name[:-1] if keyword.iskeyword(name.removesuffix("_")) else name
        found[key] = Parameter(key, hint.type if isinstance(hint, dataclasses.InitVar) else hint, default)
    return found


def _hints(cls: type) -> dict[str, Any]:
    owner: Any = cls if dataclasses.is_dataclass(cls) else cls.__init__  # type: ignore[misc]
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except NameError as error:
        raise ValueError(f"annotations of {cls.__name__} cannot be resolved: {error}; import their names") from error


def build(cls: type, table: object, place: str, problems: list[str]) -> Any:
    """Return `cls(**table)` with converted values. Adds every wrong key, type and range to `problems`."""
    values = arguments(cls, table, place, problems)
    if values is INVALID:
        return INVALID
    try:
        return cls(**{f"{key}_" if keyword.iskeyword(key) else key: value for key, value in values.items()})
    except Exception as error:  # the constructor of a plug-in may raise anything
        expected = isinstance(error, ValueError | TypeError | ShoalError)
        problems.append(f"{place}: {error}" if expected else f"{place}: {type(error).__name__}: {error}")
        return INVALID


def arguments(cls: type, table: object, place: str, problems: list[str]) -> Any:
    """Return the converted constructor arguments in `table`, or INVALID after adding to `problems`."""
    if not isinstance(table, Mapping):
        problems.append(f"{place} = {table!r}: expected a table")
        return INVALID
    try:
        known = parameters(cls)
    except ValueError as error:
        problems.append(f"{place}: {error}")
        return INVALID
    before = len(problems)
    values: dict[str, Any] = {}
    table = current_names(table, known, place)
    for key, value in table.items():
        if key not in known:
            problems.append(f"{join(place, key)}: unknown key{nearest(key, known)}")
            continue
        values[key] = convert(value, known[key].hint, join(place, key), problems)
    for key, parameter in known.items():
        if parameter.required and key not in table:
            problems.append(f"{join(place, key)}: missing; expected {describe(parameter.hint)}")
    return values if len(problems) == before else INVALID


def current_names(table: Mapping[str, Any], known: Mapping[str, Parameter], place: str) -> dict[str, Any]:
    """Replace earlier names of keys and values, with a warning. If a table has both names, the later key counts."""
    renamed = {p.former.name: (p.name, p.former.values) for p in known.values() if p.former is not None}
    current = {}
    for key, value in table.items():
        if key not in renamed:
            current[key] = value
            continue
        name, values = renamed[key]
        current[name] = next((new for old, new in values if old == value), value)
        warnings.warn(
            f"{join(place, key)} = {value!r}: this key has a new name; write {name} = {current[name]!r}",
            FutureWarning,
            stacklevel=2,
        )
    return current


def convert(value: Any, hint: Any, place: str, problems: list[str]) -> Any:
    """Return `value` converted to `hint`, or INVALID after adding to `problems`."""
    before = len(problems)
    converted = _convert(value, hint, place, problems)
    if converted is INVALID and len(problems) == before:
        advice = _class_name(value, hint) or _nearest_choice(value, hint) or _node_ids(value, hint)
        problems.append(f"{place} = {shown(value)}: expected {describe(hint)}{advice}")
    return converted


def _convert(value: Any, hint: Any, place: str, problems: list[str]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        if any(isinstance(a, Nested) for a in args[1:]):
            return value  # already built
        converted = _convert(value, args[0], place, problems)
        limits = [a for a in args[1:] if isinstance(a, Bounds)]
        if isinstance(converted, int | float) and not all(b.allows(converted) for b in limits):
            return INVALID
        return converted
    if hint is Any:
        return value
    if origin is Literal:
        return value if value in args and type(value) in {type(a) for a in args} else INVALID
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args, place, problems)
    if hint is type(None):
        return None if value is None else INVALID
    if hint is bool:
        return value if isinstance(value, bool) else INVALID
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else INVALID
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return INVALID
        return float(value)
    if hint is str:
        return value if isinstance(value, str) else INVALID
    if hint is Path:
        return Path(value) if isinstance(value, str | Path) else INVALID
    if origin in (tuple, list):
        return _convert_sequence(value, hint, place, problems)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            return INVALID
        items = {k: convert(v, args[1], join(place, str(k)), problems) for k, v in value.items()}
        return INVALID if any(v is INVALID for v in items.values()) else items
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, place, problems)  # type: ignore[arg-type]
    if isinstance(hint, type):
        return value if isinstance(value, hint) else INVALID
    problems.append(
        f"{place}: a parameter of type {hint!r} cannot be set in an experiment; remove it, so that the default is used"
    )
    return INVALID


def _convert_union(value: Any, args: tuple[Any, ...], place: str, problems: list[str]) -> Any:
    for option in args:
        attempt: list[str] = []
        converted = _convert(value, option, place, attempt)
        if converted is not INVALID and not attempt:
            return converted
    tables = [option for option in args if dataclasses.is_dataclass(option)]
    if isinstance(value, Mapping) and len(tables) == 1:
        return _convert(value, tables[0], place, problems)  # report the problems inside the table
    return INVALID


def _convert_sequence(value: Any, hint: Any, place: str, problems: list[str]) -> Any:
    if not isinstance(value, list | tuple):
        return INVALID
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and args[-1] is not Ellipsis:
        if len(value) != len(args):
            return INVALID
        inner: Iterable[Any] = args
    else:
        inner = [args[0]] * len(value)
    items = [convert(v, h, f"{place}[{i}]", problems) for i, (v, h) in enumerate(zip(value, inner, strict=True))]
    return INVALID if any(item is INVALID for item in items) else origin(items)


def describe(hint: Any) -> str:
    """Describe a type hint in the terms of an experiment file."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        if nested := [a.kind for a in args[1:] if isinstance(a, Nested)]:
            return f"one of 'shoal list {nested[0]}'"
        if any(isinstance(a, NodeIdText) for a in args[1:]):
            return "string of node ids and ranges, such as '0-3, 8'"
        limits = [str(a) for a in args[1:] if isinstance(a, Bounds)]
        return " ".join([describe(args[0]), *limits])
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args if a is not type(None))
    if origin in (tuple, list):
        if origin is tuple and args[-1] is not Ellipsis:
            return "[" + ", ".join(describe(a) for a in args) + "]"
        return f"a list of {describe(args[0])}"
    if origin is not None or dataclasses.is_dataclass(hint):
        return "a table"
    names = {
        int: "integer",
        float: "number",
        str: "string",
        Path: "path of a file",
        bool: "true or false",
        Any: "any value",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the advice for an unknown name: the closest valid name, or all of them."""
    names = sorted(known)
    if (close := closest(word, names)) is not None:
        return f"; did you mean '{close}'?"
    return f"; expected one of {', '.join(names)}" if names else "; nothing is expected here"


def shown(value: Any) -> str:
    """Return a value as text in an error. The text of a large value, such as an array, is cut."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


def _class_name(value: Any, hint: Any) -> str:
    """Return the advice for a class, or an instance of one, where the name of the class is expected."""
    cls = value if isinstance(value, type) else type(value)
    if hint is not str or cls.__module__ in ("builtins", "torch"):  # "torch": a device or a type of numbers
        return ""
    if cls.__module__.startswith(("torch.optim.", "torch.nn.")):
        return f"; write its name, '{cls.__name__}'"
    return f"; write the name of the class, 'file.py:{cls.__name__}' or 'module:{cls.__name__}'"


def _nearest_choice(value: Any, hint: Any) -> str:
    choices = [a for a in typing.get_args(hint) if isinstance(a, str)]
    if not isinstance(value, str) or typing.get_origin(hint) is not Literal:
        return ""
    close = closest(value, choices)
    return f"; did you mean '{close}'?" if close else ""


def _node_ids(value: Any, hint: Any) -> str:
    """Return the advice for numbers where a text of node ids is expected."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    ids = value if isinstance(value, list | tuple) else [value]
    named = any(isinstance(a, NodeIdText) for option in options for a in typing.get_args(option)[1:])
    if not named or not ids or not all(type(node) is int and node >= 0 for node in ids):
        return ""
    return f"; write '{format_node_ids(ids)}'"


def closest(word: str, names: Sequence[str]) -> str | None:
    """Return the name that is closest to `word`, in upper or lower case; None if none is close.

    A name can also be the first letters of the words in `word`: `lr` is close to `learning_rate`.
    """
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return close[0]
    folded = {name.lower(): name for name in names}
    initials = "".join(part[:1] for part in re.split("[-_ ]", word.lower()))
    similar = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.5)
    return next((folded[name] for name in (*similar, initials) if name in folded), None)


def join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
