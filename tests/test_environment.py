"""Networks, devices, availability and timed faults in the simulation, checked to the exact virtual second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.algorithms.dpsgd import DPSGD
from shoal.environment.faults import Fault
from shoal.errors import DeadlockError, ExperimentError, NodeError
from shoal.experiment import Experiment
from shoal.node import Node
from shoal.results.records import Average, End, Evaluation, Event, Round
from shoal.testing import Faults

NODES = 4
ROUNDS = 4
STEP = 1.0
IDEAL = {"name": "ideal"}
LINKS = {"name": "uniform", "latency": 0.1, "upload": 8, "download": 8}


def experiment(**changed: Any) -> Experiment:
    """An experiment in which a round takes one second of training, plus the time of the network if there is one."""
    given: dict[str, Any] = {
        "nodes": NODES,
        "seed": 1,
        "algorithm": DPSGD(ROUNDS),
        "topology": {"name": "ring"},
        "model": {"name": "mlp", "hidden": (4,)},
        "training": {"batch_size": 8, "local_steps": 1},
        "speed": {"step_seconds": STEP},
        "evaluation": {"every": 0, "average": False, "samples": 20},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**given, **changed})


def intervals(folder: Path, *lines: str) -> dict[str, Any]:
    """An availability table for these lines of node, on, off."""
    file = folder / "intervals.csv"
    file.write_text("\n".join(lines))
    return {"name": "intervals", "path": str(file)}


def rounds_of(run: Any, node: int) -> dict[int, float]:
    """Return the time at which each round ended."""
    return {r.round: pytest.approx(r.time) for r in run.folder.read(node) if isinstance(r, Round)}


def events_of(run: Any, node: int) -> list[tuple[str, float]]:
    return [(r.what, pytest.approx(r.time)) for r in run.folder.read(node) if isinstance(r, Event)]


@dataclass(frozen=True)
class LocalTraining:
    """An algorithm that trains and exchanges no messages."""

    rounds: int = 2

    async def run(self, node: Node) -> None:
        async for _ in node.rounds(self.rounds):
            node.params = await node.train(node.params)


@dataclass(frozen=True)
class Waiter:
    """An algorithm that waits for two messages that never arrive."""

    async def run(self, node: Node) -> None:
        node.background(self._listen(node))
        await node.receive(kind="nothing")

    async def _listen(self, node: Node) -> None:
        await node.receive(kind="nothing else")


@dataclass(frozen=True)
class Sleeper:
    """An algorithm that sleeps for one second per round."""

    async def run(self, node: Node) -> None:
        async for _ in node.rounds(2):
            await node.sleep(1.0)


# Offline nodes pause


def test_training_pauses_while_the_node_is_offline(tmp_path: Path) -> None:
    availability = intervals(tmp_path, "1,0,0.25", "1,3,3.5", "1,10,inf", "2,5,inf")
    run = experiment(algorithm=LocalTraining(), availability=availability).run(tmp_path)
    assert rounds_of(run, 0) == {0: 1.0, 1: 2.0}
    assert rounds_of(run, 1) == {0: 10.25, 1: 11.25}  # a quarter, a half, then the rest
    assert rounds_of(run, 2) == {0: 6.0, 1: 7.0}  # it was offline from the start
    assert run.summary["status"] == "completed"
    assert run.summary["time"]["virtual_s"] == pytest.approx(11.25)


def test_a_sleep_that_ends_offline_returns_when_the_node_is_online(tmp_path: Path) -> None:
    run = experiment(algorithm=Sleeper(), availability=intervals(tmp_path, "1,0,0.5", "1,4,inf")).run(tmp_path)
    assert rounds_of(run, 0) == {0: 1.0, 1: 2.0}
    assert rounds_of(run, 1) == {0: 4.0, 1: 5.0}


def test_the_clock_advances_while_all_nodes_are_offline(tmp_path: Path) -> None:
    availability = intervals(
        tmp_path, *(f"{node},{on},{off}" for node in range(NODES) for on, off in ((0, 0.5), (9, "inf")))
    )
    run = experiment(availability=availability).run(tmp_path)
    assert rounds_of(run, 0) == {0: 9.5, 1: 10.5, 2: 11.5, 3: 12.5}
    assert run.summary["status"] == "completed"


def test_an_offline_node_receives_no_messages_and_its_peers_continue_after_their_timeout(tmp_path: Path) -> None:
    run = experiment(availability=intervals(tmp_path, "1,0,0.5", "1,2.2,inf"), simulation={"receive_timeout": 1.5}).run(
        tmp_path
    )
    # Nodes 0 and 2 wait for node 1 until 2.5. It comes online at 2.2 and sends at 2.7, too late.
    assert rounds_of(run, 0)[0] == 2.5
    assert rounds_of(run, 3)[0] == 1.0
    assert ("timed out", 2.5) in events_of(run, 0)
    assert run.summary["status"] == "completed"


def test_a_timeout_and_a_peer_crash_wake_an_offline_node_once(tmp_path: Path) -> None:
    """The timeout expires, then the awaited peer crashes. The node continues once."""
    availability = intervals(tmp_path, "0,0,1.5", "0,10,inf")
    faults = Faults().hang(1, round=0).crash(1).at(6.0)
    run = experiment(
        nodes=2,
        algorithm=DPSGD(2),
        availability=availability,
        fault=faults.schedule,
        simulation={"receive_timeout": 3.0},
    ).run(tmp_path)
    assert rounds_of(run, 0) == {0: 10.0, 1: 11.0}


def test_waiting_for_a_node_that_stays_offline_is_reported_as_a_deadlock(tmp_path: Path) -> None:
    availability = intervals(tmp_path, "1,0,1.5")
    with pytest.raises(DeadlockError) as caught:
        experiment(availability=availability).run(tmp_path)
    message = str(caught.value)
    assert "node 1 is offline, and does not come online again" in message
    assert "node 0 waits for 'model' of round 1 from 1, 3 (still missing: [1])" in message
    assert "node 1 waits" not in message


@pytest.mark.parametrize("fault", [(), (Fault("slow", factor=2.0, every=1.0, nodes="3"),)])
def test_a_deadlock_is_reported_even_if_nodes_go_on_and_offline_for_ever(
    tmp_path: Path, fault: tuple[Fault, ...]
) -> None:
    """Nodes 0 and 2 send their messages of round 0 before node 3 is online, and never send them again."""
    availability = {**intervals(tmp_path, "0,0.1,6", "1,0.3,6.1", "2,0.2,6.3", "3,2,6.2"), "period": 7.0}
    with pytest.raises(DeadlockError, match=r"node 3 waits for 'model' of round 0 from 0, 2") as caught:
        experiment(availability=availability, fault=fault).run(tmp_path)
    assert "does not come online again" not in str(caught.value)


def test_a_deadlock_is_reported_if_a_node_stays_offline_during_training(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import math\n\n\nclass Mine:\n    def build(self, nodes, seed):\n        return self\n\n"
        "    def online(self, node, time):\n        return time < 0.5 if node == 0 else int(time) % 2 == 0\n\n"
        "    def next_change(self, node, time):\n"
        "        return (0.5 if time < 0.5 else math.inf) if node == 0 else math.floor(time) + 1.0\n"
    )
    with pytest.raises(DeadlockError, match="node 0 is offline, and does not come online again"):
        experiment(algorithm=LocalTraining(), availability={"name": f"{file}:Mine"}).run(tmp_path)


# Timed faults


def test_a_node_that_crashes_during_training_is_not_waited_for(tmp_path: Path) -> None:
    run = experiment(fault=Faults().crash(1).at(1.25).schedule).run(tmp_path)
    assert rounds_of(run, 1) == {0: 1.0}
    assert events_of(run, 1) == [("fault", 1.25)]
    assert rounds_of(run, 0) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    assert run.summary["lost"] == {"1": "crashed on schedule"}
    assert run.summary["status"] == "incomplete"


def test_a_node_that_hangs_never_continues(tmp_path: Path) -> None:
    run = experiment(fault=Faults().hang(1).at(1.25).schedule, simulation={"receive_timeout": 0.5}).run(tmp_path)
    assert rounds_of(run, 1) == {0: 1.0}
    assert rounds_of(run, 0) == {0: 1.0, 1: 2.5, 2: 3.55, 3: 4.555}, "its neighbours wait once, and then much less"
    assert set(run.summary["lost"]) == {"1"}


def test_a_timed_raise_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"fault on schedule: node 1 raises at 1\.25 s"):
        experiment(fault=Faults().raises(1).at(1.25).schedule).run(tmp_path)


def test_a_slow_fault_changes_the_speed_of_a_training_step_in_progress(tmp_path: Path) -> None:
    faults = Faults().slow(1, factor=4.0, what="compute").at(0.5).until(1.5).slow(2, factor=9.0, what="network").at(0.0)
    run = experiment(algorithm=LocalTraining(), fault=faults.schedule, network=LINKS).run(tmp_path)
    # A half until 0.5, a quarter more until 1.5 at a quarter of the speed, then the rest at full speed.
    assert rounds_of(run, 1) == {0: 1.75, 1: 2.75}
    assert rounds_of(run, 2) == {0: 1.0, 1: 2.0}
    assert [what for what, _ in events_of(run, 1)] == ["fault", "fault"]


def test_slow_faults_that_overlap_multiply_and_end_one_by_one(tmp_path: Path) -> None:
    faults = Faults().slow(1, factor=2.0, what="compute").at(0.5).until(2.5)
    faults = faults.slow(1, factor=4.0, what="compute").at(1.0).until(2.0)
    run = experiment(algorithm=LocalTraining(), fault=faults.schedule, network=LINKS).run(tmp_path)
    # 1/2 until 0.5, 1/4 until 1.0, 1/8 until 2.0, 1/8 at half the speed. Of the next step, 1/8 until 2.5.
    assert rounds_of(run, 1) == {0: 2.25, 1: 3.375}


def test_a_slow_network_delays_messages(tmp_path: Path) -> None:
    def ends(*faults: Fault) -> float:
        run = experiment(network={"name": "uniform", "latency": 0.0, "upload": 0.1}, algorithm=DPSGD(1), fault=faults)
        return rounds_of(run.run(tmp_path), 0)[0].expected  # type: ignore[attr-defined,no-any-return]

    normal = ends() - STEP
    slow = ends(*Faults().slow("0-3", factor=3.0, what="network").at(0.0).schedule) - STEP
    assert normal > 0
    assert slow == pytest.approx(3 * normal)


@pytest.mark.parametrize(
    "network",
    [IDEAL, {"name": "uniform", "latency": 0.1}, {"name": "ten-regions"}],
    ids=lambda network: network["name"],
)
@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"speed": {"network_slowdown": 2.0}}, "speed: network_slowdown has no effect on nodes 0-3: in network = "),
        (
            {"fault": Faults().slow("1, 3", factor=2.0, what="network").at(1.0).schedule},
            r"fault\[0\]: what = 'network' has no effect on nodes 1, 3: in network = ",
        ),
        ({"fault": [Fault("slow", every=1.0, factor=2.0, what="network")]}, "no effect on nodes 0-3"),
    ],
    ids=["device", "fault", "drawn"],
)
def test_slowing_down_unlimited_links_is_rejected(
    changed: Any, problem: str, network: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ExperimentError, match=problem) as rejected:
        experiment(network=network, **changed).run(tmp_path)
    assert repr(network["name"]) in str(rejected.value)
    assert "upload and a download" in str(rejected.value)


def test_unlimited_links_are_allowed_if_the_fault_slows_down_computing_too(tmp_path: Path) -> None:
    run = experiment(algorithm=LocalTraining(), fault=Faults().slow(1, factor=2.0).at(0.0).schedule).run(tmp_path)
    assert rounds_of(run, 1) == {0: 2.0, 1: 4.0}


def test_the_error_names_only_nodes_with_unlimited_links(tmp_path: Path) -> None:
    wide = {"upload": 0.0, "download": 0.0}
    with pytest.raises(ExperimentError, match="no effect on node 2: "):
        experiment(network=LINKS, speed={"network_slowdown": 2.0}, group=[{"nodes": "2", "network": wide}]).run(
            tmp_path
        )


def test_a_deadlock_error_counts_the_waiting_nodes(tmp_path: Path) -> None:
    with pytest.raises(DeadlockError, match=f": {NODES} nodes wait and"):
        experiment(algorithm=Waiter()).run(tmp_path)


def test_nodes_with_a_timeout_continue_during_a_partition_and_after_its_repair(tmp_path: Path) -> None:
    faults = Faults().partition("0-1", "2-3").at(1.5).until(2.2)
    run = experiment(
        network={"name": "uniform", "latency": 0.1}, fault=faults.schedule, simulation={"receive_timeout": 0.5}
    ).run(tmp_path)
    # Round 1: training from 1.1 to 2.1, then no message crosses the partition. Round 2 is complete again.
    assert rounds_of(run, 0) == {0: 1.1, 1: 2.6, 2: 3.7, 3: 4.8}
    assert events_of(run, 0) == [("timed out", 2.6)]


def test_held_messages_delay_a_run_without_a_deadlock(tmp_path: Path) -> None:
    faults = Faults().hold().at(0.5).until(20.0)
    plan = {"fault": faults.schedule, "evaluation": {"seconds": 3.0, "average": False, "samples": 20}}
    run = experiment(**plan).run(tmp_path)
    assert rounds_of(run, 0) == {0: 20.0, 1: 21.0, 2: 22.0, 3: 23.0}
    ticks = [r.time for r in run.folder.read(0) if isinstance(r, Evaluation)]
    assert ticks == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, pytest.approx(23.0)]


@pytest.mark.parametrize("kind", ["restart", "crash"])
def test_a_server_cannot_restart(kind: Any) -> None:
    ends = {"until": 2.0} if kind == "crash" else {}
    with pytest.raises(ExperimentError, match=r"node 4 is a service node, such as a server, and cannot restart"):
        experiment(algorithm={"name": "fedavg", "rounds": 2}, fault=(Fault(kind, NODES, time=1.0, **ends),))


# Duration, and evaluation by time


def test_a_run_ends_exactly_at_its_duration_and_saves_its_models(tmp_path: Path) -> None:
    run = experiment(duration=2.5, algorithm=DPSGD(100)).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["time"]["virtual_s"] == 2.5
    for node in range(NODES):
        assert list(rounds_of(run, node)) == [0, 1]
        assert [r.time for r in run.folder.read(node) if isinstance(r, End)] == [2.5]
    two = experiment(algorithm=DPSGD(2)).run(tmp_path)
    assert run.summary["digest"] == two.summary["digest"]
    np.testing.assert_array_equal(np.load(run.folder.model(3)), np.load(two.folder.model(3)))


def test_a_duration_ends_offline_and_waiting_nodes_but_not_hanging_ones(tmp_path: Path) -> None:
    faults = Faults().hang(2).at(0.2)
    availability = {**intervals(tmp_path, "1,0,0.5"), "period": 100.0}
    run = experiment(duration=30.0, availability=availability, fault=faults.schedule).run(tmp_path)
    assert set(run.summary["lost"]) == {"2"}
    assert run.summary["time"]["virtual_s"] == 30.0
    for node in (0, 1, 3):
        assert [r.time for r in run.folder.read(node) if isinstance(r, End)] == [30.0]


def test_all_nodes_are_evaluated_at_regular_times_and_at_the_end(tmp_path: Path) -> None:
    plan = {"seconds": 0.75, "average": True, "samples": 20}
    run = experiment(algorithm=DPSGD(2), network=LINKS, evaluation=plan).run(tmp_path)
    ended = run.summary["time"]["virtual_s"]
    assert ended > 2.0
    for node in range(NODES):
        evaluations = [(r.tick, r.time) for r in run.folder.read(node) if isinstance(r, Evaluation)]
        assert evaluations == [(1, 0.75), (2, 1.5), (3, pytest.approx(ended))]
    averages = [r for r in run.folder.read_averages() if isinstance(r, Average)]
    assert [(r.tick, r.time, r.nodes) for r in averages] == [(1, 0.75, 4), (2, 1.5, 4), (3, pytest.approx(ended), 4)]
    first, second, last = averages
    assert first.consensus_distance == 0.0  # no node has trained yet
    assert second.consensus_distance > 0.0
    one = experiment(algorithm=DPSGD(1), network=LINKS, evaluation={"every": 1, "samples": 20}).run(tmp_path)
    (after_one,) = [r for r in one.folder.read(0) if isinstance(r, Evaluation)]
    (evaluated,) = [r for r in run.folder.read(0) if isinstance(r, Evaluation) and r.tick == 2]
    assert evaluated.scores == after_one.scores
    assert last.scores != first.scores


@pytest.mark.parametrize("network", [IDEAL, LINKS])
def test_evaluation_changes_neither_models_nor_times(tmp_path: Path, network: Any) -> None:
    faults = Faults().slow(1, factor=2.0).at(1.5).crash(2).at(2.2)
    plans: list[dict[str, Any]] = [
        {"every": 0, "samples": 20},
        {"every": 1, "samples": 20},
        {"seconds": 0.3, "samples": 20},
    ]
    runs = [experiment(network=network, fault=faults.schedule, evaluation=plan).run(tmp_path) for plan in plans]
    assert len({run.summary["digest"] for run in runs}) == 1
    assert len({run.summary["time"]["virtual_s"] for run in runs}) == 1
    assert len({tuple(r.time for r in run.folder.read(0) if isinstance(r, Round)) for run in runs}) == 1


# Randomness


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    def digest(seed: int) -> tuple[str, float]:
        faults = Faults().drop(probability=0.3).at(0.0).crash().every(3.0, count=2).lasting(1.0)
        run = experiment(
            seed=seed,
            network={"name": "uniform", "latency": 0.1, "jitter": 0.05, "upload": 1, "loss": 0.1},
            availability={"name": "day-night", "period": 5.0},
            speed={"name": "lognormal", "sample_seconds": 0.05},
            fault=faults.schedule,
            simulation={"receive_timeout": 2.0},
        ).run(tmp_path)
        return run.summary["digest"], run.summary["time"]["virtual_s"]

    assert digest(3) == digest(3)
    assert digest(3) != digest(4)


@given(
    crash=st.floats(0.01, 4.0),
    lasting=st.floats(0.001, 3.0),
    node=st.integers(0, NODES - 1),
    second=st.none() | st.tuples(st.integers(0, NODES - 1), st.floats(0.01, 4.0), st.floats(0.001, 3.0)),
    dynamic=st.booleans(),
)
@example(crash=1.0, lasting=1.0, node=0, second=(0, 2.0625, 2.0), dynamic=False)  # crashes again while it rejoins
@settings(max_examples=40, deadline=None)
def test_a_run_has_no_deadlock_at_any_time_of_crash_and_restart(
    tmp_path_factory: pytest.TempPathFactory,
    crash: float,
    lasting: float,
    node: int,
    second: tuple[int, float, float] | None,
    dynamic: bool,
) -> None:
    faults = Faults().crash(node).at(crash).lasting(lasting)
    if second is not None:
        faults = faults.crash(second[0]).at(second[1]).lasting(second[2])
    run = experiment(
        network=LINKS,
        topology={"name": "regular", "degree": 2, "dynamic": True} if dynamic else {"name": "ring"},
        fault=faults.schedule,
        algorithm=DPSGD(3),
    ).run(tmp_path_factory.mktemp("run"))
    assert run.summary["status"] in ("completed", "incomplete")
    assert run.summary["time"]["virtual_s"] < 40
    for other in set(range(NODES)) - {node, node if second is None else second[0]}:
        assert list(rounds_of(run, other)) == [0, 1, 2]
