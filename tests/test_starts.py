"""Patience with nodes that are started, and have not said yet that they listen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engines.processes import control
from shoal.engines.processes.coordinator import Coordinator
from shoal.engines.processes.start_monitor import LONGEST_LOOK, Starts
from shoal.experiment import Experiment
from shoal.results.records import RunFolder

PATIENCE = 60.0


class Watched(Starts):
    """With a clock of its own, looked at as often as somebody does who has nothing else to do."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 1000.0
        self.given_up: list[set[int]] = []

    def start(self, *nodes: int) -> None:
        self.expect(nodes, self.clock)

    def passes(self, seconds: float, look: float = LONGEST_LOOK) -> None:
        until = self.clock + seconds
        while self.clock < until:
            self.clock += look
            if overdue := self.overdue(self.clock, PATIENCE):
                self.given_up.append(overdue)


@pytest.fixture
def starts() -> Watched:
    starts = Watched()
    starts.start(0, 1, 2, 3)
    return starts


def test_every_node_that_listens_gives_the_others_more_time(starts: Watched) -> None:
    for node in (0, 1, 2):
        starts.passes(PATIENCE - 1.0)
        starts.settle(node)
    starts.passes(PATIENCE - 1.0)
    assert (starts.given_up, starts.nodes) == ([], {3})
    starts.passes(2.0)
    assert starts.given_up == [{3}]
    starts.passes(PATIENCE - 2.0)
    assert starts.given_up == [{3}], "once is enough, for a while"
    starts.settle(3)
    starts.passes(10 * PATIENCE)
    assert starts.given_up == [{3}]
    assert not starts.nodes


def test_time_in_which_nobody_could_look_does_not_count(starts: Watched) -> None:
    starts.passes(100_000.0, look=10_000.0)
    assert starts.given_up == []


def test_time_before_the_first_start_does_not_count() -> None:
    starts = Watched()
    starts.passes(10 * PATIENCE)
    starts.start(0)
    starts.passes(PATIENCE - 1.0)
    assert starts.given_up == []


def test_nodes_that_are_started_later_do_not_prolong_the_wait_for_earlier_ones(starts: Watched) -> None:
    starts.settle(0)
    for _ in range(2):
        starts.passes(PATIENCE / 2 + 1.0)
        starts.start(0)  # again and again, as where nodes come and go
        starts.settle(0)
    assert starts.given_up == [{1, 2, 3}]


def test_nodes_that_listen_give_more_time_to_those_that_were_started_after_them(starts: Watched) -> None:
    starts.start(4)
    for node in (0, 1, 2):
        starts.passes(PATIENCE - 1.0)
        starts.settle(node)
    assert starts.given_up == []
    starts.passes(PATIENCE + 1.0)
    assert starts.given_up == [{3, 4}]


def test_a_supervisor_ends_those_that_do_not_start_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment(name="starting", nodes=4, algorithm={"name": "dpsgd", "rounds": 1}, engine="processes")
    coordinator: Any = Coordinator(experiment, RunFolder.create(tmp_path, "starting"))
    assert coordinator._patience_at_start >= PATIENCE
    said: list[Any] = []
    coordinator._zygote = SimpleNamespace(say=said.append)
    monkeypatch.setattr(coordinator._starts, "overdue", lambda now, patience: {3, 1})
    coordinator._give_up_on_those_that_do_not_start()
    assert said == [control.KillNodes([1, 3])]
    assert all("did not say" in coordinator._reasons[node] for node in (1, 3))
