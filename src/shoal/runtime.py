"""The interface between a node and the engine that runs it.

`Runtime` is the contract; `shoal.testing.check_runtime` is its conformance suite.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from shoal.mailbox import Filter
from shoal.message import Message
from shoal.node_activity import NodeActivity
from shoal.types import NodeId

R = TypeVar("R", covariant=True)


class Work(Protocol[R]):
    """A computation. It depends only on its inputs, so an engine may run it anywhere and at any time."""

    @property
    def seconds(self) -> float:
        """The time that it takes on the node's device, in virtual seconds. The process engine measures real time."""
        ...

    @property
    def batch_key(self) -> Hashable:
        """Computations with equal keys may be passed to `run_batch` in one call. A new `object()` equals no other."""
        ...

    def run(self) -> R: ...

    @staticmethod
    def run_batch(works: Sequence[Any]) -> list[Any]:
        """Return the results of all computations, in order. They equal those of `run` within float tolerance."""
        ...


class Runtime(Protocol):
    """The services that an engine provides to one node. All times are in seconds since the start of the run."""

    @property
    def activity(self) -> NodeActivity:
        """What the node's algorithm did, for the records. The engine adds the spans."""
        ...

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    async def compute(self, work: Work[R]) -> R:
        """Return the result of `work`. Other tasks of the node continue meanwhile."""
        ...

    async def send(self, to: NodeId, message: Message) -> bool:
        """Hand `message` to the network. Returns False if it was dropped. A peer that fails first never gets it."""
        ...

    async def send_and_wait(self, to: NodeId, message: Message) -> bool:
        """Send `message` and wait until it has left this node. Returns False if it was dropped.

        So a node with many messages keeps them until the network can take them.
        """
        ...

    def receive_available(self, kind: str) -> list[Message]:
        """Return all unclaimed messages of this kind, in order of arrival."""
        ...

    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        """Return the wanted messages; fewer if `timeout` seconds have passed or senders have failed."""
        ...

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        """Run `task` concurrently with the algorithm. It ends at the latest with the algorithm's `run`."""
        ...

    def failed_peers(self) -> Collection[NodeId]:
        """Return the nodes that are known to have failed."""
        ...

    def late_messages(self, node: NodeId) -> int:
        """Return the number of messages from `node` that arrived after the receive of their round had ended."""
        ...

    def mark_rejoined(self, node: NodeId, round: int) -> None:
        """Expect messages from `node`, which has rejoined, from `round` on."""
        ...
