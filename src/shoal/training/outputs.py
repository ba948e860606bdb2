"""Whether the outputs of a model fit the targets of a data set."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shoal.data.dataset import Data
from shoal.training.losses import Loss

if TYPE_CHECKING:
    import torch


def check_outputs(outputs: object, data: Data, loss: str) -> None:
    """Raise ValueError if a model's outputs for `example_inputs(data)` do not fit the targets or the loss."""
    import torch

    if not isinstance(outputs, torch.Tensor):
        raise ValueError(f"its output is a {type(outputs).__name__}; expected one tensor: {_expected(data)}")
    targets = torch.from_numpy(data.train.y[np.arange(2) % len(data.train)]).to(outputs.device)
    if data.task == "regression":
        fits = outputs.numel() == targets.numel()
    else:
        fits = outputs.ndim > 1 and outputs.shape[-1] >= data.classes
        fits = fits and math.prod(outputs.shape[:-1]) == targets.numel()
    if not fits:
        raise ValueError(f"{_found(outputs)}; expected {_expected(data)}")
    function = Loss(loss, data)
    try:
        function(outputs, targets)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"{_found(outputs)}, which do not fit training.loss = {loss!r}; expected {_expected(data)}: {error}"
        ) from error


def _found(outputs: torch.Tensor) -> str:
    return f"outputs have shape {tuple(outputs.shape)} for a batch of 2 inputs"


def _expected(data: Data) -> str:
    """Describe the outputs for a batch of two inputs."""
    positions = tuple(data.train.y.shape[1:])
    if data.task == "regression":
        return f"{(2, *positions)}, a number for each target, because the targets of the data set are numbers"
    kind = "tokens at each position" if data.task == "sequence" else "classes"
    return f"{(2, *positions, data.classes)}, because the data set has {data.classes} {kind}"
