"""Inputs as a model takes them: the scaling of the data set, applied to arrays or tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data

if TYPE_CHECKING:
    import torch

A = TypeVar("A")
MeanAndStd: TypeAlias = tuple[A, A] | None
"""The mean and the standard deviation of inputs; None if a model takes them as they are."""


def scaling_arrays(data: Data) -> MeanAndStd[NDArray[np.float32]]:
    """Return the scaling of a data set, shaped to broadcast over its inputs."""
    if data.scaling is None:
        return None
    shape = (-1, *[1] * max(0, len(data.shape) - 1)) if len(data.scaling.mean) > 1 else (1,)
    mean, std = (np.array(v, np.float32).reshape(shape) for v in (data.scaling.mean, data.scaling.std))
    return mean, std


def scaling_tensors(data: Data, device: torch.device) -> MeanAndStd[torch.Tensor]:
    import torch

    arrays = scaling_arrays(data)
    return None if arrays is None else (torch.from_numpy(arrays[0]).to(device), torch.from_numpy(arrays[1]).to(device))


def normalise(x: A, scaling: MeanAndStd[A]) -> A:
    """Return (x − mean)/std in float32. NumPy and torch give the same bits."""
    if scaling is None:
        return x
    mean, std = scaling
    inputs: Any = x.astype(np.float32, copy=False) if isinstance(x, np.ndarray) else x.float()  # type: ignore[attr-defined]
    return (inputs - mean) / std  # type: ignore[no-any-return]


def example_inputs(data: Data, device: torch.device) -> torch.Tensor:
    """Return two training inputs as a model takes them; the same one twice if there is only one."""
    import torch

    x = torch.from_numpy(data.train.x[np.arange(2) % len(data.train)]).to(device)
    return normalise(x, scaling_tensors(data, device))
