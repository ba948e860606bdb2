"""Fakes for the parts of the coordinator: an agent and a control server that record what they are asked to send."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

import zmq

from shoal.engines.processes import control


class FakeAgent:
    """An agent that starts nothing."""

    def __init__(self) -> None:
        self.requests: list[control.ToAgent] = []
        self.hosts: dict[int, str] = {}
        self._pipe: tuple[int, int] | None = None

    def bind(self, socket: zmq.Socket[Any]) -> str:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def node_host(self, node: int) -> str | None:
        return self.hosts.get(node)

    def send(self, request: control.ToAgent) -> None:
        self.requests.append(request)

    def reports(self) -> Iterator[control.FromAgent]:
        return iter(())

    has_unsent = False
    is_stopped = False

    def fileno(self) -> int:
        """A file that is never readable: there are no reports."""
        self._pipe = self._pipe or os.pipe()
        return self._pipe[0]

    def kill(self) -> None: ...

    def close(self) -> None:
        for file in self._pipe or ():
            os.close(file)


class FakeServer:
    """A control server whose nodes are always connected."""

    sealed = False
    network_endpoint = None
    network_key = None

    def __init__(self) -> None:
        self.sent: dict[int, list[control.ToNode]] = {}

    def send(self, nodes: Collection[int], message: control.ToNode) -> None:
        for node in nodes:
            self.sent.setdefault(node, []).append(message)

    def send_network(self, message: control.ToNode) -> None: ...
