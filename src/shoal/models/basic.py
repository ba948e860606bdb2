"""Basic models for classification: logistic regression, a multilayer perceptron and a small convolutional network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from shoal.types import Bounds

if TYPE_CHECKING:
    from torch import nn  # importing torch takes seconds, and listing models does not need it


@dataclass(frozen=True)
class Logistic:
    """Multinomial logistic regression: one linear layer on the flattened input."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


@dataclass(frozen=True)
class Mlp:
    """Multilayer perceptron on the flattened input, with ReLU after each of the `hidden` layers."""

    hidden: tuple[Annotated[int, Bounds(at_least=1)], ...] = (64,)

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        widths = (math.prod(shape), *self.hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, width in zip(widths, self.hidden, strict=False):
            layers += [nn.Linear(inputs, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


@dataclass(frozen=True)
class GnLenet:
    """LeNet with group normalisation (Hsieh et al. 2020): the `LeNet` of DecentralizePy.

    Group normalisation keeps no statistics of the data, so it suits non-IID nodes: "The Non-IID Data Quagmire of
    Decentralized Machine Learning". 89,834 parameters for images of 3×32×32 and 10 classes.
    """

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        if len(shape) != 3 or min(shape[1:]) < 8 or shape[0] < 1:
            raise ValueError(
                f"inputs have shape {shape}; expected images, (channels, height, width), "
                f"of at least 8×8 pixels ('digits' has images with dataset.images = true); 'mlp' and 'logistic' "
                f"accept any shape"
            )
        channels, height, width = shape
        return nn.Sequential(
            *_block(channels, 32),
            *_block(32, 32),
            *_block(32, 64),
            nn.Flatten(),
            nn.Linear(64 * (height // 8) * (width // 8), outputs),
        )


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    """Convolution, 2×2 max-pooling, group normalisation and ReLU."""
    from torch import nn

    return [
        nn.Conv2d(inputs, outputs, kernel_size=5, padding=2),
        nn.MaxPool2d(2),
        nn.GroupNorm(num_groups=2, num_channels=outputs),
        nn.ReLU(),
    ]
