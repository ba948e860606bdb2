"""Torch networks: the trainer of every experiment that does not name another."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ExperimentError
from shoal.models.flat import FlatModule, initial_module, module_for
from shoal.randomness import generator
from shoal.training.factory import TrainerInputs
from shoal.training.trainer import Learner, TorchTrainer, Training, find_device, first_inputs
from shoal.types import NodeId, Params


@dataclass(frozen=True)
class TorchBackend:
    """The experiment's model, a torch module, trained by the optimizer and loss of `training`."""

    def create_factory(self, inputs: TrainerInputs) -> TorchTrainerFactory:
        return TorchTrainerFactory(inputs)


class TorchTrainerFactory:
    """One module for all nodes of a process, and a learner for each kind of training."""

    def __init__(self, inputs: TrainerInputs) -> None:
        import torch

        torch.set_num_threads(1)  # a node is one thread; the engines use the other cores for other nodes
        self._inputs = inputs
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
            if training.buffers != self._inputs.training.buffers:
                raise ExperimentError(
                    [
                        f"training.buffers = {training.buffers!r} for a group: models of different nodes would differ "
                        "in size; say it once, for all nodes"
                    ]
                )
            flat = self.flat if training.device == "cpu" else self._module(training.device)
            inputs = self._inputs
            self._learners[key] = Learner(flat, training, inputs.data, inputs.test, inputs.metrics)
        return self._learners[key]

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> TorchTrainer:
        inputs = self._inputs
        learns = node < len(inputs.parts)
        return TorchTrainer(
            self.learner(training),
            inputs.part(node),
            generator(inputs.seed, "training", node),
            step_seconds,
            inputs.tests[node] if learns and inputs.tests is not None else None,
            inputs.shifts[node] if learns and inputs.shifts is not None else None,
        )

    def evaluate(self, params: Params) -> dict[str, float]:
        return self.learner(self._inputs.training).evaluate(params)

    def warm_up(self, node: NodeId, training: Training) -> None:
        """Take a step with every learner, so that a fork inherits all that torch sets up lazily."""
        if repr(training) not in self._learners:
            self.learner(training).warm_up(self._inputs.parts[node])

    def _module(self, device: str) -> FlatModule:
        inputs, where = self._inputs, find_device(device)
        try:
            return initial_module(
                lambda: module_for(inputs.model.build(), inputs.data),
                inputs.seed,
                where,
                inputs.training.buffers,
                first_inputs(inputs.data, where),
            )
        except ValueError as error:
            raise ExperimentError([f"model = {inputs.model.name!r}: {error}"]) from error
