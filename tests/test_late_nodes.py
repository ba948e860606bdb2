"""Nodes that are not there at the start join later, get the model and the round of their peers, and are waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import shoal
from checkpoint_runs import stopped_after
from conftest import models_of
from shoal.engines.processes import control
from shoal.engines.processes.agent import Agent
from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.run_times import RunTimes
from shoal.experiment import Experiment
from shoal.results.checkpoints import Checkpoints
from shoal.results.records import JOINED, Event, Record, Round
from shoal.testing import Faults

pytestmark = pytest.mark.usefixtures("no_process_is_left")

NODES = 6
ROUNDS = 24
LATE = (4, 5)
EARLY = (0, 1, 2, 3)


def experiment(**changed: Any) -> Experiment:
    given: dict[str, Any] = {
        "nodes": NODES,
        "seed": 1,
        "algorithm": {"name": "dpsgd", "rounds": ROUNDS},
        "topology": {"name": "regular", "degree": 3},
        "model": {"name": "mlp", "hidden": (8,)},
        "training": {"batch_size": 8, "local_steps": 1},
        "speed": {"step_seconds": 0.2},
        "evaluation": {"every": 0, "samples": 20},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**given, **changed})


def records_of(run: Any, node: int, kind: type[Record]) -> list[Any]:
    return [record for record in run.folder.read(node) if isinstance(record, kind)]


def rounds_of(run: Any, node: int) -> list[int]:
    return [record.round for record in records_of(run, node, Round)]


def events_of(run: Any, node: int, what: str) -> list[Event]:
    return [event for event in records_of(run, node, Event) if event.what == what]


def check_joined(run: Any) -> None:
    """The late nodes took part from some round on, and no node ever waited for them before."""
    assert run.summary["status"] == "completed", run.summary
    assert not run.summary["lost"]
    for node in LATE:
        (joined,) = events_of(run, node, JOINED)
        rounds = rounds_of(run, node)
        assert joined.detail.startswith(f"from round {rounds[0]} on, with the model of node ")
        assert rounds == list(range(rounds[0], ROUNDS))
        assert rounds[0] > 0
        assert records_of(run, node, Round)[-1].messages_sent > 0
    for node in EARLY:
        assert rounds_of(run, node) == list(range(ROUNDS))
    assert not [event for node in range(NODES) for event in events_of(run, node, "timed out")]
    models = models_of(run)
    distances = np.linalg.norm(models - models.mean(0), axis=1)
    assert max(distances[list(LATE)]) < 3 * max(distances[list(EARLY)])


CASES: dict[str, dict[str, Any]] = {
    "time, static graph": {"fault": Faults().join("4-5").at(1.0).schedule},
    "round, peer sampler": {
        "fault": Faults().join("4-5", round=4).schedule,
        "topology": {"name": "peer-sampler", "graph": {"name": "regular", "degree": 3, "dynamic": True}},
    },
}


@pytest.mark.parametrize("engine", ["simulation", "processes"])
@pytest.mark.parametrize("case", CASES)
def test_late_nodes_join_also_after_a_checkpoint_without_them(case: str, engine: str, tmp_path: Path) -> None:
    run = experiment(engine=engine, checkpoint={"every": 1, "keep": 100}, **CASES[case]).run(tmp_path / "whole")
    check_joined(run)
    manifest = Checkpoints(run.folder).read(1)
    assert {saved.node for saved in manifest.nodes} >= set(EARLY)
    assert {saved.node for saved in manifest.nodes}.isdisjoint(LATE)
    check_joined(shoal.resume(stopped_after(run.folder, 1, tmp_path / "stopped").path))


def test_in_the_simulation_a_late_node_joins_at_its_time_or_when_the_first_node_starts_the_round(
    tmp_path: Path,
) -> None:
    faults = Faults().join(4).at(1.1).join(5, round=9)
    run = experiment(fault=faults.schedule).run(tmp_path)
    check_joined(run)
    times = {node: events_of(run, node, JOINED)[0].time for node in LATE}
    assert times == {4: pytest.approx(1.1), 5: pytest.approx(9 * 0.2)}
    assert rounds_of(run, 4)[0] == 6  # the others are in round 5
    assert rounds_of(run, 5)[0] in (9, 10)


@pytest.mark.parametrize("algorithm", ["d2", "gradient-tracking", "k-gt"])
def test_a_run_resumed_from_the_round_of_a_join_ends_like_an_uninterrupted_one(algorithm: str, tmp_path: Path) -> None:
    """In this round nodes have received the next epoch of their sums, and have not entered it."""
    late = experiment(
        nodes=5,
        algorithm={"name": algorithm, "rounds": 7},
        topology={"name": "full"},
        fault=Faults().join(4, round=2).schedule,
        checkpoint={"every": 1, "keep": 100},
    )
    run = late.run(tmp_path / "whole")
    first = rounds_of(run, 4)[0]
    resumed = shoal.resume(stopped_after(run.folder, first, tmp_path / "stopped").path)
    assert resumed.summary["digest"] == run.summary["digest"]


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_nodes_that_never_join_make_the_run_incomplete(engine: str, tmp_path: Path) -> None:
    """Node 3 starts, but reaches no peer; the others do not start."""
    rounds = 10
    faults = Faults().join(5).at(1000.0).join(4, round=rounds).join(3).at(0.5).partition(3).at(0.0)
    run = experiment(
        engine=engine,
        algorithm={"name": "dpsgd", "rounds": rounds},
        simulation={"batching": "off", "receive_timeout": 1.0},
        processes={"receive_timeout": 1.0},
        fault=faults.schedule,
    ).run(tmp_path)
    assert run.summary["status"] == "incomplete"
    assert run.summary["lost"] == dict.fromkeys("345", "has not joined the run")
    assert [len(events_of(run, node, "not joined")) for node in (3, 4, 5)] == [1, 0, 0]


def test_a_node_that_joined_crashes_and_rejoins_and_no_restart_starts_it_before(tmp_path: Path) -> None:
    """The random crash and restart of node 5 have no effect while it is not there."""
    faults = Faults().join(5, round=8).crash(5, round=12).restart(5).at(3.5)
    faults = faults.crash(5).every(0.01, before=0.5, count=1).lasting(0.01)
    run = experiment(fault=faults.schedule).run(tmp_path)
    assert run.summary["status"] == "completed"
    (joined,), (rejoined,) = events_of(run, 5, JOINED), events_of(run, 5, "rejoined")
    assert joined.time == pytest.approx(8 * 0.2)
    assert rejoined.time == pytest.approx(3.5)
    rounds = rounds_of(run, 5)
    assert rounds[0] in (8, 9)
    assert 12 not in rounds
    assert rounds[-1] == ROUNDS - 1


def test_faults_of_a_node_before_it_joins_by_round_have_no_effect_and_later_faults_have(tmp_path: Path) -> None:
    faults = Faults().join(5, round=8).raises(5).at(0.5).crash(5).at(0.5).crash(5).at(3.0).lasting(0.5)
    run = experiment(fault=faults.schedule).run(tmp_path)
    assert run.summary["status"] == "completed"
    (joined,), (rejoined,) = events_of(run, 5, JOINED), events_of(run, 5, "rejoined")
    assert (joined.time, rejoined.time) == (pytest.approx(8 * 0.2), pytest.approx(3.5))


def test_late_clients_join_their_server_also_after_a_checkpoint_before_it_has_received_their_samples(
    tmp_path: Path,
) -> None:
    late = experiment(
        algorithm={"name": "fedavg", "rounds": ROUNDS, "fraction": 1.0},
        fault=Faults().join("4-5", round=5).schedule,
        checkpoint={"every": 1, "keep": 100},
    )
    run = late.run(tmp_path / "whole")
    check_joined_server(run)
    assert {saved.node for saved in Checkpoints(run.folder).read(5).nodes} > set(LATE)
    assert not [node for node in LATE if 5 in rounds_of(run, node)]
    check_joined_server(shoal.resume(stopped_after(run.folder, 5, tmp_path / "stopped").path))


def check_joined_server(run: Any) -> None:
    assert run.summary["status"] == "completed"
    for node in LATE:
        (joined,) = events_of(run, node, JOINED)
        assert joined.detail == f"node {NODES} leads"
        assert min(rounds_of(run, node)) >= 5
    server = [records_of(run, NODES, Round)[i].messages_sent for i in (0, -2, -1)]
    assert (server[0], server[-1] - server[-2]) == (4, 6)


class RecordingAgent:
    """Keeps the requests that it gets."""

    def __init__(self) -> None:
        self.requests: list[control.StartNodes] = []

    def send(self, request: control.StartNodes) -> None:
        self.requests.append(request)


def test_the_first_agent_starts_the_network_process_even_if_all_its_nodes_are_late() -> None:
    first, second = RecordingAgent(), RecordingAgent()
    group = AgentGroup([cast(Agent, first), cast(Agent, second)], {0: 0, 1: 0, 2: 1, 3: 1})
    group.start(control.StartNodes([2, 3], "run", with_network=True))
    assert [(request.nodes, request.with_network) for request in first.requests] == [([], True)]
    assert [(request.nodes, request.with_network) for request in second.requests] == [([2, 3], False)]


def test_every_agent_knows_its_late_nodes_before_they_join() -> None:
    agents = [RecordingAgent(), RecordingAgent(), RecordingAgent()]
    group = AgentGroup([cast(Agent, agent) for agent in agents], {0: 0, 1: 0, 2: 1, 3: 2})
    group.start(control.StartNodes([0, 3], "run", late_nodes=[1, 2]))
    found = [[(request.nodes, request.late_nodes) for request in agent.requests] for agent in agents]
    assert found == [[([0], [1])], [([], [2])], [([3], [])]]


def test_nodes_that_join_later_count_when_too_many_nodes_are_rejected(tmp_path: Path) -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (72, 72)); "  # for eight nodes
        "import shoal; from shoal.testing import Faults; "
        "shoal.Experiment(nodes=9, engine='processes', fault=Faults().join('4-8').at(60.0).schedule).run('runs')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "LaunchError: nodes = 9: about 8 nodes with a model of" in done.stderr
    assert "limited by the limit of open files (ulimit -n)" in done.stderr


def test_the_startup_ends_when_all_nodes_that_are_there_have_begun() -> None:
    times = RunTimes(None, range(3))
    times.do_not_await([2])
    assert [times.first_round_began(node) for node in (0, 1, 2)] == [False, True, False]
