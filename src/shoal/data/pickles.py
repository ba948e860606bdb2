"""A restricted reader of Python pickles of byte arrays. It never runs code of a pickle.

A pickle is a program: it can import and call anything. This reader accepts dictionaries, lists, strings and numbers. It
replaces the names with which numpy pickles an array by classes of its own. A pickle with any other name is rejected
before anything is imported.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import reprlib
from typing import Any

import numpy as np

from shoal.errors import DataError


def read_pickle(content: bytes, place: str) -> Any:
    """Return the object in `content`. Strings of Python 2 become bytes, arrays read-only numpy arrays of uint8.

    Raises `DataError`, which starts with `place`, if the pickle is damaged or contains a name that is not allowed.
    """
    try:
        _check_memo(content)
        return _arrays(_Unpickler(io.BytesIO(content), encoding="bytes").load(), {})
    except _RejectedError as rejected:
        raise DataError(
            f"{place}: {rejected}; expected numbers, strings, lists, dictionaries and arrays of bytes and nothing that "
            "could run: the file is not the published one"
        ) from None
    except Exception as error:  # the opcodes of a damaged pickle may raise anything
        raise DataError(
            f"{place}: not a pickle, or a damaged one ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _check_memo(content: bytes) -> None:
    """Reject huge memo indices. The memo table is as long as the highest index; a few bytes can set it to billions."""
    for code, number, _ in pickletools.genops(content):
        if code.name in ("PUT", "LONG_BINPUT") and isinstance(number, int) and number > len(content):
            raise _RejectedError(f"the pickle has the memo index {reprlib.repr(number)}")


class _RejectedError(pickle.UnpicklingError):
    pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise _RejectedError(f"the pickle names {module[:100]}.{name[:100]}")
        return ALLOWED[module, name]


# None of these classes has a `__dict__`, so that a pickle cannot attach anything to them.


class _Array:
    """Stands for `numpy.ndarray`: an array that `__setstate__` fills."""

    __slots__ = ("value",)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _DType) or kind.code not in ("u1", b"u1"):
            raise _RejectedError("the pickle holds an array of another type than bytes")
        if not isinstance(raw, bytes) or not all(type(n) is int and n >= 0 for n in shape):
            raise _RejectedError("the pickle holds an array whose content is not bytes")
        if math.prod(shape) != len(raw):
            raise _RejectedError(f"the pickle holds an array of shape {reprlib.repr(shape)} in {len(raw)} bytes")
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _DType:
    """Stands for `numpy.dtype`. Its state is the byte order, which single bytes do not have."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        pass


class _Reconstruct:
    """Stands for `numpy.core.multiarray._reconstruct`: creates an empty array."""

    __slots__ = ()

    def __call__(self, kind: Any, shape: Any, code: Any) -> _Array:
        if kind is not _Array:
            raise _RejectedError("the pickle creates an array of another class")
        return _Array()


class _Encode:
    """Stands for `_codecs.encode`: Python 3 writes bytes as Latin-1 text in pickles for Python 2."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise _RejectedError("the pickle uses another encoding than latin1")
        return text.encode("latin-1")


ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),  # numpy 2
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _Encode(),
}


def _arrays(value: Any, seen: dict[int, Any]) -> Any:
    """Replace each `_Array` by its array. Lists are not searched, because they are long and hold numbers only."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict) and id(value) not in seen:
        seen[id(value)] = value
        value.update({key: _arrays(inner, seen) for key, inner in value.items()})
    return value
