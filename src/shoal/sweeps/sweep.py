"""A sweep: a base experiment, and what changes between its runs.

A sweep is read from a TOML file with the key `base`, or from an experiment and options of the command line:

    base  = "quickstart.toml"              # or a table
    seeds = "1-5"

    [set]                                  # for all runs
    algorithm.rounds = 20

    [grid]                                 # all combinations of these values
    sharing     = ["full", { name = "topk", fraction = 0.1 }]
    training.lr = [0.1, 0.3]

    [[variant]]                            # keys that change together
    topology = "ring"

    [tune]                                 # values that are searched for each combination
    training.lr = "0.01:1:log"
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ExperimentError
from shoal.experiment import parse_overrides
from shoal.experiment.reading import name_of, read_toml
from shoal.schema import nearest, shown
from shoal.sweeps.values import (
    Searched,
    Settings,
    check_seeds,
    flatten,
    parse_search,
    parse_seeds,
    parse_values,
)

BUDGET_KEYS = ("algorithm.rounds", "duration", "evaluation.split")
"""Keys that the trials of a search set themselves."""
KEYS = ("base", "name", "seeds", "set", "grid", "variant", "tune")
"""The keys of a sweep's file."""


@dataclass(frozen=True)
class Sweep:
    """What to run. Nothing is validated beyond the form of the sweep itself: see `plan`."""

    name: str
    table: Mapping[str, Any]
    """The base experiment, as its TOML file holds it."""
    folder: Path
    """The folder that relative paths of the base experiment start from."""
    source: str
    """The file that error messages begin with."""
    settings: Settings
    """Values for all runs."""
    variants: tuple[Settings, ...] = ()
    """Settings that change together."""
    grid: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Values of which all combinations are run."""
    seeds: tuple[int, ...] = ()
    """Without seeds, the seed of the base experiment."""
    tune: Mapping[str, Searched] = dataclasses.field(default_factory=dict)
    """What is searched for each combination."""

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield the settings that differ between combinations; the last key of the grid changes first."""
        for variant in self.variants or ({},):
            for values in itertools.product(*self.grid.values()):
                yield {**variant, **dict(zip(self.grid, values, strict=True))}

    def to_table(self) -> dict[str, Any]:
        """Return the sweep as plain data for a file that people read."""
        table: dict[str, Any] = {"name": self.name, "base": dict(self.table), "folder": str(self.folder.resolve())}
        if self.seeds:
            table["seeds"] = list(self.seeds)
        parts: dict[str, Any] = {"set": dict(self.settings), "grid": dict(self.grid), "variant": list(self.variants)}
        table |= {key: value for key, value in parts.items() if value}
        if self.tune:
            table["tune"] = {k: v if isinstance(v, tuple) else str(v) for k, v in self.tune.items()}
        return table


@dataclass(frozen=True)
class SweepChanges:
    """The options of the command line that change a sweep, as they were written."""

    settings: Sequence[str] = ()
    grid: Sequence[str] = ()
    seeds: str | None = None
    tune: Sequence[str] = ()


def read_sweep(path: Path, changes: SweepChanges) -> Sweep:
    """Read a sweep, or an experiment, and apply changes. Raises `ExperimentError` with every problem of its form."""
    table = read_toml(path)
    sweep = _of_file(path, table) if "base" in table else _of_experiment(path, table)
    grid = dict(sweep.grid) | dict(parse_values(text, "--grid") for text in changes.grid)
    tune = dict(sweep.tune) | dict(parse_search(text, "--tune") for text in changes.tune)
    sweep = dataclasses.replace(
        sweep,
        settings={**sweep.settings, **parse_overrides(changes.settings)},
        grid=grid,
        seeds=sweep.seeds if changes.seeds is None else parse_seeds(changes.seeds, "--seeds"),
        tune=tune,
    )
    if problems := list(_conflicts(sweep)):
        raise ExperimentError(problems, str(path))
    return sweep


def _of_experiment(path: Path, table: dict[str, Any]) -> Sweep:
    if wrong := [key for key in ("seeds", "set", "grid", "variant", "tune") if key in table]:
        problem = f'{wrong[0]}: only a sweep has this key; add base = "FILE" with the experiment, or a table [base]'
        raise ExperimentError([problem], str(path))
    table.setdefault("name", name_of(path))
    return Sweep(f"{table['name']}-sweep", table, path.parent, str(path), {})


def _of_file(path: Path, table: dict[str, Any]) -> Sweep:
    problems = [f"{key}: unknown key{nearest(key, KEYS)}" for key in table if key not in KEYS]
    tables = {key: _table(table, key, problems) for key in ("set", "grid", "tune")}
    variants = table.get("variant", [])
    if not isinstance(variants, list) or not all(isinstance(variant, Mapping) for variant in variants):
        problems.append(f"variant = {shown(variants)}: expected tables, each with the heading [[variant]]")
        variants = []
    name = table.get("name", name_of(path))
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name:
        problems.append(f"name = {shown(name)}: expected a name without '/', for the folder of the runs")
    base = table["base"]
    if not isinstance(base, str | Mapping):
        problems.append(f"base = {shown(base)}: expected the file of an experiment, or a table")
    grid = _grid(tables["grid"], problems)
    tune = _searched(tables["tune"], problems)
    seeds = _collect(problems, _seeds, table.get("seeds"), default=())
    if problems:
        raise ExperimentError(problems, str(path))
    if isinstance(base, str):
        file = path.parent / base
        experiment, folder, source = read_toml(file), file.parent, f"{path}, base {file}"
        experiment.setdefault("name", name_of(file))
    else:
        experiment, folder, source = {"name": name, **base}, path.parent, str(path)
    if "base" in experiment:
        raise ExperimentError([f"base = {base!r} is a sweep itself; expected an experiment"], str(path))
    flat = tuple(flatten(variant) for variant in variants)
    return Sweep(name, experiment, folder, source, flatten(tables["set"]), flat, grid, seeds, tune)


def _table(table: Mapping[str, Any], key: str, problems: list[str]) -> Mapping[str, Any]:
    found = table.get(key, {})
    if isinstance(found, Mapping):
        return found
    problems.append(f"{key} = {shown(found)}: expected a table of keys, with the heading [{key}]")
    return {}


def _grid(table: Mapping[str, Any], problems: list[str]) -> dict[str, tuple[Any, ...]]:
    grid = {}
    for key, values in flatten(table).items():
        if not isinstance(values, list) or not values:
            problems.append(f"grid.{key} = {shown(values)}: expected a list of values, such as [0.01, 0.1]")
        else:
            grid[key] = tuple(values)
    return grid


def _searched(table: Mapping[str, Any], problems: list[str]) -> dict[str, Searched]:
    found: dict[str, Searched] = {}
    for key, value in flatten(table).items():
        if isinstance(value, str):
            parsed = _collect(problems, parse_search, f"{key}={value}", "tune", default=None)
            if parsed is not None:
                found[key] = parsed[1]
        elif isinstance(value, list) and value:
            found[key] = tuple(value)
        else:
            problems.append(f"tune.{key} = {shown(value)}: expected a range such as '0.01:1:log', or a list of values")
    return found


def _seeds(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return parse_seeds(value, "seeds")
    return check_seeds(value if isinstance(value, list) else [value], "seeds")


def _collect(problems: list[str], function: Any, *arguments: Any, default: Any) -> Any:
    """Call a function, and add the problems of its `ExperimentError` to the others."""
    try:
        return function(*arguments)
    except ExperimentError as error:
        problems += error.problems
        return default


def _conflicts(sweep: Sweep) -> Iterator[str]:
    """Yield the keys that two parts of a sweep set."""
    varied = {key for variant in sweep.variants for key in variant}
    for key in [key for key in varied if key in sweep.grid]:
        yield f"{key}: given by a variant and by the grid; remove one of them"
    for key in [key for key in sweep.tune if key in varied or key in sweep.grid]:
        yield f"{key}: searched, and given by the grid or a variant too; remove one of them"
    for key in [key for key in sweep.tune if key in BUDGET_KEYS]:
        yield f"{key}: a search uses it as the budget of its trials; give it in the grid instead"
    given = {*sweep.grid, *sweep.tune, *varied} | ({"seed"} if sweep.seeds else set())
    for key in [key for key in sweep.settings if key in given]:
        yield f"{key}: set for all runs, and given by the grid, a variant, the search or the seeds; remove one of them"
    for key in {*sweep.grid, *sweep.tune, *varied} & {"seed", "name"}:
        yield f"{key}: use 'seeds' for several seeds" if key == "seed" else "name: all runs of a sweep have one name"
