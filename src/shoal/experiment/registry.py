"""Names to classes: what an experiment may name, and where it is found."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from shoal.experiment import schema

if TYPE_CHECKING:
    from shoal.topologies.graph import WeightScheme
    from shoal.training.trainer import Training


@dataclass(frozen=True)
class Component:
    """A name and its parameters: an algorithm, a sharing, a topology, … as an experiment spells it.

    A parameter may be a component in its turn.
    """

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """A new instance."""
        built = {k: v.build() if isinstance(v, Component) else v for k, v in self.options.items()}
        return find(self.kind, self.name)(**built)

    def to_table(self) -> dict[str, Any]:
        to_table = {k: v.to_table() if isinstance(v, Component) else v for k, v in self.options.items()}
        return {"name": self.name, **to_table}


Speaks: TypeAlias = Literal["neighbours", "server", "anyone", "itself"]
"""To whom an algorithm speaks: every round to the neighbours that the topology gives, to a server, to whomever it
picks; always by what the sharing says. Or by itself, in words of its own."""


def speaks(algorithm: Component) -> Speaks:
    found: Speaks = getattr(find("algorithm", algorithm.name), "speaks", "neighbours")
    return found


def sums(algorithm: Component) -> bool:
    """Whether nothing but the weighted sum of a round's models is asked of those that a node hears: `sums = True` in
    the algorithm's class."""
    return getattr(find("algorithm", algorithm.name), "sums", False) is True


class ExperimentView(Protocol):
    """The experiment, as far as a component may look at it to say whether it fits in."""

    @property
    def nodes(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def algorithm(self) -> Component: ...
    @property
    def sharing(self) -> Component: ...
    @property
    def topology(self) -> Component: ...
    @property
    def weights(self) -> WeightScheme: ...
    @property
    def training(self) -> Training: ...
    @property
    def restarts(self) -> bool:
        """Whether nodes that died may come back."""
        ...


@runtime_checkable
class Constrained(Protocol):
    """A component that does not go with everything."""

    def incompatibilities(self, whole: ExperimentView) -> list[str]:
        """What of the experiment does not go with this component: for each the key, the reason and what to do."""
        ...


def registry(kind: str) -> Mapping[str, str]:
    """The names that Shoal itself knows for `kind`, and where each is found."""
    module, name = REGISTRIES[kind].split(":")
    found: Mapping[str, str] = getattr(importlib.import_module(module), name)
    return found


REGISTRIES = {
    "algorithm": "shoal.algorithms:ALGORITHMS",
    "server-optimizer": "shoal.algorithms.support.server_optimizers:SERVER_OPTIMIZERS",
    "sharing": "shoal.sharing:SHARINGS",
    "topology": "shoal.topologies:TOPOLOGIES",
    "dataset": "shoal.data:DATASETS",
    "partition": "shoal.data:PARTITIONS",
    "model": "shoal.models:MODELS",
    "network": "shoal.environment.network:NETWORKS",
    "device": "shoal.environment.devices:DEVICES",
    "availability": "shoal.environment.availability:AVAILABILITIES",
    "trainer": "shoal.training:TRAINERS",
    "mapping": "shoal.experiment.mapping:MAPPINGS",
    "compressor": "shoal.compression:COMPRESSORS",
    "values": "shoal.compression:VALUES",
    "indices": "shoal.compression:INDICES",
}


def find(kind: str, name: str, base: Path | None = None) -> Any:
    """The class that `name` stands for: a known name, `module:Class`, or `file.py:Class` relative to `base`.

    Raises ValueError with the reason.
    """
    known = registry(kind)
    if name in known:
        module, attribute = known[name].split(":")
        return getattr(importlib.import_module(module), attribute)
    if ":" not in name:
        raise ValueError(f"unknown {kind} {name!r}{schema.nearest(name, known)}")
    where, attribute = name.rsplit(":", 1)
    loaded = _load_file(Path(base or ".", where)) if where.endswith(".py") else _load_module(where)
    found = getattr(loaded, attribute, None)
    if not isinstance(found, type):
        classes = [n for n, c in vars(loaded).items() if isinstance(c, type) and c.__module__ == loaded.__name__]
        hint = schema.nearest(attribute, classes) if classes else "; it defines no class"
        raise ValueError(f"{where} has no class {attribute!r}{hint}")
    return found


def load(name: str) -> Any:
    """Anything by its name, `module:thing` or `file.py:thing`. Raises ValueError with the reason."""
    where, _, attribute = name.rpartition(":")
    loaded = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    if not hasattr(loaded, attribute):
        own = [n for n, thing in vars(loaded).items() if getattr(thing, "__module__", None) == loaded.__name__]
        raise ValueError(f"{where} has no {attribute!r}{schema.nearest(attribute, own)}")
    return getattr(loaded, attribute)


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {name!r} failed: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> Any:
    path = path.resolve()
    name = f"shoal_plugin_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{str(path)!r} raised on import: {type(error).__name__}: {error}") from error
    return module


def component_name(kind: str, instance: Any) -> str:
    """An instance of a component's class as an experiment would name it; its parameters are left out."""
    cls = type(instance)
    path = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, where in registry(kind).items() if where == path), path)


def to_table(kind: str, instance: Any) -> dict[str, Any]:
    """An instance of a component's class as plain data, which `from_table` reads: its name and its parameters.

    Raises ValueError for one that is not a dataclass.
    """
    if not dataclasses.is_dataclass(instance) or isinstance(instance, type):
        raise ValueError(f"{instance!r} is not an instance of a dataclass, so nobody knows its parameters")
    nested = {p.name: p.nested for p in schema.parameters(type(instance)).values() if p.nested is not None}
    options = {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance) if f.init}
    return {
        "name": component_name(kind, instance),
        **{k: to_table(nested[k], v) if k in nested and v is not None else _plain(v) for k, v in options.items()},
    }


def from_table(kind: str, table: Mapping[str, Any]) -> Any:
    """The instance that `to_table` spelt. Raises ValueError where there is no such class, or its parameters are others."""
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


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def components(kind: str) -> Iterator[tuple[str, Any]]:
    """Every known name of `kind` and its class."""
    for name in registry(kind):
        yield name, find(kind, name)
