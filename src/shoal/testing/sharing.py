"""The conformance suite of sharings: run it on yours, and every algorithm can use it.

    def test_my_sharing():
        check_sharing(lambda: MySharing(alpha=0.2), size=1000)

It lets a few nodes talk for a few rounds, with their payloads sent over the wire format and back. Failures are
AssertionErrors that name the round and what was found.
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
from shoal.sharing.sharing import NodeAware, NodeInfo, PayloadChecker, Sharing
from shoal.state import Stateful
from shoal.types import NodeId, Params

NODES = 4
ROUNDS = 3
WEIGHTS = {1: 0.3, 2: 0.2, 3: 0.3}
"""By distance on a circle: everyone hears everyone, and the matrix is symmetric and doubly stochastic."""
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

    `averages` is for sharings that promise an average: with doubly stochastic weights the mean over all nodes stays
    as it is. `agrees` is for those that leave models as they are when all are equal; it goes with `averages` when not
    given. `shapes` are the tensors of the model; one vector when not given.
    """
    if shapes is not None:
        size = sum(math.prod(shape) for shape in shapes)
    talk = partial(_Talk, maker, size, seed, shapes or ((size,),))
    _check_conversation(talk, size, seed, averages)
    _check_silence(talk, size, seed)
    if averages if agrees is None else agrees:
        _check_agreement(talk, size, seed)
    _check_refusals(talk, size, seed)
    _check_state(talk, size, seed)


class _Talk:
    """Nodes with a sharing each, that have all started from one model."""

    def __init__(self, maker: Callable[[], Sharing], size: int, seed: int, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.sharings = [maker() for _ in range(NODES)]
        assert len({id(s) for s in self.sharings}) == NODES, "the maker gave one instance twice; expected a fresh one"
        initial = _model(size, seed, NODES)
        for id_, sharing in enumerate(self.sharings):
            if isinstance(sharing, NodeAware):
                sharing.bind(NodeInfo(id_, NODES, seed, shapes))
            with _Untouched(initial, "start"):
                sharing.start(initial)

    def said(self, models: list[Params], round: int) -> dict[NodeId, dict[NodeId, Payload]]:
        """What each node hears from each other: receiver, sender, payload."""
        heard: dict[NodeId, dict[NodeId, Payload]] = {node: {} for node in range(NODES)}
        for sender, sharing in enumerate(self.sharings):
            with _Untouched(models[sender], f"outgoing of round {round}"):
                outgoing = sharing.outgoing(models[sender], round)
                for receiver in _others(sender):
                    payload = outgoing if isinstance(outgoing, Payload) else outgoing(receiver)
                    _check_payload(payload, round)
                    heard[receiver][sender] = payload.frozen()
        return {receiver: dict(sorted(payloads.items())) for receiver, payloads in heard.items()}

    def merged(self, models: list[Params], heard: Mapping[NodeId, Mapping[NodeId, Payload]]) -> list[Params]:
        return [
            self.sharings[node].merge(models[node], heard[node], {peer: _weight(node, peer) for peer in heard[node]})
            for node in range(NODES)
        ]


def _check_conversation(make: Callable[[], _Talk], size: int, seed: int, averages: bool) -> None:
    """Three equal groups of nodes: one hears payloads as they were said, one off the wire, one in another order."""
    talk, over_wire, reordered = (make() for _ in range(3))
    models = [_model(size, seed, node) for node in range(NODES)]
    for round in range(ROUNDS):
        heard = talk.said(models, round)
        heard_over_wire = _through_the_wire(over_wire.said(models, round), round)
        _check_same(heard, heard_over_wire, round)
        heard_reordered = {node: _reversed(h) for node, h in reordered.said(models, round).items()}
        with _UntouchedPayloads(heard, round):
            merged = _merged_with_care(talk, models, heard, round)
        for node, (model, other) in enumerate(zip(merged, over_wire.merged(models, heard_over_wire), strict=True)):
            assert np.array_equal(model, other), (
                f"round {round}, node {node}: merge gave two results for equal models and payloads, "
                f"{_difference(model, other)} apart; it must depend on nothing else"
            )
        for node, (model, other) in enumerate(zip(merged, reordered.merged(models, heard_reordered), strict=True)):
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


def _merged_with_care(
    talk: _Talk, models: list[Params], heard: Mapping[NodeId, Mapping[NodeId, Payload]], round: int
) -> list[Params]:
    kept = [model.copy() for model in models]
    merged = talk.merged(models, heard)
    for node, (result, model) in enumerate(zip(merged, models, strict=True)):
        where = f"round {round}, node {node}"
        _check_vector(result, model, where)
        assert not np.shares_memory(result, model), f"{where}: merge gave the model it was given; expected a new one"
        for payload in heard[node].values():
            for name, array in payload.arrays.items():
                assert not np.shares_memory(result, array), f"{where}: merge gave the memory of a payload, {name!r}"
        assert np.array_equal(model, kept[node]), f"{where}: merge wrote into the model it was given"
        assert not model.flags.writeable, f"{where}: merge made the model writable"
    return merged


def _check_silence(make: Callable[[], _Talk], size: int, seed: int) -> None:
    talk = make()
    model = _model(size, seed, 0)
    talk.said([model] * NODES, 0)
    kept = talk.sharings[0].merge(model, {}, {})
    _check_vector(kept, model, "nothing received")
    assert _close(kept, model), f"merging nothing must keep the model as it is; it moved by {_difference(kept, model)}"


def _check_state(make: Callable[[], _Talk], size: int, seed: int) -> None:
    """Nodes that are made anew after a round, and restored if they can be, go on as those that they replace."""
    talk, resumed = make(), make()
    stateful = all(isinstance(s, Stateful) for s in talk.sharings)
    models = [_model(size, seed, node) for node in range(NODES)]
    models = [_frozen(m) for m in talk.merged(models, talk.said(models, 0))]
    for old, new in zip(talk.sharings, resumed.sharings, strict=True):
        if isinstance(old, Stateful) and isinstance(new, Stateful):
            new.restore(_copied(old.state()))
    if stateful:
        who, why = "a sharing restored from its state()", "state() and restore() must keep all that it depends on"
    else:
        who = "a sharing made anew after a round"
        why = "one that keeps something from round to round needs state() and restore()"
    for round in range(1, ROUNDS):
        heard, heard_anew = talk.said(models, round), resumed.said(models, round)
        _check_same(heard, heard_anew, round, who, why)
        merged = talk.merged(models, heard)
        for node, (model, other) in enumerate(zip(merged, resumed.merged(models, heard_anew), strict=True)):
            assert np.array_equal(model, other), (
                f"round {round}, node {node}: {who} merges to another model, {_difference(model, other)} away; {why}"
            )
        models = [_frozen(m + _model(size, seed + 1 + round, node)) for node, m in enumerate(merged)]


def _copied(state: Any) -> Any:
    """A state as a checkpoint would give it back; refuses what is not plain data."""
    if isinstance(state, dict):
        assert all(isinstance(key, str) for key in state), f"state() has keys that are no strings: {list(state)}"
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_copied(value) for value in state]
    if isinstance(state, np.ndarray):
        return state.copy()
    assert state is None or isinstance(state, bool | int | float | str), (
        f"state() holds a {type(state).__name__}; expected arrays and plain values"
    )
    return state


def _check_agreement(make: Callable[[], _Talk], size: int, seed: int) -> None:
    talk = make()
    model = _model(size, seed, 0)
    for round in range(ROUNDS):
        for node, merged in enumerate(talk.merged([model] * NODES, talk.said([model] * NODES, round))):
            assert _close(merged, model), (
                f"round {round}, node {node}: all nodes hold one model, and merging must give that model; "
                f"it moved by {_difference(merged, model)}"
            )


def _check_refusals(make: Callable[[], _Talk], size: int, seed: int) -> None:
    talk = make()
    model = _model(size, seed, 0)
    heard = talk.said([model] * NODES, 0)
    sharing, payload = talk.sharings[0], heard[0][1]
    if not isinstance(sharing, PayloadChecker):
        return
    sharing.check(payload, model)
    for what, broken in _broken(payload):
        assert _refused(sharing, broken, model, what), f"check let a payload with {what} pass; expected MessageError"
    for what, odd in _odd(payload):
        if not _refused(sharing, odd, model, what):
            _check_bears(make(), odd, size, seed, what)


def _refused(sharing: PayloadChecker, payload: Payload, model: Params, what: str) -> bool:
    try:
        sharing.check(payload, model)
    except MessageError:
        return True
    except Exception as error:
        raise AssertionError(
            f"check raised {type(error).__name__} for a payload with {what}; expected MessageError"
        ) from error
    return False


def _check_bears(talk: _Talk, payload: Payload, size: int, seed: int, what: str) -> None:
    """That a node which has not refused the payload can merge it, and speak afterwards."""
    models = [_model(size, seed, node) for node in range(NODES)]
    said = talk.said(models, 0)
    doing = "merge"
    try:
        with np.errstate(all="ignore"):
            merged = talk.sharings[0].merge(models[0], {**said[0], 1: payload}, {p: _weight(0, p) for p in said[0]})
            _check_vector(merged, models[0], f"a payload with {what}")
            doing = "the next outgoing"
            outgoing = talk.sharings[0].outgoing(_frozen(merged), 1)
            if not isinstance(outgoing, Payload):
                for peer in _others(0):
                    outgoing(peer)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{doing} raised {type(error).__name__} after check had let a payload with {what} pass; "
            "check must refuse with MessageError what cannot be merged"
        ) from error


def _odd(payload: Payload) -> Iterator[tuple[str, Payload]]:
    """The payload with each of its fields left out or of another value, and with extreme values in each array."""
    for name, value in payload.fields.items():
        yield f"no field {name!r}", Payload(payload.arrays, {k: v for k, v in payload.fields.items() if k != name})
        for other in ("", "1", -1, 2**62, 0.5, math.nan, math.inf, True):
            if type(other) is not type(value) or other != value:
                yield f"field {name!r} = {other!r}", Payload(payload.arrays, {**payload.fields, name: other})
    for name, array in payload.arrays.items():
        if array.dtype.kind == "f":
            largest = np.finfo(array.dtype).max
            extremes: list[Any] = [np.nan, np.inf, -np.inf, largest, -largest]
        else:
            limits = np.iinfo(array.dtype if array.dtype.kind in "iu" else np.uint8)
            extremes = [limits.min, limits.max]
        for extreme in extremes:
            changed = np.full_like(array, extreme)
            changed.flags.writeable = False
            yield f"{extreme} in {name!r}", Payload({**payload.arrays, name: changed}, payload.fields)


def _broken(payload: Payload) -> Iterator[tuple[str, Payload]]:
    """The payload with each of its arrays left out, of another type, and of another size."""
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
    assert isinstance(payload, Payload), f"round {round}: outgoing gave a {type(payload).__name__}; expected a Payload"
    assert len(payload.arrays) <= MAX_ARRAYS, f"round {round}: {len(payload.arrays)} arrays; at most {MAX_ARRAYS}"
    for name, array in payload.arrays.items():
        assert isinstance(array, np.ndarray), f"round {round}: {name!r} is a {type(array).__name__}, not an array"
        assert array.dtype.str in DTYPES, (
            f"round {round}: {name!r} is {array.dtype.str}, which the wire does not know; expected one of {DTYPES}"
        )
    for key, value in payload.fields.items():
        assert isinstance(value, bool | int | float | str), (
            f"round {round}: field {key!r} is a {type(value).__name__}; expected a plain value"
        )


def _check_vector(result: object, model: Params, where: str) -> None:
    assert isinstance(result, np.ndarray), f"{where}: merge gave a {type(result).__name__}; expected an array"
    assert result.dtype == np.float32, f"{where}: merge gave {result.dtype}; expected float32"
    assert result.shape == model.shape, f"{where}: merge gave shape {result.shape}; expected {model.shape}"


def _check_same(
    said: Mapping[NodeId, Mapping[NodeId, Payload]],
    decoded: Mapping[NodeId, Mapping[NodeId, Payload]],
    round: int,
    who: str = "another in the same state",
    why: str = "outgoing must depend on nothing else",
) -> None:
    for receiver, payloads in said.items():
        for sender, payload in payloads.items():
            other = decoded[receiver][sender]
            where = f"round {round}, from {sender} to {receiver}"
            assert dict(other.fields) == dict(payload.fields), (
                f"{where}: {who} said different fields, {dict(payload.fields)} and {dict(other.fields)}; {why}"
            )
            assert other.arrays.keys() == payload.arrays.keys(), f"{where}: {who} said other arrays; {why}"
            for name, array in payload.arrays.items():
                assert _identical(other.arrays[name], array), f"{where}: {who} said different {name!r}; {why}"


def _through_the_wire(
    heard: Mapping[NodeId, Mapping[NodeId, Payload]], round: int
) -> dict[NodeId, dict[NodeId, Payload]]:
    try:
        return {
            node: {peer: _decoded(Message(peer, "model", round, payload)) for peer, payload in payloads.items()}
            for node, payloads in heard.items()
        }
    except MessageError as error:
        raise AssertionError(f"round {round}: a payload does not survive the wire: {error}") from error


def _decoded(message: Message) -> Payload:
    return decode([bytes(frame) for frame in message.frames()]).payload


class _Untouched:
    """Asserts that a read-only model is still that afterwards."""

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
    """Asserts that nobody wrote into what was received: other nodes hold the same arrays."""

    def __init__(self, heard: Mapping[NodeId, Mapping[NodeId, Payload]], round: int) -> None:
        self._arrays = [(n, a) for payloads in heard.values() for p in payloads.values() for n, a in p.arrays.items()]
        self._round = round

    def __enter__(self) -> None:
        self._before = [array.copy() for _, array in self._arrays]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for (name, array), before in zip(self._arrays, self._before, strict=True):
            assert kind is not None or _identical(array, before), (
                f"round {self._round}: merge wrote into {name!r} of a payload that it received"
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
    params.flags.writeable = False
    return params


def _identical(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _close(one: Params, other: Params) -> bool:
    return bool(np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE))


def _difference(one: Params, other: Params) -> float:
    return float(np.abs(one - other).max())
