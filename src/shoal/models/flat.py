"""A module as one flat vector: what nodes send, average and compare.

The module's tensors are views of the vector, so nothing is flattened or copied on the way in or out of a
training step: the network computes on the vector itself, and backward adds into the flat gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shoal.data.dataset import Data
from shoal.models.model import ForData, Model
from shoal.randomness import derived_seed

# Buffers that a forward pass in training mode changes: batch normalisation, and both kinds of spectral norm.
CHANGING_BUFFERS = ("running_mean", "running_var", "weight_u", "weight_v", "_u", "_v")


class Slot(NamedTuple):
    """Where one parameter of the module lies in the flat vector."""

    name: str
    offset: int
    shape: tuple[int, ...]
    trained: bool
    """Whether it has a gradient. One that has none is sent and averaged all the same."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class FlatModule:
    """A module whose parameters are views of `values`, and their gradients views of `gradient`.

    Both are contiguous vectors of `size` on the module's device. Parameters come in the order of
    `named_parameters()`; tied ones have one slot; where a parameter is not trained, `gradient` stays 0.

    Writing to `values` changes the module, and `gradient.zero_()` clears its gradients: torch's own
    `zero_grad()`, `to()` and `copy.deepcopy` would part the module from the vectors, so keep to these.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        _require_flat(module, parameters)
        layout, offset = [], 0
        for name, parameter in parameters.items():
            slot = Slot(name, offset, tuple(parameter.shape), parameter.requires_grad)
            layout.append(slot)
            offset += slot.size

        self.module = module
        self.layout = tuple(layout)
        self.size = offset
        device = next(iter(parameters.values())).device
        self.values = torch.empty(self.size, dtype=torch.float32, device=device)
        self.gradient = torch.zeros_like(self.values)
        for slot, parameter in zip(self.layout, parameters.values(), strict=True):
            place = slice(slot.offset, slot.offset + slot.size)
            view = self.values[place].view(slot.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.gradient[place].view(slot.shape) if slot.trained else None

    def load(self, params: NDArray[np.float32]) -> None:
        """Copy `params` in."""
        if params.shape != (self.size,):
            raise ValueError(f"params have shape {params.shape}; this model's are one vector, ({self.size},)")
        if self.values.device.type == "cpu":
            np.copyto(self.values.numpy(), params)
        else:
            self.values.copy_(torch.from_numpy(params.copy()))  # torch will not take a read-only array

    def read(self) -> NDArray[np.float32]:
        """The parameters as a fresh array that nobody can write to."""
        params: NDArray[np.float32] = self.values.cpu().numpy().copy()
        params.flags.writeable = False
        return params

    def stacked(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of `matrix`, (models, size), as the parameters of so many models: views (models, *shape).

        For `torch.func.functional_call` on `module` under `torch.func.vmap`.
        """
        if matrix.ndim != 2 or matrix.shape[1] != self.size:
            raise ValueError(f"matrix has shape {tuple(matrix.shape)}; expected (models, {self.size})")
        return {
            slot.name: matrix[:, slot.offset : slot.offset + slot.size].view(-1, *slot.shape) for slot in self.layout
        }


def initial_parameters(
    model: Model, shape: tuple[int, ...], outputs: int, seed: int, device: torch.device | None = None
) -> FlatModule:
    """The model that every node starts from: the same for equal arguments, in every process."""
    return initial_module(lambda: model.build(shape, outputs), seed, device)


def module_for(model: Model | ForData | nn.Module, data: Data) -> nn.Module:
    """The network that an experiment's model is on its data."""
    if isinstance(model, nn.Module):
        return model
    return model.build_for(data) if isinstance(model, ForData) else model.build(data.shape, data.classes)


def initial_module(make: Callable[[], nn.Module], seed: int, device: torch.device | None = None) -> FlatModule:
    """What `make` makes when torch's generator starts from this seed, as one vector."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which reaches the generators of the other devices too.
        torch.default_generator.manual_seed(derived_seed(seed, "initial parameters"))
        return FlatModule(make().to(device or "cpu"))


def _require_flat(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    kind = type(module).__name__
    if not parameters:
        raise ValueError(f"model {kind}: it has no parameters to train or to share")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"model {kind}: parameter '{name}' is {parameter.dtype}; expected torch.float32, "
                f"the type that nodes exchange; build the module with .float()"
            )
    devices = {str(parameter.device) for parameter in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"model {kind}: parameters on {', '.join(sorted(devices))}; expected one device")
    for name, buffer in module.named_buffers():
        if name.rpartition(".")[2] in CHANGING_BUFFERS and buffer.is_floating_point():
            raise ValueError(
                f"model {kind}: buffer '{name}' changes in training, and is no parameter that nodes could "
                f"share; use a layer without such statistics, like torch.nn.GroupNorm in place of BatchNorm"
            )
