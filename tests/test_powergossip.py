"""PowerGossip against full matrices in NumPy: preserved mean, consensus and recovery from lost messages."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import models_of
from shoal.errors import ExperimentError, MessageError
from shoal.experiment import Experiment
from shoal.message import Payload
from shoal.randomness import generator
from shoal.sharing.powergossip import STEPS, PowerGossip
from shoal.sharing.sharing import NodeInfo
from shoal.testing import check_sharing
from shoal.types import Params

SHAPES = ((6, 2, 2), (6,), (5, 8), (5,))


class Nodes:
    """Nodes with equal weights on a full graph or on given edges, with optional message loss."""

    def __init__(self, count: int, shapes: tuple[tuple[int, ...], ...] = SHAPES, rank: int = 1, seed: int = 3) -> None:
        self.sharings = [PowerGossip(rank) for _ in range(count)]
        self.size = sum(math.prod(shape) for shape in shapes)
        for id, sharing in enumerate(self.sharings):
            sharing.bind(NodeInfo(id, count, seed, shapes))
            sharing.start(np.zeros(self.size, np.float32))
        self.weight = 1 / count
        self.round = 0

    def exchange(
        self,
        models: list[Params],
        linked: Callable[[int, int], bool] = lambda i, j: True,
        arrives: Callable[[int, int], bool] = lambda sender, receiver: True,
    ) -> list[Params]:
        nodes = range(len(models))
        outgoing = [sharing.outgoing(model, self.round) for sharing, model in zip(self.sharings, models, strict=True)]
        payloads = {(i, j): outgoing[i](j) for i in nodes for j in nodes if i != j and linked(i, j)}
        self.round += 1
        merged = []
        for i in nodes:
            received = {j: payloads[j, i] for j in nodes if (j, i) in payloads and arrives(j, i)}
            for payload in received.values():
                self.sharings[i].check(payload, models[i])
            merged.append(self.sharings[i].merge(models[i], received, dict.fromkeys(received, self.weight)))
        return merged

    def start_edge(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Let nodes 0 and 1 begin their edge, and change its state at both ends."""
        for i in range(2):
            sharing = self.sharings[i]
            sharing.outgoing(np.zeros(self.size, np.float32), 0)(1 - i)
            state = sharing.state()
            state["edges"][str(1 - i)] |= change(state["edges"][str(1 - i)])
            sharing.restore(state)

    def edge(self, i: int, j: int) -> dict[str, Any]:
        found: dict[str, Any] = self.sharings[i].state()["edges"][str(j)]
        return found


def drawn(count: int, size: int, seed: int = 0) -> list[Params]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(count)]


# The oracle


def follow(models: list[Params], rounds: int, rank: int, seed: int, steps: list[list[Params]]) -> list[Any]:
    """All models after some rounds on a full graph with equal weights, matrix by matrix, in double precision."""
    count = len(models)
    layout = [(0, 6, 4), (30, 5, 8)]  # the matrices of SHAPES; the others are vectors
    plain = np.r_[24:30, 70:75]
    now = [m.astype(np.float64) for m in models]
    bases: dict[tuple[int, int, int], Any] = {}
    for r in range(rounds):
        now = [m + step for m, step in zip(now, steps[r], strict=True)]
        changed = [m.copy() for m in now]
        for i in range(count):
            for j in range(i + 1, count):
                for at, (start, rows, columns) in enumerate(layout):
                    where = slice(start, start + rows * columns)
                    d = (now[j][where] - now[i][where]).reshape(rows, columns)
                    if r == 0:
                        first = generator(seed, "powergossip", i, j, 0, at).standard_normal((rank, columns), np.float32)
                        bases[i, j, at] = np.linalg.qr(first.T.astype(np.float64))[0]
                    v = bases[i, j, at]
                    if r % 2 == 0:
                        p, seen = d @ v, d @ v @ v.T
                    else:
                        p, seen = d.T @ v, v @ v.T @ d
                    bases[i, j, at] = np.linalg.qr(p)[0]
                    changed[i][where] += seen.reshape(-1) / count
                    changed[j][where] -= seen.reshape(-1) / count
                changed[i][plain] += (now[j] - now[i])[plain] / count
                changed[j][plain] += (now[i] - now[j])[plain] / count
        now = changed
    return now


@pytest.mark.parametrize("rank", [1, 2])
def test_models_follow_the_full_matrices(rank: int) -> None:
    nodes = Nodes(3, rank=rank)
    models = drawn(3, nodes.size)
    steps = [drawn(3, nodes.size, seed=10 + r) for r in range(5)]
    expected = follow(models, 5, rank, 3, steps)
    for trained in steps:
        models = nodes.exchange([m + s for m, s in zip(models, trained, strict=True)])
    assert np.abs(models[0] - models[1]).max() > 0.1
    np.testing.assert_allclose(models, expected, atol=2e-4)


# Invariants


tensors = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4).map(tuple)


@settings(max_examples=40, deadline=None)
@given(tensors, st.integers(1, 3), st.integers(0, 2**32))
def test_the_mean_is_preserved_and_both_ends_of_an_edge_are_bit_identical(
    shapes: tuple[tuple[int, ...], ...], rank: int, seed: int
) -> None:
    nodes = Nodes(3, shapes, rank, seed)
    models = drawn(3, nodes.size, seed)
    for _ in range(4):
        before = np.mean(models, axis=0, dtype=np.float64)
        models = nodes.exchange(models)
        np.testing.assert_allclose(np.mean(models, axis=0, dtype=np.float64), before, atol=1e-5)
        for i, j in ((0, 1), (0, 2), (1, 2)):
            one, other = nodes.edge(i, j), nodes.edge(j, i)
            assert one["step"] == other["step"] == nodes.round
            assert one["basis"].tobytes() == other["basis"].tobytes()
            assert np.isfinite(one["basis"]).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.integers(0, 2**32))
def test_the_basis_of_an_edge_is_orthonormal(rows: int, columns: int, rank: int, seed: int) -> None:
    nodes = Nodes(2, ((rows, columns),), rank, seed)
    models = drawn(2, nodes.size, seed)
    for side in (rows, columns, rows):
        models = nodes.exchange(models)
        kept = min(rank, rows, columns)
        basis = nodes.edge(0, 1)["basis"].reshape(kept, side)
        np.testing.assert_allclose(basis @ basis.T, np.eye(kept), atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "shapes",
    [((5, 4), (3,)), ((1, 7), (7, 1), (), (0, 3), (2, 3, 2)), ((), ()), ((4, 4),), ((0, 2), (3,))],
    ids=["usual", "odd", "scalars", "matrix", "empty"],
)
def test_it_conforms_for_tensors_of_any_shape(shapes: tuple[tuple[int, ...], ...], rank: int) -> None:
    check_sharing(lambda: PowerGossip(rank), seed=4, shapes=shapes)


# Consensus


@pytest.mark.parametrize("rank", [1, 2])
def test_two_nodes_remove_a_difference_of_equal_rank_in_two_steps(rank: int) -> None:
    nodes = Nodes(2, ((8, 9),), rank)
    base, other = drawn(2, 72)
    rng = np.random.default_rng(1)
    between = (rng.standard_normal((8, rank)) @ rng.standard_normal((rank, 9))).astype(np.float32).reshape(-1)
    models = [base, base + between]
    nodes.exchange([other, other])  # the first V saw equal models
    for _ in range(2):
        models = nodes.exchange(models)
    np.testing.assert_allclose(models[0], models[1], atol=1e-4)
    np.testing.assert_allclose(models[0], base + between / 2, atol=1e-4)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("rank", [1, 3])
def test_nodes_that_do_not_train_reach_consensus_and_keep_it(count: int, rank: int) -> None:
    nodes = Nodes(count, rank=rank)
    models = drawn(count, nodes.size)
    mean = np.mean(models, axis=0)
    apart = [float(np.linalg.norm(np.stack(models) - mean))]
    for _ in range(150):
        models = nodes.exchange(models)
        apart.append(float(np.linalg.norm(np.stack(models) - mean)))
    assert all(after <= before * (1 + 1e-5) + 1e-4 for before, after in itertools.pairwise(apart))
    np.testing.assert_allclose(models, np.tile(mean, (count, 1)), atol=1e-3)


def test_a_difference_orthogonal_to_v_is_found_later() -> None:
    nodes = Nodes(2, ((4, 4),))
    zero = np.zeros(16, np.float32)
    for _ in range(3):
        nodes.exchange([zero, zero])  # equal models leave no direction: V is drawn again
    bases = [nodes.edge(0, 1)["basis"]]
    nodes.exchange([zero, zero])
    assert not np.allclose(bases[0], nodes.edge(0, 1)["basis"])
    models = [zero, np.eye(4, dtype=np.float32).reshape(-1)]
    for _ in range(20):
        models = nodes.exchange(models)
    np.testing.assert_allclose(models[0], models[1], atol=1e-4)


# Unused links and lost messages


def test_an_unused_edge_continues_at_its_last_step() -> None:
    nodes = Nodes(3)
    models = drawn(3, nodes.size)
    mean = np.mean(models, axis=0)
    for r in range(120):
        models = nodes.exchange(models, linked=lambda i, j, r=r: {i, j} != {r % 3, (r + 1) % 3})
        np.testing.assert_allclose(np.mean(models, axis=0), mean, atol=1e-4)
    np.testing.assert_allclose(models, np.tile(mean, (3, 1)), atol=1e-2)
    assert nodes.edge(0, 1)["step"] == nodes.edge(1, 0)["step"] == 80


@pytest.mark.parametrize(("rest", "step"), [(8, 4), (9, 1)])
def test_both_ends_forget_an_edge_that_is_unused_for_too_long(rest: int, step: int) -> None:
    nodes = Nodes(2)
    models = drawn(2, nodes.size)
    for r in range(3 + rest):
        models = nodes.exchange(models, linked=lambda i, j, r=r: r < 3 or r == 2 + rest)
    assert nodes.edge(0, 1)["step"] == nodes.edge(1, 0)["step"] == step
    assert nodes.edge(0, 1)["basis"].tobytes() == nodes.edge(1, 0)["basis"].tobytes()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_both_ends_restart_together_after_lost_messages(arrived: list[tuple[bool, bool]]) -> None:
    nodes = Nodes(2)
    models = drawn(2, nodes.size)
    for there, back in arrived:
        models = nodes.exchange(models, arrives=lambda sender, _, t=there, b=back: t if sender == 0 else b)
    out_of_step = nodes.edge(0, 1)["step"] != nodes.edge(1, 0)["step"]
    before = models
    models = nodes.exchange(models)
    assert nodes.edge(0, 1)["step"] == nodes.edge(1, 0)["step"]
    assert nodes.edge(0, 1)["basis"].tobytes() == nodes.edge(1, 0)["basis"].tobytes()
    if out_of_step:
        assert np.array_equal(models, before)  # the round is skipped, so that no end is updated alone
    for _ in range(2):
        np.testing.assert_allclose(np.mean(models, axis=0), np.mean(before, axis=0), atol=1e-5)
        models = nodes.exchange(models)


def test_losses_on_alternating_sides_leave_no_end_with_another_basis() -> None:
    """After them both ends could be in the same step, one with a random V and one with a computed V."""
    nodes = Nodes(2)
    models = drawn(2, nodes.size)
    for sender in (0, 1):
        models = nodes.exchange(models, arrives=lambda i, _, sender=sender: i != sender)
    mean = np.mean(models, axis=0)
    for _ in range(4):
        models = nodes.exchange(models)
        np.testing.assert_allclose(np.mean(models, axis=0), mean, atol=1e-5)


def test_payloads_of_a_peer_that_received_none_are_ignored() -> None:
    nodes = Nodes(2)
    models = drawn(2, nodes.size)
    payload = nodes.sharings[1].outgoing(models[1], 0)(0)
    nodes.sharings[0].outgoing(models[0], 0)
    assert np.array_equal(nodes.sharings[0].merge(models[0], {1: payload}, {1: 0.5}), models[0])


# Invalid payloads


@pytest.mark.parametrize(
    ("arrays", "fields", "expected_error"),
    [
        ({}, {"step": 0}, "expected one float32 vector 'values' of 22 numbers in step 0"),
        ({"values": np.zeros(23, np.float32)}, {"step": 0}, "of 22 numbers"),
        ({"values": np.zeros(22, np.float64)}, {"step": 0}, "float32"),
        ({"values": np.zeros((22, 1), np.float32)}, {"step": 0}, "of 22 numbers"),
        ({"values": np.zeros(22, np.float32)}, {"step": 1}, "of 23 numbers in step 1"),
        ({"values": np.full(22, np.nan, np.float32)}, {"step": 0}, "not finite"),
        ({"values": np.full(22, np.inf, np.float32)}, {"step": 0}, "not finite"),
        ({"values": np.zeros(22, np.float32)}, {}, "step is None"),
        ({"values": np.zeros(22, np.float32)}, {"step": -2}, "step is -2"),
        ({"values": np.zeros(22, np.float32)}, {"step": 2**63}, "expected an integer"),
        ({"values": np.zeros(22, np.float32)}, {"step": False}, "step is False"),
        ({"values": np.zeros(22, np.float32)}, {"step": 0.0}, "step is 0.0"),
        ({"values": np.zeros(22, np.float32)}, {"step": "0"}, "step is '0'"),
    ],
)
def test_invalid_payloads_are_rejected(arrays: dict[str, Any], fields: dict[str, Any], expected_error: str) -> None:
    nodes = Nodes(2)
    with pytest.raises(MessageError, match=expected_error):
        nodes.sharings[0].check(Payload(arrays, fields), np.zeros(nodes.size, np.float32))


def test_a_message_counts_only_if_this_node_has_sent_in_the_same_round() -> None:
    nodes = Nodes(2)
    models = drawn(2, nodes.size)
    models = nodes.exchange(models)
    nodes.exchange(models, arrives=lambda sender, receiver: False)  # both ends have sent, and stay in the same step
    merged = nodes.exchange(models, linked=lambda sender, receiver: sender == 1)
    assert np.array_equal(merged, models), "node 1 received nothing, so node 0 takes no step either"


@pytest.mark.parametrize("step", [0, 1, 5, 6, STEPS // 2, STEPS - 2, STEPS - 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_message_with_a_false_step_only_resets_the_edge(step: int, victim: int) -> None:
    nodes = Nodes(2)
    models = drawn(2, nodes.size)
    for _ in range(3):
        models = nodes.exchange(models)
    payloads = [nodes.sharings[i].outgoing(models[i], 3)(1 - i) for i in range(2)]
    payloads[1 - victim] = Payload({"values": np.ones(22 + step % 2, np.float32)}, {"step": step})
    nodes.sharings[victim].check(payloads[1 - victim], models[victim])
    merged = [nodes.sharings[i].merge(models[i], {1 - i: payloads[1 - i]}, {1 - i: 0.5}) for i in range(2)]
    assert np.array_equal(merged[victim], models[victim])
    models = merged
    for _ in range(2):
        models = nodes.exchange(models)  # rejects nothing
    mean = np.mean(models, axis=0)
    for _ in range(60):
        models = nodes.exchange(models)
        assert nodes.edge(0, 1)["step"] == nodes.edge(1, 0)["step"]
        assert nodes.edge(0, 1)["basis"].tobytes() == nodes.edge(1, 0)["basis"].tobytes()
    np.testing.assert_allclose(models, [mean, mean], atol=1e-3)


def test_step_numbers_wrap_around() -> None:
    nodes = Nodes(2)
    models = drawn(2, nodes.size)
    nodes.start_edge(lambda edge: {"step": STEPS - 2})
    for step in (STEPS - 1, 0, 1):
        models = nodes.exchange(models)
        assert nodes.edge(0, 1)["step"] == nodes.edge(1, 0)["step"] == step
    assert np.isfinite(models).all()


@pytest.mark.parametrize("rank", [1, 2])
def test_models_with_an_overflowing_difference_stay_unchanged(rank: int) -> None:
    nodes = Nodes(2, rank=rank)
    huge = np.full(nodes.size, 3e38, np.float32)
    models = [huge, -huge]
    with np.errstate(all="ignore"):
        nodes.start_edge(lambda edge: {"basis": np.abs(edge["basis"]) * np.float32(0.1)})  # keeps sent values finite
        merged = nodes.exchange(models)
    assert np.array_equal(merged, models)
    assert nodes.edge(0, 1)["step"] == nodes.edge(1, 0)["step"] == 0
    assert np.isfinite(nodes.exchange(drawn(2, nodes.size))).all()


def test_a_state_is_a_copy() -> None:
    nodes, twins = Nodes(2), Nodes(2)
    models = drawn(2, nodes.size)
    after = nodes.exchange(models)
    assert np.array_equal(twins.exchange(models), after)
    state = nodes.sharings[0].state()
    restored = PowerGossip()
    restored.bind(NodeInfo(0, 2, 3, SHAPES))
    restored.restore(state)
    nodes.edge(0, 1)["basis"][:] = np.nan
    state["edges"]["1"]["basis"][:] = np.nan
    assert np.array_equal(nodes.exchange(after), twins.exchange(after))
    assert np.isfinite(restored.state()["edges"]["1"]["basis"]).all()


# Complete runs


def experiment(**changed: Any) -> Experiment:
    described: dict[str, Any] = {
        "nodes": 4,
        "seed": 5,
        "algorithm": {"name": "dpsgd", "rounds": 4},
        "sharing": {"name": "powergossip"},
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "evaluation": {"every": 0},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**described, **changed})


@pytest.mark.parametrize("topology", [{"name": "ring"}, {"name": "regular", "degree": 2, "dynamic": True}])
def test_both_engines_are_bit_identical_and_send_little(topology: dict[str, Any], tmp_path: Path) -> None:
    described = experiment(topology=topology)
    full = experiment(topology=topology, sharing={"name": "full"})
    runs = [e.run(tmp_path) for e in (described, dataclasses.replace(described, engine="processes"), full)]
    assert np.array_equal(models_of(runs[0]), models_of(runs[1]))
    sent = [run.summary["bytes_sent"]["total"] for run in runs]
    assert sent[0] == sent[1] < 0.15 * sent[2]


def test_the_others_continue_when_a_node_fails(tmp_path: Path) -> None:
    run = experiment(fault=[{"kind": "crash", "node": 1, "round": 2}]).run(tmp_path)
    assert run.summary["status"] == "incomplete"
    assert run.summary["rounds"] == 4


@pytest.mark.parametrize(
    "topology",
    [
        {"name": "one-peer-exponential"},
        {"name": "random-out", "peers": 2},
        {"name": "peer-sampler", "graph": {"name": "random-out", "peers": 2}},
    ],
)
def test_directed_links_are_rejected(topology: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError, match=f"topology = '{topology['name']}' has one-way links"):
        experiment(topology=topology, nodes=6)
