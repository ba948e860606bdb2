"""Files that hold the state of one node: arrays as tensors of safetensors, everything else as JSON in its metadata.

Nothing is unpickled: a state contains numbers, strings, None, arrays, and lists, tuples and dictionaries of these.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from shoal.errors import CheckpointError
from shoal.results.records import replacing

ARRAY = "array"
"""The one key of a table that stands for an array. Its value is the name of the tensor."""
TUPLE = "tuple"
"""The one key of a table that stands for a tuple. Its value is the list of its items."""
PAIRS = "pairs"
"""The one key of a table that stands for a dictionary which JSON cannot hold, or which looks like one of these tables.
Its value is the list of its keys and values."""
STATE = "state"
"""The key of the metadata that holds the rest of the state."""


class StateFile(msgspec.Struct, frozen=True):
    """The size and the hash of a file that was written."""

    size: int
    sha256: str


def write_state(path: str | Path, state: dict[str, Any]) -> StateFile:
    """Write a state atomically. Raises `StorageError` if the file cannot be written."""
    arrays, rest = split(state)
    content = save(arrays, {STATE: json.dumps(rest)})
    with replacing(os.fspath(path)) as unfinished:
        os.makedirs(os.path.dirname(unfinished) or ".", exist_ok=True)
        with open(unfinished, "wb") as file:
            file.write(content)
    return StateFile(len(content), hashlib.sha256(content).hexdigest())


def read_state(path: Path) -> dict[str, Any]:
    """Read the state that `write_state` wrote. Raises `CheckpointError` if the file is missing or damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - not a mapping
            rest = json.loads((file.metadata() or {})[STATE])
        state: dict[str, Any] = join(rest, arrays)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return state


def matches(path: Path, written: StateFile) -> bool:
    """Whether a file has the content that was written."""
    try:
        if path.stat().st_size != written.size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == written.sha256
    except OSError:
        return False


def split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a state by name, and the state as JSON can hold it, with a table in place of every array.

    Raises TypeError, with the place in the state, for a value of another type.
    """
    arrays: dict[str, Any] = {}
    return arrays, _encode(state, "", arrays)


def join(value: Any, arrays: dict[str, Any]) -> Any:
    """Undo `split`."""
    if isinstance(value, list):
        return [join(inner, arrays) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {ARRAY}:
        return arrays[value[ARRAY]]
    if value.keys() == {TUPLE}:
        return tuple(join(value[TUPLE], arrays))
    if value.keys() == {PAIRS}:
        return {join(key, arrays): join(inner, arrays) for key, inner in value[PAIRS]}
    return {key: join(inner, arrays) for key, inner in value.items()}


def _encode(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """Return `value` as JSON can hold it, and add its arrays to `arrays`."""
    if isinstance(value, np.ndarray | np.generic):
        while name in arrays:  # keys may contain slashes
            name += "'"
        arrays[name] = np.ascontiguousarray(value) if value.ndim else np.asarray(value)
        return {ARRAY: name}
    if isinstance(value, dict):
        encoded = [(key, _encode(inner, f"{name}/{key}", arrays)) for key, inner in value.items()]
        if all(isinstance(key, str) for key in value) and not any(
            value.keys() == {key} for key in (ARRAY, TUPLE, PAIRS)
        ):
            return dict(encoded)
        return {PAIRS: [[_encode(_plain_key(key), name, arrays), inner] for key, inner in encoded]}
    if isinstance(value, list | tuple):
        items = [_encode(inner, f"{name}/{i}", arrays) for i, inner in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{name}: a checkpoint cannot hold a value of type {type(value).__name__}; use arrays, numbers, strings, None, "
        "and lists, tuples and dictionaries of these"
    )


def _plain_key(key: Any) -> Any:
    """Return a key with the numbers of Python that equal its numbers of NumPy: an array cannot be a key."""
    if isinstance(key, tuple):
        return tuple(_plain_key(item) for item in key)
    return key.item() if isinstance(key, np.generic) else key
