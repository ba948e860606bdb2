"""The files that an experiment names, and the table of the experiment with their names on another machine.

Data sets are not sent: every machine has its own copy, and the copies are compared.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from shoal.engines.processes.remote.protocol import SourceFile
from shoal.errors import LaunchError
from shoal.experiment import Experiment
from shoal.experiment.plugin_files import map_strings
from shoal.experiment.resolving import locate
from shoal.plugin_modules import sources_of
from shoal.plugins import split_file

MAX_BYTES = 64 * 2**20
"""The most bytes of all files of an experiment."""
NOT_SENT = ("dataset", "processes")
"""Tables whose files are not sent: data sets, and keys."""


class Shipment:
    """The files of one experiment."""

    def __init__(self, experiment: Experiment) -> None:
        """Raises `LaunchError` if the files are too large."""
        self.files: list[SourceFile] = []
        self._base = experiment.base
        self._names: dict[tuple[Path, str], str] = {}
        """The new names of files, by folder and path in it. A file may be in a folder and in a package of another."""
        self._folders: dict[Path, int] = {}
        self._bytes = 0
        table = experiment.to_table()
        self.table: dict[str, Any] = {
            key: self._dataset(value) if key == "dataset" else value if key in NOT_SENT else self._renamed(value)
            for key, value in table.items()
        }
        """The experiment, with paths relative to the folder of the files."""

    def _dataset(self, table: dict[str, Any]) -> dict[str, Any]:
        """Only plug-ins of the data set, its partition and its augmentation are sent."""
        sent = ("name", "partition", "augmentation")
        return {key: self._renamed(value) if key in sent else value for key, value in table.items()}

    def _renamed(self, value: Any) -> Any:
        return map_strings(value, self._renamed_text)

    def _renamed_text(self, value: str) -> str:
        if not ("." in value or "/" in value):
            return value
        if plugin := split_file(value):
            path = locate(plugin[0], self._base)
            for name, source in sources_of(path).items():
                self._add(path.parent, name, source)
            return f"{self._names[path.parent, path.name]}:{plugin[1]}"
        path = locate(Path(value), self._base)
        return self._add(path.parent, path.name, path.read_bytes()) if _is_file(path) else value

    def _add(self, folder: Path, name: str, content: bytes) -> str:
        """Add a file of a folder, and return its new name. Files of one folder stay in one folder."""
        if (folder, name) not in self._names:
            self._bytes += len(content)
            if self._bytes > MAX_BYTES:
                raise LaunchError(
                    f"the files that the experiment names are larger than {MAX_BYTES // 2**20} MiB with "
                    f"{str(folder / name)!r}: only data sets can be larger, which every machine must have"
                )
            new = self._names[folder, name] = f"{self._folders.setdefault(folder, len(self._folders))}/{name}"
            self.files.append(SourceFile(new, hashlib.sha256(content).hexdigest(), content))
        return self._names[folder, name]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
