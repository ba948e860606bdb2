"""Runs as data frames: `shoal.load`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest
import tomli_w

import shoal
from shoal.errors import DataError
from shoal.results.metrics_file import write_metrics
from shoal.results.progress import Outcome
from shoal.results.records import Average, End, Evaluation, Record, RecordFile, Round, RunFolder
from shoal.results.summary import summarize


def made(root: Path, seed: int, sharing: str, *scores: float, finished: bool = True, **tables: Any) -> RunFolder:
    """Create a run of two nodes, with one score of each node per round."""
    folder = RunFolder.create(root, f"{sharing}-{seed}")
    table = {
        "engine": "simulation",
        "nodes": 2,
        "seed": seed,
        "sharing": {"name": sharing},
        **tables,
    }
    folder.experiment.write_text(tomli_w.dumps({"name": "made", **table}))
    for node in range(2):
        file = RecordFile(folder.node(node))
        for r, score in enumerate(scores):
            records: list[Record] = [Round(r, r + 1.0, None, 100 * r, r), Evaluation(r, r + 1.0, {"accuracy": score})]
            for record in records:
                file.write(record)
        if finished:
            file.write(End(9.0, "digest", 500, 5, 0, 0))
        file.close()
    file = RecordFile(folder.averages)
    file.write(Average(0, 1.0, 2, 0.25, {"accuracy": 0.75}))
    file.close()
    if finished:
        summarize(folder, "simulation", 2, seed, Outcome("completed", 1.0, 0.1, lost={1: "crashed"}))
        write_metrics(folder)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in (1, 2):
        made(tmp_path / "runs", seed, "full", 0.5, 0.5 + seed / 10)
    made(tmp_path / "runs" / "more", 1, "topk", 0.25, 0.5, finished=False)
    return tmp_path / "runs"


def test_summaries_have_a_row_per_run(runs: Path) -> None:
    summaries = shoal.load(runs).summaries
    assert isinstance(summaries, pd.DataFrame)
    assert summaries["group"].tolist() == ["sharing = full", "sharing = full", "sharing = topk"]
    assert summaries["sharing.name"].tolist() == ["full", "full", "topk"]
    assert summaries["seed"].tolist() == [1, 2, 1]
    assert summaries["status"].tolist() == ["completed", "completed", "unfinished"]
    assert summaries["accuracy.mean"].tolist() == pytest.approx([0.6, 0.7, 0.5])
    assert summaries["lost"].tolist() == [1, 1, 0]
    assert all(Path(run).is_dir() for run in summaries["run"])


def test_records_have_their_run_group_and_seed(runs: Path) -> None:
    records = shoal.load(runs).records
    assert len(records) == 2 * (2 * 5 + 1) + (2 * 4 + 1)
    scores = records[records["kind"] == "evaluation"].groupby(["group", "seed"], observed=True)["accuracy"].max()
    assert scores.to_dict() == pytest.approx(
        {("sharing = full", 1): 0.6, ("sharing = full", 2): 0.7, ("sharing = topk", 1): 0.5}
    )
    averages = records[records["kind"] == "average"]
    assert averages["node"].isna().all()
    assert averages["consensus_distance"].tolist() == [0.25] * 3


def test_polars_has_the_same_frames(runs: Path) -> None:
    loaded, expected = shoal.load(runs, frame="polars"), shoal.load(runs)
    assert isinstance(loaded.records, pl.DataFrame)
    for name in ("records", "summaries"):
        ours, theirs = getattr(loaded, name), getattr(expected, name)
        assert (ours.columns, ours.shape) == (theirs.columns.tolist(), theirs.shape)
    assert loaded.summaries["accuracy.mean"].to_list() == expected.summaries["accuracy.mean"].tolist()
    assert loaded.records.filter(pl.col("kind") == "round")["bytes_sent"].dtype == pl.Int64
    assert loaded.records["seed"].to_list() == expected.records["seed"].tolist()


def test_one_run_is_loaded_by_its_folder_and_a_run_in_progress_is_left_alone(runs: Path) -> None:
    (folder,) = (path.parent for path in (runs / "more").rglob("experiment.toml"))
    loaded = shoal.load(folder)
    assert loaded.summaries["group"].tolist() == ["made"]
    assert len(loaded.records) == 9
    assert not (folder / "metrics.parquet").exists(), "no file is written"


def test_records_after_metrics_were_written_are_loaded(runs: Path) -> None:
    folder = next(path.parent for path in sorted(runs.rglob("metrics.parquet")))
    file = RecordFile(RunFolder(folder).node(0))
    file.write(Round(2, 3.0, None, 300, 3))
    file.close()
    assert len(shoal.load(folder).records) == 12
    assert shoal.open_run(folder).table.num_rows == 12


def test_summaries_with_other_types_are_text(tmp_path: Path) -> None:
    _, two = (made(tmp_path, seed, "full", 0.5) for seed in (1, 2))
    two.summary.write_text(two.summary.read_text().replace('"split": "test"', '"split": 3'))
    assert shoal.load(tmp_path).summaries["split"].tolist() == ["test", "3"]


def test_what_cannot_be_loaded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="there is no run in"):
        shoal.load(tmp_path)
    made(tmp_path, 1, "full", 0.5)
    with pytest.raises(DataError, match="frame = 'arrow'; expected one of 'pandas', 'polars'"):
        shoal.load(tmp_path, frame="arrow")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(DataError, match=r"pip install 'shoal\[polars\]'"):
        shoal.load(tmp_path, frame="polars")
