"""Losses: any of torch.nn by name, the root mean squared error, and plug-ins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.data.dataset import Data, Task
from shoal.errors import ExperimentError
from shoal.plugins import load_class
from shoal.schema import nearest

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

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        import torch

        if self._task == "sequence":
            outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        elif self._task == "regression":
            outputs = outputs.reshape(targets.shape)
        if self._task != "regression" and not self._takes_indices:
            targets = torch.nn.functional.one_hot(targets, self._classes).to(torch.float32)
        return self._function(outputs, targets)


def _find(name: str, data: Data, smoothing: float) -> tuple[Callable[..., torch.Tensor], bool]:
    """Return the loss of this name, and whether its target is the index of the class."""
    import torch

    if smoothing and (name == "rmse" or ":" in name):
        raise _no_smoothing(name, smoothing)
    if ":" in name:
        return _load(name, data), True
    if name == "rmse":
        return _root_mean_square, False
    if name == "auto":
        name = "mse" if data.task == "regression" else "cross-entropy"
    classes: dict[str, Any] = {
        n: found for n, found in vars(torch.nn).items() if n.endswith("Loss") and isinstance(found, type)
    }
    by_key = {n.removesuffix("Loss").lower(): n for n in classes}
    key = name.removesuffix("Loss").replace("-", "").replace("_", "").lower()
    if key not in by_key:
        raise ExperimentError([f"training.loss = {name!r}: unknown{nearest(key, by_key)}"])
    found = by_key[key]
    known = inspect.signature(classes[found]).parameters
    if smoothing and "label_smoothing" not in known:
        raise _no_smoothing(name, smoothing)
    options = {"label_smoothing": smoothing} if smoothing else {}
    if data.padding is not None and "ignore_index" in known:
        total = classes[found](ignore_index=data.padding, reduction="sum", **options)
        return partial(_mean_without_padding, total, data.padding), found in CLASS_INDEX_LOSSES
    return classes[found](**options), found in CLASS_INDEX_LOSSES


def _load(name: str, data: Data) -> Callable[..., torch.Tensor]:
    """Return an instance of a plug-in. A class with a parameter `ignore_index` gets the padding of the data."""
    try:
        cls = load_class(name)
        padded = data.padding is not None and "ignore_index" in inspect.signature(cls).parameters
        loss: Callable[..., torch.Tensor] = cls(**{"ignore_index": data.padding} if padded else {})
    except (ValueError, TypeError) as error:
        raise ExperimentError([f"training.loss = {name!r}: {error}"]) from error
    if not callable(loss):
        raise ExperimentError([f"training.loss = {name!r}: expected a class with a method __call__(outputs, targets)"])
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
