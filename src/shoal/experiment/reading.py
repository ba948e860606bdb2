"""TOML files of users: experiments, and other files that begin with one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from shoal.errors import ExperimentError


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises `ExperimentError` with the reason if that is not possible."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ExperimentError([f"there is no file {str(path)!r}"], str(path)) from None
    except IsADirectoryError:
        raise ExperimentError([f"{str(path)!r} is a folder; expected a TOML file"], str(path)) from None
    except OSError as error:
        raise ExperimentError([f"{str(path)!r} cannot be read: {error.strerror}"], str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError([f"not valid TOML: {error}"], str(path)) from None


def name_of(path: Path) -> str:
    """Return the name that an experiment has if its file gives none: that of the file."""
    return re.sub(r"^\W+|[^\w.+-]", "_", path.stem)
