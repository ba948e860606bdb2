"""The contract of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from shoal.data.dataset import Data


class Model(Protocol):
    """A component that builds a network. The parameters of its constructor are its options."""

    def build(self, shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
        """Return a new network from inputs (batch, *shape) to logits (batch, outputs).

        Initial values are drawn from torch's default generator. `training.buffers` selects where the
        statistics are stored that the network updates in training. Raises `ValueError` for an unsupported shape.
        """
        ...


@runtime_checkable
class DataDependentModel(Protocol):
    """A model that needs more than the shape of an input: the number of tokens, users or items.

    A model has `build` or `build_for`, or it is a `torch.nn.Module`, which Shoal uses unchanged.
    """

    def build_for(self, data: Data) -> torch.nn.Module:
        """Return a new network for the inputs of `data`.

        Outputs are (batch, classes), (batch, length, classes) for sequences, and (batch,) or (batch, 1) for numbers.
        """
        ...
