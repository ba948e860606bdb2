"""A node's connection to the coordinator."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import zmq

from shoal.engines.processes import control
from shoal.engines.processes.sealing import Seal
from shoal.types import Params

LAST_MESSAGE_SECONDS = 5.0
"""How long a node that exits waits until the agent has read its last message."""


class ControlHandler(Protocol):
    """What a node does when a message of the coordinator arrives."""

    def peer_failed(self, message: control.PeerFailed) -> None: ...

    def peer_restarted(self, message: control.PeerRestarted) -> None: ...

    def set_online(self, online: bool) -> None: ...

    def inject_fault(self, message: control.InjectFault) -> None: ...

    def save_checkpoint(self, round: int) -> None: ...

    def stop(self, message: control.Finish) -> None:
        """End early: the coordinator stops the run."""
        ...

    def fail(self, error: Exception) -> None:
        """End with an error: a message of the coordinator could not be handled."""
        ...


class CoordinatorLink:
    """The node's end of the connection to the coordinator.

    After the start message, all further messages wait until the node calls `resume`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        handler: ControlHandler,
        seal: Seal | None = None,
        key: bytes | None = None,
    ) -> None:
        """`key` is the coordinator's public key, where links are sealed."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if seal is not None:
            seal.secure_client(self._socket, key)
        self._socket.connect(endpoint)
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[control.Start] = self._loop.create_future()
        """The coordinator's message that all nodes listen."""
        self.finished: asyncio.Future[control.Finish] = self._loop.create_future()
        """The coordinator's message that all nodes are done."""
        self._resumed = False
        self._loop.add_reader(self._socket.FD, self._drain)

    def resume(self) -> None:
        """Handle the messages that arrived since the start message, and all further ones."""
        self._resumed = True
        self._drain()

    def send(self, message: control.FromNode, params: Params | None = None) -> None:
        frames = [control.encode(message)] if params is None else [control.encode(message), params.tobytes()]
        self._socket.send_multipart(frames)
        self._loop.call_soon(self._drain)  # sending may consume ZeroMQ's signal that a message has arrived

    def close(self, last: control.NodeExiting | control.NodeFailed) -> None:
        """Send the last message, and wait until it is read: the exit of the process must not become known before."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._socket.FD)
        self._socket.send(control.encode(last))
        deadline = time.monotonic() + LAST_MESSAGE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and self._socket.poll(max(1, round(1000 * left))):
            if isinstance(control.decode_to_node(self._socket.recv()), control.LastMessageRead):
                break
        self._socket.close(linger=0)

    def _drain(self) -> None:
        while not self._socket.closed and (self._resumed or not self.started.done()):
            try:
                received = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(control.decode_to_node(received))
            except Exception as error:  # the event loop, which calls this method, would only log it
                self._handler.fail(error)

    def _handle(self, message: control.ToNode) -> None:
        if isinstance(message, control.Start):
            if not self.started.done():  # a coordinator that continues a run sends it once more
                self.started.set_result(message)
        elif isinstance(message, control.PeerFailed):
            self._handler.peer_failed(message)
        elif isinstance(message, control.PeerRestarted):
            self._handler.peer_restarted(message)
        elif isinstance(message, control.SetOnline):
            self._handler.set_online(message.online)
        elif isinstance(message, control.InjectFault):
            self._handler.inject_fault(message)
        elif isinstance(message, control.SaveCheckpoint):
            self._handler.save_checkpoint(message.round)
        elif isinstance(message, control.Finish):
            if message.stopped:
                self._handler.stop(message)
            elif not self.finished.done():
                self.finished.set_result(message)
