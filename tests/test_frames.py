"""Records as columns: from the files of nodes, and from metrics.parquet if it has all records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from shoal.errors import DataError
from shoal.results.frames import RunRecords, read_lines, read_records
from shoal.results.metrics_file import read_metrics, write_metrics
from shoal.results.records import Average, End, Evaluation, Event, Record, RecordFile, Round, RunFolder, encode
from shoal.results.timing import curve

NAN = math.nan
NODES: Mapping[int, Sequence[Record]] = {
    0: [
        Round(0, 1.0, 0.5, 100, 1), Evaluation(0, 1.0, {"accuracy": 0.5, "loss": 2.0, "node": 7.0}),
        Event("fault", 1.5, "crash"), Event("rejoined", 2.0, "at round 1"), Round(1, 3.0, None, 40, 2),
        Evaluation(1, 3.0, {"loss": NAN}, 3), End(3.5, "a" * 64, 50, 3, 0, 0, total_cpu_s=1.5),
    ],
    2: [Round(r, r + 1.0, 0.25, 10 * r, r) for r in range(5)],
    10: [],
    11: [Event("late", 0.25, "<b>", count=12)],
}  # fmt: skip
AVERAGES = [Average(1, 3.0, 2, 0.125, {"accuracy": 0.75}, 3), Average(0, 1.0, 2, 0.5, {"accuracy": NAN, "loss": 1.0})]


def write_records(path: Path, records: Sequence[Record]) -> None:
    file = RecordFile(path)
    for record in records:
        file.write(record)
    file.close()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path, "made")
    for node, records in NODES.items():
        write_records(made.node(node), records)
    write_records(made.averages, AVERAGES)
    return made


def plain(records: RunRecords) -> dict[str, Any]:
    """Return all columns as lists; NaN as text, because it differs from itself."""
    columns = {name: getattr(records.rounds, name).tolist() for name in records.rounds.__dataclass_fields__}
    names = ("row", "node", "round", "tick", "time")
    evaluations = {name: getattr(records.evaluations, name).tolist() for name in names}
    scores = {metric: [part.tolist() for part in found] for metric, found in records.evaluations.values.items()}
    others = (records.events, records.ends, records.averages, dict(records.last_times), records.size)
    return {"text": str((columns, evaluations, scores, [list(o) if isinstance(o, list) else o for o in others]))}


def test_records_are_columns_in_the_order_of_nodes(folder: RunFolder) -> None:
    records = read_lines(folder)
    assert records.rounds.node.tolist() == [0, 0, *[2] * 5]
    assert records.rounds.row.tolist() == [0, 4, *range(7, 12)]
    assert np.isnan(records.rounds.loss).tolist() == [False, True, *[False] * 5]
    assert records.evaluations.metrics == ["accuracy", "loss", "node"]
    loss = records.evaluations.scores("loss")
    assert (loss.node.tolist(), loss.round.tolist(), loss.tick.tolist()) == ([0, 0], [0, 1], [-1, 3])
    assert loss.score[0] == 2.0
    assert math.isnan(loss.score[1])
    assert records.evaluations.scores("rmse").score.tolist() == []
    assert [(found.row, found.node, found.event.what) for found in records.events] == [
        (2, 0, "fault"), (3, 0, "rejoined"), (12, 11, "late"),
    ]  # fmt: skip
    assert [(found.node, found.end.digest) for found in records.ends] == [(0, "a" * 64)]
    assert records.last_times == {0: 3.5, 2: 5.0, 11: 0.25}
    assert records.last_rounds() == {0: 1, 2: 4}
    assert (records.duration, records.size) == (5.0, 13)


def test_traffic_before_a_node_rejoined_counts(folder: RunFolder) -> None:
    sent = read_lines(folder).sent()
    assert sent.bytes.tolist() == [100, 140, 0, 10, 20, 30, 40]
    assert sent.messages.tolist() == [1, 3, 0, 1, 2, 3, 4]
    assert sent.by_node == {0: (150, 4), 2: (40, 4)}


def test_metrics_parquet_gives_the_same_columns(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(read_lines(folder))
    for rows in (1 << 17, 3):
        monkeypatch.setattr("shoal.results.metrics_file.ROWS_AT_ONCE", rows)
        write_metrics(folder)
        found = read_metrics(folder)
        assert found is not None
        assert plain(found) == expected
    for node in NODES:
        size = folder.node(node).stat().st_size
        folder.node(node).write_bytes(b"?" * size)
    assert plain(read_records(folder)) == expected, "it is read in place of the files of nodes"


def test_metrics_parquet_has_a_row_per_record_in_order(folder: RunFolder) -> None:
    write_metrics(folder)
    table = pq.read_table(folder.metrics).to_pylist()
    assert [row["kind"] for row in table[:7]] == [
        "round", "evaluation", "event", "event", "round", "evaluation", "end",
    ]  # fmt: skip
    assert [row["kind"] for row in table[-2:]] == ["average", "average"]
    assert (table[1]["node"], table[1]["score.node"], table[1]["loss"]) == (0, 7.0, 2.0), "a metric keeps its column"
    assert (table[-1]["node"], table[-1]["loss"], table[-1]["consensus_distance"]) == (None, 1.0, 0.5)


def test_a_run_without_records_has_metrics(tmp_path: Path) -> None:
    empty = RunFolder.create(tmp_path, "empty")
    write_metrics(empty)
    assert pq.read_table(empty.metrics).num_rows == 0
    assert plain(read_records(empty)) == plain(read_lines(empty))


def test_metrics_that_lack_records_or_are_damaged_are_not_used(folder: RunFolder) -> None:
    assert read_metrics(folder) is None
    write_metrics(folder)
    write_records(folder.node(2), [Round(5, 6.0, 0.1, 99, 9)])
    assert read_metrics(folder) is None, "the run was resumed"
    assert read_records(folder).last_rounds()[2] == 5
    write_metrics(folder)
    folder.metrics.write_bytes(folder.metrics.read_bytes()[:-40])
    assert read_metrics(folder) is None
    assert read_records(folder).size == 14


def test_records_that_were_cut_off_are_read_up_to_the_last_whole_line(folder: RunFolder) -> None:
    with folder.node(2).open("ab") as file:
        file.write(encode(Round(5, 6.0, 0.1, 99, 9))[:-5])
    assert read_records(folder).last_rounds()[2] == 4
    folder.node(2).write_bytes(b'{"kind":"rou')
    assert 2 not in read_records(folder).last_rounds()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\0\0\0", "line 2 is damaged and not a record"),
        (b'{"kind":"round"}', "missing required field `round`"),
        (b'{"kind":"other"}', "Invalid value 'other'"),
        (b"[" * 100_000, "line 2 is damaged"),
        (encode(Round(10**30, 1.0, None, 0, 0)), "has a number that is too large"),
    ],
)
def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path, line: bytes, problem: str) -> None:
    damaged = RunFolder.create(tmp_path, "damaged")
    good = encode(Evaluation(0, 1.0, {"accuracy": 0.5}))
    damaged.node(3).write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    with pytest.raises(DataError, match=problem) as caught:
        read_records(damaged)
    assert "nodes/3.jsonl" in str(caught.value)


def test_other_files_in_the_folder_of_nodes_are_ignored(folder: RunFolder) -> None:
    for name in ("x", "-1", "²", "1e3"):
        (folder.path / "nodes" / f"{name}.jsonl").write_text("?")
    assert folder.recorded_nodes() == sorted(NODES)


def test_nulls_are_scores_of_diverged_models(tmp_path: Path) -> None:
    diverged = RunFolder.create(tmp_path, "diverged")
    write_records(diverged.node(0), [Evaluation(r, r, {"accuracy": a}) for r, a in ((0, 0.5), (1, NAN))])
    assert b"null" in diverged.node(0).read_bytes()
    assert str(curve(diverged).means) == "(0.5, nan)"
