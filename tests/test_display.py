"""The progress that the command line shows."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.results.progress import Progress
from shoal.results.progress_text import describe, time_left


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
