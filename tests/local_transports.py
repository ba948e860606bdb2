"""Transports of nodes on this machine, and messages for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from shoal.engines.processes.transport import Transport, TransportSettings
from shoal.message import RUN_LENGTH, Message, Payload

RUN = "0" * RUN_LENGTH
LONG = 120.0
"""Seconds: a generous timeout for operations that are fast on an idle machine."""


def open_transport(context: zmq.Context[Any], id: int = 0, **options: Any) -> Transport:
    """The transport of node `id`, which ignores what it receives unless `options` override it."""
    collaborators = {"deliver": lambda message: None, "reject": lambda why: None, "seal": None}
    collaborators |= {name: options.pop(name) for name in collaborators.keys() & options.keys()}
    settings = TransportSettings(RUN, "127.0.0.1", max_message_bytes=2**24, connections=8, send_timeout=LONG)
    return Transport(context, id, replace(settings, **options), **collaborators)


def new_message(sender: int = 0, round: int = 0, size: int = 8, kind: str = "model") -> Message:
    return Message(sender, kind, round, Payload({"params": np.zeros(size, np.uint8)}), RUN)


async def eventually(condition: Callable[[], Any]) -> None:
    """Wait for a true value of `condition`, while the event loop continues."""
    async with asyncio.timeout(LONG):
        while not condition():  # noqa: ASYNC110 - threads and sockets set no event
            await asyncio.sleep(0.01)
