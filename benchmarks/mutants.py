"""Mutation testing: plants single small faults in the source and counts those that the tests notice.

    python benchmarks/mutants.py --seed 1 --count 100              # about an hour on two cores
    python benchmarks/mutants.py --seed 1 --count 100 --list       # only shows the faults
    python benchmarks/mutants.py --seed 1 --count 100 --only 3 17  # repeats some of them

A fault (a mutant) is one change of one line: another comparison, + in place of -, a constant that is larger by one, a
negated condition, a statement left out, a result left out, two arguments exchanged. The seed decides which: lines are
drawn uniformly from all lines with a possible fault, then one fault of that line. Each fault is planted in a temporary
copy of the repository. The tests run in order of their files and stop at the first failure:

    killed      a test fails twice, and passes without the fault
    survived    all tests that were run pass
    equivalent  the fault changes no result; `mutants.toml` has the reason

Not changed: text, errors and warnings, `__repr__` and `__str__`, assertions, annotations, constants of modules and
classes (settings and defaults), code for the command line, plots and downloads.

Which tests are run for a module: those in `mutants.toml`, then the files that mention its names most often, `--files`
in all. A survivor of these may still be noticed by other tests.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from measuring import ROOT, Figure, show

SETTINGS = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
"""The first test files of modules, and the reviewed mutants that change no result."""
PACKAGES = (
    "algorithms", "sharing", "compression", "topologies", "data", "training", "environment", "engines", "results",
    "mailbox", "message", "message_budget", "node", "node_context", "peer_timeouts", "randomness", "receive_history",
    "schema", "state", "traits", "types",
)  # fmt: skip
LEFT_OUT = ("plots", "drawing", "downloads", "publishers", "huggingface")
"""Modules of these packages that are not changed."""
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.Is: ("is", "is not"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.FloorDiv: ("//", "*"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNSEEN_CALLS = {"warn", "print", "isinstance", "cast", "ClassVar", "TypeVar", "NewType", "getattr"}
"""Calls whose arguments are not changed."""


@dataclass(frozen=True, order=True)
class Mutant:
    """One change: bytes `start` to `end` of a file become `new`."""

    path: str
    line: int
    column: int
    start: int
    end: int
    old: str
    new: str
    source: str
    """The line before the change."""

    def __str__(self) -> str:
        change = f"{_one_line(self.old)}  →  {_one_line(self.new)}"
        return f"{self.path}:{self.line}:{self.column}: {self.source}\n      {change}"

    @property
    def compiles(self) -> bool:
        with suppress(SyntaxError):
            return bool(ast.parse(_changed(self)))
        return False

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What identifies it in the list of equivalent ones, with the line before it: lines may move."""
        before = (ROOT / self.path).read_text().splitlines()[self.line - 2].strip()
        return self.path, before, self.source, self.column, _one_line(self.new)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}…"


class Changes(ast.NodeVisitor):
    """All possible changes of a file, in `found`."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT).as_posix()
        self.code = path.read_bytes()
        self.lines = self.code.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.depth = 0  # of functions
        self.visit(ast.parse(self.code))

    # Places

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self.code[slice(*self.span(node))].decode()

    def add(self, start: int, end: int, new: str) -> None:
        line = self.code[:start].count(b"\n")
        column, source = start - self.starts[line], self.lines[line].decode().strip()
        self.found.append(Mutant(self.path, line + 1, column, start, end, self.code[start:end].decode(), new, source))

    def replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        self.add(*self.span(node), new)

    def between(self, left: ast.expr, operator: ast.AST, right: ast.expr) -> None:
        """Replace the operator between two expressions."""
        old, new = OPERATORS.get(type(operator), ("", ""))
        start, end = self.span(left)[1], self.span(right)[0]
        if old and (match := re.search(rf"(?<![\w*/]){re.escape(old)}(?![\w*/=])", self.code[start:end].decode())):
            self.add(start + match.start(), start + match.end(), new)

    # What is not changed

    def visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__") or any("overload" in ast.dump(d) for d in node.decorator_list):
            return
        self.depth += 1
        for statement in node.body:
            self.visit(statement)
        self.depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_function  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            for statement in node.body:
                self.visit(statement)

    def skip(self, node: ast.AST) -> None: ...

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = skip  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        if self.depth:
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if self.depth and node.value is not None:
            self.visit(node.value)

    # What is changed

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.between(left, operator, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.between(node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.between(node.values[0], node.op, node.values[1])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.replace(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if self.depth and type(node.value) is int:
            self.replace(node, str(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self.text(node.test):
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if not _is_text(node.body) and not _is_text(node.orelse):
            self.negate(node.test)
            self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.negate(condition)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.UnaryOp):  # else `not` is dropped
            self.replace(test, f"(not ({self.text(test)}))")

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and _name(call) not in UNSEEN_CALLS and not self.text(node).startswith("super("):
            self.replace(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace(node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):
            self.replace(value, str(not value.value))
        elif (
            value is not None and not _is_text(value) and not (isinstance(value, ast.Constant) and value.value is None)
        ):
            self.replace(value, "None")
            self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        if _name(node) in UNSEEN_CALLS:
            return
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            self.replace(node.func, NAMES[node.func.id])
        if (
            len(node.args) > 1
            and type(node.args[0]) is type(node.args[1])
            and not isinstance(node.args[0], ast.Starred)
        ):
            (start, left), (right, end) = self.span(node.args[0]), self.span(node.args[1])
            one, middle, other = (
                part.decode() for part in (self.code[start:left], self.code[left:right], self.code[right:end])
            )
            if one != other:
                self.add(start, end, other + middle + one)
        self.generic_visit(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def source_files() -> list[Path]:
    folder = ROOT / "src" / "shoal"
    found = [path for package in PACKAGES for path in (folder / package).rglob("*.py")]
    found += [path for package in PACKAGES if (path := folder / f"{package}.py").exists()]
    return sorted(path for path in found if path.stem not in LEFT_OUT)


def draw(seed: int, count: int) -> list[Mutant]:
    """Draw faults of different lines."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for path in source_files():
        for mutant in Changes(path).found:
            if mutant.compiles:
                by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    rng = random.Random(seed)
    return [rng.choice(sorted(by_line[place])) for place in rng.sample(sorted(by_line), count)]


def _changed(mutant: Mutant) -> bytes:
    code = (ROOT / mutant.path).read_bytes()
    return code[: mutant.start] + mutant.new.encode() + code[mutant.end :]


def tests_of(path: str, limit: int) -> list[str]:
    """Return the test files for a module, in the order in which they run."""
    module = path.removeprefix("src/shoal/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, stem = module.rpartition(".")
    names = SETTINGS["tests"].get(module, "").split()
    tree = ast.parse((ROOT / path).read_text())
    public = [d.name for d in tree.body if isinstance(d, ast.ClassDef | ast.FunctionDef) and d.name[0] != "_"]
    word = re.compile(rf"\b({'|'.join([*public, stem])})\b")
    mentions = {file: len(word.findall(file.read_text())) for file in sorted((ROOT / "tests").glob("test_*.py"))}
    used = re.compile(rf"from shoal\.({module}|{package or '-'}) import|\"{stem.replace('_', '-')}\"")
    known = [file for file, count in mentions.items() if count and used.search(file.read_text())]
    names += [file.stem.removeprefix("test_") for file in sorted(known, key=lambda file: -mentions[file])]
    if module not in SETTINGS["tests"]:
        names = [*names[: limit - 2], *SETTINGS["tests"].get(package, "").split(), *names]
    chosen = [f"tests/test_{name}.py" for name in dict.fromkeys(names)][:limit]
    assert chosen, f"no tests for {path}; name some in mutants.toml"
    assert all((ROOT / test).exists() for test in chosen), chosen
    return chosen


class Copy:
    """A temporary copy of the repository."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "shoal"
        skipped = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".hypothesis", ".*_cache")
        shutil.copytree(ROOT, self.root, ignore=skipped)

    def plant(self, mutant: Mutant | None, path: str) -> None:
        """Write the file with the fault, or without one if `mutant` is None."""
        target = self.root / path
        target.write_bytes((ROOT / path).read_bytes() if mutant is None else _changed(mutant))
        for compiled in target.parent.glob(f"__pycache__/{target.stem}.*"):
            compiled.unlink()  # Python compares times in seconds only

    def test(self, arguments: list[str], limit: float) -> tuple[int | None, str]:
        """Return the exit code of pytest, None after `limit` seconds, and its output."""
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        options = ["-q", "-p", "no:cacheprovider", "--tb=line", "--timeout=60", "--hypothesis-seed=0"]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *arguments],
                cwd=self.root,
                env={**os.environ, "PYTHONPATH": str(self.root / "src")},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read()


def run(mutants: dict[int, Mutant], files: int, limit: float) -> Counter[str]:
    """Test every mutant, print what happens, and return how many ended in which way."""
    ended: dict[int, str] = {}
    killers: dict[int, str] = {}
    known = {(e["file"], e["before"], e["line"], e["column"], e["new"]) for e in SETTINGS["equivalent"]}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        for number, mutant in mutants.items():
            started, tests = time.monotonic(), tests_of(mutant.path, files)
            if mutant.key in known:
                ended[number] = "equivalent"
            else:
                copy.plant(mutant, mutant.path)
                code, output = copy.test(["-x", *tests], limit)
                if failed := _failed(output):
                    killers[number] = failed[0]
                    code = copy.test(failed[:1], limit)[0] or None  # a test that passes now failed by chance
                copy.plant(None, mutant.path)
                ended[number] = {0: "survived", None: "unfinished"}.get(code, "killed")
            how = killers.get(number) or " ".join(tests)
            seconds = time.monotonic() - started
            print(f"{number:4} {ended[number]:10} {seconds:4.0f} s  {mutant}\n      ({how})", flush=True)
        code, output = copy.test(sorted(set(killers.values())), 20 * limit) if killers else (0, "")
        print(f"the tests that failed, without a fault: exit code {code}")
        for number in [number for number, test in killers.items() if test in _failed(output)]:
            ended[number] = "unfinished"  # a test that also fails without the fault proves nothing
            print(f"{number:4} unfinished: {killers[number]} fails without the fault as well")
    return Counter(ended.values())


def _failed(output: str) -> list[str]:
    """The tests that failed, or the files that could not be imported."""
    return [test.split(" - ")[0].strip() for test in re.findall(r"^(?:FAILED|ERROR) (.+)", output, re.MULTILINE)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the planted faults that the tests notice.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of the mutants to run")
    parser.add_argument("--files", type=int, default=3, help="the most test files for a mutant")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the tests of a mutant")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background, where tests send it
    mutants = dict(enumerate(draw(options.seed, options.count), 1))
    if options.only:
        mutants = {number: mutants[number] for number in options.only}
    if options.list:
        for number, mutant in mutants.items():
            print(f"{number:4} {mutant}\n      {' '.join(tests_of(mutant.path, options.files))}")
        return
    counts = run(mutants, options.files, options.limit)
    judged = counts["killed"] + counts["survived"]
    figures = [Figure(name, counts[name], "") for name in ("killed", "survived", "equivalent", "unfinished")]
    rate = 100 * counts["killed"] / judged if judged else 0.0
    figures.append(Figure("killed, of killed and survived", rate, "%", at_least=95, note=f"seed {options.seed}"))
    show("Mutants", figures)


if __name__ == "__main__":
    main()
