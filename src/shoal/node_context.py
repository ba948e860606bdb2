"""NodeContext: the part of a node that does not change during a run, and the collaborators that the engine provides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from shoal.results.records import Record
from shoal.topologies.graph import Mixing, Topology, WeightScheme
from shoal.types import NodeId, Params

NonFinite: TypeAlias = Literal["reject", "keep"]


class Observer(Protocol):
    """Receives a node's records, and its models for the average over all nodes."""

    def record(self, record: Record) -> None: ...

    def submit_for_average(self, round: int, params: Params) -> None:
        """Take the node's model after `round`, for the average over all nodes and the distance to it."""
        ...

    async def before_round(self, round: int) -> None:
        """Run at the start of every round; scheduled faults happen here."""
        ...

    def defer_evaluation(self, round: int, params: Params, progress: tuple[int, int]) -> bool:
        """Keep a model to evaluate it after the run. Returns False if the node must evaluate it now.

        `progress` is that of the node's training: its round and the number of its local steps.
        """
        ...


class CheckpointSaver(Protocol):
    """Saves the state of one node for the checkpoints of the run."""

    every: int
    """Rounds between two checkpoints."""

    def save(self, round: int) -> None:
        """Save the present state of the node, as its state after `round`."""
        ...

    def leave(self) -> None:
        """Complete all checkpoints without this node."""
        ...


class MixingFactory(Protocol):
    """Builds graphs with mixing weights for the nodes of one run, and converts topologies to and from tables."""

    def build(self, topology: Topology, weights: WeightScheme | None = None) -> Mixing:
        """Build the graph of `topology`. `weights` None uses the scheme of the experiment."""
        ...

    def to_table(self, topology: Topology) -> dict[str, Any]:
        """Return plain data that describes `topology`. Raises ValueError if that is not possible."""
        ...

    def from_table(self, table: Mapping[str, Any]) -> Topology: ...


@dataclass(frozen=True)
class EvaluationSchedule:
    """When a node is evaluated."""

    every: int
    """Rounds between evaluations; 0 evaluates after the last round only."""
    evaluated: bool
    """Whether this node is evaluated."""
    averaged: bool
    """Whether the average of all models is evaluated too."""
    by_time: bool = False
    """Whether the engine evaluates all nodes together at fixed times, and not after their rounds."""

    def due(self, round: int, last: bool) -> bool:
        if self.by_time:
            return False
        return last or (self.every > 0 and (round + 1) % self.every == 0)


@dataclass(frozen=True)
class NodeContext:
    """The part of a node that does not change during a run."""

    id: NodeId
    nodes: int
    """The number of training nodes. Their ids are 0 to nodes − 1; service nodes have the ids after these."""
    seed: int
    run: str
    """The name of the run. Every message carries it."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the model's tensors, in their order in the flat vector."""
    schedule: EvaluationSchedule
    mixing: Mixing
    """The experiment's graph with its mixing weights, for all nodes."""
    mixing_factory: MixingFactory
    services: Mapping[str, NodeId] = field(default_factory=dict)
    """Service nodes by the component that needs them: "algorithm" or "topology"."""
    receive_timeout: float | None = None
    """Seconds that a receive waits for its senders; None: no limit."""
    non_finite: NonFinite = "reject"
    """Whether received payloads with infinities or NaN are rejected or kept."""
    learning_rate: float = 0.1
    """The base learning rate of the node's training. `Node.learning_rate` is the current one."""
    incarnation: int = 0
    """How often the node was restarted."""
    late: bool = False
    """Whether the node, or its latest incarnation, was not there at the start of the run."""
