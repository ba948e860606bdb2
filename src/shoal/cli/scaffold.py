"""The files that `shoal new` writes: a working plug-in, its test and an experiment, for the user to edit.

They are copied from `templates/<kind>`, where the plug-in is called plugin_name.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import keyword
import os
import re
from collections.abc import Mapping
from pathlib import Path

from shoal import schema
from shoal.errors import ExperimentError

TEMPLATES = Path(__file__).with_name("templates")
KINDS = ("sharing", "algorithm", "topology", "dataset", "model", "partition", "trainer", "compressor", "network")
FILES = ("plugin_name.py", "test_plugin_name.py", "plugin_name.toml")
LONGEST_NAME = 40
"""Characters: with a longer name, lines of the templates would exceed 120 characters."""


def write_plugin(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a plug-in of this kind to `folder`, and return the paths of its code, its test and its experiment.

    Hyphens in `name` become underscores in the names of files. Raises `ExperimentError`, and writes nothing, if the
    kind or the name is wrong, a file exists already, or the folder cannot be written.
    """
    if kind not in KINDS:
        raise _error(f"unknown kind {kind!r}{schema.nearest(kind, KINDS)}")
    _check_name(name)
    module, cls = name.replace("-", "_"), _camel_case(name)
    texts = {file: (TEMPLATES / kind / file).read_text(encoding="utf-8") for file in FILES}
    if not os.path.isdir(folder):
        exists = os.path.lexists(folder)
        raise _error(f"{str(folder)!r} is not a folder" if exists else f"there is no folder {str(folder)!r}; create it")
    files = {folder / _fill_in(file, module, cls): _fill_in(text, module, cls) for file, text in texts.items()}
    existing = [f"{str(path)!r} exists and is not overwritten" for path in files if os.path.lexists(path)]
    if existing:
        raise _error(*existing)
    _check_conflicts(name, module, cls, [text for file, text in texts.items() if file.endswith(".py")])
    write_all(files)
    return list(files)


def write_all(files: Mapping[Path, str]) -> None:
    """Write new files, all of them or none."""
    written: list[Path] = []
    try:
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:  # "x" raises if the file was created in the meantime
                written.append(path)
                file.write(text)
    except BaseException as error:
        for unfinished in written:
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _error(f"cannot write {error.filename or str(path)!r}: {error.strerror}") from error
        raise


def _error(*problems: str) -> ExperimentError:
    return ExperimentError(problems, "new")


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise _error(f"the name {name!r}: expected letters, digits, - and _, starting with a letter")
    if len(name) > LONGEST_NAME:
        raise _error(f"the name {name!r} has {len(name)} characters; expected at most {LONGEST_NAME}")


def _camel_case(name: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in re.split("[-_]+", name))


def _fill_in(text: str, module: str, cls: str) -> str:
    return re.sub("plugin_name|PluginName", lambda found: module if found[0] == "plugin_name" else cls, text)


def _check_conflicts(name: str, module: str, cls: str, sources: list[str]) -> None:
    """Raise if the names of the module or of the class would hide names that other code needs."""
    hint = f"choose another name, such as 'my-{name}'"
    for word in (module, cls):
        if keyword.iskeyword(word):
            raise _error(f"the name {name!r}: {word!r} is a keyword of Python; {hint}")
    if module == "conftest" or (origin := _origin_of_module(module)) is not None:
        existing = "a file of pytest" if module == "conftest" else f"an existing module ({origin})"
        raise _error(f"the name {name!r}: {module!r} is {existing}, which {module}.py would hide; {hint}")
    if cls in dir(builtins) or any(cls in _names_in(source) for source in sources):
        raise _error(f"the name {name!r}: the class would be {cls}, a name that its file already uses; {hint}")
    if cls.startswith("Test"):
        raise _error(f"the name {name!r}: pytest would take the class {cls} for a test; {hint}")


def _origin_of_module(module: str) -> str | None:
    """Return where Python finds a module of this name. A folder without __init__.py does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # it was loaded without a spec
        return "loaded"
    return None if spec is None else spec.origin


def _names_in(source: str) -> set[str]:
    """Return the names that a program imports or uses."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found
