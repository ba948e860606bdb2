"""Python pickles of bytes in arrays, read without running anything that they say.

A pickle is a program: whatever it names is imported, and called as it likes. This reader knows dictionaries, lists,
strings and numbers, and puts stand-ins of its own in the place of the four names with which numpy pickles an array.
A pickle that names anything else is refused before that is imported.
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
    """What `content` holds. Strings of Python 2 come as bytes, arrays as read-only numpy arrays of uint8.

    Raises `DataError`, which begins with `place`, for a pickle that is damaged or names what is not admitted.
    """
    try:
        _check_memo(content)
        return _arrays(_Unpickler(io.BytesIO(content), encoding="bytes").load(), {})
    except _RefusedError as refused:
        raise DataError(
            f"{place}: {refused}; expected numbers, strings, lists, dictionaries and arrays of bytes and nothing that "
            "could run: the file is not what was published"
        ) from None
    except Exception as error:  # the opcodes of a damaged pickle raise what they like
        raise DataError(
            f"{place}: not a pickle, or a damaged one ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _check_memo(content: bytes) -> None:
    """Objects are remembered in a table as long as their highest number, which a few bytes can set to billions."""
    for code, number, _ in pickletools.genops(content):
        if code.name in ("PUT", "LONG_BINPUT") and isinstance(number, int) and number > len(content):
            raise _RefusedError(f"the pickle numbers an object {reprlib.repr(number)}")


class _RefusedError(pickle.UnpicklingError):
    pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise _RefusedError(f"the pickle names {module[:100]}.{name[:100]}")
        return ADMITTED[module, name]


# None of the stand-ins has a `__dict__`, so that a pickle cannot hang anything on them.


class _Array:
    """What `numpy.ndarray` stands for: an array to be filled by its state."""

    __slots__ = ("value",)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _Kind) or kind.code not in ("u1", b"u1"):
            raise _RefusedError("the pickle holds an array of something other than bytes")
        if not isinstance(raw, bytes) or not all(type(n) is int and n >= 0 for n in shape):
            raise _RefusedError("the pickle holds an array whose content is no bytes")
        if math.prod(shape) != len(raw):
            raise _RefusedError(f"the pickle holds an array of shape {reprlib.repr(shape)} in {len(raw)} bytes")
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Kind:
    """What `numpy.dtype` stands for. Its state says how bytes are ordered, which single ones are not."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        pass


class _Reconstruct:
    """Makes an array to be filled, as `numpy.core.multiarray._reconstruct` does."""

    __slots__ = ()

    def __call__(self, kind: Any, shape: Any, code: Any) -> _Array:
        if kind is not _Array:
            raise _RefusedError("the pickle makes an array of a class of its own")
        return _Array()


class _Encode:
    """How Python 3 spells bytes in pickles that Python 2 can read: as text, in Latin-1."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise _RefusedError("the pickle asks for an encoding other than latin1")
        return text.encode("latin-1")


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),  # as numpy 2 spells it
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _Encode(),
}


def _arrays(value: Any, seen: dict[int, Any]) -> Any:
    """`value` with arrays in place of their stand-ins. Lists of numbers, which are long, stay as they are."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict) and id(value) not in seen:
        seen[id(value)] = value
        value.update({key: _arrays(inner, seen) for key, inner in value.items()})
    return value
