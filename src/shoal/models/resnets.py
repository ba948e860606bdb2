"""Residual networks for small images, with a 3×3 first layer of stride 1 and group instead of batch normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from shoal.types import Bounds

if TYPE_CHECKING:
    from torch import nn

Groups = Annotated[int, Bounds(at_least=1)]


@dataclass(frozen=True)
class Resnet8:
    """ResNet-8 for small images, with group normalisation (He et al. 2016; Wu & He 2018).

    He's smallest network for CIFAR: three blocks of 16, 32 and 64 channels. A shortcut has a 1×1 convolution if the
    shape changes. 78,042 parameters for images of 3×32×32 and 10 classes. The default of 2 groups of channels follows
    Hsieh et al. 2020.
    """

    groups: Groups = 2

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return _resnet(shape, outputs, widths=(16, 32, 64), blocks=1, groups=self.groups)


@dataclass(frozen=True)
class Resnet18:
    """ResNet-18 for small images, with group normalisation (He et al. 2016; Wu & He 2018).

    Four stages of two blocks, with 64, 128, 256 and 512 channels. 11,173,962 parameters for images of 3×32×32 and 10
    classes. The default of 2 groups of channels follows Hsieh et al. 2020 and Reddi et al. 2021.
    """

    groups: Groups = 2

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return _resnet(shape, outputs, widths=(64, 128, 256, 512), blocks=2, groups=self.groups)


def _resnet(shape: tuple[int, ...], outputs: int, widths: tuple[int, ...], blocks: int, groups: int) -> nn.Module:
    from torch import nn

    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"inputs have shape {shape}; expected images, (channels, height, width)")
    if widths[0] % groups:
        raise ValueError(
            f"groups = {groups}: expected a divisor of {widths[0]}, the number of channels of the first layer"
        )
    layers: list[nn.Module] = [*_convolution(shape[0], widths[0], 1, groups), nn.ReLU()]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(_block(inputs, width, stride, groups))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, outputs))


def _block(inputs: int, outputs: int, stride: int, groups: int) -> nn.Module:
    """Two convolutions with a shortcut."""
    from torch import nn

    from shoal.models.layers import Residual

    return Residual(
        nn.Sequential(
            *_convolution(inputs, outputs, stride, groups), nn.ReLU(), *_convolution(outputs, outputs, 1, groups)
        ),
        nn.Identity()
        if stride == 1 and inputs == outputs
        else nn.Sequential(*_convolution(inputs, outputs, stride, groups, size=1)),
    )


def _convolution(inputs: int, outputs: int, stride: int, groups: int, size: int = 3) -> list[nn.Module]:
    from torch import nn

    return [
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.GroupNorm(groups, outputs),
    ]
