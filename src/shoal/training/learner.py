"""Training and evaluation of one torch module: parameters in, parameters out.

A `Learner` is shared by the torch trainers of one process. It trains one node at a time (`train`), or many nodes at
once with their parameters stacked in a matrix (`train_stacked`, with `torch.func.vmap`).

An elementwise optimizer (almost all optimizers are elementwise) updates the flat vector of all parameters in one call.
The result is the same as if it updated each tensor separately. Other optimizers work on the module's own tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shoal.data.augmentations import augment
from shoal.data.dataset import Augmentation, Data, Indices, Samples, Shift
from shoal.data.local import select_rows
from shoal.errors import ExperimentError
from shoal.randomness import generator
from shoal.training.gradients import Precision, clip
from shoal.training.losses import Loss
from shoal.training.memory_format import channels_last, prefers_channels_last
from shoal.training.metrics import Metrics, add_sums
from shoal.training.module_draws import ModuleDraws, global_states, without_draws
from shoal.training.normalisation import example_inputs, normalise, scaling_tensors
from shoal.training.optimizers import (
    OptimizerFactory,
    OptimizerState,
    load_state,
    read_state,
    set_rate,
    stack_states,
    take_step,
    unstack_state,
)
from shoal.training.overrides import knows_overrides
from shoal.training.schedules import LearningRate
from shoal.training.settings import Training
from shoal.training.trainer import Trained
from shoal.types import Params

if TYPE_CHECKING:
    import torch

    from shoal.models.flat import FlatModule

Result = TypeVar("Result")


class Learner:
    """A module with its loss, its optimizer and the data: everything that training needs except the node."""

    EVALUATION_VALUES = 2**15
    """Input values that are evaluated at once. Evaluation then needs no more memory than training."""
    EVALUATION_OUTPUTS = 2**22
    """Output values at once. With a vocabulary of words at each position, outputs are far larger than inputs."""

    def __init__(
        self,
        flat: FlatModule,
        training: Training,
        data: Data,
        test: Samples | None = None,
        metrics: Metrics | None = None,
        augmentations: Sequence[Augmentation] = (),
    ) -> None:
        """`test` replaces the test samples of `data`; `metrics` replaces the default metrics of the task.

        `augmentations` transform training inputs, in order.
        """
        self._augmentations = augmentations
        self.flat = flat
        self.training = training
        self.data = data
        self.metrics = metrics or Metrics(data)
        self.device = flat.values.device
        self._train = _tensors(data.train, self.device)
        self._test = _tensors(data.test if test is None else test, self.device)
        values = math.prod(data.shape)
        outputs = data.classes * (values if data.task == "sequence" else 1)
        self.evaluation_batch = max(
            1, min(self.EVALUATION_VALUES // max(1, values), self.EVALUATION_OUTPUTS // max(1, outputs))
        )
        """Test samples that are evaluated at once."""
        self._scaling = scaling_tensors(data, self.device)
        self._loss = Loss(training.loss, data, training.label_smoothing or 0.0)
        self._test_loss = Loss(training.loss, data) if training.label_smoothing else self._loss
        self._optimizers = OptimizerFactory(training)
        self.learning_rate = LearningRate(training)
        self._draws = ModuleDraws(self.device)
        self.channels_last = self._takes_channels_last()
        """Whether a node that computes alone gets images with adjacent channels."""
        trained = flat.values[: flat.trained_size]
        trained.grad = flat.gradient[: flat.trained_size]
        self._optimizer = self._optimizers.create(
            [trained] if self._optimizers.elementwise else list(flat.module.parameters())
        )
        if self.learning_rate.changes and "lr" not in self._optimizer.defaults:
            raise ExperimentError(
                [f"training.schedule: {type(self._optimizer).__name__} has no learning rate 'lr' in its defaults"]
            )
        self._precision = Precision(training, self.device)
        if self._precision.reduced:
            self._check_precision()

    # One node

    def train(
        self,
        params: Params,
        state: OptimizerState,
        batches: Indices,
        seed: int = 0,
        added: Samples | None = None,
        shift: Shift | None = None,
        buffers: dict[str, torch.Tensor] | None = None,
        rates: Sequence[float] | None = None,
    ) -> tuple[Trained, OptimizerState]:
        """Take one optimizer step on each batch. Return the result and the optimizer's new state.

        `batches` holds indices of samples. Indices beyond the data set are samples of `added`. `seed` is for random
        draws in the module (dropout), in augmentations and in the optimizer. `shift` transforms the inputs for this
        node. `buffers` are the node's own buffers; None takes the initial ones. After the call, `flat.read_local()`
        returns the new ones. `rates` are the learning rates of the steps; None takes that of the settings.
        """
        import torch

        flat, optimizer, module = self.flat, self._optimizer, self.flat.module
        proximal = self.training.proximal
        added_tensors = None if added is None else _tensors(added, self.device)
        flat.load(params)
        flat.load_local(buffers)
        values, gradient = flat.values[: flat.trained_size], flat.gradient[: flat.trained_size]
        start = values.clone() if proximal else None
        scaling = self._precision.scaling(state)
        load_state(optimizer, scaling.remove_from(state))
        total = torch.zeros((), device=self.device)
        rng = generator(seed, "augmentation") if self._augmentations else None
        with self._draws.seeded(seed):
            for i, batch in enumerate(torch.from_numpy(batches)):
                flat.gradient.zero_()
                inputs, targets = self.gather(batch, added_tensors)
                if shift is not None:
                    inputs = shift.apply(inputs, batch)
                if rng is not None:
                    inputs = augment(inputs, self._augmentations, rng)
                with self._precision.autocast():
                    loss = self._loss(module(self._arranged(inputs)), targets)
                total += loss.detach()
                if not scaling.backward(loss, gradient):
                    continue
                if start is not None:
                    gradient.add_(values - start, alpha=proximal)
                clip(gradient, self.training)
                set_rate(optimizer, rates, i)
                take_step(optimizer)
        flat.sync_statistics()
        trained = Trained(flat.read(), float(total) / len(batches), scaling.left_out)
        return trained, scaling.add_to(read_state(optimizer))

    def evaluate(
        self,
        params: Params,
        tests: Indices | None = None,
        shift: Shift | None = None,
        buffers: dict[str, torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """Return the scores on all test samples, or on those with the indices `tests`.

        `shift` transforms the inputs for this node. `buffers` are the node's own buffers; None takes the initial
        ones, for example for the average of many models. A module that draws random numbers in evaluations draws the
        same ones in each.
        """
        import torch

        self.flat.load(params)
        self.flat.load_local(buffers)
        totals: dict[str, Any] = {}
        with torch.no_grad(), self._evaluation_mode(), self._draws.seeded(0):
            for numbers, x, y in self._test_batches(tests):
                inputs = x if shift is None else shift.apply(x, -1 - numbers)
                outputs = self.flat.module(self._arranged(inputs))
                add_sums(totals, self.metrics.batch_sums(outputs, y, self._test_loss(outputs, y)))
        return self.metrics.scores(totals)

    def warm_up(self, samples: Indices) -> None:
        """Train and evaluate on one batch, so that torch has imported and set up everything that it will use."""
        params = self.flat.read()
        batch = np.resize(samples, (1, self.training.batch_size))
        self.train(params, {}, batch)
        self.evaluate(params, np.arange(min(self.evaluation_batch, len(self._test[1]))))
        self.flat.load(params)

    # Many nodes

    @cached_property
    def trains_stacked(self) -> bool:
        """Whether `train_stacked` gives the same results as `train`.

        torch must be able to compute many of these models at once, in float32, and the optimizer must be elementwise.
        Module, augmentations and optimizer must not draw from global generators, because each node draws its own.
        """
        return (
            self._optimizers.elementwise
            and not self._precision.reduced
            and knows_overrides(self, "train_stacked", frozenset(["evaluate", "evaluate_stacked"]))
            and self._works_stacked(training=True)
        )

    @cached_property
    def evaluates_stacked(self) -> bool:
        """Whether `evaluate_stacked` gives the same results as `evaluate`."""
        unrelated = frozenset(["train", "train_stacked"])
        return knows_overrides(self, "evaluate_stacked", unrelated) and self._works_stacked(training=False)

    def stacked(self, compute: Callable[[], Result]) -> Result:
        """Return the result of `compute`, which computes a stack of nodes.

        Raises `NotStackableError` if each node must be computed alone: the code of users may draw from global
        generators now and then, which no trial finds.
        """
        return without_draws(compute) if self._has_code_of_users else compute()

    @cached_property
    def _has_code_of_users(self) -> bool:
        """Whether optimizer, loss, module or augmentations have code that is neither Shoal's nor torch's."""
        parts: list[object] = [*self.flat.module.modules(), *self._augmentations]
        packages = {type(part).__module__.partition(".")[0] for part in parts}
        return ":" in self.training.optimizer + self.training.loss or not packages <= {"shoal", "torch"}

    def _works_stacked(self, training: bool) -> bool:
        """Return whether torch can compute many models of this kind at once. Tried on two samples.

        It cannot if the module changes its buffers, branches on values, draws random numbers, or has layers that
        `torch.func.vmap` computes in a loop. That loop would be slower than ours.
        """
        import torch

        if self.flat.updates_buffers:
            return False
        views = self.flat.stacked(self.flat.values.expand(2, -1).clone())
        samples = torch.arange(min(2, self.training.batch_size)) % len(self.data.train)
        x, y = (tensor.expand(2, *tensor.shape) for tensor in self.gather(samples))
        with torch.random.fork_rng(devices=[]), self._draws.seeded(0), warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")
            before = global_states()
            try:
                if training:
                    rng = generator(0, "augmentation")
                    inputs = torch.stack([augment(one, self._augmentations, rng) for one in x])
                    self._stacked_gradients(views, inputs, y)
                    self._try_step()
                else:
                    with torch.no_grad(), self._evaluation_mode():
                        self._stacked_sums(views, x[0], y[0])
            except Exception:  # a user's module may raise anything; training it alone reports the error
                return False
            return global_states() == before

    def _try_step(self) -> None:
        """Take a step with an optimizer of its own on a copy of the parameters."""
        import torch

        values = self.flat.values[: self.flat.trained_size].expand(2, -1).clone()
        values.grad = torch.zeros_like(values)
        take_step(self._optimizers.create([values]))

    def train_stacked(
        self,
        params: Sequence[Params],
        states: Sequence[OptimizerState],
        batches: Indices,
        rates: Sequence[float] | None = None,
        augmentation_seeds: Sequence[int] = (),
    ) -> tuple[list[Trained], list[OptimizerState]]:
        """Do what `train` does, for many nodes at once. `batches` has one more axis in front: the node.

        `augmentation_seeds` has the seed that `train` would get for each node.
        """
        import torch

        stack = torch.from_numpy(np.stack(params)).to(self.device)
        gradient_stack = torch.zeros_like(stack)
        values, gradient = stack[:, : self.flat.trained_size], gradient_stack[:, : self.flat.trained_size]
        values.grad = gradient
        start = values.clone() if self.training.proximal else None
        views, gradient_views = self.flat.stacked(stack), self.flat.stacked(gradient_stack)
        optimizer = self._optimizers.create([values])
        if states[0]:
            load_state(optimizer, stack_states(states))
        total = torch.zeros(len(params), device=self.device)
        rngs = [generator(seed, "augmentation") for seed in augmentation_seeds if self._augmentations]
        for i, step in enumerate(torch.from_numpy(batches).unbind(1)):
            inputs, targets = self.gather(step)
            if self._augmentations:  # node by node, as `train` does it
                augmented = [augment(x, self._augmentations, rng) for x, rng in zip(inputs, rngs, strict=True)]
                inputs = torch.stack(augmented)
            gradients, losses = self._stacked_gradients(views, inputs, targets)
            for name, gradient_of in gradients.items():
                gradient_views[name].copy_(gradient_of)
            if start is not None:
                gradient.add_(values - start, alpha=self.training.proximal)
            clip(gradient, self.training)
            set_rate(optimizer, rates, i)
            take_step(optimizer)
            total += losses
        rows = stack.detach().cpu().numpy()
        rows.setflags(write=False)
        means = (total / batches.shape[1]).tolist()
        trained = [Trained(row, loss) for row, loss in zip(rows, means, strict=True)]
        return trained, unstack_state(read_state(optimizer), len(params))

    def evaluate_stacked(self, params: Sequence[Params]) -> list[dict[str, float]]:
        """Do what `evaluate` does on all test samples, for many models at once."""
        import torch

        views = self.flat.stacked(torch.from_numpy(np.stack(params)).to(self.device))
        totals: dict[str, Any] = {}
        with torch.no_grad(), self._evaluation_mode():
            for _, x, y in self._test_batches():
                add_sums(totals, self._stacked_sums(views, x, y))
        return [self.metrics.scores({k: v[i] for k, v in totals.items()}) for i in range(len(params))]

    def _stacked_gradients(self, views: Any, x: Any, y: Any) -> Any:
        """Return the gradients and the loss of every model, each on its own batch.

        Models do not depend on each other: the gradient of the sum of all losses has the gradient of each model. The
        backward pass is outside `vmap`, because `torch.func.grad` imports torch's compiler, which takes two seconds.
        """
        import torch
        from torch.func import functional_call, vmap

        def outputs(trained: Any, rest: Any, x: Any) -> Any:
            return functional_call(self.flat.module, {**trained, **rest}, (x,))

        slots = self.flat.layout
        trained = {slot.name: views[slot.name].detach().requires_grad_() for slot in slots if slot.trained}
        rest = {slot.name: views[slot.name] for slot in slots if not slot.trained}
        losses = self._loss.of_stack(vmap(outputs, randomness="error")(trained, rest, x), y)
        gradients = torch.autograd.grad(losses.sum(), list(trained.values()), materialize_grads=True)
        return dict(zip(trained, gradients, strict=True)), losses.detach()

    def _stacked_sums(self, views: Any, x: Any, y: Any) -> Any:
        """Return the metric sums of every model on one common batch."""
        from torch.func import functional_call, vmap

        outputs = vmap(lambda parameters: functional_call(self.flat.module, parameters, (x,)))(views)
        losses = self._test_loss.of_stack(outputs, y.expand(len(outputs), *y.shape))
        return vmap(lambda output, loss: self.metrics.batch_sums(output, y, loss))(outputs, losses)

    def _check_precision(self) -> None:
        """Raise ExperimentError if the module cannot be trained in the format of the settings. Tried on two samples."""
        import torch

        params = self.flat.read()
        x, y = self.gather(torch.arange(2) % len(self.data.train))
        with torch.random.fork_rng(devices=[]):
            self._precision.check(lambda: self._loss(self.flat.module(x), y))
        self.flat.gradient.zero_()
        self.flat.load(params)
        self.flat.load_local(None)

    # Samples

    def _takes_channels_last(self) -> bool:
        """Whether a module that computes alone takes images with adjacent channels. Draws no random number."""
        import torch

        if self.device.type != "cpu":
            return False
        with torch.random.fork_rng(devices=[]), self._draws.seeded(0):
            targets = self._train[1][torch.arange(2) % len(self.data.train)]
            return prefers_channels_last(
                self.flat.module, example_inputs(self.data, self.device), lambda outputs: self._loss(outputs, targets)
            )

    def _arranged(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs in the memory format that suits the module."""
        return channels_last(inputs) if self.channels_last else inputs

    def gather(
        self, numbers: torch.Tensor, added: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalised inputs, and targets, of these training samples. `added` is counted after the data set."""
        inputs, targets = self._train
        if added is None:
            return normalise(inputs[numbers], self._scaling), targets[numbers]
        x = select_rows(inputs, added[0], numbers)
        return normalise(x, self._scaling), select_rows(targets, added[1], numbers)

    def _test_batches(self, tests: Indices | None = None) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
        """Yield indices, normalised inputs and targets of the test samples, batch by batch."""
        import torch

        inputs, targets = self._test
        count = len(targets) if tests is None else len(tests)
        for start in range(0, count, self.evaluation_batch):
            end = min(count, start + self.evaluation_batch)
            if tests is None:
                yield torch.arange(start, end), normalise(inputs[start:end], self._scaling), targets[start:end]
            else:
                rows = torch.from_numpy(tests[start:end])
                yield rows, normalise(inputs[rows], self._scaling), targets[rows]

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """The module in evaluation mode: without dropout."""
        self.flat.module.eval()
        try:
            yield
        finally:
            self.flat.module.train()


def _tensors(samples: Samples, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples as tensors. On a CPU they share the memory of the arrays."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(samples.x).to(device), torch.from_numpy(samples.y).to(device)
