"""A streaming reader of LEAF's JSON files: one user at a time is in memory.

    {"users": […], "num_samples": […], "user_data": {user: {"x": […], "y": […]}}}

The reader limits the nesting depth and the size of one user, so that a hostile file cannot exhaust the memory.
"""

from __future__ import annotations

import functools
import gzip
import re
import reprlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from shoal.errors import DataError

CHUNK = 1 << 16
MAX_DEPTH = 16
"""Nested lists and objects. LEAF's own files have 8. A level takes little space in a file, but much in memory."""
MAX_BYTES = 1 << 28
"""JSON bytes of one user, or of the list of users. They are in memory at once."""


def read_users(file: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield each user of a file with its inputs and targets."""
    found = False
    for user, held in _parse(file, "user_data"):
        found = True
        if not isinstance(held, dict) or not isinstance(held.get("x"), list) or not isinstance(held.get("y"), list):
            raise DataError(f'{file}: user {shorten(user)}: expected {{"x": […], "y": […]}}')
        if len(held["x"]) != len(held["y"]):
            raise DataError(
                f"{file}: user {shorten(user)}: {len(held['x'])} inputs and {len(held['y'])} targets; expected a "
                "target for each input"
            )
        yield user, held["x"], held["y"]
    if not found:
        raise DataError(f"{file}: no user in 'user_data'; expected LEAF's JSON, with users, num_samples and user_data")


def read_sample_counts(file: Path) -> dict[str, int]:
    """Return the number of samples that the file declares for each user; empty if it declares none."""
    users, counts = (next(_parse(file, key), None) for key in ("users", "num_samples"))
    if not isinstance(users, list) or not isinstance(counts, list):
        return {}
    return {
        user: count
        for user, count in zip(users, counts, strict=False)
        if isinstance(user, str) and type(count) is int and 0 <= count < 1 << 40
    }


def shorten(value: Any) -> str:
    """Return a short representation of a value of any length and depth."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python does not print integers with thousands of digits
        return "a huge number"


_SHORT = reprlib.Repr()
_SHORT.maxstring = 100


def _parse(file: Path, key: str) -> Iterator[Any]:
    """Yield what the top level has under `key`: pairs of user and data for user_data, else the one value."""
    import ijson  # streams JSON, unlike the standard library

    read = ijson.kvitems if key == "user_data" else ijson.items
    try:
        with _open(file) as stream:
            yield from read(_BoundedStream(stream, file), key, use_float=True, buf_size=CHUNK)
    except ijson.JSONError as error:
        first = error.args[0] if error.args else ""
        text = first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)  # bytes if not UTF-8
        reason = text.partition("\n")[0].removeprefix("parse error: ").removeprefix("lexical error: ")
        raise DataError(f"{file}: malformed JSON at byte {_failing_byte(file):,}: {reason}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}; it may be incomplete: download it again") from error
    except (ValueError, SystemError) as error:  # a number with thousands of digits, or text that is not UTF-8
        raise DataError(f"{file}: malformed JSON: {error}") from error


class _BoundedStream:
    """A stream of JSON that raises before a parser receives values that are nested too deeply or too large.

    It looks at brackets, quotes and backslashes only. Between them are long runs of numbers or text.
    """

    MARKS = re.compile(rb'[\[\]{}"\\]')

    def __init__(self, stream: IO[bytes], file: Path) -> None:
        self._stream = stream
        self._file = file
        self._position = 0
        self._depth = 0
        self._start = 0
        """Where the current user, or the list of users, starts."""
        self._in_string = False
        self._escaped = -1
        """The position of a character after a backslash."""

    def read(self, size: int) -> bytes:
        chunk = self._stream.read(size)
        for found in self.MARKS.finditer(chunk):
            self._mark(found.group(), self._position + found.start())
        self._position += len(chunk)
        if self._position - self._start > MAX_BYTES:
            raise DataError(f"{self._file}: over {MAX_BYTES:,} bytes for one user from byte {self._start:,} on")
        return chunk

    def _mark(self, mark: bytes, position: int) -> None:
        if self._in_string:
            if position == self._escaped:
                return
            if mark == b"\\":
                self._escaped = position + 1
            self._in_string = mark != b'"'
        elif mark == b'"':
            self._in_string = True
        else:
            self._depth += 1 if mark in b"[{" else -1
            if self._depth > MAX_DEPTH:
                raise DataError(
                    f"{self._file}: byte {position:,}: lists are nested more than {MAX_DEPTH} deep; "
                    "expected LEAF's JSON"
                )
            if self._depth <= 2:
                self._start = position


def _open(file: Path) -> IO[bytes]:
    if file.suffix == ".gz":
        return gzip.open(file, "rb")  # type: ignore[return-value]
    return open(file, "rb")


def _failing_byte(file: Path) -> int:
    """Return where the (unpacked) text stops being JSON.

    The parser does not report that. So the file is parsed again chunk by chunk, and the failing chunk byte by byte.
    """
    import ijson

    def failing_piece(pieces: Iterable[bytes]) -> int | None:
        """Return the index of the piece at which parsing fails."""
        events = ijson.sendable_list()
        parser = ijson.basic_parse_coro(events)
        for number, piece in enumerate(pieces):
            try:
                parser.send(piece)
            except (ijson.JSONError, ValueError, SystemError):  # the last two for numbers with thousands of digits
                return number
            del events[:]
        return None

    def last_chunk_by_bytes(chunks: int) -> Iterator[bytes]:
        """Yield `chunks` chunks, and then one more byte by byte."""
        for _ in range(chunks):
            yield stream.read(CHUNK)
        last = stream.read(CHUNK)
        yield from (last[i : i + 1] for i in range(len(last)))

    with _open(file) as stream:
        failing = failing_piece(iter(functools.partial(stream.read, CHUNK), b""))
        if failing is None:
            return stream.tell()  # the text ends too early
        stream.seek(0)
        piece = failing_piece(last_chunk_by_bytes(failing))
        return failing * CHUNK + (0 if piece is None else piece - failing)
