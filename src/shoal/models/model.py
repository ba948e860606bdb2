"""What a model is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Model(Protocol):
    """A recipe for a network; its parameters are those of its constructor."""

    def build(self, shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
        """A freshly initialised network from inputs (batch, *shape) to logits (batch, outputs).

        Draws its initial values from torch's default generator, and keeps no statistics while it trains.
        Raises `ValueError` for a shape it cannot take.
        """
        ...
