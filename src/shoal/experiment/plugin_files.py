"""The plug-in files of an experiment, and the copies that a run keeps of them.

experiment.toml of a run names the copies in the folder `plugins` beside it. Its table `plugins` has their SHA-256, so
that the run can be repeated on another machine, or after the original files have changed.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.experiment.resolving import locate
from shoal.plugins import is_loaded, source_of, split_file
from shoal.results.records import replacing

if TYPE_CHECKING:
    from shoal.experiment.experiment import Experiment

PLUGINS = "plugins"
"""The folder of the copies, and the table of their hashes."""


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with every string in it replaced, at any depth; keys of tables stay."""
    if isinstance(value, dict):
        return {key: map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [map_strings(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def rename_plugin_files(table: Mapping[str, Any], base: Path, rename: Callable[[Path], str]) -> dict[str, Any]:
    """Replace the file in each `file.py:name` of an experiment's table, with components in components and groups.

    `rename` gets absolute paths. A name stays if there is no such file.
    """

    def renamed(text: str) -> str:
        if (found := split_file(text)) is None:
            return text
        path = locate(found[0], base)
        return f"{rename(path)}:{found[1]}" if is_loaded(path) or path.is_file() else text

    changed: dict[str, Any] = map_strings(dict(table), renamed)
    return changed


def keep_plugin_files(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """Copy the plug-in files of an experiment into the folder of its run. Return the table that names the copies.

    A copy has the code that this process has loaded. Warns of a file that needs other files of its folder: they are not
    copied.
    """
    hashes: dict[str, str] = {}
    originals: dict[str, Path] = {}

    def keep(path: Path) -> str:
        name = _name_of_copy(path, folder.resolve(), originals)
        source = source_of(path)
        hashes[name] = hashlib.sha256(source).hexdigest()
        if not (folder / name).exists():
            _warn_of_modules(path, source)
            with replacing(folder / name) as unfinished:
                unfinished.parent.mkdir(parents=True, exist_ok=True)
                unfinished.write_bytes(source)
        return name

    table = rename_plugin_files(experiment.to_table(), experiment.base, keep)
    return {**table, PLUGINS: hashes} if hashes else table


def _name_of_copy(path: Path, folder: Path, originals: dict[str, Path]) -> str:
    """Return the path of a copy in `folder`. Files of the same name are in folders of their own."""
    if path.is_relative_to(folder):
        return str(path.relative_to(folder))
    names = [f"{PLUGINS}/{path.name}", *(f"{PLUGINS}/{i}/{path.name}" for i in range(2, len(originals) + 3))]
    name = next(name for name in names if originals.get(name, path) == path)
    originals[name] = path
    return name


def with_plugin_hashes(experiment: Experiment) -> dict[str, Any]:
    """Return the table of an experiment for another process, which rejects plug-in files that have changed since."""
    hashes: dict[str, str] = {}

    def add(path: Path) -> str:
        hashes[str(path)] = hashlib.sha256(source_of(path)).hexdigest()
        return str(path)

    table = rename_plugin_files(experiment.to_table(), experiment.base, add)
    return {**table, PLUGINS: hashes} if hashes else table


def locate_kept_files(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the table in the folder of a run with absolute paths of the run's copies."""
    folder = folder.resolve()
    hashes = {str(folder / name): expected for name, expected in table.get(PLUGINS, {}).items()}
    located = rename_plugin_files(table, folder, str)
    return {**located, PLUGINS: hashes} if hashes else located


def changed_plugin_files(hashes: object, base: Path) -> list[str]:
    """Return the problems of plug-in files whose SHA-256 is not the expected one. The resolver reports missing ones."""
    if not isinstance(hashes, Mapping) or not all(isinstance(expected, str) for expected in hashes.values()):
        return [f"{PLUGINS} = {hashes!r}: expected a table of files and their SHA-256, which a run writes"]
    problems = []
    for name, expected in hashes.items():
        path = base / name
        if path.is_file() and (found := hashlib.sha256(path.read_bytes()).hexdigest()) != expected:
            problems.append(
                f"{PLUGINS}: {name!r} has changed since the run began: its SHA-256 is {found}, expected {expected}; "
                f"restore the file or, to run the changed code, remove its line from the table {PLUGINS!r}"
            )
    return problems


def _warn_of_modules(path: Path, source: bytes) -> None:
    """Warn if a plug-in file imports modules of its own folder: a run keeps, and agents get, the named files only."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # a file that is not loaded yet: its loader reports the error
    imported: set[str] = set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            imported.add(statement.module.partition(".")[0])
    beside = [f"{name}.py" for name in sorted(imported) if (path.parent / f"{name}.py").is_file()]
    beside += [f"{name}/" for name in sorted(imported) if (path.parent / name / "__init__.py").is_file()]
    if beside:
        warnings.warn(
            f"plug-in {path.name!r} imports {', '.join(beside)} from its own folder: the run keeps no copy of it, and "
            "agents do not get it; put the code into one file, or install it as a package",
            stacklevel=4,
        )
