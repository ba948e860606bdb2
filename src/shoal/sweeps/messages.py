"""What a sweep and the processes of its runs send each other: JSON objects, one per line."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import msgspec

from shoal.results.progress import Progress

MAX_LINE_BYTES = 4096
"""A line of a run is written at once: the system does not mix it with the lines of other runs (PIPE_BUF of Linux)."""
MAX_TEXT = 3000
"""Characters of a text in a line, at most. ASCII needs one byte for each, other text is cut further."""


class StartRun(msgspec.Struct, tag=True, frozen=True):
    """Start a run, or continue the run in the folder `resumed`."""

    run: int
    table: dict[str, Any]
    """The experiment, with absolute paths of plug-ins and their hashes."""
    base: str
    out: str
    resumed: str | None = None


class StopRun(msgspec.Struct, tag=True, frozen=True):
    """Interrupt a run, as Ctrl-C does."""

    run: int


ToLauncher: TypeAlias = StartRun | StopRun


class Advanced(msgspec.Struct, tag=True, frozen=True):
    """The progress of a run."""

    run: int
    progress: Progress


class Noticed(msgspec.Struct, tag=True, frozen=True):
    """A message of a run for the user."""

    run: int
    text: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A run reached its end, with this status; or an error ended it."""

    run: int
    status: str
    folder: str | None = None
    error: str | None = None


class Exited(msgspec.Struct, tag=True, frozen=True):
    """The process of a run has exited. A negative code is a signal."""

    run: int
    code: int
    peak_bytes: int
    """The most memory that the process had, in addition to the memory of the process that forked it."""


FromLauncher: TypeAlias = Advanced | Noticed | Ended | Exited

_to_launcher = msgspec.json.Decoder(ToLauncher)
_from_launcher = msgspec.json.Decoder(FromLauncher)


def decode_request(line: bytes) -> ToLauncher:
    request: ToLauncher = _to_launcher.decode(line)
    return request


def decode_report(line: bytes) -> FromLauncher:
    report: FromLauncher = _from_launcher.decode(line)
    return report


def encode_line(message: ToLauncher | FromLauncher) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def write_report(file: int, report: FromLauncher) -> None:
    """Write a report at once, so that it is not mixed with reports of other processes."""
    line = encode_line(report)
    assert len(line) <= MAX_LINE_BYTES, f"a report of {len(line)} bytes"
    os.write(file, line)


def shorten(text: str) -> str:
    """Return a text that fits in a report; the end of a long text is more useful than its beginning."""
    text = text[-MAX_TEXT:]
    while len(msgspec.json.encode(text)) > MAX_TEXT + 2:
        text = text[len(text) // 4 or 1 :]
    return text


class Lines:
    """Splits what a pipe delivers into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, content: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + content).split(b"\n")
        return lines
