"""What a model is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from shoal.data.dataset import Data


class Model(Protocol):
    """A recipe for a network; its parameters are those of its constructor."""

    def build(self, shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
        """A freshly initialised network from inputs (batch, *shape) to logits (batch, outputs).

        Draws its initial values from torch's default generator. What becomes of statistics that it keeps while it
        trains is said by `training.buffers`.
        Raises `ValueError` for a shape it cannot take.
        """
        ...


@runtime_checkable
class ForData(Protocol):
    """A model that has to know more of the data than the shape of an input: how many tokens, users, items there are.

    A recipe has `build`, or `build_for`, or is a `torch.nn.Module` itself, which is then taken as it is.
    """

    def build_for(self, data: Data) -> torch.nn.Module:
        """As `Model.build`, for the inputs of `data`; outputs are (batch, classes), (batch, length, classes) for
        sequences, and (batch,) or (batch, 1) for numbers."""
        ...
