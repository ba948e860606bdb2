"""README and docs name only files, modules, examples and links that exist, and their TOML parses."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest
import torch

import shoal
from shoal.testing import check_sharing, check_topology

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"\b(?:src/shoal|tests|benchmarks|examples)/[\w./-]*\w/?")
MODULE = re.compile(r"(?<![\w./'\[-])shoal(?:\.[A-Za-z_]\w*)+")
EXAMPLE = re.compile(r"`([\w-]+\.toml)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FORMER_NAMES = ROOT / "docs" / "decisions" / "names.md"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """Return the contents of all fenced blocks in this language."""
    return [content for found, content in FENCE.findall(page.read_text()) if found == language]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pages
def test_named_files_exist(page: Path) -> None:
    assert not [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()]


@pages
def test_named_modules_and_attributes_exist(page: Path) -> None:
    text = "\n".join(new_names()) if page == FORMER_NAMES else page.read_text()
    assert not [name for name in set(MODULE.findall(text)) if not resolves(name)]


def new_names() -> list[str]:
    """Return the cells in the column "new" of all tables in the page of former names."""
    cells, column = [], 0
    for line in FORMER_NAMES.read_text().splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        column = row.index("new") if "new" in row else column if row else 0
        if column and "new" not in row and not set(line) <= set("|-"):
            cells.append(row[column])
    return cells


def test_new_names_exist() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    cells = new_names()
    assert len(cells) > 60
    for cell in cells:
        module = ""
        for name in re.findall(r"`([^`]+)`", cell):
            module = name if name.startswith("shoal.") else module
            if name.startswith("."):
                assert resolves(module + name) or resolves(module.rpartition(".")[0] + name), name
            elif not name.startswith("shoal."):
                for word in re.findall(r"[A-Za-z_]\w*", name):
                    assert re.search(rf"\b{word}\b", source), f"{name}: no {word} in the source"


@pages
def test_named_examples_exist(page: Path) -> None:
    written = {"experiment.toml", "my_sharing.toml", "pyproject.toml"}
    named = set(EXAMPLE.findall(page.read_text())) - written
    assert not [name for name in named if not (ROOT / "examples" / name).exists()]


@pages
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert not broken


@pages
def test_toml_blocks_parse(page: Path) -> None:
    for block in blocks(page, "toml"):
        tomllib.loads(block)


@pages
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        if not block.lstrip().startswith("async for"):  # a loop without its coroutine
            compile(block, str(page), "exec")


@pages
def test_python_blocks_import_what_exists(page: Path) -> None:
    imported = [
        f"{statement.module}.{alias.name}"
        for block in blocks(page, "python")
        if not block.lstrip().startswith("async for")
        for statement in ast.walk(ast.parse(block))
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("shoal")
        for alias in statement.names
    ]
    assert not [name for name in imported if not resolves(name)]


def test_events_of_the_privacy_page_are_recorded_by_the_code() -> None:
    table = (ROOT / "docs" / "privacy.md").read_text().partition("## Events")[2].partition("## ")[0]
    events = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert len(events) > 5
    assert not [event for event in events if f'"{event}"' not in source]


def test_the_loop_in_the_readme_is_the_loop_in_dpsgd() -> None:
    source = (ROOT / "src" / "shoal" / "algorithms" / "dpsgd.py").read_text()
    loop = blocks(ROOT / "README.md", "python")[0]
    assert "".join(f"        {line}\n" for line in loop.splitlines()) in source


def block_with(page: str, text: str) -> str:
    """Return the Python block of a page that contains this text."""
    return next(block for block in blocks(ROOT / page, "python") if text in block)


def load(source: str) -> dict[str, type]:
    found: dict[str, type] = {"__name__": str}
    exec(source, found)
    return found


def signatures(tree: ast.Module) -> dict[str, str]:
    """Return the signature of each function and method, and the annotated fields of each class, by dotted name."""
    found = {}
    for statement in tree.body:
        members = [(f"{statement.name}.", m) for m in statement.body] if isinstance(statement, ast.ClassDef) else []
        for prefix, member in members or [("", statement)]:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                kind = type(member).__name__
                decorators = [ast.unparse(decorator) for decorator in member.decorator_list]
                returned = ast.unparse(member.returns) if member.returns else None
                found[prefix + member.name] = f"{decorators} {kind} {ast.unparse(member.args)} -> {returned}"
            elif isinstance(member, ast.AnnAssign):
                found[prefix + ast.unparse(member.target)] = ast.unparse(member)
    return found


def test_signatures_of_the_plugin_page_are_those_of_the_code() -> None:
    shown = [block for block in blocks(ROOT / "docs" / "plugins.md", "python") if block.startswith("# shoal.")]
    assert len(shown) > 4
    for block in shown:
        module = importlib.import_module(block.splitlines()[0].removeprefix("# "))
        actual = signatures(ast.parse(Path(str(module.__file__)).read_text()))
        for name, signature in signatures(ast.parse(block)).items():
            assert signature == actual.get(name), name


def test_the_sharing_of_the_readme_passes_its_suite() -> None:
    check_sharing(load(block_with("README.md", "class Half"))["Half"], averages=False)


def test_the_algorithm_of_the_docs_runs(tmp_path: Path) -> None:
    (tmp_path / "pairwise.py").write_text(block_with("docs/plugins.md", "class Pairwise"))
    algorithm = {"name": "pairwise.py:Pairwise", "rounds": 2}
    assert shoal.Experiment(nodes=4, algorithm=algorithm, base=tmp_path).run(tmp_path).status == "completed"


def test_the_topology_of_the_docs_passes_its_suite() -> None:
    check_topology(load(block_with("docs/plugins.md", "class Wheel"))["Wheel"](), nodes=8)


def test_the_device_of_the_docs_runs(tmp_path: Path) -> None:
    (tmp_path / "ageing.py").write_text(block_with("docs/devices.md", "class Ageing"))
    speed = {"name": "ageing.py:Ageing"}
    algorithm = {"name": "dpsgd", "rounds": 2}
    run = shoal.Experiment(nodes=4, speed=speed, algorithm=algorithm, base=tmp_path).run(tmp_path)
    assert run.status == "completed"


def test_the_augmentation_of_the_docs_runs(tmp_path: Path) -> None:
    (tmp_path / "brightness.py").write_text(block_with("docs/data.md", "class Brightness"))
    run = shoal.Experiment(
        nodes=2,
        dataset={"name": "digits", "images": True},
        augmentation=[{"name": "brightness.py:Brightness", "most": 0.1}],
        algorithm={"name": "dpsgd", "rounds": 1},
        base=tmp_path,
    ).run(tmp_path)
    assert run.status == "completed"


def test_the_changed_torch_trainer_of_the_docs_takes_half_steps(tmp_path: Path) -> None:
    (tmp_path / "half_way.py").write_text(block_with("docs/trainers.md", "class HalfWay"))

    def final(trainer: str, lr: float) -> torch.Tensor:
        plan = {"name": "dpsgd", "rounds": 1}
        given = {"nodes": 2, "algorithm": plan, "trainer": trainer, "training": {"lr": lr}, "base": tmp_path}
        model = shoal.Experiment(**given, simulation={"batching": "vmap"}).run(tmp_path).model(0)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.allclose(final("half_way.py:HalfWay", 0.2), final("torch", 0.1), atol=1e-6)
    assert not torch.allclose(final("torch", 0.2), final("torch", 0.1), atol=1e-4)
