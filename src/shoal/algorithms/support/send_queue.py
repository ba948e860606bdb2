"""Queues of outgoing messages, for algorithms that send while they train: newer messages replace unsent ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from shoal.message import Payload
from shoal.node import Node
from shoal.types import NodeId

UNSENT = "unsent"


class SendQueue:
    """A queue that is sent in order, in the background, `streams` messages at a time.

    A refill drops the messages that still wait, so a slow node never sends old messages; it sends fewer. A message that
    has begun to leave is sent to its end. `node.algorithm_state["unsent"]` is the number of waiting messages, the last
    ones of the latest refill: after a restore, the algorithm refills the queue with them.
    """

    def __init__(self, node: Node, kind: str, streams: int = 1) -> None:
        self._node = node
        self._kind = kind
        self._streams = streams
        self._waiting: deque[tuple[NodeId, Payload]] = deque()
        self._round = 0
        self._senders = 0

    def refill(self, messages: Iterable[tuple[NodeId, Payload]], round: int) -> None:
        """Replace the waiting messages."""
        self._waiting = deque(messages)
        self._round = round
        self._node.algorithm_state[UNSENT] = len(self._waiting)
        # A sender task ends when the queue is empty, because nothing could wake it. So start the missing ones.
        while self._senders < min(self._streams, len(self._waiting)):
            self._senders += 1
            self._node.background(self._send())

    async def _send(self) -> None:
        while self._waiting:
            to, payload = self._waiting.popleft()
            self._node.algorithm_state[UNSENT] = len(self._waiting)
            await self._node.send_and_wait(to, payload, round=self._round, kind=self._kind)
        self._senders -= 1


class OrderedSender:
    """Sends every message in order, in the background, one at a time. No message is dropped, however long they wait."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._waiting: list[list[Any]] = node.algorithm_state.setdefault("waiting", [])
        """Lists of receiver, kind, round and arrays of a message; part of the node's state."""
        self._sending = False
        self._start()

    def add(self, to: NodeId, payload: Payload, round: int, kind: str) -> None:
        self._waiting.append([to, kind, round, payload.arrays])
        self._start()

    def _start(self) -> None:
        if self._waiting and not self._sending:
            self._sending = True
            self._node.background(self._send())

    async def _send(self) -> None:
        while self._waiting:
            to, kind, round, arrays = self._waiting.pop(0)
            await self._node.send_and_wait(to, Payload(arrays), round=round, kind=kind)
        self._sending = False


class LatestSender:
    """Sends the latest payload to each peer in the background, one message per peer at a time."""

    def __init__(self, node: Node, kind: str) -> None:
        self._node = node
        self._kind = kind
        self._unsent: dict[NodeId, tuple[Payload, int]] = {}
        self._sending: set[NodeId] = set()

    def send(self, peers: Iterable[NodeId], payload: Payload, round: int) -> None:
        """Send to `peers`, in place of any earlier payload that has not begun to leave."""
        for peer in peers:
            self._unsent[peer] = payload, round
            if peer not in self._sending:
                self._sending.add(peer)
                self._node.background(self._send(peer))

    async def _send(self, peer: NodeId) -> None:
        while peer in self._unsent:
            payload, round = self._unsent.pop(peer)
            await self._node.send_and_wait(peer, payload, round=round, kind=self._kind)
        self._sending.discard(peer)
