"""Connections to nodes that other machines cannot reach, because their agent is behind a router or a firewall.

Such an agent has dialled out to the coordinator. For each of its nodes the coordinator listens at a port of its own.
When a peer connects there, the coordinator asks the agent for a tunnel: the agent connects to the coordinator once
more, presents the token of the request, and joins this connection with one to its node. Both ends only copy bytes, so
sealed links stay sealed from node to node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import zmq

from shoal.errors import LaunchError
from shoal.types import NodeId

TOKEN_BYTES = 16
COPY_BYTES = 2**16
TUNNEL_SECONDS = 30.0
"""How long a peer waits for its tunnel."""


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._started: set[asyncio.Task[None]] = set()
        """Tasks under way: the event loop refers to tasks only weakly, so that they could be collected as garbage."""
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, task: Coroutine[Any, Any, Any]) -> Any:
        """Run `task` and return its result."""
        return asyncio.run_coroutine_threadsafe(task, self._loop).result()

    def start(self, task: Coroutine[Any, Any, None]) -> None:
        """Run `task` without waiting for it."""
        self._loop.call_soon_threadsafe(self._start, task)

    def _start(self, task: Coroutine[Any, Any, None]) -> None:
        started = self._loop.create_task(task)
        self._started.add(started)
        started.add_done_callback(self._started.discard)

    def close(self) -> None:
        self.call(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class RelayServer:
    """The coordinator's end: one port for each node that is relayed, and one for tunnels."""

    def __init__(self, host: str, announce: str) -> None:
        """`host` is the address to listen on, `announce` the one at which other machines reach it."""
        self._host = host.strip("[]")
        self._announce = announce
        self._requests: queue.SimpleQueue[tuple[NodeId, str]] = queue.SimpleQueue()
        self._readable, self._wakeup = os.pipe()
        self._waiting: dict[str, asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._servers: list[asyncio.Server] = []
        self._endpoints: dict[NodeId, str] = {}
        self._thread = _LoopThread("relay")
        try:
            self.tunnel_port: int = self._thread.call(self._listen(self._accept_tunnel))
        except OSError as error:
            self.close()
            raise LaunchError(f"the relay cannot listen at {host}: {error.strerror}") from error

    def endpoint(self, node: NodeId) -> str:
        """The endpoint at which peers reach a node; the same for a restarted node."""
        if node not in self._endpoints:
            port = self._thread.call(self._listen(lambda r, w: self._accept_peer(node, r, w)))
            self._endpoints[node] = f"tcp://{self._announce}:{port}"
        return self._endpoints[node]

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._readable, zmq.POLLIN)

    def requests(self) -> list[tuple[NodeId, str]]:
        """The tunnels that agents have to open: the node and the token of each."""
        found = []
        while not self._requests.empty():
            found.append(self._requests.get())
            os.read(self._readable, 1)
        return found

    def close(self) -> None:
        self._thread.call(self._close_servers())
        self._thread.close()
        os.close(self._readable)
        os.close(self._wakeup)

    async def _close_servers(self) -> None:
        for server in self._servers:
            server.close()

    async def _listen(
        self, accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
    ) -> int:
        server = await asyncio.start_server(accept, self._host, 0, backlog=1024)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _accept_peer(self, node: NodeId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        token = secrets.token_hex(TOKEN_BYTES)
        tunnel = self._waiting[token] = asyncio.get_running_loop().create_future()
        self._requests.put((node, token))
        os.write(self._wakeup, b".")
        try:
            async with asyncio.timeout(TUNNEL_SECONDS):
                other_reader, other_writer = await tunnel
        except TimeoutError:
            writer.close()  # ZeroMQ connects again
            return
        finally:
            del self._waiting[token]
        await join(reader, writer, other_reader, other_writer)

    async def _accept_tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TUNNEL_SECONDS):
                token = (await reader.readexactly(2 * TOKEN_BYTES)).decode("ascii", "replace")
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        tunnel = self._waiting.get(token)
        if tunnel is None or tunnel.done():
            writer.close()  # an unknown token
        else:
            tunnel.set_result((reader, writer))


class RelayClient:
    """The agent's end: opens tunnels."""

    def __init__(self) -> None:
        self._thread = _LoopThread("relay")

    def open(self, token: str, relay: tuple[str, int], node: tuple[str, int]) -> None:
        """Join a connection to the coordinator's relay with one to a node of this machine."""
        self._thread.start(_open_tunnel(token, relay, node))

    def close(self) -> None:
        self._thread.close()


async def _open_tunnel(token: str, relay: tuple[str, int], node: tuple[str, int]) -> None:
    with contextlib.suppress(OSError):  # the peer connects again, and gets another tunnel
        reader, writer = await asyncio.open_connection(*relay)
        try:
            node_reader, node_writer = await asyncio.open_connection(*node)
        except OSError:
            writer.close()
            raise
        writer.write(token.encode())
        await join(reader, writer, node_reader, node_writer)


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Copy bytes between two connections, in both directions, until one of them ends."""
    copies = [asyncio.ensure_future(_copy(reader, other_writer)), asyncio.ensure_future(_copy(other_reader, writer))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        writer.close()
        other_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, TimeoutError):  # ZeroMQ connects again
        while content := await reader.read(COPY_BYTES):
            writer.write(content)
            await writer.drain()


async def _cancel_all() -> None:
    own = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not own]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
