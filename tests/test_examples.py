"""Every example whose data is at hand runs: shortened, on a few nodes, in the simulation; some as processes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from shoal.experiment import Experiment

FOLDER = Path(__file__).parent.parent / "examples"
AT_HAND = {"digits", "synthetic"}
"""Data sets that nothing has to be fetched for."""
EXAMPLES = [
    file for file in sorted(FOLDER.glob("*.toml")) if tomllib.loads(file.read_text())["dataset"]["name"] in AT_HAND
]
LARGE = {"thousand-processes", "ten-thousand-simulated"}
NEEDS = {"flower": "flwr"}
"""Examples of what is installed on demand, and as which module."""
NODES = 16
ROUNDS = 3


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


@pytest.mark.parametrize("name", ["fedavg", "epidemic", "compressed-gossip", "peer-sampling"])
def test_an_example_runs_as_processes(name: str, tmp_path: Path) -> None:
    file = FOLDER / f"{name}.toml"
    run = Experiment.from_file(file, shortened(file, engine="processes", nodes=6)).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["rounds"] == ROUNDS


def test_examples_are_found() -> None:
    assert len(EXAMPLES) >= 19
    assert {file.stem for file in EXAMPLES} > LARGE
