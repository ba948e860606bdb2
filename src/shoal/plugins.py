"""Load a class by its import path: `module:Class`, or `file.py:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from typing import Any

from shoal import schema


def load(name: str) -> Any:
    """Return the object at `module:name` or `file.py:name`. Raises ValueError with the reason."""
    where, _, attribute = name.rpartition(":")
    loaded = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    if not hasattr(loaded, attribute):
        own = [n for n, thing in vars(loaded).items() if getattr(thing, "__module__", None) == loaded.__name__]
        raise ValueError(f"{where} has no {attribute!r}{schema.nearest(attribute, own)}")
    return getattr(loaded, attribute)


def load_class(name: str, base: Path | None = None) -> type:
    """Return the class at `module:Class` or `file.py:Class`; a file is relative to `base`.

    Raises ValueError with the reason.
    """
    where, attribute = name.rsplit(":", 1)
    loaded = _load_file(Path(base or ".", where)) if where.endswith(".py") else _load_module(where)
    found = getattr(loaded, attribute, None)
    if not isinstance(found, type):
        classes = [n for n, c in vars(loaded).items() if isinstance(c, type) and c.__module__ == loaded.__name__]
        hint = schema.nearest(attribute, classes) if classes else "; it defines no class"
        raise ValueError(f"{where} has no class {attribute!r}{hint}")
    return found


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {name!r} failed: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> Any:
    path = path.resolve()
    name = f"shoal_plugin_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, because dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{str(path)!r} raised on import: {type(error).__name__}: {error}") from error
    return module
