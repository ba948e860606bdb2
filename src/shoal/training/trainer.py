"""Training: parameters in, parameters out.

A `Trainer` is one node's hold on its data. `Learner` is what the trainers of one process share: the module as one
flat vector, the loss, the optimizer, the data in memory. It trains one node at a time (`train`), or many at once with
their parameters stacked in a matrix (`train_stacked`, by `torch.func.vmap`): the simulation picks what is faster.

Optimizers that work element by element (nearly all) act on the flat vector, which gives the numbers that they give
tensor by tensor, in one call. The others are given the module's own tensors.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec
import numpy as np

from shoal.data.dataset import Data, Indices, Samples, Shift
from shoal.data.local import NodeData
from shoal.errors import ExperimentError, NodeError
from shoal.schema import nearest
from shoal.state import State, generator_state, restore_generator
from shoal.training.metrics import Metrics
from shoal.types import Bounds, Params

if TYPE_CHECKING:
    import torch

    from shoal.models.flat import FlatModule


@dataclass(frozen=True)
class Training:
    """The `training` table of an experiment."""

    optimizer: str = "sgd"
    lr: Annotated[float, Bounds(above=0)] = 0.1
    momentum: Annotated[float, Bounds(at_least=0, below=1)] = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, Bounds(at_least=0)] | None = None
    """What the optimizer takes by default when not given: 0.01 for AdamW, 0 for most."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, by torch's names."""
    keep_state: bool = True
    """Whether the optimizer's state (momentum, moments) lives on from round to round."""
    loss: str = "auto"
    """Any of torch.nn, by name, or "rmse"; "auto" is cross-entropy for classes and tokens, and MSE for numbers."""
    batch_size: Annotated[int, Bounds(at_least=1)] = 16
    local_steps: Annotated[int, Bounds(at_least=1)] = 1
    """Batches that a node trains on in a round."""
    local_epochs: Annotated[int, Bounds(at_least=1)] | None = None
    """Passes over the node's data in a round, in place of `local_steps`: who holds more trains longer."""
    proximal: Annotated[float, Bounds(at_least=0)] = 0.0
    """FedProx (Li et al. 2020): μ of the term μ/2·‖x − x₀‖² that holds x near the x₀ that training began with."""
    buffers: Literal["shared", "local"] = "shared"
    """Statistics that the model keeps while it trains (batch normalisation): sent and averaged like parameters, or
    the node's own. Counters of integers are always the node's own."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov = true needs a momentum above 0")
        if self.local_epochs is not None and self.local_steps != 1:
            raise ValueError("local_steps and local_epochs both say how long a node trains: give one of them")

    def steps(self, samples: int) -> int:
        """The batches of a round, for a node that holds so many samples."""
        if self.local_epochs is None:
            return self.local_steps
        return math.ceil(self.local_epochs * samples / self.batch_size)


class Trained(msgspec.Struct, frozen=True, gc=False):
    """The outcome of local training: the new parameters, and the mean loss of its batches."""

    params: Params
    loss: float


class Trainer(Protocol):
    """One node's training and evaluation. Pure in the parameters; batches and optimizer state are its own."""

    step_seconds: float
    """How long the node's device takes for one step, in virtual time."""
    cpu_seconds: float
    """Processor time spent in `train` so far."""

    @property
    def samples(self) -> int:
        """How many samples the node holds."""
        ...

    def train(self, params: Params, steps: int | None = None) -> Trained: ...

    def evaluate(self, params: Params) -> dict[str, float]:
        """Scores on the test data, by name."""
        ...

    def steps(self, steps: int | None) -> int:
        """How many steps `train` takes when asked for `steps`."""
        ...


class Train(msgspec.Struct, frozen=True, gc=False):
    """The work of one node's local training."""

    trainer: Trainer
    params: Params
    steps: int | None = None

    @property
    def seconds(self) -> float:
        return self.trainer.steps(self.steps) * self.trainer.step_seconds

    @property
    def batch_key(self) -> Hashable:
        trainer = self.trainer
        if isinstance(trainer, TorchTrainer) and trainer.learner.stackable and trainer.plain:
            return (Train, id(trainer.learner), trainer.steps(self.steps), trainer.state_signature())
        return id(trainer)

    def run(self) -> Trained:
        return self.trainer.train(self.params, self.steps)

    @staticmethod
    def run_batch(works: Sequence[Train]) -> list[Trained]:
        return TorchTrainer.train_batch([(_torch(w.trainer), w.params) for w in works], works[0].steps)


class Evaluate(msgspec.Struct, frozen=True, gc=False):
    """The work of one node's evaluation. Takes no virtual time: evaluation is for us, not part of the algorithm."""

    trainer: Trainer
    params: Params

    @property
    def seconds(self) -> float:
        return 0.0

    @property
    def batch_key(self) -> Hashable:
        if isinstance(self.trainer, TorchTrainer) and self.trainer.tests_alike and self.trainer.learner.vectorized:
            return (Evaluate, id(self.trainer.learner))
        return id(self.trainer)

    def run(self) -> dict[str, float]:
        return self.trainer.evaluate(self.params)

    @staticmethod
    def run_batch(works: Sequence[Evaluate]) -> list[dict[str, float]]:
        return _torch(works[0].trainer).learner.evaluate_stacked([w.params for w in works])


class Batches:
    """An endless stream of one node's samples: every one once, in a random order, then again in another."""

    def __init__(self, samples: Indices, size: int, rng: np.random.Generator) -> None:
        self.samples = samples
        """May be replaced: from the next pass on, the stream is of these."""
        self._size = size
        self._rng = rng
        self._left = samples[:0]

    def take(self, steps: int) -> Indices:
        """The next `steps` batches, as a matrix of sample indices."""
        count = steps * self._size
        left = self._left
        if len(left) < count:
            pieces = [left]
            have = len(left)
            while have < count:
                pieces.append(self._rng.permutation(self.samples))
                have += len(self.samples)
            left = np.concatenate(pieces)
        self._left = left[count:]
        return left[:count].reshape(steps, self._size)

    def state(self) -> State:
        return {"left": self._left, "rng": generator_state(self._rng)}

    def restore(self, state: State) -> None:
        self._left = state["left"]
        restore_generator(self._rng, state["rng"])


class TorchTrainer:
    """A node that trains a torch module on its part of the data."""

    def __init__(
        self,
        learner: Learner,
        samples: Indices,
        rng: np.random.Generator,
        step_seconds: float,
        tests: Indices | None = None,
        shift: Shift | None = None,
    ) -> None:
        """`tests` are the test samples that are this node's own, when it is not tested on all of them."""
        self.learner = learner
        self.step_seconds = step_seconds
        self.cpu_seconds = 0.0
        self._tests = tests
        self._shift = shift
        self.data = NodeData(learner.data, samples)
        self._rng = rng
        self._batches = Batches(samples, learner.training.batch_size, rng)
        self._state: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] | None = None

    @property
    def samples(self) -> int:
        return len(self.data)

    @property
    def plain(self) -> bool:
        """Whether the node trains on samples of the common data set, as they are."""
        return self.data.added is None and self._shift is None

    @property
    def tests_alike(self) -> bool:
        """Whether the node is tested on what all others are tested on."""
        return self._tests is None and self._shift is None

    def steps(self, steps: int | None) -> int:
        return self.learner.training.steps(len(self.data)) if steps is None else steps

    def train(self, params: Params, steps: int | None = None) -> Trained:
        started = time.thread_time()
        batches, draw = self._next(self.steps(steps))
        learner = self.learner
        trained, state = learner.train(params, self._state, batches, draw, self.data.added, self._shift, self._buffers)
        self._keep(state)
        if learner.flat.local:
            self._buffers = learner.flat.read_local()
        self.cpu_seconds += time.thread_time() - started
        return trained

    def evaluate(self, params: Params) -> dict[str, float]:
        return self.learner.evaluate(params, self._tests, self._shift, self._buffers)

    def state_signature(self) -> Hashable:
        """Equal for trainers whose optimizer states can be stacked: the same entries, after as many steps."""
        if not self._state:
            return ()
        return tuple((key, float(value) if _is_count(value) else None) for key, value in self._state.items())

    @staticmethod
    def train_batch(pairs: Sequence[tuple[TorchTrainer, Params]], steps: int | None) -> list[Trained]:
        """What `train` gives each of these trainers of one learner, computed with their parameters stacked."""
        started = time.thread_time()
        trainers = [trainer for trainer, _ in pairs]
        count = trainers[0].steps(steps)
        drawn = [trainer._next(count) for trainer in trainers]
        results, states = trainers[0].learner.train_stacked(
            [params for _, params in pairs],
            [trainer._state for trainer in trainers],
            np.stack([batches for batches, _ in drawn]),
            drawn[0][1],
        )
        share = (time.thread_time() - started) / len(trainers)
        for trainer, state in zip(trainers, states, strict=True):
            trainer._keep(state)
            trainer.cpu_seconds += share
        return results

    def state(self) -> State:
        """The optimizer's state, the node's own buffers, where the batches stand, and samples that came from others."""
        return {
            "optimizer": _arrays(self._state),
            "buffers": _arrays(self._buffers or {}),
            "batches": self._batches.state(),
            "data": self.data.state(),
        }

    def restore(self, state: State) -> None:
        self.data.restore(state["data"])
        self._batches.restore(state["batches"])
        self._state = _as_tensors(state["optimizer"], self.learner.device)
        self._buffers = _as_tensors(state["buffers"], self.learner.device) or None

    def _next(self, steps: int) -> tuple[Indices, int]:
        """The next batches, and a seed for whatever the module itself draws (dropout)."""
        if not len(self.data):
            raise NodeError("this node holds no data to train on: it serves the others")
        self._batches.samples = self.data.held
        return self._batches.take(steps), int(self._rng.integers(2**63))

    def _keep(self, state: dict[str, Any]) -> None:
        if self.learner.training.keep_state:
            self._state = state


class Learner:
    """A module, its loss, its optimizer and the data: all that training needs but the node."""

    EVALUATION_VALUES = 2**15
    """Input values that are evaluated at once: few enough to need no more memory than training does."""
    EVALUATION_OUTPUTS = 2**22
    """Output values at once: a vocabulary of words at each place of a text is far more than the text."""

    def __init__(
        self,
        flat: FlatModule,
        training: Training,
        data: Data,
        evaluated: Samples | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.flat = flat
        self.metrics = metrics or Metrics(data)
        self.training = training
        self.data = data
        self.device = flat.values.device
        self._train = _tensors(data.train, self.device)
        self._test = _tensors(data.test if evaluated is None else evaluated, self.device)
        outputs = data.classes * (math.prod(data.shape) if data.task == "sequence" else 1)
        self._at_once = max(
            1, min(self.EVALUATION_VALUES // max(1, math.prod(data.shape)), self.EVALUATION_OUTPUTS // max(1, outputs))
        )
        self.classes = data.classes
        self._task = data.task
        self._scaling = _scaling(data, self.device)
        self._loss, self._loss_wants_index = _loss(training.loss, data)
        self._optimizer_class, self._optimizer_options = _optimizer(training)
        self._elementwise = self._optimizer_class.__name__ in ELEMENTWISE
        trained = flat.values[: flat.trained]
        trained.grad = flat.gradient[: flat.trained]
        self._optimizer = self._optimizer_on([trained] if self._elementwise else list(flat.module.parameters()))

    def train(
        self,
        params: Params,
        state: dict[str, Any],
        batches: Indices,
        draw: int = 0,
        added: Samples | None = None,
        shift: Shift | None = None,
        buffers: dict[str, torch.Tensor] | None = None,
    ) -> tuple[Trained, dict[str, Any]]:
        """`params` after one optimizer step on each batch, and the optimizer's state after that.

        `draw` seeds what the module itself draws. Batches name samples of the data set and, after them, of `added`;
        `shift` is how the node sees them. `buffers` are the node's own, None for the first ones; what they become is
        `flat.read_local()`.
        """
        import torch

        flat, optimizer, module = self.flat, self._optimizer, self.flat.module
        proximal = self.training.proximal
        foreign = None if added is None else _tensors(added, self.device)
        torch.default_generator.manual_seed(draw)
        flat.load(params)
        flat.load_local(buffers)
        values, gradient = flat.values[: flat.trained], flat.gradient[: flat.trained]
        anchor = values.clone() if proximal else None
        optimizer.state = _restored(optimizer, state)
        total = torch.zeros((), device=self.device)
        for batch in torch.from_numpy(batches):
            flat.gradient.zero_()
            inputs, targets = self._batch(batch, foreign)
            inputs = self._seen(inputs)
            if shift is not None:
                inputs = shift.apply(inputs, batch)
            loss = self._cost(module(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if anchor is not None:
                gradient.add_(values - anchor, alpha=proximal)
            optimizer.step()
            total += loss.detach()
        flat.gather()
        return Trained(flat.read(), float(total) / len(batches)), _taken(optimizer)

    def train_stacked(
        self, params: Sequence[Params], states: Sequence[dict[str, Any]], batches: Indices, draw: int = 0
    ) -> tuple[list[Trained], list[dict[str, Any]]]:
        """`train` for many nodes at once; `batches` has one more axis in front, the node."""
        import torch

        inputs, targets = self._train
        torch.default_generator.manual_seed(draw)
        stack = torch.from_numpy(np.stack(params)).to(self.device)
        gradient_stack = torch.zeros_like(stack)
        values, gradient = stack[:, : self.flat.trained], gradient_stack[:, : self.flat.trained]
        values.grad = gradient
        anchor = values.clone() if self.training.proximal else None
        views, gradients = self.flat.stacked(stack), self.flat.stacked(gradient_stack)
        optimizer = self._optimizer_on([values])
        if states[0]:
            optimizer.state = _restored(optimizer, _stacked(states))
        total = torch.zeros(len(params), device=self.device)
        for step in torch.from_numpy(batches).unbind(1):
            slopes, losses = self._slopes(views, self._seen(inputs[step]), targets[step])
            for name, slope in slopes.items():
                gradients[name].copy_(slope)
            if anchor is not None:
                gradient.add_(values - anchor, alpha=self.training.proximal)
            optimizer.step()
            total += losses
        rows = stack.detach().cpu().numpy()
        rows.flags.writeable = False
        means = (total / batches.shape[1]).tolist()
        trained = [Trained(row, loss) for row, loss in zip(rows, means, strict=True)]
        return trained, _unstacked(_taken(optimizer), len(params))

    def evaluate(
        self,
        params: Params,
        tests: Indices | None = None,
        shift: Shift | None = None,
        buffers: dict[str, torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """Scores on all test samples, or on those that `tests` names; as `shift` lets a node see them.

        `buffers` are the node's own. Without them, as for the average of many models, they are those of the start.
        """
        import torch

        self.flat.load(params)
        self.flat.load_local(buffers)
        totals: dict[str, Any] = {}
        with torch.inference_mode(), self._testing():
            for numbers, x, y in self._test_batches(tests):
                outputs = self.flat.module(x if shift is None else shift.apply(x, -1 - numbers))
                _add(totals, self.metrics.tally(outputs, y, self._cost(outputs, y)))
        return self.metrics.scores(totals)

    def evaluate_stacked(self, params: Sequence[Params]) -> list[dict[str, float]]:
        import torch

        views = self.flat.stacked(torch.from_numpy(np.stack(params)).to(self.device))
        totals: dict[str, Any] = {}
        with torch.inference_mode(), self._testing():
            for _, x, y in self._test_batches():
                _add(totals, self._tallies(views, x, y))
        return [self.metrics.scores({k: v[i] for k, v in totals.items()}) for i in range(len(params))]

    def warm_up(self, samples: Indices) -> None:
        """A step and a test on one batch for nothing, so that torch has imported and set up all that it will."""
        params = self.flat.read()
        batch = np.resize(samples, (1, self.training.batch_size))
        self.train(params, {}, batch)
        self.evaluate(params, np.arange(min(self._at_once, len(self._test[1]))))
        self.flat.load(params)

    @property
    def stackable(self) -> bool:
        """Whether `train_stacked` gives what `train` gives: the optimizer works element by element, too."""
        return self._elementwise and self.vectorized

    @cached_property
    def vectorized(self) -> bool:
        """Whether torch can compute many models of this kind at once: tried once, on one sample.

        It cannot where the module changes its buffers, looks at values, or has layers that `torch.func.vmap` knows
        only as a loop, which would be slower than ours.
        """
        import torch

        if self.flat.changing:
            return False
        views = self.flat.stacked(self.flat.values.expand(2, -1).clone())
        x, y = (tensor[:1].expand(2, 1, *tensor.shape[1:]) for tensor in self._train)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")
            try:
                self._slopes(views, self._seen(x), y)
                with torch.inference_mode(), self._testing():
                    self._tallies(views, self._seen(x[0]), y[0])
            except Exception:  # whatever a module of anyone's may raise; alone, it says so to those who train it
                return False
        return True

    @contextmanager
    def _testing(self) -> Iterator[None]:
        """The module as it is used, not as it is trained: without dropout."""
        self.flat.module.eval()
        try:
            yield
        finally:
            self.flat.module.train()

    def _batch(
        self, numbers: torch.Tensor, added: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._train
        if added is None:
            return inputs[numbers], targets[numbers]
        count = len(targets)
        foreign = numbers >= count
        common = numbers.clamp(max=count - 1)
        x, y = inputs[common], targets[common]
        x[foreign], y[foreign] = added[0][numbers[foreign] - count], added[1][numbers[foreign] - count]
        return x, y

    def _test_batches(self, tests: Indices | None = None) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
        """The numbers, inputs and targets of some test samples after others."""
        import torch

        inputs, targets = self._test
        count = len(targets) if tests is None else len(tests)
        for start in range(0, count, self._at_once):
            end = min(count, start + self._at_once)
            if tests is None:
                yield torch.arange(start, end), self._seen(inputs[start:end]), targets[start:end]
            else:
                rows = torch.from_numpy(tests[start:end])
                yield rows, self._seen(inputs[rows]), targets[rows]

    def _seen(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs as the module takes them."""
        return scaled(x, self._scaling)

    def _cost(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What training minimises: a mean over the batch."""
        if self._task == "sequence":
            outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        elif self._task == "regression":
            outputs = outputs.reshape(targets.shape)
        cost: torch.Tensor = self._loss(outputs, self._target(targets))
        return cost

    def _slopes(self, views: Any, x: Any, y: Any) -> Any:
        from torch.func import functional_call, grad_and_value, vmap

        def loss(trained: Any, rest: Any, x: Any, y: Any) -> Any:
            return self._cost(functional_call(self.flat.module, {**trained, **rest}, (x,)), y)

        trained = {slot.name: views[slot.name] for slot in self.flat.layout if slot.trained}
        rest = {slot.name: views[slot.name] for slot in self.flat.layout if not slot.trained}
        return vmap(grad_and_value(loss), randomness="different")(trained, rest, x, y)

    def _tallies(self, views: Any, x: Any, y: Any) -> Any:
        from torch.func import functional_call, vmap

        def tally(parameters: Any) -> Any:
            outputs = functional_call(self.flat.module, parameters, (x,))
            return self.metrics.tally(outputs, y, self._cost(outputs, y))

        return vmap(tally)(views)

    def _target(self, labels: Any) -> Any:
        """Labels as the loss wants them: as they are, or as one-hot rows."""
        import torch

        if self._loss_wants_index or self._task == "regression":
            return labels
        return torch.nn.functional.one_hot(labels, self.classes).to(torch.float32)

    def _optimizer_on(self, tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._optimizer_class(tensors, **self._optimizer_options)
        return optimizer


ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"]
)
"""Optimizers of torch whose update of an element depends on that element alone."""

UNFIT_OPTIMIZERS = frozenset({"Optimizer", "LBFGS", "SparseAdam", "Muon"})
"""Not to be named in an experiment: they need a closure, sparse gradients, or matrices alone."""

INDEX_LOSSES = frozenset({"CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"})
"""Losses of torch whose target is the number of the class."""


def _optimizer(training: Training) -> tuple[Any, dict[str, Any]]:
    """The class of torch.optim and its arguments, or an error that names the key."""
    import torch

    classes = {
        name.lower(): found
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name not in UNFIT_OPTIMIZERS
    }
    name = training.optimizer.lower()
    if name not in classes:
        raise ExperimentError([f"training.optimizer = {training.optimizer!r}: unknown{nearest(name, classes)}"])
    known = inspect.signature(classes[name]).parameters
    wanted = {"momentum": training.momentum, "nesterov": training.nesterov, "weight_decay": training.weight_decay}
    options: dict[str, Any] = {"lr": training.lr, **{k: v for k, v in wanted.items() if v}}
    if training.weight_decay == 0.0 and "weight_decay" in known:
        options["weight_decay"] = 0.0  # said so, against a default that may be another
    if "foreach" in known:
        options["foreach"] = False  # one tensor: nothing to gain, and nothing to import
    problems = [f"training.{key}: {classes[name].__name__} has no such option" for key in options if key not in known]
    for key, value in training.options.items():
        if key not in known:
            problems.append(f"training.options.{key}: {classes[name].__name__} has no such option{nearest(key, known)}")
        options[key] = tuple(value) if isinstance(value, list) else value
    if problems:
        raise ExperimentError(problems)
    return classes[name], options


def find_device(name: str) -> torch.device:
    """The device of this name, or an error that names the key."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ExperimentError([f"training.device = {name!r}: not to be had here ({reason}); try 'cpu'"]) from error
    return device


def _add(totals: dict[str, Any], sums: dict[str, Any]) -> None:
    for name, value in sums.items():
        totals[name] = totals[name] + value if name in totals else value


def _scaling(data: Data, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and standard deviation, shaped to go with inputs; None where these are taken as they are."""
    import torch

    if data.scaling is None:
        return None
    shape = (-1, *[1] * max(0, len(data.shape) - 1)) if len(data.scaling.mean) > 1 else (1,)
    mean, std = (torch.tensor(v, dtype=torch.float32, device=device).reshape(shape) for v in
                 (data.scaling.mean, data.scaling.std))  # fmt: skip
    return mean, std


def first_inputs(data: Data, device: torch.device) -> torch.Tensor:
    """Two training samples (the same, if there is but one) as a module takes them."""
    import torch

    x = torch.from_numpy(data.train.x[np.arange(2) % len(data.train)]).to(device)
    return scaled(x, _scaling(data, device))


def scaled(x: torch.Tensor, scaling: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Inputs as a module takes them."""
    if scaling is None:
        return x
    mean, std = scaling
    return (x.to(mean.dtype) - mean) / std


def _root_mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    import torch

    # A root has no slope at 0, and a batch without any error would make all parameters NaN.
    return (torch.nn.functional.mse_loss(outputs, targets) + 1e-12).sqrt()


def _mean_without_padding(total: Any, padding: int, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean of a loss that adds up and ignores padding; of nothing but padding it is 0, and so is its slope."""
    mean: torch.Tensor = total(outputs, targets) / (targets != padding).sum().clamp(min=1)
    return mean


def _loss(name: str, data: Data) -> tuple[Any, bool]:
    """A loss of torch.nn for this data, and whether its target is the number of the class."""
    import torch

    if name == "rmse":
        return _root_mean_square, False
    if name == "auto":
        name = "mse" if data.task == "regression" else "cross-entropy"
    classes = {n: found for n, found in vars(torch.nn).items() if n.endswith("Loss") and isinstance(found, type)}
    spelt = {n.removesuffix("Loss").lower(): n for n in classes}
    key = name.removesuffix("Loss").replace("-", "").replace("_", "").lower()
    if key not in spelt:
        raise ExperimentError([f"training.loss = {name!r}: unknown{nearest(key, spelt)}"])
    found = spelt[key]
    if data.padding is not None and "ignore_index" in inspect.signature(classes[found]).parameters:
        total = classes[found](ignore_index=data.padding, reduction="sum")
        return partial(_mean_without_padding, total, data.padding), found in INDEX_LOSSES
    return classes[found](), found in INDEX_LOSSES


def _tensors(samples: Samples, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples as tensors that share their memory, on a CPU."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(samples.x).to(device), torch.from_numpy(samples.y).to(device)


def _restored(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Any:
    """An optimizer's `state` attribute that holds `state`, as `_taken` gave it."""
    tensors = optimizer.param_groups[0]["params"]
    per_tensor = [state] if len(tensors) == 1 else [state.get(str(i), {}) for i in range(len(tensors))]
    return defaultdict(dict, zip(tensors, (dict(s) for s in per_tensor), strict=True))


def _taken(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors = optimizer.param_groups[0]["params"]
    if len(tensors) == 1:
        return dict(optimizer.state[tensors[0]])
    return {str(i): dict(optimizer.state[t]) for i, t in enumerate(tensors)}


def _stacked(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    import torch

    first = states[0]
    return {
        key: value.clone() if _is_count(value) else torch.stack([state[key] for state in states])
        for key, value in first.items()
    }


def _unstacked(state: dict[str, Any], count: int) -> list[dict[str, Any]]:
    if not state:
        return [{} for _ in range(count)]
    return [
        {key: value.clone() if _is_count(value) else value[i] for key, value in state.items()} for i in range(count)
    ]


def _is_count(value: Any) -> bool:
    """Whether an entry of an optimizer's state is its step counter, common to all elements."""
    return value.ndim == 0  # type: ignore[no-any-return]


def _arrays(state: dict[str, Any]) -> State:
    """An optimizer's state with arrays in place of tensors: copies, for the optimizer goes on writing into its own."""
    return {k: _arrays(v) if isinstance(v, dict) else v.detach().cpu().numpy().copy() for k, v in state.items()}


def _as_tensors(state: State, device: torch.device) -> dict[str, Any]:
    """`_arrays` undone, on the device that trains; the count of steps stays where torch keeps it, on the CPU."""
    import torch

    return {
        k: _as_tensors(v, device)
        if isinstance(v, dict)
        else torch.tensor(v, device=torch.device("cpu") if k == "step" else device)
        for k, v in state.items()
    }


def _torch(trainer: Trainer) -> TorchTrainer:
    assert isinstance(trainer, TorchTrainer)
    return trainer
