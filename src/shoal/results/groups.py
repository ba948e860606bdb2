"""Runs that differ only in the seed form a group. Groups are named by the keys in which their experiments differ.

for group in group_runs(folders):
    print(group.label, len(group.runs))      # sharing = topk 5
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.results.records import RunFolder

T = TypeVar("T")
SEED = "seed"
IGNORED_TABLES = ("versions", "simulation", "processes", "checkpoint", "mapping")
"""Tables of an experiment that do not name a run: they describe how it is computed, not what."""
DATASET_KEYS = ("dataset.augmentation", "dataset.validation")
"""Keys that every data set may have. A run without them does not write them."""
MISSING = "none"
"""The value, in a label, of a key that a run does not have."""
PLUGINS = "plugins."
"""The keys of the hashes of plug-in files begin with it. Runs with different code are different experiments."""
MAX_VALUE = 40
"""The number of characters of a value in a label."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed."""

    label: str
    """Short and unique among the groups: the keys that differ, and their values, such as "sharing = topk"."""
    settings: Mapping[str, str]
    """The keys that differ between the groups, and the values of this group. Options that only some components have
    are left out if the groups differ without them."""
    runs: tuple[RunFolder, ...]


def group_runs(folders: Sequence[RunFolder]) -> list[Group]:
    """Return the groups of runs, in the order in which they appear first.

    Runs with the same experiment and the same seed are in one group too. Warns of runs of different versions.
    """
    experiments = [folder.read_experiment() for folder in folders]
    _warn_of_versions(experiments)
    tables = [{key: value for key, value in _flatten(table) if key != SEED} for table in experiments]
    members = _equal(tables)
    settings = _settings([tables[several[0]] for several in members])
    names = [_experiment_name(folders[several[0]], experiments[several[0]]) for several in members]
    return [
        Group(label, setting, tuple(folders[i] for i in several))
        for label, setting, several in zip(_labels(settings, names), settings, members, strict=True)
    ]


def one_of_each_seed(label: str, seeds: Sequence[object], runs: Sequence[T]) -> list[T]:
    """Return the last run of each seed. Repeated runs are not independent: they would make an interval too narrow."""
    found = dict(zip(seeds, runs, strict=True))
    if len(found) < len(runs):
        warnings.warn(
            f"{label}: {len(runs)} runs with {len(found)} seeds; the last run of each seed counts", stacklevel=3
        )
    return list(found.values())


def _settings(tables: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return, for each table, the keys in which the tables differ and its values.

    A key that a table does not have is "none", except an option of components with different names. Such options are
    compared among the tables that do not differ otherwise.
    """
    compared = [key for key in dict.fromkeys(itertools.chain(*tables)) if _is_compared(key, tables)]
    rows = [{key: table.get(key, MISSING) for key in compared} for table in tables]
    differing = [key for key in compared if len({row[key] for row in rows}) > 1]
    found = [{key: row[key] for key in differing} for row in rows]
    if differing:
        for equal in _equal(found):  # one table alone differs in nothing
            for i, more in zip(equal, _settings([tables[i] for i in equal]), strict=True):
                found[i] = {**found[i], **more}
    return found


def _equal(tables: Sequence[Mapping[str, str]]) -> list[list[int]]:
    """Return the numbers of the tables that are equal to each other, in the order in which they appear first."""
    found: dict[frozenset[tuple[str, str]], list[int]] = {}
    for i, table in enumerate(tables):
        found.setdefault(frozenset(table.items()), []).append(i)
    return list(found.values())


def _labels(settings: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """Return a label for each group; `names` are used if nothing differs. Equal labels get a number."""
    described = [", ".join(f"{_key(key)} = {_shorten(row[key])}" for key in row) for row in settings]
    labels = [text or name for text, name in zip(described, names, strict=True)]
    counts, used = Counter(labels), Counter[str]()
    for i, label in enumerate(labels):
        if counts[label] > 1:
            used[label] += 1
            labels[i] = f"{label} ({used[label]})"
    return labels


def _key(key: str) -> str:
    """Return a key as a label shows it: of a component its table, of a plug-in file its name."""
    return key.removesuffix(".name").rpartition("/")[2]


def _shorten(value: str) -> str:
    """Return a value without the folder of a path, and without the end of a long text."""
    if not value.startswith(("[", "{")):
        value = value.rstrip("/").rpartition("/")[2]
    return value if len(value) <= MAX_VALUE else f"{value[: MAX_VALUE - 1]}…"


def _is_compared(key: str, tables: Sequence[Mapping[str, str]]) -> bool:
    """Whether a key means the same in all runs: a run that lacks it could have it."""
    if key in DATASET_KEYS or all(key in table for table in tables):
        return True
    if key.startswith(PLUGINS):
        return False
    component = key.removesuffix(".name").rpartition(".")[0]
    return len({table.get(f"{component}.name") for table in tables}) == 1


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of nested tables and their values as text."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.") if prefix or key not in IGNORED_TABLES else ()
        elif prefix or key != "name":
            yield f"{prefix}{key}", str(value)[:8] if prefix == PLUGINS else str(value)


def _experiment_name(folder: RunFolder, experiment: Mapping[str, Any]) -> str:
    return str(experiment.get("name") or folder.path.parent.name)


def _warn_of_versions(experiments: Sequence[Mapping[str, Any]]) -> None:
    tables = [table["versions"] for table in experiments if isinstance(table.get("versions"), Mapping)]
    for name in dict.fromkeys(itertools.chain(*tables)):
        found = dict.fromkeys(str(table.get(name, MISSING)) for table in tables)
        if len(found) > 1:
            warnings.warn(f"the runs have different versions of {name}: {', '.join(found)}", stacklevel=3)
