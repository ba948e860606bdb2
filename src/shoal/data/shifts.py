"""Feature shift: another partition assigns the samples, and each node transforms its inputs in its own way.

    rotation    images rotated by an angle per node
    noise       Gaussian noise that increases from node to node

A node transforms its training samples, its own test samples and the common ones in the same way. The same sample always
gives the same result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Indices, OwnerPartition, Partition, Shift
from shoal.data.partitions import Iid
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.traits import Traits, traits_of
from shoal.types import Bounds, Nested

if TYPE_CHECKING:
    import torch


class _Wrapper:
    """Assigns samples as the inner partition does, and is of the same kind: by owner, by class."""

    traits: ClassVar[Traits] = Traits()
    of: Partition | OwnerPartition

    def __post_init__(self) -> None:
        # Set on the instance: isinstance(…, OwnerPartition) looks for the method.
        object.__setattr__(self, "traits", traits_of(self.of, "partition"))
        if isinstance(self.of, OwnerPartition):
            object.__setattr__(self, "split_owned", self.of.split_owned)

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        return cast(Partition, self.of).split(labels, nodes, rng)


@dataclass(frozen=True)
class Rotation(_Wrapper):
    """Each node sees its images rotated by one of `angles`, in degrees, counterclockwise.

    Angles are assigned in turn or at random. Rotations by 180°, and by 90° of square images, are exact; others are
    interpolated, and the corners are filled with 0. Lopez-Paz and Ranzato 2017, "Gradient Episodic Memory for
    Continual Learning", have rotated digits as tasks; Ghosh et al. 2020, "An Efficient Framework for Clustered
    Federated Learning", as clients.
    """

    angles: tuple[float, ...] = (0.0, 90.0, 180.0, 270.0)
    assign: Literal["in-turn", "random"] = "in-turn"
    of: Annotated[Partition | OwnerPartition, Nested("partition")] = Iid()

    def __post_init__(self) -> None:
        if not self.angles:
            raise ValueError("angles = []: expected at least one angle")
        super().__post_init__()

    def shifts(self, nodes: int, shape: tuple[int, ...], rng: np.random.Generator) -> list[Shift | None]:
        if len(shape) != 3:
            raise DataError(
                f"partition 'rotation': inputs have shape {list(shape)}; expected images, [channels, height, width]"
            )
        turns = np.arange(nodes) if self.assign == "in-turn" else rng.integers(len(self.angles), size=nodes)
        angles = [self.angles[turn % len(self.angles)] % 360 for turn in turns.tolist()]
        return [RotateInputs(angle) if angle else None for angle in angles]


@dataclass(frozen=True)
class Noise(_Wrapper):
    """Gaussian noise on every input, of standard deviation `sigma`·i/nodes at node i: none at node 0.

    Li et al. 2022, "Federated Learning on Non-IID Data Silos". `sigma` refers to normalised inputs.
    """

    sigma: Annotated[float, Bounds(at_least=0)] = 0.1
    of: Annotated[Partition | OwnerPartition, Nested("partition")] = Iid()

    def shifts(self, nodes: int, shape: tuple[int, ...], rng: np.random.Generator) -> list[Shift | None]:
        seed = int(rng.integers(2**63))
        sigmas = [self.sigma * node / nodes for node in range(nodes)]
        return [AddNoise(seed, node, sigma) if sigma else None for node, sigma in enumerate(sigmas)]


@dataclass(frozen=True)
class RotateInputs:
    """Rotates images, (channels, height, width), about their centre."""

    degrees: float

    def apply(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        quarters, rest = divmod(self.degrees, 90)
        height, width = x.shape[-2:]
        if rest == 0 and (height == width or quarters % 2 == 0):
            return torch.rot90(x, int(quarters), (-2, -1))
        cos, sin = math.cos(math.radians(self.degrees)), math.sin(math.radians(self.degrees))
        # The source of each output pixel, in coordinates from −1 to 1 along both sides.
        source = [[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]
        matrix = torch.tensor(source, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
        grid = torch.nn.functional.affine_grid(matrix, list(x.shape), align_corners=False)
        return torch.nn.functional.grid_sample(x, grid, align_corners=False)


@dataclass(frozen=True)
class AddNoise:
    """Adds noise that is drawn from (seed, node, index of the sample)."""

    seed: int
    node: int
    sigma: float

    def apply(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        import torch

        noise = np.empty(tuple(x.shape), np.float32)
        for row, number in zip(noise, numbers.tolist(), strict=True):
            key = 2 * number if number >= 0 else -2 * number - 1  # generators need numbers from 0
            generator(self.seed, "noise", self.node, key).standard_normal(dtype=np.float32, out=row)
        return x + self.sigma * torch.from_numpy(noise).to(x.device)
