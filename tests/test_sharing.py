"""Every sharing keeps the contract, and the conformance suite detects sharings that do not."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.compression.compressors import QuantizedCompressor, RandomCompressor, TopKCompressor
from shoal.compression.floats import BFloat16
from shoal.compression.indices import Bitmap
from shoal.compression.quantizers import Int8
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.sharing import SHARINGS
from shoal.sharing.full import FullSharing
from shoal.testing import check_sharing
from shoal.types import Params

# Each name of the registry, with tables as an experiment writes them, and whether it promises an average.
CASES: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "full": [({}, True)],
    # The smallest models here have one parameter, of which a fraction is none: for fractions see the tests of each.
    "random": [({"fraction": 1.0}, True), ({"fraction": 1.0, "values": BFloat16()}, False)],
    "topk": [({"fraction": 1.0}, True), ({"fraction": 1.0, "values": Int8(), "indices": Bitmap()}, False)],
    "choco": [
        ({"compressor": TopKCompressor(1.0)}, True),
        ({"gamma": 1.0, "compressor": RandomCompressor(1.0)}, True),
        ({"compressor": QuantizedCompressor()}, False),
    ],
    "deepsqueeze": [({"compressor": TopKCompressor(1.0)}, True), ({}, False)],
    "float16": [({}, False)],
    "bfloat16": [({}, False)],
    "int8": [({}, False), ({"block": 1, "unbiased": False}, True)],
    "qsgd": [({}, False), ({"levels": 7, "bucket": 3}, False)],
    "jwins": [({"fractions": (1.0,)}, True), ({"fractions": (1.0,), "values": BFloat16()}, False)],
    "powergossip": [({}, True), ({"rank": 3}, True)],
    "data": [({}, True)],
}


def maker(name: str, table: dict[str, Any]) -> Callable[[], Any]:
    module, cls = SHARINGS[name].split(":")
    return lambda: getattr(importlib.import_module(module), cls)(**table)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1001])
@pytest.mark.parametrize(("name", "table", "averages"), [(n, *case) for n in CASES for case in CASES[n]])
def test_every_sharing_conforms(name: str, table: dict[str, Any], averages: bool, size: int) -> None:
    check_sharing(maker(name, table), size, seed=3, averages=averages)


def test_no_sharing_is_left_out() -> None:
    assert CASES.keys() | {"secure"} == SHARINGS.keys()  # that one talks, which takes nodes: tests/test_secure.py


# Full sharing

vectors = hnp.arrays(np.float32, 6, elements=st.floats(-100, 100, width=32))


@given(st.lists(vectors, min_size=1, max_size=5), st.data())
def test_full_sharing_merges_the_weighted_average(models: list[Params], data: st.DataObject) -> None:
    own, *others = models
    shares = data.draw(
        st.lists(st.floats(0, 1), min_size=len(models), max_size=len(models)).filter(lambda s: sum(s) > 0.1)
    )
    weights = [share / sum(shares) for share in shares]
    received = {peer: Payload({"params": model}) for peer, model in enumerate(others)}
    merged = FullSharing().merge(own, received, dict(enumerate(weights[1:])))
    expected = np.average(np.stack(models).astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(merged, expected, atol=1e-3)


def test_full_sharing_sends_the_model_without_a_copy() -> None:
    params = np.ones(4, np.float32)
    assert FullSharing().outgoing(params, 0).arrays["params"] is params


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"params": np.zeros(3, np.float32)},
        {"params": np.zeros(4, np.float64)},
        {"params": np.zeros((2, 2), np.float32)},
    ],
    ids=["none", "short", "float64", "matrix"],
)
def test_full_sharing_rejects_invalid_payloads_with_the_expected_form(arrays: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="expected one float32 vector 'params' of 4 values"):
        FullSharing().check(Payload(arrays), np.zeros(4, np.float32))


# The suite catches


class WritesIntoItsModel(FullSharing):
    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        params.flags.writeable = True
        params *= 2
        return super().merge(params, received, weights)


class WritesIntoPayloads(FullSharing):
    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        merged = super().merge(params, received, weights)
        for payload in received.values():
            array = payload.arrays["params"]
            if array.base is None:
                array.flags.writeable = True
                array[0] = 7
        return merged


class CopiesFirst(WritesIntoPayloads):
    def outgoing(self, params: Params, round: int) -> Payload:
        return Payload({"params": params.copy()})


class GivesItsModelBack(FullSharing):
    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        return params


class GivesDoubles(FullSharing):
    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        return super().merge(params, received, weights).astype(np.float64)  # type: ignore[return-value]


class GivesAMatrix(FullSharing):
    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        return super().merge(params, received, weights).reshape(1, -1)


class DependsOnOrder(FullSharing):
    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        merged = super().merge(params, received, weights)
        for payload in received.values():
            merged = (merged + payload.arrays["params"]) / np.float32(2)
        return merged


class DependsOnChance(FullSharing):
    chance = itertools.count()

    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        return super().merge(params, received, weights) + np.float32(next(self.chance) * 1e-5)


class SendsVaryingFields(FullSharing):
    chance = itertools.count()

    def outgoing(self, params: Params, round: int) -> Payload:
        return Payload({"params": params}, {"mood": next(self.chance)})


class SendsSomethingElseToEach(FullSharing):
    """Not wrong: a function of the peer is as good as one payload."""

    def outgoing(self, params: Params, round: int) -> Any:
        return lambda peer: Payload({"params": params}, {"to": peer})


class SendsComplexNumbers(FullSharing):
    def outgoing(self, params: Params, round: int) -> Payload:
        return Payload({"params": params.astype(np.complex64)})


class SendsAnArray(FullSharing):
    def outgoing(self, params: Params, round: int) -> Any:
        return lambda peer: params


class SendsAList(FullSharing):
    def outgoing(self, params: Params, round: int) -> Payload:
        return Payload({"params": params}, {"sizes": [1, 2]})  # type: ignore[dict-item]


class SendsALongName(FullSharing):
    def outgoing(self, params: Params, round: int) -> Payload:
        return Payload({"params": params, "p" * 65: params})


class Shrinks(FullSharing):
    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        merged = super().merge(params, received, weights)
        return merged * np.float32(0.9) if received else merged


class ForgetsItselfWhenAlone(FullSharing):
    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        return super().merge(params, received, weights) if received else np.zeros_like(params)


class ChecksNothing(FullSharing):
    def check(self, payload: Payload, params: Params) -> None:
        """Anything goes."""


class ChecksWithTheWrongError(FullSharing):
    def check(self, payload: Payload, params: Params) -> None:
        payload.arrays["params"]


class NeedsAFieldItDoesNotCheck(FullSharing):
    def outgoing(self, params: Params, round: int) -> Payload:
        return Payload({"params": params}, {"scale": 1.0})

    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        scaled = {p: Payload({"params": m.arrays["params"] * m.fields["scale"]}) for p, m in received.items()}
        return super().merge(params, scaled, weights)


class NeedsNumbersItDoesNotCheck(FullSharing):
    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        for payload in received.values():
            int(payload.arrays["params"].sum())
        return super().merge(params, received, weights)


class SendsNumbersThatItDoesNotCheck(FullSharing):
    def outgoing(self, params: Params, round: int) -> Payload:
        int(params.sum())
        return super().outgoing(params, round)


class KeepsSentPayloads(FullSharing):
    def start(self, params: Params) -> None:
        self.last = params.copy()

    def outgoing(self, params: Params, round: int) -> Payload:
        self.last = params + self.last * np.float32(0.5)
        return Payload({"params": self.last})


class KeepsReceivedPayloads(FullSharing):
    def start(self, params: Params) -> None:
        self.times = 0

    def merge(self, params: Params, received: Mapping[int, Payload], weights: Mapping[int, float]) -> Params:
        self.times += bool(received)
        return super().merge(params, received, weights if self.times % 2 else {p: w / 2 for p, w in weights.items()})


class RestoresAPart(KeepsReceivedPayloads):
    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """It forgets."""


@pytest.mark.parametrize(
    ("sharing", "problem"),
    [
        (WritesIntoItsModel, "merge wrote into its argument"),
        (CopiesFirst, "wrote into 'params' of a received payload"),
        (GivesItsModelBack, "expected a new array"),
        (GivesDoubles, "returned float64; expected float32"),
        (GivesAMatrix, r"returned shape \(1, 100\)"),
        (DependsOnOrder, "the order of `received` changes the result"),
        (DependsOnChance, "two results for equal models and payloads"),
        (SendsVaryingFields, "sends different fields"),
        (SendsComplexNumbers, "'params' is <c8, which the wire format lacks"),
        (SendsAnArray, "outgoing returned a ndarray; expected a Payload"),
        (SendsAList, "field 'sizes' is a list"),
        (SendsALongName, "cannot be encoded and decoded"),
        (Shrinks, "must keep the mean of all models"),
        (ForgetsItselfWhenAlone, "merging no payloads must keep the model"),
        (ChecksNothing, "check accepted a payload with no array 'params'"),
        (ChecksWithTheWrongError, "raised KeyError for a payload with no array 'params'; expected MessageError"),
        (NeedsAFieldItDoesNotCheck, "merge raised KeyError after check accepted a payload with no field 'scale'"),
        (NeedsNumbersItDoesNotCheck, "merge raised ValueError after check accepted a payload with nan in 'params'"),
        (SendsNumbersThatItDoesNotCheck, "the next outgoing raised ValueError after .* nan in 'params'"),
        (
            KeepsSentPayloads,
            "a new sharing after a round sends different 'params'; a sharing that keeps .* needs state",
        ),
        (KeepsReceivedPayloads, "a new sharing after a round merges to another model, .* needs state"),
        (
            RestoresAPart,
            "restored from its state.. merges to another model, .* must hold everything that the next round depends on",
        ),
    ],
)
def test_the_suite_catches_a_sharing_that(sharing: type[FullSharing], problem: str) -> None:
    averages = not issubclass(sharing, KeepsSentPayloads | KeepsReceivedPayloads)
    with pytest.raises(AssertionError, match=problem):
        check_sharing(sharing, averages=averages)


def test_the_suite_catches_a_maker_that_gives_one_instance_twice() -> None:
    one = FullSharing()
    with pytest.raises(AssertionError, match="expected a new one"):
        check_sharing(lambda: one)


@settings(max_examples=10)
@given(st.integers(1, 50), st.integers(0, 2**32))
def test_the_suite_accepts_sharings_that_keep_the_contract(size: int, seed: int) -> None:
    check_sharing(SendsSomethingElseToEach, size, seed)
    check_sharing(Shrinks, size, seed, averages=False)
