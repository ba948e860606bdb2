"""The mutations that `shoal.testing.Mutator` applies to a message: one function each.

A mutation takes a source of random choices and the frames of a message, the header first, and returns changed frames.
It returns the frames unchanged if it does not apply to this message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from shoal.message import DTYPES, MAX_ARRAYS, MAX_FIELDS, MAX_HEADER_BYTES, MAX_NAME
from shoal.randomness import generator

T = TypeVar("T")

Frames: TypeAlias = list[bytes]

DEPTHS = (50, 1_500, 60_000)
"""Depths of nested lists: within the recursion limit of a reader, and beyond it. All of them fit into a header."""
INTEGERS = (0, 1, -1, 2, 7, 127, 255, 2**31, 2**32, 2**47, 2**48 - 1, 2**48, 2**62, 2**63, 2**64 - 1, -(2**63))
UNUSUAL_VALUES: tuple[Any, ...] = (
    None, True, False, 0.5, math.nan, math.inf, -math.inf, "", "x", "x" * (MAX_NAME + 1), "\0", "ß" * 40, b"", b"bytes",
    [], {}, [[]], {"": {}}, [1, 2, 3], {"a": 1}, *INTEGERS,
)  # fmt: skip
INVALID_VALUES = (
    b"\xa4\xff\xfe\xfd\xfc",  # a string that is not UTF-8
    b"\xd9\x02\xc3\x28",
    b"\xdb\xff\xff\xff\xff",  # a string, a list, a map and bytes longer than the rest of the frame
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc1",  # a byte that MessagePack does not use
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc7\x03\x2aabc",  # an extension type
    b"\x82\x01\x02\x01\x02",  # a map with integer keys, one of them twice
)
"""MessagePack that a decoder must reject or that has an unexpected type, to replace a value."""


class RandomChoices:
    """Random choices of one mutation, from a generator of Shoal's own."""

    def __init__(self, seed: int) -> None:
        self._rng = generator(seed, "mutations")

    def below(self, limit: int) -> int:
        """An integer from 0 to limit − 1."""
        return int(self._rng.integers(limit))

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def random_bytes(self, count: int) -> bytes:
        return self._rng.bytes(count)

    def garbage(self, limit: int = 300) -> bytes:
        """Random bytes, fewer than `limit`."""
        return self.random_bytes(self.below(limit))

    def key_of(self, container: Any) -> Any:
        """A key of a map, or an index of a list."""
        return self.one_of(list(container) if isinstance(container, dict) else range(len(container)))

    def interval(self, length: int) -> tuple[int, int]:
        """The start and the end of a part of `length` items."""
        start, end = sorted(self.below(length + 1) for _ in range(2))
        return start, end


Mutation: TypeAlias = Callable[[RandomChoices, Frames], Frames]


# Bytes of a frame


def bits_flipped(choices: RandomChoices, frames: Frames) -> Frames:
    return _edit_frame(choices, frames, lambda frame: _flip_bits(choices, frame))


def byte_set(choices: RandomChoices, frames: Frames) -> Frames:
    def set_byte(frame: bytes) -> bytes:
        changed = bytearray(frame)
        if changed:
            changed[choices.below(len(changed))] = choices.one_of((0, 1, 0x7F, 0x80, 0xC0, 0xFE, 0xFF))
        return bytes(changed)

    return _edit_frame(choices, frames, set_byte)


def frame_truncated(choices: RandomChoices, frames: Frames) -> Frames:
    return _edit_frame(choices, frames, lambda frame: frame[: choices.below(len(frame))] if frame else frame)


def bytes_inserted(choices: RandomChoices, frames: Frames) -> Frames:
    def insert(frame: bytes) -> bytes:
        at = choices.one_of((0, len(frame), choices.below(len(frame) + 1)))
        return frame[:at] + choices.random_bytes(choices.one_of((1, 1, 2, 4, 8, 100))) + frame[at:]

    return _edit_frame(choices, frames, insert)


def bytes_repeated(choices: RandomChoices, frames: Frames) -> Frames:
    def repeat(frame: bytes) -> bytes:
        start, end = choices.interval(len(frame))
        return frame[:end] + frame[start:]

    return _edit_frame(choices, frames, repeat)


def random_bytes(choices: RandomChoices, frames: Frames) -> Frames:
    return [choices.garbage() for _ in range(choices.one_of((1, 1, 2, len(frames))))]


# Frames of a message


def frame_removed(choices: RandomChoices, frames: Frames) -> Frames:
    at = choices.below(len(frames))
    return frames[:at] + frames[at + 1 :]


def frames_inserted(choices: RandomChoices, frames: Frames) -> Frames:
    count = choices.one_of((1, 1, 1, MAX_ARRAYS + 1))
    at = choices.below(len(frames) + 1)
    return [*frames[:at], *([choices.garbage(64)] * count), *frames[at:]]


def frame_repeated(choices: RandomChoices, frames: Frames) -> Frames:
    at = choices.below(len(frames))
    return [*frames[: at + 1], *frames[at:]]


def frames_swapped(choices: RandomChoices, frames: Frames) -> Frames:
    one, other = choices.below(len(frames)), choices.below(len(frames))
    swapped = list(frames)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return swapped


def frame_emptied(choices: RandomChoices, frames: Frames) -> Frames:
    at = choices.below(len(frames))
    return [*frames[:at], b"", *frames[at + 1 :]]


# Values of the header


def value_replaced(choices: RandomChoices, frames: Frames) -> Frames:
    return _replace_value(choices, frames, lambda: choices.one_of(UNUSUAL_VALUES))


def value_made_invalid(choices: RandomChoices, frames: Frames) -> Frames:
    return _replace_value(choices, frames, lambda: msgspec.Raw(choices.one_of(INVALID_VALUES)))


def value_nested(choices: RandomChoices, frames: Frames) -> Frames:
    """Deeply nested lists or maps, in place of a value or appended to a container."""
    depth, prefix = choices.one_of(DEPTHS), choices.one_of((b"\x91", b"\x81\xa1k"))
    nested = msgspec.Raw(prefix * (depth // len(prefix)) + b"\xc0")
    if choices.chance(0.5):
        return _replace_value(choices, frames, lambda: nested)
    return _edit_container(choices, frames, lambda container: _append(container, nested))


def value_removed(choices: RandomChoices, frames: Frames) -> Frames:
    def remove(container: Any) -> None:
        if container:
            del container[choices.key_of(container)]

    return _edit_container(choices, frames, remove)


def value_added(choices: RandomChoices, frames: Frames) -> Frames:
    return _edit_container(choices, frames, lambda container: _append(container, choices.one_of(UNUSUAL_VALUES)))


def shape_replaced(choices: RandomChoices, frames: Frames) -> Frames:
    """A shape whose product overflows, that has too many dimensions, or that is huge and yet has no elements."""
    huge = choices.one_of((2**16, 2**31, 2**32, 2**47, 2**48 - 1))
    shapes: tuple[list[Any], ...] = (
        [], [0], [-1], [huge], [huge] * 8, [0, huge, huge], [1] * 9, [1] * 8, [0] * 8, [2**32, 2**32], ["5"],
    )  # fmt: skip
    return _edit_description(choices, frames, lambda array: [*array[:2], choices.one_of(shapes)])


def dtype_replaced(choices: RandomChoices, frames: Frames) -> Frames:
    dtypes = (*DTYPES, "|O", ">f4", "<c8", "<M8[s]", "|S5", "|V4", "f", "float32", "<f4,<f4", "(2,)<f4", "", 4)
    return _edit_description(choices, frames, lambda array: [*array[:1], choices.one_of(dtypes), *array[2:]])


def array_name_repeated(choices: RandomChoices, frames: Frames) -> Frames:
    header = _unpack_list(frames[0])
    if header is None or not isinstance(header[-1], list) or not header[-1]:
        return frames
    which = choices.below(len(header[-1]))
    header[-1].append(header[-1][which])
    frame = frames[1 + which] if len(frames) > 1 + which else b""
    return [_pack(header), *frames[1:], frame]


def limit_exceeded(choices: RandomChoices, frames: Frames) -> Frames:
    """More fields, more arrays or longer names than a message may have."""
    header = _unpack_header(frames)
    if header is None:
        return frames
    which = choices.below(4)
    if which == 0:
        header[5] = {str(number): number for number in range(MAX_FIELDS + 1)}
    elif which == 1:
        header[6] = [[f"x{number}", "|u1", [0]] for number in range(MAX_ARRAYS + 1)]
        return [_pack(header), *[b""] * (MAX_ARRAYS + 1)]
    elif which == 2:
        header[5] = {"x": "y" * MAX_HEADER_BYTES}
    else:
        header[choices.one_of((1, 3))] = "n" * choices.one_of((17, MAX_NAME, MAX_NAME + 1, 10_000))
    return [_pack(header), *frames[1:]]


def origin_replaced(choices: RandomChoices, frames: Frames) -> Frames:
    """Another version, run, sender or round: a valid message that is not for this receiver at this time."""
    header = _unpack_header(frames)
    if header is None:
        return frames
    at = choices.one_of((0, 1, 2, 4))
    header[at] = choices.random_bytes(8).hex() if at == 1 else choices.one_of(INTEGERS)
    return [_pack(header), *frames[1:]]


# Arrays and fields: the result is still a message


def values_flipped(choices: RandomChoices, frames: Frames) -> Frames:
    return _edit_array(choices, frames, lambda array, content: (array, _flip_bits(choices, content)))


def extreme_values(choices: RandomChoices, frames: Frames) -> Frames:
    def fill(array: list[Any], content: bytes) -> tuple[list[Any], bytes]:
        pattern = choices.one_of((b"\0", b"\xff", b"\x7f", b"\x80", b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\1"))
        start, end = (0, len(content)) if choices.chance(0.5) else choices.interval(len(content))
        return array, content[:start] + (pattern * (end - start))[: end - start] + content[end:]

    return _edit_array(choices, frames, fill)


def array_retyped(choices: RandomChoices, frames: Frames) -> Frames:
    def retype(array: list[Any], content: bytes) -> tuple[list[Any], bytes]:
        dtype = choices.one_of(DTYPES)
        if choices.chance(0.5):  # the same bytes with another type
            size = np.dtype(dtype).itemsize
            count = len(content) // size
            return [array[0], dtype, [count]], content[: count * size]
        return [array[0], dtype, array[2]], choices.random_bytes(_byte_count(dtype, array[2]))

    return _edit_array(choices, frames, retype)


def array_reshaped(choices: RandomChoices, frames: Frames) -> Frames:
    def reshape(array: list[Any], content: bytes) -> tuple[list[Any], bytes]:
        count = math.prod(array[2])
        divisor = choices.one_of([d for d in (2, 3, 4, 5, 7, 16) if count % d == 0] or [1])
        shapes = ([count], [1, count], [count, 1], [divisor, count // divisor], [1] * 7 + [count])
        return [array[0], array[1], choices.one_of(shapes)], content

    return _edit_array(choices, frames, reshape)


def array_lengthened(choices: RandomChoices, frames: Frames) -> Frames:
    def lengthen(array: list[Any], content: bytes) -> tuple[list[Any], bytes]:
        added = choices.one_of((1, 1, 2, 8, 1000))
        shape = [array[2][0] + added, *array[2][1:]] if array[2] else [1 + added]
        size = _byte_count(array[1], shape)
        return [array[0], array[1], shape], (content + bytes(size))[:size]

    return _edit_array(choices, frames, lengthen)


def array_shortened(choices: RandomChoices, frames: Frames) -> Frames:
    def shorten(array: list[Any], content: bytes) -> tuple[list[Any], bytes]:
        rows, *rest = array[2] or [1]
        shape = [choices.one_of((0, rows // 2, max(0, rows - 1))), *rest]
        return [array[0], array[1], shape], content[: _byte_count(array[1], shape)]

    return _edit_array(choices, frames, shorten)


def array_renamed(choices: RandomChoices, frames: Frames) -> Frames:
    names = ("", "x", "params", "values", "positions", "scale", "copy")
    return _edit_description(choices, frames, lambda array: [choices.one_of(names), *array[1:]])


def array_removed(choices: RandomChoices, frames: Frames) -> Frames:
    header = _unpack_list(frames[0])
    if header is None or not _describes_arrays(header, frames):
        return frames
    which = choices.below(len(frames) - 1)
    del header[-1][which]
    return [_pack(header), *frames[1 : which + 1], *frames[which + 2 :]]


def array_added(choices: RandomChoices, frames: Frames) -> Frames:
    header = _unpack_list(frames[0])
    if header is None or not isinstance(header[-1], list):
        return frames
    dtype, count = choices.one_of(DTYPES), choices.one_of((0, 1, 5, 149))
    name = choices.one_of(("copy", "plain", "seals", "positions", "scale", "another"))
    header[-1].append([name, dtype, [count]])
    return [_pack(header), *frames[1:], choices.random_bytes(_byte_count(dtype, [count]))]


def array_names_swapped(choices: RandomChoices, frames: Frames) -> Frames:
    header = _unpack_list(frames[0])
    if header is None or not _describes_arrays(header, frames):
        return frames
    one, other = choices.below(len(frames) - 1), choices.below(len(frames) - 1)
    header[-1][one][0], header[-1][other][0] = header[-1][other][0], header[-1][one][0]
    return [_pack(header), *frames[1:]]


def field_changed(choices: RandomChoices, frames: Frames) -> Frames:
    def change(fields: dict[Any, Any]) -> None:
        if not fields:
            return
        name = choices.key_of(fields)
        value = fields[name]
        if isinstance(value, int) and value > 0 and choices.chance(0.5):
            fields[name] = min(2**64 - 1, value + choices.one_of((-1, 1, -2, 10, 2**31)))
        else:
            fields[name] = choices.one_of(UNUSUAL_VALUES)

    return _edit_fields(frames, change)


def field_removed(choices: RandomChoices, frames: Frames) -> Frames:
    return _edit_fields(frames, lambda fields: fields.pop(choices.key_of(fields)) if fields else None)


def field_added(choices: RandomChoices, frames: Frames) -> Frames:
    names = ("count", "seed", "factor", "lost", "step", "plain", "refused", "another")
    return _edit_fields(frames, lambda fields: fields.update({choices.one_of(names): choices.one_of(UNUSUAL_VALUES)}))


_BYTES: tuple[Mutation, ...] = (
    bits_flipped, byte_set, frame_truncated, bytes_inserted, bytes_repeated, random_bytes,
)  # fmt: skip
_VALUES: tuple[Mutation, ...] = (value_replaced, value_made_invalid, value_removed, value_added, value_nested)
PACKED: tuple[Mutation, ...] = _BYTES + _VALUES
"""Mutations of one frame of MessagePack."""
FRAMES: tuple[Mutation, ...] = (
    *_BYTES, frame_removed, frames_inserted, frame_repeated, frames_swapped, frame_emptied,
)  # fmt: skip
HEADER: tuple[Mutation, ...] = (
    *_VALUES, shape_replaced, dtype_replaced, array_name_repeated, limit_exceeded, origin_replaced,
)  # fmt: skip
PAYLOAD: tuple[Mutation, ...] = (
    values_flipped, extreme_values, array_retyped, array_reshaped, array_lengthened, array_shortened, array_renamed,
    array_removed, array_added, array_names_swapped, field_changed, field_removed, field_added,
)  # fmt: skip


# What mutations share


def _flip_bits(choices: RandomChoices, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(choices.one_of((1, 1, 1, 2, 8, 64)) if changed else 0):
        changed[choices.below(len(changed))] ^= 1 << choices.below(8)
    return bytes(changed)


def _edit_frame(choices: RandomChoices, frames: Frames, edit: Callable[[bytes], bytes]) -> Frames:
    """Edit one frame. It is mostly the header, which readers depend on most."""
    at = 0 if choices.chance(0.6) else choices.below(len(frames))
    return [*frames[:at], edit(frames[at]), *frames[at + 1 :]]


def _replace_value(choices: RandomChoices, frames: Frames, make: Callable[[], Any]) -> Frames:
    """Replace one value of the header."""

    def replace(container: Any) -> None:
        if container:
            container[choices.key_of(container)] = make()

    return _edit_container(choices, frames, replace)


def _edit_container(choices: RandomChoices, frames: Frames, edit: Callable[[Any], None]) -> Frames:
    """Edit one of the lists and maps of the header in place."""
    data = _unpack(frames[0])
    if not isinstance(data, list | dict):
        return frames
    edit(choices.one_of(list(_containers(data))))
    return [_pack(data), *frames[1:]]


def _edit_description(choices: RandomChoices, frames: Frames, edit: Callable[[list[Any]], list[Any]]) -> Frames:
    """Replace the description of one array in the header: its name, dtype and shape."""
    header = _unpack_list(frames[0])
    if header is None or not isinstance(header[-1], list) or not header[-1]:
        return frames
    which = choices.below(len(header[-1]))
    if isinstance(header[-1][which], list):
        header[-1][which] = edit(header[-1][which])
    return [_pack(header), *frames[1:]]


def _edit_array(
    choices: RandomChoices, frames: Frames, edit: Callable[[list[Any], bytes], tuple[list[Any], bytes]]
) -> Frames:
    """Replace one array together with its description."""
    header = _unpack_list(frames[0])
    if header is None or not _describes_arrays(header, frames):
        return frames
    which = choices.below(len(frames) - 1)
    header[-1][which], content = edit(header[-1][which], frames[1 + which])
    return [_pack(header), *frames[1 : 1 + which], content, *frames[2 + which :]]


def _edit_fields(frames: Frames, edit: Callable[[dict[Any, Any]], None]) -> Frames:
    """Edit the fields of the payload in place."""
    header = _unpack_header(frames)
    if header is None or not isinstance(header[5], dict):
        return frames
    edit(header[5])
    return [_pack(header), *frames[1:]]


def _unpack(frame: bytes) -> Any:
    """The data in a frame, or None if the frame is no longer MessagePack."""
    try:
        return msgspec.msgpack.decode(frame)
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None


def _unpack_list(frame: bytes) -> list[Any] | None:
    data = _unpack(frame)
    return data if isinstance(data, list) and data else None


def _unpack_header(frames: Frames) -> list[Any] | None:
    header = _unpack_list(frames[0])
    return header if header is not None and len(header) >= 7 else None


def _pack(data: Any) -> bytes:
    return msgspec.msgpack.encode(data)


def _containers(data: Any) -> Iterator[Any]:
    yield data
    for inner in data.values() if isinstance(data, dict) else data:
        if isinstance(inner, list | dict):
            yield from _containers(inner)


def _append(container: Any, value: Any) -> None:
    if isinstance(container, dict):
        container["more"] = value
    else:
        container.append(value)


def _describes_arrays(header: list[Any], frames: Frames) -> bool:
    """Whether the header describes each of the array frames."""
    descriptions = header[-1]
    return (
        isinstance(descriptions, list)
        and len(descriptions) == len(frames) - 1 > 0
        and all(_describes(array, frame) for array, frame in zip(descriptions, frames[1:], strict=True))
    )


def _describes(array: Any, frame: bytes) -> bool:
    if not isinstance(array, list) or len(array) != 3 or array[1] not in DTYPES or not isinstance(array[2], list):
        return False
    return all(type(side) is int and side >= 0 for side in array[2]) and _byte_count(array[1], array[2]) == len(frame)


def _byte_count(dtype: str, shape: list[int]) -> int:
    return int(np.dtype(dtype).itemsize * math.prod(shape))
