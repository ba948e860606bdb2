"""A run with processes that is resumed ends like one that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from checkpoint_runs import comparable, experiment, records_of, stopped_after

DYNAMIC = {"name": "regular", "degree": 2, "dynamic": True}
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "choco": {"sharing": {"name": "choco"}, "training": {"momentum": 0.9}},
    "gradient tracking": {"algorithm": {"name": "gradient-tracking"}},
    "peer sampler": {"topology": {"name": "peer-sampler", "graph": DYNAMIC}},
    "fedavg": {"algorithm": {"name": "fedavg", "fraction": 0.5, "server": "adam"}},
}
ROUNDS = 6


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_resumed_run_ends_like_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    settings = {"engine": "processes", "nodes": 4, **SYNCHRONOUS[name]}
    settings["algorithm"] = {"name": "dpsgd", **settings.get("algorithm", {}), "rounds": ROUNDS}
    whole = experiment(**settings).run(tmp_path / "whole")
    resumed = shoal.resume(stopped_after(whole.folder, 2, tmp_path / "stopped").path)
    assert comparable(resumed.summary) == comparable(whole.summary)
    assert records_of(resumed.folder, times=False) == records_of(whole.folder, times=False)
    averages = [[r.round for r in run.folder.read_averages()] for run in (resumed, whole)]  # type: ignore[union-attr]
    assert sorted(averages[0]) == sorted(averages[1])


def test_secure_aggregation_ends_with_the_same_models(tmp_path: Path) -> None:
    whole = experiment(
        engine="processes",
        nodes=4,
        sharing={"name": "secure"},
        topology={"name": "full"},
        algorithm={"name": "dpsgd", "rounds": ROUNDS},
    ).run(tmp_path)
    resumed = shoal.resume(stopped_after(whole.folder, 2, tmp_path / "stopped").path)
    assert resumed.summary["digest"] == whole.summary["digest"]
