"""Whether a method that computes for many nodes still does what the methods for one node do."""

from __future__ import annotations

from functools import cache

METADATA = frozenset(
    [
        "__abstractmethods__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    ]
)
"""Entries of a class that Python creates itself."""


def knows_overrides(instance: object, method: str, unrelated: frozenset[str]) -> bool:
    """Return whether `method`, which repeats what other methods do, takes everything into account that they do.

    The class that defines `method` knows itself and its bases. A class below it may change what `method` repeats, by
    whatever it defines: another `train`, or a property `data` in place of an attribute. So it may define nothing but
    names in `unrelated`, unless it defines `method` too. A method that is replaced in the instance counts as well.
    """
    cls: type = type(instance)
    return _defines_nothing_below(cls, method, unrelated) and _methods(cls, unrelated).isdisjoint(
        getattr(instance, "__dict__", ())
    )


@cache
def _defines_nothing_below(cls: type, method: str, unrelated: frozenset[str]) -> bool:
    for below in cls.__mro__:
        if method in vars(below):
            return True
        if vars(below).keys() - METADATA - unrelated:
            return False
    return False


@cache
def _methods(cls: type, unrelated: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in dir(cls) if name not in unrelated and callable(getattr(cls, name, None)))
