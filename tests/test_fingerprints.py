"""`benchmarks/fingerprints.py`: the comparison of runs with recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.plugins import load

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fingerprints.py"
differences, runs = (load(f"{SCRIPT}:{name}") for name in ("differences", "runs"))
RECORDED = {"dpsgd": {"digest": "1"}, "gossip": {"digest": "2"}, "gossip lossy": {"digest": "3"}}


def test_equal_runs_do_not_differ() -> None:
    assert differences(RECORDED, dict(RECORDED)) == []


def test_a_changed_a_new_and_a_missing_run_are_reported() -> None:
    found = {"dpsgd": {"digest": "1"}, "gossip": {"digest": "5"}, "swift": {"digest": "4"}}
    assert differences(RECORDED, found) == [
        "gossip lossy: recorded, but no longer run",
        "gossip: digest: 2 -> 5",
        "swift: not recorded",
    ]


def test_with_only_a_part_of_the_runs_the_others_are_not_missing() -> None:
    assert differences(RECORDED, {"gossip": {"digest": "2"}}, "gossip") == ["gossip lossy: recorded, but no longer run"]


def test_the_recorded_file_has_exactly_the_runs_of_the_script() -> None:
    assert set(json.loads(SCRIPT.with_suffix(".json").read_text())) == {name for name, _ in runs()}
