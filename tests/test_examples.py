"""Every example whose data is available runs: shortened, on a few nodes, in the simulation; some as processes."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import CommandResult
from shoal.data import store
from shoal.data.publishers import PUBLISHERS
from shoal.errors import DataError
from shoal.experiment import Experiment
from shoal.results.progress import main_metric
from shoal.results.records import Event

pytestmark = pytest.mark.slow

REAL = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parent.parent / "../shared/data").resolve()
CACHE = os.environ.get("SHOAL_CACHE")
FOLDER = Path(__file__).parent.parent / "examples"
INCLUDED = {"digits", "synthetic"}
"""Data sets that need no download."""
SWEEP = FOLDER / "sweep.toml"
FILES = [file for file in sorted(FOLDER.glob("*.toml")) if file != SWEEP]
EXAMPLES = [file for file in FILES if tomllib.loads(file.read_text())["dataset"]["name"] in INCLUDED]
DOWNLOADED = [file for file in FILES if file not in EXAMPLES]
LARGE = {"thousand-processes", "ten-thousand-simulated"}
NEEDS = {"flower": "flwr"}
"""Examples that need an optional package, and its module."""
NODES = 16
ROUNDS = 3
SHORT = {"algorithm.rounds": 2, "evaluation.every": 0, "evaluation.samples": 200, "training.local_steps": 2}
"""A short version of an example with real data."""


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Use the real data sets; the decoded ones are kept in the cache of the tests."""
    assert pytestconfig.cache is not None
    monkeypatch.setenv("SHOAL_DATA", str(REAL))
    monkeypatch.setenv("SHOAL_CACHE", CACHE or str(pytestconfig.cache.mkdir("shoal")))


def skip_without_data(file: Path) -> None:
    dataset = tomllib.loads(file.read_text())["dataset"]
    name = dataset["name"]
    if name in PUBLISHERS and PUBLISHERS[name].files:
        try:
            store.sources(name)
        except DataError as error:
            pytest.skip(str(error))
    elif not (folder := REAL / dataset.get("folder", name) / "train").is_dir():
        pytest.skip(f"dataset {name!r}: there is no {folder}; set SHOAL_DATA to the folder of data sets")


def shortened(file: Path, **more: Any) -> dict[str, Any]:
    nodes = tomllib.loads(file.read_text())["nodes"]
    few = 8 if file.stem in LARGE else min(nodes, NODES)
    overrides = {"nodes": few, "algorithm.rounds": ROUNDS, "evaluation.every": 0, **more}
    if file.stem in LARGE:
        overrides |= {"dataset.samples": 512, "dataset.test_samples": 64}
    return overrides


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_runs_in_the_simulation(file: Path, tmp_path: Path) -> None:
    if file.stem in NEEDS:
        pytest.importorskip(NEEDS[file.stem])
    overrides = shortened(file, engine="simulation", **{"simulation.batching": "off"})
    run = Experiment.from_file(file, overrides).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["rounds"] == ROUNDS
    assert run.summary["messages_sent"] > 0
    assert 0 <= run.summary["accuracy"]["mean"] <= 1


def test_the_example_of_a_sweep_runs(shoal: Callable[..., CommandResult]) -> None:
    done = shoal("sweep", SWEEP, "--seeds", 1, "--set", "algorithm.rounds=2", "--set", "nodes=6")
    assert done.code == 0, done.err
    assert "3/3 ended" in done.out


@pytest.mark.parametrize("name", ["fedavg", "epidemic", "compressed-gossip", "peer-sampling", "divshare-digits"])
def test_an_example_runs_as_processes(name: str, tmp_path: Path) -> None:
    file = FOLDER / f"{name}.toml"
    run = Experiment.from_file(file, shortened(file, engine="processes", nodes=6)).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["rounds"] == ROUNDS
    assert run.summary["messages_sent"] > 0


@pytest.mark.usefixtures("real_data")
@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")  # few links of few nodes are bipartite
@pytest.mark.parametrize("file", DOWNLOADED, ids=lambda file: file.stem)
def test_an_example_with_real_data_runs_in_the_simulation(file: Path, tmp_path: Path) -> None:
    skip_without_data(file)
    overrides = {**SHORT, "engine": "simulation", "nodes": 8, "simulation.batching": "off"}
    run = Experiment.from_file(file, overrides).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["rounds"] == SHORT["algorithm.rounds"]
    assert run.summary["messages_sent"] > 0
    assert 0 <= run.summary["metrics"][main_metric(run.summary["metrics"])]["mean"] < 10


@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize("name", ["cifar10", "shakespeare", "divshare-movielens"])
def test_an_example_with_real_data_runs_as_processes(name: str, tmp_path: Path) -> None:
    file = FOLDER / f"{name}.toml"
    skip_without_data(file)
    overrides = {**SHORT, "engine": "processes", "nodes": 4, "topology.degree": 3}
    run = Experiment.from_file(file, overrides).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["rounds"] == SHORT["algorithm.rounds"]
    assert run.summary["messages_sent"] > 0
    assert 0 <= run.summary["metrics"][main_metric(run.summary["metrics"])]["mean"] < 10


def test_the_example_of_faults_completes(tmp_path: Path) -> None:
    less = {"training.local_steps": 1, "evaluation.nodes": 1, "evaluation.average": False}
    overrides = {"model": {"name": "logistic"}, "simulation.batching": "off", **less}
    run = Experiment.from_file(FOLDER / "faults.toml", overrides).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["time"]["virtual_s"] == 12.0
    events = {node: [r for r in run.folder.read(node) if isinstance(r, Event)] for node in (3, 8)}
    assert [(e.what, e.time) for e in events[3]][:2] == [("fault", 2.0), ("fault", 4.0)]
    assert [e.what for e in events[3]][2:] == ["rejoined"]
    assert [(e.what, e.time) for e in events[8]] == [("fault", 8.0), ("fault", 10.0)]


STRAGGLERS = ["divshare-stragglers", "adpsgd-stragglers", "swift-stragglers"]


def test_the_examples_of_stragglers_have_the_same_task_and_duration() -> None:
    tables = [tomllib.loads((FOLDER / f"{name}.toml").read_text()) for name in STRAGGLERS]
    assert all(table["evaluation"].keys() >= {"seconds", "target"} and "duration" in table for table in tables)
    for table in tables:
        del table["name"], table["algorithm"]["name"]
        table["algorithm"] = {"rounds": table["algorithm"]["rounds"]}
        table.pop("topology", None)  # DivShare sends to any node
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", STRAGGLERS)
def test_the_examples_of_stragglers_use_digits_without_cifar10(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    less = {"duration": 1.0, "training.local_steps": 2, "speed.step_seconds": 0.16, "evaluation.nodes": 1}
    described = Experiment.from_file(FOLDER / f"{name}.toml", {**less, "nodes": 12, "simulation.batching": "off"})
    run = described.run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["messages_sent"] > 0
    assert described.dataset.name == "digits"


def test_all_examples_are_found() -> None:
    assert len(EXAMPLES) >= 31
    assert {file.stem for file in DOWNLOADED} == {
        "cifar10", "divshare-movielens", "fashion-mnist", "femnist", "movielens", "shakespeare", *STRAGGLERS
    }  # fmt: skip
    assert {file.stem for file in EXAMPLES} > LARGE
