"""Faults by round, and the restart of a node that crashed in a round."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import shoal
from checkpoint_runs import experiment, stopped_after
from shoal.engines.processes import control
from shoal.engines.processes.node_run import NodeLaunch
from shoal.engines.processes.slots import Slots
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.results.records import Event
from shoal.testing import Faults

RESTARTED = 2


@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_a_node_that_crashed_in_a_round_crashes_once_and_rejoins(engine: Any, tmp_path: Path) -> None:
    described = Experiment(
        nodes=4,
        engine=engine,
        algorithm={"name": "dpsgd", "rounds": 10},
        topology={"name": "full"},
        model={"name": "logistic"},
        training={"batch_size": 8, "local_steps": 1},
        speed={"step_seconds": 0.5},
        evaluation={"every": 0, "average": False},
        simulation={"batching": "off"},
        fault=Faults().crash(RESTARTED, round=1).restart(RESTARTED).at(2.6).schedule,
    )
    run = described.run(tmp_path)
    events = [record for record in run.folder.read(RESTARTED) if isinstance(record, Event)]
    assert [event.detail for event in events if event.what == "fault"] == [
        "crash at round 1",
        f"node {RESTARTED} restarts",
    ]
    assert [event.what for event in events][-1] == "rejoined"
    assert (run.status, run.summary["lost"]) == ("completed", {})


RESTARTED_BEFORE = Faults().crash(RESTARTED).at(0.5).restart(RESTARTED).at(0.7).crash(RESTARTED, round=8).schedule


def test_a_resumed_run_applies_no_faults_by_round_to_a_node_that_was_restarted_before(tmp_path: Path) -> None:
    run = experiment(
        algorithm={"name": "dpsgd", "rounds": 10},
        topology={"name": "full"},
        speed={"step_seconds": 0.2},
        fault=RESTARTED_BEFORE,
    ).run(tmp_path / "whole")
    assert (run.status, run.summary["lost"]) == ("completed", {})
    resumed = shoal.resume(stopped_after(run.folder, 6, tmp_path / "stopped").path)
    assert (resumed.status, resumed.summary["lost"]) == ("completed", {})
    assert resumed.summary["digest"] == run.summary["digest"]


@pytest.mark.parametrize(("incarnations", "crashes"), [({}, True), ({RESTARTED: 1}, False)])
def test_a_resumed_process_has_faults_by_round_only_if_it_was_not_restarted_before(
    incarnations: dict[int, int], crashes: bool
) -> None:
    setup = cast(Setup, SimpleNamespace(experiment=experiment(engine="processes", fault=RESTARTED_BEFORE)))
    start = control.StartNodes([RESTARTED], "run", incarnations=incarnations)
    faults = NodeLaunch(setup, RESTARTED, Slots(1), start).round_faults({"round": 6})
    assert (faults.due(8) is not None) == crashes
