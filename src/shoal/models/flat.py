"""A module as one flat vector, which nodes send, average and compare.

The tensors of the module are views of the vector. The network computes on the vector directly, and the backward pass
adds to the flat gradient, so a training step flattens and copies nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shoal.data.dataset import Data
from shoal.models.model import DataDependentModel, Model
from shoal.randomness import derived_seed

BATCH_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of the buffers of batch normalisation. torch uses the same names in every version of the layer."""
VARIANCE = "running_var"
SPECTRAL_NORM_BUFFERS = ("weight_u", "weight_v", "_u", "_v")
"""Names of the buffers of both implementations of spectral norm. An average of unit vectors is no unit vector."""

Buffers: TypeAlias = Literal["shared", "local"]
"""Where the statistics are stored that a module updates in training: in the vector, or separately on each node."""


class Slot(NamedTuple):
    """The position of one tensor of the module in the flat vector."""

    name: str
    offset: int
    shape: tuple[int, ...]
    trained: bool
    """Whether the tensor has a gradient. Nodes also send and average tensors without a gradient."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class FlatModule:
    """A module whose parameters are views of `values`, and whose gradients are views of `gradient`.

    Both are contiguous vectors of length `size` on the module's device. They contain, in this order:

    1. the trained parameters, `values[:trained_size]`. An optimizer may change only these.
    2. the frozen parameters.
    3. the statistics that the module updates in training, when buffers are "shared".

    Parameters keep the order of `named_parameters()` within their group. `gradient` is always 0 in groups 2 and 3.
    Tied parameters have one slot.

    `local_buffers` names the buffers that change in training and have no slot. Each node keeps its own. Integer
    buffers are always local; all statistics are local when buffers are "local".

    Write to `values` to change the module, and call `gradient.zero_()` to clear its gradients. Do not call torch's
    `zero_grad()`, `to()` or `copy.deepcopy`: they detach the module from the vectors.
    """

    def __init__(self, module: nn.Module, buffers: Buffers = "shared", changing: Collection[str] = ()) -> None:
        """`changing` names buffers that training changes, in addition to those of batch and spectral normalisation."""
        parameters = dict(module.named_parameters())
        _check_parameters(module, parameters)
        statistics, self.local_buffers = _split_buffers(module, buffers, changing)
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
        self.trained_size = sum(slot.size for slot in layout if slot.trained)
        self.values = torch.empty(self.size, dtype=torch.float32, device=ordered[0][1].device)
        self.gradient = torch.zeros_like(self.values)
        self._owners = _buffer_owners(module)
        self._statistics: dict[str, torch.Tensor] = {}
        for slot, (name, tensor) in zip(self.layout, ordered, strict=True):
            span = slice(slot.offset, slot.offset + slot.size)
            view = self.values[span].view(slot.shape)
            view.copy_(tensor.detach())
            if name in statistics:
                self._statistics[name] = view.data  # else autograd sees a change of one layer as a change of all
                self._set_buffer(name, self._statistics[name])
            else:
                tensor.data = view
                tensor.grad = self.gradient[span].view(slot.shape) if slot.trained else None
        self._initial_local = self.read_local()

    @property
    def updates_buffers(self) -> bool:
        """Whether training changes buffers of the module in addition to its parameters."""
        return bool(self._statistics or self.local_buffers)

    def load(self, params: NDArray[np.float32]) -> None:
        """Copy `params` into the module. Negative variances of batch normalisation become 0.

        Sharings that compress models, and algorithms that add differences of models, may produce them.
        """
        if params.shape != (self.size,):
            raise ValueError(f"params have shape {params.shape}; this model expects one vector, ({self.size},)")
        if self.values.device.type == "cpu":
            np.copyto(self.values.numpy(), params)
        else:
            self.values.copy_(torch.from_numpy(params.copy()))  # torch does not accept a read-only array
        for name, view in self._statistics.items():
            if name.rpartition(".")[2] == VARIANCE:
                view.clamp_(min=0.0)

    def read(self) -> NDArray[np.float32]:
        """Return a read-only copy of the vector."""
        params: NDArray[np.float32] = self.values.cpu().numpy().copy()
        params.setflags(write=False)
        return params

    def sync_statistics(self) -> None:
        """Copy shared statistics back into the vector if the module has replaced their views by new tensors."""
        for name, view in self._statistics.items():
            current = self._buffer(name)
            if current is not view:
                view.copy_(current.detach())
                self._set_buffer(name, view)

    def read_local(self) -> dict[str, torch.Tensor]:
        """Return a copy of the current local buffers."""
        return {name: self._buffer(name).detach().clone() for name in self.local_buffers}

    def load_local(self, buffers: Mapping[str, torch.Tensor] | None) -> None:
        """Set the local buffers to a result of `read_local`, or to their initial values if `buffers` is None."""
        for name in self.local_buffers:
            self._set_buffer(name, (buffers or self._initial_local)[name].to(self.values.device, copy=True))

    def _buffer(self, name: str) -> torch.Tensor:
        owner, attribute = self._owners[name][0]
        buffer = owner._buffers[attribute]
        assert buffer is not None
        return buffer

    def _set_buffer(self, name: str, tensor: torch.Tensor) -> None:
        for owner, attribute in self._owners[name]:
            owner._buffers[attribute] = tensor

    def stacked(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return every tensor of the models in the rows of `matrix`, (models, size), as a view (models, *shape).

        The result is for `torch.func.functional_call` on `module` under `torch.func.vmap`.
        """
        if matrix.ndim != 2 or matrix.shape[1] != self.size:
            raise ValueError(f"matrix has shape {tuple(matrix.shape)}; expected (models, {self.size})")
        return {
            slot.name: matrix[:, slot.offset : slot.offset + slot.size].view(-1, *slot.shape) for slot in self.layout
        }


def module_for(model: Model | DataDependentModel | nn.Module, data: Data) -> nn.Module:
    """Return the network of an experiment's model for `data`."""
    if isinstance(model, nn.Module):
        return model
    return model.build_for(data) if isinstance(model, DataDependentModel) else model.build(data.shape, data.classes)


def initial_module(
    make: Callable[[], nn.Module],
    seed: int,
    device: torch.device | None = None,
    buffers: Buffers = "shared",
    inputs: torch.Tensor | None = None,
    check: Callable[[object], None] | None = None,
) -> FlatModule:
    """Return the module that `make` builds from this seed, as one vector, in training mode.

    Equal arguments give equal values in every process. With `inputs`, a small batch, a forward pass on it finds the
    buffers that training changes; `check` is called with its outputs. Raises ValueError if the forward pass does.
    """
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it also seeds the generators of the other devices.
        torch.default_generator.manual_seed(derived_seed(seed, "initial parameters"))
        module = make().to(device or "cpu").train()
        _check_parameters(module, dict(module.named_parameters()))
        return FlatModule(module, buffers, () if inputs is None else find_changing_buffers(module, inputs, check))


def find_changing_buffers(
    module: nn.Module, inputs: torch.Tensor, check: Callable[[object], None] | None = None
) -> frozenset[str]:
    """Return the names of the buffers that a forward pass in training mode changes, and restore their values.

    `check` is called with the outputs. Raises ValueError if the module raises an exception.
    """
    with restored_buffers(module) as changed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training shows them
        outputs = _forward(module, inputs)
        if check is not None:
            check(outputs)
    return frozenset(changed)


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[set[str]]:
    """Restore the buffers of `module` afterwards, also after an exception.

    Yields a set. When the block has ended, it contains the names of the buffers that the block changed.
    """
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()}
    owners, changed = _buffer_owners(module), set[str]()
    try:
        yield changed
    finally:
        after = dict(module.named_buffers())
        for name, (buffer, value) in before.items():
            current = after.get(name)
            if current is None or current.shape != value.shape or not torch.equal(current, value):
                changed.add(name)
                buffer.detach().copy_(value)
            for owner, attribute in owners[name]:
                owner._buffers[attribute] = buffer


def _forward(module: nn.Module, inputs: torch.Tensor) -> object:
    """Return the outputs, computed without gradients or, if the module needs them, with gradients."""
    try:
        with torch.no_grad():
            return module(inputs)
    except Exception:  # the code of a module may raise anything
        try:
            return module(inputs)
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__} raised {type(error).__name__} for a batch of inputs of shape "
                f"{tuple(inputs.shape)}: {error}"
            ) from error


def _buffer_owners(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Map each buffer to its (module, attribute) pairs. A tensor that several modules use has several pairs."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, _ in module.named_buffers(remove_duplicate=False):
        owner_path, _, attribute = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        owners.setdefault(id(owner._buffers[attribute]), []).append((owner, attribute))
    return {name: owners[id(buffer)] for name, buffer in module.named_buffers()}


def _split_buffers(
    module: nn.Module, buffers: Buffers, changing: Collection[str]
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the shared buffers by name, and the names of the local buffers."""
    shared: dict[str, torch.Tensor] = {}
    local: list[str] = []
    kind = type(module).__name__
    for name, buffer in module.named_buffers():
        last = name.rpartition(".")[2]
        if name not in changing and last not in BATCH_NORM_BUFFERS and last not in SPECTRAL_NORM_BUFFERS:
            continue
        if buffers == "local" or not buffer.is_floating_point():
            local.append(name)
        elif last in SPECTRAL_NORM_BUFFERS:
            raise ValueError(
                f"model {kind}: buffer '{name}' changes in training, and nodes cannot average it because it is a unit "
                f"vector; set training.buffers = 'local'"
            )
        elif buffer.dtype != torch.float32:
            raise ValueError(
                f"model {kind}: buffer '{name}' is {buffer.dtype}; expected torch.float32, the type that nodes "
                f"exchange; build the module with .float(), or set training.buffers = 'local'"
            )
        else:
            shared[name] = buffer
    return shared, tuple(local)


def _check_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    kind = type(module).__name__
    if not parameters:
        raise ValueError(f"model {kind}: the module has no parameters to train or share")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(f"model {kind}: no parameter is trained: requires_grad is False for all parameters")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"model {kind}: parameter '{name}' is {parameter.dtype}; expected torch.float32, "
                f"the type that nodes exchange; build the module with .float()"
            )
    devices = {str(parameter.device) for parameter in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"model {kind}: parameters are on devices {', '.join(sorted(devices))}; expected one device")
