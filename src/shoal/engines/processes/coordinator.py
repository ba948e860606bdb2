"""The supervisor: starts, watches, collects, and ends them all.

It leaves nothing behind. The zygote and its nodes are one process group, which is killed at the end whatever happens;
should the supervisor itself be killed, the kernel ends the zygote, and with it the nodes.
"""

from __future__ import annotations

import math
import re
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from types import FrameType

import msgspec
import numpy as np
import zmq

from shoal import errors
from shoal.engines.averaging import Averages
from shoal.engines.operating_system import MIB, raise_file_limit
from shoal.engines.processes import control
from shoal.engines.processes.capacity import capacity
from shoal.engines.processes.keys import KeyPair, read_public, require_keys
from shoal.engines.processes.namespaces import Namespaces, address
from shoal.engines.processes.sealing import KEY_WAIT_SECONDS, NETWORK_PROCESS, Seal, authenticated_sender
from shoal.engines.processes.start_monitor import Starts
from shoal.engines.processes.transport import MESSAGES_PER_TURN
from shoal.engines.processes.zygote_process import ZygoteProcess
from shoal.environment.faults import FaultEvent
from shoal.environment.network.model import EnvironmentEvent
from shoal.environment.network.network import AvailabilityChange
from shoal.errors import ExperimentError, LaunchError, MessageError, RunError
from shoal.experiment import Experiment
from shoal.experiment.environment import build_environment, device_speeds
from shoal.experiment.mapping import LOCALHOST
from shoal.message import MAX_HEADER_BYTES, RUN_LENGTH
from shoal.results.progress import (
    PROGRESS_INTERVAL,
    MeanScore,
    NullProgressListener,
    Outcome,
    Progress,
    ProgressListener,
    Status,
)
from shoal.results.records import Event, RecordFile, RunFolder
from shoal.types import NodeId, format_node_ids

STOP_SECONDS = 10.0
"""How long nodes may take to leave when they are told to."""
LOOPBACK = "127.0.0.1"
HERE_TOO = {LOCALHOST, LOOPBACK, socket.gethostname()}
"""The names of this machine in a mapping."""
START_SECONDS = 60.0
"""How long it may take, at the least, until the next one of the nodes that are started says that it listens."""
FINISH_SECONDS = 60.0
"""How long a node that is done may take, at the least, to write down the rest and leave."""
STRANGERS_NOTICED = 5
"""Strangers at the supervisor's door that are spoken of one by one; more are only counted."""
LAST_WORDS = 64 * MESSAGES_PER_TURN
"""Messages among which those of one that has ended are looked for: each that speaks has its turn."""
PULSES_MISSED = 5.0
"""Seconds on top of a peer's patience, for pulses that are late on a loaded machine."""
LONGEST_WORDS = 2**20
"""Bytes: what nodes may say, at the least, however small models are. A traceback is the longest."""
ENDPOINT = re.compile(r"tcp://(.+):([1-9][0-9]{0,4})")


class Coordinator:
    """One run of an experiment as processes of this machine."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        listener: ProgressListener | None = None,
        command_time: float | None = None,
    ) -> None:
        self._command_time = time.time() if command_time is None else command_time
        self._experiment = experiment
        self._folder = folder
        self._listener: ProgressListener = listener or NullProgressListener()
        self._run = secrets.token_hex(RUN_LENGTH // 2)
        self._phase = "starting"
        self._began_at = time.monotonic()
        self._ended_at: float | None = None
        """When the last node was done."""
        self._shown = 0.0
        self._signal: int | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._zygote: ZygoteProcess | None = None
        self._namespaces: Namespaces | None = None
        self._seal: Seal | None = None
        self._keys: dict[NodeId, bytes] = {}
        """The nodes' public keys, where links are sealed."""
        self._network_key: bytes | None = None
        self._strangers = 0
        self._strangers_of_network = 0
        self._network_reported = self._network_ended = False
        self._identities: dict[NodeId, bytes] = {}
        self._endpoints: dict[NodeId, str] = {}
        self._began: set[NodeId] = set()
        self._first_rounds: set[NodeId] = set()
        self._startup: float | None = None
        self._first_round: float | None = None
        self._parameters = 0
        """Of a model, once it is known."""
        self._learners = frozenset(range(experiment.nodes))
        self._pace = frozenset(experiment.round_nodes)
        self._rounds = dict.fromkeys(range(experiment.size), 0)
        self._bytes = dict.fromkeys(range(experiment.size), 0)
        self._busy = dict.fromkeys(range(experiment.size), math.inf)
        """When each node was last known to be busy."""
        self._done: set[NodeId] = set()
        self._exited: set[NodeId] = set()
        self._reasons: dict[NodeId, str] = {}
        self._lost: dict[NodeId, str] = {}
        self._averages = Averages()
        self._awaited = set(range(experiment.nodes))
        """Nodes whose models are still to come."""
        self._average_times: dict[int, float] = {}
        self._last_tick: int | None = None
        """The last moment at which models are looked at, once it is known. Who hears late of it may look once more."""
        self._environment = build_environment(experiment, device_speeds(experiment))
        self._by_time = experiment.evaluation.seconds is not None
        self._network: bytes | None = None
        """The network's process, on the control socket."""
        self._network_endpoint: str | None = None
        self._epoch = 0.0
        self._events: Iterator[EnvironmentEvent] = iter(())
        self._next: EnvironmentEvent | None = None
        self._away = [0] * experiment.size
        """For how many reasons each node is offline."""
        self._starts = Starts()
        self._returned: list[NodeId] = []
        """Those that were started again and listen, and wait for the others."""
        self._to_restart: set[NodeId] = set()
        """Those that were killed, to be started again, and are not dead yet."""
        self._slow: dict[NodeId, control.InjectFault] = {}
        """How slow nodes are, by a fault."""
        self._averages_to_test: deque[control.EvaluateAverage] = deque()
        """In order, and the first is being tested: of a long run there may be hundreds at its end."""
        self._score = MeanScore()

    def run(self) -> Outcome:
        """To the end: of the algorithm, of all nodes, or of the user's patience."""
        raise_file_limit()
        previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for each in previous:
                signal.signal(each, self._interrupt)
            self._start()
            status = self._watch()
        except RunError:
            if self._signal is None:
                raise
            status = "interrupted"  # asked twice, and what we killed is gone
        finally:
            if self._seal is not None:
                self._seal.count_remaining()
            self._end()
            for each, handler in previous.items():
                signal.signal(each, handler)
        return Outcome(
            status,
            wall_s=(self._ended_at or time.monotonic()) - self._began_at,
            startup_s=self._startup or time.time() - self._command_time,
            lost=dict(sorted(self._lost.items())),
            facts={"first_round_s": self._first_round, "signal": self._signal},
            unauthenticated_connections=self._strangers + self._strangers_of_network,
        )

    def _start(self) -> None:
        """From nothing to every node listening."""
        experiment = self._experiment
        self._here = self._nodes_here()
        pair = self._own_keys()
        self._zygote = ZygoteProcess(self._folder)
        self._zygote.say(control.Prepare(experiment.to_table(), str(experiment.base.resolve())))
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 16)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, MESSAGES_PER_TURN)  # per peer; further messages wait, none is lost
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(LONGEST_WORDS, int(experiment.processes.max_message_mib * MIB)))
        self._socket.setsockopt(zmq.BACKLOG, 4096)
        self._poller = zmq.Poller()
        if pair is not None:
            # Between what the zygote says of keys and our answers to those who knock, it may have started one more.
            patience = 0.0 if experiment.processes.keys is not None else KEY_WAIT_SECONDS
            self._seal = Seal(self._context, pair, self._turn_away, time.monotonic, patience)
            self._seal.secure_server(self._socket)
            self._seal.allow_all({str(node): key for node, key in self._keys.items()})
            for socket in self._seal.sockets:
                self._poller.register(socket, zmq.POLLIN)
        self._control = self._listen()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._zygote.pipe.fileno(), zmq.POLLIN)
        self._phase = "loading"

    def _own_keys(self) -> KeyPair | None:
        """The supervisor's own, and the nodes' public ones if they are in a folder; none where links are not sealed."""
        plan = self._experiment.processes
        if not plan.sealed:
            return None
        if plan.keys is not None:
            nodes = range(self._experiment.size)
            require_keys(plan.keys, nodes)
            self._keys = read_public(plan.keys, nodes)
        return KeyPair.fresh()

    def _turn_away(self, who: str) -> None:
        self._strangers += 1
        if self._strangers <= STRANGERS_NOTICED:
            self._listener.notice(f"a stranger was refused by the supervisor: {who}")

    def _listen(self) -> str:
        """Where nodes find the supervisor: they may live in namespaces that no port of its own is reached from."""
        if self._environment.access_links is not None:
            self._namespaces = Namespaces(self._environment.access_links)
            return self._namespaces.listen(self._socket)
        self._socket.bind(f"tcp://{LOOPBACK}:*")
        bound: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return bound.decode().rstrip("\0")

    def _watch(self) -> Status:
        """Until all nodes that can have ended."""
        finishing: float | None = None
        while True:
            self._poll()
            if self._signal is not None:
                self._stop()
                return "interrupted"
            self._follow_agenda()
            self._give_up_on_those_that_do_not_start()
            self._give_up_on_the_hung()
            if finishing is None and self._phase == "running" and self._all_done():
                finishing = time.monotonic()
                self._ended_at = finishing
                self._phase = "finishing"
                finish = self._finish()
                self._last_tick = finish.tick
                self._tell_all(finish)
                self._average_if_complete()
            if finishing is not None:
                self._give_up_on_those_that_stay(finishing)
            if finishing is not None and len(self._exited) == self._experiment.size:
                if self._by_time:
                    self._awaited.clear()
                    self._average_if_complete()
                if not self._averages_to_test:
                    break
        self._hear_network_out()
        if self._learners <= self._lost.keys():
            return "failed"
        return "incomplete" if self._lost else "completed"

    def _give_up_on_those_that_do_not_start(self) -> None:
        assert self._zygote is not None
        patience = self._patience_at_start
        if overdue := self._starts.overdue(time.monotonic(), patience):
            for node in overdue:
                why = f"it did not say in {patience:g} s that it listens; see {self._folder.log}"
                self._reasons.setdefault(node, why)
            self._zygote.say(control.KillNodes(sorted(overdue)))

    @property
    def _patience_at_start(self) -> float:
        return max(START_SECONDS, self._patience)

    def _give_up_on_the_hung(self) -> None:
        """End the nodes that learn when none of those that are left has been busy for a while: nothing will wake them.

        Those that serve may well have nothing to do; when nobody learns any longer they are finished as ever.
        """
        working = set(range(self._experiment.size)) - self._done - self._exited
        learning = working & self._learners
        if self._phase == "running" and learning and not self._starts.nodes:
            if self._are_away_for_good(learning):
                self._end_after(0.0, PULSES_MISSED, learning, "offline, and nobody comes back")
            silent = time.monotonic() - max(self._busy[node] for node in working)
            self._end_after(self._patience, silent, learning, "waited for {:g} s for nothing that could come")

    def _are_away_for_good(self, nodes: set[NodeId]) -> bool:
        """Whether all of them are offline and stay so, whatever else the clock brings, without an end maybe."""
        now = time.monotonic() - self._epoch
        if self._next is not None and self._environment.restarts:
            return False  # others may come
        return all(self._away[node] and not self._environment.will_be_online(node, now) for node in nodes)

    def _give_up_on_those_that_stay(self, finishing: float) -> None:
        """End the nodes that are still there so long after they were told to finish, or last seen to be at it."""
        staying = set(range(self._experiment.size)) - self._exited
        seconds = time.monotonic() - finishing
        self._end_after(self._patience, seconds, staying - self._done, "was told to finish, and did not in {:g} s")
        silent = time.monotonic() - max((self._busy[node] for node in staying & self._done), default=finishing)
        patience = max(FINISH_SECONDS, self._patience)
        self._end_after(patience, min(seconds, silent), staying & self._done, "did not finish in {:g} s")

    def _end_after(self, patience: float, seconds: float, nodes: set[NodeId], why: str) -> None:
        assert self._zygote is not None
        if seconds > patience and not nodes <= self._reasons.keys():
            for node in nodes:
                self._reasons.setdefault(node, f"hung: {why.format(patience)}")
            self._tell(nodes, self._finish(stopped=True))  # who still can, keeps what it has learnt
        elif nodes and seconds > patience + STOP_SECONDS:
            self._zygote.say(control.KillNodes(sorted(nodes)))

    @property
    def _patience(self) -> float:
        """Seconds without a sign of life after which a node is taken to be hung."""
        return PULSES_MISSED + self._experiment.processes.hang_timeout

    def _all_done(self) -> bool:
        return self._learners <= self._done | self._exited and not self._averages_to_test

    def _poll(self) -> None:
        """Take in what has come, or wait a little for something to come."""
        assert self._zygote is not None
        ready = dict(self._poller.poll(int(self._leisure() * 1000)))
        if self._zygote.pipe.fileno() in ready or self._seal is not None:
            while self._zygote.pipe.poll():
                self._hear_zygote(self._zygote.hear())
        if self._seal is not None:
            self._seal.answer_pending()  # after the zygote, which says whose keys are whose before it starts anybody
        if self._socket in ready:
            self._hear_nodes()
        now = time.monotonic()
        if now - self._shown > PROGRESS_INTERVAL:
            self._shown = now
            self._listener.progress(self._progress())

    def _hear_zygote(self, said: control.FromZygote) -> None:
        if isinstance(said, control.Prepared):
            for warning in said.warnings:
                self._listener.notice(warning)
            self._fork(said.parameters)
        elif isinstance(said, control.StartFailed):
            _raise_refused(said, self._experiment.name)
        elif isinstance(said, control.KeyAnnounced):
            self._learn_key(said)
        elif isinstance(said, control.NodeExited):
            self._node_exited(said.node, said.code)
        elif isinstance(said, control.NetworkExited):
            if self._phase != "finishing":
                raise RunError(f"the process that models the network died; its last words are in {self._folder.log}")
            self._hear_nodes(LAST_WORDS)
            self._network_ended = True
        else:
            self._averages_to_test.popleft()
            self._test_average()
            if said.code:
                self._listener.notice(
                    f"evaluating the averaged model of round {said.round} failed; see {self._folder.log}"
                )

    def _learn_key(self, said: control.KeyAnnounced) -> None:
        assert self._seal is not None
        if said.node is None:
            self._network_key = said.key
        else:
            self._keys[said.node] = said.key
        self._seal.allow(NETWORK_PROCESS if said.node is None else str(said.node), said.key)

    def _fork(self, parameters: int) -> None:
        experiment = self._experiment
        room = capacity(parameters)
        if experiment.size > room.nodes:
            raise LaunchError(
                f"nodes = {experiment.nodes}: about {room.nodes} nodes with a model of {parameters:,} parameters fit "
                f"on this machine, by {room.reason}; use fewer, or engine = 'simulation'"
            )
        if (port := experiment.processes.base_port) is not None and port + experiment.size - 1 > 65535:
            raise LaunchError(
                f"processes.base_port = {port}: {experiment.size} nodes need ports up to "
                f"{port + experiment.size - 1}, and the last is 65535; set it to at most {65536 - experiment.size}"
            )
        largest, needed = experiment.processes.max_message_mib, (4 * parameters + MAX_HEADER_BYTES) / MIB
        if needed > largest:
            raise LaunchError(
                f"processes.max_message_mib = {largest:g}: a model of {parameters:,} parameters needs {needed:.3g}"
            )
        assert self._zygote is not None
        self._parameters = parameters
        self._phase = "forking"
        spaces = self._namespaces
        self._start_nodes = control.StartNodes(
            self._here,
            self._control,
            self._run,
            str(self._folder.path.resolve()),
            with_network=self._environment.needs_network_model,
            namespaces=[] if spaces is None else [spaces.place(node) for node in range(experiment.size)],
            coordinator_key=None if self._seal is None else self._seal.pair.public,
            key_folder=None if experiment.processes.keys is None else str(experiment.processes.keys),
            public_keys=[self._keys[node] for node in sorted(self._keys)],
        )
        self._zygote.say(self._start_nodes)
        self._starts.expect(self._here, time.monotonic())

    def _nodes_here(self) -> list[NodeId]:
        """The nodes that the mapping puts on this machine: so far, all of them."""
        elsewhere = {m: nodes for m, nodes in self._experiment.placement.items() if m not in HERE_TOO}
        if elsewhere:
            machine, nodes = next(iter(elsewhere.items()))
            raise LaunchError(
                f"mapping: nodes {format_node_ids(nodes)} are to run on {machine!r}, and this launcher starts nodes on "
                f"its own machine, {LOCALHOST!r}, only"
            )
        return sorted(node for nodes in self._experiment.placement.values() for node in nodes)

    def _hear_nodes(self, at_most: int = MESSAGES_PER_TURN) -> None:
        for _ in range(at_most):
            try:
                name, frame, *rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                said = control.decode_from_node(frame.buffer)
                self._check_speaker(said, frame)
                self._check_model(said, rest)
                self._check_endpoint(said)
            except zmq.Again:
                return
            except MessageError as error:
                self._turn_away(str(error))
                continue
            except control.DECODE_ERRORS:
                continue  # a stranger on the port
            identity = name.bytes
            if isinstance(said, control.UnauthenticatedConnections):
                if said.run == self._run and identity == self._network:
                    self._hear_of_strangers(said)
            elif isinstance(said, control.NetworkListening):
                if said.run == self._run and self._environment.needs_network_model and self._network is None:
                    self._network, self._network_endpoint = identity, said.endpoint
                    self._go_if_all_listen()
            elif isinstance(said, control.NodeListening):
                if said.run == self._run and said.node in self._starts.nodes:
                    self._welcome(identity, said)
            elif self._identities.get(said.node) == identity or self._fails_before_hello(said):
                self._hear_node(said, rest)

    def _check_speaker(self, said: control.FromNode, frame: zmq.Frame) -> None:
        """Where links are sealed, nobody speaks for another. Raises `MessageError`."""
        if self._seal is None:
            return
        name = (
            NETWORK_PROCESS
            if isinstance(said, control.NetworkListening | control.UnauthenticatedConnections)
            else str(said.node)
        )
        if (sender := authenticated_sender(frame)) != name:
            raise MessageError(f"{sender!r}, which says that it is {name!r}")

    def _check_model(self, said: control.FromNode, rest: list[zmq.Frame]) -> None:
        """A model comes whole, or not at all. Raises `MessageError`."""
        if isinstance(said, control.ModelSnapshot) and [len(frame.buffer) for frame in rest] != [4 * self._parameters]:
            raise MessageError(f"one that says that it is node {said.node}, with what is no model of this run")

    def _check_endpoint(self, said: control.FromNode) -> None:
        """Others connect to where a node says that it listens. Raises `MessageError` where it cannot."""
        plan = self._experiment.processes
        if isinstance(said, control.NetworkListening):
            host = LOOPBACK
        elif isinstance(said, control.NodeListening) and said.node in self._rounds:
            host = address(said.node) if self._namespaces is not None else plan.announce or plan.host
        else:
            return
        match = ENDPOINT.fullmatch(said.endpoint)
        if match is None or match[1] != host or int(match[2]) > 65535:
            raise MessageError(f"one that says that it listens at {said.endpoint[:100]!r}")

    def _hear_of_strangers(self, said: control.UnauthenticatedConnections) -> None:
        if said.count > self._strangers_of_network < STRANGERS_NOTICED:
            self._listener.notice(f"a stranger was refused by the network's process: {said.last}")
        self._strangers_of_network = said.count
        self._network_reported = said.final

    def _welcome(self, identity: bytes, hello: control.NodeListening) -> None:
        self._identities[hello.node] = identity
        self._endpoints[hello.node] = hello.endpoint
        self._starts.settle(hello.node)
        if self._phase in ("running", "finishing"):
            self._returned.append(hello.node)
            self._welcome_back()
        else:
            self._go_if_all_listen()

    def _go_if_all_listen(self) -> None:
        if len(self._identities) < self._experiment.size or (
            self._environment.needs_network_model and self._network is None
        ):
            return
        self._phase = "running"
        self._epoch = time.monotonic()
        self._busy = dict.fromkeys(self._busy, self._epoch)
        self._events = self._environment.events()
        self._next = next(self._events, None)
        while self._next is not None and self._next.time <= 0.0 and not isinstance(self._next, FaultEvent):
            if isinstance(self._next, AvailabilityChange):
                self._attend(self._next)
            self._next = next(self._events, None)
        self._tell_network(self._go())
        for offline in (False, True):  # with the start: what is said after it may come when a node has begun
            nodes = [node for node in self._identities if bool(self._away[node]) == offline]
            self._tell(nodes, msgspec.structs.replace(self._go(), offline=offline))
        self._follow_agenda()

    def _go(self) -> control.Start:
        endpoints = [self._endpoints[n] for n in range(self._experiment.size)]
        keys = [self._keys[n] for n in range(self._experiment.size)] if self._seal is not None else []
        return control.Start(
            endpoints,
            self._epoch,
            self._network_endpoint,
            sorted(self._lost),
            public_keys=keys,
            network_key=self._network_key,
        )

    def _welcome_back(self) -> None:
        """Nodes that died were started again: let the others know where they are, and them how things stand.

        Those that are started together begin together, so that each knows where the others are.
        """
        if self._starts.nodes:
            return
        returned, self._returned = self._returned, []
        for node in returned:
            back = control.PeerRestarted(node, self._endpoints[node], self._keys.get(node))
            self._tell_network(back)
            self._tell(self._identities.keys() - self._exited - set(returned), back)
        for node in returned:
            gone = sorted(self._lost.keys() | self._done)
            self._tell([node], msgspec.structs.replace(self._go(), failed_nodes=gone, offline=bool(self._away[node])))
            if node in self._slow:
                self._tell([node], self._slow[node])
            self._listener.notice(f"node {node} was started again")

    # What happens by the clock

    def _leisure(self) -> float:
        """How long there is nothing to do, for all that is known."""
        if self._next is None or self._phase != "running":
            return PROGRESS_INTERVAL
        return min(PROGRESS_INTERVAL, max(0.0, self._next.time - (time.monotonic() - self._epoch)))

    def _follow_agenda(self) -> None:
        while self._phase == "running" and self._next is not None:
            if self._next.time > time.monotonic() - self._epoch:
                return
            event, self._next = self._next, next(self._events, None)
            if isinstance(event, AvailabilityChange):
                self._attend(event)
                if event.node in self._identities:
                    self._tell({event.node} - self._exited, control.SetOnline(not self._away[event.node]))
            elif isinstance(event, FaultEvent):
                self._strike(event)

    def _attend(self, presence: AvailabilityChange) -> None:
        self._away[presence.node] += -1 if presence.online else 1

    def _strike(self, fault_event: FaultEvent) -> None:
        """Do to nodes what is the supervisor's to do; what stands between nodes is the network's."""
        assert self._zygote is not None
        kind, there = fault_event.kind, [node for node in fault_event.nodes if node not in self._exited | self._done]
        alive = [node for node in there if node not in self._reasons]  # the others may not be dead yet, but will be
        if kind == "crash":
            self._to_restart.difference_update(there)
            for node in there:
                self._reasons.setdefault(node, "crashed on schedule")
                self._write(node, fault_event)
            self._zygote.say(control.KillNodes(there))
        elif kind == "restart":
            self._to_restart.update(
                node for node in fault_event.nodes if node in self._reasons and node not in self._lost
            )
            self._restart([node for node in fault_event.nodes if node in self._lost])
        elif kind == "hang" or kind == "raise":
            self._tell(alive, control.InjectFault(kind, str(fault_event)))
        elif kind == "slow":
            factor = fault_event.value if fault_event.what != "network" else None
            strike = control.InjectFault(kind, str(fault_event), factor)
            if factor is not None:
                self._slow.update(dict.fromkeys(fault_event.nodes, strike))
            self._tell(alive, strike)
        else:
            self._listener.notice(f"at {fault_event.time:g} s: {fault_event}")

    def _restart(self, nodes: list[NodeId]) -> None:
        assert self._zygote is not None
        for node in nodes:
            self._write(node, FaultEvent(time.monotonic() - self._epoch, "restart", (node,)))
            del self._lost[node]
            self._exited.discard(node)
            self._reasons.pop(node, None)
            self._awaited.add(node)
            self._busy[node] = time.monotonic()
        if nodes:
            self._starts.expect(nodes, time.monotonic())
            self._zygote.say(
                msgspec.structs.replace(self._start_nodes, nodes=nodes, restarted=True, with_network=False)
            )

    def _write(self, node: NodeId, fault_event: FaultEvent) -> None:
        """Among a node's records, what it cannot write down itself."""
        lines = RecordFile(self._folder.node(node))
        lines.write(Event("fault", fault_event.time, str(fault_event)))
        lines.close()

    def _tell_network(self, said: control.ToNode) -> None:
        if self._network is not None:
            self._socket.send_multipart([self._network, control.encode(said)])

    def _fails_before_hello(self, said: control.FromOneNode) -> bool:
        before = said.node in self._rounds and said.node not in self._identities
        return before and isinstance(said, control.NodeFailed) and said.run == self._run

    def _hear_node(self, said: control.FromOneNode, rest: list[zmq.Frame]) -> None:
        if not isinstance(said, control.Heartbeat) or said.busy:
            self._busy[said.node] = time.monotonic()
        if isinstance(said, control.ProgressReport):
            self._rounds[said.node] = said.rounds
            self._bytes[said.node] = said.bytes_sent
            if said.evaluated is not None and said.score is not None:
                self._score.add(said.evaluated, said.score)
            if said.rounds >= 1 and self._first_round is None:
                self._first_rounds.add(said.node)
                if self._pace <= self._first_rounds:
                    self._first_round = time.time() - self._command_time
        elif isinstance(said, control.FirstRoundStarted):
            self._began.add(said.node)
            if self._startup is None and self._pace <= self._began:
                self._startup = time.time() - self._command_time
                self._began_at = time.monotonic()
        elif isinstance(said, control.ModelSnapshot):
            moment = said.round if said.tick is None else said.tick
            if self._last_tick is not None and moment > self._last_tick:
                return
            self._average_times[moment] = max(said.time, self._average_times.get(moment, 0.0))
            self._averages.add(said.node, moment, np.frombuffer(rest[0].buffer, np.float32))
            self._average_if_complete()
        elif isinstance(said, control.NodeDone):
            self._done.add(said.node)
            if not self._by_time:
                self._awaited.discard(said.node)
            self._average_if_complete()
        elif isinstance(said, control.NodeFailed):
            self._reasons[said.node] = said.text
            if self._zygote is not None:
                self._zygote.say(control.KillNodes([said.node]))  # it has nothing more to say

    def _node_exited(self, node: NodeId, code: int) -> None:
        self._exited.add(node)
        ended_well = code == 0 and node not in self._reasons
        if self._phase == "finishing" and (ended_well or self._signal is not None):
            return
        self._hear_nodes(LAST_WORDS)  # its own may still be on the way
        self._identities.pop(node, None)
        why = self._reasons.get(node) or self._explained(code)
        if self._phase not in ("running", "finishing"):
            raise LaunchError(f"node {node} could not start: {why.strip()}")
        self._lost[node] = why.strip().splitlines()[-1]
        self._listener.notice(f"{self._experiment.describe_failure(node, 'was lost')}. {why.strip()}")
        gone = control.PeerFailed(node, time.monotonic())
        self._tell_network(gone)
        self._tell_all(gone)
        self._awaited.discard(node)
        self._average_if_complete()
        is_awaited = node in self._starts.nodes or node in self._returned
        self._starts.settle(node)
        self._returned = [other for other in self._returned if other != node]
        if node in self._to_restart:
            self._to_restart.discard(node)
            self._restart([node])
        elif is_awaited:
            self._welcome_back()

    def _explained(self, code: int) -> str:
        """Why a node has ended that did not say so itself."""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        keys = self._experiment.processes.keys
        if code == control.EXIT_UNUSABLE_KEYS and keys is not None:
            return (
                f"its keys in {str(keys)!r} are not those that the run began with, or "
                "cannot be used any longer: leave them alone while it lasts; look at them with 'shoal keys check', and "
                f"start it again ({self._folder.log} says more)"
            )
        return f"exited with code {code}"

    def _average_if_complete(self) -> None:
        if self._signal is not None or (self._environment.timing_matters and self._phase == "running"):
            return  # it would take time from the nodes, or from the user who wants the run to end
        for averaged in self._averages.complete(self._awaited):
            self._averages_to_test.append(
                control.EvaluateAverage(
                    averaged.round,
                    self._average_times.pop(averaged.round),
                    averaged.nodes,
                    averaged.consensus_distance,
                    averaged.mean.tobytes(),
                    str(self._folder.path.resolve()),
                    averaged.round if self._by_time else None,
                )
            )
            if len(self._averages_to_test) == 1:
                self._test_average()

    def _test_average(self) -> None:
        """Have the next average tested, if there is one."""
        if self._averages_to_test and self._zygote is not None:
            self._zygote.say(self._averages_to_test[0])

    def _finish(self, stopped: bool = False) -> control.Finish:
        """What ends nodes now. Where models are looked at by the clock, this is one more moment to do so."""
        now, seconds = time.monotonic() - self._epoch, self._experiment.evaluation.seconds
        return control.Finish(stopped, None if seconds is None else int(now / seconds) + 1, now)

    def _tell_all(self, said: control.ToNode) -> None:
        self._tell(self._identities.keys() - self._exited, said)

    def _tell(self, nodes: Collection[NodeId], said: control.ToNode) -> None:
        encoded = control.encode(said)
        for node in nodes:
            if node in self._identities:  # else it has not said yet that it listens
                self._socket.send_multipart([self._identities[node], encoded])

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and self._zygote is not None:  # asked twice: do not wait
            self._zygote.kill()
        self._signal = number

    def _stop(self) -> None:
        """Let nodes keep what they have learnt, for a little while."""
        if self._phase != "running" and self._phase != "finishing":
            return
        kept = ", and test their last models; ask again to leave at once" if self._environment.timing_matters else ""
        self._listener.notice(f"stopping: nodes write down what they have{kept}")
        self._tell_all(self._finish(stopped=True))
        told = time.monotonic()
        while len(self._exited) < self._experiment.size:
            if time.monotonic() > STOP_SECONDS + max(told, *self._busy.values()):
                break
            self._phase = "finishing"
            self._poll()
        self._hear_network_out()

    def _hear_network_out(self) -> None:
        """Have the network's process end, and say how many strangers it has turned away in all."""
        if self._seal is None or self._network is None or self._network_ended:
            return
        self._network_reported = False
        self._phase = "finishing"
        self._tell_network(self._finish())
        until = time.monotonic() + STOP_SECONDS
        while not (self._network_reported and self._network_ended) and time.monotonic() < until:
            self._poll()

    def _end(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._namespaces is not None:
            self._namespaces.close()

    def _progress(self) -> Progress:
        nodes = self._experiment.size
        return Progress(
            self._phase,
            nodes=nodes,
            alive=nodes - len(self._lost),
            seconds=time.monotonic() - self._began_at,
            round=sum(self._rounds[node] for node in self._pace) / len(self._pace),
            rounds=self._experiment.algorithm.options.get("rounds"),
            score=self._score.mean,
            bytes_sent=sum(self._bytes.values()),
            duration=self._experiment.duration,
        )


def _raise_refused(said: control.StartFailed, source: str) -> None:
    if said.error == "ExperimentError":
        raise ExperimentError(said.problems, source)
    kind: Callable[[str], Exception] = getattr(errors, said.error, RunError)
    raise kind(said.text)
