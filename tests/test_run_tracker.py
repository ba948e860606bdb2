"""The state of a run that both engines keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast, get_args
from unittest.mock import Mock

import numpy as np
import pytest

from shoal.engines.environment_events import EventHandler, EventQueue, apply_event
from shoal.engines.run_tracker import RunTracker
from shoal.environment.faults import FaultEvent
from shoal.environment.faults.table import Kind
from shoal.experiment import Experiment
from shoal.types import NodeId


@pytest.fixture
def tracker() -> RunTracker:
    """Three training nodes and a server, node 3."""
    return RunTracker(Experiment(nodes=3, algorithm={"name": "fedavg", "rounds": 1}))


def add_models(tracker: RunTracker, round: int, *nodes: NodeId) -> None:
    for node in nodes:
        tracker.add_model(node, round, np.full(2, node, np.float32))


def test_the_final_status_depends_on_the_lost_training_nodes(tracker: RunTracker) -> None:
    assert tracker.final_status == "completed"
    tracker.node_lost(3, "killed")
    assert tracker.final_status == "incomplete"
    for node in range(3):
        tracker.node_lost(node, "killed")
    assert tracker.final_status == "failed"
    tracker.node_restarted(1)
    assert tracker.final_status == "incomplete"


def test_an_average_is_complete_when_no_more_models_are_expected(tracker: RunTracker) -> None:
    add_models(tracker, 0, 0, 1)
    assert list(tracker.complete_averages()) == []
    tracker.node_lost(2, "killed")
    (average,) = tracker.complete_averages()
    assert (average.round, average.nodes, average.mean.tolist()) == (0, 2, [0.5, 0.5])
    assert average.consensus_distance == pytest.approx(np.sqrt(0.5))
    tracker.node_restarted(2)
    add_models(tracker, 1, 0, 1)
    assert list(tracker.complete_averages()) == []
    tracker.expect_no_more_models()
    assert [average.nodes for average in tracker.complete_averages()] == [2]


def test_averages_do_not_wait_for_a_restarted_server(tracker: RunTracker) -> None:
    tracker.node_lost(3, "killed")
    tracker.node_restarted(3)
    add_models(tracker, 0, 0, 1, 2)
    assert [average.nodes for average in tracker.complete_averages()] == [3]


def test_an_event_queue_reads_only_one_event_ahead() -> None:
    read: list[int] = []

    def endless() -> Iterator[FaultEvent]:
        for second in range(10**9):
            read.append(second)
            yield FaultEvent(float(second), "crash", (0,))

    queue = EventQueue(endless())
    assert [queue.pop().time for _ in range(3)] == [0.0, 1.0, 2.0]
    assert (queue.next_time, read) == (3.0, [0, 1, 2, 3])


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_fault_kind_has_one_operation(kind: Kind) -> None:
    handler = Mock(spec=EventHandler)
    fault = FaultEvent(0.0, kind, (0,))
    apply_event(fault, handler)
    [call] = handler.method_calls
    assert call.args == (fault,)
    assert (call[0] == "disturb_links") == (kind in ("partition", "repair", "hold", "release", "drop"))


def test_an_unknown_fault_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="fault kind 'melt': no engine operation applies it"):
        apply_event(FaultEvent(0.0, cast(Any, "melt"), (0,)), Mock(spec=EventHandler))
