"""Arrays that are given in Python. They are written once to the cache, named by their content."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.decoded import cache_folder
from shoal.errors import DataError

NAMES = {2: ("x", "y"), 4: ("x_train", "y_train", "x_test", "y_test")}
"""The names of the arrays, by their number."""
EXPECTED = (
    "expected (x_train, y_train, x_test, y_test), or (x, y), as arrays of NumPy or tensors of torch; for other data "
    "write a data set of your own: docs/data.md"
)


def store_arrays(given: object) -> dict[str, Any]:
    """Write arrays, unless the cache has them, and return the table of their data set.

    Targets that are no integers are those of a regression. Raises ValueError if these are not arrays.
    """
    if not isinstance(given, tuple | list):
        text = f"an array of shape {tuple(given.shape)}" if hasattr(given, "shape") else repr(given)
        raise ValueError(f"{text}: expected a table with a name, such as {{ name = … }}; for arrays, {EXPECTED}")
    names = NAMES.get(len(given))
    if names is None or not all(hasattr(array, "shape") for array in given):
        raise ValueError(EXPECTED)
    arrays = {name: _array(value, name.startswith("x")) for name, value in zip(names, given, strict=True)}
    for x, y in zip(names[::2], names[1::2], strict=True):
        if len(arrays[x]) != len(arrays[y]):
            raise ValueError(f"{x} has {len(arrays[x])} samples and {y} has {len(arrays[y])}; expected as many")
    folder = cache_folder().with_name("arrays") / _hash(arrays)
    if not folder.is_dir():
        _write(arrays, folder)
    table: dict[str, Any] = {"name": "arrays", "path": str(folder.resolve())}
    return {**table, "task": "regression"} if arrays[names[1]].dtype.kind == "f" else table


def _array(value: Any, is_input: bool) -> NDArray[Any]:
    """Return an array or a tensor as an array of the type that the data set needs."""
    array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"an array of {array.dtype}; {EXPECTED}")
    if array.ndim == 0:
        raise ValueError(f"an array without axes; {EXPECTED}")
    if is_input:
        return np.ascontiguousarray(array, np.uint8 if array.dtype == np.uint8 else np.float32)
    return np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else np.int64)


def _hash(arrays: dict[str, NDArray[Any]]) -> str:
    state = hashlib.sha256()
    for name, array in arrays.items():
        state.update(f"{name} {array.dtype.str} {array.shape};".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()[:32]


def _write(arrays: dict[str, NDArray[Any]], folder: Path) -> None:
    unfinished = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(unfinished / f"{name}.npy", array, allow_pickle=False)
        unfinished.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process was faster and wrote the same
            raise DataError(
                f"cannot write the arrays to {folder}: {error.strerror}; set SHOAL_CACHE to a folder with write access"
            ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
