"""The conformance suite of sharings. Every algorithm can use a sharing that passes.

    def test_my_sharing():
        check_sharing(lambda: MySharing(alpha=0.2), size=1000)

A few nodes exchange payloads for a few rounds, directly and through the wire format. Failures are AssertionErrors that
name the round and the problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError
from shoal.message import DTYPES, MAX_ARRAYS, Message, Payload, decode
from shoal.randomness import generator
from shoal.sharing.sharing import NodeAware, NodeInfo, PayloadChecker, Sharing, payload_for
from shoal.state import Stateful
from shoal.types import NodeId, Params

NODES = 4
ROUNDS = 3
WEIGHTS = {1: 0.3, 2: 0.2, 3: 0.3}
"""Mixing weights by distance on a circle. Every node receives from every other; the matrix is symmetric and doubly
stochastic."""
TOLERANCE = 1e-4
"""For models of values around 1."""


def check_sharing(
    maker: Callable[[], Sharing],
    size: int = 100,
    seed: int = 0,
    averages: bool = True,
    agrees: bool | None = None,
    shapes: tuple[tuple[int, ...], ...] | None = None,
) -> None:
    """Assert that the sharings that `maker` makes keep their contract for models of `size` values.

    With `averages`, doubly stochastic weights must keep the mean over all nodes. With `agrees`, equal models must not
    change; its default is the value of `averages`. `shapes` are the tensors of the model; by default one vector.
    """
    if shapes is not None:
        size = sum(math.prod(shape) for shape in shapes)
    make = partial(_Exchange, maker, size, seed, shapes or ((size,),))
    _check_rounds(make, size, seed, averages)
    _check_no_payloads(make, size, seed)
    if averages if agrees is None else agrees:
        _check_equal_models(make, size, seed)
    _check_rejections(make, size, seed)
    _check_state(make, size, seed)


class _Exchange:
    """A few nodes with one sharing each, started from one model."""

    def __init__(self, maker: Callable[[], Sharing], size: int, seed: int, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.sharings = [maker() for _ in range(NODES)]
        assert len({id(s) for s in self.sharings}) == NODES, "the maker returned one instance twice; expected a new one"
        initial = _model(size, seed, NODES)
        for id_, sharing in enumerate(self.sharings):
            if isinstance(sharing, NodeAware):
                sharing.bind(NodeInfo(id_, NODES, seed, shapes))
            with _Untouched(initial, "start"):
                sharing.start(initial)

    def payloads(self, models: list[Params], round: int) -> dict[NodeId, dict[NodeId, Payload]]:
        """The payloads of one round, by receiver and sender."""
        sent: dict[NodeId, dict[NodeId, Payload]] = {node: {} for node in range(NODES)}
        for sender, sharing in enumerate(self.sharings):
            with _Untouched(models[sender], f"outgoing of round {round}"):
                outgoing = sharing.outgoing(models[sender], round)
                for receiver in _others(sender):
                    payload = payload_for(outgoing, receiver)
                    _check_payload(payload, round)
                    sent[receiver][sender] = payload.frozen()
        return {receiver: dict(sorted(payloads.items())) for receiver, payloads in sent.items()}

    def merged(self, models: list[Params], received: Mapping[NodeId, Mapping[NodeId, Payload]]) -> list[Params]:
        return [
            self.sharings[node].merge(models[node], received[node], {p: _weight(node, p) for p in received[node]})
            for node in range(NODES)
        ]


def _check_rounds(make: Callable[[], _Exchange], size: int, seed: int, averages: bool) -> None:
    """Compare three equal groups of nodes: payloads arrive directly, through the wire format, or in another order."""
    direct, over_wire, reordered = (make() for _ in range(3))
    models = [_model(size, seed, node) for node in range(NODES)]
    for round in range(ROUNDS):
        received = direct.payloads(models, round)
        decoded = _through_the_wire(over_wire.payloads(models, round), round)
        _check_same(received, decoded, round)
        in_other_order = {node: _reversed(p) for node, p in reordered.payloads(models, round).items()}
        with _UntouchedPayloads(received, round):
            merged = _checked_merge(direct, models, received, round)
        for node, (model, other) in enumerate(zip(merged, over_wire.merged(models, decoded), strict=True)):
            assert np.array_equal(model, other), (
                f"round {round}, node {node}: merge returned two results for equal models and payloads, "
                f"{_difference(model, other)} apart; it must depend on nothing else"
            )
        for node, (model, other) in enumerate(zip(merged, reordered.merged(models, in_other_order), strict=True)):
            assert _close(model, other), (
                f"round {round}, node {node}: the order of `received` changes the result by {_difference(model, other)}"
            )
        if averages:
            before, after = np.mean(models, axis=0), np.mean(merged, axis=0)
            assert _close(before, after), (
                f"round {round}: doubly stochastic weights must keep the mean of all models; "
                f"it moved by {_difference(before, after)}"
            )
        models = [_frozen(m + _model(size, seed + 1 + round, node)) for node, m in enumerate(merged)]


def _checked_merge(
    exchange: _Exchange, models: list[Params], received: Mapping[NodeId, Mapping[NodeId, Payload]], round: int
) -> list[Params]:
    kept = [model.copy() for model in models]
    merged = exchange.merged(models, received)
    for node, (result, model) in enumerate(zip(merged, models, strict=True)):
        where = f"round {round}, node {node}"
        _check_vector(result, model, where)
        assert not np.shares_memory(result, model), f"{where}: merge returned its argument; expected a new array"
        for payload in received[node].values():
            for name, array in payload.arrays.items():
                assert not np.shares_memory(result, array), f"{where}: merge returned memory of a payload, {name!r}"
        assert np.array_equal(model, kept[node]), f"{where}: merge wrote into its argument"
        assert not model.flags.writeable, f"{where}: merge made the model writable"
    return merged


def _check_no_payloads(make: Callable[[], _Exchange], size: int, seed: int) -> None:
    exchange = make()
    model = _model(size, seed, 0)
    exchange.payloads([model] * NODES, 0)
    kept = exchange.sharings[0].merge(model, {}, {})
    _check_vector(kept, model, "nothing received")
    assert _close(kept, model), f"merging no payloads must keep the model; it moved by {_difference(kept, model)}"


def _check_state(make: Callable[[], _Exchange], size: int, seed: int) -> None:
    """New nodes, restored after a round if they have a state, must continue like the nodes that they replace."""
    original, resumed = make(), make()
    stateful = all(isinstance(s, Stateful) for s in original.sharings)
    models = [_model(size, seed, node) for node in range(NODES)]
    models = [_frozen(m) for m in original.merged(models, original.payloads(models, 0))]
    for old, new in zip(original.sharings, resumed.sharings, strict=True):
        if isinstance(old, Stateful) and isinstance(new, Stateful):
            new.restore(_copied(old.state()))
    if stateful:
        who, why = "a sharing restored from its state()", "state() must hold everything that the next round depends on"
    else:
        who = "a new sharing after a round"
        why = "a sharing that keeps something between rounds needs state() and restore()"
    for round in range(1, ROUNDS):
        received, received_anew = original.payloads(models, round), resumed.payloads(models, round)
        _check_same(received, received_anew, round, who, why)
        merged = original.merged(models, received)
        for node, (model, other) in enumerate(zip(merged, resumed.merged(models, received_anew), strict=True)):
            assert np.array_equal(model, other), (
                f"round {round}, node {node}: {who} merges to another model, {_difference(model, other)} apart; {why}"
            )
        models = [_frozen(m + _model(size, seed + 1 + round, node)) for node, m in enumerate(merged)]


def _copied(state: Any) -> Any:
    """Copy a state as a checkpoint does. Raises AssertionError for anything but plain data."""
    if isinstance(state, dict):
        return {_copied(key): _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        items = [_copied(value) for value in state]
        return tuple(items) if isinstance(state, tuple) else items
    if isinstance(state, np.ndarray):
        return state.copy()
    assert state is None or isinstance(state, bool | int | float | str), (
        f"state() holds a {type(state).__name__}; expected arrays and plain values"
    )
    return state


def _check_equal_models(make: Callable[[], _Exchange], size: int, seed: int) -> None:
    exchange = make()
    model = _model(size, seed, 0)
    for round in range(ROUNDS):
        received = exchange.payloads([model] * NODES, round)
        for node, merged in enumerate(exchange.merged([model] * NODES, received)):
            assert _close(merged, model), (
                f"round {round}, node {node}: all nodes have equal models, and merging must keep them; "
                f"it moved by {_difference(merged, model)}"
            )


def _check_rejections(make: Callable[[], _Exchange], size: int, seed: int) -> None:
    exchange = make()
    model = _model(size, seed, 0)
    sharing, payload = exchange.sharings[0], exchange.payloads([model] * NODES, 0)[0][1]
    if not isinstance(sharing, PayloadChecker):
        return
    sharing.check(payload, model)
    for what, malformed in _malformed(payload):
        assert _rejects(sharing, malformed, model, what), f"check accepted a payload with {what}; expected MessageError"
    for what, unusual in _unusual(payload):
        if not _rejects(sharing, unusual, model, what):
            _check_merges(make(), unusual, size, seed, what)


def _rejects(sharing: PayloadChecker, payload: Payload, model: Params, what: str) -> bool:
    try:
        sharing.check(payload, model)
    except MessageError:
        return True
    except Exception as error:
        raise AssertionError(
            f"check raised {type(error).__name__} for a payload with {what}; expected MessageError"
        ) from error
    return False


def _check_merges(exchange: _Exchange, payload: Payload, size: int, seed: int, what: str) -> None:
    """Assert that a node can merge a payload that `check` accepted, and send afterwards."""
    models = [_model(size, seed, node) for node in range(NODES)]
    received = exchange.payloads(models, 0)
    step = "merge"
    try:
        with np.errstate(all="ignore"):
            weights = {peer: _weight(0, peer) for peer in received[0]}
            merged = exchange.sharings[0].merge(models[0], {**received[0], 1: payload}, weights)
            _check_vector(merged, models[0], f"a payload with {what}")
            step = "the next outgoing"
            outgoing = exchange.sharings[0].outgoing(_frozen(merged), 1)
            if not isinstance(outgoing, Payload):
                for peer in _others(0):
                    outgoing(peer)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{step} raised {type(error).__name__} after check accepted a payload with {what}; "
            "check must reject a payload that cannot be merged, with MessageError"
        ) from error


def _unusual(payload: Payload) -> Iterator[tuple[str, Payload]]:
    """The payload without each field, with another value of each field, and with extreme values in each array."""
    for name, value in payload.fields.items():
        yield f"no field {name!r}", Payload(payload.arrays, {k: v for k, v in payload.fields.items() if k != name})
        for other in ("", "1", -1, 2**62, 0.5, math.nan, math.inf, True):
            if type(other) is not type(value) or other != value:
                yield f"field {name!r} = {other!r}", payload.with_field(name, other)
    for name, array in payload.arrays.items():
        if array.dtype.kind == "f":
            largest = np.finfo(array.dtype).max
            extremes: list[Any] = [np.nan, np.inf, -np.inf, largest, -largest]
        else:
            limits = np.iinfo(array.dtype if array.dtype.kind in "iu" else np.uint8)
            extremes = [limits.min, limits.max]
        for extreme in extremes:
            changed = np.full_like(array, extreme)
            changed.setflags(write=False)
            yield f"{extreme} in {name!r}", Payload({**payload.arrays, name: changed}, payload.fields)


def _malformed(payload: Payload) -> Iterator[tuple[str, Payload]]:
    """The payload without each of its arrays, and with another type or size of each array."""
    for name, array in payload.arrays.items():
        longer = np.concatenate([array.reshape(-1), np.zeros(1, array.dtype)])
        other = np.dtype(np.float32 if array.dtype == np.float64 else np.float64)
        yield f"no array {name!r}", Payload({k: v for k, v in payload.arrays.items() if k != name}, payload.fields)
        for what, replaced in (
            (f"{name!r} as {other}", array.astype(other)),
            (f"a longer {name!r}", longer),
            (f"a shorter {name!r}", longer[:-2]),
            (f"{name!r} with one more axis", array.reshape(1, *array.shape)),
        ):
            if replaced.shape != array.shape or replaced.dtype != array.dtype:
                yield what, Payload({**payload.arrays, name: replaced}, payload.fields)


def _check_payload(payload: object, round: int) -> None:
    assert isinstance(payload, Payload), (
        f"round {round}: outgoing returned a {type(payload).__name__}; expected a Payload"
    )
    assert len(payload.arrays) <= MAX_ARRAYS, f"round {round}: {len(payload.arrays)} arrays; at most {MAX_ARRAYS}"
    for name, array in payload.arrays.items():
        assert isinstance(array, np.ndarray), f"round {round}: {name!r} is a {type(array).__name__}, not an array"
        assert array.dtype.str in DTYPES, (
            f"round {round}: {name!r} is {array.dtype.str}, which the wire format lacks; expected one of {DTYPES}"
        )
    for key, value in payload.fields.items():
        assert isinstance(value, bool | int | float | str), (
            f"round {round}: field {key!r} is a {type(value).__name__}; expected a plain value"
        )


def _check_vector(result: object, model: Params, where: str) -> None:
    assert isinstance(result, np.ndarray), f"{where}: merge returned a {type(result).__name__}; expected an array"
    assert result.dtype == np.float32, f"{where}: merge returned {result.dtype}; expected float32"
    assert result.shape == model.shape, f"{where}: merge returned shape {result.shape}; expected {model.shape}"


def _check_same(
    expected: Mapping[NodeId, Mapping[NodeId, Payload]],
    found: Mapping[NodeId, Mapping[NodeId, Payload]],
    round: int,
    who: str = "another sharing in the same state",
    why: str = "outgoing must depend on nothing else",
) -> None:
    for receiver, payloads in expected.items():
        for sender, payload in payloads.items():
            other = found[receiver][sender]
            where = f"round {round}, from {sender} to {receiver}"
            assert dict(other.fields) == dict(payload.fields), (
                f"{where}: {who} sends different fields, {dict(payload.fields)} and {dict(other.fields)}; {why}"
            )
            assert other.arrays.keys() == payload.arrays.keys(), f"{where}: {who} sends other arrays; {why}"
            for name, array in payload.arrays.items():
                assert _identical(other.arrays[name], array), f"{where}: {who} sends different {name!r}; {why}"


def _through_the_wire(
    received: Mapping[NodeId, Mapping[NodeId, Payload]], round: int
) -> dict[NodeId, dict[NodeId, Payload]]:
    try:
        return {
            node: {peer: _decoded(Message(peer, "model", round, payload)) for peer, payload in payloads.items()}
            for node, payloads in received.items()
        }
    except MessageError as error:
        raise AssertionError(f"round {round}: a payload cannot be encoded and decoded: {error}") from error


def _decoded(message: Message) -> Payload:
    return decode([bytes(frame) for frame in message.frames()]).payload


class _Untouched:
    """Asserts that a model stays read-only and unchanged."""

    def __init__(self, model: Params, what: str) -> None:
        self._model = model
        self._what = what

    def __enter__(self) -> None:
        self._before = self._model.copy()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            assert not self._model.flags.writeable, f"{self._what} made the model writable"
            assert np.array_equal(self._model, self._before), f"{self._what} wrote into the model"


class _UntouchedPayloads:
    """Asserts that received payloads stay unchanged: other nodes share their arrays."""

    def __init__(self, received: Mapping[NodeId, Mapping[NodeId, Payload]], round: int) -> None:
        self._arrays = [
            (n, a) for payloads in received.values() for p in payloads.values() for n, a in p.arrays.items()
        ]
        self._round = round

    def __enter__(self) -> None:
        self._before = [array.copy() for _, array in self._arrays]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for (name, array), before in zip(self._arrays, self._before, strict=True):
            assert kind is not None or _identical(array, before), (
                f"round {self._round}: merge wrote into {name!r} of a received payload"
            )


def _reversed(payloads: Mapping[NodeId, Payload]) -> dict[NodeId, Payload]:
    return dict(reversed(list(payloads.items())))


def _others(node: NodeId) -> list[NodeId]:
    return [peer for peer in range(NODES) if peer != node]


def _weight(node: NodeId, peer: NodeId) -> float:
    return WEIGHTS[(peer - node) % NODES]


def _model(size: int, seed: int, node: NodeId) -> Params:
    return _frozen(generator(seed, "check sharing", node).standard_normal(size, np.float32))


def _frozen(params: Params) -> Params:
    params.setflags(write=False)
    return params


def _identical(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _close(one: Params, other: Params) -> bool:
    return bool(np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE))


def _difference(one: Params, other: Params) -> float:
    return float(np.abs(one - other).max())
