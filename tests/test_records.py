"""The files of a run: what is written, and how it is read."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import SMALL
from disks import small_disk
from shoal.errors import DataError, LaunchError, StorageError
from shoal.experiment import Experiment
from shoal.experiment.running import Run
from shoal.experiment.writing import write_experiment
from shoal.results.progress import Outcome
from shoal.results.records import (
    Average,
    End,
    Evaluation,
    Event,
    Record,
    RecordFile,
    Round,
    RunFolder,
    decode,
    encode,
    replacing,
)
from shoal.results.statistics import statistics
from shoal.results.summary import read_or_summarize, summarize


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Experiment.from_table(tomllib.loads(SMALL)).run(tmp_path_factory.mktemp("runs"))


def test_a_run_writes_all_its_files(done: Run) -> None:
    folder = done.folder.path
    assert folder.parent.name == "small"
    written = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert written == {
        "experiment.toml", "mapping.json", "data.json", "summary.json", "metrics.parquet", "averages.jsonl",
        *(f"nodes/{n}.jsonl" for n in range(6)), *(f"checkpoints/{n}.npy" for n in range(6)),
    }  # fmt: skip


def test_the_summary_has_its_keys(done: Run) -> None:
    summary = json.loads(done.folder.summary.read_text())
    assert summary == done.summary
    assert summary["status"] == "completed"
    assert (summary["engine"], summary["nodes"], summary["seed"], summary["rounds"]) == ("simulation", 6, 1, 4)
    for key in ("accuracy", "loss"):
        assert summary[key].keys() == {"mean", "std", "min", "max"}
    assert summary["bytes_sent"].keys() == {"total", "per_node_mean"}
    assert summary["messages_sent"] == 6 * 3 * 4
    assert summary["time"].keys() == {"wall_s", "virtual_s", "startup_s", "train_cpu_s", "total_cpu_s", "padded_s"}
    assert summary["memory"].keys() == {"uss_mean_mib", "pss_mean_mib", "pss_total_mib"}
    assert len(summary["digest"]) == 64


def test_the_metrics_hold_every_record(done: Run) -> None:
    table = pq.read_table(done.folder.metrics)
    assert table.column_names[:4] == ["node", "kind", "round", "time"]
    assert {"accuracy", "loss", "bytes_sent", "messages_sent", "consensus_distance", "digest"} <= set(
        table.column_names
    )
    rows = table.to_pylist()
    assert Counter(r["kind"] for r in rows) == {"round": 24, "evaluation": 12, "average": 2, "end": 6}
    last = [r["accuracy"] for r in rows if r["kind"] == "evaluation" and r["round"] == 3]
    assert np.mean(last) == pytest.approx(done.summary["accuracy"]["mean"])
    assert {r["node"] for r in rows} == {*range(6), None}
    lines = sum(len(f.read_text().splitlines()) for f in done.folder.path.rglob("*.jsonl"))
    assert len(rows) == lines


def test_the_experiment_of_a_run_can_be_run_again(done: Run, tmp_path: Path) -> None:
    table = tomllib.loads(done.folder.experiment.read_text())
    assert {"python", "shoal", "torch", "numpy"} <= table["versions"].keys()
    again = Experiment.from_file(done.folder.experiment).run(tmp_path)
    for key in ("digest", "accuracy", "loss", "bytes_sent", "messages_sent", "consensus_distance"):
        assert again.summary[key] == done.summary[key]


def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "cut")
    whole = [Round(0, 0.1, 2.0, 10, 1), Evaluation(0, 0.1, {"accuracy": 0.5})]
    file = RecordFile(folder.node(0))
    for record in whole:
        file.write(record)
    file.close()
    with folder.node(0).open("ab") as cut:
        cut.write(encode(Round(1, 0.2, 1.9, 20, 2))[:-7])
    assert list(folder.read(0)) == whole
    assert list(folder.read(1)) == [], "a node without records"


def test_the_summary_has_the_last_average_in_whatever_order_they_were_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "late")
    file = RecordFile(folder.averages)
    file.write(Average(3, 0.2, 6, 0.5, {"accuracy": 0.9}))
    file.write(Average(1, 0.1, 6, 0.7, {"accuracy": 0.4}))  # evaluated in parallel, and slower
    file.close()
    summary = summarize(folder, "processes", 6, 1, Outcome("completed", 1.0, 1.0))
    assert summary["averaged_model"] == {"accuracy": 0.9, "round": 3}
    assert summary["consensus_distance"] == 0.5


def test_the_summary_counts_events_by_kind(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "events")
    for node, kinds in enumerate((["timed out", "fault"], ["timed out"])):
        file = RecordFile(folder.node(node))
        file.write(Round(0, 0.1, 2.0, 10, 1))
        for kind in kinds:
            file.write(Event(kind, 0.2, "detail"))
        file.write(End(1.0, "d", 1, 1, 0, 0))
        file.close()
    summary = summarize(folder, "simulation", 2, 1, Outcome("completed", 1.0, 1.0))
    assert summary["events"] == {"timed out": 2, "fault": 1}


@pytest.mark.parametrize(
    ("rounds", "ended", "expected"),
    [
        ((5, 3, 4), (0, 1, 2), 3),
        ((5, 3, 4), (0, 2), 4),  # node 1 was lost
        ((5, 3, 4), (), 3),  # the run was interrupted
        ((5, 0, 4), (0, 1, 2), 0),  # node 1 reached its end without a round
        ((0, 0, 0), (), 0),
    ],
)
def test_the_rounds_of_a_run_are_those_of_the_slowest_node_that_reached_its_end(
    rounds: tuple[int, ...], ended: tuple[int, ...], expected: int, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path, "apart")
    for node, count in enumerate(rounds):
        file = RecordFile(folder.node(node))
        for round in range(count):
            file.write(Round(round, 0.1 * round, 2.0, 10, 1))
        if node in ended:
            file.write(End(1.0, "d", 1, 1, 0, 0))
        file.close()
    assert summarize(folder, "simulation", 3, 1, Outcome("incomplete", 1.0, 1.0))["rounds"] == expected
    slower = summarize(folder, "simulation", 3, 1, Outcome("incomplete", 1.0, 1.0), range(1))["rounds"]
    assert slower == rounds[0], "only the rounds of node 0 are rounds of the run"


def test_a_folder_that_cannot_be_created_raises_a_launch_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot write to the output folder .*: Not a directory; choose another"):
        RunFolder.create(tmp_path / "file", "x")


naturals = st.integers(0, 2**53)
times = st.floats(0, 1e9)
scores = st.dictionaries(st.text(max_size=5), st.floats(-1e9, 1e9))
records = st.one_of(
    st.builds(Round, naturals, times, st.none() | st.floats(0, 1e9), naturals, naturals),
    st.builds(Evaluation, naturals, times, scores),
    st.builds(Average, naturals, times, naturals, times, scores),
    st.builds(Event, st.text(), times, st.text()),
    st.builds(End, times, st.text(), naturals, naturals, naturals, naturals),
)


@given(records)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    line = encode(record)
    assert b"\n" not in line
    assert decode(line) == record


def test_the_old_name_of_unauthenticated_connections_is_read_with_a_warning(tmp_path: Path) -> None:
    new = End(1.0, "d", 1, 1, 0, 0, unauthenticated_connections=3)
    with pytest.warns(FutureWarning, match="'strangers' is read as 'unauthenticated_connections'"):
        assert decode(encode(new).replace(b"unauthenticated_connections", b"strangers")) == new
    folder = RunFolder.create(tmp_path, "old")
    folder.summary.write_text('{"status": "completed", "strangers": 4}')
    with pytest.warns(FutureWarning, match="a run of an earlier version"):
        assert folder.read_summary() == {"status": "completed", "unauthenticated_connections": 4}


def test_a_score_that_is_not_finite_is_read_as_nan() -> None:
    read = decode(encode(Average(3, 1.0, 2, math.inf, {"loss": math.nan, "accuracy": 0.1})))
    assert isinstance(read, Average)
    assert math.isnan(read.consensus_distance)
    assert math.isnan(read.scores["loss"])
    assert (read.round, read.nodes, read.scores["accuracy"]) == (3, 2, 0.1)


def test_statistics_are_nan_if_a_value_is_not_finite_and_none_without_values() -> None:
    assert statistics([]) is None
    assert statistics([1.0, 3.0]) == {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    diverged = statistics([1.0, math.inf, -math.inf])
    assert diverged is not None
    assert all(math.isnan(value) for value in diverged.values())


def test_only_the_owner_may_read_the_folder_of_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "private")
    assert folder.path.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", kib=64) as folder:
        yield folder


def test_a_full_disk_raises_a_storage_error_and_leaves_whole_records(disk: Path) -> None:
    path = disk / "0.jsonl"
    file = RecordFile(path)
    written = 0

    def write_until_full() -> None:
        nonlocal written
        while True:
            file.write(Event("long", float(written), "x" * 1000))
            written += 1

    with pytest.raises(StorageError, match="the disk or the quota is full: free some space"):
        write_until_full()
    content = path.read_bytes()
    assert content.endswith(b"\n")
    assert content.count(b"\n") == written


def test_a_summary_or_a_model_that_cannot_be_written_leaves_the_earlier_one(disk: Path) -> None:
    folder = RunFolder(disk)
    (disk / "checkpoints").mkdir()
    with replacing(folder.summary) as unfinished:
        unfinished.write_bytes(b"earlier")
    folder.save_model(0, np.ones(10, np.float32))
    with pytest.raises(StorageError), replacing(folder.summary) as unfinished:
        unfinished.write_bytes(bytes(2**17))
    assert not unfinished.exists(), "it would take space"
    with pytest.raises(StorageError):
        folder.save_model(0, np.ones(2**15, np.float32))
    assert folder.summary.read_bytes() == b"earlier"
    assert np.load(folder.model(0)).size == 10


def test_a_removed_folder_raises_a_storage_error(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "removed")
    folder.check()
    shutil.rmtree(folder.path)
    for write in (
        folder.check,
        lambda: RecordFile(folder.node(0)),
        lambda: folder.save_model(0, np.ones(1, np.float32)),
        lambda: write_experiment(folder.experiment, {}),
    ):
        with pytest.raises(StorageError, match="its folder was removed or moved during the run"):
            write()


def test_a_run_without_a_summary_is_summarized_from_its_records(done: Run, tmp_path: Path) -> None:
    shutil.copytree(done.folder.path, tmp_path / "killed")
    killed = RunFolder(tmp_path / "killed")
    killed.summary.unlink()
    summary = read_or_summarize(killed)
    assert summary["status"] == "unfinished"
    for key in ("engine", "nodes", "seed", "rounds", "accuracy", "loss", "bytes_sent", "messages_sent", "digest"):
        assert summary[key] == done.summary[key]
    assert summary.keys() >= {"time", "memory", "lost", "events"}
    with pytest.raises(DataError, match="holds no run"):
        read_or_summarize(RunFolder(tmp_path))
