"""For algorithms that send while they train: an out-queue, from which messages leave beside the algorithm."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shoal.message import Payload
from shoal.node import Node
from shoal.types import NodeId

UNSENT = "unsent"


class OutQueue:
    """What a node has to say, and to whom: sent in order, `streams` messages at a time.

    What still waits when there is newer to say is dropped: a slow node is late with nothing, it only says less. A
    message that has begun to leave goes on to its end. `node.memory["unsent"]` is how many wait, the last of those that
    it was filled with: from a checkpoint, the algorithm fills the queue with these again.
    """

    def __init__(self, node: Node, kind: str, streams: int = 1) -> None:
        self._node = node
        self._kind = kind
        self._streams = streams
        self._waiting: deque[tuple[NodeId, Payload]] = deque()
        self._round = 0
        self._senders = 0

    def refill(self, messages: Iterable[tuple[NodeId, Payload]], round: int) -> None:
        """Drop what waits, and send these in its place."""
        self._waiting = deque(messages)
        self._round = round
        self._node.memory[UNSENT] = len(self._waiting)
        # A sender ends when it finds nothing to send, for it could not be woken: those that are missing start here.
        while self._senders < min(self._streams, len(self._waiting)):
            self._senders += 1
            self._node.background(self._send())

    async def _send(self) -> None:
        while self._waiting:
            to, payload = self._waiting.popleft()
            self._node.memory[UNSENT] = len(self._waiting)
            await self._node.transmit(to, payload, round=self._round, kind=self._kind)
        self._senders -= 1
