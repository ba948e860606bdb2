"""Compressed sharings merge or reject every payload, and never fail."""

from __future__ import annotations

import math
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conftest import models_of
from ring_exchange import MAKERS, SEED, experiment, frozen, payload_of
from shoal.compression.compressors import (
    QuantizedCompressor,
    TopKCompressor,
)
from shoal.compression.indices import Raw
from shoal.compression.quantizers import QSGD, Int8
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.sharing import quantized
from shoal.sharing.choco import CHOCO
from shoal.sharing.deepsqueeze import DeepSqueeze
from shoal.sharing.jwins import JWINS
from shoal.sharing.payload_cache import MAX_CACHED
from shoal.sharing.powergossip import PowerGossip
from shoal.sharing.random import Random
from shoal.sharing.sharing import NodeInfo, payload_for
from shoal.sharing.topk import TopK
from shoal.types import Params


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
            _, back = (payload_for(s, 1 - i) for i, s in enumerate(payloads))
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
    arrays = []
    for _ in range(1000):
        copied = {name: array.copy() for name, array in payload.arrays.items()}
        arrays += [weakref.ref(array) for array in copied.values()]
        sharing.check(Payload(copied, dict(payload.fields)), np.zeros(100, np.float32))
    del copied
    assert sum(array() is not None for array in arrays) <= MAX_CACHED * len(payload.arrays)


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
