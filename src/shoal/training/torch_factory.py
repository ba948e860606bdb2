"""Torch networks: the trainer of every experiment that does not name another."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ExperimentError
from shoal.models.flat import FlatModule, initial_module, module_for
from shoal.randomness import generator
from shoal.training.factory import Ground
from shoal.training.trainer import Learner, TorchTrainer, Training, find_device, first_inputs
from shoal.types import NodeId, Params


@dataclass(frozen=True)
class Networks:
    """The experiment's model, a torch module, trained by the optimizer and loss of `training`."""

    def open(self, ground: Ground) -> NetworkWorkshop:
        return NetworkWorkshop(ground)


class NetworkWorkshop:
    """One module for all nodes of a process, and a learner for each kind of training."""

    def __init__(self, ground: Ground) -> None:
        import torch

        torch.set_num_threads(1)  # a node is one thread; the engines use the other cores for other nodes
        self._ground = ground
        self.flat = self._module("cpu")
        self.initial: Params = self.flat.read()
        self._learners: dict[str, Learner] = {}

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(slot.shape for slot in self.flat.layout)

    def learner(self, training: Training) -> Learner:
        """The learner for these settings; one for all nodes that share them."""
        key = repr(training)
        if key not in self._learners:
            if training.buffers != self._ground.training.buffers:
                raise ExperimentError(
                    [
                        f"training.buffers = {training.buffers!r} for a group: models of different nodes would differ "
                        "in size; say it once, for all nodes"
                    ]
                )
            flat = self.flat if training.device == "cpu" else self._module(training.device)
            ground = self._ground
            self._learners[key] = Learner(flat, training, ground.data, ground.test, ground.metrics)
        return self._learners[key]

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> TorchTrainer:
        ground = self._ground
        learns = node < len(ground.parts)
        return TorchTrainer(
            self.learner(training),
            ground.part(node),
            generator(ground.seed, "training", node),
            step_seconds,
            ground.tests[node] if learns and ground.tests is not None else None,
            ground.shifts[node] if learns and ground.shifts is not None else None,
        )

    def evaluate(self, params: Params) -> dict[str, float]:
        return self.learner(self._ground.training).evaluate(params)

    def warm_up(self, node: NodeId, training: Training) -> None:
        """Take a step with every learner, so that a fork inherits all that torch sets up lazily."""
        if repr(training) not in self._learners:
            self.learner(training).warm_up(self._ground.parts[node])

    def _module(self, device: str) -> FlatModule:
        ground, where = self._ground, find_device(device)
        try:
            return initial_module(
                lambda: module_for(ground.model.build(), ground.data),
                ground.seed,
                where,
                ground.training.buffers,
                first_inputs(ground.data, where),
            )
        except ValueError as error:
            raise ExperimentError([f"model = {ground.model.name!r}: {error}"]) from error
