"""What `shoal new` writes: a working plug-in, its test and an experiment, to be edited into one's own.

They come from the folders of `shoal/templates`, one per kind, in which the plug-in is called plugin_name.
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
KINDS = ("sharing", "algorithm", "topology", "dataset")
FILES = ("plugin_name.py", "test_plugin_name.py", "plugin_name.toml")
LONGEST_NAME = 40
"""Characters: lines with the name in them stay within the 120 that the templates are formatted for."""


def write_plugin(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a plug-in of this kind into `folder`: the paths of its code, its test and its experiment.

    Hyphens in `name` become underscores in the names of files. Raises `ExperimentError`, with nothing written, for a
    kind or a name that cannot be, and where a file is there already or the folder cannot be written to.
    """
    if kind not in KINDS:
        raise _refusal(f"unknown kind {kind!r}{schema.nearest(kind, KINDS)}")
    _check_spelling(name)
    module, cls = name.replace("-", "_"), _camel_case(name)
    texts = {file: (TEMPLATES / kind / file).read_text(encoding="utf-8") for file in FILES}
    if not os.path.isdir(folder):
        there = os.path.lexists(folder)
        raise _refusal(f"{str(folder)!r} is not a folder" if there else f"there is no folder {str(folder)!r}; make it")
    named = {folder / _named(file, module, cls): _named(text, module, cls) for file, text in texts.items()}
    existing = [f"{str(path)!r} exists and is not overwritten" for path in named if os.path.lexists(path)]
    if existing:
        raise _refusal(*existing)
    _check_free(name, module, cls, [text for file, text in texts.items() if file.endswith(".py")])
    write_all(named)
    return list(named)


def write_all(files: Mapping[Path, str]) -> None:
    """Write new files, all of them or none."""
    written: list[Path] = []
    try:
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:  # "x": one that has come up since is not overwritten
                written.append(path)
                file.write(text)
    except BaseException as error:
        for unfinished in written:
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _refusal(f"cannot write {error.filename or str(path)!r}: {error.strerror}") from error
        raise


def _refusal(*problems: str) -> ExperimentError:
    return ExperimentError(problems, "new")


def _check_spelling(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise _refusal(f"the name {name!r}: expected letters, digits, - and _, the first of them a letter")
    if len(name) > LONGEST_NAME:
        raise _refusal(f"the name {name!r} has {len(name)} characters; expected at most {LONGEST_NAME}")


def _camel_case(name: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in re.split("[-_]+", name))


def _named(text: str, module: str, cls: str) -> str:
    return re.sub("plugin_name|PluginName", lambda found: module if found[0] == "plugin_name" else cls, text)


def _check_free(name: str, module: str, cls: str, sources: list[str]) -> None:
    """Raise where the plug-in's names would hide others that it or its neighbours need."""
    hint = f"choose another name, such as 'my-{name}'"
    for word in (module, cls):
        if keyword.iskeyword(word):
            raise _refusal(f"the name {name!r}: {word!r} is a word of Python itself; {hint}")
    if module == "conftest" or (place := _place_of_module(module)) is not None:
        whose = "pytest's own" if module == "conftest" else f"a module already ({place})"
        raise _refusal(f"the name {name!r}: {module!r} is {whose}, which {module}.py would hide; {hint}")
    if cls in dir(builtins) or any(cls in _names_in(source) for source in sources):
        raise _refusal(f"the name {name!r}: the class would be {cls}, a name that its file uses for another; {hint}")
    if cls.startswith("Test"):
        raise _refusal(f"the name {name!r}: pytest would take the class {cls} for a test; {hint}")


def _place_of_module(module: str) -> str | None:
    """Where Python finds a module of this name. A folder without __init__.py is none: it would hide nothing."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # loaded by other means than a spec
        return "loaded"
    return None if spec is None else spec.origin


def _names_in(source: str) -> set[str]:
    """What a program imports and uses by name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found
