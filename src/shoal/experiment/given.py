"""Components that are given in Python: by name, as a class, as an instance, or as arrays."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import keyword
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal import schema
from shoal.experiment.registry import IN_MEMORY, MemoryComponent, class_name, shallow_table
from shoal.plugins import is_module_class


class Given(NamedTuple):
    """A component as a table with a name, and its class if the name does not lead to it."""

    table: Mapping[str, Any]
    cls: type | None = None


def read_given(kind: str, value: Any) -> Given | MemoryComponent | None:
    """Return a component that is given as a name, a table or an object; None if it is none of these.

    Raises ValueError, with what to write, if the parameters of an instance cannot be found.
    """
    if isinstance(value, str):
        return Given({"name": value})
    if isinstance(value, Mapping):
        return Given(value)
    if type(value).__module__.startswith("networkx"):
        from shoal.topologies.given import from_networkx

        value = from_networkx(value)
    if isinstance(value, type):
        return _of_class(kind, value, {})
    if kind == "dataset" and not hasattr(value, "load"):
        from shoal.data.memory import store_arrays

        return Given(store_arrays(value))
    if dataclasses.is_dataclass(value):
        options = {k: v for k, v in shallow_table(kind, value).items() if k != "name"}
        return _of_class(kind, type(value), options)
    if kind == "model" and is_module_class(type(value)):
        own = copy.deepcopy(value)  # the caller may train or change the module
        return MemoryComponent(kind, f"{IN_MEMORY}{type(value).__name__}", {}, own)
    if type(value).__module__ == "builtins":
        return None
    return _of_class(kind, type(value), _attributes(value))


def _of_class(kind: str, cls: type, options: dict[str, Any]) -> Given:
    name = class_name(kind, cls)
    if name is None:
        return Given({"name": f"{IN_MEMORY}{cls.__name__}", **options}, cls)
    return Given({"name": name, **options})


def _attributes(value: object) -> dict[str, Any]:
    """Return the parameters of an instance from its attributes of the same names. Raises ValueError."""
    cls = type(value)
    kinds = {parameter.kind for parameter in inspect.signature(cls).parameters.values()}
    names = list(schema.parameters(cls))
    found = {name: _attribute(value, name) for name in names}
    unknown = [name for name in names if found[name] is schema.REQUIRED]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        unknown.append("*args")
    if inspect.Parameter.VAR_KEYWORD in kinds:
        unknown.append("**kwargs")
    if not unknown:
        again = cls(**{f"{name}_" if keyword.iskeyword(name) else name: option for name, option in found.items()})
        unknown = [name for name in names if not _equal(_attribute(again, name), found[name])]
    if unknown:
        example = ", ".join(f"{name!r}: …" for name in names)
        raise ValueError(
            f"the parameters {', '.join(unknown)} of this instance are not known; make {cls.__name__} a dataclass, "
            f"store every parameter in an attribute of its name, or write {{'name': '…:{cls.__name__}', {example}}}"
        )
    return found


def _attribute(value: object, name: str) -> Any:
    return next((getattr(value, own) for own in (name, f"_{name}") if hasattr(value, own)), schema.REQUIRED)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or one == other)
    except ValueError:  # arrays
        return False
