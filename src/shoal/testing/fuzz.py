"""Malformed messages, for tests of everything that reads messages, such as the `check` of your own sharing.

    def test_my_sharing_rejects_malformed_payloads():
        message = Message(1, "model", 0, MySharing().outgoing(params, 0))
        for seed in range(10_000):
            mutations, frames = Mutator(seed).frames(message.frames())
            try:
                MySharing().check(decode(frames).payload, params)
            except MessageError:
                continue

`Mutator` changes a valid message as accidents and attackers do: its bytes, its frames, the data in its header, its
arrays. Many results are still messages, so they reach the code that reads the payload. Equal seeds give equal results.
`Fuzzer` runs many cases against several readers in turn and counts the outcomes.
"""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import numpy as np

from shoal.errors import MessageError
from shoal.testing._mutations import FRAMES, HEADER, PACKED, PAYLOAD, Frames, Mutation, RandomChoices

SHOWN_BYTES = 512
"""The bytes of a frame that a failure shows; its seed and its case reproduce all of them."""
MOST_MUTATIONS = 3
"""The most mutations of one message."""
ATTEMPTS = 100
"""How often to look for a mutation that applies to the message."""


class Mutator:
    """Applies random mutations to messages."""

    def __init__(self, seed: int) -> None:
        self._choices = RandomChoices(seed)

    def frames(self, frames: Sequence[bytes | memoryview]) -> tuple[str, Frames]:
        """Return the names of the mutations, and the changed copy of a message. `frames` begin with the header."""
        return self._mutate([bytes(frame) for frame in frames], FRAMES + HEADER + PAYLOAD)

    def payload(self, frames: Sequence[bytes | memoryview]) -> tuple[str, Frames]:
        """Do the same as `frames`, with mutations of the payload only: most results are still messages."""
        return self._mutate([bytes(frame) for frame in frames], PAYLOAD)

    def packed(self, data: bytes) -> tuple[str, bytes]:
        """Return the names of the mutations, and the changed copy of some MessagePack."""
        mutations, frames = self._mutate([data], PACKED)
        return mutations, frames[0] if frames else b""

    def garbage(self, limit: int = 300) -> bytes:
        """Random bytes, fewer than `limit`."""
        return self._choices.garbage(limit)

    def _mutate(self, frames: Frames, mutations: Sequence[Mutation]) -> tuple[str, Frames]:
        """Apply one or a few mutations. A mutation that changes nothing does not count."""
        applied: list[str] = []
        changed = frames
        wanted = self._choices.one_of((1, 1, 1, MOST_MUTATIONS - 1, MOST_MUTATIONS))
        for _ in range(ATTEMPTS):
            if len(applied) == wanted or not changed:
                break
            mutation = self._choices.one_of(mutations)
            before, changed = changed, mutation(self._choices, changed)
            if changed not in (before, frames):
                applied.append(mutation.__name__.replace("_", " "))
        return " and ".join(applied) or "nothing", changed


@dataclass(frozen=True)
class Reader:
    """Code that reads messages, and valid messages for it."""

    name: str
    read: Callable[[Frames], object]
    """Returns for a valid message, and raises one of `rejections` for any other."""
    samples: Sequence[Frames]
    mutate: Callable[[Mutator, Frames], tuple[str, Frames]] = Mutator.frames
    rejections: tuple[type[Exception], ...] = (MessageError,)


@dataclass(frozen=True)
class Failure:
    """A message that a reader neither accepted nor rejected, and what reproduces it."""

    seed: int
    case: int
    reader: str
    mutations: str
    error: str
    frames: Frames

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, case {self.case}: {self.reader}, {self.mutations}", self.error.rstrip()]
        for number, frame in enumerate(self.frames):
            rest = "" if len(frame) <= SHOWN_BYTES else f"… ({len(frame)} bytes)"
            lines.append(f"  frame {number}: {frame[:SHOWN_BYTES].hex()}{rest}")
        return "\n".join(lines)


class HangError(Exception):
    """A reader exceeded its time limit."""


@dataclass
class Fuzzer:
    """Gives malformed messages to readers in turn. The seed and the number of a case reproduce it."""

    readers: Callable[[], Sequence[Reader]]
    """Makes the readers. They are made again after `renewed_after` cases, because some keep what they read."""
    seed: int = 0
    time_limit: float = 10.0
    """Seconds of processor time that a reader may take for one message."""
    renewed_after: int = 5_000
    accepted: Counter[str] = field(default_factory=Counter)
    """Accepted messages, by reader."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Rejected messages, by reader."""
    by_mutation: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """Messages by their mutation, and by whether they were rejected."""
    failures: list[Failure] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """The number of cases so far."""
        return self.accepted.total() + self.rejected.total() + len(self.failures)

    def run(self, cases: Sequence[int], most_failures: int = 10) -> None:
        """Run all of `cases`, or until there are `most_failures` failures."""
        readers: Sequence[Reader] = ()
        with _time_limit(self.time_limit) as set_limit, np.errstate(all="ignore"):
            for number, case in enumerate(cases):
                set_limit(60 * self.time_limit)  # the limit is for reading; making readers and messages takes longer
                if number % self.renewed_after == 0:
                    readers = self.readers()
                self._run_case(readers, case, set_limit)
                if len(self.failures) >= most_failures:
                    return

    def _run_case(self, readers: Sequence[Reader], case: int, set_limit: Callable[[float], None]) -> None:
        turn, which = divmod(case, len(readers))
        reader = readers[which]
        mutations, frames = reader.mutate(Mutator(self.seed * 2**40 + case), reader.samples[turn % len(reader.samples)])
        try:
            set_limit(self.time_limit)
            reader.read(frames)
            self.accepted[reader.name] += 1
            rejected = False
        except reader.rejections:
            self.rejected[reader.name] += 1
            rejected = True
        except Exception:
            error = traceback.format_exc(limit=-4)
            self.failures.append(Failure(self.seed, case, reader.name, mutations, error, frames))
            return
        self.by_mutation[mutations if " and " not in mutations else "several", rejected] += 1


@contextmanager
def _time_limit(seconds: float) -> Iterator[Callable[[float], None]]:
    """A limit of processor time, which a busy machine does not change. Each call of the result restarts it."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise HangError(f"not done after {seconds:g} s of processor time")

    def set_limit(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)

    before = signal.signal(signal.SIGVTALRM, expire)
    try:
        yield set_limit
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
