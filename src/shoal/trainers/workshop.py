"""What makes the trainers of all nodes that live in one process.

A `Trainers` is a recipe, named in an experiment: `trainer = { name = "torch" }`. It opens a `Workshop` on the data
of a run, once per process; the workshop then makes a `shoal.training.Trainer` for each node. A trainer is five
methods, and its model one flat vector: enough to put anybody's training code behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.components import Component
from shoal.data.dataset import Data, Indices, Samples, Shift
from shoal.message import Params
from shoal.metrics import Metrics
from shoal.topologies.graph import NodeId
from shoal.training import Trainer, Training


@dataclass(frozen=True)
class Ground:
    """What trainers stand on: the data, who holds what of it, and the model that the experiment names."""

    seed: int
    data: Data
    parts: Sequence[Indices]
    """The training samples of each node, and none for those that serve."""
    tests: Sequence[Indices] | None
    """The test samples that are each node's own, as numbers in `test`; None when all are tested on all."""
    shifts: Sequence[Shift | None] | None
    """How each node sees its inputs."""
    test: Samples
    metrics: Metrics
    model: Component
    training: Training
    """What holds for nodes of no group."""

    def part(self, node: NodeId) -> Indices:
        return self.parts[node] if node < len(self.parts) else self.parts[0][:0]


class Workshop(Protocol):
    """Makes trainers. All state that nodes do not share is in the trainers."""

    @property
    def initial(self) -> Params:
        """The model that every node starts from; the same in every process."""
        ...

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that lie behind each other in the flat vector."""
        ...

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> Trainer: ...

    def evaluate(self, params: Params) -> dict[str, float]:
        """Scores of any parameters on the common test samples."""
        ...

    def warm_up(self, node: NodeId, training: Training) -> None:
        """Whatever is best done once, before nodes are forked from this process."""
        ...


class Trainers(Protocol):
    """A recipe for a workshop; its parameters are those of its constructor."""

    def open(self, ground: Ground) -> Workshop: ...
