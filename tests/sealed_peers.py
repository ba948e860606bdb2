"""Nodes with sealed links, sockets of other processes, and sealed experiments."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import zmq

from local_transports import LONG, RUN, open_transport
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.sealing import Seal
from shoal.experiment import Experiment
from shoal.message import Message, Payload

SECRET = np.random.default_rng(7).standard_normal(2000).astype(np.float32)


def new_message(sender: int = 0, round: int = 0, values: Any = SECRET) -> Message:
    return Message(sender, "model", round, Payload({"params": values}).frozen(), RUN)


class Peer:
    """A node's sockets, with a ZeroMQ context of its own, as in a separate process."""

    def __init__(self, id: int, pair: KeyPair | None, key_wait: float = 0.0) -> None:
        self.id = id
        self.context: zmq.Context[Any] = zmq.Context()
        self.received: list[Message] = []
        self.rejected: list[str] = []
        self.unauthenticated: list[str] = []
        self.seal = None
        if pair is not None:
            self.seal = Seal(self.context, pair, self.unauthenticated.append, time.monotonic, key_wait)
        self.transport = open_transport(
            self.context, id, deliver=self.received.append, reject=self.rejected.append, seal=self.seal
        )
        self.serving: asyncio.Task[None] | None = None

    def start(self, endpoints: list[str], pairs: list[KeyPair]) -> None:
        if self.seal is not None:
            for node, pair in enumerate(pairs):
                self.seal.allow(str(node), pair.public)
            self.serving = asyncio.create_task(self.seal.serve())
        self.transport.start(endpoints)

    def close(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
        self.transport.close()
        if self.seal is not None:
            self.seal.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def connected_peers(
    sealed: bool = True, count: int = 2, through: Callable[[str], str] = str, key_wait: float = 0.0
) -> AsyncIterator[list[Peer]]:
    """Nodes that know each other's endpoints and keys. Messages to node 0 pass through `through`."""
    pairs = [KeyPair.fresh() for _ in range(count)] if sealed else []
    found = [Peer(id, pairs[id] if sealed else None, key_wait) for id in range(count)]
    endpoints = [peer.transport.endpoint for peer in found]
    try:
        for peer in found:
            peer.start([through(endpoints[0]), *endpoints[1:]], pairs)
        async with asyncio.timeout(LONG):
            yield found
    finally:
        for peer in found:
            peer.close()


def run_async(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


@contextlib.contextmanager
def connected(endpoint: str, pair: KeyPair | None = None, key: bytes | None = None) -> Any:
    """A socket with the key pair `pair` that expects `key` to be the public key of `endpoint`."""
    context: zmq.Context[Any] = zmq.Context()
    push = context.socket(zmq.PUSH)
    if pair is not None and key is not None:
        push.curve_publickey, push.curve_secretkey, push.curve_serverkey = pair.public, pair.secret, key
    push.connect(endpoint)
    try:
        yield push
    finally:
        context.destroy(linger=0)


def small(**processes: Any) -> Experiment:
    training = {"batch_size": 8, "local_steps": 1}
    return Experiment(nodes=4, engine="processes", training=training, processes={"sealed": True, **processes})
