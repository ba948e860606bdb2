"""AD-PSGD: pairs average atomically while they train; every step counts once, and the mean is kept."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import experiment, survives_a_crash, survives_a_hang
from shoal.algorithms.adpsgd import ADPSGD
from shoal.algorithms.support.bipartition import bipartition
from shoal.algorithms.support.pairwise_averaging import ANSWER, DONE, PROBE, PROBE_REPLY, REQUEST
from shoal.errors import DeadlockError, ExperimentError
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.results.records import Event
from shoal.testing import FakeRuntime
from shoal.topologies import TopologyWarning
from shoal.topologies.given import Edges
from shoal.topologies.static import Full, Grid, Ring, Star, Tree, undirected
from unsteady import Unsteady

F = np.float32
pytestmark = pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")


def request(values: Any, number: int = 0, sender: int = 0) -> Message:
    return Message(sender, REQUEST, number, Payload({"params": F(values)}))


def answer(half: Any, number: int = 0, sender: int = 1, since: float = 0.0) -> Message:
    return Message(sender, ANSWER, number, Payload({"half": F(half)}, {"since": since}))


def done(sender: int = 0) -> Message:
    return Message(sender, DONE, 0, Payload({}))


def doubled(params: Any) -> Any:
    return 2 * params


def events(fake: FakeRuntime) -> list[str]:
    return [record.what for record in fake.records if isinstance(record, Event)]


def sent_messages(fake: FakeRuntime, kind: str) -> list[tuple[float, int, int, dict[str, Any]]]:
    """The time, receiver, round and arrays of all sent messages of a kind."""
    return [
        (at, to, message.round, {name: a.tolist() for name, a in message.payload.arrays.items()})
        for at, (to, message) in zip(fake.sent_at, fake.sent, strict=True)
        if message.kind == kind
    ]


# The active side: node 0 of two


def active(fake: FakeRuntime, rounds: int = 1, **options: Any) -> Node:
    node = fake.node(0, nodes=2, params=F([8, 0]), train=doubled, receive_timeout=options.pop("receive_timeout", None))
    fake.run(ADPSGD(rounds, **options).run(node))
    return node


@pytest.mark.parametrize("at", [0.5, 1.0, 3.0])
def test_step_of_a_stale_copy_is_applied_to_the_averaged_model(at: float) -> None:
    fake = FakeRuntime().deliver(answer([3, -1]), at=at)
    node = active(fake)
    assert node.params.tolist() == [8 - 3 + 8, 0 + 1 + 0]  # the step is 8, of the model before the average
    assert sent_messages(fake, REQUEST) == [(0.0, 1, 0, {"params": [8, 0]})]
    assert node.now() == max(1.0, at), "the node waits only for the average"
    assert sent_messages(fake, DONE) == [(node.now(), 1, 0, {})]


def test_each_iteration_has_its_own_exchange() -> None:
    fake = FakeRuntime().deliver(answer([3, -1], 0), at=0.5).deliver(answer([1, 1], 1), at=1.5)
    node = active(fake, rounds=2)
    assert node.params.tolist() == [13 - 1 + 13, 1 - 1 + 1]
    assert [(at, number) for at, _, number, _ in sent_messages(fake, REQUEST)] == [(0.0, 0), (1.0, 1)]


def test_request_is_repeated_after_a_timeout_and_counts_once() -> None:
    fake = FakeRuntime().deliver(answer([3, -1]), answer([3, -1]), at=5.5)
    node = active(fake, patience=2.0)
    assert sent_messages(fake, REQUEST) == [(at, 1, 0, {"params": [8, 0]}) for at in (0.0, 3.0, 5.0)]
    assert node.params.tolist() == [13, 1]
    assert not events(fake)


def test_node_continues_with_its_step_if_no_answer_arrives() -> None:
    fake = FakeRuntime()
    node = active(fake, receive_timeout=2.0, attempts=2)
    assert (node.params.tolist(), node.now()) == ([16, 0], 5.0)
    assert events(fake) == ["timed out"]
    assert len(sent_messages(fake, REQUEST)) == 2
    active(again := FakeRuntime(), rounds=3, receive_timeout=2.0, attempts=2)
    assert len(sent_messages(again, REQUEST)) == 2 + 1 + 1, "a peer that timed out is asked once"


def test_answer_after_the_timeout_still_counts() -> None:
    fake = FakeRuntime().deliver(answer([3, -1], 0), at=3.5).deliver(answer([1, 1], 1), at=3.6)
    node = active(fake, rounds=2, patience=2.0, attempts=1)  # times out at 3.0
    assert node.params.tolist() == [16 - 3 - 1 + 16, 0 + 1 - 1 + 0]


def test_node_continues_if_its_neighbour_fails() -> None:
    fake = FakeRuntime().mark_failed(1, at=4.0)
    node = active(fake, rounds=3)
    assert (node.params.tolist(), node.now()) == ([64, 0], 6.0)
    assert len(sent_messages(fake, REQUEST)) == 1
    assert not events(fake)


@pytest.mark.parametrize(
    "payload",
    [
        Payload({}),
        Payload({"half": F([1])}),
        Payload({"half": F([np.nan, 0])}),
        Payload({"half": np.array([1.0, 2.0])}),
        Payload({"params": F([1, 2])}),
    ],
    ids=["nothing", "too short", "not finite", "of another type", "of another name"],
)
def test_invalid_answer_ends_the_exchange_and_is_counted(payload: Payload) -> None:
    node = active(FakeRuntime(Message(1, ANSWER, 0, Payload(payload.arrays, {"since": 0.0}))))
    assert node.rejected_count == 1
    assert node.params.tolist() == [16, 0]


def test_answers_without_a_request_are_ignored() -> None:
    node = active(FakeRuntime(answer([9, 9], 7), answer([3, -1]), answer([9, 9])))
    assert node.params.tolist() == [13, 1]


def test_answer_to_a_request_from_before_a_restart_is_ignored() -> None:
    early = answer([9, 9], since=0.0)
    fake = FakeRuntime().deliver(early, at=2.25).deliver(answer([3, -1], since=2.0), at=2.5)
    node = fake.node(0, nodes=2, params=F([8, 0]), train=doubled)

    async def body() -> None:
        await node.sleep(2.0)
        await ADPSGD(1).run(node)

    fake.run(body())
    assert node.params.tolist() == [13, 1]


def test_node_continues_if_its_request_is_rejected() -> None:
    fake = FakeRuntime(Message(1, ANSWER, 0, Payload({}, {"refused": True, "since": 0.0})))
    assert active(fake).params.tolist() == [16, 0]
    assert events(fake) == ["exchange rejected"]


class Answering(FakeRuntime):
    """The passive nodes answer requests at once, node 3 only from a round on."""

    def __init__(self, from_round: int) -> None:
        super().__init__()
        self.from_round = from_round

    async def send(self, to: int, message: Message) -> bool:
        if message.kind == REQUEST and (to != 3 or message.round >= self.from_round):
            self.deliver(answer([0, 0], message.round, sender=to), at=self.now())
        return await super().send(to, message)


def test_neighbour_that_does_not_answer_is_asked_ever_less_often_until_it_answers_again() -> None:
    fake = Answering(from_round=300)
    node = fake.node(0, nodes=5, params=F([8, 0]), topology=Edges(((0, 3), (0, 4), (1, 3), (2, 3), (1, 4))))
    fake.run(ADPSGD(600, patience=1.0, attempts=1).run(node))
    asked = [round for _, to, round, _ in sent_messages(fake, REQUEST) if to == 3]
    assert sum(round < 50 for round in asked) > sum(250 <= round < 300 for round in asked)
    assert 5 < sum(round < 300 for round in asked) < 60, "about the root of 600"
    assert 60 < sum(round >= 450 for round in asked) < 90, "half of the rounds"


def test_failed_neighbour_is_not_asked() -> None:
    fake = Answering(from_round=0).mark_failed(3)  # type: ignore[assignment]
    node = fake.node(0, nodes=5, params=F([8, 0]), topology=Edges(((0, 3), (0, 4), (1, 3), (2, 3), (1, 4))))
    fake.run(ADPSGD(30, patience=1.0).run(node))
    asked = [(to, round) for _, to, round, _ in sent_messages(fake, REQUEST) if round]
    assert asked == [(4, round) for round in range(1, 30)], "no round is spent on the failed node"


# The passive side: node 1 of two


def passive(fake: FakeRuntime, rounds: int = 1, params: Any = (2, 2), **options: Any) -> Node:
    timeout = options.pop("receive_timeout", None)
    node = fake.node(1, nodes=2, params=F(params), train=doubled, receive_timeout=timeout)
    fake.run(ADPSGD(rounds, **options).run(node))
    return node


def test_passive_node_answers_at_once_while_it_trains() -> None:
    fake = FakeRuntime().deliver(request([8, 0]), at=0.25).deliver(done(), at=1.5)
    node = passive(fake)
    assert sent_messages(fake, ANSWER) == [(0.25, 0, 0, {"half": [3, -1]})]
    assert node.params.tolist() == [2 + 3 + 2, 2 - 1 + 2]  # the step is 2, of the model before the average
    assert node.now() == 1.5


def test_repeated_request_is_answered_again_and_counts_once() -> None:
    fake = FakeRuntime().deliver(request([8, 0]), at=0.25).deliver(request([8, 0]), at=1.25).deliver(done(), at=2.0)
    node = passive(fake)
    assert sent_messages(fake, ANSWER) == [(at, 0, 0, {"half": [3, -1]}) for at in (0.25, 1.25)]
    assert node.params.tolist() == [7, 3]


def test_overtaken_request_is_not_answered() -> None:
    fake = FakeRuntime().deliver(request([8, 0], 4), request([4, 4], 3), at=0.25).deliver(done(), at=2.0)
    node = passive(fake)
    assert [number for _, _, number, _ in sent_messages(fake, ANSWER)] == [4]
    assert node.params.tolist() == [7, 3]


def test_requests_of_a_restarted_neighbour_are_new_exchanges() -> None:
    before = Message(0, REQUEST, 9, Payload({"params": F([8, 0])}, {"since": 0.0}))
    after = Message(0, REQUEST, 4, Payload({"params": F([9, 5])}, {"since": 0.5}))
    fake = FakeRuntime().deliver(before, at=0.25).deliver(after, at=0.75).deliver(done(), at=2.0)
    node = passive(fake)
    assert [arrays for _, _, _, arrays in sent_messages(fake, ANSWER)] == [{"half": [3, -1]}, {"half": [2, 2]}]
    assert [m.payload.fields for _, m in fake.sent if m.kind == ANSWER] == [{"since": 0.0}, {"since": 0.5}]
    assert node.params.tolist() == [2 + 3 + 2 + 2, 2 - 1 + 2 + 2]


@pytest.mark.parametrize("id", [0, 1])
def test_node_that_rejoins_after_the_last_round_blocks_no_other(id: int) -> None:
    fake = FakeRuntime().deliver(done(), at=3.0)
    node = fake.node(id, nodes=2, params=F([2, 2]))
    node.start_at_round(5, node.params)
    fake.run(ADPSGD(5).run(node))
    assert node.now() == 3.0 * id
    assert len(sent_messages(fake, DONE)) == 1 - id


def test_passive_node_answers_until_its_active_neighbours_finish() -> None:
    fake = FakeRuntime().deliver(request([8, 0]), at=7.0).deliver(done(), at=9.0)
    node = passive(fake)
    assert sent_messages(fake, ANSWER) == [(7.0, 0, 0, {"half": [2, -2]})]
    assert node.now() == 9.0
    with pytest.raises(DeadlockError, match="'done' from any of 0"):
        passive(FakeRuntime())
    assert passive(FakeRuntime().mark_failed(0, at=3.0)).now() == 3.0


def test_slow_neighbour_is_waited_for_and_an_unreachable_one_is_not() -> None:
    replies = [Message(0, PROBE_REPLY, number, Payload({})) for number in range(3)]
    fake = FakeRuntime(*replies).deliver(done(), at=30.0)
    assert passive(fake, receive_timeout=10.0).now() == 30.0
    assert [(at, to) for at, to, _, _ in sent_messages(fake, PROBE)] == [(11.0, 0), (21.0, 0)]
    assert not events(fake)
    unreachable = FakeRuntime()
    assert passive(unreachable, receive_timeout=10.0, attempts=2).now() == 32.0
    assert events(unreachable) == ["timed out", "timed out"]


def test_active_node_answers_probes() -> None:
    fake = FakeRuntime(Message(1, PROBE, 5, Payload({}))).deliver(answer([3, -1]), at=4.0)
    active(fake)
    assert sent_messages(fake, PROBE_REPLY) == [(0.0, 1, 5, {})]


@pytest.mark.parametrize(
    "payload",
    [Payload({}), Payload({"params": F([1])}), Payload({"params": F([np.inf, 0])}), Payload({"params": np.ones(2)})],
    ids=["nothing", "too short", "not finite", "of another type"],
)
def test_invalid_request_is_rejected_and_counted(payload: Payload) -> None:
    fake = FakeRuntime(Message(0, REQUEST, 0, payload), done())
    node = passive(fake)
    assert (node.rejected_count, node.params.tolist()) == (1, [4, 4])
    assert [m.payload.fields for _, m in fake.sent if m.kind == ANSWER] == [{"refused": True}]


def test_only_active_neighbours_may_send_requests() -> None:
    fake = FakeRuntime(request([8, 0], sender=2), done())
    node = fake.node(1, nodes=4, params=F([2, 2]), topology=Edges(((0, 1), (1, 3), (3, 2))))
    assert bipartition(node.mixing.graph).active == {0, 3}
    fake.deliver(done(3))
    fake.run(ADPSGD(1).run(node))
    assert (node.rejected_count, node.params.tolist()) == (1, [2, 2])
    assert not sent_messages(fake, ANSWER)


def test_diverged_model_does_not_spread() -> None:
    fake = FakeRuntime(request([8, 0]), done())
    passive(fake, params=(np.nan, 0))
    assert [m.payload.fields for _, m in fake.sent if m.kind == ANSWER] == [{"refused": True}]


def test_largest_models_do_not_overflow() -> None:
    most = float(np.finfo(F).max)
    fake = FakeRuntime().deliver(request([most, -most]), at=1.5).deliver(done(), at=2.0)
    node = fake.node(1, nodes=2, params=F([-most, most]))
    fake.run(ADPSGD(1).run(node))
    assert node.params.tolist() == [0, 0]


# Random schedules


@st.composite
def graphs(draw: st.DrawFn, most: int = 9) -> tuple[int, tuple[tuple[int, int], ...]]:
    """A connected graph as a list of edges."""
    nodes = draw(st.integers(2, most))
    tree = [(draw(st.integers(0, node - 1)), node) for node in range(1, nodes)]
    pairs = [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    more = draw(st.lists(st.sampled_from(pairs), max_size=2 * nodes))
    return nodes, tuple(sorted({*tree, *more}))


def start(nodes: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(nodes, 5)).astype(F)


def max_deviation(models: Any) -> float:
    return float(np.ptp(models, axis=0).max())


@given(seed=st.integers(0, 2**32), graph=graphs(), timeout=st.sampled_from([None, 0.3]))
@settings(max_examples=20, deadline=None)
def test_mean_is_kept_without_training_and_models_approach_it(seed: int, graph: Any, timeout: float | None) -> None:
    nodes, edges = graph
    models = start(nodes, seed)
    algorithm = ADPSGD(120, patience=timeout, attempts=10)  # repeats requests, but always gets an answer
    unsteady = Unsteady(seed, nodes, algorithm, models=models, topology=Edges(edges), train=lambda _, params: params)
    ends = np.stack([node.params for node in unsteady.run()])
    np.testing.assert_allclose(ends.mean(0), models.mean(0), atol=2e-6)
    assert max_deviation(ends) < 0.5 * max_deviation(models)


@given(seed=st.integers(0, 2**32), graph=graphs())
@settings(max_examples=20, deadline=None)
def test_every_step_counts_once(seed: int, graph: Any) -> None:
    nodes, edges = graph
    steps = []

    def train(node: int, params: Any) -> Any:
        trained = params / 2 + node
        steps.append(trained.astype(np.float64) - params)
        return trained

    models = start(nodes, seed)
    unsteady = Unsteady(seed, nodes, ADPSGD(20), models=models, topology=Edges(edges), train=train)
    ends = np.stack([node.params for node in unsteady.run()])
    assert len(steps) == 20 * nodes
    np.testing.assert_allclose(ends.sum(0), models.sum(0) + np.sum(steps, axis=0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("failures", "lossy", "exchanges"),
    [(False, False, 2_000), (True, False, 2_000), (False, True, 2_000), (True, True, 10_000)],
    ids=["reliable", "failures", "losses", "failures and losses"],
)
def test_no_node_hangs_in_thousands_of_exchanges(failures: bool, lossy: bool, exchanges: int) -> None:
    unsteady = Unsteady(
        7,
        16,
        ADPSGD(rounds := exchanges // 5),  # at least 5 of the 8 active nodes do not fail
        models=start(16, 0),
        train=lambda _, params: params,
        topology=Grid(),
        loss=0.05 if lossy else 0.0,
        receive_timeout=3.0 if lossy else None,
    )
    for node in (2, 5, 11) if failures else ():
        unsteady.fail(node, at=50 + 100 * unsteady.rng.random())
    left = unsteady.run()
    assert len(left) == (13 if failures else 16)
    assert max_deviation(np.stack([node.params for node in left])) < 1e-3
    initiators = [node for node in left if node.id in bipartition(node.mixing.graph).active]
    assert all(node.messages_sent > rounds for node in initiators)
    assert len(initiators) * rounds >= exchanges


# Bipartition


@given(graphs(most=14))
@settings(max_examples=100, deadline=None)
def test_bipartition_keeps_a_graph_connected(graph: Any) -> None:
    nodes, edges = graph
    before = networkx.Graph(edges)
    sides = bipartition(undirected(nodes, edges))
    kept = networkx.Graph([(a, b) for a, peers in sides.neighbours.items() for b in peers])
    assert networkx.is_connected(kept)
    assert all((a in sides.active) != (b in sides.active) for a, b in kept.edges)
    assert all(a in sides.neighbours[b] for a, peers in sides.neighbours.items() for b in peers)
    assert (sides.links, sides.dropped) == (len(before.edges), len(before.edges) - len(kept.edges))
    assert bool(sides.dropped) == (not networkx.is_bipartite(before))
    assert 2 * len(sides.active) >= nodes


def test_larger_side_of_each_component_is_active() -> None:
    assert bipartition(Star().build(5, 0)).active == {1, 2, 3, 4}
    assert bipartition(Ring().build(6, 0)).active == {0, 2, 4}
    assert bipartition(undirected(6, [(0, 1), (2, 3), (3, 4)])).active == {0, 2, 4, 5}
    half = bipartition(Full().build(10, 0))
    assert (len(half.active), half.links - half.dropped) == (5, 25)


def test_links_of_a_graph_that_is_not_bipartite_are_dropped_with_a_warning() -> None:
    with pytest.warns(TopologyWarning, match="topology 'ring' is not bipartite: 1 of its 7 links are dropped"):
        experiment(ADPSGD(), "ring", nodes=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experiment(ADPSGD(), "ring", nodes=8)


def test_graph_that_is_not_bipartite_is_rejected_on_request() -> None:
    with pytest.raises(ExperimentError, match=r"because of 1 of its 7 links.* algorithm.bipartite = 'make'"):
        experiment(ADPSGD(bipartite="require"), "ring", nodes=7)
    experiment(ADPSGD(bipartite="require"), "ring", nodes=8)


@pytest.mark.parametrize(
    "topology",
    ["one-peer-exponential", "gossip-sampler", "peer-sampler", {"name": "regular", "degree": 3, "dynamic": True}],
    ids=str,
)
def test_dynamic_and_directed_graphs_are_rejected(topology: Any) -> None:
    with pytest.raises(ExperimentError, match="averages in pairs and needs an undirected graph that does not change"):
        experiment(ADPSGD(), topology)


@pytest.mark.parametrize(
    "parameters", [{"rounds": 0}, {"patience": 0.0}, {"attempts": 0}, {"bipartite": "maybe"}], ids=str
)
def test_invalid_options_are_rejected_before_the_run_starts(parameters: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError, match=f"algorithm.{next(iter(parameters))} = "):
        experiment({"name": "adpsgd", **parameters})


# Complete runs


def learns(described: Any, folder: Path) -> Any:
    run = described.run(folder)
    assert run.summary["status"] == "completed"
    assert run.summary["rounds"] == 40
    before = Setup(described).evaluate(Setup(described).initial)
    assert run.summary["loss"]["mean"] < 0.5 * before["loss"]
    return run


def test_nodes_learn_in_both_engines(tmp_path: Path) -> None:
    described = experiment(ADPSGD(40), nodes=4, partition={"name": "iid"})
    simulated = learns(described, tmp_path)
    real = learns(dataclasses.replace(described, engine="processes"), tmp_path)
    assert simulated.summary["messages_sent"] == real.summary["messages_sent"] == 2 * 40 * 2 + 2 * 2


def test_run_is_reproducible_and_accurate(tmp_path: Path) -> None:
    graph, network, partition = {"name": "regular", "degree": 3}, {"name": "uniform"}, {"name": "iid"}
    described = experiment(ADPSGD(60), graph, network=network, partition=partition)
    runs = [described.run(tmp_path) for _ in range(2)]
    assert runs[0].summary["digest"] == runs[1].summary["digest"]
    assert runs[0].summary["accuracy"]["mean"] > 0.88
    assert runs[0].summary["events"] == {"links dropped": 1}


def test_single_node_trains_alone(tmp_path: Path) -> None:
    assert experiment(ADPSGD(3), "ring", nodes=1).run(tmp_path).summary["status"] == "completed"


def test_survivors_of_a_crash_learn(tmp_path: Path) -> None:
    survives_a_crash(experiment(ADPSGD(40)), tmp_path)


def test_survivors_of_a_hang_learn(tmp_path: Path) -> None:
    survives_a_hang(experiment(ADPSGD(40, patience=1.0)), tmp_path)


def test_last_evaluation_is_that_of_the_final_model(tmp_path: Path) -> None:
    described = experiment(ADPSGD(5), Tree(), nodes=5, group=({"nodes": "0", "speed": {"step_seconds": 9.0}},))
    run = described.run(tmp_path)
    scores = [Setup(described).evaluate(np.load(run.folder.model(node)))["accuracy"] for node in range(5)]
    assert run.summary["accuracy"]["mean"] == pytest.approx(np.mean(scores), abs=1e-6)
