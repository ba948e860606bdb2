"""Image classification networks, with the layer sizes of their papers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from shoal.types import Bounds

if TYPE_CHECKING:
    from torch import nn  # importing torch takes seconds, and listing models does not need it


@dataclass(frozen=True)
class Lenet:
    """LeNet-5 without normalisation: two convolutions, ReLU, max-pooling, three linear layers (LeCun et al. 1998).

    62,006 parameters for images of 3×32×32 and 10 classes: the network of PyTorch's CIFAR-10 tutorial. Images smaller
    than 32 pixels are padded by two pixels on each side, like LeCun's 28×28 digits: 61,706 parameters for 1×28×28.
    """

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        channels, height, width = _check_image(shape, 12)
        padding = 2 if min(height, width) < 32 else 0
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
        return nn.Sequential(
            nn.Conv2d(channels, 6, kernel_size=5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * rows * columns, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, outputs),
        )


@dataclass(frozen=True)
class LeafCnn:
    """LEAF's convolutional networks, one for FEMNIST and one for CelebA (Caldas et al. 2018).

    `variant = "auto"` selects "femnist" for images with one channel, and "celeba" for all others.

    `variant = "femnist"`: two 5×5 convolutions of 32 and 64 channels, each with ReLU and 2×2 max-pooling, and a linear
    layer of `hidden` units. 1,690,046 parameters for 1×28×28, 62 classes and 512 units, as in decentralized learning
    papers. LEAF's own code has 2,048 units (6,603,710 parameters).

    `variant = "celeba"`: four 3×3 convolutions of 32 channels, each with 2×2 max-pooling and ReLU, and one linear
    layer. 30,242 parameters for 3×84×84 and 2 classes. `batch_norm` adds batch normalisation after each convolution,
    as in LEAF's own code: 30,498 parameters and 256 running statistics (`training.buffers`).
    """

    variant: Literal["auto", "femnist", "celeba"] = "auto"
    hidden: Annotated[int, Bounds(at_least=1)] = 512
    batch_norm: bool = False

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        one_channel = len(shape) == 3 and shape[0] == 1
        if self.variant == "femnist" or (self.variant == "auto" and one_channel):
            return self._femnist(shape, outputs)
        return self._celeba(shape, outputs)

    def _femnist(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        channels, height, width = _check_image(shape, 4)
        return nn.Sequential(
            *self._block(channels, 32, 5),
            *self._block(32, 64, 5),
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, outputs),
        )

    def _celeba(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        from torch import nn

        channels, height, width = _check_image(shape, 16)
        return nn.Sequential(
            *self._block(channels, 32, 3),
            *self._block(32, 32, 3),
            *self._block(32, 32, 3),
            *self._block(32, 32, 3),
            nn.Flatten(),
            nn.Linear(32 * (height // 16) * (width // 16), outputs),
        )

    def _block(self, inputs: int, outputs: int, size: int) -> list[nn.Module]:
        """Convolution, 2×2 max-pooling and ReLU. Max-pooling and ReLU commute."""
        from torch import nn

        norm: list[nn.Module] = [nn.BatchNorm2d(outputs)] if self.batch_norm else []
        return [nn.Conv2d(inputs, outputs, size, padding=size // 2), *norm, nn.MaxPool2d(2), nn.ReLU()]


def _check_image(shape: tuple[int, ...], min_side: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < min_side or shape[0] < 1:
        raise ValueError(
            f"inputs have shape {shape}; expected images, (channels, height, width), of at least {min_side}×{min_side} "
            f"pixels ('digits' has images with dataset.images = true); 'mlp' and 'logistic' accept any shape"
        )
    return shape
