"""Messages and their wire format: a small header and raw arrays.

A message is one ZeroMQ multipart message: frame 0 is the address, the receiver's id in four bytes; frame 1 is the
header, MessagePack checked against a schema; each further frame is one array, its raw little-endian bytes. Nothing is
pickled. Anything that does not match the schema exactly raises `MessageError`: the receiver drops and counts it, and
continues.

    receiver  [version, run, sender, kind, round, fields, [[name, dtype, shape], …]]  bytes of array 0 …

The header of a sender that was restarted has one more item, the incarnation: how often it was restarted.

All frames except the address are equal for all receivers of a message. A transport may append a ticket to the
receiver's id: eight bytes that are not part of the message.

`Message.wire_size` is the size on the wire: the frames and the ZMTP framing of each (RFC 23: 2 bytes before a frame of
up to 255 bytes, 9 before a longer one). It does not include TCP and IP headers or encryption. Both engines use it.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError
from shoal.types import NodeId

WIRE_VERSION = 2
DTYPES = ("<f4", "<f8", "<f2", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "|b1")
MAX_ARRAYS = 64
MAX_FIELDS = 64
MAX_NAME = 64
NAME_TOO_LONG = f"kinds and names have at most {MAX_NAME} characters"
MAX_HEADER_BYTES = 64 * 1024
RUN_LENGTH = 16
"""Characters of a run's identifier: a secret that all processes of the run know, and no other process."""

Scalar: TypeAlias = bool | int | float | str

_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class Payload(msgspec.Struct, frozen=True, gc=False):
    """The content of a message: named arrays, and a few plain values."""

    arrays: Mapping[str, NDArray[Any]]
    fields: Mapping[str, Scalar] = {}

    def with_field(self, name: str, value: Scalar) -> Payload:
        """Return a payload with the same arrays and one more field; a field of that name is replaced."""
        return Payload(self.arrays, {**self.fields, name: value})

    def frozen(self) -> Payload:
        """Return this payload with read-only arrays: writable arrays are copied, others are shared."""
        arrays = self.arrays
        for array in arrays.values():
            if array.flags.writeable or not array.flags.c_contiguous:
                return Payload({name: _snapshot(a) for name, a in arrays.items()}, self.fields)
        return self


class _Array(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    name: _Name
    dtype: _Name
    shape: Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=8)]


class _Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    version: int
    run: Annotated[str, msgspec.Meta(max_length=RUN_LENGTH)]
    sender: _Natural
    kind: _Name
    round: _Natural
    fields: Annotated[dict[_Name, Scalar], msgspec.Meta(max_length=MAX_FIELDS)]
    arrays: Annotated[list[_Array], msgspec.Meta(max_length=MAX_ARRAYS)]
    incarnation: _Natural = 0


_encoder = msgspec.msgpack.Encoder()
_RECEIVER = struct.Struct("<I")
_RECEIVER_AND_TICKET = struct.Struct("<IQ")
_decoder = msgspec.msgpack.Decoder(_Header)


class Message:
    """A payload with its sender, round and kind. Immutable.

    `incarnation` is how often the sender had been restarted when it sent the message.

    One message serves all its receivers: it is encoded once, and in the simulation it is one object.
    """

    __slots__ = (
        "_header",
        "_is_finite",
        "encoded",
        "incarnation",
        "kind",
        "payload",
        "round",
        "run",
        "sender",
        "wire_size",
    )

    def __init__(
        self,
        sender: NodeId,
        kind: str,
        round: int,
        payload: Payload,
        run: str = "0" * RUN_LENGTH,
        header: bytes | memoryview | None = None,
        incarnation: int = 0,
    ) -> None:
        self.sender = sender
        self.kind = kind
        self.round = round
        self.payload = payload
        self.run = run
        self.incarnation = incarnation
        self.encoded: Any = None
        """The encoded message, which a transport stores for the next receiver."""
        self._is_finite: bool | None = None
        self._header = _header(self) if header is None else header
        self.wire_size = (
            ADDRESS_SIZE + framed(len(self._header)) + sum(framed(a.nbytes) for a in payload.arrays.values())
        )

    @property
    def is_finite(self) -> bool:
        """Whether its arrays of numbers hold neither infinities nor NaN. Computed once for all receivers."""
        if self._is_finite is None:
            self._is_finite = all(map(_is_finite, self.payload.arrays.values()))
        return self._is_finite

    def frames(self) -> list[bytes | memoryview]:
        """Return all frames after the address: the header and the bytes of each array, without copies."""
        return [self._header, *(_bytes_of(array) for array in self.payload.arrays.values())]

    def __repr__(self) -> str:
        return f"Message({self.kind!r} of round {self.round} from node {self.sender}, {self.wire_size} bytes)"


def address(to: NodeId, ticket: int | None = None) -> bytes:
    """Return the address frame of a message to `to`."""
    return _RECEIVER.pack(to) if ticket is None else _RECEIVER_AND_TICKET.pack(to, ticket)


def ticket_of(frame: bytes, receiver: NodeId) -> int | None:
    """Return the ticket in an address, if any. Raises `MessageError` if the address is not that of `receiver`."""
    ticket: int | None = None
    if len(frame) == _RECEIVER.size:
        (to,) = _RECEIVER.unpack(frame)
    elif len(frame) == _RECEIVER_AND_TICKET.size:
        to, ticket = _RECEIVER_AND_TICKET.unpack(frame)
    else:
        sizes = f"{_RECEIVER.size} or {_RECEIVER_AND_TICKET.size}"
        raise MessageError(f"an address of {len(frame)} bytes, expected {sizes}")
    if to != receiver:
        raise MessageError(f"a message for node {to}, and this is node {receiver}")
    return ticket


def decode(frames: Sequence[bytes | memoryview], run: str | None = None) -> Message:
    """Return the message in `frames`, which exclude the address. Its arrays are read-only views of them.

    `run` is the run that it must belong to.
    """
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise MessageError(f"no header of at most {MAX_HEADER_BYTES} bytes")
    try:
        header = _decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"the header does not match the schema: {error}") from error
    if header.version != WIRE_VERSION:
        raise MessageError(f"wire version {header.version}, expected {WIRE_VERSION}")
    if run is not None and not hmac.compare_digest(header.run.encode(), run.encode()):
        raise MessageError("a message of another run")  # the run's identifier is secret: the reason must not show it
    if len(header.arrays) != len(frames) - 1:
        raise MessageError(f"{len(frames) - 1} array frames, the header names {len(header.arrays)}")
    arrays = {a.name: _array(a, frame) for a, frame in zip(header.arrays, frames[1:], strict=True)}
    if len(arrays) != len(header.arrays):
        raise MessageError("two arrays of one name")
    payload = Payload(arrays, header.fields)
    return Message(header.sender, header.kind, header.round, payload, header.run, frames[0], header.incarnation)


def _header(message: Message) -> bytes:
    """Return the header of an outgoing message. Raises `MessageError` for what a receiver would reject."""
    payload = message.payload
    arrays = _array_headers(tuple([(name, array.dtype.str, array.shape) for name, array in payload.arrays.items()]))
    if len(arrays) > MAX_ARRAYS or len(payload.fields) > MAX_FIELDS:
        raise MessageError(f"a payload has at most {MAX_ARRAYS} arrays and {MAX_FIELDS} fields")
    if any(len(name) > MAX_NAME for name in (message.kind, *payload.fields)):
        raise MessageError(NAME_TOO_LONG)
    items = [WIRE_VERSION, message.run, message.sender, message.kind, message.round, dict(payload.fields), arrays]
    header = _encoder.encode(items if not message.incarnation else [*items, message.incarnation])
    if len(header) > MAX_HEADER_BYTES:
        raise MessageError(f"the fields take {len(header)} bytes, expected at most {MAX_HEADER_BYTES}; use an array")
    return header


@lru_cache(maxsize=1024)
def _array_headers(arrays: tuple[tuple[str, str, tuple[int, ...]], ...]) -> list[_Array]:
    """Return the headers of arrays with these names, dtypes and shapes, which are the same in most messages."""
    for name, dtype, _ in arrays:
        if dtype not in DTYPES:
            raise MessageError(f"array {name!r} has dtype {dtype!r}, which cannot be sent: use {DTYPES}")
        if len(name) > MAX_NAME:
            raise MessageError(NAME_TOO_LONG)
    return [_Array(*array) for array in arrays]


def framed(size: int) -> int:
    """Return the bytes of a frame of `size` bytes on the wire."""
    return size + (2 if size <= 255 else 9)


ADDRESS_SIZE = framed(_RECEIVER.size)
"""The bytes of the address on the wire."""


def _array(spec: _Array, frame: bytes | memoryview) -> NDArray[Any]:
    if spec.dtype not in DTYPES:
        raise MessageError(f"array {spec.name!r} has dtype {spec.dtype!r}, expected one of {DTYPES}")
    dtype = np.dtype(spec.dtype)
    count = math.prod(spec.shape)
    if count * dtype.itemsize != len(frame):
        raise MessageError(f"array {spec.name!r} of shape {spec.shape} comes with {len(frame)} bytes")
    try:
        array = np.frombuffer(frame, dtype).reshape(spec.shape)
    except ValueError as error:  # no values, but dimensions beyond the limits of an array
        raise MessageError(f"array {spec.name!r} of shape {spec.shape}: {error}") from error
    array.setflags(write=False)
    return array


def _is_finite(array: NDArray[Any]) -> bool:
    if array.dtype.kind != "f":
        return True
    flat = array.reshape(-1)
    # If a value is not finite, the sum of squares is not finite either, and is faster; large values may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())


def _snapshot(array: NDArray[Any]) -> NDArray[Any]:
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.setflags(write=False)
    return array


def _bytes_of(array: NDArray[Any]) -> memoryview:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data
