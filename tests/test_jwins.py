"""JWINS against its paper's algorithm in NumPy, with a Haar transform as a matrix; cut-offs, budgets, complete runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pywt
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import models_of
from shoal.compression.compressors import SparseCode
from shoal.compression.floats import Float16
from shoal.compression.indices import Raw
from shoal.errors import ExperimentError, MessageError
from shoal.experiment import Experiment
from shoal.message import Payload
from shoal.sharing.jwins import INEXACT, JWINS, Wavelets
from shoal.sharing.sharing import NodeInfo
from shoal.testing import check_sharing
from shoal.types import Params


def started(sharing: JWINS, params: Params, id: int = 0) -> JWINS:
    sharing.bind(NodeInfo(id, 4, 7, (params.shape,)))
    sharing.start(params)
    return sharing


def drawn(size: int, seed: int) -> Params:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


# The transform


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.sampled_from(sorted(set(pywt.wavelist(kind="discrete")) - INEXACT)),
    st.integers(1, 8),
    st.integers(0, 2**32),
)
def test_the_transform_inverts_at_every_length(length: int, wavelet: str, level: int, seed: int) -> None:
    transform = Wavelets(wavelet, level, length)
    values = drawn(length, seed)
    values.flags.writeable = False
    coefficients = transform.forward(values)
    assert coefficients.shape == (transform.size,)
    assert coefficients.dtype == np.float32
    back = transform.inverse(coefficients)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, values, atol=1e-3)


def haar(length: int, level: int) -> Any:
    """The orthogonal matrix of the Haar transform of vectors whose length 2**level divides."""
    matrix = np.eye(length)
    for done in range(level):
        n = length >> done
        step = np.eye(length)
        step[:n, :n] = 0
        for k in range(n // 2):
            step[k, [2 * k, 2 * k + 1]] = 1 / np.sqrt(2)
            step[n // 2 + k, [2 * k, 2 * k + 1]] = 1 / np.sqrt(2), -1 / np.sqrt(2)
        matrix = step @ matrix
    return matrix


# The oracle


def follow(trained: list[list[Params]], start: Params, weights: Any, count: int, level: int) -> Any:
    """All models after the last round, by the paper's algorithm, in double precision."""
    t = haar(start.size, level)
    nodes = len(trained[0])
    x = np.tile(start.astype(np.float64), (nodes, 1))
    v = np.zeros_like(x)
    for r, steps in enumerate(trained):
        after = x + steps
        v += (after - x) @ t.T  # local training
        sent = [np.sort(np.argsort(-np.abs(v[i]), kind="stable")[:count]) for i in range(nodes)]
        y = after @ t.T
        merged = y.copy()
        for i in range(nodes):
            v[i, sent[i]] = 0
            for j in range(nodes):
                if weights[r][i, j] and i != j:
                    merged[i, sent[j]] += weights[r][i, j] * (y[j, sent[j]] - y[i, sent[j]])
        x = merged @ t
        v += (x - after) @ t.T  # averaging
    return x


def test_models_follow_the_paper_on_a_graph_that_changes() -> None:
    size, level, nodes, rounds = 48, 3, 3, 5
    start = drawn(size, 0)
    trained = [[drawn(size, 10 * r + i + 1) for i in range(nodes)] for r in range(rounds)]
    pairs = [{(0, 1), (1, 0)}, {(0, 2), (2, 0), (1, 2), (2, 1)}]  # alternating: one link, then two
    weights = []
    for r in range(rounds):
        links, share = pairs[r % 2], (1 / 2, 1 / 3)[r % 2]
        weights.append(np.array([[share * ((i, j) in links) for j in range(nodes)] for i in range(nodes)]))
    expected = follow(trained, start, weights, count=14, level=level)
    sharings = [started(JWINS("haar", level, (0.3,)), start, i) for i in range(nodes)]
    models = [start] * nodes
    for r in range(rounds):
        models = [m + s for m, s in zip(models, trained[r], strict=True)]
        payloads = [s.outgoing(m, r) for s, m in zip(sharings, models, strict=True)]
        assert [payload.fields["count"] for payload in payloads] == [14] * nodes
        row = [{j: float(w) for j, w in enumerate(weights[r][i]) if w} for i in range(nodes)]
        models = [
            s.merge(m, {j: payloads[j] for j in row[i]}, row[i])
            for i, (s, m) in enumerate(zip(sharings, models, strict=True))
        ]
    np.testing.assert_allclose(models, expected, atol=1e-4)


# Selected coefficients


def test_the_most_changed_coefficients_are_sent_first() -> None:
    start = np.zeros(64, np.float32)
    sharing = started(JWINS("haar", 1, (0.25,)), start)
    t = haar(64, 1)
    change = np.zeros(64)
    change[:32] = np.arange(32, 0, -1)  # of the coefficients
    model = (change @ t).astype(np.float32)
    positions = []
    for r in range(2):
        payload = sharing.outgoing(model, r)
        part = SparseCode(sharing.values, sharing.indices).unpack(payload, 64)
        positions.append(list(part.positions))  # type: ignore[arg-type]
        np.testing.assert_allclose(part.values, change[part.positions], atol=1e-4)
    assert positions == [list(range(16)), list(range(16, 32))]


def test_small_changes_accumulate_beside_large_coefficients() -> None:
    model = np.array([3000, 3000, 0, 0, 0, 0, 0, 0], np.float32)
    sharing = started(JWINS("haar", 1, (0.125,)), model)
    for r in range(5):
        state = sharing.state()
        state["scores"][0] += np.float32(1e-5)  # far below the float32 resolution of the first coefficient
        state["scores"][1] += np.float32(1e-3)
        sharing.restore(state)
        sharing.outgoing(model, r)
        assert sharing.state()["scores"][:2].tolist() == pytest.approx([(r + 1) * 1e-5, 0])


def test_a_state_is_a_copy() -> None:
    model, other = drawn(100, 1), drawn(100, 2)
    sharing, twin = (started(JWINS(fractions=(0.1,)), drawn(100, 0)) for _ in range(2))
    for one in (sharing, twin):
        one.outgoing(model.copy(), 0)
    for array in sharing.state().values():
        array[:] = np.nan
    assert all(np.isfinite(array).all() for array in sharing.state().values())
    for r, params in ((1, model), (2, other)):
        payloads = [one.outgoing(params, r) for one in (sharing, twin)]
        assert all(np.array_equal(payloads[0].arrays[k], payloads[1].arrays[k]) for k in payloads[0].arrays)


def test_each_node_draws_reproducible_cut_offs_in_each_round() -> None:
    model = drawn(1000, 1)
    sharings = [started(JWINS("haar"), model, id) for id in (0, 1, 0)]
    counts = [[s.outgoing(model, r).fields["count"] for r in range(200)] for s in sharings]
    size = max(counts[0])  # the fraction 1.0
    assert counts[0] == counts[2] != counts[1]
    assert {round(int(c) / size, 1) for c in counts[0]} == {0.1, 0.2, 0.3, 0.4, 1.0}
    assert np.mean(counts[0], dtype=float) / size == pytest.approx(0.4, abs=0.07)


@pytest.mark.parametrize("size", [10, 13, 100, 1001])
@pytest.mark.parametrize("table", [{}, {"fractions": (0.1,)}, {"wavelet": "db10", "level": 9}, {"values": Float16()}])
def test_equal_models_stay_unchanged(size: int, table: dict[str, Any]) -> None:
    lossless = "values" not in table
    check_sharing(lambda: JWINS(**table), size, averages=False, agrees=lossless)


@pytest.mark.parametrize("size", [1, 3, 100, 1001])
def test_with_all_coefficients_jwins_equals_full_sharing(size: int) -> None:
    check_sharing(lambda: JWINS(fractions=(1.0,)), size)


def test_a_model_other_than_the_last_sent_one_is_merged_unchanged() -> None:
    one, other, received = drawn(50, 1), drawn(50, 2), drawn(50, 3)
    sharing, peer = started(JWINS(fractions=(1.0,)), one), started(JWINS(fractions=(1.0,)), one, 1)
    sharing.outgoing(one, 0)
    merged = sharing.merge(other, {1: peer.outgoing(received, 0)}, {1: 0.25})
    np.testing.assert_allclose(merged, 0.75 * other + 0.25 * received, atol=1e-5)


# Invalid payloads


def test_invalid_payloads_are_rejected() -> None:
    model = drawn(100, 0)
    sharing = started(JWINS("haar", 1, (0.1,)), model)
    good = sharing.outgoing(model, 0)
    hostile = [
        Payload({}, {}),
        Payload(good.arrays, {}),
        Payload(good.arrays, {"count": -1}),
        Payload(good.arrays, {"count": 11}),
        Payload(good.arrays, {"count": 2**40}),
        Payload(good.arrays, {"count": "10"}),
        Payload({**good.arrays, "positions": np.full(3, 255, np.uint8)}, good.fields),
        Payload({**good.arrays, "positions": np.zeros((2, 2), np.uint8)}, good.fields),
        Payload({**good.arrays, "values": np.zeros(11, np.float32)}, good.fields),
        Payload({**good.arrays, "values": np.zeros(10, np.int64)}, good.fields),
    ]
    sharing.check(good, model)
    for payload in hostile:
        with pytest.raises(MessageError):
            sharing.check(payload, model)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40), st.integers(-1, 110))
def test_arbitrary_bytes_are_decoded_or_rejected(code: bytes, count: int) -> None:
    model = np.zeros(100, np.float32)
    sharing = started(JWINS(), model)
    arrays = {"positions": np.frombuffer(code, np.uint8), "values": np.ones(max(0, count), np.float32)}
    payload = Payload(arrays, {"count": count})
    try:
        sharing.check(payload, model)
    except MessageError:
        return
    assert np.isfinite(sharing.merge(model, {1: payload}, {1: 0.5})).all()


# Complete runs


def experiment(**changed: Any) -> Experiment:
    described: dict[str, Any] = {
        "nodes": 4,
        "seed": 5,
        "algorithm": {"name": "dpsgd", "rounds": 4},
        "sharing": {"name": "jwins"},
        "topology": {"name": "regular", "degree": 2, "dynamic": True},
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "evaluation": {"every": 0},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**described, **changed})


def test_both_engines_are_bit_identical_and_keep_to_the_budget(tmp_path: Path) -> None:
    described = experiment(sharing={"name": "jwins", "fractions": [0.1]})
    full = experiment(sharing={"name": "full"})
    runs = [e.run(tmp_path) for e in (described, dataclasses.replace(described, engine="processes"), full)]
    assert np.array_equal(models_of(runs[0]), models_of(runs[1]))
    sent = [run.summary["bytes_sent"]["total"] for run in runs]
    assert sent[0] == sent[1]
    assert 0.1 < sent[0] / sent[2] < 0.13


def test_on_a_changing_graph_all_coefficients_give_the_result_of_full_sharing(tmp_path: Path) -> None:
    runs = [experiment(sharing=s).run(tmp_path) for s in ({"name": "jwins", "fractions": [1.0]}, {"name": "full"})]
    np.testing.assert_allclose(models_of(runs[0]), models_of(runs[1]), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "expected_error"),
    [
        ({"wavelet": "sim2"}, "wavelet = 'sim2': unknown; did you mean 'sym2'?"),
        ({"wavelet": "dmey"}, "wavelet = 'dmey': unknown"),
        ({"fractions": []}, "fractions = \\[\\]: expected at least one"),
        ({"fractions": [0.1, 0.0]}, "number above 0 and at most 1"),
        ({"level": 0}, "integer at least 1"),
        ({"values": "float17"}, "did you mean 'float16'"),
    ],
)
def test_invalid_options_are_rejected_when_the_experiment_is_loaded(
    options: dict[str, Any], expected_error: str
) -> None:
    with pytest.raises(ExperimentError, match=expected_error):
        experiment(sharing={"name": "jwins", **options})


def test_codecs_are_named_in_the_experiment() -> None:
    described = experiment(sharing={"name": "jwins", "values": "float16", "indices": {"name": "raw"}})
    assert described.sharing.build() == JWINS(values=Float16(), indices=Raw())
    assert Experiment.from_table(described.to_table()).sharing == described.sharing
