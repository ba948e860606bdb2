"""The example examples/paper: its sharing, and the whole script in both engines."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import Experiment
from shoal.plugins import load_class
from shoal.testing import check_sharing

FOLDER = Path(__file__).parent.parent / "examples" / "paper"
SHARING = f"{FOLDER / 'sharing.py'}:RampedTopK"
ROUNDS = 3
SHORT = ["--rounds", str(ROUNDS), "--nodes", "3", "--seeds", "1", "--ramps", "0.5", "1"]


def results(engine: str, out: Path) -> list[dict[str, str]]:
    """Run a short version of the script, and return the rows of its results.csv."""
    command = [sys.executable, str(FOLDER / "run.py"), "--engine", engine, "--out", str(out), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=out.parent)
    assert done.returncode == 0, done.stderr
    with (out / "results.csv").open(newline="") as file:
        return [{key: row[key] for key in row if key != "run"} for row in csv.DictReader(file)]


def test_the_script_gives_the_same_results_in_both_engines(tmp_path: Path) -> None:
    simulated = results("simulation", tmp_path / "simulation")
    assert [row["split"] for row in simulated] == ["validation"] * 2 + ["test"] * 4
    assert len({row["digest"] for row in simulated if row["split"] == "test"}) == 4
    assert results("processes", tmp_path / "processes") == simulated
    table = (tmp_path / "simulation" / "table.md").read_text()
    assert table == (tmp_path / "processes" / "table.md").read_text()
    for line in table.splitlines():
        if "---" in line or line.startswith(("| ramp ", "| method ")):
            assert line in (FOLDER / "README.md").read_text()
    assert (tmp_path / "simulation" / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ramp", [-1.0, 0.0, 1.0])
def test_the_sharing_passes_its_suite(ramp: float) -> None:
    check_sharing(lambda: load_class(SHARING)(rounds=4, ramp=ramp), averages=False)


def test_without_a_ramp_the_sharing_is_topk(tmp_path: Path) -> None:
    def digest(sharing: dict[str, object]) -> object:
        plan = {"name": "dpsgd", "rounds": ROUNDS}
        run = Experiment(nodes=4, algorithm=plan, sharing=sharing, simulation={"batching": "off"}).run(tmp_path)
        return run.summary["digest"], run.summary["bytes_sent"]

    topk = digest({"name": "topk", "fraction": 0.2})
    assert digest({"name": SHARING, "rounds": ROUNDS, "fraction": 0.2, "ramp": 0.0}) == topk
    assert digest({"name": SHARING, "rounds": ROUNDS, "fraction": 0.2, "ramp": 0.5}) != topk
