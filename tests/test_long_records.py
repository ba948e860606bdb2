"""The records of runs with very many rounds: their number is bounded, and they are read as those of a short run."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import shoal
from conftest import CommandResult
from shoal.errors import NodeError
from shoal.experiment import Experiment
from shoal.results.activity import read_edges
from shoal.results.metrics_file import write_metrics
from shoal.results.progress import Outcome
from shoal.results.record_writer import RecordWriter
from shoal.results.records import REJOINED, End, Evaluation, Event, Record, Round, RunFolder
from shoal.results.summary import summarize
from shoal.results.thinning import ALL_EVENTS, ALL_ROUNDS
from shoal.results.timing import bytes_sent, curve

ROUNDS = 12_345
COUNTING = textwrap.dedent(
    '''
    """Many rounds without training and messages. Every second round has an event."""

    from dataclasses import dataclass
    from pathlib import Path


    @dataclass(frozen=True)
    class Counting:
        rounds: int
        events: bool = True

        async def run(self, node):
            async for r in node.rounds(self.rounds):
                node.bytes_sent += 3
                if r % 1000 == 0:
                    await node.sleep(0.01)
                if self.events and r % 2:
                    node.record_event("odd", f"round {r}")
                if r == 12_000 and Path("fails").exists():
                    raise ValueError("at this round")
    '''
)


TURNING = textwrap.dedent(
    '''
    """Many rounds without training. Every node sends to the next node and, from a round on, to the previous one."""

    from dataclasses import dataclass
    from pathlib import Path

    import numpy as np

    from shoal.message import Payload


    @dataclass(frozen=True)
    class Turning:
        rounds: int
        turn: int

        async def run(self, node):
            async for r in node.rounds(self.rounds):
                to = (node.id + (1 if r < self.turn else 2)) % 3
                await node.send([to], Payload({"part": np.zeros(1, np.float32)}), round=r)
                node.receive_available()
                if r % 1000 == 0:
                    await node.sleep(0.01)
                if r == 12_000 and Path("fails").exists():
                    raise ValueError("at this round")
    '''
)


def counting(folder: Path, engine: str = "simulation", **tables: Any) -> Experiment:
    (folder / "counting.py").write_text(COUNTING)
    return Experiment.from_table(
        {
            "name": "long",
            "engine": engine,
            "nodes": 2,
            "algorithm": {"name": "counting.py:Counting", "rounds": ROUNDS},
            "topology": {"name": "full"},
            "dataset": {"name": "digits"},
            "model": {"name": "logistic"},
            "evaluation": {"every": 4001},
            "simulation": {"batching": "off"},
            **tables,
        },
        base=folder,
    )


def rounds_of(records: list[Record]) -> list[int]:
    return [record.round for record in records if isinstance(record, Round)]


def test_a_million_rounds_have_records_of_a_few_megabytes(tmp_path: Path) -> None:
    folder, count = RunFolder.create(tmp_path, "long"), 1_000_000
    records = RecordWriter(folder, lambda report: pytest.fail(report.text), interval=1.0)
    for r in range(count - 7):
        records.write(0, Round(r, r / 10, 0.5, 8 * r, r))
        if r in (500_123, 500_124):
            records.write(0, Evaluation(r, r / 10, {"accuracy": 0.5}))
        if r % 2:
            records.write(0, Event("timed out", r / 10, f"round {r}: no message from 1"))
        records.flush_if_due()
    records.write(0, End(1e5, "digest", 8 * count, count, 0, 0))
    records.finish()

    assert folder.node(0).stat().st_size < 5e6
    found = rounds_of(list(folder.read(0)))
    assert found[:ALL_ROUNDS] == list(range(ALL_ROUNDS))
    assert len(found) < 30_000 + 2 * ALL_EVENTS
    assert found[-1] == count - 8, "the last round is recorded"
    assert {500_123, 500_124} <= set(found), "an evaluated round is recorded"
    assert found == sorted(set(found))
    summary = summarize(folder, "simulation", 1, 0, Outcome("completed", 1.0, 1.0))
    assert summary["rounds"] == count - 7
    assert summary["bytes_sent"]["total"] == 8 * count
    assert summary["events"] == {"timed out": (count - 7) // 2}
    assert bytes_sent(folder, curve(folder)) == (8 * 500_123, 8 * 500_124)


def test_what_is_left_out_is_written_when_a_node_ends_without_an_end_record(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "interrupted")
    records = RecordWriter(folder, lambda report: pytest.fail(report.text))
    for r in range(ALL_ROUNDS + 6):
        records.write(0, Round(r, float(r), None, r, r))
    for i in range(ALL_EVENTS + 6):
        records.write(0, Event("odd", ALL_ROUNDS + 6.0 + i, str(i)))
        records.write(0, Event(REJOINED, ALL_ROUNDS + 6.0 + i, str(i)))
    records.write(0, Round(ALL_ROUNDS + 7, 2.0 * ALL_ROUNDS, None, 0, 0))
    records.finish()
    records.finish()
    found = list(folder.read(0))
    assert rounds_of(found)[-3:] == [ALL_ROUNDS, ALL_ROUNDS + 5, ALL_ROUNDS + 7]
    odd = [record for record in found if isinstance(record, Event) and record.what == "odd"]
    assert [(e.detail, e.count) for e in odd[-2:]] == [(str(ALL_EVENTS), 1), (str(ALL_EVENTS + 5), 5)]
    assert sum(isinstance(r, Event) and r.what == REJOINED for r in found) == ALL_EVENTS + 6, "they are never left out"


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_a_long_run_is_shown_and_plotted_as_a_short_one(
    engine: str, tmp_path: Path, shoal: Callable[..., CommandResult]
) -> None:
    run = counting(tmp_path, engine).run(tmp_path / "runs")
    assert run.summary["status"] == "completed"
    assert run.summary["rounds"] == ROUNDS
    assert run.summary["bytes_sent"]["total"] == 2 * 3 * ROUNDS
    assert run.summary["events"] == {"odd": 2 * (ROUNDS // 2)}
    evaluated = [4000, 8001, 12_002, ROUNDS - 1]
    for node in range(2):
        found = rounds_of(list(run.folder.read(node)))
        assert set(range(ALL_ROUNDS)) | set(range(ALL_ROUNDS, ROUNDS, 10)) | set(evaluated) <= set(found)
        assert len(found) < ALL_ROUNDS + 1000
    assert list(curve(run.folder).moments) == evaluated
    assert bytes_sent(run.folder, curve(run.folder)) == tuple(2 * 3 * (r + 1) for r in evaluated)
    assert pq.read_table(run.folder.metrics).num_rows == sum(1 for _ in run.folder.read_all()) + len(evaluated)
    shown = shoal("show", run.folder.path)
    assert shown.code == 0
    assert f"{ROUNDS:,}" in shown.out or str(ROUNDS) in shown.out
    assert shoal("plot", run.folder.path, "--x", "bytes", "--out", tmp_path / "plot.png").code == 0


def test_a_resumed_long_run_has_the_records_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    algorithm = {"name": "counting.py:Counting", "rounds": ROUNDS, "events": False}
    experiment = counting(tmp_path, algorithm=algorithm, checkpoint={"every": 11_001})
    whole = experiment.run(tmp_path / "whole")
    (tmp_path / "fails").touch()
    with pytest.raises(NodeError, match="at this round"):
        experiment.run(tmp_path / "failed")
    (tmp_path / "fails").unlink()
    resumed = shoal.resume(tmp_path / "failed")
    assert resumed.summary["digest"] == whole.summary["digest"]
    for node in range(2):
        assert rounds_of(list(resumed.folder.read(node))) == rounds_of(list(whole.folder.read(node)))


def test_a_run_resumed_from_a_round_that_was_left_out_has_the_receivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = 11_003
    (tmp_path / "turning.py").write_text(TURNING)
    algorithm = {"name": "turning.py:Turning", "rounds": ROUNDS, "turn": saved - 1}
    experiment = counting(tmp_path, nodes=3, algorithm=algorithm, checkpoint={"every": saved + 1})
    (tmp_path / "fails").touch()
    with pytest.raises(NodeError, match="at this round"):
        experiment.run(tmp_path / "failed")
    (tmp_path / "fails").unlink()
    resumed = shoal.resume(tmp_path / "failed")
    edges = read_edges(resumed.folder)
    assert edges.at_round(saved - 4).tolist() == [[0, 1], [1, 2], [2, 0]]
    assert edges.at_round(ROUNDS).tolist() == [[0, 2], [1, 0], [2, 1]]


def test_metrics_of_many_records_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = counting(tmp_path, algorithm={"name": "counting.py:Counting", "rounds": 50}).run(tmp_path / "runs")
    at_once = pq.read_table(run.folder.metrics)
    monkeypatch.setattr("shoal.results.metrics_file.ROWS_AT_ONCE", 7)
    write_metrics(run.folder)
    in_parts = pq.read_table(run.folder.metrics)
    assert set(in_parts.column_names) == set(at_once.column_names)
    assert in_parts.select(at_once.column_names).equals(at_once)
