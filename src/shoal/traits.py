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
Cut: TypeAlias = Literal["round", "time", "none"]


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
    common_schedule: bool = False
    """Whether the learning rates of all nodes must change in the same rounds, by the same factors."""
    stateless_nodes: bool = False
    """Whether nodes keep no optimizer state from round to round unless `training.keep_state` is true."""
    per_node_options: frozenset[str] = frozenset()
    """Options that may differ between the nodes of a run."""
    checkpoint_cut: Cut = "round"
    """Which states of the nodes a checkpoint consists of. "round": the states after the same round, if nodes wait for
    the messages of a round: messages of later rounds are sent again. "time": the latest states, if nodes do not wait
    for each other: messages in transit are lost. "none": its state cannot be saved, and `checkpoint.every` is
    rejected."""

    # Algorithms and topologies
    has_service: bool = False
    """Whether it needs a service node of its own, such as a server: see `shoal.node.ServiceProvider`."""

    # Sharings
    sends_whole_models: bool = False
    """Whether a payload contains every coordinate of the model; the values may be rounded."""
    adds_data: bool = False
    """Whether nodes receive training samples."""
    interactive: bool = False
    """Whether it exchanges messages of its own with other nodes: see `shoal.node.InteractiveSharing`."""
    needs_private_links: bool = False
    """Whether it protects models from other nodes only if no one else can read the links between nodes."""

    # Topologies
    discovers_peers: bool = False
    """Whether nodes find their peers by a protocol: see `shoal.node.DiscoveryTopology`."""
    needs_labels: bool = False
    """Whether the graph is built from the labels that nodes hold: see `shoal.topologies.graph.FromLabels`."""

    # Partitions
    splits_by_class: bool = False
    """Whether it assigns samples by their class, so that it needs a data set whose targets are classes."""

    # Trainers
    augments: bool = False
    """Whether it transforms training batches as `dataset.augmentation` sets it, for example as `BatchTrainer` does."""
    fine_tunes: bool = False
    """Whether it trains a copy of the model before an evaluation, as `evaluation.fine_tune` sets it."""
    reports_metrics: bool = False
    """Whether its scores are the metrics of `evaluation.metrics` and no others, as `TrainerInputs.scores` returns them.
    Then `evaluation.metric` is checked before a run."""
    training_options: frozenset[str] = frozenset()
    """Which of these keys of `training` it follows: "schedule", "clip_norm", "clip_value", "label_smoothing" and
    "precision". The others are rejected."""
    imports_torch: bool = False
    """Whether it imports torch. After a simulation, the generators and the threads of torch are as before."""
    limits_threads: bool = False
    """Whether it limits the threads of numerical libraries with `threadpoolctl`. After a simulation, the limits are as
    before."""


METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "has_service": (("algorithm", "topology"), ("serve",)),
    "interactive": (
        ("sharing",),
        ("set_sender_group", "before_send", "expected_senders", "after_receive", "serve_peers", "drain"),
    ),
    "discovers_peers": (("topology",), ("discovery",)),
    "needs_labels": (("topology",), ("build_from",)),
}
"""For each of these traits: the kinds of components that may have it, and the methods that come with it."""


@dataclass(frozen=True)
class FormerName:
    """An earlier name in the interface of a kind of component. A class that still has it would run with the defaults.

    With several `names`, a class has the earlier interface only if it has all of them.
    """

    kinds: tuple[str, ...]
    names: tuple[str, ...]
    replacement: str
    value_type: type = object
    """The type of the attribute; an attribute of another type is unrelated."""

    def is_in(self, cls: type, kind: str) -> bool:
        return kind in self.kinds and all(
            hasattr(cls, name) and isinstance(getattr(cls, name), self.value_type) for name in self.names
        )


FORMER_NAMES = (
    FormerName(("algorithm",), ("speaks",), "Traits(sends_to=…) or Traits(own_payloads=True)"),
    FormerName(("algorithm",), ("sums",), "Traits(needs_only_sum=True)"),
    FormerName(("algorithm",), ("per_node",), "Traits(per_node_options=…)", value_type=frozenset),
    FormerName(("sharing",), ("says_all",), "Traits(sends_whole_models=True)"),
    FormerName(("sharing",), ("adds_data",), "Traits(adds_data=True)"),
    FormerName(("sharing",), ("join",), "a method bind(info)"),
    FormerName(
        ("sharing",),
        ("prepare", "expected", "open", "attend", "part"),
        "Traits(interactive=True) and the methods of shoal.node.InteractiveSharing",
    ),
    FormerName(("topology",), ("finder",), "a method discovery()"),
    FormerName(("topology",), ("behind",), "a property sampled_topology"),
    FormerName(("partition",), ("by_class",), "Traits(splits_by_class=True)"),
    FormerName(("algorithm", "sharing", "topology"), ("misfits",), "a method incompatibilities(experiment)"),
)


def traits_of(component: object, kind: str) -> Traits:
    """The traits of the class of a component of this kind, or of an instance that has those of a component in it.

    Raises ValueError if they contradict its methods, or if it has a former name.
    """
    cls = component if isinstance(component, type) else type(component)
    traits: Traits = getattr(component, "traits", Traits())
    for former in FORMER_NAMES:
        if former.is_in(cls, kind):
            raise ValueError(
                f"{cls.__name__}.{'/'.join(former.names)}: this name is not used any more; write {former.replacement}"
            )
    if not isinstance(traits, Traits):
        raise ValueError(f"{cls.__name__}.traits = {traits!r}: expected an instance of shoal.Traits")
    for trait, (kinds, methods) in METHODS.items():
        for method in methods if kind in kinds else ():
            has_method = callable(getattr(cls, method, None))
            if has_method and not getattr(traits, trait):
                raise ValueError(
                    f"{cls.__name__} has a method {method!r}; declare it with traits = Traits({trait}=True)"
                )
            if getattr(traits, trait) and not has_method:
                raise ValueError(
                    f"{cls.__name__} declares {trait}=True but has no method {method!r}; add the method, or remove "
                    "the trait"
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
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...
    @property
    def weight_decay(self) -> float | None: ...
    @property
    def loss(self) -> str: ...
    @property
    def label_smoothing(self) -> float | None: ...
    @property
    def local_steps(self) -> int: ...
    @property
    def local_epochs(self) -> int | None: ...
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
    def trainer(self) -> ComponentView: ...
    @property
    def training(self) -> TrainingView: ...
    @property
    def restarts(self) -> bool:
        """Whether nodes may be started during the run: failed ones again, or late ones."""
        ...

    @property
    def graph(self) -> Any:
        """The graph that the topology builds (`shoal.topologies.graph.Graph`). None if it cannot be built, or not yet.

        A graph that is built from labels is known when the data is loaded; then components are checked again. If nodes
        find their peers by a protocol, this is the graph that the protocol begins with or samples from.
        """
        ...


@runtime_checkable
class Constrained(Protocol):
    """A component that does not work with every experiment."""

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        """List what in the experiment this component cannot work with: the key, the reason and what to do."""
        ...
