"""Faults by round, and the restart of a node that crashed in a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.experiment import Experiment
from shoal.results.records import Event
from shoal.testing import Faults

RESTARTED = 2


@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_a_node_that_crashed_in_a_round_crashes_once_and_rejoins(engine: Any, tmp_path: Path) -> None:
    experiment = Experiment(
        nodes=4,
        engine=engine,
        algorithm={"name": "dpsgd", "rounds": 10},
        topology={"name": "full"},
        model={"name": "logistic"},
        training={"batch_size": 8, "local_steps": 1},
        device={"step_seconds": 0.5},
        evaluation={"every": 0, "average": False},
        simulation={"batching": "off"},
        fault=Faults().crash(RESTARTED, round=1).restart(RESTARTED).at(2.6).schedule,
    )
    run = experiment.run(tmp_path)
    events = [record for record in run.folder.read(RESTARTED) if isinstance(record, Event)]
    assert [event.detail for event in events if event.what == "fault"] == [
        "crash at round 1",
        f"node {RESTARTED} restarts",
    ]
    assert [event.what for event in events][-1] == "rejoined"
    assert (run.status, run.summary["lost"]) == ("completed", {})
