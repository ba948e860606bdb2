"""Compressed sharings follow their papers, which are written here with matrices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import models_of
from ring_exchange import (
    MAKERS,
    SEED,
    Matrix,
    Mix,
    RingExchange,
    experiment,
    few,
    frozen,
    payload_of,
    random_models,
    ring,
)
from shoal.algorithms.dpsgd import DPSGD
from shoal.compression.compressors import (
    QuantizedCompressor,
    RandomCompressor,
    TopKCompressor,
    random_positions,
)
from shoal.compression.floats import Float16, Float32
from shoal.compression.indices import Raw
from shoal.compression.quantizers import QSGD, Int8
from shoal.experiment.setup import Setup
from shoal.message import Message
from shoal.randomness import derived_seed, generator
from shoal.sharing import quantized
from shoal.sharing.choco import CHOCO
from shoal.sharing.deepsqueeze import DeepSqueeze
from shoal.sharing.full import FullSharing
from shoal.sharing.random import Random
from shoal.sharing.sharing import NodeInfo, payload_for
from shoal.sharing.topk import TopK
from shoal.state import Stateful
from shoal.testing import check_sharing
from shoal.training.torch_trainer import TorchTrainer

GN_LENET = 89_834


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


def follow(setup: Setup, mix: Mix, rounds: int = 4) -> Matrix:
    """All models after the last round: trained as nodes train, mixed as `mix` does."""
    nodes, learner = setup.experiment.nodes, setup.trainer_factory.learner(setup.experiment.training)
    trainers = [TorchTrainer(learner, setup.parts[i], generator(SEED, "training", i), 0.0) for i in range(nodes)]
    models = np.tile(setup.initial.astype(np.float64), (nodes, 1))
    for r in range(rounds):
        trained = [trainer.train(m.astype(np.float32)).params for trainer, m in zip(trainers, models, strict=True)]
        models = mix(np.stack(trained).astype(np.float64), ring(nodes), r)
    return models


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
        assert real.status == run.status == "completed"
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


def test_top_k_counts_the_rounding_error_of_a_sent_value_as_change() -> None:
    sharing = TopK(0.5, Float16(), Raw())
    sharing.bind(NodeInfo(0, 2, SEED, ((2,),)))
    sharing.start(np.zeros(2, np.float32))
    params = np.array([1000.2, 0.1], np.float32)  # float16 rounds the first to 1000
    sent = [sharing.outgoing(params, r).arrays["positions"].view(np.uint16).tolist() for r in range(2)]
    assert sent == [[0], [0]], "the error of 0.2 is a larger change than 0.1"
    assert sharing.select(np.array([1000.0, 0.1], np.float32), 2).tolist() == [1], "receivers have 1000"


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
    assert exchange.max_deviation < 0.02
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
        received = [{j: payload_for(s, i) for j, s in enumerate(payloads) if i != j} for i in range(4)]
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
    ones = frozen(np.ones(common.size, np.float32))
    for round in range(2):
        sent = common.sharings[0].merge(model, {1: common.sharings[1].outgoing(ones, round)}, {1: 1.0})
        assert np.flatnonzero(sent).tolist() == common.sharings[0].select(model, round).tolist()


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
