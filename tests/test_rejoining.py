"""A node that crashes restarts without state, and continues where its peers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.algorithms import ALGORITHMS
from shoal.engines.rejoining import (
    ANSWER_TIMEOUT,
    MODEL_ANSWER,
    MODEL_REQUEST,
    REJOIN_ANSWER,
    REJOIN_REQUEST,
    answer_rejoining_peers,
    rejoin,
)
from shoal.experiment import Experiment
from shoal.message import Message, Payload
from shoal.results.records import Event, Round
from shoal.testing import FakeRuntime, Faults

NODES = 6
STEP = 1.0
IDEAL = {"name": "ideal"}
REGULAR = {"name": "regular", "degree": 3}
STRUCK = Faults().crash(2).at(2.5).until(4.25)


def experiment(**changed: Any) -> Experiment:
    given: dict[str, Any] = {
        "nodes": NODES,
        "seed": 1,
        "algorithm": {"name": "dpsgd", "rounds": 8},
        "topology": REGULAR,
        "model": {"name": "mlp", "hidden": (4,)},
        "training": {"batch_size": 8, "local_steps": 1},
        "speed": {"step_seconds": STEP},
        "evaluation": {"every": 0, "average": False, "samples": 20},
        "simulation": {"batching": "off"},
        "fault": STRUCK.schedule,
    }
    return Experiment(**{**given, **changed})


def rounds_of(run: Any, node: int) -> dict[int, float]:
    return {r.round: r.time for r in run.folder.read(node) if isinstance(r, Round)}


def events_of(run: Any, node: int) -> dict[str, tuple[float, str]]:
    return {r.what: (r.time, r.detail) for r in run.folder.read(node) if isinstance(r, Event)}


# In a run


@pytest.mark.parametrize("network", [IDEAL, {"name": "uniform", "latency": 0.1, "upload": 8}])
@pytest.mark.parametrize("dynamic", [False, True])
def test_with_dpsgd_a_restarted_node_rejoins_in_the_next_round(tmp_path: Path, network: Any, dynamic: bool) -> None:
    run = experiment(network=network, topology={**REGULAR, "dynamic": dynamic}).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert not run.summary["lost"]
    back, detail = events_of(run, 2)["rejoined"]
    first = min(round for round, time in rounds_of(run, 2).items() if time > back)
    assert detail.startswith(f"from round {first} on, with the model of node ")
    assert 4.25 <= back < 4.25 + STEP
    # The others are in the round before when they receive the request, and no node waits longer than a training takes.
    others = [rounds_of(run, node) for node in range(NODES) if node != 2]
    assert all(list(rounds) == list(range(8)) for rounds in others)
    asked = 4.25 + (0.0 if network == IDEAL else 0.1)
    assert first == 1 + min(sum(time <= asked for time in rounds.values()) for rounds in others)
    assert max(rounds[7] for rounds in others) < 8 * STEP + 2.5
    models = np.stack([np.load(run.folder.model(node)) for node in range(NODES)])
    assert np.linalg.norm(models[2] - models.mean(0)) < 2 * max(np.linalg.norm(models - models.mean(0), axis=1)[[0, 1]])


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "gossip", "rounds": 8, "period": 1.0}, {"name": "el-local", "rounds": 8}],
    ids=lambda algorithm: str(algorithm["name"]),
)
def test_with_other_algorithms_a_restarted_node_rejoins_as_well(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    run = experiment(algorithm=algorithm, simulation={"receive_timeout": 3.0}).run(tmp_path)
    assert run.summary["status"] == "completed"
    back, _ = events_of(run, 2)["rejoined"]
    assert max(rounds_of(run, 2)) == 7
    assert [round for round, time in rounds_of(run, 2).items() if time > back]


FULL = {"name": "full"}
SETTINGS: dict[str, dict[str, Any]] = {
    "gossip": {"algorithm": {"name": "gossip", "period": 0.05}},
    "shatter": {"algorithm": {"name": "shatter", "virtual_nodes": 3, "degree": 2}},
    "relaysum": {"topology": {"name": "tree"}},
    "asynchronous": {"algorithm": {"name": "parameter-server", "asynchronous": True}},
    "bounded": {"algorithm": {"name": "parameter-server", "asynchronous": True, "staleness": 0}},
    "plain muffliato": {"algorithm": {"name": "muffliato", "accelerated": False}},
    "d-cliques": {"topology": {"name": "d-cliques"}},
    "peer sampler": {"algorithm": {"name": "dpsgd", "overlap": True}, "topology": {"name": "peer-sampler"}},
    "peer sampler, static": {
        "algorithm": {"name": "dpsgd"},
        "topology": {"name": "peer-sampler", "graph": {"name": "ring"}},
    },
    "asked": {"algorithm": {"name": "dpsgd"}, "topology": {"name": "gossip-sampler"}},
    "asked often": {
        "algorithm": {"name": "muffliato", "accelerated": False, "gossip": 2},
        "topology": {"name": "gossip-sampler"},
    },
}


@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")
@pytest.mark.parametrize(
    ("faults", "start", "event"),
    [
        (Faults().crash(3).at(0.2).until(0.201), 0.201, "rejoined"),
        (Faults().crash(3).at(0.2).until(0.305), 0.305, "rejoined"),
        (Faults().join(3).at(0.255), 0.255, "joined"),
    ],
    ids=["restarted at once", "restarted later", "late"],
)
@pytest.mark.parametrize("name", sorted({*ALGORITHMS, *SETTINGS}))
def test_with_every_algorithm_and_peer_discovery_no_node_times_out(
    name: str, faults: Faults, start: float, event: str, tmp_path: Path
) -> None:
    settings = SETTINGS.get(name, {})
    run = experiment(
        algorithm={"name": name, **settings.get("algorithm", {}), "rounds": 12},
        topology=settings.get("topology", FULL),
        model={"name": "logistic"},
        speed={"step_seconds": 0.05},
        network={"name": "uniform", "latency": 0.005},
        fault=faults.schedule,
        checkpoint={"final": False},
    ).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert not run.summary["lost"]
    back, _ = events_of(run, 3)[event]
    assert back < start + 0.06
    assert [time for time in rounds_of(run, 3).values() if time > back + 0.05]
    assert max(time for node in range(NODES) for time in rounds_of(run, node).values()) < 1.5


def test_a_restarted_client_rejoins_its_server(tmp_path: Path) -> None:
    run = experiment(algorithm={"name": "fedavg", "rounds": 8, "fraction": 1.0}).run(tmp_path)
    assert run.summary["status"] == "completed"
    back, detail = events_of(run, 2)["rejoined"]
    assert detail == f"node {NODES} leads"
    assert max(time for time in rounds_of(run, 2).values()) > back + STEP


def test_two_nodes_that_rejoin_at_once_take_over_the_round_and_know_each_other(tmp_path: Path) -> None:
    faults = Faults().crash("2-3").at(2.5).until(4.25)
    run = experiment(nodes=4, topology={"name": "ring"}, fault=faults.schedule).run(tmp_path)
    assert run.summary["status"] == "completed"
    begun = {node: events_of(run, node)["rejoined"] for node in (2, 3)}
    assert all(detail.startswith("from round 5 on") for _, detail in begun.values()), begun
    assert all(time < 4.25 + STEP for time, _ in begun.values())
    sent = [[r.messages_sent for r in run.folder.read(node) if isinstance(r, Round)][-2:] for node in (2, 3)]
    assert [last - before for before, last in sent] == [2, 2]  # to both neighbours on the ring


def test_a_node_restarted_while_offline_rejoins_when_it_is_online(tmp_path: Path) -> None:
    file = tmp_path / "intervals.csv"
    file.write_text("2,0,3\n2,5.5,inf")
    away = {"name": "intervals", "path": str(file)}
    run = experiment(availability=away, simulation={"receive_timeout": 0.5}).run(tmp_path)
    assert run.summary["status"] == "completed"
    assert events_of(run, 2)["rejoined"][0] >= 5.5


def test_a_node_that_hung_and_crashed_rejoins_at_the_speed_of_its_device(tmp_path: Path) -> None:
    faults = Faults().hang(2).at(1.5).crash(2).at(2.5).until(4.25).slow(2, factor=3.0).at(3.0)
    run = experiment(fault=faults.schedule).run(tmp_path)
    assert run.summary["status"] == "completed"
    times = list(rounds_of(run, 2).values())
    assert times[-1] - times[-2] == pytest.approx(3 * STEP)


def test_a_rejoining_node_does_not_wait_for_failed_nodes(tmp_path: Path) -> None:
    run = experiment(fault=STRUCK.crash(4).at(1.5).schedule).run(tmp_path)
    assert events_of(run, 2)["rejoined"][0] < 4.25 + STEP
    assert set(run.summary["lost"]) == {"4"}


def test_a_node_may_rejoin_more_than_once(tmp_path: Path) -> None:
    faults = STRUCK.crash(2).at(6.5).until(7.5)
    run = experiment(algorithm={"name": "dpsgd", "rounds": 12}, fault=faults.schedule).run(tmp_path)
    assert run.summary["status"] == "completed"
    returns = [r.time for r in run.folder.read(2) if isinstance(r, Event) and r.what == "rejoined"]
    assert len(returns) == 2


# By itself


def new_message(sender: int, kind: str, round: Any = None, values: Any = None) -> Message:
    arrays = {} if values is None else {"params": np.array(values, np.float32)}
    return Message(sender, kind, 0, Payload(arrays, {} if round is None else {"round": round}))


def rejoining_node(fake: FakeRuntime, **options: Any) -> Any:
    for other in (0, 2, 3):
        fake.mailbox.mark_failed(other)
    return fake.node(1, nodes=4, params=np.zeros(2, np.float32), **options)


def test_a_rejoining_node_takes_the_earliest_round_and_the_model_furthest_ahead() -> None:
    fake = FakeRuntime(
        new_message(0, REJOIN_ANSWER, 5),
        new_message(2, REJOIN_ANSWER, 8),
        new_message(3, REJOIN_ANSWER, 8),
        new_message(2, MODEL_ANSWER, values=[1, 2]),
    )
    node = rejoining_node(fake)
    assert fake.run(rejoin(node, [0, 2, 3]))
    assert node.next_round == 5
    assert node.params.tolist() == [1, 2]
    assert [(to, m.kind) for to, m in fake.sent] == [
        (0, REJOIN_REQUEST),
        (2, REJOIN_REQUEST),
        (3, REJOIN_REQUEST),
        (2, MODEL_REQUEST),
    ]
    assert not fake.failed_peers()
    assert fake.now() == 0.0


def test_a_rejoining_node_takes_the_next_model_if_the_first_is_missing_or_invalid() -> None:
    bad = new_message(2, MODEL_ANSWER, values=[1, 2, 3])
    fake = FakeRuntime(
        new_message(0, REJOIN_ANSWER, 5),
        new_message(2, REJOIN_ANSWER, 8),
        bad,
        new_message(0, MODEL_ANSWER, values=[3, 4]),
    )
    node = rejoining_node(fake, receive_timeout=2.0)
    assert fake.run(rejoin(node, [0, 2, 3]))
    assert node.params.tolist() == [3, 4]
    assert fake.now() == 4.0  # for the answer of 3, and for a model of 2
    assert set(fake.failed_peers()) == {3}


def test_an_invalid_answer_is_rejected_and_without_others_the_node_does_not_rejoin() -> None:
    fake = FakeRuntime(new_message(0, REJOIN_ANSWER, -1), new_message(2, REJOIN_ANSWER, "soon"))
    node = rejoining_node(fake)
    assert not fake.run(rejoin(node, [0, 2, 3]))
    assert node.rejected_count == 2
    assert fake.now() == ANSWER_TIMEOUT
    assert [r.what for r in fake.records if isinstance(r, Event)] == ["payload rejected"] * 2 + ["not rejoined"]


def test_of_two_rejoining_nodes_the_higher_id_waits_for_the_answer_of_the_lower() -> None:
    fake = FakeRuntime(
        new_message(2, REJOIN_REQUEST),
        new_message(0, REJOIN_REQUEST),
        new_message(2, REJOIN_ANSWER),
        new_message(0, REJOIN_ANSWER),
        new_message(3, REJOIN_ANSWER, 6),
    )
    fake.deliver(new_message(0, REJOIN_ANSWER, 7), at=1.0).deliver(new_message(0, MODEL_ANSWER, values=[1, 2]), at=1.5)
    node = rejoining_node(fake)

    async def body() -> bool:
        rejoined = await rejoin(node, [0, 2, 3])
        await node.sleep(0.0)
        return rejoined

    assert fake.run(body())
    assert node.next_round == 6
    answers = [(to, m.payload.fields.get("round")) for to, m in fake.sent if m.kind == REJOIN_ANSWER]
    assert answers == [(2, None), (0, None), (2, 7)]  # 0 has answered: it knows
    assert not fake.failed_peers()


def test_a_node_includes_a_rejoining_peer_from_its_next_round_on_and_sends_its_model() -> None:
    fake = FakeRuntime().deliver(new_message(2, REJOIN_REQUEST), at=1.0).deliver(new_message(2, MODEL_REQUEST), at=2.0)
    node = fake.node(1, nodes=4, params=np.ones(2, np.float32))
    fake.mailbox.mark_failed(2)

    async def body() -> None:
        node.background(answer_rejoining_peers(node))
        node.start_at_round(4, node.params)
        await node.sleep(3.0)

    fake.run(body())
    (_, answer), (_, model) = fake.sent
    assert (answer.kind, answer.payload.fields["round"]) == (REJOIN_ANSWER, 5)
    assert model.kind == MODEL_ANSWER
    assert model.payload.arrays["params"].tolist() == [1, 1]
    assert not fake.failed_peers()


# Messages of an earlier incarnation

TRACED = Path(__file__).parent.parent / "benchmarks" / "traced_dpsgd.py"


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_no_node_merges_a_message_that_a_peer_sent_before_its_restart(engine: str, tmp_path: Path) -> None:
    """Node 2 is slow. Node 1 waits for it, and already has the next message of node 0 when node 0 crashes."""
    run = experiment(
        engine=engine,
        nodes=4,
        topology={"name": "ring"},
        algorithm={"name": f"{TRACED}:TracedDPSGD", "rounds": 6, "watched": "0"},
        speed={"step_seconds": 0.1},
        group=[{"nodes": "2", "speed": {"step_seconds": 1.0}}],
        fault=Faults().crash(0).at(2.5).until(2.55).schedule,
    ).run(tmp_path)
    assert run.summary["status"] == "completed"
    rejoined, _ = events_of(run, 0)["rejoined"]
    merged = [r.detail.split() for r in run.folder.read(1) if isinstance(r, Event) and r.what == "merged"]
    assert [born for _, born, since in merged if float(since) > rejoined > float(born)] == []
    if engine == "simulation":  # in processes, the restart may take so long that the others have ended
        assert [born for _, born, _ in merged if float(born) >= rejoined]
