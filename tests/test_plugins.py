"""Plug-ins: where they are found, which ones are rejected, and the copies that a run keeps."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from experiment_tables import PLUGIN, problems
from shoal import resume
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.interfaces import INTERFACES
from shoal.experiment.registry import REGISTRIES
from shoal.experiment.running import Run
from shoal.plugins import load_class
from shoal.results.records import RunFolder


def test_a_plugin_file_is_found_beside_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text(PLUGIN)
    (tmp_path / "e.toml").write_text('algorithm = { name = "plugins/mine.py:Mine", alpha = 0.2 }')
    monkeypatch.chdir("/")
    experiment = Experiment.from_file(tmp_path / "e.toml")
    assert experiment.algorithm.build().alpha == 0.2
    assert experiment.algorithm.name == f"{tmp_path / 'plugins' / 'mine.py'}:Mine", (
        "absolute, since nodes may start in another folder"
    )
    assert Experiment.from_table(experiment.to_table()) == experiment


def test_a_plugin_in_a_module_is_found_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_shoal_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = Experiment.from_table({"algorithm": {"name": "my_shoal_plugin:Mine"}})
    assert type(experiment.algorithm.build()).__module__ == "my_shoal_plugin"
    monkeypatch.delitem(sys.modules, "my_shoal_plugin")


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("none.py:Mine", {}, "there is no file '{base}/none.py'"),
        ("raises.py:Mine", {}, "'{base}/raises.py' raised on import: KeyError: 'a key'"),
        ("leaves.py:Mine", {}, "'{base}/leaves.py' raised on import: SystemExit: 4"),
        ("syntax.py:Mine", {}, "'{base}/syntax.py' raised on import: SyntaxError: "),
        ("line.py:Mine", {}, "raised on import: NameError: name 'b' is not defined (line 2)"),
        ("mine.py:Mime", {}, "{base}/mine.py has no class 'Mime'; did you mean 'Mine'?"),
        ("mine.py:function", {}, "{base}/mine.py has no class 'function'; expected one of Mine"),
        ("nowhere.at_all:Mine", {}, "importing 'nowhere.at_all' failed: ModuleNotFoundError"),
        ("mine.py:Mine", {"alhpa": 1}, "algorithm.alhpa: unknown key; did you mean 'alpha'?"),
        ("mine.py:Mine", {"alpha": 2}, "algorithm.alpha = 2: expected number at least 0 and at most 1"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_rejected(
    name: str, options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "raises.py").write_text("raise KeyError('a key')")
    (tmp_path / "leaves.py").write_text("raise SystemExit(4)")
    (tmp_path / "syntax.py").write_text("def (:")
    (tmp_path / "line.py").write_text("a = 1\na = b\n")
    (found,) = problems({"algorithm": {"name": name, **options}}, base=tmp_path)
    assert problem.format(base=tmp_path) in found


def test_a_module_name_that_is_a_file_gets_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_file_here.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    (found,) = problems({"algorithm": {"name": "my_file_here:Mine"}})
    assert "No module named 'my_file_here'; for the file my_file_here.py, write my_file_here.py:…" in found


# The members that a plug-in must have

EMPTY = """
from dataclasses import dataclass
from shoal.sharing.sharing import Sharing

@dataclass(frozen=True)
class Empty:
    pass

class OtherKind:
    def __init__(self, learner, samples: int):
        self.learner = learner

    def train(self, params):
        return params

class Inherits(Sharing):
    def start(self, params):
        pass

    def outgoing(self, params, round):
        return None
"""
NAME = {"name": "empty.py:Empty"}
MISSING: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": ({"algorithm": NAME}, "'async def run(self, node: Node) -> None' (shoal.algorithms.Algorithm)"),
    "server-optimizer": ({"algorithm": {"name": "fedavg", "server": NAME}}, "'def step(self, params: Params, "),
    "sharing": ({"sharing": NAME}, "'def start(self, params: Params) -> None' and method 'def outgoing("),
    "inherited": ({"sharing": {"name": "empty.py:Inherits"}}, "Inherits has no method 'def merge(self, params: Params"),
    "topology": ({"topology": NAME}, "'def build(self, nodes: int, seed: int) -> Graph'"),
    "dataset": ({"dataset": NAME}, "'def load(self, seed: int) -> Data' (shoal.data.dataset.Dataset)"),
    "partition": ({"dataset": {"name": "digits", "partition": NAME}}, "'def split(self, labels"),
    "augmentation": ({"dataset": {"name": "digits", "augmentation": [NAME]}}, "'def apply(self, x: torch.Tensor"),
    "model": ({"model": NAME}, "'def build(self, shape: tuple[int, ...], outputs: int) -> torch.nn.Module'"),
    "network": ({"network": NAME}, "'def build(self, nodes: int, seed: int) -> NetworkTimeline | None'"),
    "speed": ({"speed": NAME}, "'def speed(self, node: NodeId, seed: int, batch_size: int) -> Speed'"),
    "availability": ({"availability": NAME}, "'def build(self, nodes: int, seed: int) -> AvailabilitySchedule"),
    "trainer": ({"trainer": NAME}, "'def create_factory(self, inputs: TrainerInputs) -> TrainerFactory'"),
    "other kind": ({"trainer": {"name": "empty.py:OtherKind"}}, "OtherKind has no method 'def create_factory("),
    "schedule": ({"training": {"schedule": NAME}}, "'def scale(self, t: int) -> float'"),
    "mapping": ({"mapping": NAME}, "'def place(self, nodes: int, "),
    "compressor": ({"sharing": {"name": "choco", "compressor": NAME}}, "attribute 'stochastic' and method 'def fit("),
    "values": ({"sharing": {"name": "topk", "values": NAME}}, "attribute 'lossless' and attribute 'stochastic'"),
    "indices": ({"sharing": {"name": "topk", "indices": NAME}}, "'def encode(self, positions: Positions, size: int)"),
}


@pytest.mark.parametrize("kind", MISSING)
def test_a_plugin_without_a_required_member_is_rejected(kind: str, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text(EMPTY)
    table, problem = MISSING[kind]
    (found,) = problems(table, base=tmp_path)
    assert "name = 'empty.py:" in found
    assert problem in found


def test_every_kind_of_component_has_an_interface() -> None:
    assert INTERFACES.keys() == REGISTRIES.keys() == MISSING.keys() - {"inherited", "other kind"}


TRAINER = """
import numpy as np

class Trainer:
    step_seconds = cpu_seconds = 0.0
    samples = 3

    def train(self, params, steps=None): ...
    def evaluate(self, params): ...
    {trainer_steps}

class Factory:
    initial, shapes = np.zeros(2, np.float32), ((2,),)

    def trainer(self, node, training, step_seconds):
        return Trainer()
    def warm_up(self, node, training): ...
    {factory_evaluate}

class Backend:
    def create_factory(self, inputs):
        return Factory()
"""


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ({"factory_evaluate": ""}, "Factory has no method 'def evaluate(self, params: Params) -> dict[str, float]'"),
        ({"trainer_steps": ""}, "Trainer has no method 'def steps(self, steps: int | None) -> int'"),
    ],
)
@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_what_a_trainer_creates_must_have_its_members(
    engine: str, code: dict[str, str], problem: str, tmp_path: Path
) -> None:
    methods = {"trainer_steps": "def steps(self, steps): ...", "factory_evaluate": "def evaluate(self, params): ..."}
    (tmp_path / "own.py").write_text(TRAINER.format(**{**methods, **code}))
    described = Experiment(nodes=2, engine=engine, trainer={"name": "own.py:Backend"}, base=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ExperimentError, match=re.escape(f"own.py:Backend': {problem}")):
        described.run(tmp_path / "runs")


# The copies that a run keeps

ALGORITHM = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Mine:
    rounds: int = 2

    async def run(self, node):
        async for r in node.rounds(self.rounds):
            node.params = {factor} * await node.train(node.params)
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(node.params, received, node.weights(received))
"""

COMPRESSOR = """
from dataclasses import dataclass
from shoal.compression.compressors import QuantizedCompressor

class Inner(QuantizedCompressor):
    pass

@dataclass(frozen=True)
class Coarse(QuantizedCompressor):
    pass
"""

TOML = """
name       = "kept"
nodes      = 4
engine     = "{engine}"
algorithm  = {{ name = "code/mine.py:Mine" }}
sharing    = {{ name = "choco", compressor = {{ name = "code/coarse.py:Coarse" }} }}
training   = {{ batch_size = 8, local_steps = 1 }}
simulation = {{ batching = "off" }}
checkpoint = {{ every = 1 }}

[[group]]
nodes     = "0"
algorithm = {{ name = "other/mine.py:Mine", rounds = 2 }}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The folder of an experiment with plug-ins: in a component, and in a group in a file of the same name."""
    folder = tmp_path / "sources"
    for file, text in {
        "code/mine.py": ALGORITHM.format(factor="0.5"),
        "other/mine.py": ALGORITHM.format(factor="0.25"),
        "code/coarse.py": COMPRESSOR,
        "e.toml": TOML.format(engine="simulation"),
    }.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def kept(run: Run) -> dict[str, str]:
    return {
        str(path.relative_to(run.folder.path)): path.read_text() for path in run.folder.path.glob("plugins/**/*.py")
    }


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_a_run_can_be_repeated_elsewhere_without_the_original_plugins(
    engine: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Experiment.from_file(sources / "e.toml", {"engine": engine}).run(tmp_path / "runs")
    assert kept(first) == {
        "plugins/mine.py": ALGORITHM.format(factor="0.5"),
        "plugins/2/mine.py": ALGORITHM.format(factor="0.25"),
        "plugins/coarse.py": COMPRESSOR,
    }
    assert str(sources) not in first.folder.experiment.read_text()
    moved = tmp_path / "elsewhere"
    first.folder.path.rename(moved)
    shutil.rmtree(sources)
    monkeypatch.chdir("/")
    second = Experiment.from_file(moved / "experiment.toml").run(tmp_path / "runs")
    assert second.summary["digest"] == first.summary["digest"]
    assert kept(second) == kept(Run(RunFolder(moved), first.summary))


def test_a_copy_that_was_changed_is_rejected_before_it_is_imported(sources: Path, tmp_path: Path) -> None:
    run = Experiment.from_file(sources / "e.toml").run(tmp_path / "runs")
    copy = run.folder.path / "plugins" / "coarse.py"
    copy.write_text("raise AssertionError('imported')")
    with pytest.raises(ExperimentError, match=r"'plugins/coarse.py' has changed .* SHA-256 is [0-9a-f]{64}, expected"):
        Experiment.from_file(run.folder.experiment)
    text = run.folder.experiment.read_text()
    copy.write_text(COMPRESSOR + "\n# changed")
    run.folder.experiment.write_text(re.sub(r'"plugins/coarse.py" = .*\n', "", text))
    assert Experiment.from_file(run.folder.experiment).nodes == 4


@pytest.mark.parametrize("hashes", [3, ["a"], {"a.py": 1}])
def test_a_table_of_hashes_that_no_run_has_written_is_rejected(hashes: Any) -> None:
    (found,) = problems({"plugins": hashes})
    assert "expected a table of files and their SHA-256" in found


def test_a_resumed_run_uses_its_copies(sources: Path, tmp_path: Path) -> None:
    settings = {"algorithm.rounds": 4, "group": []}
    undisturbed = Experiment.from_file(sources / "e.toml", settings).run(tmp_path / "runs")
    stopped = Experiment.from_file(sources / "e.toml", settings).run(tmp_path / "runs")
    stopped.folder.summary.unlink()
    shutil.rmtree(stopped.folder.path / "checkpoints" / "round-3")
    (sources / "code" / "mine.py").write_text("raise AssertionError('the original')")
    assert resume(stopped.folder.path).summary["digest"] == undisturbed.summary["digest"]


def test_an_edited_plugin_is_loaded_again_and_the_copy_is_what_ran(sources: Path, tmp_path: Path) -> None:
    first = Experiment.from_file(sources / "e.toml").run(tmp_path / "runs")
    (sources / "code" / "mine.py").write_text(ALGORITHM.format(factor="0.7"))
    second = Experiment.from_file(sources / "e.toml").run(tmp_path / "runs")
    assert second.summary["digest"] != first.summary["digest"]
    assert "0.7" in kept(second)["plugins/mine.py"]


def test_node_processes_do_not_start_with_a_plugin_that_has_changed(sources: Path, tmp_path: Path) -> None:
    experiment = Experiment.from_file(sources / "e.toml", {"engine": "processes"})
    (sources / "code" / "mine.py").write_text(ALGORITHM.format(factor="0.7"))
    with pytest.raises(ExperimentError, match=r"mine.py' has changed since the run began"):
        experiment.run(tmp_path / "runs")


def test_a_class_of_a_plugin_file_is_named_by_the_file(sources: Path) -> None:
    coarse = sources / "code" / "coarse.py"
    inner = load_class(f"{coarse}:Inner")()
    experiment = Experiment(sharing={"name": "choco", "compressor": inner})
    assert experiment.sharing.to_table()["compressor"]["name"] == f"{coarse}:Inner"


def test_runs_of_components_of_shoal_keep_no_plugins(tmp_path: Path) -> None:
    run = Experiment(nodes=2, algorithm={"name": "dpsgd", "rounds": 1}).run(tmp_path)
    assert not (run.folder.path / "plugins").exists()
    assert "plugins" not in run.folder.read_experiment()


@pytest.mark.parametrize(
    ("kind", "key"), [("dataset", "validation"), ("dataset", "partition"), ("topology", "weights")]
)
def test_a_parameter_with_the_name_of_a_key_of_every_experiment_is_rejected(
    kind: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        f"class Own:\n    def __init__(self, {key}: float = 0.5):\n        self.{key} = {key}\n"
    )
    table = {kind: {"name": "own.py:Own"}}
    with pytest.raises(ExperimentError, match=rf"Own has a parameter '{key}', but {kind}\.{key} is a key of every"):
        Experiment.from_table(table, base=tmp_path)
