"""The coordinator's connections to agents on other machines."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.agents_plan import REACH_SECONDS, AgentsPlan, ListedAgent, StartedAgents
from shoal.engines.processes.remote.channel import Address, Channel, Received, Trust
from shoal.engines.processes.remote.link import Beat, Data, Missing
from shoal.engines.processes.remote.relay import RelayServer
from shoal.engines.processes.remote.remote_agent import RemoteAgent
from shoal.engines.processes.remote.ssh import SshAgent
from shoal.errors import LaunchError

OPEN_SECONDS = 1.0
"""Seconds between two requests to open a session."""
CLOCK_BEATS = 5
"""Heartbeats that measure the difference of the clocks before a run, at the least."""
CLOCK_INTERVAL = 0.05
CLOCK_SECONDS = 20.0
"""How long to wait until every agent has answered a heartbeat."""


@dataclass
class _Pending:
    """An agent whose session is not open yet."""

    channel: Channel
    route: bytes
    session: str
    listed: ListedAgent | None = None
    next_request: float = 0.0
    problem: str | None = None
    """Why the agent has not opened the session yet, if it has given a reason."""


class AgentConnections:
    """Opens a session with every agent of a plan, and passes on what arrives."""

    def __init__(self, plan: AgentsPlan, notify: Callable[[str], None]) -> None:
        """`notify` shows a text to the user."""
        self.agents: list[RemoteAgent] = []
        self._plan = plan
        self._notify = notify
        self._channels: list[Channel] = []
        self._joining: Channel | None = None
        self._pending: dict[tuple[int, bytes], _Pending] = {}
        """By the position of the channel, and the route."""
        self._open: dict[tuple[int, bytes], RemoteAgent] = {}
        self._joined: set[bytes] = set()
        self._relay: RelayServer | None = None
        self._started: list[StartedAgents] = []

    def connect(self, is_interrupted: Callable[[], bool]) -> None:
        """Open all sessions. Raises `LaunchError` if an agent cannot be reached, is busy, or has other versions."""
        for listed in self._plan.agents:
            channel, key = self._channel_to(listed)
            channel.dial(listed.address, key, secrets.token_bytes(8))
            self._pending[len(self._channels) - 1, b""] = _Pending(channel, b"", secrets.token_hex(8), listed)
        if self._plan.listen is not None:
            self._joining = self._new_channel(self._plan.trust)
            port = self._joining.listen(self._plan.listen)
            address = Address(self._plan.listen.host, port)
            self._notify(f"waiting for {self._plan.expect} agents to join at {address}")
            if self._plan.starter is not None:
                self._started.append(self._plan.starter)
                self._plan.starter.start(address)
        began = time.monotonic()
        while len(self.agents) < self._expected and not is_interrupted():
            self._wait(0.2)
            self._request_sessions()
            self.pump()
            self._check_deadlines(time.monotonic() - began)
            for started in self._started:
                started.check()
        self._name_uniquely()
        self._relay_unreachable_nodes()
        self._measure_clocks(is_interrupted)

    def register(self, poller: zmq.Poller) -> None:
        for channel in self._channels:
            channel.register(poller)
        if self._relay is not None:
            self._relay.register(poller)

    def pump(self) -> None:
        """Pass on what has arrived, and send heartbeats."""
        for position, channel in enumerate(self._channels):
            for received in channel.receive():
                self._handle(position, received)
        for agent in self.agents:
            agent.advance()
        for node, token in () if self._relay is None else self._relay.requests():
            for agent in self.agents:
                if agent.runs(node):
                    agent.open_tunnel(node, token)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for pending in self._pending.values():
            pending.channel.send(pending.route, protocol.Close(pending.session), [])
        for channel in self._channels:
            channel.close(linger=2.0)
        if self._relay is not None:
            self._relay.close()
        for started in self._started:
            started.close()

    @property
    def _expected(self) -> int:
        return len(self._plan.agents) + self._plan.expect

    def _channel_to(self, listed: ListedAgent) -> tuple[Channel, bytes | None]:
        """A channel to an agent that listens, and its public key. Starts the agent if it has to be started."""
        if listed.ssh is None:
            return self._new_channel(self._plan.trust), listed.key
        own, pair = self._plan.trust.pair or KeyPair.fresh(), KeyPair.fresh()
        self._started.append(SshAgent(listed, pair, own.public))
        return self._new_channel(Trust(own, {"agent": pair.public})), pair.public

    def _new_channel(self, trust: Trust) -> Channel:
        channel = Channel(trust, lambda reason: self._notify(f"rejected an unauthenticated connection: {reason}"))
        self._channels.append(channel)
        return channel

    def _wait(self, seconds: float) -> None:
        poller = zmq.Poller()
        self.register(poller)
        poller.poll(int(seconds * 1000))

    def _request_sessions(self) -> None:
        for pending in self._pending.values():
            if time.monotonic() >= pending.next_request:
                pending.next_request = time.monotonic() + OPEN_SECONDS
                pending.channel.send(pending.route, protocol.Open(pending.session, protocol.versions()), [])

    def _handle(self, position: int, received: Received) -> None:
        key = position, received.route
        if isinstance(received.header, protocol.Join):
            self._accept_join(position, received.route, received.header.info)
        elif isinstance(received.header, protocol.Opened):
            pending = self._pending.get(key)
            if pending is not None and pending.session == received.header.session:
                del self._pending[key]
                self._open_session(key, pending, received.header.info)
        elif isinstance(received.header, protocol.Rejected):
            if key in self._pending:
                raise LaunchError(received.header.reason)
        elif isinstance(received.header, protocol.Busy):
            if key in self._pending:
                self._pending[key].problem = received.header.reason
        elif key in self._open:
            self._open[key].receive(received.header, received.frames)
        elif isinstance(received.header, Data | Beat | Missing):  # of a coordinator that has ended
            self._channels[position].send(received.route, protocol.Close(received.header.session), [])

    def _accept_join(self, position: int, route: bytes, info: protocol.AgentInfo) -> None:
        channel = self._channels[position]
        if (position, route) in self._pending or (position, route) in self._open:
            return
        if len(self._joined) >= self._plan.expect or channel is not self._joining:
            channel.send(route, protocol.Rejected("the run has all the agents that it expects"), [])
            return
        self._joined.add(route)
        self._pending[position, route] = _Pending(channel, route, secrets.token_hex(8))

    def _open_session(self, key: tuple[int, bytes], pending: _Pending, info: protocol.AgentInfo) -> None:
        if pending.listed is not None and pending.listed.name is not None:
            info = msgspec.structs.replace(info, name=pending.listed.name)
        channel, route = pending.channel, pending.route
        agent = RemoteAgent(info, pending.session, lambda header, frames: channel.send(route, header, frames))
        self.agents.append(agent)
        self._open[key] = agent
        self._notify(f"agent {info.name!r} is connected: {info.cores} cores, {info.memory / 2**30:.1f} GiB")

    def _check_deadlines(self, seconds: float) -> None:
        listed = [(pending.listed, pending.problem) for pending in self._pending.values() if pending.listed]
        if listed and seconds > REACH_SECONDS:
            agent, problem = listed[0]
            if problem is not None:
                raise LaunchError(problem)
            address = agent.address
            raise LaunchError(
                f"the agent at {address} cannot be reached: nothing answered in {REACH_SECONDS:g} s; start it with "
                f"'shoal agent --listen {address}', and check the address, the firewall and that it trusts the key of "
                "this coordinator (an agent prints the connections that it rejects)"
            )
        if self._plan.expect and seconds > self._plan.wait and len(self.agents) < self._expected:
            joined = len(self.agents) - len(self._plan.agents)
            raise LaunchError(
                f"{joined} of {self._plan.expect} agents have joined in {self._plan.wait:g} s; start them with 'shoal "
                f"agent --join', or expect fewer"
            )

    def _name_uniquely(self) -> None:
        """Number the agents that have the same name."""
        self.agents.sort(key=lambda agent: agent.name)
        names: set[str] = set()
        for agent in self.agents:
            name, number = agent.name, 1
            while name in names:
                number += 1
                name = f"{agent.name}-{number}"
            names.add(name)
            agent.info = msgspec.structs.replace(agent.info, name=name)

    def _relay_unreachable_nodes(self) -> None:
        relayed = [agent for agent in self.agents if agent.info.relayed]
        if not relayed:
            return
        address = self._plan.listen
        if address is None:
            raise LaunchError(f"agent {relayed[0].name!r} has --relay, which needs agents that join with --join")
        if address.is_wildcard and self._plan.announce is None:
            raise LaunchError(
                f"--listen {address}: agent {relayed[0].name!r} has --relay, and its peers need the address at which "
                "they reach this machine; set announce in agents.toml"
            )
        self._relay = RelayServer(
            "0.0.0.0" if address.is_wildcard else address.host, self._plan.announce or address.host
        )
        for agent in relayed:
            agent.relay = self._relay

    def _measure_clocks(self, is_interrupted: Callable[[], bool]) -> None:
        """Measure the difference of the clocks, several times for agents that answer quickly. Raises `LaunchError`."""
        deadline = time.monotonic() + CLOCK_SECONDS
        for beat in range(int(CLOCK_SECONDS / CLOCK_INTERVAL)):
            missing = [agent for agent in self.agents if agent.clock.error is None]
            if is_interrupted() or (beat >= CLOCK_BEATS and not missing) or time.monotonic() > deadline:
                break
            for agent in self.agents:
                agent.measure_clock()
            until = time.monotonic() + CLOCK_INTERVAL
            while time.monotonic() < until:
                self._wait(CLOCK_INTERVAL / 5)
                self.pump()
        for agent in self.agents:
            if agent.clock.error is None and not is_interrupted():
                raise LaunchError(
                    f"agent {agent.name!r} has answered no heartbeat in {CLOCK_SECONDS:g} s, so the difference of the "
                    "clocks is unknown; check the connection, and start the run again"
                )
