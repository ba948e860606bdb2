"""The interface between a node and the engine that runs it.

`Runtime` is the contract; `shoal.testing.check_runtime` is its conformance suite.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from shoal.mailbox import Filter
from shoal.message import Message
from shoal.types import NodeId

R = TypeVar("R", covariant=True)


class Work(Protocol[R]):
    """Something to compute: pure in what it was given, so that an engine may run it where and when it likes."""

    @property
    def seconds(self) -> float:
        """How long the node's device takes, in virtual time. The process engine takes what it takes."""
        ...

    @property
    def batch_key(self) -> Hashable:
        """Works with an equal value may be handed to `run_batch` in one call."""
        ...

    def run(self) -> R: ...

    @staticmethod
    def run_batch(works: Sequence[Any]) -> list[Any]:
        """The results of all works, in order; within float tolerance those of `run`."""
        ...


class Runtime(Protocol):
    """One node's hold on the world. All times are in seconds since the start of the run."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    async def compute(self, work: Work[R]) -> R:
        """The result of `work`. Other tasks of the node go on meanwhile."""
        ...

    async def send(self, to: NodeId, message: Message) -> bool:
        """Hand `message` to the network; whether it was taken. A peer that dies on the way never gets it."""
        ...

    async def transmit(self, to: NodeId, message: Message) -> bool:
        """As `send`, and wait until the last of the message has left this node: so whoever has many messages keeps
        those that the network has no room for yet. False when it did not get out."""
        ...

    def collect(self, kind: str) -> list[Message]:
        """All messages of this kind that have come and nobody has claimed, in the order in which they came."""
        ...

    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        """What `wanted` asks for; less when `timeout` seconds have passed, or when the others are gone."""
        ...

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        """Run `task` beside the algorithm. It ends, at the latest, when the algorithm's `run` does."""
        ...

    def failed_peers(self) -> Collection[NodeId]:
        """The nodes known to have died."""
        ...

    def mark_rejoined(self, node: NodeId, round: int) -> None:
        """`node` has come back: from `round` on it is waited for again."""
        ...
