"""A module as one flat vector: what nodes send, average and compare.

The module's tensors are views of the vector, so nothing is flattened or copied on the way in or out of a
training step: the network computes on the vector itself, and backward adds into the flat gradient.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shoal.data.dataset import Data
from shoal.models.model import ForData, Model
from shoal.randomness import derived_seed

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch normalisation, by the names that torch gives them everywhere."""
DIRECTIONS = ("weight_u", "weight_v", "_u", "_v")
"""Buffers of both kinds of spectral norm: unit vectors, whose average is none."""

Buffers: TypeAlias = Literal["shared", "local"]
"""Where the statistics live that a module keeps while it trains: in the vector, or with the node."""


class Slot(NamedTuple):
    """Where one tensor of the module lies in the flat vector."""

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
    `named_parameters()`, those that are trained first: they are `values[:trained]`, all that an optimizer may touch.
    Behind them lie those that are not, and then, when buffers are "shared", the statistics that the module keeps while
    it trains. There `gradient` stays 0. Tied parameters have one slot.

    What changes in training and has no slot is `local`, the node's own: integers always, all statistics when buffers
    are "local".

    Writing to `values` changes the module, and `gradient.zero_()` clears its gradients: torch's own
    `zero_grad()`, `to()` and `copy.deepcopy` would part the module from the vectors, so keep to these.
    """

    def __init__(self, module: nn.Module, buffers: Buffers = "shared", changing: Collection[str] = ()) -> None:
        """`changing` names buffers that training changes, beside those of batch normalisation and spectral norm."""
        parameters = dict(module.named_parameters())
        _require_flat(module, parameters)
        statistics, self.local = _divided(module, buffers, changing)
        ordered: list[tuple[str, torch.Tensor]] = sorted(parameters.items(), key=lambda p: not p[1].requires_grad)
        ordered += statistics.items()
        layout, offset = [], 0
        for name, tensor in ordered:
            slot = Slot(name, offset, tuple(tensor.shape), tensor.requires_grad)
            layout.append(slot)
            offset += slot.size

        self.module = module
        self.layout = tuple(layout)
        self.size = offset
        self.trained = sum(slot.size for slot in layout if slot.trained)
        self.values = torch.empty(self.size, dtype=torch.float32, device=ordered[0][1].device)
        self.gradient = torch.zeros_like(self.values)
        self._homes = _homes(module)
        self._statistics: dict[str, torch.Tensor] = {}
        for slot, (name, tensor) in zip(self.layout, ordered, strict=True):
            place = slice(slot.offset, slot.offset + slot.size)
            view = self.values[place].view(slot.shape)
            view.copy_(tensor.detach())
            if name in statistics:
                self._statistics[name] = view.data  # autograd need not think that one layer's change is another's
                self._settle(name, self._statistics[name])
            else:
                tensor.data = view
                tensor.grad = self.gradient[place].view(slot.shape) if slot.trained else None
        self._first = self.read_local()

    @property
    def changing(self) -> bool:
        """Whether training changes more of the module than what an optimizer does."""
        return bool(self._statistics or self.local)

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

    def gather(self) -> None:
        """Take the statistics back into the vector where the module has put new tensors in their place."""
        for name, view in self._statistics.items():
            now = self._buffer(name)
            if now is not view:
                view.copy_(now.detach())
                self._settle(name, view)

    def read_local(self) -> dict[str, torch.Tensor]:
        """The node's own buffers, as they are now."""
        return {name: self._buffer(name).detach().clone() for name in self.local}

    def load_local(self, buffers: Mapping[str, torch.Tensor] | None) -> None:
        """Have the module go on from these, as `read_local` gave them; from its first ones for None."""
        for name in self.local:
            self._settle(name, (buffers or self._first)[name].to(self.values.device, copy=True))

    def _buffer(self, name: str) -> torch.Tensor:
        owner, attribute = self._homes[name][0]
        buffer = owner._buffers[attribute]
        assert buffer is not None
        return buffer

    def _settle(self, name: str, tensor: torch.Tensor) -> None:
        for owner, attribute in self._homes[name]:
            owner._buffers[attribute] = tensor

    def stacked(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of `matrix`, (models, size), as the tensors of so many models: views (models, *shape).

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


def initial_module(
    make: Callable[[], nn.Module],
    seed: int,
    device: torch.device | None = None,
    buffers: Buffers = "shared",
    inputs: torch.Tensor | None = None,
) -> FlatModule:
    """What `make` makes when torch's generator starts from this seed, as one vector, ready to train.

    With `inputs`, a small batch, buffers that training changes are found by training on it.
    """
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which reaches the generators of the other devices too.
        torch.default_generator.manual_seed(derived_seed(seed, "initial parameters"))
        module = make().to(device or "cpu").train()
        return FlatModule(module, buffers, () if inputs is None else changed_by(module, inputs))


def changed_by(module: nn.Module, inputs: torch.Tensor) -> frozenset[str]:
    """The buffers that a forward pass in training mode changes; they are left as they were."""
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()}
    if not before:
        return frozenset()
    # A module that cannot take these inputs will say so better when it is trained.
    with torch.no_grad(), contextlib.suppress(Exception):
        module(inputs)
    after, homes, changed = dict(module.named_buffers()), _homes(module), set()
    for name, (buffer, value) in before.items():
        now = after.get(name)
        if now is None or now.shape != value.shape or not torch.equal(now, value):
            changed.add(name)
            buffer.detach().copy_(value)
            for owner, attribute in homes.get(name, ()):
                owner._buffers[attribute] = buffer
    return frozenset(changed)


def _homes(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """The modules that hold each buffer, and under which name: several where one tensor is used twice."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, _ in module.named_buffers(remove_duplicate=False):
        owner, _, attribute = path.rpartition(".")
        home = module.get_submodule(owner)
        owners.setdefault(id(home._buffers[attribute]), []).append((home, attribute))
    return {name: owners[id(buffer)] for name, buffer in module.named_buffers()}


def _divided(
    module: nn.Module, buffers: Buffers, changing: Collection[str]
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The buffers that nodes share, and the names of those that are each node's own."""
    shared: dict[str, torch.Tensor] = {}
    local: list[str] = []
    kind = type(module).__name__
    for name, buffer in module.named_buffers():
        last = name.rpartition(".")[2]
        if name not in changing and last not in STATISTICS and last not in DIRECTIONS:
            continue
        if buffers == "local" or not buffer.is_floating_point():
            local.append(name)
        elif last in DIRECTIONS:
            raise ValueError(
                f"model {kind}: buffer '{name}' changes in training, and is a direction that nodes cannot average; "
                f"keep it with the nodes: training.buffers = 'local'"
            )
        elif buffer.dtype != torch.float32:
            raise ValueError(
                f"model {kind}: buffer '{name}' is {buffer.dtype}; expected torch.float32, the type that nodes "
                f"exchange; build the module with .float(), or set training.buffers = 'local'"
            )
        else:
            shared[name] = buffer
    return shared, tuple(local)


def _require_flat(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    kind = type(module).__name__
    if not parameters:
        raise ValueError(f"model {kind}: it has no parameters to train or to share")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(f"model {kind}: none of its parameters is trained: requires_grad is False for all")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"model {kind}: parameter '{name}' is {parameter.dtype}; expected torch.float32, "
                f"the type that nodes exchange; build the module with .float()"
            )
    devices = {str(parameter.device) for parameter in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"model {kind}: parameters on {', '.join(sorted(devices))}; expected one device")
