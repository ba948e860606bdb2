"""The contracts of data sets and partitions.

A data set is loaded once and shared by all nodes of a machine. A partition assigns its training samples to nodes, as
indices. Every partition works with every data set.
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
"""The kind of targets: a class for each sample, a token for each position of a sequence, or a number."""


@dataclass(frozen=True)
class Samples:
    """Inputs and targets, one row each. Both arrays are read-only.

    Inputs are float32 or bytes, which `Data.scaling` turns into inputs of a model, or ids of tokens, users or items.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    """int64 classes or tokens, or float32 numbers."""
    owner: Indices | None = None
    """The user that each sample comes from, numbered from 0; None if the data set has no users."""

    def __post_init__(self) -> None:
        if self.owner is not None and len(self.owner) != len(self.y):
            raise ValueError(f"{len(self.y)} samples and {len(self.owner)} owners; expected an owner for each sample")
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} inputs and {len(self.y)} targets; expected a target for each input")
        for name, array in (("x", self.x), ("y", self.y)):
            shared = array.view()  # the caller's array stays writable
            shared.setflags(write=False)
            object.__setattr__(self, name, shared)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: Any) -> Samples:
        return Samples(self.x[rows], self.y[rows], None if self.owner is None else self.owner[rows])


@dataclass(frozen=True)
class Scaling:
    """The inputs of a model are (x − mean)/std in float32; one number for all values, or one for each channel."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (255.0,)


@dataclass(frozen=True)
class Data:
    """A loaded data set. All nodes share the test samples."""

    train: Samples
    test: Samples
    classes: int
    """The number of outputs of a model: classes, tokens of the vocabulary, or 1 for a regression."""
    task: Task = "classification"
    scaling: Scaling | None = None
    sizes: tuple[int, ...] = ()
    """The number of distinct ids, if inputs are ids: one number for tokens; users and items for ratings."""
    padding: int | None = None
    """The target of padded positions in sequences. It does not count."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])

    def validate(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Raise ValueError, with the reason, if these cannot be samples of this data set."""
        for name, array, own in (("x", x, self.train.x), ("y", y, self.train.y)):
            if array.dtype != own.dtype or array.shape[1:] != own.shape[1:] or array.ndim != own.ndim:
                raise ValueError(
                    f"{name!r} is {array.dtype} of shape {array.shape[1:]} per sample, "
                    f"expected {own.dtype} of shape {own.shape[1:]}"
                )
        if len(x) != len(y):
            raise ValueError(f"{len(x)} inputs with {len(y)} targets, expected a target for each")
        if not len(y):
            return
        if not all(np.isfinite(array).all() for array in (x, y) if array.dtype.kind == "f"):
            raise ValueError("some values are not finite")
        allowed = y if self.padding is None else y[y != self.padding]
        if self.task != "regression" and allowed.size and not 0 <= allowed.min() <= allowed.max() < self.classes:
            raise ValueError(f"targets from {allowed.min()} to {allowed.max()}, expected 0 to {self.classes - 1}")
        if self.sizes and ((x < 0).any() or (x >= np.resize(self.sizes, x.shape[-1])).any()):
            raise ValueError(f"ids from {x.min()} to {x.max()}, expected them below {self.sizes}")

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each training sample. Raises `DataError` if targets are not classes."""
        if self.task != "classification":
            raise DataError(f"samples of a {self.task} task have no classes; use partition = 'iid' or 'natural'")
        return self.train.y


class LocalData(Protocol):
    """The samples that one node trains on."""

    def validate(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Raise ValueError, with the reason, if these cannot be samples of the node's data set."""
        ...

    def __len__(self) -> int: ...

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        """Return `count` random samples, each at most once; all of them if there are fewer."""
        ...

    def add(self, samples: Samples) -> int:
        """Add the samples that the node does not hold yet. Return their number."""
        ...


class Dataset(Protocol):
    """A component that loads data. The parameters of its constructor are its options."""

    def load(self, seed: int) -> Data: ...


class Partition(Protocol):
    """Assigns training samples to nodes."""

    def split(self, labels: NDArray[np.int64], nodes: int, rng: np.random.Generator) -> list[Indices]:
        """Return one array of sample indices per node. No sample goes to two nodes; no node is empty.

        Every sample goes to a node, unless the partition documents an exception. Equal arguments, with `rng` in the
        same state, give equal arrays. Raises `DataError` if there is no such split.
        """
        ...


@runtime_checkable
class OwnerPartition(Protocol):
    """A partition by the users that samples come from."""

    def split_owned(
        self, train: Samples, test: Samples, nodes: int, rng: np.random.Generator
    ) -> tuple[list[Indices], list[Indices]]:
        """Return the training samples of each node, as `split` does, and its test samples (possibly none).

        Use owners and targets only: if samples are held out for validation, `train` has no values in its inputs.
        """
        ...


@runtime_checkable
class ShiftingPartition(Protocol):
    """A partition that transforms the inputs of each node: rotated, with noise, …"""

    def shifts(self, nodes: int, shape: tuple[int, ...], rng: np.random.Generator) -> list[Shift | None]:
        """Return the transformation of each node; None leaves inputs unchanged."""
        ...


class Shift(Protocol):
    """A transformation of a node's inputs. The same input always gives the same result."""

    def apply(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Transform a batch of normalised float32 inputs. Return a new batch of the same shape.

        `numbers` are the indices of the samples: 0, 1, … for training samples and −1, −2, … for test samples.
        """
        ...


class Augmentation(Protocol):
    """A random transformation of training inputs: an entry of `dataset.augmentation`."""

    def apply(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Transform a batch of float32 inputs as the model takes them. Return a new batch of the same shape.

        All draws come from `rng`. Raises ValueError if inputs of this shape cannot be transformed.
        """
        ...


@runtime_checkable
class Rescaling(Protocol):
    """An entry of `dataset.augmentation` that replaces the scaling of all inputs: of training and of evaluation.

    If it has a method `apply` too, it is also an `Augmentation`.
    """

    def input_scaling(self, data: Data, samples: Indices) -> Scaling:
        """Return the new scaling. `samples` are the training samples of all nodes. Inputs are not ids.

        Raises ValueError if these inputs cannot be scaled.
        """
        ...


def transforms_batches(entry: object) -> bool:
    """Whether an entry of `dataset.augmentation` transforms training batches: it may only rescale all inputs."""
    return not isinstance(entry, Rescaling) or hasattr(entry, "apply")
