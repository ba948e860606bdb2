"""Modules that lie beside a plug-in file: who imports them, and the copies that a run keeps of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiment_tables import problems
from shoal import resume
from shoal.cli.deploy.deployment import Resources, plan_deployment
from shoal.cli.deploy.kubernetes import KubernetesOptions, kubernetes_files
from shoal.engines.processes.remote.shipping import Shipment
from shoal.errors import ExperimentError, RunError
from shoal.experiment import Experiment
from shoal.plugins import load

ALGORITHM = """
from dataclasses import dataclass
from my_factors import FACTOR

@dataclass(frozen=True)
class Mine:
    rounds: int = 2

    async def run(self, node):
        import my_package.numbers  # during the run, on every node
        async for r in node.rounds(self.rounds):
            node.params = FACTOR * my_package.numbers.ONE * await node.train(node.params)
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(node.params, received, node.weights(received))
"""
TOML = """
name       = "beside"
nodes      = 4
algorithm  = { name = "code/mine.py:Mine" }
training   = { batch_size = 8, local_steps = 1 }
simulation = { batching = "off" }
checkpoint = { every = 1 }
"""
GROUP = """
[[group]]
nodes     = "0"
algorithm = { name = "other/mine.py:Mine" }
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files of Python, by their paths without the ending."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The folder of an experiment with a plug-in that needs a module and a package of its folder."""
    folder = tmp_path / "sources"
    for code, factor in (("code", 0.5), ("other", 0.25)):
        package = {
            "__init__": "def scale(x):\n    return 1.0 * x",
            "numbers": "from .one import ONE",
            "one": "ONE = 1.0",
        }
        write(folder / code / "my_package", package)
        write(
            folder / code,
            {"mine": ALGORITHM, "my_factors": f"from my_package import scale\nFACTOR = scale({factor})"},
        )
    (folder / "e.toml").write_text(TOML)
    return folder


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_a_plug_in_imports_modules_of_its_folder_and_its_run_can_be_repeated_elsewhere(
    engine: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    first = Experiment.from_file(sources / "e.toml", {"engine": engine}).run(tmp_path / "runs")
    assert first.summary["status"] == "completed"
    copies = sorted(str(path.relative_to(first.folder.path)) for path in first.folder.path.rglob("*.py"))
    package = [f"plugins/my_package/{name}.py" for name in ("__init__", "numbers", "one")]
    assert copies == ["plugins/mine.py", "plugins/my_factors.py", *package]
    assert sorted(first.folder.read_experiment()["plugins"]) == copies
    moved = tmp_path / "elsewhere"
    first.folder.path.rename(moved)
    shutil.rmtree(sources)
    second = Experiment.from_file(moved / "experiment.toml").run(tmp_path / "runs")
    assert second.summary["digest"] == first.summary["digest"]


def test_the_command_finds_modules_beside_a_plug_in_in_both_engines(sources: Path) -> None:
    command = Path(sys.executable).parent / "shoal"  # its folder is on sys.path, and the working folder is not
    digests = []
    for engine in ("simulation", "processes"):
        arguments = [command, "run", "e.toml", "--engine", engine]
        done = subprocess.run(arguments, cwd=sources, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout.partition("digest")[2].split()[0])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_every_folder_has_its_own_modules(engine: str, sources: Path, tmp_path: Path) -> None:
    settings = {"engine": engine, "topology": "full"}
    digests = []
    for factor, group in ((0.25, GROUP), (0.5, GROUP), (0.5, "")):
        (sources / "other" / "my_factors.py").write_text(f"FACTOR = {factor}")
        (sources / "e.toml").write_text(TOML + group)
        digests.append(Experiment.from_file(sources / "e.toml", settings).run(tmp_path / "runs").summary["digest"])
    assert digests[0] != digests[1] == digests[2]
    kept = sorted(str(p) for p in tmp_path.glob("runs/*/*/plugins/2/my_factors.py"))
    assert len(kept) == 2


def test_a_resumed_run_uses_the_copies_of_modules(sources: Path, tmp_path: Path) -> None:
    undisturbed = Experiment.from_file(sources / "e.toml").run(tmp_path / "runs")
    stopped = Experiment.from_file(sources / "e.toml").run(tmp_path / "runs")
    stopped.folder.summary.unlink()
    shutil.rmtree(stopped.folder.path / "checkpoints" / "round-1")
    shutil.rmtree(sources)
    assert resume(stopped.folder.path).summary["digest"] == undisturbed.summary["digest"]


def test_a_copy_of_a_module_that_was_changed_is_rejected(sources: Path, tmp_path: Path) -> None:
    run = Experiment.from_file(sources / "e.toml").run(tmp_path / "runs")
    (run.folder.path / "plugins" / "my_package" / "one.py").write_text("raise AssertionError('imported')")
    with pytest.raises(ExperimentError, match=r"'plugins/my_package/one.py' has changed .* SHA-256 is [0-9a-f]{64}"):
        Experiment.from_file(run.folder.experiment)


def test_an_edited_module_is_loaded_again_with_all_plug_ins_that_import_it(sources: Path, tmp_path: Path) -> None:
    write(sources / "code", {"second": "from my_factors import FACTOR\nfrom mine import Mine"})
    first = Experiment.from_file(sources / "e.toml").run(tmp_path / "runs")
    assert load(f"{sources / 'code' / 'second.py'}:FACTOR") == 0.5
    (sources / "code" / "my_factors.py").write_text("FACTOR = 0.7")
    second = Experiment.from_file(sources / "e.toml").run(tmp_path / "runs")
    assert second.summary["digest"] != first.summary["digest"]
    assert (second.folder.path / "plugins" / "my_factors.py").read_text() == "FACTOR = 0.7"
    assert load(f"{sources / 'code' / 'second.py'}:FACTOR") == 0.7
    assert load(f"{sources / 'code' / 'second.py'}:Mine") is load(f"{sources / 'code' / 'mine.py'}:Mine")


def test_node_processes_do_not_start_with_a_module_that_has_changed(sources: Path, tmp_path: Path) -> None:
    experiment = Experiment.from_file(sources / "e.toml", {"engine": "processes"})
    (sources / "code" / "my_factors.py").write_text("FACTOR = 0.7")
    with pytest.raises(ExperimentError, match=r"my_factors.py' has changed since the run began"):
        experiment.run(tmp_path / "runs")


def test_agents_get_the_modules_beside_a_plug_in(sources: Path) -> None:
    (sources / "e.toml").write_text(TOML + GROUP)
    experiment = Experiment.from_file(sources / "e.toml", {"engine": "processes"})
    shipment = Shipment(experiment)
    names = {file.name for file in shipment.files}
    assert names == {
        f"{folder}/{name}.py"
        for folder in (0, 1)
        for name in ("mine", "my_factors", "my_package/__init__", "my_package/numbers", "my_package/one")
    }
    assert shipment.table["algorithm"]["name"] == "0/mine.py:Mine"
    assert shipment.table["group"][0]["algorithm"]["name"] == "1/mine.py:Mine"
    manifest = kubernetes_files(plan_deployment(experiment, 2, Resources()), KubernetesOptions())["kubernetes.yaml"]
    assert all(f"path: {name}" in manifest.decode() for name in names)
    assert manifest.decode().count("ONE = 1.0") == 2


def test_agents_get_a_file_that_is_a_plug_in_and_belongs_to_a_package_of_another_plug_in(sources: Path) -> None:
    write(sources / "code" / "my_package", {"inner": ALGORITHM.replace("from my_factors import FACTOR", "FACTOR = 1")})
    group = {"nodes": "0", "algorithm": {"name": "code/mine.py:Mine"}}
    settings = {"engine": "processes", "algorithm.name": "code/my_package/inner.py:Mine", "group": [group]}
    shipment = Shipment(Experiment.from_file(sources / "e.toml", settings))
    names = {file.name for file in shipment.files}
    assert {"0/inner.py", "1/mine.py", "1/my_package/inner.py"} <= names
    assert shipment.table["algorithm"]["name"] == "0/inner.py:Mine"


OUTER = """
from dataclasses import dataclass, field
from typing import Annotated
from shoal.sharing import Sharing
from shoal.types import Nested
from my_package.inner import Inner

@dataclass(frozen=True)
class Outer:
    inner: Annotated[Sharing, Nested("sharing")] = field(default_factory=Inner)

    def start(self, params):
        self.inner.start(params)

    def outgoing(self, params, round):
        return self.inner.outgoing(params, round)

    def merge(self, params, received, weights):
        return self.inner.merge(params, received, weights)
"""


def test_a_component_of_a_package_is_loaded_with_the_plug_in_that_imports_it(sources: Path, tmp_path: Path) -> None:
    inner = "from shoal.sharing.full import FullSharing\nfrom .one import ONE\nclass Inner(FullSharing): ..."
    write(sources / "code", {"outer": OUTER, "my_package/inner": inner})
    settings = {"engine": "processes", "sharing": {"name": "code/outer.py:Outer"}}
    experiment = Experiment.from_file(sources / "e.toml", settings)
    assert experiment.to_table()["sharing"]["inner"]["name"] == f"{sources / 'code' / 'outer.py'}:Inner"
    run = experiment.run(tmp_path / "runs")
    assert run.summary["status"] == "completed"
    assert run.folder.read_experiment()["sharing"]["inner"]["name"] == "plugins/outer.py:Inner"
    Experiment.from_file(run.folder.experiment)


# Import statements

IMPORTS = """
import my_a, json, my_package.inner
import my_package.inner as renamed
import my_a as other_name
from my_package import inner as third
from my_package.inner import VALUE
from my_a import VALUE as from_a

def values():
    import my_a
    return [my_a.VALUE, other_name.VALUE, from_a, my_package.inner.VALUE, renamed.VALUE, third.VALUE, VALUE]

same = my_package.inner is renamed is third
"""


def test_every_form_of_import_works(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "plug_in": IMPORTS,
            "my_a": "import plug_in\nVALUE = 1",
            "my_package/__init__": "import my_package.inner",
            "my_package/inner": "from my_a import VALUE as A\nfrom . import deep\nVALUE = A + deep.VALUE",
            "my_package/deep": "VALUE = 1",
        },
    )
    assert load(f"{tmp_path / 'plug_in.py'}:values")() == [1, 1, 1, 2, 2, 2, 2]
    assert load(f"{tmp_path / 'plug_in.py'}:same")
    assert not {"my_a", "my_package", "plug_in"} & sys.modules.keys()


def test_a_plug_in_with_the_name_of_a_library_imports_the_library(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "networkx": "import networkx\nring = networkx.cycle_graph",
            "shoal": "raise AssertionError('imported')",
            "other": "from networkx import ring\nimport shoal\nnode = shoal.Node",
        },
    )
    assert load(f"{tmp_path / 'networkx.py'}:ring")(3).number_of_edges() == 3
    assert load(f"{tmp_path / 'other.py'}:node").__module__ == "shoal.node"


def test_a_module_of_a_package_may_be_named_shoal(tmp_path: Path) -> None:
    files = {"plug_in": "from my_package.shoal import VALUE", "my_package/__init__": "", "my_a": "VALUE = 1"}
    write(tmp_path, {**files, "my_package/shoal": "import shoal\nfrom my_a import VALUE\nshoal.Node"})
    assert load(f"{tmp_path / 'plug_in.py'}:VALUE") == 1


def test_the_name_of_a_plug_in_file_may_have_dots(tmp_path: Path) -> None:
    write(tmp_path, {"mine.v2": "from my_a import VALUE", "my_a": "VALUE = 1"})
    assert load(f"{tmp_path / 'mine.v2.py'}:VALUE") == 1


SCRIPT = """
import sys
from pathlib import Path
import shoal
from torch import nn
from my_widths import WIDTH

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, x):
        return self.layers(x)

if __name__ == "__main__":
    common = dict(nodes=2, algorithm={"name": "my_algorithm.py:Mine"}, base=Path(sys.argv[1]), model=Net)
    runs = [shoal.Experiment(engine=engine, simulation={"batching": "off"}, **common).run(sys.argv[2])
            for engine in ("simulation", "processes")]
    print(len({run.summary["digest"] for run in runs}), type(runs[0].model(0)) is Net)
"""


def test_processes_import_what_a_script_imports_and_plug_ins_import_the_script(tmp_path: Path) -> None:
    algorithm = ALGORITHM.replace("from my_factors import FACTOR", "from my_script import Net\nFACTOR = 0.5")
    algorithm = algorithm.replace("import my_package.numbers", "").replace("* my_package.numbers.ONE ", "")
    code = write(tmp_path / "code", {"my_script": SCRIPT, "my_widths": "WIDTH = 7", "my_algorithm": algorithm})
    command = [sys.executable, str(code / "my_script.py"), str(code), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "True"]


# Modules that are not found


def test_plug_ins_do_not_import_modules_of_the_working_folder_in_any_engine(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path / "here", {"elsewhere": "ONE = 1.0"}))
    (sources / "code" / "mine.py").write_text(ALGORITHM.replace("my_package.numbers", "elsewhere"))
    with pytest.raises(RunError, match="No module named 'elsewhere'"):
        Experiment.from_file(sources / "e.toml", {"engine": "simulation"}).run(tmp_path / "runs")
    run = Experiment.from_file(sources / "e.toml", {"engine": "processes"}).run(tmp_path / "runs")
    assert run.summary["status"] == "failed"
    assert "No module named 'elsewhere'" in run.summary["lost"]["0"]


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (
            "from here_only import X",
            "'here_only.py' is in the working folder, but a plug-in imports modules of its own",
        ),
        (
            "from plain_folder import X",
            "plain_folder beside this file is not a package: add an empty file plain_folder/",
        ),
        ("from plain_folder.inner import X", "add an empty file plain_folder/__init__.py"),
        ("from .my_a import X", "a plug-in file imports the modules beside it without a dot: from module import name"),
        ("from my_a import X", "ImportError: cannot import name 'X' from 'my_a' ("),
        ("import raises", "KeyError: 'no' (line 2 of '{folder}/raises.py')"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all' (line 1)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_with_advice(
    statement: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"mine": statement, "my_a": "", "raises": "a = {}\na['no']", "plain_folder/inner": "X = 1"}
    folder = write(tmp_path / "code", files)
    monkeypatch.chdir(write(tmp_path / "here", {"here_only": "X = 1"}))
    table: dict[str, Any] = {"algorithm": {"name": "mine.py:Mine"}}
    (found,) = problems(table, base=folder)
    assert problem.format(folder=folder) in found
