"""Losses: any of torch.nn by name, the root mean squared error, and plug-ins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.data.dataset import Data, Task
from shoal.errors import ExperimentError
from shoal.plugins import TORCH_MODULE, is_module_class, load_class
from shoal.schema import nearest
from shoal.training.torch_names import LOSSES, SMOOTHED_LOSSES
from shoal.traits import TrainingView

if TYPE_CHECKING:
    import torch

CLASS_INDEX_LOSSES = frozenset({"CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"})
"""Losses of torch whose target is the index of the class. Others take one-hot rows."""


class Loss:
    """The loss that training minimises: the mean over a batch of one data set."""

    def __init__(self, name: str, data: Data, smoothing: float = 0.0) -> None:
        """`name` is the experiment's `training.loss`, `smoothing` its `training.label_smoothing`.

        Raises ExperimentError if the loss is unknown, or has no label smoothing.
        """
        self._task: Task = data.task
        self._classes = data.classes
        self._function, self._takes_indices = _find(name, data, smoothing)
        self._is_plugin = ":" in name

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        import torch

        if self._task == "sequence":
            outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        elif self._task == "regression":
            outputs = outputs.reshape(targets.shape)
        if self._task != "regression" and not self._takes_indices:
            targets = torch.nn.functional.one_hot(targets, self._classes).to(torch.float32)
        return self._function(outputs, targets)

    def of_stack(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of every model of a stack. Both arguments have one more axis in front: the model."""
        import torch
        from torch.func import vmap

        function = self._function
        # A plug-in may have options, such as the padding of the data, that the call below does not know.
        if type(function) is not torch.nn.CrossEntropyLoss or self._is_plugin or self._task == "regression":
            return vmap(self)(outputs, targets)
        if outputs.dim() != targets.dim() + 1:
            return vmap(self)(outputs, targets)
        # vmap computes the cross-entropy in Python, and imports torch's compiler for it. Without vmap it is one call.
        losses = torch.nn.functional.cross_entropy(
            outputs.reshape(-1, outputs.shape[-1]),
            targets.reshape(-1),
            reduction="none",
            label_smoothing=function.label_smoothing,
        )
        return losses.view(len(outputs), -1).mean(1)


def check_loss(training: TrainingView) -> None:
    """Raise ExperimentError if the loss is unknown, or has no label smoothing, as far as that is known without data.

    torch is imported only for plug-ins, and for names that are not known without it.
    """
    _check(training.loss, training.label_smoothing or 0.0)


def _check(name: str, smoothing: float) -> None:
    if smoothing and (name == "rmse" or ":" in name):
        raise _no_smoothing(name, smoothing)
    if ":" in name:
        _load_class(name)
    elif name not in ("auto", "rmse") and loss_key(name) not in (SMOOTHED_LOSSES if smoothing else LOSSES):
        _find_class(name, smoothing)


def loss_key(name: str) -> str:
    """Return the name of a loss of torch.nn without case, hyphens and its ending."""
    return name.removesuffix("Loss").replace("-", "").replace("_", "").lower()


def _find(name: str, data: Data, smoothing: float) -> tuple[Callable[..., torch.Tensor], bool]:
    """Return the loss of this name, and whether its target is the index of the class."""
    _check(name, smoothing)
    if ":" in name:
        return _load(name, data), True
    if name == "rmse":
        return _root_mean_square, False
    if name == "auto":
        name = "mse" if data.task == "regression" else "cross-entropy"
    found = _find_class(name, smoothing)
    options = {"label_smoothing": smoothing} if smoothing else {}
    takes_indices = found.__name__ in CLASS_INDEX_LOSSES
    if data.padding is not None and "ignore_index" in inspect.signature(found).parameters:
        total = found(ignore_index=data.padding, reduction="sum", **options)
        return partial(_mean_without_padding, total, data.padding), takes_indices
    return found(**options), takes_indices


def _find_class(name: str, smoothing: float) -> Any:
    """Return the class of torch.nn of this name."""
    import torch

    classes = {
        loss_key(n): found for n, found in vars(torch.nn).items() if n.endswith("Loss") and isinstance(found, type)
    }
    key = loss_key(name)
    if key not in classes:
        raise ExperimentError([f"training.loss = {name!r}: unknown{nearest(key, classes)}"])
    if smoothing and "label_smoothing" not in inspect.signature(classes[key]).parameters:
        raise _no_smoothing(name, smoothing)
    return classes[key]


def _load_class(name: str) -> type:
    """Return the class of a plug-in that can be called with outputs and targets."""
    try:
        cls = load_class(name)
    except ValueError as error:
        raise ExperimentError([f"training.loss = {name!r}: {error}"]) from error
    names = ["forward", "__call__"] if is_module_class(cls) else ["__call__"]
    own = [base for base in cls.__mro__ if base.__module__ != TORCH_MODULE]  # its methods only raise an error
    if not any(name in vars(base) for base in own for name in names):
        raise ExperimentError(
            [
                f"training.loss = {name!r}: {cls.__name__} has no method 'def {names[0]}(self, outputs, targets)', "
                "which returns the loss; add it"
            ]
        )
    return cls


def _load(name: str, data: Data) -> Callable[..., torch.Tensor]:
    """Return an instance of a plug-in. A class with a parameter `ignore_index` gets the padding of the data."""
    cls = _load_class(name)
    try:
        padded = data.padding is not None and "ignore_index" in inspect.signature(cls).parameters
        loss: Callable[..., torch.Tensor] = cls(**{"ignore_index": data.padding} if padded else {})
    except (ValueError, TypeError) as error:
        raise ExperimentError([f"training.loss = {name!r}: {error}"]) from error
    return loss


def _no_smoothing(name: str, smoothing: float) -> ExperimentError:
    return ExperimentError(
        [
            f"training.label_smoothing = {smoothing:g}: loss {name!r} has none; use training.loss = 'cross-entropy' "
            "with class labels, or remove it"
        ]
    )


def _root_mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    import torch

    # The square root has no gradient at 0: without the constant, a batch without error makes all parameters NaN.
    return (torch.nn.functional.mse_loss(outputs, targets) + 1e-12).sqrt()


def _mean_without_padding(total: Any, padding: int, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all targets but padding. A batch of padding alone has loss 0 and gradient 0."""
    mean: torch.Tensor = total(outputs, targets) / (targets != padding).sum().clamp(min=1)
    return mean
