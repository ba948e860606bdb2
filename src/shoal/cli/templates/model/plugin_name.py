"""A model: the network that every node trains."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from shoal import Bounds


@dataclass(frozen=True)
class PluginName:
    """A perceptron with `blocks` residual blocks of `width` units, for inputs of any shape."""

    width: Annotated[int, Bounds(at_least=1)] = 32  # an experiment sets it: model = { name = …, width = 64 }
    blocks: Annotated[int, Bounds(at_least=0)] = 2

    def build(self, shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
        # `shape` is the shape of one input, `outputs` the number of classes. The initial weights come from torch's
        # default generator, which the experiment seeds: all nodes start from the same model.
        first = torch.nn.Linear(math.prod(shape), self.width)
        blocks = [ResidualBlock(self.width) for _ in range(self.blocks)]
        return torch.nn.Sequential(torch.nn.Flatten(), first, *blocks, torch.nn.Linear(self.width, outputs))


class ResidualBlock(torch.nn.Module):
    """x + relu(Ax + b)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.layer(x))
