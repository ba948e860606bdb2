"""Liveness probes: a node that waits long for a peer asks whether that peer still runs."""

from __future__ import annotations

from shoal.message import Payload
from shoal.node import Node


async def answer_probes(node: Node, *, probe: str, reply: str) -> None:
    """Answer every message of kind `probe` from a training node with one of kind `reply`. Runs in the background."""
    while (message := await node.receive(kind=probe)) is not None:
        if message.sender < node.nodes:
            await node.send([message.sender], Payload({}), round=message.round, kind=reply)
