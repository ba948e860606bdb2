"""What `shoal new` writes works as it is, and it never writes over anything or leaves a half behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cli.scaffold import FILES, KINDS, LONGEST_NAME, write_all, write_plugin
from shoal.errors import ExperimentError
from shoal.experiment.registry import find
from shoal.testing import check_sharing

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def assert_refused(said: Any, *words: str) -> None:
    assert said.code == 2, said
    assert said.err.startswith("error: new: ")
    assert "Traceback" not in said.err + said.out
    for word in words:
        assert word in said.err


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


def test_the_tests_that_are_written_pass(written: Path) -> None:
    tests = [f"test_my_{kind}.py" for kind in KINDS]  # all in one process, which imports torch once
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "-rA", *tests]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # pytest is all they need
    done = subprocess.run(command, cwd=written, env=bare, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for test in tests:
        assert len(re.findall(rf"^PASSED {test}::", done.stdout, re.MULTILINE)) >= 3, done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_experiments_that_are_written_run_from_any_folder(
    kind: str, written: Path, shoal: Callable[..., Any]
) -> None:
    said = shoal("run", written / f"my_{kind}.toml", "--set", "algorithm.rounds=2")
    assert said.code == 0, said
    assert "completed" in said.out


@pytest.mark.parametrize("name", ["x", "my-own2", "a" * LONGEST_NAME], ids=len)
def test_what_is_written_passes_our_own_lint_whatever_the_length_of_its_name(name: str, tmp_path: Path) -> None:
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        write_plugin(kind, name, tmp_path / kind)
    ours = ["--no-cache", "--config", str(PROJECT), "--config", 'src = ["*"]']
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, *ours]
        done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_says_what_it_wrote_and_what_to_try(shoal: Callable[..., Any]) -> None:
    Path("my folder").mkdir()
    said = shoal("new", "sharing", "every-other", "--out", "my folder")
    assert said.code == 0
    assert {path.name for path in Path("my folder").iterdir()} == {
        "every_other.py",
        "test_every_other.py",
        "every_other.toml",
    }
    assert "\n  shoal run 'my folder/every_other.toml'\n  pytest 'my folder/test_every_other.py'\n" in said.out
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


# A sharing of one's own

TOP_K = '''\
"""Top-k: the values that changed most."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal import NodeId, Params, Payload
from shoal.compression.compressors import Fraction, Part, SparseCode
from shoal.compression.floats import Float32
from shoal.compression.indices import GolombRice
from shoal.compression.sparse import top_positions
from shoal.sharing.payload_cache import fill_in
from shoal.state import State

CODE = SparseCode(Float32(), GolombRice())


@dataclass
class Sparse:
    """The `fraction` of the values that changed most since they were last said."""

    fraction: Fraction = 0.1

    def start(self, params: Params) -> None:
        self.said = params.copy()

    def outgoing(self, params: Params, round: int) -> Payload:
        positions = top_positions(params - self.said, max(1, int(self.fraction * params.size)))
        self.said[positions] = params[positions]
        return CODE.pack(Part(params[positions], positions), params.size, None)

    def check(self, payload: Payload, params: Params) -> None:
        CODE.unpack(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        return fill_in(params, {peer: CODE.unpack(said, params.size) for peer, said in received.items()}, weights)

    def state(self) -> State: return {"said": self.said.copy()}
    def restore(self, state: State) -> None: self.said = state["said"].copy()
'''


def test_the_sharing_that_is_written_is_short(written: Path) -> None:
    assert len((written / "my_sharing.py").read_text().splitlines()) < 40


def test_top_k_is_the_sharing_with_a_few_lines_changed(shoal: Callable[..., Any], tmp_path: Path) -> None:
    assert len(TOP_K.splitlines()) < 40
    assert shoal("new", "sharing", "sparse").code == 0
    Path("sparse.py").write_text(TOP_K)
    check_sharing(find("sharing", "sparse.py:Sparse", tmp_path), averages=False)
    results = {}
    for engine in ("simulation", "processes"):
        quick = ["--set", "nodes=4", "--set", "algorithm.rounds=20", "--set", "simulation.batching=off"]
        said = shoal("run", "sparse.toml", "--engine", engine, *quick, "--out", engine)
        assert said.code == 0, said
        [summary] = Path(engine).rglob("summary.json")
        results[engine] = json.loads(summary.read_text())
    simulated, real = results["simulation"], results["processes"]
    assert simulated["digest"] == real["digest"]
    assert simulated["bytes_sent"]["total"] == real["bytes_sent"]["total"]
    assert simulated["accuracy"]["mean"] > 0.2  # by chance: 0.1


# What is refused


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", ["the name ''", "expected letters, digits, - and _"]),
        ("a b", ["the name 'a b'"]),
        ("../up", ["the name '../up'"]),
        ("mine.py", ["the name 'mine.py'"]),
        ("2nd", ["the first of them a letter"]),
        ("_x", ["the first of them a letter"]),
        ("é", ["expected letters, digits, - and _"]),
        ("mine\n", ["expected letters, digits, - and _"]),
        ("a" * (LONGEST_NAME + 1), ["has 41 characters; expected at most 40"]),
        ("class", ["'class' is a word of Python itself", "such as 'my-class'"]),
        ("none", ["'None' is a word of Python itself"]),
        ("numpy", ["'numpy' is a module already", "numpy.py would hide"]),
        ("torch", ["'torch' is a module already"]),
        ("shoal", ["'shoal' is a module already"]),
        ("random", ["'random' is a module already"]),
        ("sys", ["'sys' is a module already"]),
        ("conftest", ["'conftest' is pytest's own"]),
        ("payload", ["the class would be Payload", "such as 'my-payload'"]),
        ("value-error", ["the class would be ValueError"]),
        ("test-run", ["pytest would take the class TestRun for a test"]),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, words: list[str], shoal: Callable[..., Any]) -> None:
    assert_refused(shoal("new", "sharing", name), *words)
    assert not list(Path().iterdir())


def test_a_kind_that_cannot_be_is_refused(shoal: Callable[..., Any]) -> None:
    assert_refused(shoal("new", "sharin", "mine"), "unknown kind 'sharin'; did you mean 'sharing'?")
    assert_refused(shoal("new", "xyz", "mine"), "expected one of algorithm, dataset, sharing, topology")
    assert not list(Path().iterdir())


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_exists_is_named_and_kept(file: str, shoal: Callable[..., Any]) -> None:
    existing = Path(file.replace("plugin_name", "mine"))
    existing.write_text("precious")
    assert_refused(shoal("new", "dataset", "mine"), f"'{existing}' exists and is not overwritten")
    assert list(Path().iterdir()) == [existing]
    assert existing.read_text() == "precious"


def test_all_files_that_exist_are_named_at_once(shoal: Callable[..., Any]) -> None:
    assert shoal("new", "topology", "mine").code == 0
    before = {path: path.read_text() for path in Path().iterdir()}
    Path("mine.toml").unlink()
    Path("mine.toml").symlink_to("nowhere")  # a link that leads nowhere is in the way as well
    assert_refused(shoal("new", "sharing", "mine"), "3 problems", "'mine.py'", "'test_mine.py'", "'mine.toml'")
    assert Path("mine.py").read_text() == before[Path("mine.py")]
    assert not Path("nowhere").exists()


def test_a_folder_that_is_not_there_or_cannot_be_written_to_is_refused(shoal: Callable[..., Any]) -> None:
    assert_refused(shoal("new", "sharing", "mine", "--out", "deep/down"), "there is no folder 'deep/down'; make it")
    Path("file").touch()
    assert_refused(shoal("new", "sharing", "mine", "--out", "file"), "'file' is not a folder")
    assert_refused(shoal("new", "sharing", "mine", "--out", "/proc"), "cannot write '/proc/mine.py'")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(shoal: Callable[..., Any]) -> None:
    Path("closed").mkdir(mode=0o500)
    assert_refused(shoal("new", "sharing", "mine", "--out", "closed"), "cannot write 'closed/mine.py': Permission")


def test_where_one_file_cannot_be_written_none_is_left(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("precious")
    with pytest.raises(ExperimentError, match=f"cannot write '{tmp_path}/c': File exists"):
        write_all({tmp_path / "a": "1", tmp_path / "b": "2", tmp_path / "c": "3"})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert (tmp_path / "c").read_text() == "precious"
