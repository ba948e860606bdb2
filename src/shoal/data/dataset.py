"""What a data set and a partition are.

A data set is loaded once and shared by all nodes of a machine; a partition tells which node holds which of
its training samples, as indices. Each works with every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError

if TYPE_CHECKING:
    import torch

Indices: TypeAlias = NDArray[np.int64]


Task: TypeAlias = Literal["classification", "sequence", "regression"]
"""What targets are: a class for each sample, a token for each place of a sequence, or a number."""


@dataclass(frozen=True)
class Samples:
    """Inputs and targets, one row each, in one piece of memory that nobody writes to: both are read-only.

    Inputs are float32 or bytes, which `Data.scaling` turns into what a model sees, or the ids of tokens and things.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    """int64 classes or tokens, or float32 numbers."""
    owner: Indices | None = None
    """The user that each sample came from, numbered from 0, where the data set knows."""

    def __post_init__(self) -> None:
        if self.owner is not None and len(self.owner) != len(self.y):
            raise ValueError(f"{len(self.y)} samples and {len(self.owner)} owners; expected an owner for each sample")
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} inputs and {len(self.y)} targets; expected a target for each input")
        for name, array in (("x", self.x), ("y", self.y)):
            shared = array.view()  # the caller's own array stays as it is
            shared.flags.writeable = False
            object.__setattr__(self, name, shared)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: Any) -> Samples:
        return Samples(self.x[rows], self.y[rows], None if self.owner is None else self.owner[rows])


@dataclass(frozen=True)
class Scaling:
    """Inputs as a model sees them: (x − mean)/std in float32; one number for all values, or one for each channel."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (255.0,)


@dataclass(frozen=True)
class Data:
    """A loaded data set. The test samples are common to all nodes."""

    train: Samples
    test: Samples
    classes: int
    """Outputs of a model: classes, tokens of the vocabulary, or 1 for a number."""
    task: Task = "classification"
    scaling: Scaling | None = None
    sizes: tuple[int, ...] = ()
    """Of inputs that are ids: how many there are. One number for tokens; users and items for ratings."""
    padding: int | None = None
    """The target that does not count, where sequences are filled up."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])

    def require(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Raise ValueError, with the reason, where these cannot be samples of this data set."""
        for name, array, own in (("x", x, self.train.x), ("y", y, self.train.y)):
            if array.dtype != own.dtype or array.shape[1:] != own.shape[1:] or array.ndim != own.ndim:
                raise ValueError(
                    f"{name!r} is {array.dtype} of shape {array.shape[1:]} a sample, "
                    f"expected {own.dtype} of shape {own.shape[1:]}"
                )
        if len(x) != len(y):
            raise ValueError(f"{len(x)} inputs with {len(y)} targets, expected a target for each")
        if not len(y):
            return
        if not all(np.isfinite(array).all() for array in (x, y) if array.dtype.kind == "f"):
            raise ValueError("values that are not finite")
        allowed = y if self.padding is None else y[y != self.padding]
        if self.task != "regression" and allowed.size and not 0 <= allowed.min() <= allowed.max() < self.classes:
            raise ValueError(f"targets from {allowed.min()} to {allowed.max()}, expected 0 to {self.classes - 1}")
        if self.sizes and ((x < 0).any() or (x >= np.resize(self.sizes, x.shape[-1])).any()):
            raise ValueError(f"ids from {x.min()} to {x.max()}, expected them below {self.sizes}")

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each training sample. Raises `DataError` where targets are no classes."""
        if self.task != "classification":
            raise DataError(
                f"samples of a {self.task} task have no classes to divide them by; use partition = 'iid' or 'natural'"
            )
        return self.train.y


class LocalData(Protocol):
    """The samples that one node trains on."""

    def require(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Raise ValueError, with the reason, where these cannot be samples of the node's data set."""
        ...

    def __len__(self) -> int: ...

    def drawn(self, count: int, rng: np.random.Generator) -> Samples:
        """`count` of them at random, each at most once; all of them when there are fewer."""
        ...

    def add(self, samples: Samples) -> int:
        """Keep those of `samples` that the node does not hold yet; how many those were."""
        ...


class Dataset(Protocol):
    """A recipe for data; its parameters are those of its constructor."""

    def load(self, seed: int) -> Data: ...


class Partition(Protocol):
    """Who holds what."""

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        """One array of sample indices per node. No sample is given to two nodes; no node is left empty.

        Every sample is given to someone, unless the partition says when not. Equal arguments, with `rng` in
        the same state, give equal arrays. Raises `DataError` when there is no such split.
        """
        ...


@runtime_checkable
class ByOwner(Protocol):
    """A partition that goes by whom samples came from."""

    def split_owned(
        self, train: Samples, test: Samples, nodes: int, rng: np.random.Generator
    ) -> tuple[list[Indices], list[Indices]]:
        """What each node holds of the training samples, as `split` says, and of the test samples (maybe nothing)."""
        ...


@runtime_checkable
class Shifts(Protocol):
    """A partition whose nodes see their samples differently: turned, in noise, …"""

    def shifts(self, nodes: int, shape: tuple[int, ...], rng: np.random.Generator) -> list[Shift | None]:
        """How each node sees its inputs; None is as they are."""
        ...


class Shift(Protocol):
    """What becomes of a node's inputs, whenever it looks at them. The same input always looks the same."""

    def apply(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """A batch of float32 inputs, already scaled, and the numbers of its samples; a new batch of the same shape.

        Training samples count from 0 up, test samples from −1 down.
        """
        ...
