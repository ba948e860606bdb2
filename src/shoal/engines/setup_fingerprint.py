"""Whether processes on several machines have built the same setup: equal versions, data, partition and model."""

from __future__ import annotations

import hashlib
import importlib.metadata
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import LaunchError
from shoal.experiment.setup import Setup


class SetupFingerprint(msgspec.Struct, frozen=True):
    """Versions, and hashes of the contents of a setup."""

    shoal: str
    torch: str
    data: str
    partition: str
    """The samples of each node."""
    model: str
    """The initial parameters."""
    first_step: str
    """The parameters after the first training step of node 0. They depend on the processor."""


REQUIRED = {
    "shoal": "the version of shoal",
    "torch": "the version of torch",
    "data": "the data set",
    "partition": "the partition of the data",
    "model": "the initial model",
}
"""What must be equal on all machines."""


def fingerprint(setup: Setup) -> SetupFingerprint:
    """Compute the fingerprint of a setup. This reads the complete data set and trains one step."""
    trained = setup.trainer(0).train(setup.initial, 1)
    return SetupFingerprint(
        shoal=importlib.metadata.version("shoal"),
        torch=importlib.metadata.version("torch"),
        data=data_hash(setup),
        partition=content_hash(setup.parts),
        model=content_hash([setup.initial]),
        first_step=content_hash([trained.params]),
    )


def data_hash(setup: Setup) -> str:
    """Hash the complete data set."""
    data = setup.data
    return content_hash(a for s in (data.train, data.test) for a in (s.x, s.y, s.owner) if a is not None)


def content_hash(arrays: Iterable[NDArray[Any]]) -> str:
    """Hash the types, shapes and values of arrays."""
    state = hashlib.blake2b(digest_size=8)
    for array in arrays:
        state.update(f"{array.dtype.str} {array.shape};".encode())
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def check_equal(fingerprints: Mapping[str, SetupFingerprint]) -> None:
    """Compare the setups of processes, which are given by name. Raises LaunchError for what must be equal and is not.

    Warns if processors compute different results: then the models are not bit-identical to those of one machine.
    """
    problems = [
        f"{what} differs: {_differences(fingerprints, field)}"
        for field, what in REQUIRED.items()
        if len({getattr(found, field) for found in fingerprints.values()}) > 1
    ]
    if problems:
        raise LaunchError("the workers of this run are not equal.\n  " + "\n  ".join(problems))
    if len({found.first_step for found in fingerprints.values()}) > 1:
        warnings.warn(
            "processors of the cluster round differently, so the models differ in their last bits from those of one "
            f"machine: {_differences(fingerprints, 'first_step')}",
            stacklevel=2,
        )


def _differences(fingerprints: Mapping[str, SetupFingerprint], field: str) -> str:
    """List each value with the processes that have it."""
    processes: dict[str, list[str]] = {}
    for name, found in fingerprints.items():
        processes.setdefault(getattr(found, field), []).append(name)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in processes.items())
