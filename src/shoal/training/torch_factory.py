"""The torch backend, which trains in every experiment that does not name another trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from shoal.errors import ExperimentError, ShoalError
from shoal.randomness import generator
from shoal.training.inputs import TrainerInputs
from shoal.training.learner import Learner
from shoal.training.losses import check_loss
from shoal.training.normalisation import example_inputs
from shoal.training.optimizers import check_optimizer
from shoal.training.outputs import check_outputs
from shoal.training.settings import OPTIONAL_SETTINGS, Training
from shoal.training.torch_trainer import TorchTrainer
from shoal.traits import ExperimentView, Traits
from shoal.types import NodeId, Params

if TYPE_CHECKING:
    import torch

    from shoal.models.flat import FlatModule


@dataclass(frozen=True)
class TorchBackend:
    """The experiment's model as a torch module, trained with the optimizer and the loss of `training`."""

    traits: ClassVar[Traits] = Traits(
        augments=True,
        fine_tunes=True,
        reports_metrics=True,
        training_options=frozenset(OPTIONAL_SETTINGS),
        imports_torch=True,
    )

    def create_factory(self, inputs: TrainerInputs) -> TorchTrainerFactory:
        return TorchTrainerFactory(inputs)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        """List wrong names and options of the optimizer and the loss. Does not import torch unless it has to decide."""
        problems: list[str] = []
        for check in (check_optimizer, check_loss):
            try:
                check(experiment.training)
            except ExperimentError as error:
                problems += error.problems
        return problems


class TorchTrainerFactory:
    """Holds one module for all nodes of a process, and one learner for each set of training settings."""

    trainer_class: ClassVar[type[TorchTrainer]] = TorchTrainer
    """The class of the trainers; a subclass of the factory may set another."""

    def __init__(self, inputs: TrainerInputs) -> None:
        import torch

        torch.set_num_threads(1)  # a node is one thread; the engines use the other cores for other nodes
        self.inputs = inputs
        self.flat = self._module("cpu")
        self.initial: Params = self.flat.read()
        self._learners: dict[str, Learner] = {}
        self._warm: set[Learner] = set()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(slot.shape for slot in self.flat.layout)

    def learner(self, training: Training) -> Learner:
        """Return the learner for these settings. Nodes with equal settings share it."""
        key = repr(training)
        if key not in self._learners:
            inputs = self.inputs
            if training.buffers != inputs.training.buffers:
                raise ExperimentError(
                    [
                        f"training.buffers = {training.buffers!r} for a group: models of different nodes would differ "
                        "in size; set it once, for all nodes"
                    ]
                )
            flat = self.flat if training.device == "cpu" else self._module(training.device)
            self._learners[key] = Learner(
                flat, training, inputs.data, inputs.test, inputs.metrics, inputs.augmentations
            )
        return self._learners[key]

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> TorchTrainer:
        inputs = self.inputs
        has_data = node < len(inputs.parts)
        return self.trainer_class(
            self.learner(training),
            inputs.part(node),
            generator(inputs.seed, "training", node),
            step_seconds,
            inputs.test_parts[node] if has_data and inputs.test_parts is not None else None,
            inputs.shifts[node] if has_data and inputs.shifts is not None else None,
            inputs.fine_tuning(node),
        )

    def evaluate(self, params: Params) -> dict[str, float]:
        return self.learner(self.inputs.training).evaluate(params)

    def warm_up(self, node: NodeId, training: Training) -> None:
        """Take a step with every learner, so that a fork inherits everything that torch sets up lazily.

        The step is on the CPU: an accelerator that a process has used does not work in its forks.
        """
        learner = self.learner(replace(training, device="cpu"))
        if learner not in self._warm:
            self._warm.add(learner)
            learner.warm_up(self.inputs.parts[node])

    def _module(self, device_name: str) -> FlatModule:
        from shoal.models.flat import initial_module, module_for

        inputs, device = self.inputs, _find_device(device_name)
        try:
            return initial_module(
                lambda: module_for(inputs.model.build(), inputs.data),
                inputs.seed,
                device,
                inputs.training.buffers,
                example_inputs(inputs.data, device),
                lambda outputs: check_outputs(outputs, inputs.data, inputs.training.loss),
            )
        except ValueError as error:
            raise ExperimentError([f"model = {inputs.model.name!r}: {error}"]) from error
        except ShoalError:
            raise
        except Exception as error:  # the code of a model may raise anything
            problem = f"model = {inputs.model.name!r}: it cannot be built: {type(error).__name__}: {error}"
            raise ExperimentError([problem]) from error


def _find_device(name: str) -> torch.device:
    """Return the device of this name. Raises ExperimentError if this machine does not have it."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ExperimentError(
            [f"training.device = {name!r}: not available on this machine ({reason}); try 'cpu'"]
        ) from error
    return device
