"""Agents: what runs the nodes of one machine on behalf of the coordinator.

An agent owns a zygote. It forks and kills nodes, evaluates averaged models, writes records and reports exits. The
coordinator knows an agent only by the interface `Agent`, so that it does not matter on which machine the agent runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.capacity import check_capacity
from shoal.engines.processes.namespaces import Namespaces, address
from shoal.engines.processes.zygote_process import ZygoteProcess
from shoal.environment.network.access import AccessLink
from shoal.results.records import RunFolder
from shoal.types import NodeId

LOOPBACK = "127.0.0.1"


class Agent(Protocol):
    """The processes of one machine, seen from the coordinator."""

    def bind(self, socket: zmq.Socket[bytes]) -> str:
        """Bind the coordinator's socket where this agent's nodes reach it; returns the endpoint for nodes."""
        ...

    def node_host(self, node: NodeId) -> str | None:
        """The address at which the node listens; None: the one that the experiment sets."""
        ...

    def send(self, request: control.ToAgent) -> None:
        """Send a request, now or when the agent reads it. Raises `RunError` if the agent has ended."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Whether requests wait until the file of `fileno` is writable; then call `reports`."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the agent cannot respond because its process was stopped by a signal."""
        ...

    def reports(self) -> Iterator[control.FromAgent]:
        """The reports that have arrived, without waiting. Raises `RunError` if the agent has ended."""
        ...

    def fileno(self) -> int:
        """A file that is readable when there are reports."""
        ...

    def kill(self) -> None:
        """Kill every process of the agent at once. Safe in a signal handler."""
        ...

    def close(self) -> None:
        """Kill every process of the agent and release what it holds."""
        ...


class LocalAgent:
    """The agent of this machine: its zygote is a child of the coordinator's process."""

    def __init__(self, folder: RunFolder, access_links: Sequence[AccessLink] | None = None) -> None:
        """`access_links` limit the nodes, each in a network namespace of its own, where the kernel shapes messages."""
        self._access_links = access_links
        self._namespaces: Namespaces | None = None
        self._parameters = 0
        self._zygote = ZygoteProcess(folder)

    def bind(self, socket: zmq.Socket[bytes]) -> str:
        if self._access_links is not None:
            self._namespaces = Namespaces(self._access_links)
            return self._namespaces.listen(socket)
        socket.bind(f"tcp://{LOOPBACK}:*")
        bound: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return bound.decode().rstrip("\0")

    def node_host(self, node: NodeId) -> str | None:
        return None if self._access_links is None else address(node)

    def send(self, request: control.ToAgent) -> None:
        if isinstance(request, control.StartNodes):
            if not request.restarted:
                services = request.service_nodes
                check_capacity(len(request.nodes) - services, services, self._parameters)
            if self._namespaces is not None:
                places = [self._namespaces.place(node) for node in range(len(self._access_links or ()))]
                request = msgspec.structs.replace(request, namespaces=places)
        self._zygote.send(request)

    @property
    def has_unsent(self) -> bool:
        return self._zygote.has_unsent

    @property
    def is_stopped(self) -> bool:
        return self._zygote.is_stopped

    def reports(self) -> Iterator[control.FromAgent]:
        self._zygote.flush()
        while self._zygote.has_report():
            report = self._zygote.receive()
            if isinstance(report, control.Prepared):
                self._parameters = report.parameters
            yield report

    def fileno(self) -> int:
        return self._zygote.fileno()

    def kill(self) -> None:
        self._zygote.kill()

    def close(self) -> None:
        self._zygote.close()
        if self._namespaces is not None:
            self._namespaces.close()
