"""Load a class by its import path: `module:Class`, or `file.py:Class`."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal import schema
from shoal.plugin_modules import (
    INIT,
    MODULE_PREFIX,
    file_with,
    forget_changed_files,
    import_file,
    is_loaded,
    main_script,
    own_names,
    sources_of,
)

TORCH_MODULE = "torch.nn.modules.module"
"""The module of Python that defines `torch.nn.Module`."""


def split_file(name: str) -> tuple[Path, str] | None:
    """Return the file and the attribute of `file.py:attribute`; None for another name."""
    file, separator, attribute = name.rpartition(":")
    return (Path(file), attribute) if separator and file.endswith(".py") else None


def forget_changed(name: str) -> None:
    """Forget a plug-in file if it, or a module beside it, has changed since this process loaded it.

    The next `load` reads the files again.
    """
    if (found := split_file(name)) is not None:
        forget_changed_files(found[0])


def load(name: str) -> Any:
    """Return the object at `module:name` or `file.py:name`. Raises ValueError with the reason."""
    module, where, attribute = _load_named(name)
    if not hasattr(module, attribute):
        raise ValueError(f"{where} has no {attribute!r}{schema.nearest(attribute, _nameable_in(module))}")
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


def is_module_class(cls: type) -> bool:
    """Whether a class is one of `torch.nn.Module`. This does not import torch."""
    return any((base.__module__, base.__name__) == (TORCH_MODULE, "Module") for base in cls.__mro__)


def import_path(cls: type) -> str | None:
    """Return the path of a class, `module:Class` or `file.py:Class`; None if no path leads to it.

    There is none for a class inside a function or another class, or if another class has its name by now.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or getattr(module, cls.__qualname__, None) is not cls:
        return None
    if cls.__module__.startswith(MODULE_PREFIX):
        return f"{file_with(cls)}:{cls.__qualname__}"
    file = _file_beside_script(module)
    return f"{cls.__module__ if file is None else file}:{cls.__qualname__}"


def _file_beside_script(module: ModuleType) -> Path | None:
    """Return the file of the running script, or of a module in its folder: other processes cannot import it by name."""
    script = main_script()
    if script is None or module.__name__ == "__main__":
        return script
    path = script.parent / f"{module.__name__}.py"
    file = getattr(module, "__file__", None)
    return path if file is not None and Path(file).resolve() == path else None


def _load_named(name: str) -> tuple[ModuleType, str, str]:
    """Return the module of an import path, the module's name or file as in the path, and the attribute."""
    where, _, attribute = name.rpartition(":")
    return (_load_file(Path(where)) if split_file(name) else _load_module(where)), where, attribute


def _defined_in(module: ModuleType) -> dict[str, Any]:
    """Return what the module defines itself, without its imports."""
    return {n: value for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}


def _nameable_in(module: ModuleType) -> list[str]:
    """Return the names of what the module defines itself, and of its objects, such as a Flower `ClientApp`."""
    defined = _defined_in(module)
    return [
        name
        for name, value in vars(module).items()
        if name in defined
        or not (name.startswith("_") or inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value))
    ]


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        advice = f"; for the file {name}.py, write {name}.py:…" if Path(f"{name}.py").is_file() else ""
        raise ValueError(f"importing {name!r} failed: {type(error).__name__}: {error}{advice}") from error


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not is_loaded(path) and not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    try:
        return import_file(path)
    except (Exception, SystemExit) as error:
        text = f"{str(path)!r} raised on import: {type(error).__name__}: {own_names(str(error))}"
        raise ValueError(f"{text}{_line(error, path)}{_advice(error, path)}") from error


def _line(error: BaseException, path: Path) -> str:
    """Return the line that raised an error, as text: of a plug-in file, or of a module beside it.

    The text is empty if the error already contains the line.
    """
    files = {str(path.parent / name) for name in sources_of(path)}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not frames:
        return ""
    last = frames[-1]
    return f" (line {last.lineno})" if last.filename == str(path) else f" (line {last.lineno} of {last.filename!r})"


def _advice(error: BaseException, path: Path) -> str:
    """Return what to do about a module that a plug-in cannot import, but that exists."""
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "; a plug-in file imports the modules beside it without a dot: from module import name"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    name = error.name.partition(".")[0]
    if (path.parent / name).is_dir():
        return f"; the folder {name} beside this file is not a package: add an empty file {name}/{INIT}"
    here = next((file for file in (Path(f"{name}.py"), Path(name, INIT)) if file.is_file()), None)
    if here is None:
        return ""
    return (
        f"; {str(here)!r} is in the working folder, but a plug-in imports modules of its own folder and installed "
        f"ones only: move it to {str(path.parent)!r}, or install it as a package"
    )
