"""Records of a process whose disk is full: kept in memory, written later, and dropped if they are too many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from checkpoint_runs import experiment, records_of
from disks import FreesTheDisk, fill, small_disk
from shoal.algorithms.dpsgd import DPSGD
from shoal.engines.processes.deferred_evaluations import DeferredEvaluations
from shoal.errors import DiskFullError, StorageError
from shoal.experiment import running
from shoal.node import Node
from shoal.results.record_writer import RECORDS_DROPPED, PauseReport, RecordWriter, write_finally
from shoal.results.records import Evaluation, Event, Round, RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with small_disk(tmp_path / "disk", kib=256) as disk:
        yield RunFolder.create(disk, "full")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write to a full disk again at every record."""
    monkeypatch.setattr("shoal.results.record_writer.RETRY_SECONDS", 0.0)


def of_round(round: int) -> Round:
    return Round(round, float(round), 0.5, 10 * round, round)


def test_records_wait_in_memory_until_there_is_space(folder: RunFolder) -> None:
    reports: list[PauseReport] = []
    records = RecordWriter(folder, reports.append)
    records.write(0, of_round(0))
    filler = fill(folder.path.parent.parent)
    for r in range(1, 200):
        records.write(0, of_round(r))
    assert records.paused
    assert [report.paused for report in reports] == [True]
    assert str(folder.path.parent.parent) in reports[0].text, "it names the disk"
    content = folder.node(0).read_bytes()
    assert content.endswith(b"\n")
    filler.unlink()
    records.write(0, of_round(200))
    assert [(report.paused, report.dropped) for report in reports] == [(True, 0), (False, 0)]
    assert list(folder.read(0)) == [of_round(r) for r in range(201)]


def test_if_records_exceed_the_memory_only_rounds_are_dropped_and_counted(folder: RunFolder) -> None:
    reports: list[PauseReport] = []
    records = RecordWriter(folder, reports.append, max_bytes=20_000)
    records.write(0, of_round(0))
    records.write(1, of_round(0))
    filler = fill(folder.path.parent.parent)
    written = 0
    while not records.paused:  # the last page of the file has space
        written += 1
        records.write(0, of_round(written))
    before = records.size(0)
    for r in range(written + 1, 2000):
        records.write(0, of_round(r))
        if r % 100 == 0:
            records.write(0, Evaluation(r, float(r), {"accuracy": 0.5}))
    filler.unlink()
    records.flush()
    found = list(folder.read(0))
    rounds = [record.round for record in found if isinstance(record, Round)]
    (event,) = (record for record in found if isinstance(record, Event))
    assert event.what == RECORDS_DROPPED
    assert event.count == 2000 - len(rounds) == reports[-1].dropped > 0
    assert rounds[-1] == 1999
    assert rounds == sorted(rounds)
    evaluated = [record.round for record in found if isinstance(record, Evaluation)]
    assert evaluated == [r for r in range(100, 2000, 100) if r > written]
    checkpointed = folder.node(0).read_bytes()[:before]
    assert checkpointed.count(b"\n") == written + 1, "what a checkpoint refers to is not dropped"
    assert list(folder.read(1)) == [of_round(0)]


def test_a_removed_folder_is_an_error(folder: RunFolder) -> None:
    records = RecordWriter(folder, lambda report: pytest.fail(report.text))
    (folder.path / "nodes").rmdir()
    with pytest.raises(StorageError, match="its folder was removed"):
        records.write(0, of_round(0))


def test_the_last_write_waits_for_space_and_gives_up_in_time() -> None:
    attempts, notices = [], []

    def write() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise DiskFullError("the model cannot be written: …")

    write_finally(write, notices.append)
    assert len(attempts) == 3
    assert notices == ["the model cannot be written: free some space in the next 60 s, or it is lost"]
    attempts.clear()
    with pytest.raises(DiskFullError, match="the model"):
        write_finally(write, notices.append, seconds=0.0)


def test_a_model_that_cannot_be_kept_for_its_evaluation_is_left_out(folder: RunFolder) -> None:
    deferred, model = DeferredEvaluations(folder), np.zeros(10_000, np.float32)
    assert deferred.keep(0, 0.0, model)
    filler = fill(folder.path.parent.parent)
    assert not deferred.keep(1, 1.0, model)
    filler.unlink()
    assert deferred.keep(2, 2.0, model)
    assert [round for round, *_ in deferred.state()] == [0, 2]


@dataclass(frozen=True)
class FillsTheDisk(DPSGD):
    """D-PSGD whose node 0 fills the disk before its second round."""

    disk: str = ""

    async def run(self, node: Node) -> None:
        train = node.train

        async def fill_and_train(*arguments: object) -> object:
            if node.id == 0 and node.next_round == 1:
                fill(Path(self.disk))
            return await train(*arguments)  # type: ignore[arg-type]

        node.train = fill_and_train  # type: ignore[assignment,method-assign]
        await super().run(node)


@pytest.mark.parametrize("at", ["records are paused", "free some space in the next"])
def test_a_simulation_whose_disk_is_full_for_some_time_has_all_records_and_models(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is freed during the run, or at its end."""
    monkeypatch.setattr("shoal.engines.simulation.recorder.FLUSH_SECONDS", 0.0)
    undisturbed = experiment(algorithm=DPSGD(rounds=60), checkpoint={}).run(tmp_path / "undisturbed")
    with small_disk(tmp_path / "disk", kib=1024) as disk:
        listener = FreesTheDisk(disk / "filler", at)
        filling = FillsTheDisk(rounds=60, disk=str(disk))
        run = running.run(experiment(algorithm=filling, checkpoint={"every": 10}), disk / "runs", listener)
        assert run.summary["status"] == "completed"
        assert run.summary["digest"] == undisturbed.summary["digest"]
        assert records_of(run.folder) == records_of(undisturbed.folder)
        assert list(run.folder.read_averages()) == list(undisturbed.folder.read_averages())
        for node in range(run.summary["nodes"]):
            assert run.folder.model(node).read_bytes() == undisturbed.folder.model(node).read_bytes()
    if at == "free some space in the next":
        assert any("goes on without a checkpoint" in notice for notice in listener.notices)
    paused, resumed = (
        sum(text in notice for notice in listener.notices)
        for text in ("because the disk at", "records are written again")
    )
    assert paused == resumed > 0
