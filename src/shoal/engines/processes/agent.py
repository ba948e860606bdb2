"""Agents: what runs the nodes of one machine on behalf of the coordinator.

An agent owns a zygote and a control server. It forks and kills nodes, passes messages between them and the coordinator,
evaluates averaged models, writes records and reports exits. The coordinator knows an agent only by the interface
`Agent`, so that it does not matter on which machine the agent runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.capacity import check_capacity
from shoal.engines.processes.control_server import (
    FINAL_MESSAGES,
    LOOPBACK,
    ControlMessage,
    ControlServer,
    ServerSettings,
)
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.namespaces import Namespaces, address
from shoal.engines.processes.template_process import ZygoteTemplates
from shoal.engines.processes.transport import bind_to_any_port
from shoal.engines.processes.zygote_process import ZygoteProcess
from shoal.environment.network.access import AccessLink
from shoal.experiment import ProcessesPlan
from shoal.experiment.mapping import LOCALHOST
from shoal.results.coordinator_file import AgentShare
from shoal.results.records import RunFolder
from shoal.types import NodeId

Report: TypeAlias = control.FromAgent | ControlMessage
"""What an agent reports: its own reports, and the messages of its nodes."""


class Agent(Protocol):
    """The processes of one machine, seen from the coordinator."""

    @property
    def name(self) -> str:
        """The name of the agent's machine."""
        ...

    def send(self, request: control.ToAgent) -> None:
        """Send a request, now or when the agent reads it. Raises `RunError` if the agent has ended."""
        ...

    def reports(self) -> Iterator[Report]:
        """The reports that have arrived, without waiting. Raises `RunError` if the agent has ended."""
        ...

    def register(self, poller: zmq.Poller) -> None:
        """Register with `poller` what becomes ready when there are reports, or when waiting requests can be sent.

        Called before every wait.
        """
        ...

    def collect(self) -> None:
        """All nodes have exited: bring the files of the run into its folder, until `collected` is true."""
        ...

    @property
    def received_bytes(self) -> int:
        """Bytes that have arrived from the agent's machine."""
        ...

    @property
    def collected(self) -> bool:
        """Whether all files of the run are in its folder, or are lost with the agent."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the agent has failed, with all its nodes."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the agent cannot respond because its process was stopped by a signal."""
        ...

    @property
    def waits_for_space(self) -> bool:
        """Whether files, and messages behind them, do not arrive because the disk of the coordinator is full."""
        ...

    @property
    def unauthenticated_connections(self) -> int:
        """Connections and messages that the agent or its network process rejected."""
        ...

    def share(self, nodes: list[NodeId]) -> AgentShare | None:
        """What another coordinator needs to continue `nodes` on this agent; None if they end with this one."""
        ...

    def count_remaining(self) -> None:
        """Count connections that never authenticated: every process of the run has connected, or never will."""
        ...

    def kill(self) -> None:
        """Kill every process of the agent at once. Safe in a signal handler."""
        ...

    def close(self) -> None:
        """Kill every process of the agent and release what it holds."""
        ...


@dataclass(frozen=True)
class AgentSettings:
    """What an agent must know about the run."""

    run: str
    """The run's secret identifier."""
    plan: ProcessesPlan
    nodes: int
    """The number of nodes of the run, on all machines."""
    sealed: bool
    """Whether all links are encrypted and authenticated."""
    with_network: bool = False
    """Whether the agent starts the run's network process."""
    public_keys: Mapping[NodeId, bytes] = field(default_factory=dict)
    """The keys of nodes, where a folder holds them."""
    access_links: Sequence[AccessLink] | None = None
    """The limits of nodes, each in a network namespace of its own, where the kernel shapes messages."""
    host: str | None = None
    """The address that processes of this agent listen on; None: the one of the experiment."""
    announce: str | None = None
    """The address at which other machines reach them; None: `host`."""
    clock_offset: float = 0.0
    """Seconds to add to this machine's monotonic clock to get the coordinator's."""


class LocalAgent:
    """The agent of this machine: its zygote is a child of this process."""

    name = LOCALHOST

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: RunFolder,
        settings: AgentSettings,
        spare: ZygoteProcess | None = None,
        templates: ZygoteTemplates | None = None,
    ) -> None:
        """Starts the zygote, which prepares nothing before the request `Prepare`; or takes one that was preloaded.

        If `templates` has a template, the zygote is forked from it.
        """
        self._folder = str(folder.path.resolve())
        self._settings = settings
        self._namespaces: Namespaces | None = None
        self._parameters = 0
        self._notices: deque[control.Notice] = deque()
        self._records_paused = False
        """Whether records of averages and faults wait for space on the disk."""
        server_settings = self._server_settings()  # raises if links cannot be sealed, before anything starts
        self._zygote = ZygoteProcess(folder, templates) if spare is None else spare
        try:
            if spare is not None:
                spare.begin(folder)
            self._server = ControlServer(context, server_settings, self._bind, self._node_host, self._notify)
        except BaseException:
            self.close()  # no process stays behind
            raise

    def send(self, request: control.ToAgent) -> None:
        if isinstance(request, control.ToNodes):
            self._server.send(request.nodes, request.message)
        elif isinstance(request, control.ToNetwork):
            self._server.send_network(request.message)
        elif isinstance(request, control.StartNodes):
            self._start(request)
        else:
            self._zygote.send(request)

    def reports(self) -> Iterator[Report]:
        self._zygote.flush()
        while self._zygote.has_report():
            report = self._zygote.receive()
            if isinstance(report, control.Prepared):
                self._parameters = self._server.model_parameters = report.parameters
            elif isinstance(report, control.KeyAnnounced):
                self._server.allow_key(report.node, report.key)
            elif isinstance(report, control.AgentDiskReport):
                self._records_paused = report.paused
            elif isinstance(report, control.NodeExited | control.NetworkExited):
                yield from self._server.receive(FINAL_MESSAGES)
                if isinstance(report, control.NodeExited):
                    self._server.disconnect(report.node)
            yield report
        self._server.answer_connections()
        yield from self._server.receive()
        while self._notices:
            yield self._notices.popleft()

    def register(self, poller: zmq.Poller) -> None:
        flags = zmq.POLLIN | zmq.POLLOUT if self._zygote.has_unsent else zmq.POLLIN
        poller.register(self._zygote.fileno(), flags)
        for socket in self._server.sockets:
            poller.register(socket, zmq.POLLIN)

    def collect(self) -> None:
        """Nothing: nodes and the zygote write into the folder of the run."""

    @property
    def received_bytes(self) -> int:
        return 0  # it is this machine

    @property
    def collected(self) -> bool:
        return not self._records_paused

    @property
    def is_lost(self) -> bool:
        return False  # `send` and `reports` raise an error

    @property
    def is_stopped(self) -> bool:
        return self._zygote.is_stopped

    @property
    def waits_for_space(self) -> bool:
        return False

    @property
    def unauthenticated_connections(self) -> int:
        return self._server.unauthenticated_connections

    def share(self, nodes: list[NodeId]) -> None:
        """Nothing: the kernel ends the nodes with this process."""

    def count_remaining(self) -> None:
        self._server.count_remaining()

    def kill(self) -> None:
        self._zygote.kill()

    def close(self) -> None:
        self._zygote.close()
        if self._namespaces is not None:
            self._namespaces.close()

    def _start(self, request: control.StartNodes) -> None:
        settings = self._settings
        if not request.restarted:
            nodes = [*request.nodes, *request.late_nodes]
            services = sum(node >= request.training_nodes for node in nodes)
            check_capacity(len(nodes) - services, services, self._parameters)
        places = []
        if self._namespaces is not None:
            places = [self._namespaces.place(node) for node in range(len(settings.access_links or ()))]
        self._server.expect(request.nodes)
        self._zygote.send(
            msgspec.structs.replace(
                request,
                folder=self._folder,
                control_endpoint=self._server.endpoint,
                control_key=self._server.public_key,
                namespaces=places,
                host=settings.host,
                announce=settings.announce,
                clock_offset=settings.clock_offset,
            )
        )

    def _server_settings(self) -> ServerSettings:
        settings = self._settings
        return ServerSettings(
            settings.run,
            settings.plan,
            settings.nodes,
            settings.with_network,
            KeyPair.fresh() if settings.sealed else None,
            settings.public_keys,
            settings.announce or settings.host or LOOPBACK,
        )

    def _bind(self, socket: zmq.Socket[bytes]) -> str:
        if self._settings.access_links is not None:
            self._namespaces = Namespaces(self._settings.access_links)
            return self._namespaces.listen(socket)
        bind_to_any_port(socket, LOOPBACK)
        bound: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return bound.decode().rstrip("\0")

    def _node_host(self, node: NodeId) -> str | None:
        """The address at which the node must listen; None: the one that the experiment sets."""
        if self._settings.access_links is not None:
            return address(node)
        return self._settings.announce or self._settings.host

    def _notify(self, text: str) -> None:
        self._notices.append(control.Notice(text))
