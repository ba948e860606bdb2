"""The process of `shoal agent`: runs nodes of this machine for coordinators that it trusts, one run at a time.

The nodes do not depend on the coordinator's process or on the connection to it. While it is away, they continue, and
what they report waits here.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable

import zmq

from shoal.engines.operating_system import available_memory, raise_file_limit
from shoal.engines.processes import control
from shoal.engines.processes.interrupts import Interrupts
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.channel import Address, Channel, Received, Trust
from shoal.engines.processes.remote.handshakes import HandshakeProblem
from shoal.engines.processes.remote.hosted_run import AgentOptions, HostedRun
from shoal.engines.processes.remote.ledger import Ledger
from shoal.engines.processes.remote.link import Beat, Data, Link, Missing
from shoal.engines.processes.remote.spare_zygote import SpareZygote
from shoal.errors import MessageError, ShoalError

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
JOIN_SECONDS = 1.0
"""Seconds between two requests to join."""
TURN_SECONDS = 0.2
"""The longest wait for something to arrive."""
IDLE_SECONDS = 2.0
"""An agent that has had no run for so long starts the zygote of the next one."""
ORPHAN_SECONDS = 15.0
"""A run whose coordinator was away for so long does not keep another coordinator from the agent."""
HANDSHAKE_CHECK_SECONDS = 1.0
"""Seconds between two checks of the handshakes with the coordinator."""
HANDSHAKE_ADVICE = {
    HandshakeProblem.NOT_ACCEPTED: "the coordinator does not accept the key of this agent; start 'shoal run' with "
    "--trust and the public key that belongs to the agent's --key, or give the agent the key that the coordinator "
    "trusts",
    HandshakeProblem.CLOSED: "the connection to the coordinator is closed before the keys are exchanged: no "
    "coordinator listens yet behind a forwarded port (ssh -L, a port of a container), or its key is not the one of "
    "this agent's --trust, or one of the two has no keys; if the coordinator runs, give the agent --key, and --trust "
    "with the public key that belongs to the coordinator's --key",
}


class AgentServer:
    """Serves coordinators until it is interrupted, or, with `once`, until the first run has ended."""

    def __init__(self, options: AgentOptions, channel: Channel, joins: bool, notify: Callable[[str], None]) -> None:
        """`joins`: the channel has dialled out to a coordinator. `notify` prints a line for the user."""
        self._options = options
        self._channel = channel
        self._joins = joins
        self._notify = notify
        self._session: _Session | None = None
        self._spare = SpareZygote()
        self._join_at = 0.0
        self._check_handshakes_at = 0.0
        self._problem: HandshakeProblem | None = None
        self._shown_problem: HandshakeProblem | None = None
        """The last one that was shown, if nothing has arrived since then."""
        self._idle_since = time.monotonic()
        self._ended = False
        self._code = 0

    def serve(self) -> int:
        """Serve, and return the exit code."""
        raise_file_limit()
        with Interrupts() as interrupts:
            interrupts.on_repeat(self._kill)
            try:
                while interrupts.signal is None and not self._ended:
                    self.turn()
            finally:
                self.close()
        return self._code if interrupts.signal is None else 128 + interrupts.signal

    def close(self) -> None:
        """End the run, and close the channel."""
        self._end_session("this agent was stopped")
        self._spare.close()
        self._channel.close(linger=1.0)

    def turn(self) -> None:
        """Handle what has arrived, or wait briefly for something to arrive."""
        poller = zmq.Poller()
        self._channel.register(poller)
        if self._session is not None and self._session.run is not None:
            self._session.run.register(poller)
        if self._options.ends_with_stdin:
            poller.register(sys.stdin.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(int(TURN_SECONDS * 1000)))
        if self._options.ends_with_stdin and sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1024):
            self._end_session("the process that started this agent has ended")
            self._ended = True
        for received in self._channel.receive():
            self._handle(received)
        self._check_idle()
        self._check_handshakes()
        if self._session is None:
            self._join()
            return
        self._session.beat_if_due()
        self._session.advance()
        if self._session.seconds_without_coordinator > self._options.abandon:
            self._end_session(f"its coordinator was away for {self._options.abandon:g} s")

    def _check_idle(self) -> None:
        """Prepare for the next run if there has been none for a while. End the agent if none has begun in time."""
        if self._session is not None and self._session.run is not None:
            self._idle_since = time.monotonic()
            return
        idle = time.monotonic() - self._idle_since
        if idle > IDLE_SECONDS:
            self._spare.start()
        if self._options.wait is not None and idle > self._options.wait:
            self._notify(f"no run has begun in {self._options.wait:g} s")
            self._ended, self._code = True, 1

    def _join(self) -> None:
        if self._joins and time.monotonic() >= self._join_at:
            self._join_at = time.monotonic() + JOIN_SECONDS
            self._channel.send(b"", protocol.Join(self._info()), [])

    def _check_handshakes(self) -> None:
        """Show once why the coordinator makes no connection, if the handshake fails."""
        if not self._joins or time.monotonic() < self._check_handshakes_at:
            return
        self._check_handshakes_at = time.monotonic() + HANDSHAKE_CHECK_SECONDS
        problem = self._channel.handshake_problem()
        if problem is None:
            return
        # A coordinator that ends closes connections too: only a problem that repeats itself is shown.
        if problem is self._problem is not self._shown_problem:
            self._shown_problem = problem
            self._notify(HANDSHAKE_ADVICE[problem] + "; this agent continues to try")
        self._problem = problem

    def _handle(self, received: Received) -> None:
        header = received.header
        self._problem = self._shown_problem = None
        if isinstance(header, protocol.Open):
            self._open(received.route, header)
        elif isinstance(header, protocol.Rejected):
            self._notify(f"the coordinator rejected this agent: {header.reason}")
            self._ended = True
        elif isinstance(header, protocol.Close):
            if self._session is not None and self._session.id == header.session:
                self._end_session(None)
                self._ended = self._options.once  # also if the coordinator has assigned no nodes to this agent
        elif isinstance(header, Data | Beat | Missing):
            if self._session is None or self._session.id != header.session:
                self._channel.send(received.route, protocol.NoSession(header.session), [])
            else:
                self._session.receive(received)

    def _open(self, route: bytes, request: protocol.Open) -> None:
        if differences := protocol.version_differences(protocol.versions(), request.versions):
            reason = f"agent {self._options.name!r} and the coordinator have different versions: "
            self._channel.send(route, protocol.Rejected(reason + ", ".join(differences)), [])
            return
        if request.takes_over:
            self._continue(route, request)
            return
        if self._session is not None and self._session.id != request.session:
            if self._session.seconds_without_coordinator < ORPHAN_SECONDS:
                run = "another run" if self._session.run is None else f"the run {self._session.run.name!r}"
                reason = f"agent {self._options.name!r} is busy with {run}"
                self._channel.send(route, protocol.Busy(f"{reason}; wait for it, or restart the agent"), [])
                return
            self._end_session("its coordinator is away, and another one has a run")
        if self._session is None:
            self._session = _Session(request.session, route, self._channel, self._options, self._spare)
        self._session.route = route
        self._channel.send(route, protocol.Opened(request.session, self._info()), [])

    def _continue(self, route: bytes, request: protocol.Open) -> None:
        """Continue the run of a coordinator that has ended, if this agent has it, with the one that asks for it."""
        session = self._session
        continues = ""
        if session is not None and session.id == request.session:
            continues, session.route = session.continues, route  # its answer was lost
        elif session is not None:
            continues = session.continues = session.session_to_continue(request.takes_over)
        self._channel.send(route, protocol.Opened(request.session, self._info(), continues), [])
        if session is not None and continues and session.id != request.session:
            session.continue_as(request.session, route)
            self._notify("another coordinator continues the run")

    def _end_session(self, reason: str | None) -> None:
        session, self._session = self._session, None
        if session is None or session.run is None:
            return
        if reason is not None:
            session.fail(reason)
            self._notify(f"the run {session.run.name!r} was ended: {reason}")
        else:
            self._notify(f"the run {session.run.name!r} has ended")
        session.run.close()
        self._channel.show_rejected()
        self._ended = self._options.once

    def _kill(self) -> None:
        if self._session is not None and self._session.run is not None:
            self._session.run.kill()

    def _info(self) -> protocol.AgentInfo:
        options = self._options
        return protocol.AgentInfo(
            options.name,
            protocol.versions(),
            options.cores or len(os.sched_getaffinity(0)),
            available_memory(),
            options.host,
            options.announce,
            options.allows_code,
            options.relay_host is not None,
            None if self._session is None or self._session.run is None else self._session.run.name,
        )


class _Session:
    """A session with one coordinator."""

    def __init__(self, id: str, route: bytes, channel: Channel, options: AgentOptions, spare: SpareZygote) -> None:
        self.id = id
        self.route = route
        self.run: HostedRun | None = None
        self.continues = ""
        """The session of an earlier coordinator whose run continues in this one."""
        self._earlier: list[str] = []
        """The sessions of all earlier coordinators of the run."""
        self._options = options
        self._spare = spare
        self._ledger = Ledger()
        self._link = Link(id, lambda header, frames: channel.send(self.route, header, frames), self._ledger.note)
        self._failed = False
        self._beat_at = 0.0
        self._last_message = time.monotonic()
        self._away_since: float | None = None
        """When the last coordinator that followed the run last sent something; None while a coordinator follows it."""
        self._last_beat: tuple[float, float] = 0.0, 0.0
        """The time of the coordinator's last heartbeat on its clock, and on ours."""

    @property
    def seconds_without_coordinator(self) -> float:
        """Seconds since the last message of the coordinator."""
        return time.monotonic() - self._last_message

    def session_to_continue(self, hashes: list[str]) -> str:
        """The session of a coordinator, with this hash, whose run this one has; empty if there is none."""
        if self.run is None or self._failed:
            return ""
        return next((own for own in (self.id, *self._earlier) if protocol.session_hash(own) in hashes), "")

    def continue_as(self, id: str, route: bytes) -> None:
        """Continue the run with another coordinator, which has opened the session `id`."""
        assert self.run is not None
        if self._away_since is None:
            self._away_since = self._last_message
        report = self.run.report(self._ledger, time.monotonic() - self._away_since)
        self._earlier.append(self.id)
        self.id, self.route = id, route
        self._last_message = time.monotonic()
        self._link.restart(id, protocol.encode(report))

    def receive(self, received: Received) -> None:
        header = received.header
        assert isinstance(header, Data | Beat | Missing)
        self._last_message = time.monotonic()
        if isinstance(header, Beat):
            self._last_beat = header.time, self._last_message
            self._beat_at = 0.0  # answer at once: the coordinator measures the difference of the clocks
        try:
            content = self._link.receive(header, received.frames)
            if content is None:
                return
            request = protocol.decode_to_remote(content[0])
        except (MessageError, IndexError, *control.DECODE_ERRORS) as error:
            self.fail(f"an invalid request has arrived: {error}")
        else:
            self._handle(request, content[1:])
        self._link.handled()

    def beat_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            theirs, ours = self._last_beat
            self._link.beat(now, theirs + (now - ours) if theirs else 0.0)

    def advance(self) -> None:
        if self.run is None or self._failed:
            return
        try:
            self.run.advance()
        except (ShoalError, OSError) as error:
            self.fail(str(error))

    def _handle(self, request: protocol.ToRemote, rest: list[bytes]) -> None:
        if isinstance(request, protocol.BeginRun):
            try:
                self.run = HostedRun(request, self._options, self._link, self._spare)
            except (ShoalError, OSError) as error:
                kind = type(error).__name__ if isinstance(error, ShoalError) else "LaunchError"
                self._link.send(protocol.encode(control.StartFailed(kind, str(error), [])))
                self._link.pump()
        elif isinstance(request, protocol.Follow):
            self._away_since = None
        elif isinstance(request, protocol.Collect) and self.run is None:
            self._link.send(protocol.encode(protocol.Collected()))
        elif self.run is None or self._failed:
            return
        elif isinstance(request, protocol.NodeState):
            try:
                self.run.restore_state(request.node, b"".join(rest))
            except OSError as error:
                self.fail(f"the state of node {request.node} cannot be written: {error.strerror}")
        else:
            self.run.handle(request)

    def fail(self, reason: str) -> None:
        self._failed = True
        self._link.send(protocol.encode(protocol.AgentFailed(reason)))


def serve_agent(
    options: AgentOptions,
    trust: Trust,
    listen: Address | None,
    join: Address | None,
    notify: Callable[[str], None],
) -> int:
    """Run an agent that listens at an address, or joins the coordinator at one, until it ends; returns the exit code.

    Raises `LaunchError`.
    """
    address = listen or join
    assert address is not None
    trust.require(address, "agent", "coordinator")
    channel = Channel(trust, notify)
    try:
        if listen is not None:
            port = channel.listen(listen)
            notify(f"agent {options.name!r} listens at {listen.host}:{port}")
        else:
            channel.dial(address, next(iter(trust.trusted.values()), None), secrets.token_bytes(8), watched=True)
            notify(f"agent {options.name!r} joins the coordinator at {address}")
    except BaseException:
        channel.close()
        raise
    return AgentServer(options, channel, join is not None, notify).serve()
