"""The modules of plug-in files, and the modules that lie beside a plug-in file.

A plug-in file imports the modules of its own folder by their names, as a script does. Two folders may have modules of
the same name: every folder has its own. So the folders are not on `sys.path`. In the code of these files, an import of
a module beside the plug-in is replaced by an import of the name that this module has in Shoal.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

MODULE_PREFIX = "shoal_plugin_"
"""How the names of modules begin that are loaded from a file."""
NEVER_BESIDE = frozenset({"shoal"})
"""Packages that a plug-in never takes from its own folder: it must get the classes of the Shoal that runs it."""
INIT = "__init__.py"
_importing: list[Path] = []


def main_script() -> Path | None:
    """Return the file of the running script; None in a notebook or an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file is not None and file.endswith(".py") and Path(file).is_file() else None


def file_being_imported() -> Path | None:
    """Return the file that is being loaded as a plug-in, or for a plug-in; None if none is."""
    return _importing[-1] if _importing else None


def import_file(path: Path) -> ModuleType:
    """Return the module of a plug-in file. Raises the errors of its code."""
    path = path.resolve()
    return importlib.import_module(_name_for(path, path.parent))


def is_loaded(path: Path) -> bool:
    """Whether this process has loaded the plug-in file. The file may have changed or been removed since."""
    return _loader_of(path) is not None


def source_of(path: Path) -> bytes:
    """Return the bytes of a plug-in file as this process has loaded it; if it has not, as it is on disk."""
    loader = _loader_of(path)
    return path.read_bytes() if loader is None else loader.source


def sources_of(path: Path) -> dict[str, bytes]:
    """Return the sources of a plug-in file and of the modules beside it that it needs, by their paths in its folder.

    These are the modules that an import statement names, anywhere in these files. Of a package, all files are needed.
    """
    path = path.resolve()
    found: dict[str, bytes] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        name = str(file.relative_to(path.parent))
        if name in found:
            continue
        found[name] = source_of(file)
        for module in _imported_names(found[name]):
            beside = _file_beside(path.parent, module)
            if beside is not None:
                waiting += sorted(beside.parent.rglob("*.py")) if beside.name == INIT else [beside]
    return dict(sorted(found.items()))


def file_with(cls: type) -> str:
    """Return the plug-in file that leads to a class, which a plug-in file or a module beside it defines.

    A file of a package cannot always be loaded without the package. So if a file beside the package has imported the
    class, it is this file.
    """
    loaders = _loaders()
    own = loaders.get(cls.__module__)
    if own is not None and Path(own.path).parent != own.folder:
        for name, loader in sorted(loaders.items(), key=lambda item: item[1].path):
            is_beside = loader.folder == own.folder == Path(loader.path).parent
            if is_beside and getattr(sys.modules[name], cls.__qualname__, None) is cls:
                return loader.path
    return str(sys.modules[cls.__module__].__file__)


def forget_changed_files(path: Path) -> None:
    """Forget the modules of a plug-in's folder if one of their files has changed since this process loaded it.

    The next import reads them again.
    """
    folder = path.resolve().parent
    loaded = {name: loader for name, loader in _loaders().items() if loader.folder == folder}
    if any(
        Path(loader.path).is_file() and Path(loader.path).read_bytes() != loader.source for loader in loaded.values()
    ):
        for name in loaded:
            del sys.modules[name]


def own_names(text: str) -> str:
    """Return a text with the names that the modules have in their own folder, in place of their names in Shoal."""
    return re.sub(rf"{MODULE_PREFIX}(\w+)_[0-9a-f]{{8}}\b", r"\1", text)


class _SourceLoader(SourceFileLoader):
    """Runs the bytes that it has read, and no compiled file of an earlier version."""

    def __init__(self, name: str, path: Path, folder: Path) -> None:
        super().__init__(name, str(path))
        self.source = path.read_bytes()
        self.folder = folder
        """The folder whose modules the file can import."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.source, self.path)
        for statement in ast.walk(tree):
            if isinstance(statement, ast.Import):
                statement.names = [name for alias in statement.names for name in self._changed(alias)]
            elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                statement.module = self._name_of(statement.module) or statement.module
        code: CodeType = self.source_to_code(tree, self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        _importing.append(Path(self.path))
        try:
            super().exec_module(module)
        finally:
            _importing.pop()

    def _changed(self, alias: ast.alias) -> list[ast.alias]:
        """Return what to import instead of `alias`, and the name that it gets."""
        top, dot, _ = alias.name.partition(".")
        name = self._name_of(alias.name)
        if name is None:
            return [alias]
        if dot and alias.asname is None:  # `import package.module` makes the name `package` known
            changed = [ast.alias(name), ast.alias(name.partition(".")[0], top)]
        else:
            changed = [ast.alias(name, alias.asname or top)]
        return [ast.copy_location(new, alias) for new in changed]

    def _name_of(self, module: str) -> str | None:
        """Return the name in Shoal of a module that lies beside the plug-in; None if none does."""
        top, dot, rest = module.partition(".")
        file = _file_beside(self.folder, top)
        if file is None or str(file) == self.path != str(self.folder / top / INIT):
            return None  # numpy.py, which imports numpy, does not mean itself
        return f"{_name_for(file, self.folder)}{dot}{rest}"


class _PluginImporter:
    """Finds the modules of plug-in files for Python's import system."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[Path, Path]] = {}
        """By name: the file of a module, and the folder whose modules it can import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, dot, _ = name.partition(".")
        if top not in self.files:
            return None
        file, folder = self.files[top]
        if dot:  # a module of a package, which `path` leads to
            inner = [_file_in(Path(entry), name.rpartition(".")[2]) for entry in path or ()]
            found = next((file for file in inner if file is not None), None)
            if found is None:
                return None
            file = found
        return importlib.util.spec_from_file_location(name, file, loader=_SourceLoader(name, file, folder))


_importer = _PluginImporter()
sys.meta_path.insert(0, _importer)  # before Python looks for the modules of a package


def _name_for(path: Path, folder: Path) -> str:
    """Return the name under which Python imports a plug-in file, or a module beside it."""
    if path == main_script():
        return "__main__"  # to run the script again would start its run again
    own_name = path.parent.name if path.name == INIT else path.stem
    if _is_imported_by_script(own_name, path, folder):
        return own_name  # a second copy would have other classes
    without_dots = own_name.replace(".", "_")  # Python would look for a package
    name = f"{MODULE_PREFIX}{without_dots}_{zlib.crc32(str(path).encode()):08x}"
    _importer.files[name] = path, folder
    return name


def _is_imported_by_script(name: str, path: Path, folder: Path) -> bool:
    """Whether the running script, which is in this folder, has imported the module of a file by its own name."""
    script = main_script()
    file = getattr(sys.modules.get(name), "__file__", None)
    return script is not None and script.parent == folder and file is not None and Path(file).resolve() == path


def _loaders() -> Mapping[str, _SourceLoader]:
    """Return the loaders of the modules that this process has loaded from plug-in files, by name."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.startswith(MODULE_PREFIX)]
    loaders = {name: getattr(module, "__loader__", None) for name, module in modules}
    return {name: loader for name, loader in loaders.items() if isinstance(loader, _SourceLoader)}


def _loader_of(path: Path) -> _SourceLoader | None:
    file = str(path.resolve())
    return next((loader for loader in _loaders().values() if loader.path == file), None)


def _file_beside(folder: Path, module: str) -> Path | None:
    """Return the file of a module, or of a package, that a plug-in takes from its folder; None if there is none."""
    return None if module in NEVER_BESIDE else _file_in(folder, module)


def _file_in(folder: Path, module: str) -> Path | None:
    """Return the file of a module, or of a package, in a folder; None if there is none."""
    files = (folder / module / INIT, folder / f"{module}.py")
    return next((file for file in files if file.is_file()), None)


def _imported_names(source: bytes) -> Iterator[str]:
    """Yield the packages that a source imports; none if it has a syntax error, which its import reports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module.partition(".")[0]
