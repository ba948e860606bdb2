"""The progress that the command line shows."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from shoal.cli.display import Display
from shoal.results.progress import Progress
from shoal.results.progress_text import ProgressLines, ProgressRow, TransferMeter, describe, run_row, time_left


def running(**given: Any) -> Progress:
    return Progress("running", nodes=4, alive=4, **given)


@pytest.mark.parametrize(
    ("progress", "left"),
    [
        (running(seconds=10, round=20, rounds=100), 40),
        (running(seconds=10, round=0.5, rounds=100), None),  # too early to estimate
        (running(seconds=10, round=20), None),
        (running(seconds=30, round=20, rounds=1000, virtual_seconds=8.0, duration=32.0), 90),  # the clock ends the run
        (running(seconds=30, round=90, rounds=100, virtual_seconds=8.0, duration=32.0), pytest.approx(30 / 9)),
        (running(seconds=30, round=3, duration=40.0), 10),
        (running(seconds=50, round=3, duration=40.0), 0),
        (running(seconds=4, duration=40.0), 36),  # known from the start
        (running(seconds=4, round=0.5, rounds=2, duration=40.0), 36),
        (running(seconds=0.0, duration=40.0), None),
        (running(seconds=3, round=0.2, virtual_seconds=8.0, duration=32.0), 9),
        (running(seconds=3, virtual_seconds=0.0, duration=32.0), None),
    ],
)
def test_the_time_left_is_estimated_from_the_rounds_or_the_clock(progress: Progress, left: float | None) -> None:
    assert time_left(progress) == left
    assert ("left" in describe(progress)) == (left is not None)


def test_failed_nodes_are_shown_and_nodes_that_have_not_joined_are_not_failed() -> None:
    assert "2 of 4 nodes failed" in describe(Progress("running", 4, 2, 10, round=3, rounds=9, failed=2))
    late = describe(Progress("running", 4, 3, 10, round=3, rounds=9))
    assert "3/4 nodes" in late
    assert "failed" not in late


# Plain lines


def test_lines_are_written_at_each_phase_at_the_end_and_rarely_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("shoal.results.progress_text.time.monotonic", lambda: clock)
    lines: list[str] = []
    shown = ProgressLines(lines.append)
    shown.progress(Progress("loading", 4, 4, 0.0))
    for second in range(10_000):
        clock = float(second)
        shown.progress(running(seconds=clock, round=second // 100, rounds=100))
    shown.progress(running(seconds=clock, round=100, rounds=100))
    shown.progress(Progress("writing", 4, 4, 0.0, activity="writing the results"))
    assert lines[0] == "loading 4 nodes"
    assert lines[1].startswith("round 0/100")
    assert lines[-1].startswith("round 100/100")
    assert 150 < len(lines) < 300, "about one line per minute after half an hour"


# Terminals


def screen(*calls: Callable[[Display], object], width: int = 60) -> list[str]:
    """Return what a terminal of `width` columns shows after `calls`."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=20, color_system=None)
    display = Display(console)
    with display:
        for call in calls:
            call(display)
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
    last = re.split(r"\x1b\[2K", shown)[-1]
    return [line.rstrip() for line in re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", last).splitlines() if line.strip()]


FULL = Progress(
    "running", nodes=128, alive=120, seconds=75, round=88, rounds=2000, score=("accuracy", 0.9612),
    bytes_sent=118_500_000, virtual_seconds=20.0, failed=8,
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_facts_of_a_run_fit_every_terminal(width: int) -> None:
    lines = screen(lambda display: display.progress(FULL), width=width)
    assert all(len(line) <= width for line in lines), lines
    text = " ".join(" ".join(lines).split())
    for fact in ("round 88/2000", "27 min 09 s left", "accuracy 0.961", "8 of 128 nodes failed", "118.5 MB sent"):
        assert fact in text, lines
    assert (len(lines) == 1) == (width == 200)


def test_several_rows_have_one_line_each() -> None:
    rows = [
        ProgressRow(["3 of 40 runs", "12 min left", "2 at once", "1 failed"], 0.075, "all runs"),
        run_row(FULL, "sharing = topk, topology = ring, seed = 1, a long label"),
        run_row(FULL, "[bold]seed[/bold] = 2"),
    ]
    lines = screen(lambda display: display.rows(rows), width=60)
    assert len(lines) == 3
    assert all(len(line) <= 60 for line in lines)
    assert "sharing = topk, top…" in lines[1]
    assert "[bold]seed[/bold]" in lines[2], "markup is shown as it is"


def test_a_terminal_shows_a_new_stage_at_once_and_the_same_stage_a_few_times_per_second() -> None:
    first, second = (ProgressRow([f"{part} %"], part / 100, stage="transfer") for part in (1, 2))
    assert "1 %" in screen(lambda d: d.rows([first]), lambda d: d.rows([second]))[0]
    other = ProgressRow(["checking"], stage="check")
    assert "checking" in screen(lambda d: d.rows([first]), lambda d: d.rows([other]))[0]


def test_a_transfer_shows_its_speed_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("shoal.results.progress_text.time.monotonic", lambda: clock)
    meter = TransferMeter("data.tar.gz")
    assert meter.row(10_000_000, 50_000_000).text == "data.tar.gz: 10.0 MB of 50.0 MB"  # continues an earlier one
    clock = 2.0
    row = meter.row(20_000_000, 50_000_000)
    assert row.text == "data.tar.gz: 20.0 MB of 50.0 MB · 6.0 s left · 5.0 MB/s"
    assert row.done == 0.4
    assert meter.row(20_000_000, None).done is None
