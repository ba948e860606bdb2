"""`shoal resume`: what it rejects, invalid checkpoints, a full disk, and what continues by the clock."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from checkpoint_runs import comparable, experiment, records_of, stopped_after
from disks import FreesTheDisk, small_disk
from shoal import resume
from shoal.algorithms.dpsgd import DPSGD
from shoal.errors import ExperimentError
from shoal.experiment import running
from shoal.experiment.writing import write_experiment
from shoal.results.checkpoints import Checkpoints
from shoal.results.coordinator_file import CoordinatorFile, read_coordinator_file, write_coordinator_file
from shoal.results.records import REJOINED, RESUMED, Event, RunFolder
from shoal.results.run_lock import lock
from shoal.testing import Faults
from shoal.traits import Traits

DPSGD_6 = {"name": "dpsgd", "rounds": 6}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with a checkpoint after every round."""
    return experiment(algorithm=DPSGD_6).run(tmp_path_factory.mktemp("whole"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


INVALID: dict[str, Callable[[Path], None]] = {
    "a truncated state": lambda folder: truncate(folder / "2.safetensors"),
    "a changed state": lambda folder: change_a_byte(folder / "2.safetensors"),
    "a missing state": lambda folder: (folder / "2.safetensors").unlink(),
    "a missing manifest": lambda folder: (folder / "checkpoint.json").unlink(),
    "a truncated manifest": lambda folder: truncate(folder / "checkpoint.json"),
    "an unknown format": lambda folder: (
        (folder / "checkpoint.json").write_text(
            (folder / "checkpoint.json").read_text().replace('"format": 1', '"format": 99')
        )
        and None
    ),
}


@pytest.mark.parametrize("damage", INVALID)
def test_an_invalid_checkpoint_is_not_used_and_the_one_before_is(
    damage: str, whole: Any, tmp_path: Path, shoal: Any
) -> None:
    folder = stopped_after(whole.folder, 3, tmp_path / "stopped")
    INVALID[damage](Checkpoints(folder).folder(3))
    result = shoal("resume", folder.path)
    assert result.code == 0, result
    assert "the checkpoint of round 3 is not used" in result.out
    assert "resumed from the checkpoint of round 2" in result.out
    assert folder.read_summary()["digest"] == whole.summary["digest"]
    assert records_of(folder) == records_of(whole.folder)


def test_a_folder_of_runs_stands_for_its_latest_run(whole: Any, tmp_path: Path, shoal: Any) -> None:
    folder = stopped_after(whole.folder, 3, tmp_path / "runs" / "name" / "1")
    assert shoal("resume", tmp_path / "runs").code == 0
    assert folder.read_summary()["digest"] == whole.summary["digest"]


def test_the_latest_run_with_a_checkpoint_is_resumed_not_a_later_one_that_failed(
    whole: Any, tmp_path: Path, shoal: Any
) -> None:
    resumable = stopped_after(whole.folder, 3, tmp_path / "runs" / "name" / "1")
    failed = stopped_after(whole.folder, -1, tmp_path / "runs" / "name" / "2")
    failed.summary.write_text(json.dumps({"status": "failed"}))
    result = shoal("resume", tmp_path / "runs")
    assert result.code == 0, result
    shown = "".join(result.out.split())
    assert "".join(f"resuming the run in {resumable.path}".split()) in shown
    assert "lateroneshaveended,orhavenocheckpoint" in shown
    assert resumable.read_summary()["digest"] == whole.summary["digest"]
    assert failed.read_summary() == {"status": "failed"}


def run_in(source: RunFolder, path: Path, changed: int, rounds: int = 3, status: str = "failed") -> RunFolder:
    """A copy of a run that wrote its summary at the time `changed`. It has checkpoints until the given round."""
    folder = stopped_after(source, rounds, path)
    folder.summary.write_text(json.dumps({"status": status}))
    os.utime(folder.summary, (changed, changed))
    return folder


def test_runs_that_have_ended_are_skipped(whole: Any, tmp_path: Path, shoal: Any) -> None:
    runs = tmp_path / "runs" / "name"
    run_in(whole.folder, runs / "1", changed=1, status="completed")
    without = run_in(whole.folder, runs / "2", changed=2, rounds=-1)
    result = shoal("resume", runs)
    rejected(result, "has no valid checkpoint")
    assert str(without.path) in "".join(result.err.split())
    assert "resuming" not in result.out + result.err
    resumable = run_in(whole.folder, runs / "0", changed=0)
    assert shoal("resume", runs).code == 0
    assert resumable.read_summary()["digest"] == whole.summary["digest"]


def test_only_runs_of_the_experiment_that_ran_last_are_resumed(whole: Any, tmp_path: Path, shoal: Any) -> None:
    other = run_in(whole.folder, tmp_path / "runs" / "other" / "1", changed=1)
    run_in(whole.folder, tmp_path / "runs" / "name" / "2", changed=2, rounds=-1)
    rejected(shoal("resume"), "has no valid checkpoint")
    assert other.read_summary() == {"status": "failed"}
    assert shoal("resume", "other").code == 0


def test_a_damaged_coordinator_file_of_a_later_run_is_shown_and_skipped(whole: Any, tmp_path: Path, shoal: Any) -> None:
    resumable = run_in(whole.folder, tmp_path / "runs" / "name" / "1", changed=1)
    damaged = run_in(whole.folder, tmp_path / "runs" / "name" / "2", changed=2, rounds=-1)
    (damaged.path / "coordinator.json").write_text("{")
    result = shoal("resume")
    assert result.code == 0, result
    assert "coordinator.json cannot be read" in result.out
    assert resumable.read_summary()["digest"] == whole.summary["digest"]


def test_run_with_resume_continues_a_run_of_the_same_experiment_or_starts_one(
    whole: Any, tmp_path: Path, shoal: Any
) -> None:
    file, runs = tmp_path / "experiment.toml", tmp_path / "runs" / "experiment"
    write_experiment(file, experiment(algorithm=DPSGD_6).to_table())
    unfinished = run_in(whole.folder, runs / "1", changed=1)
    result = shoal("run", file, "--resume")
    assert "resumed from the checkpoint of round 3" in result.out
    assert unfinished.read_summary()["digest"] == whole.summary["digest"]
    result = shoal("run", file, "--resume")
    assert result.code == 0, result
    assert "resumed" not in result.out, "the run has ended"
    assert len(list(runs.iterdir())) == 2
    killed = run_in(whole.folder, runs / "3", changed=3, rounds=-1)
    write_coordinator_file(killed, CoordinatorFile([], ".", "", "", 0.0, 0.0, None, None, 0.0))
    assert shoal("run", file, "--resume").code == 0
    assert len(list(runs.iterdir())) == 4, "a run without a checkpoint is not resumed"


def test_run_with_resume_starts_a_run_if_the_experiment_has_changed(whole: Any, tmp_path: Path, shoal: Any) -> None:
    file, runs = tmp_path / "experiment.toml", tmp_path / "runs" / "experiment"
    write_experiment(file, experiment(algorithm=DPSGD_6).to_table())
    unfinished = run_in(whole.folder, runs / "1", changed=1)
    result = shoal("run", file, "--resume", "--seed", 9)
    assert result.code == 0, result
    assert "is not resumed: the experiment has changed since it began" in " ".join(result.out.split())
    assert unfinished.read_summary() == {"status": "failed"}
    assert len(list(runs.iterdir())) == 2


def rejected(result: Any, *texts: str) -> None:
    assert result.code == 2, result
    assert "Traceback" not in result.err + result.out
    for text in texts:
        assert text in result.err


def test_a_run_that_has_ended_is_rejected(whole: Any, shoal: Any) -> None:
    rejected(shoal("resume", whole.folder.path), "the run has ended", "'completed'", "start a new run")


def test_a_run_without_a_checkpoint_is_rejected(whole: Any, tmp_path: Path, shoal: Any) -> None:
    folder = stopped_after(whole.folder, -1, tmp_path / "stopped")
    rejected(shoal("resume", folder.path), "has no valid checkpoint", "checkpoint.every")


def test_a_folder_without_a_run_is_rejected(tmp_path: Path, shoal: Any) -> None:
    rejected(shoal("resume", tmp_path), "there is no run in", "shoal run FILE")


def test_a_run_that_is_going_is_rejected(whole: Any, tmp_path: Path, shoal: Any) -> None:
    folder = stopped_after(whole.folder, 3, tmp_path / "stopped")
    with lock(folder):
        rejected(shoal("resume", folder.path), "the run is still going", "wait until it ends")


def test_a_changed_experiment_is_rejected(whole: Any, tmp_path: Path, shoal: Any) -> None:
    folder = stopped_after(whole.folder, 3, tmp_path / "stopped")
    before = records_of(folder)
    folder.experiment.write_text(folder.experiment.read_text().replace("rounds = 6", "rounds = 8"))
    rejected(shoal("resume", folder.path), "differs from the experiment of the checkpoint", "Restore the file")
    assert records_of(folder) == before, "nothing was changed"


def test_an_experiment_that_is_not_valid_any_more_is_rejected(whole: Any, tmp_path: Path, shoal: Any) -> None:
    folder = stopped_after(whole.folder, 3, tmp_path / "stopped")
    folder.experiment.write_text(folder.experiment.read_text().replace("rounds = 6", "rounds = 0"))
    rejected(shoal("resume", folder.path), "is not the experiment of the checkpoint", "rounds")


def test_a_checkpoint_of_another_experiment_is_rejected(whole: Any, tmp_path: Path, shoal: Any) -> None:
    other = experiment(algorithm=DPSGD_6, seed=6).run(tmp_path / "other")
    folder = stopped_after(whole.folder, 3, tmp_path / "stopped")
    foreign = stopped_after(other.folder, 3, tmp_path / "foreign")
    Checkpoints(folder).remove_after(-1)
    Checkpoints(foreign).folder(3).rename(Checkpoints(folder).folder(3))
    rejected(shoal("resume", folder.path), "belongs to another run")


def test_a_checkpoint_of_another_version_is_rejected(whole: Any, tmp_path: Path, shoal: Any) -> None:
    folder = stopped_after(whole.folder, 3, tmp_path / "stopped")
    manifest = Checkpoints(folder).folder(3) / "checkpoint.json"
    table = json.loads(manifest.read_text())
    table["versions"]["shoal"] = "0.0.1"
    manifest.write_text(json.dumps(table))
    rejected(shoal("resume", folder.path), "shoal 0.0.1", "install the version")


def test_the_engine_cannot_be_changed(whole: Any, shoal: Any) -> None:
    assert shoal("resume", whole.folder.path, "--engine", "processes").code == 2


def test_only_the_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    run = experiment(algorithm=DPSGD_6, checkpoint={"every": 2, "keep": 2}).run(tmp_path)
    assert Checkpoints(run.folder).rounds() == [3, 5]
    run = experiment(algorithm=DPSGD_6, checkpoint={"every": 1, "keep": 1}).run(tmp_path / "one")
    assert Checkpoints(run.folder).rounds() == [5]


def test_without_checkpoints_there_are_only_final_models(tmp_path: Path) -> None:
    run = experiment(algorithm=DPSGD_6, checkpoint={}).run(tmp_path)
    assert {path.suffix for path in (run.folder.path / "checkpoints").iterdir()} == {".npy"}


@dataclass(frozen=True)
class Unsaved(DPSGD):
    """D-PSGD that declares that its state cannot be saved."""

    traits: ClassVar[Traits] = Traits(checkpoint_cut="none")


def test_an_algorithm_whose_state_cannot_be_saved_is_rejected_with_checkpoints() -> None:
    with pytest.raises(ExperimentError, match=r"checkpoint\.every = 1: the state of algorithm = .*Unsaved"):
        experiment(algorithm=Unsaved(rounds=2))
    experiment(algorithm=Unsaved(rounds=2), checkpoint={})


# A disk that is full


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_a_state_that_cannot_be_written_leaves_the_run_and_the_earlier_checkpoint(
    engine: str, tmp_path: Path, small: Path, shoal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is in the place of the folder of round 2, so that nothing can be written there."""
    from shoal.results import records

    create = records.RunFolder.create

    def with_obstacle(root: Path, name: str) -> RunFolder:
        folder = create(root, name)
        (folder.path / "checkpoints" / "round-2").touch()
        return folder

    monkeypatch.setattr(records.RunFolder, "create", with_obstacle)
    options = ("--set", "checkpoint.every=1", "--set", "checkpoint.keep=9", "--engine", engine)
    result = shoal("run", small, *options, "--out", tmp_path / "runs")
    assert result.code == 0, result
    # A process may fail to save round 2 before the last process has saved round 1, or even round 0.
    kept = "the checkpoint of round 1 remains"
    if engine == "processes":
        kept = "(the checkpoint of round [01] remains|there is none before)"
    assert re.search(f"goes on without a checkpoint of round 2, {kept}", " ".join(result.out.split())), result.out
    folder = RunFolder(next((tmp_path / "runs").rglob("experiment.toml")).parent)
    complete = [round for round in Checkpoints(folder).rounds() if Checkpoints(folder).is_complete(round)]
    assert complete == [0, 1, 3]


def test_a_full_disk_never_costs_the_checkpoint_before(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kib=144) as disk:
        (disk / "filler").write_bytes(bytes(2**14))
        listener = FreesTheDisk(disk / "filler", at="free some space in the next")  # for records that do not fit either
        running.run(experiment(algorithm=DPSGD_6, checkpoint={"every": 1, "keep": 9, "final": False}), disk, listener)
        checkpoints = Checkpoints(RunFolder(next(disk.rglob("experiment.toml")).parent))
        complete = [round for round in checkpoints.rounds() if checkpoints.is_complete(round)]
        assert complete
        assert len(complete) < 6
        for round in complete:
            checkpoints.read(round)


# The clock


TIMED: dict[str, dict[str, Any]] = {
    "duration": {"duration": 0.55, "algorithm": {"name": "dpsgd", "rounds": 100}},
    "a node that crashed before": {"fault": Faults().crash(2).at(0.15).schedule},
    "a node that restarts later": {"fault": Faults().crash(2).at(0.15).until(0.45).schedule},
    "a node that joined before": {"fault": Faults().join(2).at(0.15).schedule},
    "a node that joins later": {"fault": Faults().join(2).at(0.45).schedule},
    "a node that joins in a later round": {"fault": Faults().join(2, round=5).schedule},
    "a node that is slow since before": {"fault": Faults().slow(2, factor=3.0).at(0.15).schedule},
    "a node that is slow later": {"fault": Faults().slow(2, factor=3.0).at(0.45).schedule},
    "a crash by round": {"fault": ({"kind": "crash", "nodes": "2", "round": 1},)},
    "a partition in force": {
        "fault": Faults().partition("0-2", "3-5").at(0.15).until(0.45).schedule,
        "simulation": {"batching": "off", "receive_timeout": 0.5},
    },
    "availability": {
        "availability": {"name": "intervals", "path": "intervals.csv"},
        "simulation": {"batching": "off", "receive_timeout": 0.5},
    },
}


def test_what_a_killed_coordinator_has_left_is_not_used_after_a_resume(whole: Any, tmp_path: Path) -> None:
    folder = stopped_after(whole.folder, 2, tmp_path / "stopped")
    write_coordinator_file(folder, CoordinatorFile([], "", "", "", 0.0, 0.0, None, None, 0.0))
    assert resume(folder.path).status == "completed"
    assert read_coordinator_file(folder) is None


@pytest.mark.parametrize("name", TIMED)
def test_what_happened_before_the_checkpoint_is_in_force_and_not_repeated(name: str, tmp_path: Path) -> None:
    settings = {"speed": {"step_seconds": 0.1}, "algorithm": {"name": "dpsgd", "rounds": 8}, **TIMED[name]}
    (tmp_path / "intervals.csv").write_text("node,on,off\n1,0,0.25\n1,0.42,inf\n2,0.05,0.45\n2,0.5,inf\n")
    whole = experiment(**settings, base=tmp_path).run(tmp_path / "whole")
    resumed = resume(stopped_after(whole.folder, 2, tmp_path / "stopped").path)
    for run in (resumed, whole):
        del run.summary["messages_late"]  # a late message that no receive has dropped yet is not in a checkpoint
    assert comparable(resumed.summary) == comparable(whole.summary)
    assert resumed.summary["time"]["virtual_s"] == whole.summary["time"]["virtual_s"]
    assert {k: v for k, v in resumed.summary["events"].items() if k != RESUMED} == whole.summary["events"]


def test_restarted_nodes_that_no_peer_answers_continue_from_their_own_checkpoint(tmp_path: Path) -> None:
    """All nodes but one crash at once, and the last one hangs: no node that answers has a model in memory."""
    run = experiment(
        speed={"step_seconds": 0.1},
        algorithm={"name": "dpsgd", "rounds": 10},
        fault=Faults().hang(5).at(0.52).crash("0-4").at(0.55).until(0.6).schedule,
        simulation={"batching": "off", "receive_timeout": 0.5},
    ).run(tmp_path)
    assert run.summary["rounds"] == 10
    assert set(run.summary["lost"]) == {"5"}
    own = [r.detail for _, r in run.folder.read_all() if isinstance(r, Event) and r.what == REJOINED]
    assert any("from round 5 on, with its own checkpoint" in detail for detail in own)
