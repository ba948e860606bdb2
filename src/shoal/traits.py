"""What a component can and cannot do, declared in one typed object and checked before a run starts.

A component's class declares its capabilities as `traits: ClassVar[Traits]`; a class without it has the defaults:

    @dataclass(frozen=True)
    class FedAvg:
        traits: ClassVar[Traits] = Traits(sends_to="server", needs_only_sum=True, has_service=True)

A component that does not work with every experiment has a method `incompatibilities(experiment)` as well. It is given
the experiment as an `ExperimentView`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

Receivers: TypeAlias = Literal["neighbours", "server", "anyone"]


@dataclass(frozen=True)
class Traits:
    """The capabilities of a component's class."""

    # Algorithms
    sends_to: Receivers = "neighbours"
    """The receivers of its models: the neighbours that the topology gives in a round, a server, or nodes that the
    algorithm chooses itself."""
    own_payloads: bool = False
    """Whether its payloads are not models of the sharing: it builds them itself, or they are steps."""
    needs_only_sum: bool = False
    """Whether it uses nothing of the models received in a round but their weighted sum."""
    per_node_options: frozenset[str] = frozenset()
    """Options that may differ between the nodes of a run."""

    # Algorithms and topologies
    has_service: bool = False
    """Whether it needs a service node of its own, such as a server: see `shoal.node.ServiceProvider`."""

    # Sharings
    sends_whole_models: bool = False
    """Whether a payload contains every coordinate of the model; the values may be rounded."""
    adds_data: bool = False
    """Whether nodes receive training samples."""

    # Topologies
    discovers_peers: bool = False
    """Whether nodes find their peers by a protocol: see `shoal.node.DiscoveryTopology`."""
    needs_labels: bool = False
    """Whether the graph is built from the labels that nodes hold: see `shoal.topologies.graph.FromLabels`."""

    # Partitions
    splits_by_class: bool = False
    """Whether it assigns samples by their class, so that it needs a data set whose targets are classes."""


METHODS = {"has_service": "serve", "discovers_peers": "discovery", "needs_labels": "build_from"}
"""The method that a class with each of these traits has."""

REPLACED = {
    "speaks": "Traits(sends_to=…) or Traits(own_payloads=True)",
    "sums": "Traits(needs_only_sum=True)",
    "says_all": "Traits(sends_whole_models=True)",
    "misfits": "a method incompatibilities(experiment)",
    "join": "a method bind(info)",
    "finder": "a method discovery()",
    "by_class": "Traits(splits_by_class=True)",
}
"""Earlier names of class attributes and methods. A class that still has one would run with the defaults."""


def traits_of(component: object) -> Traits:
    """The traits of a component's class, or of an instance that has the traits of another component in it.

    Raises ValueError if they contradict its methods, or for an earlier name.
    """
    cls = component if isinstance(component, type) else type(component)
    traits: Traits = getattr(component, "traits", Traits())
    for name, replacement in REPLACED.items():
        if hasattr(cls, name):
            raise ValueError(f"{cls.__name__}.{name}: this name is not used any more; write {replacement}")
    if not isinstance(traits, Traits):
        raise ValueError(f"{cls.__name__}.traits = {traits!r}: expected an instance of shoal.Traits")
    for trait, method in METHODS.items():
        if getattr(traits, trait) != callable(getattr(cls, method, None)):
            has, declared = ("has", "does not declare") if not getattr(traits, trait) else ("has no", "declares")
            raise ValueError(
                f"{cls.__name__} {has} method {method!r} and {declared} it; "
                f"write traits = Traits({trait}=True) in a class with this method, and only there"
            )
    return traits


class ComponentView(Protocol):
    """A component of an experiment: its name and its options."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def traits(self) -> Traits: ...
    def build(self) -> Any:
        """Return a new instance."""
        ...


class TrainingView(Protocol):
    """The training settings that a component may check."""

    @property
    def optimizer(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class ExperimentView(Protocol):
    """The parts of an experiment that a component may check."""

    @property
    def nodes(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def algorithm(self) -> ComponentView: ...
    @property
    def sharing(self) -> ComponentView: ...
    @property
    def topology(self) -> ComponentView: ...
    @property
    def weights(self) -> Literal["metropolis-hastings", "uniform"]: ...
    @property
    def training(self) -> TrainingView: ...
    @property
    def restarts(self) -> bool:
        """Whether failed nodes may be started again."""
        ...


@runtime_checkable
class Constrained(Protocol):
    """A component that does not work with every experiment."""

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        """List what in the experiment this component cannot work with: the key, the reason and what to do."""
        ...
