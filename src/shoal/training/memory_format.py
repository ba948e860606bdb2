"""The order in which images lie in memory while a network computes.

With max-pooling, PyTorch's CPU kernels take less time if the channels of a pixel lie side by side ("channels last").
Without it, there is no rule: some networks get faster and some slower (benchmarks/memory_format.py). The choice depends
on the module and the device alone, not on measurements, so every engine and every machine makes the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """Return a copy of `images`, (batch, channels, height, width), whose channels are adjacent in memory."""
    import torch

    return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)


def prefers_channels_last(module: torch.nn.Module, inputs: torch.Tensor) -> bool:
    """Return whether to pass `channels_last(inputs)` to this module. `inputs` is a small batch.

    Only layers for convolution and for max-pooling on a CPU. The module must accept such inputs, in training and in
    evaluation: `Tensor.view`, for example, does not always work on them. The module may draw from global generators.
    """
    from torch import nn

    from shoal.models.flat import find_changing_buffers

    if inputs.ndim != 4 or inputs.device.type != "cpu" or not inputs.is_floating_point():
        return False
    layers = list(module.modules())
    if not all(any(isinstance(layer, kind) for layer in layers) for kind in (nn.Conv2d, nn.MaxPool2d)):
        return False
    was_training = module.training
    try:
        for mode in (False, True):
            module.train(mode)
            find_changing_buffers(module, channels_last(inputs))
    except ValueError:
        return False
    finally:
        module.train(was_training)
    return True
