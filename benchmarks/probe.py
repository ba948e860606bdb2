"""An algorithm that measures message times: nodes with even ids send to the next node, which records the times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.message import Payload
from shoal.node import Node

CONNECT_SECONDS = 1.0
"""Seconds before the first message, to open connections."""


@dataclass(frozen=True)
class Probe:
    """Send `count` messages of `kilobytes` each, one after another.

    A sender waits until a message has left, and `pause` seconds more. With `training`, nodes train at the same time.
    """

    rounds: int = 1
    count: int = 20
    kilobytes: float = 100.0
    pause: float = 0.0
    training: bool = False

    async def run(self, node: Node) -> None:
        if self.training:
            node.background(_train(node))
        peer = node.id ^ 1
        async for _ in node.rounds(self.rounds):
            await _send(node, peer, "hello")
            await node.receive(kind="hello", sender=peer)
            await node.sleep(CONNECT_SECONDS)
            if node.id % 2 == 0:
                await self._send(node, peer)
            else:
                await self._receive(node, peer)

    async def _send(self, node: Node, peer: int) -> None:
        content = {"content": np.zeros(int(1000 * self.kilobytes), np.uint8)}
        node.record_event("begins", repr(node.now()))
        for i in range(self.count):
            await node.send_and_wait(peer, Payload(content, {"sent": node.now()}), round=i, kind="probe")
            if self.pause:
                await node.sleep(self.pause)
        await _send(node, peer, "end")
        await node.receive(kind="bye", sender=peer)

    async def _receive(self, node: Node, peer: int) -> None:
        node.background(self._write_down(node))
        await node.receive(kind="end", sender=peer)
        await node.sleep(0.2)
        await _send(node, peer, "bye")

    async def _write_down(self, node: Node) -> None:
        while True:
            message = await node.receive(kind="probe")
            if message is not None:
                node.record_event("took", f"{message.payload.fields['sent']!r} {node.now()!r} {message.wire_size}")


async def _send(node: Node, peer: int, what: str) -> None:
    """Send it so often that one copy arrives despite losses."""
    for _ in range(30):
        await node.send([peer], Payload({}), round=0, kind=what)


async def _train(node: Node) -> None:
    while True:
        await node.train(node.params)
