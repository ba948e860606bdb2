"""Signals that ask the coordinator to end a run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP: the terminal was closed, or the connection to it was lost."""


class Interrupts:
    """Notes signals, and calls a function at every signal after the first. Restores the previous handlers on exit."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The last signal that arrived."""
        self._on_repeat: Callable[[], None] | None = None
        self._previous = {
            number: handler for number in SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN
        }
        """A signal that is ignored, for example SIGHUP under nohup, stays ignored."""

    def __enter__(self) -> Interrupts:
        for number in self._previous:
            signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def on_repeat(self, function: Callable[[], None]) -> None:
        """Call `function`, in the signal handler, when the user asks again."""
        self._on_repeat = function

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and self._on_repeat is not None:
            self._on_repeat()
        self.signal = number
