"""The wire format survives a round trip, rejects malformed messages, and counts the bytes on the wire."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from message_frames import RUN, frames_of, header, messages, model, scalars, with_header
from shoal.errors import MessageError
from shoal.message import (
    MAX_ARRAYS,
    MAX_HEADER_BYTES,
    WIRE_VERSION,
    Message,
    Payload,
    address,
    decode,
    framed,
)

# Round trips


@given(messages)
def test_decoding_inverts_encoding(message: Message) -> None:
    decoded = decode(frames_of(message))
    for attribute in ("sender", "kind", "round", "run", "wire_size"):
        assert getattr(decoded, attribute) == getattr(message, attribute)
    assert repr(dict(decoded.payload.fields)) == repr(dict(message.payload.fields))  # repr: NaN differs from itself
    assert list(decoded.payload.arrays) == list(message.payload.arrays)
    for name, array in message.payload.arrays.items():
        other = decoded.payload.arrays[name]
        assert (other.dtype, other.shape) == (array.dtype, array.shape)
        assert other.tobytes() == array.tobytes()
        assert not other.flags.writeable


@given(messages)
def test_a_message_is_as_long_as_its_frames(message: Message) -> None:
    assert message.wire_size == sum(framed(len(frame)) for frame in (address(9), *frames_of(message)))


def test_the_header_follows_the_format() -> None:
    assert msgspec.msgpack.decode(frames_of(model())[0]) == header()


def test_arrays_travel_without_a_copy_on_either_side() -> None:
    array = np.arange(1000, dtype=np.float32)
    _, frame = Message(0, "model", 0, Payload({"params": array})).frames()
    assert np.shares_memory(np.frombuffer(frame, np.float32), array)
    decoded = decode([frames_of(model())[0], frame[:20]])
    assert np.shares_memory(decoded.payload.arrays["params"], array)


def test_an_array_in_pieces_travels_in_order() -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4).T[::2]
    decoded = decode(frames_of(Message(0, "model", 0, Payload({"x": array}))))
    assert np.array_equal(decoded.payload.arrays["x"], array)


# A snapshot


def test_a_frozen_payload_does_not_change_with_the_array_it_was_made_of() -> None:
    array = np.zeros(4, np.float32)
    payload = Payload({"params": array}).frozen()
    array[:] = 1
    assert not payload.arrays["params"].any()
    with pytest.raises(ValueError, match="read-only"):
        payload.arrays["params"][0] = 2


def test_a_read_only_payload_is_shared_and_not_copied() -> None:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    payload = Payload({"params": array})
    assert payload.frozen() is payload


# Malformed messages are rejected with one kind of error


def decodes_or_is_rejected(frames: list[bytes]) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(decode(frames), Message)


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_garbage_is_rejected(frames: list[bytes]) -> None:
    decodes_or_is_rejected(frames)


@given(messages, st.data())
def test_a_flipped_byte_gives_another_message_or_is_rejected(message: Message, data: st.DataObject) -> None:
    frames = frames_of(message)
    place = data.draw(st.integers(0, len(frames[0]) - 1))
    changed = bytearray(frames[0])
    changed[place] ^= data.draw(st.integers(1, 255))
    decodes_or_is_rejected([bytes(changed), *frames[1:]])


@given(messages, st.data())
def test_a_header_cut_short_is_rejected(message: Message, data: st.DataObject) -> None:
    frames = frames_of(message)
    cut = data.draw(st.integers(0, len(frames[0]) - 1))
    with pytest.raises(MessageError):
        decode([frames[0][:cut], *frames[1:]])


junk = st.recursive(
    st.none() | scalars | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(["version", "run", "sender", "kind", "round", "fields", "arrays"]), junk)
def test_a_header_with_any_value_in_a_place_gives_a_message_or_is_rejected(key: str, value: Any) -> None:
    decodes_or_is_rejected(with_header(header(**{key: value})))


@given(st.lists(st.integers(0, 2**48 - 1), max_size=8))
def test_a_wrong_shape_is_rejected(shape: list[int]) -> None:
    if shape != [5]:
        with contextlib.suppress(MessageError):
            decoded = decode(with_header(header(arrays=[["params", "<f4", shape]])))
            assert decoded.payload.arrays["params"].size == 5


@pytest.mark.parametrize("shape", [[0, 2**47, 2**47], [2**47, 0, 2**47, 2**47, 2**47]])
def test_an_empty_shape_in_many_dimensions_is_rejected(shape: list[int]) -> None:
    with pytest.raises(MessageError, match="shape"):
        decode([with_header(header(arrays=[["params", "<f4", shape]]))[0], b""])


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (header(version=WIRE_VERSION + 1), f"wire version {WIRE_VERSION + 1}, expected {WIRE_VERSION}"),
        (header(run="another"), "a message of another run"),
        (header(run="x" * 17), "the header does not match the schema"),
        (header(sender=-1), "the header does not match the schema"),
        (header(sender=True), "the header does not match the schema"),
        (header(round=2**48), "the header does not match the schema"),
        (header(kind="k" * 65), "the header does not match the schema"),
        (header(fields={"a": [1]}), "the header does not match the schema"),
        (header(fields={str(i): i for i in range(65)}), "the header does not match the schema"),
        (header(arrays=[["params", "<f4", [-5]]]), "the header does not match the schema"),
        (header(arrays=[["params", "<f4", [1] * 9]]), "the header does not match the schema"),
        (header(arrays=[["params", ">f4", [5]]]), "has dtype '>f4', expected one of"),
        (header(arrays=[["params", "|O", [5]]]), "has dtype '|O', expected one of"),
        (header(arrays=[["params", "<c8", [5]]]), "has dtype '<c8', expected one of"),
        (header(arrays=[["params", "<f4", [6]]]), "of shape (6,) comes with 20 bytes"),
        (header(arrays=[["params", "<f8", [5]]]), "of shape (5,) comes with 20 bytes"),
        (header(arrays=[]), "1 array frames, the header names 0"),
        (header(arrays=[["a", "<f4", [5]], ["b", "<f4", [5]]]), "1 array frames, the header names 2"),
        (header(arrays=[["a", "|u1", []]] * (MAX_ARRAYS + 1)), "the header does not match the schema"),
        (header()[:-1], "the header does not match the schema"),
        ([*header(), "1"], "the header does not match the schema"),
        ([*header(), -1], "the header does not match the schema"),
        ([*header(), 1, 1], "the header does not match the schema"),
        ({"version": WIRE_VERSION}, "the header does not match the schema"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_header_is_rejected_with_the_reason(changed: Any, problem: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode(with_header(changed), RUN)
    assert problem in str(caught.value)


def test_two_arrays_of_one_name_are_rejected() -> None:
    frame = frames_of(model())[1]
    twice = msgspec.msgpack.encode(header(arrays=[["params", "<f4", [5]]] * 2))
    with pytest.raises(MessageError, match="two arrays of one name"):
        decode([twice, frame, frame])


@pytest.mark.parametrize("change", [lambda f: f[:-1], lambda f: [*f, b""], lambda f: f[::-1], lambda f: []])
def test_frames_too_few_too_many_or_out_of_order_are_rejected(change: Any) -> None:
    with pytest.raises(MessageError):
        decode(change(frames_of(model())))


@given(st.integers(0, 40).filter(lambda n: n != 20))
def test_an_array_frame_of_another_length_is_rejected(length: int) -> None:
    with pytest.raises(MessageError, match=f"comes with {length} bytes"):
        decode([frames_of(model())[0], b"x" * length])


def test_a_header_beyond_the_limit_is_not_even_read() -> None:
    with pytest.raises(MessageError, match=f"at most {MAX_HEADER_BYTES}"):
        decode([b"\x00" * (MAX_HEADER_BYTES + 1)])


def test_trailing_bytes_after_the_header_are_rejected() -> None:
    frames = frames_of(model())
    with pytest.raises(MessageError):
        decode([frames[0] + b"\x00", *frames[1:]])


# The bytes that travel


class Relay:
    """Hands bytes on between a client and a server, and counts those of the client."""

    def __init__(self, port: int) -> None:
        self.forward = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._server = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        threading.Thread(target=self._pump, args=(self._server, client, False), daemon=True).start()
        self._pump(client, self._server, True)

    def _pump(self, source: socket.socket, target: socket.socket, count: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if count:
                    self.forward += len(data)
                target.sendall(data)
        for each in (source, target):
            each.close()

    def close(self) -> None:
        self._listener.close()
        self._server.close()


@pytest.fixture
def line() -> Iterator[tuple[Any, Any, Relay]]:
    """A PUSH and a PULL socket, as nodes use them, with a relay in between."""
    context: zmq.Context[Any] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.setsockopt(zmq.RCVTIMEO, 10_000)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    relay = Relay(port)
    push.connect(f"tcp://127.0.0.1:{relay.port}")
    yield push, pull, relay
    context.destroy(linger=0)
    relay.close()


def test_wire_size_is_the_number_of_bytes_on_a_connection(line: tuple[Any, Any, Relay]) -> None:
    push, pull, relay = line

    def send(message: Message) -> None:
        push.send_multipart([address(9), *message.frames()])
        decode(pull.recv_multipart()[1:])

    def bytes_array(size: int) -> Payload:
        return Payload({"x": np.zeros(size, np.uint8)})

    send(model())  # the greeting and the handshake come before the first message
    payloads = [Payload({}), *map(bytes_array, (0, 1, 254, 255, 256, 257, 70_000))]
    payloads += [Payload({"params": np.zeros(100, np.float32), "rest": np.zeros(3, np.float64)}, {"age": 1})]
    payloads += [Payload({}, {"text": "x" * length}) for length in (150, 250, 400)]
    for payload in payloads:
        before, message = relay.forward, Message(1, "model", 0, payload)
        send(message)
        assert relay.forward - before == message.wire_size, message


def test_the_wire_size_of_many_messages_adds_up(line: tuple[Any, Any, Relay]) -> None:
    push, pull, relay = line
    totals = []
    for count in (5, 6):
        before = relay.forward
        for _ in range(count):
            push.send_multipart([address(9), *model(300).frames()])
        for _ in range(count):
            pull.recv_multipart()
        totals.append(relay.forward - before)
    assert totals[1] == 6 * model(300).wire_size


def test_the_reason_of_a_rejection_does_not_show_the_secret_of_the_run() -> None:
    frames = Message(1, "model", 0, Payload({}), "guess").frames()
    with pytest.raises(MessageError) as rejected:
        decode(frames, "secret")
    assert "secret" not in str(rejected.value)


def test_only_the_header_of_a_restarted_sender_has_an_incarnation() -> None:
    payload = Payload({"params": np.ones(5, np.float32)})
    first, second = (Message(1, "model", 3, payload, incarnation=incarnation) for incarnation in (0, 2))
    assert [decode(message.frames()).incarnation for message in (first, second)] == [0, 2]
    assert second.wire_size == first.wire_size + 1


@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=20),
    st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_a_message_is_finite_if_every_value_is(values: list[float], dtype: type) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values, dtype)
    sent = Message(0, "model", 0, Payload({"params": array, "count": np.arange(3)}))
    assert sent.is_finite == bool(np.isfinite(array).all())


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    largest = np.full(4, np.finfo(np.float32).max, np.float32)
    assert Message(0, "model", 0, Payload({"params": largest})).is_finite
