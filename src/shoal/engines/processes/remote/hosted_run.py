"""A run on an agent's machine: its local agent, and its files on their way to the coordinator."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.agent import AgentSettings, LocalAgent
from shoal.engines.processes.control_server import ControlMessage
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.channel import Address
from shoal.engines.processes.remote.ledger import Ledger
from shoal.engines.processes.remote.link import Link
from shoal.engines.processes.remote.relay import RelayClient
from shoal.engines.processes.remote.remote_agent import NETWORK
from shoal.engines.processes.remote.run_reports import RunReports
from shoal.engines.processes.remote.spare_zygote import SpareZygote
from shoal.errors import LaunchError, ShoalError
from shoal.experiment import ProcessesPlan
from shoal.results.records import RunFolder
from shoal.types import NodeId

CODE = re.compile(r":|\.py\s*$")
RUN_NAME = re.compile(r"\w[\w.+-]*")
STATES = "states"
"""The folder of the states with which nodes of a resumed run start."""
SOURCES = "files"
"""The folder of the files that an experiment names, in the folder of the run."""


@dataclass(frozen=True)
class AgentOptions:
    """What the user of `shoal agent` has chosen."""

    name: str
    host: str
    """The address that nodes listen on."""
    announce: str
    """The address at which other machines reach the nodes."""
    folder: Path
    """Where the files of a run are kept until the coordinator has them."""
    allows_code: bool = False
    once: bool = False
    """Whether to exit after one run."""
    cores: int | None = None
    """The number of cores that nodes may use; None: all of the machine."""
    relay_host: str | None = None
    """The coordinator's address, where other machines reach the nodes only through its relay."""
    wait: float | None = None
    """Seconds to wait for a run; None: no limit."""
    ends_with_stdin: bool = False
    """Whether to end when the standard input does, because the process that started the agent has ended."""
    abandon: float = 24 * 3600.0
    """Seconds that a run continues without its coordinator."""


class HostedRun:
    """One run of this machine. Its requests and reports travel over a link."""

    def __init__(
        self, begin: protocol.BeginRun, options: AgentOptions, link: Link, spare: SpareZygote | None = None
    ) -> None:
        """Create the folder of the run, and start the zygote, or take the spare one. Raises `ShoalError`."""
        if RUN_NAME.fullmatch(begin.name) is None:
            raise LaunchError(f"the name {begin.name!r} of the run is invalid")
        self.name = begin.name
        self.link = link
        self._begin = begin
        self.folder = RunFolder.create(options.folder, begin.name)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports = RunReports(link, self.folder)
        self._collecting = False
        """Whether the coordinator waits for the rest of all files."""
        self._rejected = 0
        self._agent: LocalAgent | None = None
        self._relay: RelayClient | None = None
        self._coordinator_host = options.relay_host
        self._states: dict[NodeId, str] = {}
        """The files with the states of nodes, if the run is resumed."""
        self._endpoints: dict[NodeId, str] = {}
        """Where the processes of this run listen."""
        try:
            base = _write_sources(self.folder, begin.files, options.allows_code)
            _check_code(begin.experiment, options.allows_code)
            plan = ProcessesPlan.of(begin.experiment)  # the zygote validates the rest, and imports what it names
            _check_links(begin.sealed or plan.allow_unsealed, options)
            settings = AgentSettings(
                begin.run,
                plan,
                begin.nodes,
                begin.sealed,
                begin.with_network,
                host=options.host,
                announce=options.announce,
                clock_offset=begin.clock_offset,
            )
            zygote = None if spare is None else spare.take()
            self._agent = LocalAgent(self._context, self.folder, settings, zygote)
            prepare = control.Prepare(begin.experiment, str(base), begin.own_nodes, compares=True, cores=options.cores)
            self._agent.send(prepare)
        except BaseException:
            self.close()
            raise

    def report(self, ledger: Ledger, away: float) -> protocol.RunReport:
        """The state of the run for a new coordinator; `away` is how long there was none."""
        return ledger.report(self._begin.run, away, self._begin.clock_offset)

    def restore_state(self, node: NodeId, content: bytes) -> None:
        """Keep the state with which a node of a resumed run starts."""
        path = self.folder.path / STATES / f"{node}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self._states[node] = str(path)

    def handle(self, request: protocol.Request | protocol.OpenTunnel | protocol.Collect) -> None:
        if isinstance(request, protocol.Collect):
            self._collecting = True
            return
        if isinstance(request, protocol.OpenTunnel):
            self._open_tunnel(request)
            return
        if isinstance(request, control.StartNodes):
            request = msgspec.structs.replace(request, states=self._states)
        try:
            self._local.send(request)
        except ShoalError as error:
            self._report(control.StartFailed(type(error).__name__, str(error), []))

    def advance(self) -> None:
        """Send what is new to the coordinator. Raises `RunError` if the zygote has ended."""
        for report in self._local.reports():
            if isinstance(report, ControlMessage):
                self._note_endpoint(report.message)
                self._reports.pass_on(report)
            else:
                self._report(report)
        if (rejected := self._local.unauthenticated_connections) != self._rejected:
            self._rejected = rejected
            self._report(protocol.RejectedConnections(rejected))
        if self._collecting and self._local.collected:
            self._collecting = False
            self._reports.collect()
        self._reports.advance(time.monotonic())
        if self._reports.collected():
            self._local.count_remaining()
            self._report(protocol.RejectedConnections(self._local.unauthenticated_connections))
            self._report(protocol.Collected())

    def _note_endpoint(self, message: control.FromNode) -> None:
        if isinstance(message, control.NodeListening | control.NetworkListening):
            node = message.node if isinstance(message, control.NodeListening) else NETWORK
            self._endpoints[node] = message.endpoint

    def _open_tunnel(self, request: protocol.OpenTunnel) -> None:
        """Connect a peer to a process of this run."""
        if self._coordinator_host is None or request.node not in self._endpoints:
            return  # this agent is not relayed, or the process has not reported where it listens
        if self._relay is None:
            self._relay = RelayClient()
        host, _, port = self._endpoints[request.node].removeprefix("tcp://").rpartition(":")
        relay = self._coordinator_host.strip("[]"), request.port
        self._relay.open(request.token, relay, (host.strip("[]"), int(port)))

    def register(self, poller: zmq.Poller) -> None:
        self._local.register(poller)

    def kill(self) -> None:
        if self._agent is not None:
            self._agent.kill()

    def close(self) -> None:
        """End all processes of the run and remove its files, which the coordinator has or does not want."""
        if self._agent is not None:
            self._agent.close()
        if self._relay is not None:
            self._relay.close()
        self._context.destroy(linger=0)
        self.folder.remove()

    @property
    def _local(self) -> LocalAgent:
        assert self._agent is not None
        return self._agent

    def _report(self, report: protocol.FromRemote) -> None:
        self._reports.report(report)


def _check_links(may_be_reached: bool, options: AgentOptions) -> None:
    """Raise `LaunchError` if nodes would listen on a network with links that are not sealed."""
    for host in () if may_be_reached else (options.host, options.announce):
        if not Address(host, 0).is_loopback:
            raise LaunchError(
                f"nodes of agent {options.name!r} listen at {host}, and the links of this run are not sealed; set "
                "processes.sealed = true"
            )


def _write_sources(folder: RunFolder, files: list[protocol.SourceFile], allows_code: bool) -> Path:
    """Write the files that the experiment names, and return their folder. Raises `LaunchError`."""
    base = folder.path / SOURCES
    base.mkdir()
    for file in files:
        path = Path(file.name)
        if path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or "\0" in file.name:
            raise LaunchError(f"the name {file.name!r} of a file is invalid")
        if path.name.endswith(".py") and not allows_code:
            raise LaunchError(
                f"the experiment has the source file {path.name!r}, and this agent accepts no code; start it with "
                "--allow-code if you trust the coordinator with your account on this machine"
            )
        if hashlib.sha256(file.content).hexdigest() != file.digest:
            raise LaunchError(f"the file {path.name!r} has arrived damaged: its hash differs")
        (base / path.parent).mkdir(parents=True, exist_ok=True)
        (base / path).write_bytes(file.content)
    return base


def _check_code(table: dict[str, object], allows_code: bool) -> None:
    """Raise `LaunchError` if the experiment names code of other modules, and this agent accepts none."""
    components = {key: value for key, value in table.items() if key != "processes"}  # its addresses may have colons
    if not allows_code and (named := sorted(set(names_of_code(components)))):
        raise LaunchError(
            f"the experiment names the code {named[0]!r}, and this agent accepts no code; start it with --allow-code "
            "if you trust the coordinator with your account on this machine"
        )


def names_of_code(value: object) -> Iterator[str]:
    """Strings in a table, at any depth, that can name a class outside of Shoal's registries, or a source file.

    Every text with a colon counts. Which of them name a module depends on where another process looks for modules, and
    on the component that reads the text, so a narrower rule could miss one.
    """
    if isinstance(value, str):
        if CODE.search(value):
            yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from names_of_code(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from names_of_code(inner)
