"""The import rules of every package, what is imported when, and the public names."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import shoal
import shoal.testing

ROOT = Path(shoal.__file__).parent
REPOSITORY = Path(__file__).parent.parent

FOUNDATIONS = {"errors", "types", "randomness", "state", "traits", "schema", "plugins", "plugin_modules"}
ENVIRONMENT = {"environment", "environment.faults", "environment.network"}
RULES: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "randomness": set(),
    "state": {"randomness", "types"},
    "traits": set(),
    "schema": {"errors", "types"},
    "plugin_modules": set(),
    "plugins": {"schema", "plugin_modules"},
    "message": FOUNDATIONS,
    "message_budget": FOUNDATIONS | {"message"},
    "peer_timeouts": FOUNDATIONS,
    "node_activity": FOUNDATIONS | {"results.spans"},
    "node_checkpoints": FOUNDATIONS | {"node_context"},
    "node_training": FOUNDATIONS | {"runtime", "training"},
    "receive_history": FOUNDATIONS | {"message"},
    "mailbox": FOUNDATIONS | {"message", "message_budget", "receive_history"},
    "runtime": FOUNDATIONS | {"message", "mailbox", "node_activity"},
    "node_context": FOUNDATIONS | {"topologies", "results.records"},
    "node": FOUNDATIONS
    | {"message", "mailbox", "runtime", "peer_timeouts", "node_context", "node_checkpoints", "node_training"}
    | {"node_activity", "node_protocols", "sharing", "topologies"}
    | {"training"}
    | {"results.records"},
    "node_protocols": FOUNDATIONS | {"message", "sharing", "topologies", "node"},
    "compression": FOUNDATIONS | {"message"},
    "topologies": FOUNDATIONS,
    "topologies.sampling": FOUNDATIONS | {"message", "node", "topologies"},
    "data": FOUNDATIONS,
    "models": FOUNDATIONS | {"data"},
    "training": FOUNDATIONS | {"data", "models"},
    "sharing": FOUNDATIONS | {"message", "compression", "data", "topologies"},
    "sharing.secure": FOUNDATIONS | {"message", "compression", "topologies", "sharing", "node"},
    "environment.faults": FOUNDATIONS,
    "environment.network": FOUNDATIONS | {"environment.faults"},
    "environment": FOUNDATIONS | ENVIRONMENT | {"data.pickles"},
    "algorithms": FOUNDATIONS | {"message", "node", "sharing", "topologies"},
    "results": {"errors", "types"},
    "results.exports": {"errors", "types", "results"},
    "dashboard": FOUNDATIONS | {"results"},
    "experiment": FOUNDATIONS
    | ENVIRONMENT
    | {"runtime", "node", "node_context", "algorithms", "sharing", "topologies", "data", "training"}
    | {"results"},
    "engines": FOUNDATIONS
    | {"message", "mailbox", "node", "environment.faults", "environment.network", "training", "experiment", "results"},
    "engines.simulation": FOUNDATIONS
    | ENVIRONMENT
    | {"message", "mailbox", "runtime", "node", "node_activity", "training", "experiment", "results", "engines"},
    "engines.ray": FOUNDATIONS | {"experiment", "engines", "engines.processes"},
    "engines.processes": FOUNDATIONS
    | ENVIRONMENT
    | {"message", "message_budget", "mailbox", "runtime", "node", "node_activity", "experiment", "results", "engines"},
    "sweeps": FOUNDATIONS | {"experiment", "results", "engines", "engines.processes"},
}
RULES |= {"cli": set(RULES), "testing": set(RULES)}
"""What each package or module may import of Shoal, beside itself. A subpackage with rules of its own has only those."""

EXCEPTIONS: dict[str, set[str]] = {
    # the one place that picks an engine
    "experiment.running": {"engines.worker", "engines.simulation", "engines.processes", "engines.ray"},
}

CLOCKS_AND_CHANCE = {"time", "random", "asyncio", "threading", "multiprocessing", "concurrent", "secrets", "datetime"}


def module_name(path: Path) -> str:
    """The name of a module below `shoal`: "engines.simulation.kernel"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if "templates" not in path.parts]


def files_of(package: str) -> list[Path]:
    return [path for path in source_files() if _is_in(module_name(path), package)]


def imports(path: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever in it, and of what it takes from them."""
    return imports_in(path.read_text())


def imports_in(source: str) -> set[str]:
    found: set[str] = set()
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"a relative import of {statement.module}; write the whole name"
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names}
    return found


def libraries(path: Path) -> set[str]:
    """The top-level packages that a file imports: "random" for `from random import choice` too."""
    return {name.split(".")[0] for name in imports(path)}


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _rule_of(module: str) -> str:
    """The most specific rule that a module falls under."""
    return max((rule for rule in RULES if _is_in(module, rule)), key=len, default="")


def _allowed(module: str) -> set[str]:
    rule = _rule_of(module)
    extra = {package for name, packages in EXCEPTIONS.items() if _is_in(module, name) for package in packages}
    return {rule, *RULES[rule], *extra}


def _forbidden(module: str, imported: str) -> bool:
    """Whether `module` may not import `imported`; both are named below `shoal`."""
    allowed = _allowed(module)
    own, target = _rule_of(module), _rule_of(imported)
    subpackages = {rule for rule in RULES if rule.count(".") and rule != own}
    return not any(
        _is_in(imported, package) and (package == target or target not in subpackages) for package in allowed if package
    )


# Import rules


def test_every_module_falls_under_a_rule() -> None:
    without = {module_name(path) for path in source_files() if not _rule_of(module_name(path))}
    assert without == {"", "__main__"}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_package_imports_only_what_its_rule_allows(rule: str) -> None:
    files = [path for path in source_files() if _rule_of(module_name(path)) == rule]
    assert files, f"no module falls under the rule for {rule!r}"
    wrong = {
        f"{module_name(path)} imports {name}"
        for path in files
        for name in imports(path)
        if name == "shoal" or (name.startswith("shoal.") and _forbidden(module_name(path), name.removeprefix("shoal.")))
    }
    assert not wrong


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"cli", "testing"}))
def test_a_rule_allows_only_what_is_imported(rule: str) -> None:
    files = [path for path in source_files() if _rule_of(module_name(path)) == rule]
    imported = {name.removeprefix("shoal.") for path in files for name in imports(path)}
    allowed = RULES[rule] - FOUNDATIONS - {rule}
    assert not {package for package in allowed if not any(_is_in(name, package) for name in imported)}


def test_the_engines_never_import_each_other() -> None:
    for one, other in (("simulation", "processes"), ("processes", "simulation")):
        for path in files_of(f"engines.{one}"):
            assert not any(name.startswith(f"shoal.engines.{other}") for name in imports(path)), path


def test_only_the_ray_package_imports_ray() -> None:
    for path in source_files():
        assert "ray" not in libraries(path) or _is_in(module_name(path), "engines.ray"), path


@pytest.mark.parametrize("package", ["algorithms", "sharing", "topologies", "compression"])
def test_no_clock_chance_or_thread_of_its_own(package: str) -> None:
    for path in files_of(package):
        found = libraries(path) & CLOCKS_AND_CHANCE
        if _is_in(module_name(path), "sharing.secure"):
            found -= {"secrets"}  # keys must not follow from the seed
        assert not found, f"{path}: {found}"


@pytest.mark.parametrize("package", ["algorithms", "sharing", "topologies"])
def test_components_do_not_reach_through_the_node_to_its_runtime(package: str) -> None:
    for path in files_of(package):
        reached = [
            ast.unparse(found)
            for found in ast.walk(ast.parse(path.read_text()))
            if isinstance(found, ast.Attribute) and ast.unparse(found).endswith("node.runtime")
        ]
        assert not reached, path


@pytest.mark.parametrize("package", sorted({rule.split(".")[0] for rule in RULES} - {"cli", "testing", "data"}))
def test_nothing_unpickles_or_evaluates(package: str) -> None:
    for path in files_of(package):
        assert not libraries(path) & {"pickle", "marshal", "shelve", "dill"}, path
        for called in (c.func for c in ast.walk(ast.parse(path.read_text())) if isinstance(c, ast.Call)):
            assert not (isinstance(called, ast.Name) and called.id in ("eval", "exec", "compile")), path


SEEDED = re.compile(r"(np|numpy)\.random\.(Generator|PCG64|SeedSequence|default_rng)|torch\.random\.fork_rng")
UNSEEDED = re.compile(
    r"(np|numpy)\.random\.\w+|torch\.random\.\w+"
    r"|torch\.(rand(?!om)\w*|normal|bernoulli|multinomial|poisson|manual_seed|seed)"
)


def unseeded_draws(source: str) -> list[str]:
    """What a module draws from a global generator, or from a generator without a seed."""
    found = [name for name in imports_in(source) if name.split(".")[0] == "random" or _is_in(name, "numpy.random")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".default_rng") and not node.args:
            found.append(ast.unparse(node))
        if isinstance(node, ast.Attribute) and UNSEEDED.fullmatch(name := ast.unparse(node)):
            found += [] if SEEDED.fullmatch(name) else [name]
    return found


def test_no_draw_comes_from_a_global_generator() -> None:
    seeds_modules = ROOT / "training" / "module_draws.py"  # seeds the global generators for modules of users
    restores_states = ROOT / "experiment" / "process_state.py"
    files = (path for path in source_files() if path not in (seeds_modules, restores_states))
    found = {path: unseeded_draws(path.read_text()) for path in files}
    assert not {path: draws for path, draws in found.items() if draws}


@pytest.mark.parametrize(
    "source",
    [
        "import random",
        "from random import choice",
        "from numpy import random",
        "import numpy.random",
        "import numpy.random as r",
        "from numpy.random import default_rng",
        "np.random.rand(3)",
        "numpy.random.seed(3)",
        "np.random.default_rng()",
        "torch.rand(3)",
        "torch.manual_seed(3)",
        "torch.random.manual_seed(3)",
    ],
)
def test_a_draw_from_a_global_generator_is_found(source: str) -> None:
    assert unseeded_draws(source)


@pytest.mark.parametrize("source", ["np.random.default_rng([3])", "generator.random(3)", "torch.random.fork_rng([])"])
def test_a_seeded_draw_is_allowed(source: str) -> None:
    assert not unseeded_draws(source)


def test_every_package_describes_what_belongs_in_it() -> None:
    for path in source_files():
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), path


# Size


LONGEST_FILE, LONGEST_FUNCTION = 500, 60


def too_long(path: Path) -> list[str]:
    """The file and its functions, if they are longer than allowed and do not explain why."""
    text = path.read_text()
    parts: list[tuple[str, list[str], int]] = [("the file", text.splitlines(), LONGEST_FILE)]
    for found in ast.walk(ast.parse(text)):
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append((found.name, parts[0][1][found.lineno - 1 : found.end_lineno], LONGEST_FUNCTION))
    return [
        f"{path}: {name} has {len(lines)} lines"
        for name, lines, limit in parts
        if len(lines) > limit and not any("Long because" in line for line in lines[:10])
    ]


def test_files_and_functions_fit_a_reader() -> None:
    """A longer one explains why in its first ten lines, in a comment that begins with "Long because"."""
    others = [path for folder in ("tests", "benchmarks", "examples") for path in (REPOSITORY / folder).rglob("*.py")]
    assert not [problem for path in (*source_files(), *others) for problem in too_long(path)]


# What is imported when


@pytest.mark.parametrize(
    "module",
    [
        "shoal",
        "shoal.cli",
        "shoal.experiment",
        "shoal.experiment.running",
        "shoal.engines.processes.launch",
        "shoal.training",
        "shoal.testing",
    ],
)
def test_importing_does_not_import_torch(module: str) -> None:
    program = (
        f"import sys, {module}; print(sorted({{'torch', 'sklearn', 'matplotlib', 'networkx'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_packages_are_attributes_of_the_package_that_contains_them() -> None:
    subprocess.run([sys.executable, "-c", "import shoal; shoal.topologies.Mixing"], check=True)


def test_the_help_of_the_command_line_imports_no_command() -> None:
    program = (
        "import sys\nfrom shoal.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n"
        "    print(sorted({'numpy', 'rich', 'msgspec', 'shoal.experiment'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "run an experiment" in done.stdout


# The public names


@pytest.mark.parametrize("package", [shoal, shoal.testing], ids=lambda p: p.__name__)
def test_the_public_names_are_those_imported_and_sorted(package: object) -> None:
    path = Path(str(package.__file__))  # type: ignore[attr-defined]
    taken = {
        alias.asname or alias.name: statement.module
        for statement in ast.walk(ast.parse(path.read_text()))
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("shoal.")
        for alias in statement.names
    }
    public: list[str] = package.__all__  # type: ignore[attr-defined]
    assert sorted(taken) == sorted(public)
    assert public == sorted(public, key=lambda name: (name.islower(), name))
    for name in public:
        assert getattr(package, name) is getattr(importlib.import_module(str(taken[name])), name)
        assert name in dir(package)
    assert not hasattr(package, "misspelt")


def test_every_suite_and_tool_for_tests_is_public() -> None:
    defined: set[str] = set()
    for found in pkgutil.iter_modules(shoal.testing.__path__):
        if found.name.startswith("_") or found.ispkg:
            continue
        module = importlib.import_module(f"shoal.testing.{found.name}")
        kinds = (type, types.FunctionType)
        defined |= {
            name
            for name, value in vars(module).items()
            if isinstance(value, kinds) and value.__module__ == module.__name__ and not name.startswith("_")
        }
    assert defined == set(shoal.testing.__all__)


@pytest.mark.parametrize("name", [*shoal.__all__, *shoal.testing.__all__])
def test_every_public_name_has_a_docstring(name: str) -> None:
    found = getattr(shoal, name, None) or getattr(shoal.testing, name)
    if isinstance(found, type) or callable(found):
        assert (found.__doc__ or "").strip(), name
