"""Compressed sharings: each follows its paper, written here with matrices, and rejects invalid payloads."""

from __future__ import annotations

import dataclasses
import functools
import math
import tracemalloc
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.algorithms.dpsgd import DPSGD
from shoal.compression import COMPRESSORS, VALUES
from shoal.compression.compressors import (
    Compressor,
    Part,
    QuantizedCompressor,
    RandomCompressor,
    SparseCode,
    TopKCompressor,
    kept_count,
    random_positions,
)
from shoal.compression.floats import BFloat16, Float16, Float32
from shoal.compression.indices import Bitmap, EliasGamma, GolombRice, Raw
from shoal.compression.libraries import Zstd
from shoal.compression.quantizers import QSGD, Int8
from shoal.errors import ExperimentError, MessageError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload, decode
from shoal.node import Node
from shoal.randomness import derived_seed, generator
from shoal.sharing import quantized
from shoal.sharing.choco import CHOCO
from shoal.sharing.deepsqueeze import DeepSqueeze
from shoal.sharing.full import FullSharing
from shoal.sharing.jwins import JWINS
from shoal.sharing.powergossip import PowerGossip
from shoal.sharing.random import Random
from shoal.sharing.sharing import NodeInfo
from shoal.sharing.topk import TopK
from shoal.state import Stateful
from shoal.testing import Faults, check_sharing
from shoal.training.torch_trainer import TorchTrainer
from shoal.traits import Traits
from shoal.types import Params

GN_LENET = 89_834
SEED = 5
few = settings(max_examples=10, deadline=None)


# The papers, with all models as the rows of one matrix

Matrix = NDArray[np.float64]
Mix = Callable[[Matrix, Matrix, int], Matrix]
"""Maps the models before a round, the weights and the round to the models after the round."""


def top(x: Matrix, fraction: float) -> Matrix:
    """Rows with all but their largest magnitudes set to zero, keeping the first of equal magnitudes."""
    kept = np.zeros_like(x)
    for row, values in enumerate(x):
        order = np.argsort(-np.abs(values), kind="stable")[: int(fraction * values.size)]
        kept[row, order] = values[order]
    return kept


def full(x: Matrix, w: Matrix, r: int) -> Matrix:
    return w @ x


def random(fraction: float, seed: int) -> Mix:
    def mix(x: Matrix, w: Matrix, r: int) -> Matrix:
        chosen = random_positions(derived_seed(seed, "random sharing", r), x.shape[1], int(fraction * x.shape[1]))
        mixed = x.copy()
        mixed[:, chosen] = (w @ x)[:, chosen]
        return mixed

    return mix


class TopKOnPaper:
    def __init__(self, fraction: float, initial: Matrix) -> None:
        self.fraction, self.shared = fraction, initial.copy()

    def __call__(self, x: Matrix, w: Matrix, r: int) -> Matrix:
        sent = top(x - self.shared, self.fraction) != 0
        self.shared[sent] = x[sent]
        mixed = x.copy()
        for i, j in np.ndindex(w.shape):
            mixed[i, sent[j]] += w[i, j] * (x[j] - x[i])[sent[j]]
        return mixed


class ChocoOnPaper:
    def __init__(self, gamma: float, q: Callable[[Matrix], Matrix]) -> None:
        self.gamma, self.q, self.hat = gamma, q, np.zeros(1)

    def __call__(self, x: Matrix, w: Matrix, r: int) -> Matrix:
        self.hat = self.hat + self.q(x - self.hat)
        return x + self.gamma * (w - np.eye(len(w))) @ self.hat


class DeepSqueezeOnPaper:
    def __init__(self, gamma: float, c: Callable[[Matrix], Matrix]) -> None:
        self.gamma, self.c, self.delta = gamma, c, np.zeros(1)

    def __call__(self, x: Matrix, w: Matrix, r: int) -> Matrix:
        v = x + self.delta
        self.delta = v - self.c(v)
        return x + self.gamma * (w - np.eye(len(w))) @ self.c(v)


def rounded(to: torch.dtype) -> Mix:
    def mix(x: Matrix, w: Matrix, r: int) -> Matrix:
        received: Matrix = torch.from_numpy(x).float().to(to).double().numpy()
        own = np.diag(np.diag(w))
        return own @ x + (w - own) @ received

    return mix


REFERENCES: dict[str, tuple[dict[str, Any], Callable[[Matrix], Mix]]] = {
    "random": ({"name": "random", "fraction": 0.3}, lambda x: random(0.3, SEED)),
    "topk": ({"name": "topk", "fraction": 0.2}, lambda x: TopKOnPaper(0.2, x)),
    "choco": (
        {"name": "choco", "gamma": 0.4, "compressor": {"name": "topk", "fraction": 0.2}},
        lambda x: ChocoOnPaper(0.4, functools.partial(top, fraction=0.2)),
    ),
    "deepsqueeze": (
        {"name": "deepsqueeze", "gamma": 0.2, "compressor": {"name": "topk", "fraction": 0.5, "indices": "bitmap"}},
        lambda x: DeepSqueezeOnPaper(0.2, functools.partial(top, fraction=0.5)),
    ),
    "float16": ({"name": "float16"}, lambda x: rounded(torch.float16)),
    "bfloat16": ({"name": "bfloat16"}, lambda x: rounded(torch.bfloat16)),
}
"""The sharing table of an experiment, and its reference given the initial models."""


# Both engines follow them


def experiment(**changed: Any) -> Experiment:
    values: dict[str, Any] = {
        "nodes": 4,
        "seed": SEED,
        "algorithm": DPSGD(4),
        "topology": {"name": "ring"},
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "model": {"name": "logistic"},
        "training": {"lr": 0.2, "batch_size": 16, "local_steps": 2},
        "evaluation": {"every": 0, "average": False},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**values, **changed})


def ring(nodes: int) -> Matrix:
    identity = np.eye(nodes)
    return (identity + np.roll(identity, 1, 0) + np.roll(identity, -1, 0)) / 3


def follow(setup: Setup, mix: Mix, rounds: int = 4) -> Matrix:
    """All models after the last round: trained as nodes train, mixed as `mix` does."""
    nodes, learner = setup.experiment.nodes, setup.trainer_factory.learner(setup.experiment.training)
    trainers = [TorchTrainer(learner, setup.parts[i], generator(SEED, "training", i), 0.0) for i in range(nodes)]
    models = np.tile(setup.initial.astype(np.float64), (nodes, 1))
    for r in range(rounds):
        trained = [trainer.train(m.astype(np.float32)).params for trainer, m in zip(trainers, models, strict=True)]
        models = mix(np.stack(trained).astype(np.float64), ring(nodes), r)
    return models


def models_of(run: Any, nodes: int = 4) -> NDArray[np.float32]:
    return np.stack([np.load(run.folder.model(node)) for node in range(nodes)])


@pytest.mark.parametrize("name", REFERENCES)
def test_a_run_follows_the_paper(name: str, tmp_path: Path) -> None:
    sharing, reference = REFERENCES[name]
    simulated = experiment(sharing=sharing)
    run = simulated.run(tmp_path)
    models, setup = models_of(run), Setup(simulated)
    initial = np.tile(setup.initial.astype(np.float64), (4, 1))
    np.testing.assert_allclose(models, follow(setup, reference(initial)), atol=2e-5)
    assert np.abs(models - follow(setup, full)).max() > 4e-5  # it differs from full sharing
    if name in ("topk", "choco"):  # the other sharings are tested over the wire below
        real = dataclasses.replace(simulated, engine="processes").run(tmp_path)
        assert np.array_equal(models_of(real), models)
        assert real.summary["bytes_sent"] == run.summary["bytes_sent"]


@pytest.mark.parametrize(
    "sharing",
    [
        {"name": "int8"},
        {"name": "qsgd", "levels": 7, "bucket": 64},
        {"name": "random", "fraction": 0.2, "common": False, "values": "bfloat16"},
        {"name": "topk", "fraction": 0.2, "values": "int8", "indices": "elias-gamma"},
        {"name": "choco", "compressor": {"name": "random", "values": {"name": "qsgd", "levels": 16}}},
        {"name": "choco", "gamma": 0.5, "compressor": "quantized"},
        {"name": "deepsqueeze", "compressor": {"name": "quantized", "values": "zstd"}},
    ],
    ids=str,
)
def test_sharings_and_codecs_compose_and_learn(sharing: dict[str, Any], tmp_path: Path) -> None:
    described = experiment(sharing=sharing, algorithm=DPSGD(12), partition={"name": "iid"})
    run, again = described.run(tmp_path), described.run(tmp_path)
    assert run.summary["digest"] == again.summary["digest"]
    assert run.summary["status"] == "completed"
    assert run.summary["messages_rejected"] == 0
    assert run.summary["accuracy"]["mean"] > 0.5


# Without training, for many rounds, on random models


class RingExchange:
    """Nodes on a ring, each with a sharing; payloads are encoded, decoded and checked."""

    def __init__(self, make: Callable[[], Any], models: NDArray[Any], seed: int = SEED) -> None:
        self.models = models.astype(np.float32)
        self.nodes, self.size = self.models.shape
        self.sharings = [make() for _ in self.models]
        for id, sharing in enumerate(self.sharings):
            if not isinstance(sharing, FullSharing):
                sharing.bind(NodeInfo(id, self.nodes, seed, ((self.size,),)))
            sharing.start(frozen(self.models[0] * 0))

    def round(self, r: int, lost: Collection[tuple[int, int]] = (), failed: Collection[int] = ()) -> Matrix:
        """Run one round and return all models. The message from i to j is lost if (i, j) is in `lost`."""
        models = [frozen(model.copy()) for model in self.models]
        alive = [i for i in range(self.nodes) if i not in failed]
        outgoing = {i: self.sharings[i].outgoing(models[i], r) for i in alive}
        w = ring(self.nodes)
        for i in alive:
            received = {}
            for j in sorted({(i - 1) % self.nodes, (i + 1) % self.nodes} - {i} - set(failed)):
                if (j, i) in lost:
                    continue
                payload = outgoing[j] if isinstance(outgoing[j], Payload) else outgoing[j](i)
                payload = decode([bytes(f) for f in Message(j, "model", r, payload).frames()]).payload
                self.sharings[i].check(payload, models[i])
                received[j] = payload
            total = w[i, i] + sum(w[i, j] for j in received)
            weights = {j: float(w[i, j] / total) for j in received}
            self.models[i] = self.sharings[i].merge(models[i], received, weights)
        return self.models.astype(np.float64)

    def all(self) -> list[tuple[int, Any]]:
        return list(enumerate(self.sharings))

    @property
    def spread(self) -> float:
        return float(np.abs(self.models - self.models.mean(0)).max())


def frozen(params: Params) -> Params:
    params.flags.writeable = False
    return params


def random_models(nodes: int = 5, size: int = 60, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal((nodes, size)).astype(np.float32).astype(np.float64)


@few
@given(st.integers(0, 2**32), st.integers(3, 7), st.sampled_from([0.1, 0.25, 1.0]), st.sampled_from([0.1, 0.5]))
def test_sharings_follow_their_matrices(seed: int, nodes: int, fraction: float, gamma: float) -> None:
    start = random_models(nodes, seed=seed)
    q = functools.partial(top, fraction=fraction)
    compressor = TopKCompressor(fraction)
    pairs: list[tuple[Callable[[], Any], Mix]] = [
        (lambda: Random(fraction), random(fraction, SEED)),
        (lambda: TopK(fraction), TopKOnPaper(fraction, start * 0)),
        (lambda: CHOCO(gamma, compressor), ChocoOnPaper(gamma, q)),
        (lambda: DeepSqueeze(gamma, compressor), DeepSqueezeOnPaper(gamma, q)),
    ]
    for make, mix in pairs:
        exchange, expected = RingExchange(make, start), start
        for r in range(5):
            expected = mix(
                exchange.models.astype(np.float64), ring(nodes), r
            )  # starts from the actual models, so that rounding cannot change a selection
            np.testing.assert_allclose(exchange.round(r), expected, atol=1e-4, err_msg=f"{make()} round {r}")


@few
@given(st.integers(0, 2**32))
def test_the_mean_of_all_models_is_preserved(seed: int) -> None:
    start = random_models(seed=seed)
    for make in (
        lambda: Random(0.2),
        lambda: CHOCO(0.3, TopKCompressor(0.1)),
        lambda: CHOCO(0.1, RandomCompressor(0.3, values=Int8())),
        lambda: CHOCO(0.5, QuantizedCompressor(QSGD(15))),
        lambda: DeepSqueeze(0.1, TopKCompressor(0.3, values=Float16())),
        lambda: DeepSqueeze(0.5, QuantizedCompressor(QSGD(15))),
    ):
        exchange = RingExchange(make, start)
        for r in range(5):
            np.testing.assert_allclose(exchange.round(r).mean(0), start.mean(0), atol=2e-5)


@pytest.mark.parametrize(
    ("make", "rounds"),
    [
        (lambda: CHOCO(), 200),
        (lambda: CHOCO(0.1, RandomCompressor(0.1)), 400),
        (lambda: CHOCO(0.2, QuantizedCompressor(QSGD(4, 512))), 150),  # more noise than vector, shrunk
        (lambda: CHOCO(1.0, QuantizedCompressor()), 40),
        (lambda: Random(), 300),
    ],
    ids=["choco", "choco random", "choco of four levels", "choco int8", "random"],
)
def test_nodes_that_do_not_train_agree_on_the_mean(make: Callable[[], Any], rounds: int) -> None:
    start = random_models(size=200)
    exchange = RingExchange(make, start)
    for r in range(rounds):
        exchange.round(r)
    assert exchange.spread < 0.02
    np.testing.assert_allclose(exchange.models.mean(0), start.mean(0), atol=1e-4)


@pytest.mark.parametrize(
    ("make", "unbiased"),
    [
        (lambda: quantized.Int8Sharing(), True),
        (lambda: quantized.QSGDSharing(7, 16), True),
        (lambda: quantized.Int8Sharing(unbiased=False), False),
    ],
    ids=["int8", "qsgd", "int8 to the nearest"],
)
def test_unbiased_rounding_leaves_the_average_model_unchanged(make: Callable[[], Any], unbiased: bool) -> None:
    start, rounds = random_models(3, 40), 600
    exchange = RingExchange(make, start)
    merged = np.zeros((rounds, *start.shape))
    for r in range(rounds):
        exchange.models = start.astype(np.float32)
        merged[r] = exchange.round(r)
    off = merged - ring(3) @ start
    assert np.abs(off[-1]).max() > 1e-3  # a single round is
    error = off.std(axis=0) / np.sqrt(rounds)
    # And a little more: chances are right to 2**-17 of a level, and some values are exact but for those of float32.
    assert (np.abs(off.mean(axis=0)) <= 4.5 * error + 1e-5).all() == unbiased


def drifts(make: Callable[[], Any], rounds: int, lost: Collection[int] = ()) -> Matrix:
    """The largest drift of the mean of four nodes without training, after each round.

    In the rounds of `lost`, node 0 receives nothing from node 1.
    """
    start = random_models(4, 12).astype(np.float32)
    nodes, models = [make() for _ in start], [frozen(model.copy()) for model in start]
    for id, node in enumerate(nodes):
        node.bind(NodeInfo(id, 4, SEED, ((12,),)))
        node.start(frozen(start[0] * 0))
    found, mean = [], start.astype(np.float64).mean(0)
    for r in range(rounds):
        payloads = [node.outgoing(model, r) for node, model in zip(nodes, models, strict=True)]
        received = [
            {j: s if isinstance(s, Payload) else s(i) for j, s in enumerate(payloads) if i != j} for i in range(4)
        ]
        if r in lost:
            del received[0][1]
        weights = [dict.fromkeys(h, 1 / (1 + len(h))) for h in received]
        merged = [node.merge(*each) for node, *each in zip(nodes, models, received, weights, strict=True)]
        models = [frozen(model) for model in merged]
        found.append(np.abs(np.mean(models, axis=0, dtype=np.float64) - mean).max())
    return np.array(found)


@pytest.mark.parametrize("values", [Float32(), Int8()], ids=str)
def test_the_mean_of_choco_does_not_drift(values: Any) -> None:
    assert drifts(lambda: CHOCO(1.0, QuantizedCompressor(values)), 3000).max() < 5e-7


def test_the_mean_of_choco_does_not_drift_after_copies_were_sent() -> None:
    found = drifts(lambda: CHOCO(0.5, QuantizedCompressor()), 2000, lost=(3,))
    assert found[-1] > 1e-5  # it has moved once
    assert np.abs(found[100:] - found[-1]).max() < 5e-7


def test_nodes_that_draw_their_own_coordinates_send_different_ones() -> None:
    exchange = RingExchange(lambda: Random(0.1, common=False), random_models())
    model = frozen(np.zeros(exchange.size, np.float32))
    assert len({s.outgoing(model, r).fields["seed"] for r in range(2) for s in exchange.sharings}) == 10
    common = RingExchange(lambda: Random(0.1), random_models())
    assert len({s.outgoing(model, 0).fields["seed"] for s in common.sharings}) == 1


def test_every_set_of_coordinates_is_drawn_as_often_as_any_other() -> None:
    counts = np.zeros(12)
    for seed in range(3000):
        positions = random_positions(seed, 12, 3)
        assert (np.diff(positions) > 0).all()
        counts[positions] += 1
    assert np.abs(counts / 3000 - 3 / 12).max() < 0.04


# Lost messages and failed neighbours of CHOCO


def assert_pulls_are_correct(exchange: RingExchange, alive: Collection[int]) -> None:
    """Check that the pull of each node follows from the public copies of its neighbours."""
    for i in alive:
        sharing = exchange.sharings[i]
        expected = sum(w * (exchange.sharings[j]._copy - sharing._copy) for j, w in sharing._followed.items())
        np.testing.assert_allclose(sharing._pull, expected, atol=1e-12)


@pytest.mark.parametrize("lost", [{(0, 1)}, {(0, 1), (1, 0)}, {(0, 1), (2, 1), (3, 4)}], ids=str)
def test_choco_recovers_from_lost_messages(lost: set[tuple[int, int]]) -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200))
    for r in range(60):
        exchange.round(r, lost if r in (3, 4, 9) else ())
        if r == 2 or r > 12:
            assert all(
                s._followed == pytest.approx({(i - 1) % 5: 1 / 3, (i + 1) % 5: 1 / 3}) for i, s in exchange.all()
            )
            assert_pulls_are_correct(exchange, range(5))
    assert exchange.spread < 0.1


def test_choco_continues_without_a_failed_neighbour() -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200) + np.arange(5)[:, None])
    for r in range(150):
        exchange.round(r, failed=() if r < 5 else (2,))
    assert_pulls_are_correct(exchange, (0, 1, 3, 4))
    alive = exchange.models[[0, 1, 3, 4]]
    assert np.ptp(alive, axis=0).max() < 0.05
    last = alive.mean(0)
    for r in range(150, 200):
        exchange.round(r, failed=(2,))
    assert np.abs(exchange.models[[0, 1, 3, 4]].mean(0) - last).max() < 0.01  # the failed node does not pull


def test_choco_requests_a_copy_once_and_copies_go_only_to_nodes_with_lost_messages() -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200))
    copies = []
    for r in range(8):
        outgoing = [s.outgoing for s in exchange.sharings]
        recorded: dict[int, Any] = {}

        def keep(i: int, params: Params, round: int, outgoing: Any = outgoing, recorded: Any = recorded) -> Any:
            recorded[i] = outgoing[i](params, round)
            return recorded[i]

        for i, sharing in enumerate(exchange.sharings):
            sharing.outgoing = functools.partial(keep, i)
        exchange.round(r, {(0, 1)} if r == 2 else ())
        for i, sharing in enumerate(exchange.sharings):
            sharing.outgoing = outgoing[i]
        copies += [(r, i, j) for i, o in recorded.items() if callable(o) for j in range(5) if "copy" in o(j).arrays]
    assert copies == [(4, 0, 1), (4, 2, 1)]


class NeverSendsCopy(CHOCO):
    """A faulty CHOCO that never sends its copy."""

    def outgoing(self, params: Params, round: int) -> Any:
        self._asked_by = []
        return super().outgoing(params, round)


@pytest.mark.parametrize("answers", [True, False], ids=["request lost", "no answer"])
def test_choco_continues_without_neighbours_that_send_no_copy(answers: bool) -> None:
    made = iter([CHOCO(0.2), CHOCO(0.2), CHOCO(0.2) if answers else NeverSendsCopy(0.2), CHOCO(0.2), CHOCO(0.2)])
    exchange = RingExchange(lambda: next(made), random_models(size=200) + np.arange(5)[:, None])
    one_way = {(1, 2)} if answers else set()  # node 2 does not receive from node 1, which receives from it
    for r in range(40):
        before = exchange.models[1].copy()
        exchange.round(r, one_way | ({(0, 1)} if r == 5 else set()))
        assert_pulls_are_correct(exchange, range(5))
        assert np.array_equal(exchange.models[1], before) == (r in (5, 6)), r
        if r > 6:
            assert exchange.sharings[1]._followed == {0: pytest.approx(1 / 2)}
    exchange.sharings[2].__class__ = CHOCO  # from now on it sends its copy
    for r in range(40, 140):
        exchange.round(r)
    assert_pulls_are_correct(exchange, range(5))
    assert all(s._followed == pytest.approx({(i - 1) % 5: 1 / 3, (i + 1) % 5: 1 / 3}) for i, s in exchange.all())
    assert exchange.spread < 0.1


def test_choco_requests_a_copy_only_from_the_neighbour_that_was_missing_for_long() -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200))
    copies = []
    for r in range(20):
        exchange.round(r, {(2, 1)} if 4 <= r < 12 else ())
        copies += [(r, i, j) for i, s in exchange.all() for j in s._asked_by]
    # Node 1 lost nodes 2 and 0; it recovered node 0 first, then node 2.
    assert copies == [(5, 0, 1), (5, 2, 1), (13, 2, 1)]
    assert_pulls_are_correct(exchange, range(5))


def test_choco_recovers_after_a_lost_first_round() -> None:
    exchange = RingExchange(lambda: CHOCO(0.2), random_models(size=200))
    for r in range(8):
        exchange.round(r, {(0, 1)} if r == 0 else ())
    assert_pulls_are_correct(exchange, range(5))


def test_a_run_with_a_crash_continues(tmp_path: Path) -> None:
    for name in ("choco", "deepsqueeze", "topk"):
        described = experiment(
            nodes=6, sharing={"name": name}, algorithm=DPSGD(8), fault=Faults().crash(2, round=3).schedule
        )
        run = described.run(tmp_path)
        assert run.summary["messages_rejected"] == 0
        models = np.stack([np.load(run.folder.model(node)) for node in (0, 1, 3, 4, 5)])
        assert np.abs(models).max() < 10


# State


MAKERS: dict[str, Callable[[], Any]] = {
    "random": lambda: Random(0.1),
    "random of bfloat16": lambda: Random(0.2, values=BFloat16()),
    "random own": lambda: Random(0.1, common=False),
    "topk": lambda: TopK(0.1),
    "topk int8 raw": lambda: TopK(0.3, Int8(), Raw()),
    "topk zstd gamma": lambda: TopK(0.3, Zstd(), EliasGamma()),
    "choco": lambda: CHOCO(0.3, TopKCompressor(0.1)),
    "choco random": lambda: CHOCO(0.3, RandomCompressor(0.1)),
    "choco quantized": lambda: CHOCO(0.3, QuantizedCompressor(QSGD(16))),
    "choco topk float16": lambda: CHOCO(0.3, TopKCompressor(0.1, Float16(), Bitmap())),
    "deepsqueeze": lambda: DeepSqueeze(0.1, TopKCompressor(0.1)),
    "deepsqueeze random": lambda: DeepSqueeze(0.1, RandomCompressor(0.3, Int8())),
    "deepsqueeze quantized": lambda: DeepSqueeze(),
    "qsgd": lambda: quantized.QSGDSharing(16, 32),
}
AVERAGES = ("random", "choco", "choco random", "choco quantized", "choco topk float16", "deepsqueeze")
AGREES = ("random", "random own", "topk", "topk zstd gamma", "choco", "choco topk float16", "deepsqueeze")


@pytest.mark.parametrize("size", [10, 100, 1001])
@pytest.mark.parametrize("name", MAKERS)
def test_compressed_sharings_conform(name: str, size: int) -> None:
    check_sharing(MAKERS[name], size, SEED, averages=name in AVERAGES, agrees=name in AGREES)


@pytest.mark.parametrize("name", ["topk", "choco", "deepsqueeze"])
def test_state_can_be_restored_during_a_repair(name: str) -> None:
    exchange, other = (RingExchange(MAKERS[name], random_models()) for _ in range(2))
    for r in range(8):
        lost = {(1, 2), (4, 3)} if r in (2, 3) else ()
        exchange.round(r, lost)
        fresh = RingExchange(MAKERS[name], other.models)
        for old, new in zip(other.sharings, fresh.sharings, strict=True):
            assert isinstance(old, Stateful)
            if r:
                new.restore(old.state())
        other = fresh
        other.round(r, lost)
        assert np.array_equal(exchange.models, other.models)


def test_a_restored_deepsqueeze_has_sent_nothing_yet() -> None:
    sender, fresh = DeepSqueeze(), DeepSqueeze()
    received = payload_of(sender)
    fresh.bind(NodeInfo(0, 4, SEED, ((100,),)))
    fresh.start(frozen(np.zeros(100, np.float32)))
    merged = []
    for sharing in (sender, fresh):
        sharing.restore(sender.state())
        merged.append(sharing.merge(frozen(np.ones(100, np.float32)), {1: received}, {1: 0.5}))
    assert np.array_equal(merged[0], merged[1])


def test_a_saved_state_does_not_change_when_the_sharing_continues() -> None:
    for name in ("topk", "choco", "deepsqueeze"):
        exchange = RingExchange(MAKERS[name], random_models())
        exchange.round(0)
        state = exchange.sharings[0].state()
        before = {k: v.copy() for k, v in state.items() if isinstance(v, np.ndarray)}
        exchange.round(1)
        assert before
        assert all(np.array_equal(state[k], v) for k, v in before.items())


# Traffic


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (lambda: Random(0.1), 0.1),
        (lambda: Random(0.1, common=False), 0.1),
        (lambda: Random(0.1, values=Float16()), 0.05),
        (lambda: TopK(0.1), 0.1 + 0.469 / 32),  # a position has an entropy of 0.469 bits for each parameter
        (lambda: CHOCO(0.1, RandomCompressor(0.1)), 0.1),
        (lambda: quantized.Float16Sharing(), 0.5),
        (lambda: quantized.BFloat16Sharing(), 0.5),
        (lambda: quantized.Int8Sharing(), 0.25 + 1 / 256),
        (lambda: quantized.QSGDSharing(7), 0.125 + 1 / 512),
    ],
    ids=[
        "random",
        "random, explicit indices",
        "random float16",
        "topk",
        "choco",
        "float16",
        "bfloat16",
        "int8",
        "qsgd",
    ],
)
def test_a_message_has_the_expected_fraction_of_the_full_size(make: Callable[[], Any], share: float) -> None:
    model = frozen(generator(SEED, "test").standard_normal(GN_LENET, np.float32))
    sharing = make()
    sharing.bind(NodeInfo(0, 4, SEED, (model.shape,)))
    sharing.start(frozen(model * 0))
    payload = sharing.outgoing(model, 0)
    assert payload.frozen() is payload  # it is sent without a copy
    full_size = Message(0, "model", 0, FullSharing().outgoing(model, 0)).wire_size
    assert Message(0, "model", 0, payload).wire_size == pytest.approx(share * full_size, rel=0.01)


# Compressors


@few
@given(
    st.integers(1, 300),
    st.integers(0, 2**32),
    st.sampled_from(
        [
            TopKCompressor(1.0),
            TopKCompressor(1.0, QSGD(1)),
            RandomCompressor(1.0, BFloat16()),
            QuantizedCompressor(),
            QuantizedCompressor(QSGD(1, 512)),
            QuantizedCompressor(Float32()),
        ]
    ),
    st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_sender_and_receiver_have_the_same_approximation_with_bounded_error(
    size: int, seed: int, compressor: Compressor, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    vector = (rng.standard_normal(size) * scale).astype(np.float32)
    if isinstance(compressor, TopKCompressor | RandomCompressor):
        compressor = dataclasses.replace(compressor, fraction=max(1 / size + 1e-9, 0.3))
    compressor.fit(size)
    payload, compressed = compressor.compress(vector, rng)
    kept = vector.astype(np.float64)
    vector[:] = np.nan  # neither result may depend on it
    received = compressor.decompress(decode([bytes(f) for f in Message(0, "m", 0, payload).frames()]).payload, size)
    approximations = [np.zeros(size, np.float32) for _ in range(2)]
    for part, approximation in zip((compressed, received), approximations, strict=True):
        part.add_to(approximation)
    assert np.array_equal(approximations[0], approximations[1])
    assert np.linalg.norm(kept - approximations[0]) <= np.linalg.norm(kept) * (1 + 1e-4)


def test_a_diverged_model_stays_not_a_number_after_compression() -> None:
    vector = np.array([1, np.nan, 2, np.inf], np.float32)
    rng = np.random.default_rng(0)
    compressors: list[Compressor] = [
        TopKCompressor(0.5),
        TopKCompressor(0.5, Float16()),
        QuantizedCompressor(BFloat16()),
        QuantizedCompressor(),
        QuantizedCompressor(QSGD(7)),
    ]
    for compressor in compressors:
        payload, compressed = compressor.compress(vector, rng)
        assert np.isnan(compressed.values).any()
        assert np.array_equal(compressor.decompress(payload, 4).values, compressed.values, equal_nan=True)


# Invalid payloads


def payload_of(sharing: Any, size: int = 100) -> Payload:
    sharing.bind(NodeInfo(0, 4, SEED, ((size,),)))
    sharing.start(frozen(np.zeros(size, np.float32)))
    payload = sharing.outgoing(frozen(np.random.default_rng(0).standard_normal(size).astype(np.float32)), 0)
    assert isinstance(payload, Payload)
    return payload


def raw(*positions: int) -> NDArray[np.uint8]:
    return np.array(positions, "<u2").view(np.uint8)


FOUR = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("arrays", "fields", "why"),
    [
        ({"positions": raw(1, 2, 3, 100), "values": FOUR}, {"count": 4}, "position 100"),
        ({"positions": raw(1, 2, 2, 9), "values": FOUR}, {"count": 4}, "repeat or are out of order"),
        ({"positions": raw(4, 3, 2, 1), "values": FOUR}, {"count": 4}, "repeat or are out of order"),
        ({"positions": raw(1, 2, 3), "values": FOUR}, {"count": 4}, "6 bytes of positions, expected 8"),
        ({"positions": raw(1, 2, 3, 4), "values": FOUR[:3]}, {"count": 4}, "expected a vector of 4 float32"),
        ({"positions": raw(1, 2, 3, 4), "values": FOUR.astype("<f8")}, {"count": 4}, "expected a vector of 4 float32"),
        ({"positions": raw(1, 2, 3, 4).view("<u2"), "values": FOUR}, {"count": 4}, "vector of uint8"),
        ({"positions": raw(1, 2, 3, 4), "values": FOUR}, {}, "field 'count' is None"),
        ({"positions": raw(1, 2, 3, 4), "values": FOUR}, {"count": 101}, "field 'count' is 101, expected 0 to 100"),
        ({"positions": raw(1, 2, 3, 4), "values": FOUR}, {"count": -1}, "field 'count' is -1"),
        ({"positions": raw(1), "values": FOUR[:1]}, {"count": True}, "field 'count' is True"),
        ({"positions": raw(1, 2, 3, 4), "values": FOUR}, {"count": 4.0}, "field 'count' is 4.0"),
        ({"positions": raw(1, 2, 3, 4), "values": FOUR}, {"count": "4"}, "field 'count' is '4'"),
        ({"values": FOUR}, {"count": 4}, "no array 'positions'"),
        ({"positions": raw(1, 2, 3, 4)}, {"count": 4}, "no array 'values'"),
    ],
)
def test_bad_positions_are_rejected(arrays: dict[str, Any], fields: dict[str, Any], why: str) -> None:
    params = np.zeros(100, np.float32)
    for sharing in (TopK(0.04, indices=Raw()), CHOCO(0.1, TopKCompressor(0.04, indices=Raw()))):
        with pytest.raises(MessageError, match=why):
            sharing.check(Payload(arrays, fields), params)


@pytest.mark.parametrize("seed", [None, -1, 2**63, True, 1.0, "1"])
def test_bad_seeds_are_rejected(seed: Any) -> None:
    payload = payload_of(Random())
    fields = {k: v for k, v in {**payload.fields, "seed": seed}.items() if v is not None}
    with pytest.raises(MessageError, match="field 'seed'"):
        Random().check(Payload(payload.arrays, fields), np.zeros(100, np.float32))


@pytest.mark.parametrize("factor", [None, -0.5, 1.5, math.nan, math.inf, 1, True, "1"])
def test_bad_factors_are_rejected(factor: Any) -> None:
    sharing = DeepSqueeze()
    payload = payload_of(sharing)
    fields = {k: v for k, v in {**payload.fields, "factor": factor}.items() if v is not None}
    with pytest.raises(MessageError, match="field 'factor'"):
        sharing.check(Payload(payload.arrays, fields), np.zeros(100, np.float32))


@pytest.mark.parametrize("scale", [math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("make", [quantized.Int8Sharing, quantized.QSGDSharing, DeepSqueeze, lambda: TopK(0.1, Int8())])
def test_bad_scales_are_rejected(make: Callable[[], Any], scale: float) -> None:
    sharing = make()
    payload = payload_of(sharing)
    arrays = {**payload.arrays, "scale": np.full_like(payload.arrays["scale"], scale)}
    with pytest.raises(MessageError, match="'scale' holds a number that is negative or infinite"):
        sharing.check(Payload(arrays, payload.fields), np.zeros(100, np.float32))


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (Payload({}, {"lost": 1}), "field 'lost' is 1"),
        (Payload({"copy": np.zeros(99)}), r"array 'copy' is float64 of shape \(99,\), expected 100 float64"),
        (Payload({"copy": np.zeros(100, np.float32)}), "array 'copy' is float32"),
        (Payload({"copy": np.full(100, np.nan)}), "array 'copy' holds numbers that are not finite"),
        (Payload({"copy": np.full(100, -np.inf)}), "array 'copy' holds numbers that are not finite"),
        (Payload({"copy": np.full(100, 1e39)}), "array 'copy' holds numbers that are not finite in float32"),
    ],
)
def test_choco_rejects_bad_copies(extra: Payload, why: str) -> None:
    sharing = CHOCO()
    payload = payload_of(sharing)
    with pytest.raises(MessageError, match=why):
        sharing.check(
            Payload({**payload.arrays, **extra.arrays}, {**payload.fields, **extra.fields}), np.zeros(100, np.float32)
        )


HOSTILE = MAKERS | {
    "deepsqueeze of one level": lambda: DeepSqueeze(1.0, QuantizedCompressor(QSGD(1))),
    "int8": lambda: quantized.Int8Sharing(),
    "jwins": lambda: JWINS(fractions=(0.1, 1.0)),
    "jwins int8": lambda: JWINS("haar", fractions=(0.3,), values=Int8()),
    "powergossip": lambda: PowerGossip(),
    "powergossip of rank 2": lambda: PowerGossip(2),
}
LARGEST = float(np.finfo(np.float32).max)


def tampered(data: st.DataObject, payload: Payload) -> Payload:
    """The payload with other bytes, extreme numbers, other sizes or other fields."""
    arrays, fields = dict(payload.arrays), dict(payload.fields)
    for name, array in payload.arrays.items():
        size = data.draw(st.sampled_from([array.nbytes, array.nbytes, 0, array.nbytes + array.itemsize]))
        noise = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), array.dtype)
        numbers = [LARGEST, -LARGEST, 3e37, math.nan, math.inf] if array.dtype.kind == "f" else [0, 1, 127]
        extreme = np.full_like(array, data.draw(st.sampled_from(numbers)))
        arrays[name] = data.draw(st.sampled_from([array, extreme, extreme, noise]))
    for name, value in payload.fields.items():
        others = st.one_of(st.integers(-1, 200), st.floats(), st.text(), st.booleans(), st.just(2**62 - 1))
        fields[name] = data.draw(st.one_of(st.just(value), st.just(value), others))
    return Payload(arrays, fields)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_payload_is_merged_or_rejected(data: st.DataObject) -> None:
    make = HOSTILE[data.draw(st.sampled_from(sorted(HOSTILE)))]
    sharings = [make(), make()]
    scale = data.draw(st.sampled_from([0.0, 1.0, 1e38]))
    rng = np.random.default_rng(0)
    start = frozen((np.clip(rng.standard_normal(100), -3, 3) * scale).astype(np.float32))
    for id, sharing in enumerate(sharings):
        sharing.bind(NodeInfo(id, 2, SEED, ((8, 10), (20,))))
        sharing.start(frozen(np.zeros(100, np.float32)))
    model = start
    with np.errstate(all="ignore"):
        for r in range(4):
            payloads = [sharing.outgoing(m, r) for sharing, m in zip(sharings, (model, start), strict=True)]
            there, back = (s if isinstance(s, Payload) else s(1 - i) for i, s in enumerate(payloads))
            assert isinstance(there, Payload)
            if isinstance(sharings[0], CHOCO) and data.draw(st.booleans()):
                copy = np.full(100, data.draw(st.sampled_from([0.0, LARGEST, -LARGEST, math.nan])))
                back = Payload({**back.arrays, "copy": copy}, {**back.fields, "lost": data.draw(st.booleans())})
            hostile = tampered(data, back) if data.draw(st.booleans()) else back
            received = {1: hostile} if data.draw(st.integers(0, 4)) else {}
            try:
                for payload in received.values():
                    sharings[0].check(payload, model)
            except MessageError:
                received = {}
            model = sharings[0].merge(model, received, dict.fromkeys(received, data.draw(st.sampled_from([0.5, 0.9]))))
            assert (model.shape, model.dtype) == ((100,), np.float32)
            model = frozen(model)


@pytest.mark.parametrize("make", [lambda: Random(1.0), lambda: TopK(1.0), lambda: JWINS("haar", 1, (1.0,))])
def test_large_values_of_opposite_signs_are_averaged(make: Callable[[], Any]) -> None:
    one, other = (frozen(np.full(4, sign * 2e38, np.float32)) for sign in (1, -1))
    sharings = [make(), make()]
    for id, sharing in enumerate(sharings):
        sharing.bind(NodeInfo(id, 2, SEED, ((4,),)))
        sharing.start(frozen(np.zeros(4, np.float32)))
    sharings[0].outgoing(one, 0)
    merged = sharings[0].merge(one, {1: sharings[1].outgoing(other, 0)}, {1: 0.5})
    np.testing.assert_allclose(merged / 2e38, 0, atol=1e-6)


def test_a_payload_that_claims_a_large_size_allocates_no_memory() -> None:
    sharing = TopK()
    payload = payload_of(sharing)
    params = np.zeros(100, np.float32)
    tracemalloc.start()
    for count in (2**40, 2**62, 100):
        with pytest.raises(MessageError):
            sharing.check(Payload(payload.arrays, {"count": count}), params)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_payloads_that_are_never_merged_do_not_accumulate() -> None:
    sharing = Random()
    payload = payload_of(sharing)
    for _ in range(1000):
        sharing.check(Payload(payload.arrays, dict(payload.fields)), np.zeros(100, np.float32))
    assert len(sharing._cache._decoded) <= 64


class SendsBadPositions(TopK):
    """Sends positions beyond the end of the model."""

    def outgoing(self, params: Params, round: int) -> Payload:
        payload = super().outgoing(params, round)
        positions = payload.arrays["positions"].copy()
        positions[-2:] = 255
        return Payload({**payload.arrays, "positions": positions}, payload.fields)


def test_messages_with_bad_positions_are_rejected_and_counted(tmp_path: Path) -> None:
    options = {"fraction": 0.1, "indices": "raw"}
    described = experiment(
        sharing={"name": "topk", **options},
        group=[{"nodes": "2", "sharing": {"name": f"{__name__}:SendsBadPositions", **options}}],
    )
    run = described.run(tmp_path)
    assert run.summary["status"] == "completed"
    assert run.summary["messages_rejected"] == 2 * 4  # by both neighbours in all four rounds
    assert np.isfinite(models_of(run)).all()


# Experiments


class Served:
    """An algorithm with a server."""

    traits = Traits(sends_to="server")

    async def run(self, node: Node) -> None:
        """Nothing happens."""


class Gossips(Served):
    traits = Traits(sends_to="anyone")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"sharing": {"name": "random", "fraction": 0}}, "sharing.fraction = 0: expected number above 0 and at most 1"),
        ({"sharing": {"name": "topk", "fraction": 1.5}}, "sharing.fraction = 1.5: expected number above 0 and at most"),
        ({"sharing": {"name": "choco", "gamma": 0}}, "sharing.gamma = 0: expected number above 0 and at most 1"),
        ({"sharing": {"name": "deepsqueeze", "gamma": 2}}, "sharing.gamma = 2"),
        ({"sharing": {"name": "qsgd", "levels": 0}}, "sharing.levels = 0"),
        ({"sharing": {"name": "int8", "levels": 3}}, "sharing.levels: unknown key"),
        ({"sharing": {"name": "topk", "values": "float12"}}, "unknown values 'float12'; did you mean 'float"),
        ({"sharing": {"name": "choco", "compressor": {"name": "topk", "fraction": 2}}}, "compressor.fraction = 2"),
        (
            {"sharing": {"name": "choco"}, "topology": {"name": "regular", "degree": 2, "dynamic": True}},
            "sharing = 'choco': a node follows .* topology = 'regular' changes the links every round; use a static",
        ),
        ({"sharing": {"name": "choco"}, "algorithm": {"name": f"{__name__}:Served"}}, "'choco': .* sends to a server"),
        (
            {"sharing": {"name": "deepsqueeze"}, "algorithm": {"name": f"{__name__}:Gossips"}},
            "sharing = 'deepsqueeze': nodes step towards each other.* sends to nodes of its own choice; use algorithm",
        ),
    ],
    ids=str,
)
def test_an_invalid_experiment_is_rejected(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ExperimentError, match=why):
        experiment(**changed)


def test_deepsqueeze_accepts_dynamic_graphs() -> None:
    experiment(sharing={"name": "deepsqueeze"}, topology={"name": "regular", "degree": 2, "dynamic": True})


@pytest.mark.parametrize(
    "sharing",
    [
        {"name": "random", "fraction": 0.001},
        {"name": "topk", "fraction": 0.001},
        {"name": "choco", "compressor": {"name": "topk", "fraction": 0.001}},
        {"name": "deepsqueeze", "compressor": {"name": "random", "fraction": 0.001}},
        {"name": "jwins", "wavelet": "haar", "level": 1, "fractions": [0.5, 0.001]},
    ],
    ids=str,
)
def test_a_fraction_that_keeps_nothing_is_rejected_with_the_smallest_valid_one(sharing: dict[str, Any]) -> None:
    why = f"sharing = '{sharing['name']}': fraction = 0.001 keeps none of the model's 650 parameters; .* is 0.001539"
    with pytest.raises(ExperimentError, match=why):
        Setup(experiment(sharing=sharing))
    with pytest.raises(ValueError, match="keeps none"):
        Random(0.1).start(np.zeros(9, np.float32))


@given(st.integers(1, 10**7))
def test_the_smallest_valid_fraction_keeps_one_coordinate(size: int) -> None:
    with pytest.raises(ValueError, match="smallest") as caught:
        kept_count(size, 0.99 / size)
    smallest = float(str(caught.value).rsplit(" ", 1)[1])
    assert int(size * smallest) >= 1


def test_every_codec_and_compressor_can_be_named_in_an_experiment() -> None:
    for values in VALUES:
        experiment(sharing={"name": "topk", "values": values})
    for compressor in COMPRESSORS:
        described = experiment(sharing={"name": "choco", "compressor": compressor})
        assert isinstance(described.sharing.build(), CHOCO)
    configured = experiment(sharing=CHOCO(0.2, QuantizedCompressor(QSGD(3))))
    assert configured.sharing.to_table()["compressor"] == {
        "name": "quantized",
        "values": {"name": "qsgd", "levels": 3, "bucket": 512},
    }


def test_a_sparse_code_decodes_to_its_input() -> None:
    part = Part(np.array([3, -1], np.float32), np.array([5, 7]))
    code = SparseCode(Float32(), GolombRice())
    back = code.unpack(code.pack(part, 9, np.random.default_rng(0)), 9)
    assert back.positions is not None
    assert (back.positions.tolist(), back.values.tolist()) == ([5, 7], [3.0, -1.0])
