"""The coordinator's connections to agents on other machines."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import zmq

from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.agents_plan import REACH_SECONDS, AgentsPlan, ListedAgent, StartedAgents
from shoal.engines.processes.remote.channel import Address, Channel, Received, Trust
from shoal.engines.processes.remote.link import Beat, ClockEstimate, Data, Missing
from shoal.engines.processes.remote.relay import RelayServer
from shoal.engines.processes.remote.remote_agent import RemoteAgent
from shoal.engines.processes.remote.ssh import SshAgent
from shoal.errors import LaunchError

OPEN_SECONDS = 1.0
"""Seconds between two requests to open a session."""
CLOCK_BEATS = 5
"""Heartbeats that measure the difference of the clocks before a run, at the least."""
CLOCK_INTERVAL = 0.05


@dataclass
class _Pending:
    """An agent whose session is not open yet."""

    channel: Channel
    route: bytes
    session: str
    listed: ListedAgent | None = None
    since: float = field(default_factory=time.monotonic)
    next_request: float = 0.0
    problem: str | None = None
    """Why the agent has not opened the session yet, if it has given a reason."""


class AgentConnections:
    """Opens a session with every agent of a plan, and passes on what arrives."""

    def __init__(
        self, plan: AgentsPlan, notify: Callable[[str], None], takes_over: Mapping[str, str] | None = None
    ) -> None:
        """`notify` shows a text to the user. `takes_over` has the sessions of a coordinator whose run this one
        continues, with the names of their agents."""
        self._takes_over = takes_over or {}
        self.ends_sessions = not takes_over
        """Whether `close` ends the sessions, and with them the nodes of agents. While this coordinator only tries to
        continue a run, it must not end it."""
        self.agents: list[RemoteAgent] = []
        self._plan = plan
        self._notify = notify
        self._channels: list[Channel] = []
        self._joining: Channel | None = None
        self._pending: dict[tuple[int, bytes], _Pending] = {}
        """By the position of the channel, and the route."""
        self._open: dict[tuple[int, bytes], RemoteAgent] = {}
        self._joined: set[bytes] = set()
        self._without_run: set[tuple[int, bytes]] = set()
        """Agents that do not have the run of the earlier coordinator."""
        self._connecting = True
        """Whether the run has not begun: agents that failed can be replaced."""
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
        while not self._has_all(time.monotonic() - began) and not is_interrupted():
            self._wait(0.2)
            self._request_sessions()
            self.pump()
            self._check_deadlines(time.monotonic() - began)
            for started in self._started:
                started.check()
            if len(self.agents) == self._expected and not self._takes_over:
                self._measure_clocks(is_interrupted)
        self._connecting = False
        if self._takes_over:
            self._receive_states(is_interrupted)
            self._measure_clocks(is_interrupted)
        else:
            self._reassign_names()
            self.agents.sort(key=lambda agent: agent.name)
            self._relay_unreachable_nodes()

    def _has_all(self, seconds: float) -> bool:
        """Whether all agents are there. A run that continues waits for all its agents, but not for long."""
        if not self._takes_over:
            return len(self.agents) >= self._expected
        if len(self.agents) == len(self._takes_over):
            return True
        answered = len(self.agents) + len(self._without_run)
        return answered >= self._expected and (self._joining is None or seconds > REACH_SECONDS)

    def _receive_states(self, is_interrupted: Callable[[], bool]) -> None:
        """Wait for the state of each agent's share of the run of the earlier coordinator."""
        while not is_interrupted() and any(agent.run_report is None and not agent.is_lost for agent in self.agents):
            self._wait(0.2)
            self.pump()

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
        for agent in self.agents if self.ends_sessions else ():
            agent.close()
        for pending in self._pending.values() if self.ends_sessions else ():
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
        channel = Channel(trust, self._notify)
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
                pending.channel.send(pending.route, self._request(pending.session), [])

    def _request(self, session: str) -> protocol.Open:
        hashes = [protocol.session_hash(earlier) for earlier in self._takes_over]
        return protocol.Open(session, protocol.versions(), hashes)

    def _handle(self, position: int, received: Received) -> None:
        key = position, received.route
        if isinstance(received.header, protocol.Join):
            self._accept_join(position, received.route)
        elif isinstance(received.header, protocol.Opened):
            pending = self._pending.get(key)
            if pending is not None and pending.session == received.header.session:
                del self._pending[key]
                self._open_session(key, pending, received.header.info, received.header.continues)
        elif isinstance(received.header, protocol.Rejected):
            if key in self._pending:
                raise LaunchError(received.header.reason)
        elif isinstance(received.header, protocol.Busy):
            if key in self._pending:
                self._pending[key].problem = received.header.reason
        elif isinstance(received.header, protocol.NoSession) and self._connecting:
            self._open_again(key, received.header.session)
        elif key in self._open:
            self._open[key].receive(received.header, received.frames)
        elif isinstance(received.header, Data | Beat | Missing):
            self._handle_earlier(position, received.route, received.header.session)

    def _handle_earlier(self, position: int, route: bytes, session: str) -> None:
        """An agent that has dialled out still has the session of an earlier coordinator."""
        if session in self._takes_over:
            self._accept_join(position, route)
        elif (position, route) not in self._pending:
            self._channels[position].send(route, protocol.Close(session), [])

    def _accept_join(self, position: int, route: bytes) -> None:
        channel = self._channels[position]
        key = position, route
        if key in self._pending or key in self._open or key in self._without_run:
            return
        full = len(self._joined) >= self._plan.expect and not self._takes_over
        if full or channel is not self._joining:
            if self._connecting and channel is self._joining:
                return  # it may replace an agent that fails before the run begins: it asks again
            channel.send(route, protocol.Rejected("the run has all the agents that it expects"), [])
            return
        self._joined.add(route)
        self._pending[position, route] = _Pending(channel, route, secrets.token_hex(8))

    def _open_session(
        self, key: tuple[int, bytes], pending: _Pending, info: protocol.AgentInfo, continues: str
    ) -> None:
        if pending.listed is not None and pending.listed.name is not None:
            info = msgspec.structs.replace(info, name=pending.listed.name)
        if self._takes_over and continues not in self._takes_over:
            self._without_run.add(key)
            self._joined.discard(key[1])
            self._notify(f"agent {info.name!r} does not have this run: it is not used")
            return
        channel, route = pending.channel, pending.route
        agent = RemoteAgent(info, pending.session, lambda header, frames: channel.send(route, header, frames))
        agent.name = self._takes_over.get(continues) or self._free_name(agent)
        agent.continues = continues
        ssh = None if pending.listed is None else pending.listed.ssh
        agent.ends_with_coordinator = ssh is not None or self._plan.starter is not None
        self.agents.append(agent)
        self._open[key] = agent
        renamed = ""
        if agent.name != info.name and not self._takes_over:
            renamed = f" (another agent has the name {info.name!r}; --name sets the name)"
        self._notify(f"agent {agent.name!r}{renamed} is connected: {info.cores} cores, {info.memory / 2**30:.1f} GiB")

    def _open_again(self, key: tuple[int, bytes], session: str) -> None:
        """Open a new session with an agent that was restarted."""
        agent = self._open.get(key)
        if agent is None or agent.session != session:
            return
        self._remove(key)
        position, route = key
        listed = self._plan.agents[position] if position < len(self._plan.agents) else None
        if listed is None:
            self._joined.add(route)
        self._pending[key] = _Pending(self._channels[position], route, secrets.token_hex(8), listed)
        self._notify(f"agent {agent.name!r} was restarted")

    def _remove(self, key: tuple[int, bytes]) -> None:
        self.agents.remove(self._open.pop(key))
        self._joined.discard(key[1])

    def _check_deadlines(self, seconds: float) -> None:
        late = {key: p for key, p in self._pending.items() if time.monotonic() - p.since > REACH_SECONDS}
        for key in [key for key, pending in late.items() if pending.listed is None]:
            del self._pending[key]  # it has ended since it joined: another agent can join
            self._joined.discard(key[1])
        listed = [(pending.listed, pending.problem) for pending in late.values() if pending.listed]
        if listed:
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

    def _free_name(self, agent: RemoteAgent) -> str:
        """The agent's own name, with a number at its end if another agent has this name."""
        names = {other.name for other in self.agents if other is not agent}
        numbered = (f"{agent.info.name}-{number}" for number in itertools.count(2))
        return next(name for name in itertools.chain([agent.info.name], numbered) if name not in names)

    def _reassign_names(self) -> None:
        """Give the names of agents that have ended to the agents that replace them."""
        for agent in self.agents:
            name = self._free_name(agent)
            if name != agent.name:
                self._notify(f"agent {agent.name!r} gets the name {name!r}: the agent that had it has ended")
                agent.name = name

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
        """Measure the difference of the clocks, several times for agents that answer quickly.

        Agents that joined and do not answer are removed, so that others can join. Raises `LaunchError` if an agent that
        listens does not answer.
        """
        for agent in self.agents:
            agent.clock = ClockEstimate()  # an agent may have ended since it answered
        began, beats = time.monotonic(), 0
        while time.monotonic() - began < self._plan.answer_timeout and not is_interrupted():
            missing = [agent for agent in self.agents if agent.clock.error is None]
            if beats >= CLOCK_BEATS and not missing:
                return
            beats += 1
            for agent in self.agents:
                agent.measure_clock()
            until = time.monotonic() + CLOCK_INTERVAL
            while time.monotonic() < until:
                self._wait(CLOCK_INTERVAL / 5)
                self.pump()
        for key, agent in list(self._open.items()):
            if agent.clock.error is None and not is_interrupted():
                self._remove_unresponsive(key, agent)

    def _remove_unresponsive(self, key: tuple[int, bytes], agent: RemoteAgent) -> None:
        reason = f"agent {agent.name!r} has answered no heartbeat in {self._plan.answer_timeout:g} s"
        if key[1] not in self._joined:
            raise LaunchError(
                f"{reason}, so the difference of the clocks is unknown; check the connection, and start the run again"
            )
        self._remove(key)
        self._notify(f"{reason}; waiting for another agent to join")
