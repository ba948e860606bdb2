"""Timed events that the coordinator applies to processes, in time or late, and averages at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from coordination import FakeAgents
from shoal.engines.processes import control
from shoal.engines.processes.average_evaluations import AverageEvaluations
from shoal.engines.processes.node_commands import NodeCommands
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.node_starter import NodeStarter
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.processes.scheduled_events import ProcessEvents
from shoal.engines.processes.watch_clock import WatchClock
from shoal.engines.run_tracker import RunTracker
from shoal.experiment import Experiment
from shoal.experiment.environment_builder import build_environment, device_speeds
from shoal.results.records import Event, RunFolder
from shoal.testing import Faults

NODES = 6


@dataclass
class Run:
    """A run whose nodes have just been sent `Start`."""

    events: ProcessEvents
    registry: NodeRegistry
    times: RunTimes
    tracker: RunTracker
    agents: FakeAgents
    sent: dict[int, list[control.ToNode]]

    def apply_late(self, seconds: float) -> None:
        """Apply what was due in the first `seconds` of the run."""
        self.times.epoch -= seconds
        self.events.apply_due()

    def faults(self, node: int) -> list[str]:
        return [message.kind for message in self.sent[node] if isinstance(message, control.InjectFault)]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    def make(**changed: Any) -> Run:
        experiment = Experiment(nodes=NODES, engine="processes", speed={"step_seconds": 0.1}, **changed)
        environment = build_environment(experiment, device_speeds(experiment))
        tracker, times, registry = RunTracker(experiment), RunTimes(None, range(NODES)), NodeRegistry(NODES)
        agents = FakeAgents()
        starter = NodeStarter(registry, agents.as_group(), tracker, times, WatchClock())
        commands = NodeCommands(registry, agents.as_group(), times)
        events = ProcessEvents(environment, registry, commands, starter, tracker, times)
        starter.start_all(control.StartNodes(list(range(NODES)), "run"))
        agents.requests.clear()
        tracker.phase = "running"
        times.start()
        events.begin()
        starter.send_start()
        return Run(events, registry, times, tracker, agents, agents.sent)

    return make


def test_a_node_that_is_offline_at_first_learns_it_with_its_start(run: Callable[..., Run], tmp_path: Path) -> None:
    file = tmp_path / "intervals.csv"
    file.write_text("1,2,inf")
    sent = run(availability={"name": "intervals", "path": str(file)}).sent
    starts = [sent[node][0] for node in range(NODES)]
    assert [cast(control.Start, start).offline for start in starts] == [False, True, *[False] * 4]


def test_a_node_that_is_being_killed_gets_no_more_faults(run: Callable[..., Run]) -> None:
    faults = Faults().crash(2).at(1.0).slow("1-2", factor=2.0, what="compute").at(1.1).hang(2).at(1.2)
    late = run(fault=faults.schedule)
    late.apply_late(5.0)
    recorded, killed = late.agents.requests
    assert isinstance(recorded, control.RecordEvents)
    assert recorded.events == [(2, Event("fault", 1.0, "node 2 crashes"))]
    assert killed == control.KillNodes([2]), "after the record: nothing follows the end of a node"
    assert late.faults(2) == []
    assert late.faults(1) == ["slow"]
    assert {entry.id for entry in late.registry if entry.slowdown is not None} == {1, 2}, "it is slow if it restarts"


def test_slow_faults_that_overlap_multiply_and_end_one_by_one(run: Callable[..., Run]) -> None:
    faults = Faults().slow("1-2", factor=2.0, what="compute").at(1.0).until(3.0)
    late = run(fault=faults.slow(2, factor=3.0, what="compute").at(2.0).until(4.0).schedule)
    late.apply_late(5.0)
    for node, factors in ((1, [2.0, 1.0]), (2, [2.0, 6.0, 3.0, 1.0])):
        assert [m.factor for m in late.sent[node] if isinstance(m, control.InjectFault)] == factors


def test_a_fault_of_many_nodes_is_one_request_to_the_agent(run: Callable[..., Run]) -> None:
    late = run(fault=Faults().crash("1-4").at(1.0).until(1.5).schedule)
    late.apply_late(1.1)
    recorded, killed = late.agents.requests
    assert [node for node, _ in cast(control.RecordEvents, recorded).events] == [1, 2, 3, 4]
    assert killed == control.KillNodes([1, 2, 3, 4])
    for node in (1, 2, 3, 4):
        late.tracker.node_lost(node, "crashed on schedule")
    late.agents.requests.clear()
    late.apply_late(0.5)
    recorded, started = late.agents.requests
    events = cast(control.RecordEvents, recorded).events
    assert [(node, event.detail) for node, event in events] == [(n, f"node {n} restarts") for n in (1, 2, 3, 4)]
    assert cast(control.StartNodes, started).nodes == [1, 2, 3, 4]


@pytest.mark.parametrize(("late_by", "restarts"), [(1.0, False), (1.6, True), (2.1, False)])
def test_a_node_that_crashes_twice_before_its_process_exits_restarts_after_the_second_restart(
    run: Callable[..., Run], late_by: float, restarts: bool
) -> None:
    late = run(fault=Faults().crash(2).at(1.0).until(1.5).crash(2).at(2.0).until(2.5).schedule)
    late.apply_late(late_by)
    assert late.registry[2].restart_on_exit == restarts


def test_no_queued_average_is_evaluated_after_the_user_ends_the_run(tmp_path: Path) -> None:
    experiment = Experiment(nodes=NODES, engine="processes", evaluation={"samples": 20})
    tracker, agents = RunTracker(experiment), FakeAgents()
    tracker.expect_no_more_models(range(1, NODES))
    averages = AverageEvaluations(tracker, agents.as_group(), RunFolder.create(tmp_path, "ended"), after_run=False)
    for round in range(4):
        averages.add_model(control.ModelSnapshot(0, round, 0.5 * round), np.zeros(3, np.float32))
    averages.evaluated(control.AverageEvaluated(0, 0))
    averages.cancel()
    assert averages.pending
    averages.evaluated(control.AverageEvaluated(1, 0))
    assert not averages.pending
    assert [cast(control.EvaluateAverage, request).round for request in agents.requests] == [0, 1]


def test_models_after_the_last_evaluation_tick_are_not_averaged(tmp_path: Path) -> None:
    experiment = Experiment(nodes=NODES, engine="processes", evaluation={"seconds": 0.5, "samples": 20})
    tracker, agents = RunTracker(experiment), FakeAgents()
    tracker.expect_no_more_models(range(1, NODES))
    averages = AverageEvaluations(tracker, agents.as_group(), RunFolder.create(tmp_path, "late"), after_run=True)
    tracker.phase = "running"
    averages.last_tick = 2
    for tick in (1, 2, 3):
        averages.add_model(control.ModelSnapshot(0, 0, 0.5 * tick, tick), np.zeros(3, np.float32))
    assert not averages.pending, "evaluation would take time from the nodes"
    tracker.phase = "finishing"
    averages.evaluate_complete()
    while averages.pending:
        averages.evaluated(control.AverageEvaluated(len(agents.requests), 0))
    assert [cast(control.EvaluateAverage, request).tick for request in agents.requests] == [1, 2]
