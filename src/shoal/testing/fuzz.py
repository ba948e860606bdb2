"""Malformed messages, for tests of whatever reads them: of your own sharing's `check`, for one.

    def test_my_sharing_bears_whatever_it_is_told():
        said = Message(1, "model", 0, MySharing().outgoing(params, 0))
        for case in range(10_000):
            how, frames = Mutator(case).frames(said.frames())
            try:
                MySharing().check(decode(frames).payload, params)
            except MessageError:
                continue

`Mutator` does to a good message what chance and malice do: to its bytes, to its frames, to its header as the data that
it is, and to its arrays, so that what results is often a message still and gets as far as whoever reads its payload.
Equal seeds give equal results. `Fuzzer` does so many times over, for several readers in turn, and keeps count.
"""

from __future__ import annotations

import math
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import FrameType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from shoal.errors import MessageError
from shoal.message import DTYPES, MAX_ARRAYS, MAX_FIELDS, MAX_HEADER_BYTES, MAX_NAME

Frames: TypeAlias = list[bytes]

SHOWN = 512
"""Bytes of a frame that are shown of a failure; the seed and the case give all of them."""
STACKED = 3
"""So many things are done to one message, at most."""
TRIES = 100
"""To find something that can be done to it."""
DEEP = (50, 1_500, 60_000)
"""How deep lists are nested: within what a recursive reader bears, and beyond it; all of it fits into a header."""
NUMBERS = (0, 1, -1, 2, 7, 127, 255, 2**31, 2**32, 2**47, 2**48 - 1, 2**48, 2**62, 2**63, 2**64 - 1, -(2**63))
ODD: tuple[Any, ...] = (
    None, True, False, 0.5, math.nan, math.inf, -math.inf, "", "x", "x" * (MAX_NAME + 1), "\0", "ß" * 40, b"", b"bytes",
    [], {}, [[]], {"": {}}, [1, 2, 3], {"a": 1}, *NUMBERS,
)  # fmt: skip
BROKEN = (
    b"\xa4\xff\xfe\xfd\xfc",  # a string that is not UTF-8
    b"\xd9\x02\xc3\x28",
    b"\xdb\xff\xff\xff\xff",  # strings, lists, maps and bytes that are longer than all that follows
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc1",  # means nothing
    b"\xd6\xff\x00\x00\x00\x00",  # a point in time
    b"\xc7\x03\x2aabc",  # a type of its own
    b"\x82\x01\x02\x01\x02",  # keys that are numbers, and twice the same
)
"""MessagePack that is not what it seems, to be put in the place of a value."""


class Mutator:
    """Does to messages what should not be done to them."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def frames(self, frames: Sequence[bytes | memoryview]) -> tuple[str, Frames]:
        """A copy of a message to which something was done, and what. `frames` begin with the header."""
        return self._changed([bytes(frame) for frame in frames], self.IN_FRAMES + self.IN_HEADERS + self.IN_ARRAYS)

    def payload(self, frames: Sequence[bytes | memoryview]) -> tuple[str, Frames]:
        """As `frames`, and the result is mostly a message still: only its payload makes no sense, if it does not."""
        return self._changed([bytes(frame) for frame in frames], self.IN_ARRAYS)

    def packed(self, data: bytes) -> tuple[str, bytes]:
        """A copy of some MessagePack to which something was done, and what."""
        how, changed = self._changed([data], self.IN_BYTES)
        return how, changed[0] if changed else b""

    def garbage(self, longest: int = 300) -> bytes:
        """Bytes at random."""
        return self._random.randbytes(self._random.randrange(longest))

    def _changed(self, frames: Frames, ways: Sequence[str]) -> tuple[str, Frames]:
        """Not all can be done to every message: what changes nothing does not count."""
        done: list[str] = []
        changed = frames
        wanted = self._random.choice((1, 1, 1, STACKED - 1, STACKED))
        for _ in range(TRIES):
            if len(done) == wanted or not changed:
                break
            way = self._random.choice(ways)
            before, changed = changed, getattr(self, f"_{way}")(changed)
            if changed not in (before, frames):
                done.append(way.replace("_", " "))
        return " and ".join(done) or "nothing", changed

    # To the bytes of a frame.

    IN_BYTES = (
        "bits_flipped", "a_byte_set", "cut_short", "bytes_added", "a_part_doubled", "nothing_but_noise",
        "a_value_replaced", "a_value_broken", "a_value_left_out", "a_value_added", "a_value_nested",
    )  # fmt: skip

    def _bits_flipped(self, frames: Frames) -> Frames:
        return self._edited(frames, self._flip)

    def _a_byte_set(self, frames: Frames) -> Frames:
        return self._edited(frames, self._set)

    def _cut_short(self, frames: Frames) -> Frames:
        return self._edited(frames, lambda frame: frame[: self._random.randrange(len(frame))] if frame else frame)

    def _bytes_added(self, frames: Frames) -> Frames:
        def add(frame: bytes) -> bytes:
            place = self._random.choice((0, len(frame), self._random.randrange(len(frame) + 1)))
            return frame[:place] + self._random.randbytes(self._random.choice((1, 1, 2, 4, 8, 100))) + frame[place:]

        return self._edited(frames, add)

    def _a_part_doubled(self, frames: Frames) -> Frames:
        def double(frame: bytes) -> bytes:
            start, end = sorted(self._random.randrange(len(frame) + 1) for _ in range(2))
            return frame[:end] + frame[start:]

        return self._edited(frames, double)

    def _nothing_but_noise(self, frames: Frames) -> Frames:
        return [self.garbage() for _ in range(self._random.choice((1, 1, 2, len(frames))))]

    # To the frames of a message.

    IN_FRAMES = (
        "bits_flipped", "a_byte_set", "cut_short", "bytes_added", "a_part_doubled", "nothing_but_noise",
        "a_frame_dropped", "a_frame_added", "a_frame_doubled", "frames_swapped", "a_frame_emptied",
    )  # fmt: skip

    def _a_frame_dropped(self, frames: Frames) -> Frames:
        place = self._random.randrange(len(frames))
        return frames[:place] + frames[place + 1 :]

    def _a_frame_added(self, frames: Frames) -> Frames:
        many = self._random.choice((1, 1, 1, MAX_ARRAYS + 1))
        place = self._random.randrange(len(frames) + 1)
        return [*frames[:place], *([self.garbage(64)] * many), *frames[place:]]

    def _a_frame_doubled(self, frames: Frames) -> Frames:
        place = self._random.randrange(len(frames))
        return [*frames[: place + 1], *frames[place:]]

    def _frames_swapped(self, frames: Frames) -> Frames:
        one, other = (self._random.randrange(len(frames)) for _ in range(2))
        swapped = list(frames)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        return swapped

    def _a_frame_emptied(self, frames: Frames) -> Frames:
        place = self._random.randrange(len(frames))
        return [*frames[:place], b"", *frames[place + 1 :]]

    # To the header, as the data that it is.

    IN_HEADERS = (
        "a_value_replaced", "a_value_broken", "a_value_left_out", "a_value_added", "a_value_nested",
        "another_shape", "another_type", "a_name_twice", "too_much", "another_origin",
    )  # fmt: skip

    def _a_value_replaced(self, frames: Frames) -> Frames:
        return self._in_data(frames, lambda _: self._random.choice(ODD))

    def _a_value_broken(self, frames: Frames) -> Frames:
        return self._in_data(frames, lambda _: msgspec.Raw(self._random.choice(BROKEN)))

    def _a_value_nested(self, frames: Frames) -> Frames:
        """Lists in lists, or maps in maps, in place of a value or behind it."""
        depth, opening = self._random.choice(DEEP), self._random.choice((b"\x91", b"\x81\xa1k"))
        deep = msgspec.Raw(opening * (depth // len(opening)) + b"\xc0")
        if self._random.random() < 0.5:
            return self._in_data(frames, lambda _: deep)
        return self._in_containers(frames, lambda inside: _more(inside, deep))

    def _a_value_left_out(self, frames: Frames) -> Frames:
        def leave_out(inside: Any) -> None:
            if inside:
                del inside[self._random.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))]

        return self._in_containers(frames, leave_out)

    def _a_value_added(self, frames: Frames) -> Frames:
        return self._in_containers(frames, lambda inside: _more(inside, self._random.choice(ODD)))

    def _another_shape(self, frames: Frames) -> Frames:
        """Sizes that overflow when they are multiplied, dimensions by the dozen, or nothing in very many places."""
        huge = self._random.choice((2**16, 2**31, 2**32, 2**47, 2**48 - 1))
        shapes: tuple[list[Any], ...] = (
            [],
            [0],
            [-1],
            [huge],
            [huge] * 8,
            [0, huge, huge],
            [1] * 9,
            [1] * 8,
            [0] * 8,
            [2**32, 2**32],
            ["5"],
        )
        return self._in_arrays(frames, lambda spec: [*spec[:2], self._random.choice(shapes)])

    def _another_type(self, frames: Frames) -> Frames:
        types = (*DTYPES, "|O", ">f4", "<c8", "<M8[s]", "|S5", "|V4", "f", "float32", "<f4,<f4", "(2,)<f4", "", 4)
        return self._in_arrays(frames, lambda spec: [*spec[:1], self._random.choice(types), *spec[2:]])

    def _a_name_twice(self, frames: Frames) -> Frames:
        header = _list(frames[0])
        if header is None or not isinstance(header[-1], list) or not header[-1]:
            return frames
        which = self._random.randrange(len(header[-1]))
        header[-1].append(header[-1][which])
        frame = frames[1 + which] if len(frames) > 1 + which else b""
        return [_packed(header), *frames[1:], frame]

    def _too_much(self, frames: Frames) -> Frames:
        """More fields, more arrays or longer names than there may be."""
        header = _list(frames[0])
        if header is None or len(header) < 7:
            return frames
        which = self._random.randrange(4)
        if which == 0:
            header[5] = {str(number): number for number in range(MAX_FIELDS + 1)}
        elif which == 1:
            header[6] = [["x" + str(number), "|u1", [0]] for number in range(MAX_ARRAYS + 1)]
            return [_packed(header), *[b""] * (MAX_ARRAYS + 1)]
        elif which == 2:
            header[5] = {"x": "y" * MAX_HEADER_BYTES}
        else:
            header[self._random.choice((1, 3))] = "n" * self._random.choice((17, MAX_NAME, MAX_NAME + 1, 10_000))
        return [_packed(header), *frames[1:]]

    def _another_origin(self, frames: Frames) -> Frames:
        """Another version, run, sender or round: all is well with the message, and it is not for here and now."""
        header = _list(frames[0])
        if header is None or len(header) < 7:
            return frames
        place = self._random.choice((0, 1, 2, 4))
        header[place] = f"{self._random.getrandbits(64):016x}" if place == 1 else self._random.choice(NUMBERS)
        return [_packed(header), *frames[1:]]

    # To arrays and fields, so that a message stays one.

    IN_ARRAYS = (
        "values_changed", "extreme_values", "an_array_retyped", "an_array_reshaped", "an_array_longer",
        "an_array_shorter", "an_array_renamed", "an_array_left_out", "an_array_more", "arrays_exchanged",
        "a_field_changed", "a_field_left_out", "a_field_more",
    )  # fmt: skip

    def _values_changed(self, frames: Frames) -> Frames:
        return self._in_content(frames, lambda spec, content: (spec, self._flip(content)))

    def _extreme_values(self, frames: Frames) -> Frames:
        def extreme(spec: list[Any], content: bytes) -> tuple[list[Any], bytes]:
            pattern = self._random.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\1"))
            start, end = sorted(self._random.randrange(len(content) + 1) for _ in range(2))
            if self._random.random() < 0.5:
                start, end = 0, len(content)
            filled = (pattern * (end - start))[: end - start]
            return spec, content[:start] + filled + content[end:]

        return self._in_content(frames, extreme)

    def _an_array_retyped(self, frames: Frames) -> Frames:
        def retype(spec: list[Any], content: bytes) -> tuple[list[Any], bytes]:
            dtype = self._random.choice(DTYPES)
            if self._random.random() < 0.5:  # the same bytes, read as others
                whole = len(content) // np.dtype(dtype).itemsize
                return [spec[0], dtype, [whole]], content[: whole * np.dtype(dtype).itemsize]
            return [spec[0], dtype, spec[2]], self._random.randbytes(_size(dtype, spec[2]))

        return self._in_content(frames, retype)

    def _an_array_reshaped(self, frames: Frames) -> Frames:
        def reshape(spec: list[Any], content: bytes) -> tuple[list[Any], bytes]:
            count = math.prod(spec[2])
            divisors = [d for d in (2, 3, 4, 5, 7, 16) if count % d == 0] or [1]
            divisor = self._random.choice(divisors)
            shapes = ([count], [1, count], [count, 1], [divisor, count // divisor], [1] * 7 + [count])
            return [spec[0], spec[1], self._random.choice(shapes)], content

        return self._in_content(frames, reshape)

    def _an_array_longer(self, frames: Frames) -> Frames:
        def lengthen(spec: list[Any], content: bytes) -> tuple[list[Any], bytes]:
            more = self._random.choice((1, 1, 2, 8, 1000))
            shape = [spec[2][0] + more, *spec[2][1:]] if spec[2] else [1 + more]
            size = _size(spec[1], shape)
            return [spec[0], spec[1], shape], (content + bytes(size))[:size]

        return self._in_content(frames, lengthen)

    def _an_array_shorter(self, frames: Frames) -> Frames:
        def shorten(spec: list[Any], content: bytes) -> tuple[list[Any], bytes]:
            rows, *rest = spec[2] or [1]
            shape = [self._random.choice((0, rows // 2, max(0, rows - 1))), *rest]
            return [spec[0], spec[1], shape], content[: _size(spec[1], shape)]

        return self._in_content(frames, shorten)

    def _an_array_renamed(self, frames: Frames) -> Frames:
        names = ("", "x", "params", "values", "positions", "scale", "copy")
        return self._in_arrays(frames, lambda spec: [self._random.choice(names), *spec[1:]])

    def _an_array_left_out(self, frames: Frames) -> Frames:
        header = _list(frames[0])
        if header is None or not _has_arrays(header, frames):
            return frames
        which = self._random.randrange(len(frames) - 1)
        del header[-1][which]
        return [_packed(header), *frames[1 : which + 1], *frames[which + 2 :]]

    def _an_array_more(self, frames: Frames) -> Frames:
        header = _list(frames[0])
        if header is None or not isinstance(header[-1], list):
            return frames
        dtype, count = self._random.choice(DTYPES), self._random.choice((0, 1, 5, 149))
        name = self._random.choice(("copy", "plain", "seals", "positions", "scale", "another"))
        header[-1].append([name, dtype, [count]])
        return [_packed(header), *frames[1:], self._random.randbytes(_size(dtype, [count]))]

    def _arrays_exchanged(self, frames: Frames) -> Frames:
        """Two arrays under each other's names."""
        header = _list(frames[0])
        if header is None or not _has_arrays(header, frames):
            return frames
        one, other = (self._random.randrange(len(frames) - 1) for _ in range(2))
        header[-1][one][0], header[-1][other][0] = header[-1][other][0], header[-1][one][0]
        return [_packed(header), *frames[1:]]

    def _a_field_changed(self, frames: Frames) -> Frames:
        def change(fields: dict[Any, Any]) -> None:
            if fields:
                name = self._random.choice(list(fields))
                near = fields[name]
                if isinstance(near, int) and near > 0 and self._random.random() < 0.5:
                    fields[name] = min(2**64 - 1, near + self._random.choice((-1, 1, -2, 10, 2**31)))
                else:
                    fields[name] = self._random.choice(ODD)

        return self._in_fields(frames, change)

    def _a_field_left_out(self, frames: Frames) -> Frames:
        return self._in_fields(
            frames, lambda fields: fields.pop(self._random.choice(list(fields)), None) if fields else None
        )

    def _a_field_more(self, frames: Frames) -> Frames:
        names = ("count", "seed", "factor", "lost", "step", "plain", "refused", "another")
        return self._in_fields(
            frames, lambda fields: fields.update({self._random.choice(names): self._random.choice(ODD)})
        )

    # How it is done.

    def _flip(self, frame: bytes) -> bytes:
        if not frame:
            return frame
        changed = bytearray(frame)
        for _ in range(self._random.choice((1, 1, 1, 2, 8, 64))):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _set(self, frame: bytes) -> bytes:
        if not frame:
            return frame
        changed = bytearray(frame)
        changed[self._random.randrange(len(changed))] = self._random.choice((0, 1, 0x7F, 0x80, 0xC0, 0xFE, 0xFF))
        return bytes(changed)

    def _edited(self, frames: Frames, edit: Callable[[bytes], bytes]) -> Frames:
        """One frame changed; mostly the header, which most depends on."""
        place = 0 if self._random.random() < 0.6 else self._random.randrange(len(frames))
        return [*frames[:place], edit(frames[place]), *frames[place + 1 :]]

    def _in_data(self, frames: Frames, value: Callable[[Any], Any]) -> Frames:
        """The header with another value in one place, whichever."""

        def replace(inside: Any) -> None:
            if inside:
                place = self._random.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
                inside[place] = value(inside[place])

        return self._in_containers(frames, replace)

    def _in_containers(self, frames: Frames, change: Callable[[Any], None]) -> Frames:
        """The header with one of its lists and maps changed."""
        data = _plain(frames[0])
        if not isinstance(data, list | dict):
            return frames
        change(self._random.choice(list(_containers(data))))
        return [_packed(data), *frames[1:]]

    def _in_arrays(self, frames: Frames, change: Callable[[list[Any]], list[Any]]) -> Frames:
        """The header with another description of one of the arrays."""
        header = _list(frames[0])
        if header is None or not isinstance(header[-1], list) or not header[-1]:
            return frames
        which = self._random.randrange(len(header[-1]))
        if isinstance(header[-1][which], list):
            header[-1][which] = change(header[-1][which])
        return [_packed(header), *frames[1:]]

    def _in_content(self, frames: Frames, change: Callable[[list[Any], bytes], tuple[list[Any], bytes]]) -> Frames:
        """One of the arrays changed, and its description with it."""
        header = _list(frames[0])
        if header is None or not _has_arrays(header, frames):
            return frames
        which = self._random.randrange(len(frames) - 1)
        header[-1][which], content = change(header[-1][which], frames[1 + which])
        return [_packed(header), *frames[1 : 1 + which], content, *frames[2 + which :]]

    def _in_fields(self, frames: Frames, change: Callable[[dict[Any, Any]], None]) -> Frames:
        header = _list(frames[0])
        if header is None or len(header) < 7 or not isinstance(header[5], dict):
            return frames
        change(header[5])
        return [_packed(header), *frames[1:]]


def _plain(frame: bytes) -> Any:
    """The data in a frame; None where it is no longer MessagePack."""
    try:
        return msgspec.msgpack.decode(frame)
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None


def _list(frame: bytes) -> list[Any] | None:
    data = _plain(frame)
    return data if isinstance(data, list) and data else None


def _packed(data: Any) -> bytes:
    return msgspec.msgpack.encode(data)


def _containers(data: Any) -> Iterator[Any]:
    yield data
    for inside in data.values() if isinstance(data, dict) else data:
        if isinstance(inside, list | dict):
            yield from _containers(inside)


def _more(inside: Any, value: Any) -> None:
    if isinstance(inside, dict):
        inside["more"] = value
    else:
        inside.append(value)


def _has_arrays(header: list[Any], frames: Frames) -> bool:
    """Whether the header describes the arrays that are there, one by one."""
    specs = header[-1]
    return (
        isinstance(specs, list)
        and len(specs) == len(frames) - 1 > 0
        and all(_is_spec(spec, frame) for spec, frame in zip(specs, frames[1:], strict=True))
    )


def _is_spec(spec: Any, frame: bytes) -> bool:
    if not isinstance(spec, list) or len(spec) != 3 or spec[1] not in DTYPES or not isinstance(spec[2], list):
        return False
    return all(type(side) is int and side >= 0 for side in spec[2]) and _size(spec[1], spec[2]) == len(frame)


def _size(dtype: str, shape: list[int]) -> int:
    return int(np.dtype(dtype).itemsize * math.prod(shape))


# Many times over.


@dataclass(frozen=True)
class Reader:
    """Someone who reads messages, and messages that it would take."""

    name: str
    read: Callable[[Frames], object]
    """Returns for a good message, and raises one of `refusals` for any other."""
    samples: Sequence[Frames]
    mutate: Callable[[Mutator, Frames], tuple[str, Frames]] = Mutator.frames
    refusals: tuple[type[Exception], ...] = (MessageError,)


@dataclass(frozen=True)
class Failure:
    """What should not have happened, and all that it takes to have it happen again."""

    seed: int
    case: int
    reader: str
    how: str
    why: str
    frames: Frames

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, case {self.case}: {self.reader}, {self.how}", self.why.rstrip()]
        for number, frame in enumerate(self.frames):
            rest = "" if len(frame) <= SHOWN else f"… ({len(frame)} bytes)"
            lines.append(f"  frame {number}: {frame[:SHOWN].hex()}{rest}")
        return "\n".join(lines)


class HangError(Exception):
    """A reader took longer than it may."""


@dataclass
class Fuzzer:
    """Hands malformed messages to readers in turn. A case is known by the seed and its number."""

    readers: Callable[[], Sequence[Reader]]
    """Makes them; anew now and then, since some of them remember what they read."""
    seed: int = 0
    patience: float = 10.0
    """Seconds of processor time that a reader may take for one message."""
    renewed_after: int = 5_000
    good: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    by_way: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """What was done to messages, and whether they were refused for it."""
    failures: list[Failure] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """How many there were so far."""
        return self.good.total() + self.refused.total() + len(self.failures)

    def run(self, cases: Sequence[int], most_failures: int = 10) -> None:
        """All of `cases`, or until there are so many failures."""
        readers: Sequence[Reader] = ()
        with _alarm(self.patience) as wind, np.errstate(all="ignore"):
            for number, case in enumerate(cases):
                wind(60 * self.patience)  # to make readers and messages: only what readers do has to be quick
                if number % self.renewed_after == 0:
                    readers = self.readers()
                self._try(readers, case, wind)
                if len(self.failures) >= most_failures:
                    return

    def _try(self, readers: Sequence[Reader], case: int, wind: Callable[[float], None]) -> None:
        turn, which = divmod(case, len(readers))
        reader = readers[which]
        how, frames = reader.mutate(Mutator(self.seed * 2**40 + case), reader.samples[turn % len(reader.samples)])
        try:
            wind(self.patience)
            reader.read(frames)
            self.good[reader.name] += 1
            refused = False
        except reader.refusals:
            self.refused[reader.name] += 1
            refused = True
        except Exception:
            self.failures.append(Failure(self.seed, case, reader.name, how, traceback.format_exc(limit=-4), frames))
            return
        self.by_way[how if " and " not in how else "several things", refused] += 1


@contextmanager
def _alarm(patience: float) -> Iterator[Callable[[float], None]]:
    """A clock of processor time, so that a busy machine does not ring it; whoever winds it has so long."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError(f"not done after {patience:g} s of processor time")

    def wind(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        yield wind
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
