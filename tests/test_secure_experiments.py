"""Secure aggregation in complete runs: with a server, on both engines, and incompatible experiments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from conftest import models_of
from secure_world import SecureWorld, recording_sharings
from shoal.algorithms.fedavg import FedAvg
from shoal.errors import ExperimentError, NodeError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.results.records import Event
from shoal.sharing.full import FullSharing
from shoal.sharing.secure.secure import Secure
from shoal.sharing.secure.sender_groups import SenderGroups
from shoal.sharing.sharing import SenderGroup
from shoal.testing import FakeRuntime, Faults

# A server


def call(round: int = 0, last: bool = False, **arrays: Any) -> Message:
    given: dict[str, Any] = {
        "params": np.ones(4, np.float32),
        "company": np.array([0, 1, 2], np.uint32),
        "weight": 0.5,
    }
    made = {k: v for k, v in {**given, **arrays}.items() if v is not None}
    fields = {k: v for k, v in made.items() if not isinstance(v, np.ndarray)}
    sent = {k: v for k, v in made.items() if isinstance(v, np.ndarray)}
    return Message(3, "global", round, Payload(sent, {**fields, "last": True} if last else fields))


WEIGHT = "expected a field 'weight', the weight of this node, above 0 and at most 1"
EXPECTED_IDS = "expected this node in 'company', and only clients"


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"company": None}, "expected an array 'company' of distinct node ids"),
        ({"company": np.array([0, 1, 2], np.int64)}, "expected an array 'company' of distinct node ids"),
        ({"company": np.array([0, 1, 1], np.uint32)}, "expected an array 'company' of distinct node ids"),
        ({"company": np.array([[0, 1, 2]], np.uint32)}, "expected an array 'company' of distinct node ids"),
        *(({"weight": wrong}, WEIGHT) for wrong in (None, 1, "much", 0.0, -0.5, 1.5, math.nan)),
        ({"company": np.array([1, 2, 4], np.uint32)}, EXPECTED_IDS),
        ({"company": np.array([0, 1, 3], np.uint32)}, EXPECTED_IDS),
        ({"company": np.empty(0, np.uint32)}, EXPECTED_IDS),
    ],
)  # fmt: skip
def test_a_call_without_its_sender_group_is_rejected(arrays: Any, why: str) -> None:
    fake = FakeRuntime(call(0, **arrays), call(1, last=True, company=None, weight=None))
    node = fake.node(0, nodes=3, params=np.zeros(4), sharing=Secure(), services={"algorithm": 3})
    fake.run(FedAvg(2).run(node))
    ((what, detail),) = [(r.what, r.detail) for r in fake.records if isinstance(r, Event)]
    assert what == "payload rejected"
    assert detail.startswith(f"from node 3: {why}")
    assert not any(message.kind == "model" for _, message in fake.sent)
    assert (node.params == 1).all()


def test_a_sender_group_comes_from_the_server_or_the_graph() -> None:
    node = FakeRuntime().node(0, nodes=3, params=np.zeros(4), sharing=Secure(), services={"algorithm": 3})
    groups = SenderGroups()
    with pytest.raises(NodeError, match="node 0 does not know the senders of node 3 in round 0: node 3 is not"):
        groups.of(node, 3, 0)
    groups.announce(3, 0, SenderGroup([0, 1], {0: 0.25}))
    assert groups.of(node, 3, 0) == SenderGroup([0, 1], {0: 0.25})
    with pytest.raises(NodeError, match="in round 1"):
        groups.of(node, 3, 1)
    from_graph = groups.of(node, 1, 0)
    assert from_graph.senders == {0, 2}
    assert from_graph.weights == {0: 1 / 3, 2: 1 / 3}


def test_clients_receive_their_own_weight_and_the_ids_of_the_others() -> None:
    with mock.patch.object(Node, "samples", property(lambda node: node.id + 1)):
        world = SecureWorld(FedAvg(1), recording_sharings(5)).run()
    received = {to: m.payload for to, m in world.sent if m.kind == "global" and "last" not in m.payload.fields}
    assert [received[client].fields for client in range(4)] == [{"weight": n / 10} for n in (1, 2, 3, 4)]
    for payload in received.values():
        assert sorted(payload.arrays) == ["company", "params"]
        assert payload.arrays["company"].tolist() == [0, 1, 2, 3]
    assert world.check_sums() == 1


def test_a_repeated_or_late_call_is_rejected_without_training() -> None:
    fake = FakeRuntime(call(1))
    fake.deliver(call(1), at=1.0)
    fake.deliver(call(0), at=2.0)
    for late in (call(3), call(2), call(3, last=True, company=None, weight=None)):
        fake.deliver(late, at=3.0)
    node = fake.node(0, nodes=3, params=np.zeros(4), sharing=FullSharing(), services={"algorithm": 3})
    fake.run(FedAvg(4).run(node))
    rejected = [r.detail for r in fake.records if isinstance(r, Event) and r.what == "payload rejected"]
    assert rejected == [
        "from node 3: the model of round 1: this node is already in round 1",
        "from node 3: the model of round 0: this node is already in round 1",
        "from node 3: the model of round 2: this node is already in round 3",
    ]
    assert [message.round for _, message in fake.sent if message.kind == "model"] == [1]


# Experiments


def experiment(**changed: Any) -> Experiment:
    given: dict[str, Any] = {
        "nodes": 6,
        "seed": 4,
        "algorithm": {"name": "dpsgd", "rounds": 3},
        "sharing": {"name": "secure"},
        "topology": {"name": "regular", "degree": 4},
        "partition": {"name": "dirichlet", "alpha": 1.0},
        "model": {"name": "logistic"},
        "training": {"lr": 0.1, "batch_size": 16},
        "evaluation": {"every": 0},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**given, **changed})


def events_of(run: Any, node: int) -> list[tuple[str, str]]:
    return [(r.what, r.detail) for r in run.folder.read(node) if isinstance(r, Event)]


TOPK = {"name": "secure", "inner": {"name": "topk", "fraction": 0.2}}


@pytest.mark.parametrize(
    "changed",
    [
        {"topology": {"name": "regular", "degree": 3, "dynamic": True}, "sharing": TOPK},
        {"algorithm": {"name": "el-local", "rounds": 3, "peers": 2}},
        {"algorithm": {"name": "fedavg", "rounds": 3, "fraction": 0.5}},
    ],
    ids=["topk on a dynamic graph", "el-local", "fedavg"],
)
def test_both_engines_give_the_same_models_and_bytes(changed: Any, tmp_path: Path) -> None:
    runs = [experiment(engine=engine, **changed).run(tmp_path) for engine in ("simulation", "processes")]
    for run in runs:
        assert run.status == "completed"
        assert run.summary["messages_rejected"] == 0
    assert runs[0].summary["digest"] == runs[1].summary["digest"]
    assert runs[0].summary["bytes_sent"] == runs[1].summary["bytes_sent"]


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "dpsgd"}, {"name": "el-oracle", "degree": 3}, {"name": "qg-dsgdm"}, {"name": "fedavg", "fraction": 0.7}],
    ids=lambda algorithm: algorithm["name"],
)
def test_models_equal_those_of_full_sharing(algorithm: Any, tmp_path: Path) -> None:
    some = {"algorithm": {**algorithm, "rounds": 3}}
    runs = [experiment(sharing={"name": name}, **some).run(tmp_path) for name in ("full", "secure")]
    nodes = range(experiment(**some).size)
    plain, hidden = (models_of(run, nodes) for run in runs)
    assert np.abs(plain).max() > 0.1
    np.testing.assert_allclose(hidden, plain, atol=64 * 2.0**-18)


def test_a_process_that_is_killed_in_the_last_round_does_not_stop_the_others(tmp_path: Path) -> None:
    faults = Faults().crash(2, round=2)
    runs = [
        experiment(engine=engine, fault=faults.schedule, topology={"name": "full"}).run(tmp_path)
        for engine in ("simulation", "processes")
    ]
    for run in runs:
        assert list(run.summary["lost"]) == ["2"]
        for node in (0, 1, 3, 4, 5):
            assert not any(what == "sum not unmasked" for what, _ in events_of(run, node))
    # The node fails before it sends in that round, so both engines have the same sums.
    survivors = (0, 1, 3, 4, 5)
    assert np.array_equal(models_of(runs[0], survivors), models_of(runs[1], survivors))


@pytest.mark.parametrize("time", [0.5, 1.01, 1.06, 1.1, 1.14, 1.2, 1.25, 3.3])
def test_sums_are_unmasked_although_a_node_fails_between_its_messages(time: float, tmp_path: Path) -> None:
    run = experiment(
        topology={"name": "full"},
        network={"name": "uniform", "latency": 0.02, "upload": 0.5},
        speed={"step_seconds": 1.0},
        fault=Faults().crash(2).at(time).schedule,
        evaluation={"every": 0, "average": False, "samples": 10},
    ).run(tmp_path)
    assert list(run.summary["lost"]) == ["2"]
    assert np.isfinite(models_of(run, (0, 1, 3, 4, 5))).all()
    for node in (0, 1, 3, 4, 5):
        assert not any(what == "sum not unmasked" for what, _ in events_of(run, node))


def test_a_model_outside_the_range_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"expected within ±0\.0001: it would corrupt the sum; set a larger sharing"):
        experiment(sharing={"name": "secure", "range": 0.0001}).run(tmp_path)


RESTARTS = (
    "sharing = 'secure': a node that rejoins receives an unmasked model from the peer that is furthest ahead; remove "
    "all restarts and joins (faults of kind 'restart' or 'join', and 'until' and 'lasting' of a crash), or use another "
    "sharing"
)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"sharing": {"name": "secure", "inner": {"name": "choco"}}},
         "sharing.inner = 'choco': masks cancel only in a sum of models, coordinate by coordinate, and this "
         "sharing sends something else; use 'full', 'random' or 'topk'"),
        ({"sharing": {"name": "secure", "inner": {"name": "secure"}}},
         "sharing.inner = 'secure': masks cancel only in a sum of models, coordinate by coordinate, and this "
         "sharing sends something else; use 'full', 'random' or 'topk'"),
        ({"sharing": {"name": "secure", "inner": {"name": "topk", "values": {"name": "int8"}}}},
         "sharing.inner.values: sharing = 'secure' encodes values itself, as integers that can be added; "
         "remove this option"),
        ({"sharing": {"name": "secure", "inner": {"name": "random", "common": False}}},
         "sharing.inner.common = false: all senders of a receiver must send the same coordinates; remove this "
         "option"),
        ({"sharing": {"name": "secure", "partners": 5}},
         "sharing: partners = 5: expected an even number: senders are ordered on a circle, and half of the partners "
         "are on each side"),
        ({"sharing": {"name": "secure", "range": 1e-300}},
         "sharing.range = 1e-300: expected number at least 5.42101e-20 and at most 1.84467e+19"),
        ({"sharing": {"name": "secure", "range": math.inf}},
         "sharing.range = inf: expected number at least 5.42101e-20 and at most 1.84467e+19"),
        ({"algorithm": {"name": "gossip"}},
         "sharing = 'secure': it gives the weighted sum of all neighbours' models of a round, and algorithm = "
         "'gossip' needs more; use 'dpsgd', 'el-oracle', 'el-local', 'qg-dsgdm' or 'fedavg'"),
        ({"topology": {"name": "peer-sampler"}},
         "topology = 'peer-sampler': nodes find their peers with a protocol, so no node knows the other senders of "
         "its peers, which sharing = 'secure' must mask with; use a graph that all nodes compute from the seed"),
        ({"topology": {"name": "ring"}, "nodes": 2},
         "topology = 'ring': 2 nodes (0, 1) have fewer than two senders, so a model would be visible; sharing = "
         "'secure' needs at least two, or single_sender = 'unmasked'"),
        ({"topology": {"name": "star"}, "nodes": 8},
         "topology = 'star': 7 nodes (1, 2, 3, 4, 5 …) have fewer than two senders, so a model would be visible; "
         "sharing = 'secure' needs at least two, or single_sender = 'unmasked'"),
        ({"topology": {"name": "regular", "degree": 1, "dynamic": True}, "nodes": 4},
         "topology = 'regular': 4 nodes (0, 1, 2, 3) have fewer than two senders, so a model would be visible; "
         "sharing = 'secure' needs at least two, or single_sender = 'unmasked'"),
        ({"algorithm": {"name": "el-oracle", "rounds": 2, "degree": 1}},
         "algorithm.degree = 1: a node receives one model in a round, and that model would be visible; sharing = "
         "'secure' needs at least two, or single_sender = 'unmasked'"),
        ({"algorithm": {"name": "fedavg", "fraction": 0.1}},
         "algorithm.fraction = 0.1 selects one client, and its model would be visible to the server; sharing = "
         "'secure' needs at least two, or single_sender = 'unmasked'"),
        ({"algorithm": {"name": "fedavg"}, "sharing": TOPK},
         "sharing.inner = 'topk': each node requests coordinates from its senders, and a server does not; use "
         "'full' or 'random'"),
        ({"fault": Faults().crash(1).at(3.0).until(5.0).schedule}, RESTARTS),
        ({"fault": Faults().crash(1).at(3.0).lasting(5.0).schedule}, RESTARTS),
        ({"fault": Faults().crash(1).at(3.0).restart(1).at(5.0).schedule}, RESTARTS),
        ({"fault": Faults().crash().every(9.0).lasting(5.0).schedule}, RESTARTS),
    ],
)  # fmt: skip
def test_incompatible_experiments_are_rejected_with_advice(changed: Any, problem: str) -> None:
    with pytest.raises(ExperimentError) as rejected:
        experiment(**changed)
    assert problem in rejected.value.problems


@pytest.mark.parametrize("topology", ["star", "peer-sampler"])
@pytest.mark.parametrize("algorithm", ["adpsgd", "parameter-server"])
def test_the_topology_is_not_blamed_for_an_algorithm_with_its_own_payloads(algorithm: str, topology: str) -> None:
    with pytest.raises(ExperimentError) as rejected:
        experiment(algorithm={"name": algorithm}, topology={"name": topology}, nodes=8)
    assert not [problem for problem in rejected.value.problems if "sharing = 'secure' " in problem]


@pytest.mark.parametrize(
    "changed",
    [
        {"fault": Faults().crash(1).at(3.0).schedule},
        {"fault": Faults().crash(1, round=2).schedule},
        {"topology": {"name": "star"}, "sharing": {"name": "secure", "single_sender": "unmasked"}},
        {"algorithm": {"name": "fedavg", "fraction": 0.1}, "sharing": {"name": "secure", "single_sender": "unmasked"}},
        {"algorithm": {"name": "fedavg"}, "sharing": {"name": "secure", "inner": {"name": "random"}}},
        {"topology": {"name": "regular", "degree": 2, "dynamic": True}},
        {
            "topology": {"name": "regular", "degree": 1, "dynamic": True},
            "sharing": {"name": "secure", "single_sender": "unmasked"},
        },
        {
            "algorithm": {"name": "el-oracle", "rounds": 2, "degree": 1},
            "sharing": {"name": "secure", "single_sender": "unmasked"},
        },
        {"algorithm": {"name": "el-local", "rounds": 2, "peers": 1}},
    ],
)
def test_compatible_experiments_are_accepted(changed: Any) -> None:
    experiment(**changed)


@pytest.mark.parametrize(("former", "current"), [("refuse", "reject"), ("plain", "unmasked")])
def test_the_former_name_of_an_option_is_accepted_with_a_warning(former: str, current: str) -> None:
    with pytest.warns(FutureWarning, match=f"sharing.few = '{former}': .* write single_sender = '{current}'"):
        described = experiment(sharing={"name": "secure", "few": former})
    assert described == experiment(sharing={"name": "secure", "single_sender": current})
    with pytest.warns(FutureWarning, match=r"group\[0\].sharing.few"):
        in_group = experiment(group=[{"nodes": "0-5", "sharing": {"few": former}}])
    assert in_group.settings(0).sharing == described.sharing


@pytest.mark.parametrize("other", [{"name": "full"}, {"name": "secure", "range": 8.0}], ids=["full", "another range"])
def test_all_nodes_must_use_the_same_sharing(other: Any) -> None:
    with pytest.raises(ExperimentError) as rejected:
        Setup(experiment(group=[{"nodes": "0-2", "sharing": other}]))
    assert any(
        problem.endswith(
            "cannot read the payloads of { name = 'secure', inner = 'full', bits = 32, range = 64.0, threshold = 0.75, "
            "partners = 8, single_sender = 'reject' }, which other nodes use: masks cancel only if all nodes use "
            "secure aggregation with the same options; let all nodes use one sharing"
        )
        for problem in rejected.value.problems
    )
