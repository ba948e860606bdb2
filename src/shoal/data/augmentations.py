"""Augmentation: random transformations of training images, and the scaling of inputs.

    crop        a random part of the padded image, of the image's size
    flip        mirrored with a probability
    cutout      a random square set to 0 (DeVries and Taylor 2017)
    normalize   mean 0 and standard deviation 1, in training and in evaluation

Images are float32 as the model takes them, (samples, channels, height, width), so a 0 is the mean of a normalised
channel. Each image has its own draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Augmentation, Data, Indices, Scaling
from shoal.types import Bounds

if TYPE_CHECKING:
    import torch

ROWS_AT_ONCE = 1024
"""Samples that are added up at once for their mean."""
SMALLEST_STD = 1e-7
"""A standard deviation of at most this share of the mean is rounding of float32."""


def augment(x: torch.Tensor, augmentations: Sequence[Augmentation], rng: np.random.Generator) -> torch.Tensor:
    """Apply all augmentations, in order."""
    for augmentation in augmentations:
        x = augmentation.apply(x, rng)
    return x


@dataclass(frozen=True)
class Crop:
    """A random part of the image, which is padded with zeros by `padding` pixels on each side; the size is kept."""

    padding: Annotated[int, Bounds(at_least=1)] = 4

    def apply(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        import torch

        height, width = _image_size(x)
        if self.padding >= min(height, width):
            raise ValueError(
                f"padding = {self.padding}: a crop could miss the image; expected less than the sides of an image, "
                f"{height}×{width}"
            )
        padded = torch.nn.functional.pad(x, (self.padding,) * 4)
        corners = rng.integers(2 * self.padding, size=(len(x), 2), endpoint=True).tolist()
        parts = [image[:, r : r + height, c : c + width] for image, (r, c) in zip(padded, corners, strict=True)]
        return torch.stack(parts)


@dataclass(frozen=True)
class Flip:
    """Mirrored with this `probability`: left and right exchanged or, if vertical, top and bottom."""

    direction: Literal["horizontal", "vertical"] = "horizontal"
    probability: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.5

    def apply(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        import torch

        _image_size(x)
        flipped = torch.from_numpy(rng.random(len(x)) < self.probability).to(x.device)
        mirrored = x.flip(-1 if self.direction == "horizontal" else -2)
        return torch.where(flipped[:, None, None, None], mirrored, x)


@dataclass(frozen=True)
class Cutout:
    """A square of `size` pixels set to 0, around a random pixel; a part of it may be outside of the image.

    DeVries and Taylor 2017, "Improved Regularization of Convolutional Neural Networks with Cutout".
    """

    size: Annotated[int, Bounds(at_least=1)] = 8

    def apply(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        import torch

        height, width = _image_size(x)
        if self.size > min(height, width):
            raise ValueError(
                f"size = {self.size}: larger than an image, {height}×{width}; use at most {min(height, width)}"
            )
        inside = []
        for side in (height, width):
            distance = np.arange(side) - rng.integers(side, size=(len(x), 1)) + self.size // 2
            inside.append((distance >= 0) & (distance < self.size))
        square = torch.from_numpy(inside[0][:, None, :, None] & inside[1][:, None, None, :])
        return x.masked_fill(square.to(x.device), 0.0)


@dataclass(frozen=True)
class Normalize:
    """All inputs, also in evaluation, as (x − `mean`)/`std`; "auto" measures both on the training samples.

    One number for each channel of images, or one for all values. Given numbers refer to the inputs as the data set
    scales them, for example from 0 to 1. Normalisation comes before all augmentations, at any place in the list.
    """

    mean: Literal["auto"] | float | tuple[float, ...] = "auto"
    std: Literal["auto"] | Annotated[float, Bounds(above=0)] | tuple[Annotated[float, Bounds(above=0)], ...] = "auto"

    def __post_init__(self) -> None:
        if (self.mean == "auto") != (self.std == "auto"):
            raise ValueError("mean and std must both be 'auto', or both numbers or lists of numbers")
        for key in ("mean", "std"):
            if getattr(self, key) == ():
                raise ValueError(f"{key} = []: expected a number, or a list with one number for each channel")

    def input_scaling(self, data: Data, samples: Indices) -> Scaling:
        if self.mean == "auto" or self.std == "auto":
            return measure_scaling(data, samples)
        channels = data.shape[0] if len(data.shape) == 3 else 1
        given = {"mean": np.atleast_1d(self.mean), "std": np.atleast_1d(self.std)}
        for key, numbers in given.items():
            if len(numbers) not in (1, channels):
                raise ValueError(
                    f"{key} has {len(numbers)} numbers for inputs of shape {list(data.shape)}; expected "
                    + ("one" if channels == 1 else f"one, or one for each of {channels} channels")
                )
        before = data.scaling or Scaling((0.0,), (1.0,))
        mean = np.add(before.mean, np.multiply(before.std, given["mean"]))
        std = np.multiply(before.std, given["std"])
        mean, std = np.broadcast_arrays(mean, std)
        return Scaling(tuple(mean.tolist()), tuple(std.tolist()))


def measure_scaling(data: Data, samples: Indices) -> Scaling:
    """Return the scaling to mean 0 and standard deviation 1 over these training samples; for images, per channel.

    Sums are in double precision. A channel with one value only is not divided.
    """
    axes = (0, 2, 3) if len(data.shape) == 3 else None
    count = len(samples) * math.prod(data.shape[1:] if axes else data.shape)

    def total(values: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[np.float64]:
        chunks = (samples[i : i + ROWS_AT_ONCE] for i in range(0, len(samples), ROWS_AT_ONCE))
        sums = [values(data.train.x[chunk]).sum(axis=axes, dtype=np.float64) for chunk in chunks]
        return np.atleast_1d(np.sum(sums, axis=0))

    mean = total(lambda x: x) / count
    centre = mean[:, None, None] if axes else mean
    std = np.sqrt(total(lambda x: (x - centre) ** 2) / count)
    std = np.where(std > SMALLEST_STD * np.abs(mean), std, 1.0)
    return Scaling(tuple(mean.tolist()), tuple(std.tolist()))


def _image_size(x: torch.Tensor) -> tuple[int, int]:
    """Return height and width. Raises ValueError if inputs are not images."""
    if x.ndim != 4:
        raise ValueError(
            f"inputs have shape {list(x.shape[1:])}; expected images, [channels, height, width]. For the data set "
            "'digits', set dataset.images = true"
        )
    return x.shape[2], x.shape[3]
