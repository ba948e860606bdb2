"""`shoal new` writes a working plug-in, never overwrites a file, and leaves no incomplete plug-in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cli.scaffold import FILES, KINDS, LONGEST_NAME, write_all, write_plugin
from shoal.errors import ExperimentError
from shoal.experiment.registry import find
from shoal.testing import check_sharing

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
OTHER_USER = 65534


def assert_rejected(result: Any, *texts: str) -> None:
    assert result.code == 2, result
    assert result.err.startswith("error: new: ")
    assert "Traceback" not in result.err + result.out
    for text in texts:
        assert text in result.err


# What is written


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one plug-in of each kind, called my-sharing, my-algorithm, …"""
    folder = tmp_path_factory.mktemp("written")
    for kind in KINDS:
        with pytest.raises(SystemExit) as ended:
            main(["new", kind, f"my-{kind}", "--out", str(folder)])
        assert not ended.value.code
    return folder


@pytest.mark.parametrize("kinds", [KINDS[:4], KINDS[4:]], ids=" ".join)
def test_the_written_tests_pass(kinds: tuple[str, ...], written: Path) -> None:
    tests = [f"test_my_{kind}.py" for kind in kinds]  # one process: it imports torch once
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "-rA", *tests]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they need only pytest
    done = subprocess.run(command, cwd=written, env=bare, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for test in tests:
        assert len(re.findall(rf"^PASSED {test}::", done.stdout, re.MULTILINE)) >= 3, done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_experiments_run_from_any_folder(kind: str, written: Path, shoal: Callable[..., Any]) -> None:
    result = shoal("run", written / f"my_{kind}.toml", "--set", "algorithm.rounds=2")
    assert result.code == 0, result
    assert "completed" in result.out


@pytest.mark.parametrize("name", ["x", "my-own2", "a" * LONGEST_NAME], ids=len)
def test_the_written_code_passes_our_lint_for_names_of_any_length(name: str, tmp_path: Path) -> None:
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        write_plugin(kind, name, tmp_path / kind)
    ours = ["--no-cache", "--config", str(PROJECT), "--config", 'src = ["*"]']
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, *ours]
        done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_new_prints_what_it_wrote_and_how_to_use_it(shoal: Callable[..., Any]) -> None:
    Path("my folder").mkdir()
    result = shoal("new", "sharing", "every-other", "--out", "my folder")
    assert result.code == 0
    assert {path.name for path in Path("my folder").iterdir()} == {
        "every_other.py",
        "test_every_other.py",
        "every_other.toml",
    }
    assert "\n  shoal run 'my folder/every_other.toml'\n  pytest 'my folder/test_every_other.py'\n" in result.out
    assert shoal("new", "sharing", "here").out == (
        "wrote here.py, test_here.py and here.toml; try:\n  shoal run here.toml\n  pytest test_here.py\n"
    )


@pytest.mark.parametrize(
    ("name", "cls"), [("every-other", "EveryOther"), ("top_k", "TopK"), ("mySharing", "MySharing"), ("x2--y_", "X2Y")]
)
def test_the_class_is_in_camel_case(name: str, cls: str, tmp_path: Path) -> None:
    code, _, experiment = write_plugin("sharing", name, tmp_path)
    assert f"class {cls}:" in code.read_text()
    assert tomllib.loads(experiment.read_text())["sharing"]["name"] == f"{code.name}:{cls}"


@pytest.mark.parametrize("kind", KINDS)
def test_no_placeholder_is_left(kind: str, tmp_path: Path) -> None:
    for path in write_plugin(kind, "mine", tmp_path):
        assert not re.search("plugin.?name", path.read_text(), re.IGNORECASE)


# A user's own sharing

TOP_K = '''\
"""Top-k: the values that changed most."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal import NodeId, Params, Payload
from shoal.compression.compressors import Fraction, Part, SparseCode
from shoal.compression.floats import Float32
from shoal.compression.indices import GolombRice
from shoal.compression.sparse import top_positions
from shoal.sharing.sparse_merge import merge_sparse
from shoal.state import State

CODE = SparseCode(Float32(), GolombRice())


@dataclass
class Sparse:
    """The `fraction` of the values that changed most since they were last sent."""

    fraction: Fraction = 0.1

    def start(self, params: Params) -> None:
        self.sent = params.copy()

    def outgoing(self, params: Params, round: int) -> Payload:
        positions = top_positions(params - self.sent, max(1, int(self.fraction * params.size)))
        self.sent[positions] = params[positions]
        return CODE.pack(Part(params[positions], positions), params.size, None)

    def check(self, payload: Payload, params: Params) -> None:
        CODE.unpack(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        parts = {peer: CODE.unpack(payload, params.size) for peer, payload in received.items()}
        return merge_sparse(params, parts, weights)

    def state(self) -> State: return {"sent": self.sent.copy()}
    def restore(self, state: State) -> None: self.sent = state["sent"].copy()
'''


def test_the_written_sharing_is_short(written: Path) -> None:
    assert len((written / "my_sharing.py").read_text().splitlines()) < 40


def test_top_k_is_the_sharing_with_a_few_lines_changed(shoal: Callable[..., Any], tmp_path: Path) -> None:
    assert len(TOP_K.splitlines()) < 40
    assert shoal("new", "sharing", "sparse").code == 0
    Path("sparse.py").write_text(TOP_K)
    check_sharing(find("sharing", f"{tmp_path}/sparse.py:Sparse"), averages=False)
    results = {}
    for engine in ("simulation", "processes"):
        quick = ["--set", "nodes=4", "--set", "algorithm.rounds=20", "--set", "simulation.batching=off"]
        result = shoal("run", "sparse.toml", "--engine", engine, *quick, "--out", engine)
        assert result.code == 0, result
        [summary] = Path(engine).rglob("summary.json")
        results[engine] = json.loads(summary.read_text())
    simulated, real = results["simulation"], results["processes"]
    assert simulated["digest"] == real["digest"]
    assert simulated["bytes_sent"]["total"] == real["bytes_sent"]["total"]
    assert simulated["accuracy"]["mean"] > 0.2  # by chance: 0.1


# What is rejected


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("", ["the name ''", "expected letters, digits, - and _"]),
        ("a b", ["the name 'a b'"]),
        ("../up", ["the name '../up'"]),
        ("mine.py", ["the name 'mine.py'"]),
        ("2nd", ["starting with a letter"]),
        ("_x", ["starting with a letter"]),
        ("é", ["expected letters, digits, - and _"]),
        ("mine\n", ["expected letters, digits, - and _"]),
        ("a" * (LONGEST_NAME + 1), ["has 41 characters; expected at most 40"]),
        ("class", ["'class' is a keyword of Python", "such as 'my-class'"]),
        ("none", ["'None' is a keyword of Python"]),
        ("numpy", ["'numpy' is an existing module", "numpy.py would hide"]),
        ("torch", ["'torch' is an existing module"]),
        ("shoal", ["'shoal' is an existing module"]),
        ("random", ["'random' is an existing module"]),
        ("sys", ["'sys' is an existing module"]),
        ("conftest", ["'conftest' is a file of pytest"]),
        ("payload", ["the class would be Payload", "such as 'my-payload'"]),
        ("value-error", ["the class would be ValueError"]),
        ("test-run", ["pytest would take the class TestRun for a test"]),
    ],
)
def test_a_wrong_name_is_rejected(name: str, texts: list[str], shoal: Callable[..., Any]) -> None:
    assert_rejected(shoal("new", "sharing", name), *texts)
    assert not list(Path().iterdir())


def test_an_unknown_kind_is_rejected(shoal: Callable[..., Any]) -> None:
    assert_rejected(shoal("new", "sharin", "mine"), "unknown kind 'sharin'; did you mean 'sharing'?")
    assert_rejected(shoal("new", "xyz", "mine"), "expected one of algorithm, compressor, dataset")
    assert not list(Path().iterdir())


@pytest.mark.parametrize("file", FILES)
def test_an_existing_file_is_named_and_kept(file: str, shoal: Callable[..., Any]) -> None:
    existing = Path(file.replace("plugin_name", "mine"))
    existing.write_text("precious")
    assert_rejected(shoal("new", "dataset", "mine"), f"'{existing}' exists and is not overwritten")
    assert list(Path().iterdir()) == [existing]
    assert existing.read_text() == "precious"


def test_all_existing_files_are_named_at_once(shoal: Callable[..., Any]) -> None:
    assert shoal("new", "topology", "mine").code == 0
    before = {path: path.read_text() for path in Path().iterdir()}
    Path("mine.toml").unlink()
    Path("mine.toml").symlink_to("nowhere")  # a dangling link counts as existing
    assert_rejected(shoal("new", "sharing", "mine"), "3 problems", "'mine.py'", "'test_mine.py'", "'mine.toml'")
    assert Path("mine.py").read_text() == before[Path("mine.py")]
    assert not Path("nowhere").exists()


def test_a_missing_or_read_only_folder_is_rejected(shoal: Callable[..., Any]) -> None:
    assert_rejected(shoal("new", "sharing", "mine", "--out", "deep/down"), "there is no folder 'deep/down'; create it")
    Path("file").touch()
    assert_rejected(shoal("new", "sharing", "mine", "--out", "file"), "'file' is not a folder")
    assert_rejected(shoal("new", "sharing", "mine", "--out", "/proc"), "cannot write '/proc/mine.py'")


@contextlib.contextmanager
def not_as_root() -> Iterator[None]:
    """Act as another user: root may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_without_permission_is_rejected(shoal: Callable[..., Any]) -> None:
    Path().chmod(0o755)
    Path("closed").mkdir(mode=0o555)
    with not_as_root():
        result = shoal("new", "sharing", "mine", "--out", "closed")
    assert_rejected(result, "cannot write 'closed/mine.py': Permission")


def test_if_one_file_cannot_be_written_no_file_is_left(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("precious")
    with pytest.raises(ExperimentError, match=f"cannot write '{tmp_path}/c': File exists"):
        write_all({tmp_path / "a": "1", tmp_path / "b": "2", tmp_path / "c": "3"})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert (tmp_path / "c").read_text() == "precious"
