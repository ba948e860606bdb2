"""The plug-in files of an experiment, and the copies that a run keeps of them.

experiment.toml of a run names the copies in the folder `plugins` beside it. Its table `plugins` has their SHA-256, so
that the run can be repeated on another machine, or after the original files have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.experiment.resolving import locate
from shoal.plugin_modules import is_loaded, sources_of
from shoal.plugins import split_file
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

    The modules beside a plug-in file that it imports are copied with it. A copy has the code that this process has
    loaded.
    """
    hashes: dict[str, str] = {}
    folders: dict[str, Path] = {}

    def keep(path: Path) -> str:
        copies = _folder_of_copies(path.parent, folder.resolve(), folders)
        for name, source in sources_of(path).items():
            copy = str(copies / name)
            hashes[copy] = hashlib.sha256(source).hexdigest()
            if not (folder / copy).exists():
                with replacing(folder / copy) as unfinished:
                    unfinished.parent.mkdir(parents=True, exist_ok=True)
                    unfinished.write_bytes(source)
        return str(copies / path.name)

    table = rename_plugin_files(experiment.to_table(), experiment.base, keep)
    return {**table, PLUGINS: hashes} if hashes else table


def _folder_of_copies(original: Path, run: Path, folders: dict[str, Path]) -> Path:
    """Return the path in the folder of a run for the files of one folder. Every original folder has one of its own."""
    if original.is_relative_to(run):
        return original.relative_to(run)
    names = [PLUGINS, *(f"{PLUGINS}/{i}" for i in range(2, len(folders) + 3))]
    name = next(name for name in names if folders.get(name, original) == original)
    folders[name] = original
    return Path(name)


def hash_plugin_file(path: Path) -> str:
    """Return a hash of a plug-in file and of the modules beside it that it imports. Their folder does not count."""
    hashes = {name: hashlib.sha256(source).hexdigest() for name, source in sources_of(path).items()}
    if len(hashes) == 1:
        return hashes[path.name]
    return hashlib.sha256(json.dumps([path.name, hashes]).encode()).hexdigest()


def with_plugin_hashes(experiment: Experiment) -> dict[str, Any]:
    """Return the table of an experiment for another process, which rejects plug-in files that have changed since."""
    hashes: dict[str, str] = {}

    def add(path: Path) -> str:
        for name, source in sources_of(path).items():
            hashes[str(path.parent / name)] = hashlib.sha256(source).hexdigest()
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
