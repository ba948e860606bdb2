"""Who may know whom, what is imported when, and that the public names are all there."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import shoal
import shoal.testing

ROOT = Path(shoal.__file__).parent
ENGINES = ("simulation", "processes", "cluster", "commons", "running")
"""Rooms that run nodes, and what only they use."""


def modules(room: str) -> list[Path]:
    """The files of a room: a folder, or one file."""
    folder = ROOT / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [p for p in [ROOT / f"{room}.py"] if p.exists()]


def imports(path: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever in it, and of what it takes from them."""
    found: set[str] = set()
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{path}: a relative import; write the whole name"
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names}
    return found


def rooms(path: Path) -> set[str]:
    """The rooms of Shoal that a file imports from."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("shoal.")}


# Who may know whom


@pytest.mark.parametrize(
    "room", ["sharing", "topologies", "data", "models", "algorithms", "node", "training", "runtime", "message"]
)
def test_what_experiments_are_made_of_knows_nothing_of_engines(room: str) -> None:
    assert modules(room)
    for path in modules(room):
        assert not rooms(path) & {*ENGINES, "cli", "experiment"}, path


def test_the_parts_do_not_know_who_uses_them() -> None:
    for room in ("sharing", "topologies", "data", "models"):
        for path in modules(room):
            assert not rooms(path) & {"node", "algorithms", "records"}, path


def test_algorithms_have_no_clock_chance_or_thread_of_their_own() -> None:
    for path in modules("algorithms"):
        own = {name.split(".")[0] for name in imports(path)}
        forbidden = {"time", "random", "asyncio", "threading", "multiprocessing", "concurrent", "secrets", "datetime"}
        assert not own & forbidden, path
        assert "numpy.random" not in {name.rpartition(".")[0] for name in imports(path)}, path


def test_the_simulation_and_the_processes_never_import_each_other() -> None:
    for one, other in (("simulation", "processes"), ("processes", "simulation")):
        assert modules(one)
        for path in modules(one):
            assert other not in rooms(path), path


@pytest.mark.parametrize("room", ["analysis", "dashboard"])
def test_who_looks_at_a_run_reads_its_records_and_nothing_else(room: str) -> None:
    for path in modules(room):
        assert rooms(path) <= {"records", "progress", "errors", "analysis", "dashboard"}, path


def test_nothing_that_touches_the_network_unpickles_or_evaluates() -> None:
    for room in ("message", "runtime", "node", "processes", "simulation", "sharing", "algorithms", "records"):
        for path in modules(room):
            assert not {name.split(".")[0] for name in imports(path)} & {"pickle", "marshal", "shelve", "dill"}, path
            for called in (c.func for c in ast.walk(ast.parse(path.read_text())) if isinstance(c, ast.Call)):
                assert not (isinstance(called, ast.Name) and called.id in ("eval", "exec", "compile")), path


def test_no_draw_comes_from_a_global_generator() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        assert "random" not in imports(path), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("np.random."):
                assert node.attr in ("Generator", "PCG64", "SeedSequence", "default_rng"), (
                    f"{path}: {ast.unparse(node)}"
                )


# What is imported when


@pytest.mark.parametrize(
    "module",
    [
        "shoal",
        "shoal.cli",
        "shoal.experiment",
        "shoal.engines.processes.coordinator",
        "shoal.testing",
        "shoal.experiment.running",
    ],
)
def test_importing_does_not_import_torch(module: str) -> None:
    program = (
        f"import sys, {module}; print(sorted({{'torch', 'sklearn', 'matplotlib', 'networkx'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The public names


@pytest.mark.parametrize("package", [shoal, shoal.testing], ids=lambda p: p.__name__)
def test_the_public_names_are_those_imported_and_sorted(package: object) -> None:
    path = Path(str(package.__file__))  # type: ignore[attr-defined]
    taken = [
        alias.asname or alias.name
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.ImportFrom) and statement.module != "__future__"
        for alias in statement.names
    ]
    public: list[str] = package.__all__  # type: ignore[attr-defined]
    assert sorted(taken) == sorted(public)
    assert public == sorted(public, key=lambda name: (name.islower(), name))
    for name in public:
        assert getattr(package, name) is not None


def test_every_suite_and_tool_for_tests_is_public() -> None:
    defined: set[str] = set()
    for found in pkgutil.iter_modules(shoal.testing.__path__):
        module = importlib.import_module(f"shoal.testing.{found.name}")
        kinds = (type, types.FunctionType)
        defined |= {
            name
            for name, value in vars(module).items()
            if isinstance(value, kinds) and value.__module__ == module.__name__ and not name.startswith("_")
        }
    assert defined == set(shoal.testing.__all__)


@pytest.mark.parametrize("name", [*shoal.__all__, *shoal.testing.__all__])
def test_every_public_name_says_what_it_is(name: str) -> None:
    found = getattr(shoal, name, None) or getattr(shoal.testing, name)
    if isinstance(found, type) or callable(found):
        assert (found.__doc__ or "").strip(), name
