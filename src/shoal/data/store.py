"""Where data sets lie, as their publishers give them: a folder for each below SHOAL_DATA."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from shoal.errors import DataError


def data_folder() -> Path:
    """Where data sets are looked for and downloaded to: SHOAL_DATA, or the platform's place for data."""
    return Path(os.environ.get("SHOAL_DATA") or Path(platformdirs.user_data_dir("shoal"), "data"))


def located(dataset: str, names: Sequence[str], path: Path | None = None) -> Path:
    """The first of `names`, files or folders, that is there: in `path`, or in the folder of the data set.

    Raises `DataError` that says where it was looked for and how to get it.
    """
    folder = path or data_folder() / dataset
    if path is not None and path.is_file():
        return path
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise DataError(
        f"dataset {dataset!r}: none of {', '.join(names)} is in {folder}; 'shoal data fetch {dataset}' downloads it, "
        f"or put it there by hand (SHOAL_DATA is where data sets are looked for)"
    )
