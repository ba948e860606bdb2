"""Load a class by its import path: `module:Class`, or `file.py:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal import schema


def load(name: str) -> Any:
    """Return the object at `module:name` or `file.py:name`. Raises ValueError with the reason."""
    module, where, attribute = _load_named(name)
    if not hasattr(module, attribute):
        raise ValueError(f"{where} has no {attribute!r}{schema.nearest(attribute, _defined_in(module))}")
    return getattr(module, attribute)


def load_class(name: str) -> type:
    """Return the class at `module:Class` or `file.py:Class`. Raises ValueError with the reason."""
    module, where, attribute = _load_named(name)
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        classes = [own for own, value in _defined_in(module).items() if isinstance(value, type)]
        hint = schema.nearest(attribute, classes) if classes else "; it defines no class"
        raise ValueError(f"{where} has no class {attribute!r}{hint}")
    return found


def _load_named(name: str) -> tuple[ModuleType, str, str]:
    """Return the module of an import path, the module's name or file as in the path, and the attribute."""
    where, _, attribute = name.rpartition(":")
    return (_load_file(Path(where)) if where.endswith(".py") else _load_module(where)), where, attribute


def _defined_in(module: ModuleType) -> dict[str, Any]:
    """Return what the module defines itself, without its imports."""
    return {n: value for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {name!r} failed: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
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
