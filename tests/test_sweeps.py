"""Sweeps: what they run, and what they report before they start."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import SMALL, CommandResult
from shoal.errors import ExperimentError
from shoal.results.progress import Progress
from shoal.sweeps.execution import Admission, cores_needed
from shoal.sweeps.folder import find_runs
from shoal.sweeps.messages import Advanced, Ended, Exited, FromLauncher
from shoal.sweeps.plan import Combination, plan
from shoal.sweeps.sweep import SweepChanges, read_sweep
from shoal.sweeps.values import Range, describe_value, parse_search, parse_seeds, parse_values

Shoal = Callable[..., CommandResult]
TINY = ("--set", "algorithm.rounds=2", "--set", "nodes=4", "--set", "evaluation.average=false")
SWEEP = """
base  = "small.toml"
seeds = [1, 2]

[set]
training.local_steps = 1

[grid]
sharing     = ["full", { name = "topk", fraction = 0.2 }]
training.lr = [0.1, 0.3]

[[variant]]
topology = "ring"

[[variant]]
topology = { name = "regular", degree = 3 }
nodes    = 8
"""


def planned(file: Path, **changes: object) -> list[Combination]:
    return plan(read_sweep(file, SweepChanges(**changes)))  # type: ignore[arg-type]


@pytest.fixture
def sweep(small: Path) -> Path:
    file = small.parent / "sweep.toml"
    file.write_text(SWEEP)
    return file


# What a sweep runs


def test_a_file_describes_variants_a_grid_and_seeds(sweep: Path) -> None:
    combinations = planned(sweep)
    assert len(combinations) == 2 * 2 * 2 * 2
    experiments = [combination.experiment for combination in combinations]
    assert [e.seed for e in experiments[:4]] == [1, 2, 1, 2]
    assert [e.training.lr for e in experiments[:4]] == [0.1, 0.1, 0.3, 0.3]
    assert [e.sharing.name for e in experiments[:8:4]] == ["full", "topk"]
    assert experiments[4].sharing.options["fraction"] == 0.2
    assert [(e.topology.name, e.nodes) for e in experiments[::8]] == [("ring", 6), ("regular", 8)]
    assert {e.training.local_steps for e in experiments} == {1}
    assert len({combination.identity for combination in combinations}) == 16
    assert combinations[4].label == "topology = ring, sharing = topk(fraction=0.2), training.lr = 0.1, seed = 1"


def test_the_command_line_describes_the_same(small: Path, sweep: Path) -> None:
    sweep.write_text(SWEEP.partition("[[variant]]")[0])
    given = planned(
        small,
        grid=["sharing=full,{name='topk', fraction=0.2}", "training.lr=0.1,0.3"],
        seeds="1-2",
        settings=["training.local_steps=1"],
    )
    assert [c.identity for c in given] == [c.identity for c in planned(sweep)]


def test_the_base_may_be_a_table_and_options_change_a_file(small: Path, sweep: Path) -> None:
    sweep.write_text(f"[grid]\nnodes = [4, 6]\n[base]\n{SMALL}")
    combinations = planned(sweep, seeds="3", grid=["nodes=5,7"])
    assert [(c.experiment.nodes, c.experiment.seed) for c in combinations] == [(5, 3), (7, 3)]


def test_a_key_of_a_component_follows_the_component(small: Path) -> None:
    combinations = planned(small, grid=["sharing=topk,random"], settings=["sharing.fraction=0.25"])
    assert [c.experiment.sharing.options["fraction"] for c in combinations] == [0.25, 0.25]


def test_runs_with_automatic_batching_use_one_core_each(small: Path) -> None:
    (chosen,) = planned(small, settings=["simulation.batching=auto"])
    assert chosen.experiment.simulation.workers == 1
    (given,) = planned(small, settings=["simulation.batching=pool"])
    assert given.experiment.simulation.workers is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("nodes=4,8", (4, 8)),
        ("sharing=full,topk", ("full", "topk")),
        ("sharing={name='topk', fraction=0.1},full", ({"name": "topk", "fraction": 0.1}, "full")),
        ('evaluation.metrics=["accuracy","top5"],["loss"]', (["accuracy", "top5"], ["loss"])),
        ("name='a,b',c", ("a,b", "c")),
    ],
)
def test_values_are_separated_by_commas(text: str, values: tuple[object, ...]) -> None:
    assert parse_values(text, "--grid") == (text.partition("=")[0], values)


def test_seeds_are_numbers_and_ranges() -> None:
    assert parse_seeds("1-3, 7,9", "--seeds") == (1, 2, 3, 7, 9)
    for wrong in ("3-1", "a", "1,,2", "-1", "1-2-3", "1,1", "0-99999999"):
        with pytest.raises(ExperimentError):
            parse_seeds(wrong, "--seeds")


def test_a_range_has_a_scale() -> None:
    assert parse_search("training.lr=0.01:1:log", "--tune") == ("training.lr", Range(0.01, 1, "log"))
    assert Range(0.01, 1.0, "log").at(0.5) == 0.1
    assert Range(0.0, 1.0).at(0.25) == 0.25
    steps = [Range(1, 4).at(i / 100) for i in range(100)]
    assert [steps.count(n) for n in (1, 2, 3, 4)] == [25, 25, 25, 25]
    assert all(isinstance(n, int) for n in steps)
    for wrong in ("lr=1:0.1", "lr=0:1:log", "lr=0.1:1:cubic", "lr=a:b", "lr=0:inf"):
        with pytest.raises(ExperimentError):
            parse_search(wrong, "--tune")


def test_a_component_is_shown_with_its_options() -> None:
    assert describe_value({"name": "topk", "fraction": 0.1}) == "topk(fraction=0.1)"
    assert describe_value([True, "a"]) == "[true, a]"


# Wrong input


def test_a_wrong_value_in_the_40th_combination_is_found_before_the_first_run(small: Path, shoal: Shoal) -> None:
    values = [*(0.01 * i for i in range(1, 40)), "'big'"]
    done = shoal("sweep", small, "--grid", f"training.lr={','.join(map(str, values))}")
    assert done.code == 2
    assert "combination 40 (training.lr = big)" in done.err
    assert "training.lr" in done.err.partition("): ")[2]
    assert not Path("runs").exists()


def test_a_problem_of_all_combinations_is_reported_once(small: Path, shoal: Shoal) -> None:
    done = shoal("sweep", small, "--grid", "nodes=4,6", "--seeds", "1-3", "--set", "training.rate=1")
    assert done.code == 2
    assert done.err.count("training.rate: unknown key") == 1
    assert "in all 6 combinations" in done.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seeds = [1]", "only a sweep has this key"),
        ('base = "small.toml"\ngrids = {}', "did you mean 'grid'?"),
        ('base = "small.toml"\ngrid = { nodes = 4 }', "grid.nodes = 4: expected a list"),
        ('base = "small.toml"\nseeds = [1, 1]', "given twice"),
        ('base = "small.toml"\nset = 3', "expected a table"),
        ('base = "none.toml"', "there is no file"),
        ('base = "sweep.toml"', "is a sweep itself"),
        ("base = 3", "expected the file of an experiment"),
        ('base = "small.toml"\nname = "../up"', "expected a name"),
        ('base = "small.toml"\n[grid]\nnodes = [4, 4]', "the same run as combination 1"),
        ('base = "small.toml"\n[grid]\nseed = [4, 5]', "use 'seeds'"),
        ('base = "small.toml"\n[grid]\nnodes = [4]\n[[variant]]\nnodes = 6', "remove one of them"),
        (
            'base = "small.toml"\n[grid]\nnodes = [4]\n[set]\nnodes = 6',
            "nodes: set for all runs, and given by the grid",
        ),
        ('base = "small.toml"\nseeds = [1]\n[set]\nseed = 6', "seed: set for all runs"),
        ('base = "small.toml"\n[tune]\n"algorithm.rounds" = "5:20"', "the budget of its trials"),
        ('base = "small.toml"\n[tune]\ntraining.lr = 0.1', "expected a range"),
        ('base = "small.toml"\n[tune]\ntraining.lr = "1:0.1"', "expected a lower limit"),
    ],
)
def test_a_wrong_file_is_reported(small: Path, shoal: Shoal, text: str, expected: str) -> None:
    file = small.parent / "sweep.toml"
    file.write_text(text)
    done = shoal("sweep", file)
    assert done.code == 2
    assert expected in done.err
    assert not Path("runs").exists()


def test_a_folder_with_other_content_is_not_used(small: Path, shoal: Shoal) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").touch()
    done = shoal("sweep", small, "--out", "mine")
    assert done.code == 2
    assert "not the folder of a sweep" in done.err


# Runs


def test_a_file_of_the_user_is_no_folder_of_a_sweep(small: Path, sweep: Path, shoal: Shoal) -> None:
    before = sweep.read_text()
    done = shoal("sweep", sweep, "--out", sweep.parent)
    assert (done.code, sweep.read_text()) == (2, before)
    assert "it is not the folder of a sweep" in done.err


def test_a_dry_run_prints_the_plan_and_an_estimate(small: Path, shoal: Shoal) -> None:
    done = shoal("sweep", small, "--grid", "sharing=full,topk", "--seeds", "1-3", "--dry-run")
    assert done.code == 0, done.err
    assert "6 runs: 2 combinations" in done.out
    assert "1. sharing = full (seeds 1-3)" in done.out
    assert "2. sharing = topk (seeds 1-3)" in done.out
    assert "estimated time: " in done.out
    assert "2 of 2 combinations ran for a short time" in done.out
    assert not Path("runs").exists()


def test_a_sweep_runs_all_combinations_and_skips_what_is_done(small: Path, shoal: Shoal) -> None:
    command = ("sweep", small, "--grid", "sharing=full,topk", *TINY, "--out", "swept")
    done = shoal(*command, "--seeds", "1")
    assert done.code == 0, done.err
    assert "2/2 ended" in done.out
    found = find_runs(Path("swept"))
    assert {(run.folder.read_experiment()["sharing"]["name"], run.status) for run in found} == {
        ("full", "completed"),
        ("topk", "completed"),
    }
    assert tomllib.loads(Path("swept/sweep.toml").read_text())["grid"] == {"sharing": ["full", "topk"]}
    # The same command starts nothing.
    again = shoal(*command, "--seeds", "1")
    assert again.code == 0
    assert "2 of 2 runs are done already" in again.out
    assert find_runs(Path("swept")) == found
    # Another version of the software
    file = found[0].folder.experiment
    file.write_text(file.read_text().replace('shoal = "', 'shoal = "0.0.'))
    other = shoal(*command, "--seeds", "1")
    assert other.code == 2
    assert "1 finished run in swept used other software: shoal 0.0." in other.err
    assert "--out" in other.err
    assert find_runs(Path("swept"))[1:] == found[1:]
    accepted = shoal(*command, "--seeds", "1", "--any-version")
    assert accepted.code == 0
    assert "used other software" in accepted.out
    assert "2 of 2 runs are done already" in accepted.out


class Stopped:
    """Processes of runs that are interrupted in training, and then report that they write their results."""

    def __init__(self, log: Path) -> None:
        self.reports: list[FromLauncher] = []

    def __enter__(self) -> Stopped:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, run: int, *_: object) -> None:
        training = Progress("running", 6, 6, seconds=1.0, round=1.0, rounds=4, score=("accuracy", 0.5))
        writing = Progress("writing", 6, 6, seconds=0.0)
        self.reports += [Advanced(run, training), Advanced(run, writing), Ended(run, "interrupted"), Exited(run, 0, 0)]

    def stop(self, runs: list[int]) -> None: ...

    def wait(self, seconds: float) -> list[FromLauncher]:
        reports, self.reports = self.reports, []
        return reports


def test_the_estimate_uses_the_time_of_the_training_although_results_are_written_later(
    small: Path, shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.sweeps.estimate.RunProcesses", Stopped)
    done = shoal("sweep", small, "--seeds", "1-3", "--jobs", "1", "--dry-run")
    assert "estimated time: 12" in done.out  # 3 runs of 4 rounds, each a second


# Cores


def test_runs_with_processes_have_the_machine_for_themselves(small: Path) -> None:
    (simulated,) = planned(small)
    (real,) = planned(small, settings=["engine=processes"])
    (pool,) = planned(small, settings=["simulation.batching=pool"])
    (three,) = planned(small, settings=["simulation.batching=pool", "simulation.workers=3"])
    assert cores_needed(simulated.experiment) == 1
    assert cores_needed(real.experiment) is cores_needed(pool.experiment) is None
    assert cores_needed(three.experiment) == 3
    admission = Admission(jobs=None)
    assert admission.allows(real.experiment, [])
    assert not admission.allows(real.experiment, [simulated.experiment])
    assert not admission.allows(simulated.experiment, [real.experiment])
    assert not admission.allows(simulated.experiment, [simulated.experiment] * admission.cores)
    assert not Admission(jobs=1).allows(simulated.experiment, [simulated.experiment])
