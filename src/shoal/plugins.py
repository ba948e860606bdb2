"""Load a class by its import path: `module:Class`, or `file.py:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
import zlib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from shoal import schema

MODULE_PREFIX = "shoal_plugin_"
"""How the names of modules begin that are loaded from a file."""
SOURCE = "__plugin_source__"
"""The attribute of a loaded plug-in file that has the bytes of the file."""
TORCH_MODULE = "torch.nn.modules.module"
"""The module of Python that defines `torch.nn.Module`."""
_importing: list[Path] = []


def split_file(name: str) -> tuple[Path, str] | None:
    """Return the file and the attribute of `file.py:attribute`; None for another name."""
    file, separator, attribute = name.rpartition(":")
    return (Path(file), attribute) if separator and file.endswith(".py") else None


def is_loaded(path: Path) -> bool:
    """Whether this process has loaded the plug-in file. The file may have changed or been removed since."""
    return _module_name(path.resolve()) in sys.modules


def source_of(path: Path) -> bytes:
    """Return the bytes of a plug-in file as this process has loaded it; if it has not, as it is on disk."""
    if not is_loaded(path):
        return path.read_bytes()
    source: bytes = vars(sys.modules[_module_name(path.resolve())])[SOURCE]
    return source


def forget_changed(name: str) -> None:
    """Forget a plug-in file that has changed since this process loaded it, so that the next `load` reads it again."""
    found = split_file(name)
    if (
        found is not None
        and is_loaded(found[0])
        and found[0].is_file()
        and found[0].read_bytes() != source_of(found[0])
    ):
        del sys.modules[_module_name(found[0].resolve())]


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


def is_module_class(cls: type) -> bool:
    """Whether a class is one of `torch.nn.Module`. This does not import torch."""
    return any((base.__module__, base.__name__) == (TORCH_MODULE, "Module") for base in cls.__mro__)


def main_script() -> Path | None:
    """Return the file of the running script; None in a notebook or an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file is not None and file.endswith(".py") and Path(file).is_file() else None


def import_path(cls: type) -> str | None:
    """Return the path of a class, `module:Class` or `file.py:Class`; None if no path leads to it.

    There is none for a class inside a function or another class, or if another class has its name by now.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or getattr(module, cls.__qualname__, None) is not cls:
        return None
    if cls.__module__.startswith(MODULE_PREFIX):
        return f"{module.__file__}:{cls.__qualname__}"
    file = _file_beside_script(module)
    return f"{cls.__module__ if file is None else file}:{cls.__qualname__}"


def file_being_imported() -> Path | None:
    """Return the file that is being loaded as a plug-in; None if none is."""
    return _importing[-1] if _importing else None


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


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        advice = f"; for the file {name}.py, write {name}.py:…" if Path(f"{name}.py").is_file() else ""
        raise ValueError(f"importing {name!r} failed: {type(error).__name__}: {error}{advice}") from error


def _module_name(path: Path) -> str:
    return f"{MODULE_PREFIX}{path.stem}_{zlib.crc32(str(path).encode()):08x}"


class _SourceLoader(SourceFileLoader):
    """Runs the bytes that it has read, and no compiled file of an earlier version."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, str(path))
        self.source = path.read_bytes()

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if path == main_script():
        return sys.modules["__main__"]  # to run the script again would start its run again
    imported = sys.modules.get(path.stem)
    if imported is not None and _file_beside_script(imported) == path:
        return imported  # the script has imported it: a second copy would have other classes
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    loader = _SourceLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    vars(module)[SOURCE] = loader.source
    sys.modules[name] = module  # before it runs, because dataclasses look up their module
    _importing.append(path)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        text = f"{str(path)!r} raised on import: {type(error).__name__}: {error}"
        raise ValueError(f"{text}{_line(error, path)}{_advice(error, path)}") from error
    finally:
        _importing.pop()
    return module


def _line(error: BaseException, path: Path) -> str:
    """Return the line of a plug-in file that raised an error, as text; empty if the error already contains it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""


def _advice(error: BaseException, path: Path) -> str:
    """Return what to do about a module that is missing, but is in the folder of the plug-in."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    name = error.name.partition(".")[0]
    if not (path.parent / f"{name}.py").is_file() and not (path.parent / name).is_dir():
        return ""
    return (
        f"; {name} is in the folder of this file, which Python does not search: put the code into one file, "
        f"install {name} as a package, or set the environment variable PYTHONPATH={path.parent}"
    )
