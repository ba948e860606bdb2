"""The order in which images lie in memory while a network computes.

With max-pooling, PyTorch's CPU kernels take less time if the channels of a pixel lie side by side ("channels last").
Without it, there is no rule: some networks get faster and some slower (benchmarks/memory_format.py). The choice depends
on the module, its loss and the device alone, not on measurements, so every engine and machine makes the same one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

LossOfOutputs: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """Return a copy of `images`, (batch, channels, height, width), whose channels are adjacent in memory."""
    import torch

    return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)


def prefers_channels_last(module: torch.nn.Module, inputs: torch.Tensor, loss: LossOfOutputs) -> bool:
    """Return whether to pass `channels_last(inputs)` to this module.

    `inputs` is a small batch. `loss` returns the loss of the outputs for it.

    Only layers for convolution and for max-pooling on a CPU. The module must accept such inputs, in training (forward
    and backward) and in evaluation: `Tensor.view`, for example, does not always work on them. Parameters, gradients and
    buffers stay as they are. The module may draw from global generators.
    """
    from torch import nn

    if inputs.ndim != 4 or inputs.device.type != "cpu" or not inputs.is_floating_point():
        return False
    layers = list(module.modules())
    if not all(any(isinstance(layer, kind) for layer in layers) for kind in (nn.Conv2d, nn.MaxPool2d)):
        return False
    was_training = module.training
    try:
        _try_evaluation(module.eval(), channels_last(inputs), loss)
        _try_training(module.train(), channels_last(inputs), loss)
    except Exception:  # the code of a module may raise anything
        return False
    finally:
        module.train(was_training)
    return True


def _try_evaluation(module: torch.nn.Module, inputs: torch.Tensor, loss: LossOfOutputs) -> None:
    import torch

    from shoal.models.flat import restored_buffers

    with restored_buffers(module), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # evaluations show them
        loss(module(inputs))


def _try_training(module: torch.nn.Module, inputs: torch.Tensor, loss: LossOfOutputs) -> None:
    """Compute gradients, and restore the gradients of the parameters."""
    import torch

    from shoal.models.flat import restored_buffers

    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    with restored_buffers(module), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # training shows them
        try:
            for parameter, _ in kept:
                parameter.grad = None
            loss(module(inputs)).backward()  # type: ignore[no-untyped-call]
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
