"""A run of real processes whose nodes and coordinator receive messages of an attacker.

    attacked = AttackedRun(folder, messages=10_000, seed=1)
    attacked.run()
    assert not attacked.problems

The rounds of the run wait until they are released, and each is released while the attacker sends: every round shows
that the nodes' own messages still arrive. Some messages come from an attacker that knows nothing of the run, not even
ZeroMQ's handshake. Others contain the run's name, so that they are valid as far as they go: for another node, from a
node that does not exist, of an unknown kind, of a round long past or far ahead. One kind of message is missing, because
links that are not sealed cannot detect it: a message of the right kind and round in the name of a node that is awaited.

In a run with a network the attacker invents tickets, which the network process does not know, and sends implausible
submissions to it in the names of nodes.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import tomli_w
import zmq

from shoal.engines.operating_system import MIB
from shoal.engines.processes import control, shaper
from shoal.errors import MessageError
from shoal.experiment import Experiment
from shoal.message import RUN_LENGTH, Message, Payload, address, decode, ticket_of
from shoal.message_budget import MessageBudget
from shoal.results.records import Round, RunFolder
from shoal.sharing.secure.messages import INCLUDED, OWNERS, SHARES_REQUEST, UNMASK_ANSWER, UNMASK_REQUEST
from shoal.testing import Mutator
from shoal.testing.fuzz import Frames
from shoal.types import NodeId

NODES = 6
ROUNDS = 12
"""The first round and the last two are released without an attack."""
FAR_ROUND = 10**9
"""A round that no run reaches."""
TIMEOUT = 120.0
"""Seconds: a generous timeout for operations that are fast on an idle machine."""
GATED = '''"""D-PSGD whose rounds wait until they are released."""

import os
from dataclasses import dataclass
from pathlib import Path

from shoal.algorithms.dpsgd import DPSGD


@dataclass(frozen=True)
class Gated(DPSGD):
    gate: str = ""

    async def run(self, node):
        gate = Path(self.gate)
        gate.with_name(f"node-{node.id}.part").write_text(f"{os.getpid()} {node.context.run}")
        gate.with_name(f"node-{node.id}.part").rename(gate.with_name(f"node-{node.id}"))
        train = node.train

        async def when_let_go(params, steps=None):
            while int(gate.read_text()) <= node.next_round:
                await node.sleep(0.02)
            return await train(params, steps)

        node.train = when_let_go
        await super().run(node)
'''


@dataclass(frozen=True)
class _Target:
    """A node under attack."""

    id: NodeId
    process: psutil.Process
    port: int
    run: str


@dataclass
class AttackedRun:
    """One run under attack, and its results."""

    folder: Path
    messages: int
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the experiment that differ from those of a small one."""
    far_models: int = 0
    """Complete models of far rounds that one node receives as well."""
    report: Callable[[str], None] = lambda line: None
    sent: Counter[str] = field(default_factory=Counter)
    must_reject: int = 0
    """Messages that nodes must reject and count when they read them."""
    summary: dict[str, Any] = field(default_factory=dict)
    uss_before: list[float] = field(default_factory=list)
    """Private memory of each node in MiB before the attack; below, after the attack."""
    uss_after: list[float] = field(default_factory=list)
    grown_mib: float = 6.0
    """By how many MiB a node's private memory may grow, in addition to the budget of its mailbox."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """How long the attack took."""

    def run(self) -> None:
        """Simulate the experiment undisturbed, run it under attack, and compare both."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._random = Random(self.seed)
        self._mutator = Mutator(self.seed)
        self._gate = self.folder.resolve() / "gate"
        (self.folder / "gated.py").write_text(GATED)
        (self.folder / "small.toml").write_text(tomli_w.dumps(self._table()))
        self._release_rounds(ROUNDS)
        undisturbed = Experiment.from_file(self.folder / "small.toml", {"engine": "simulation"}).run(
            self.folder / "peace"
        )
        self._parameters = np.load(undisturbed.folder.model(0)).size
        self._release_rounds(0)
        try:
            with self._started() as process:
                self._attack(process)
                code = process.wait(TIMEOUT)
        except (TimeoutError, subprocess.TimeoutExpired, zmq.ZMQError, OSError, psutil.Error) as error:
            self.problems.append(f"{type(error).__name__}: {error}; the end of the log: {self._log()[-2000:]}")
            return
        self._check(code, undisturbed.summary)

    def _table(self) -> dict[str, Any]:
        return {
            "name": "siege",
            "nodes": NODES,
            "seed": 1,
            "algorithm": {"name": "gated.py:Gated", "rounds": ROUNDS, "gate": str(self._gate)},
            "topology": {"name": "regular", "degree": 3, "dynamic": True},
            "dataset": {"name": "digits", "partition": {"name": "shards", "per_node": 2}},
            "training": {"lr": 0.1, "batch_size": 16, "local_steps": 2},
            "evaluation": {"every": 0, "average": False},
            "simulation": {"batching": "off"},
            **self.settings,
        }

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "shoal", "run", "small.toml", "--engine", "processes", "--out", "runs"]
        with (self.folder / "out.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def _attack(self, process: subprocess.Popen[bytes]) -> None:
        targets = [self._target(node, process) for node in range(NODES)]
        network = self._network_port(targets, process) if self._shaped else None
        coordinator = _listens_on(psutil.Process(process.pid), process)
        self._release_rounds(1)
        self._wait_for_round(0, process)
        self.uss_before = [_uss(target.process) for target in targets]
        began = time.monotonic()
        context: zmq.Context[Any] = zmq.Context()
        try:
            self._send_to_all(context, targets, coordinator, network, process)
            context.destroy(linger=int(1000 * TIMEOUT))  # waits until everything is sent
        finally:
            context.destroy(linger=0)
        self.seconds = time.monotonic() - began
        self._release_rounds(ROUNDS - 1)
        self._wait_for_round(ROUNDS - 2, process)
        self.uss_after = [_uss(target.process) for target in targets]
        self._release_rounds(ROUNDS)

    def _send_to_all(
        self,
        context: zmq.Context[Any],
        targets: list[_Target],
        coordinator: int,
        network: int | None,
        process: subprocess.Popen[bytes],
    ) -> None:
        """Send in every round, after its release."""
        rounds = range(1, ROUNDS - 2)
        lines = [_connected(context, zmq.PUSH, target.port) for target in targets]
        control_line = _connected(context, zmq.DEALER, coordinator)
        for message in _control_messages(0, targets[0].run):
            control_line.send(control.encode(message))
        network_line = (
            None
            if network is None
            else _connected(context, zmq.DEALER, network, name=shaper.identity(0, targets[0].run))
        )
        for round in rounds:
            self._release_rounds(round + 1)
            for number in range(_share(self.messages, rounds, round)):
                which = self._random.randrange(NODES)
                if number % 20 == 0:
                    self._send_raw_bytes(coordinator if number % 100 == 0 else targets[which].port)
                elif number % 10 == 1:
                    control_line.send_multipart(self._control_message(targets[0].run))
                    self.sent["control"] += 1
                elif number % 10 == 2 and network_line is not None:
                    network_line.send(self._implausible_submission())
                    self.sent["posts"] += 1
                else:
                    self._send_message(lines[which], targets[which])
            for number in range(_share(self.far_models, rounds, round)):
                frames = self._model(FAR_ROUND + number, self._random.randrange(NODES), targets[0].run)
                lines[0].send_multipart([self._address(0), *frames])
                self.sent["models of far rounds, to one node"] += 1
            self._wait_for_round(round, process)
            self.report(f"round {round}: {sum(self.sent.values()):,} messages so far")

    def _check(self, code: int, undisturbed: dict[str, Any]) -> None:
        self.summary = summary = self._runs().read_summary()
        if code or summary["status"] != "completed" or summary["lost"]:
            self.problems.append(
                f"exit code {code}, status {summary['status']}, lost: {summary['lost']}: {self._log()}"
            )
        if summary["digest"] != undisturbed["digest"]:
            self.problems.append("the models differ from those of the undisturbed run")
        if summary["messages_rejected"] < self.must_reject:
            self.problems.append(
                f"{summary['messages_rejected']} messages rejected, of {self.must_reject} at the least"
            )
        budget = MessageBudget(4 * self._parameters, NODES).size / MIB if self.far_models else 0.0
        for node, (before, after) in enumerate(zip(self.uss_before, self.uss_after, strict=True)):
            if after - before > self.grown_mib + budget:
                self.problems.append(f"node {node} has grown from {before:.1f} to {after:.1f} MiB")
        if "Traceback" in (log := self._log() + self._runs().log.read_text()):
            self.problems.append(f"an exception was raised: {log}")

    # The attacker's messages.

    def _send_message(self, line: Any, target: _Target) -> None:
        """Send one message to a node over ZeroMQ."""
        kind = self._random.choice(
            ("unknown run", "unknown run", "unknown run", "unknown run", "known run", "known run")
        )
        if kind == "unknown run":
            run = f"{self._random.getrandbits(64):0{RUN_LENGTH}x}"
            _, frames = self._mutator.frames(self._model(self._random.randrange(ROUNDS), 1, run))
            front = self._random.choice(
                (address(target.id), address(target.id, 7), address(9), self._mutator.garbage(13))
            )
            frames = [front, *frames] if self._random.random() < 0.9 else frames
        else:
            kind, frames = self._message_with_run_name(target)
        frames = frames or [b""]
        self.must_reject += _is_rejected(frames, target, self._shaped)
        self.sent[kind] += 1
        line.send_multipart(frames)

    def _message_with_run_name(self, target: _Target) -> tuple[str, Frames]:
        """A message that has the run's name, but not the right node, kind or round."""
        here, sender = self._address(target.id), self._random.randrange(NODES)
        kind = self._random.choice(("other receiver", "unknown sender", "unknown kind", "past", "far ahead", "secure"))
        if kind == "other receiver":
            return kind, [
                self._address(target.id + 1),
                *self._model(self._random.randrange(ROUNDS), sender, target.run),
            ]
        if kind == "unknown sender":
            return kind, [here, *self._model(self._random.randrange(ROUNDS), NODES + sender, target.run)]
        if kind == "past":
            return kind, [here, *self._model(0, sender, target.run)]
        if kind == "far ahead":
            return kind, [here, *self._model(FAR_ROUND + self._random.randrange(10), sender, target.run)]
        if kind == "secure":
            payload = Payload({self._random.choice((INCLUDED, OWNERS)): np.zeros(3, np.uint8)})
            message = Message(
                sender,
                self._random.choice((UNMASK_REQUEST, UNMASK_ANSWER, SHARES_REQUEST)),
                FAR_ROUND,
                payload,
                target.run,
            )
            return kind, [here, *map(bytes, message.frames())]
        payload = Payload({"x": np.arange(50, dtype=np.float32), "y": np.zeros((3, 2), np.int8)}, {"a": 1, "b": "c"})
        _, frames = self._mutator.frames(Message(sender, "fuzz", 3, payload, target.run).frames())
        return kind, [here, *frames]

    def _address(self, to: NodeId) -> bytes:
        """An address, with an invented ticket where messages have tickets: lower than every ticket of a node."""
        return address(to, self._random.getrandbits(32) if self._shaped else None)

    def _model(self, round: int, sender: NodeId, run: str) -> Frames:
        payload = Payload({"params": np.full(self._parameters, 7, np.float32)})
        return [bytes(frame) for frame in Message(sender, "model", round, payload, run).frames()]

    def _control_message(self, run: str) -> Frames:
        """A message to the coordinator in the name of a node or of the network process."""
        node, name = self._random.randrange(-1, NODES + 1), self._random.choice((run, run, "0" * RUN_LENGTH))
        data = control.encode(self._random.choice(_control_messages(node, name)))
        if self._random.random() < 0.7:
            _, data = self._mutator.packed(data)
        return [data] if self._random.random() < 0.8 else [data, self._mutator.garbage(), b""]

    def _implausible_submission(self) -> bytes:
        """A submission in the name of node 0 from before the run or from the future, or of negative size."""
        now, size, when = time.monotonic(), self._random.choice((0, 100, 2**40)), self._random.randrange(5)
        since = (math.nan, math.inf, -math.inf, now + TIMEOUT + 100.0 * self._random.random(), 0.0)[when]
        if self._random.random() < 0.2:
            since, size = now, -1 - size
        return shaper.encode(
            shaper.Submission(self._random.getrandbits(32), self._random.randrange(NODES), size, since, bool(when % 2))
        )

    def _send_raw_bytes(self, port: int) -> None:
        """Send bytes that violate ZeroMQ's protocol, from the first byte on or after a handshake."""
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PUSH"
        frames = self._random.choice(
            (b"\x02" + b"\xff" * 8, b"\x02" + b"\x7f" + b"\xff" * 7, b"\x01\x05hello\x00\x00", b"\xff" * 20,
             b"\x04\xff" + bytes(255), b"\x04\x05\x04PING", b"\x00\x05hel", b"\x03" + bytes(8) + b"\x00\x00")
        )  # fmt: skip
        data = self._random.choice(
            (b"GET / HTTP/1.1\r\nHost: shoal\r\n\r\n", self._mutator.garbage(), greeting[: self._random.randrange(64)],
             greeting + self._mutator.garbage(), greeting + ready + frames, greeting + ready + self._mutator.garbage())
        )  # fmt: skip
        self.sent["raw TCP"] += 1
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as line:
            line.sendall(data)

    # The run.

    @property
    def _shaped(self) -> bool:
        return "network" in self.settings

    def _release_rounds(self, rounds: int) -> None:
        """Let nodes begin the first `rounds` rounds."""
        part = self._gate.with_name("gate.part")
        part.write_text(str(rounds))
        part.rename(self._gate)

    def _target(self, node: NodeId, run: subprocess.Popen[bytes]) -> _Target:
        file = self._gate.with_name(f"node-{node}")
        # The simulation has left such a file as well, with the id of its own process.
        pid, name = _until(lambda: (fields := file.read_text().split())[0] != str(os.getpid()) and fields, run)
        process = psutil.Process(int(pid))
        return _Target(node, process, _listens_on(process, run), name)

    def _network_port(self, targets: list[_Target], run: subprocess.Popen[bytes]) -> int:
        """The port of the only listening process besides the nodes and the coordinator."""
        nodes = {target.process.pid for target in targets}

        def listening() -> list[psutil.Process]:
            others = (p for p in psutil.Process(run.pid).children(recursive=True) if p.pid not in nodes)
            return [p for p in others if any(c.status == psutil.CONN_LISTEN for c in p.net_connections("tcp"))]

        return _listens_on(_until(listening, run)[0], run)

    def _runs(self) -> RunFolder:
        return RunFolder(next((self.folder / "runs").glob("*/*/experiment.toml")).parent)

    def _wait_for_round(self, round: int, process: subprocess.Popen[bytes]) -> None:
        folder = self._runs()

        def all_have() -> bool:
            return all(any(isinstance(r, Round) and r.round >= round for r in folder.read(n)) for n in range(NODES))

        _until(all_have, process)

    def _log(self) -> str:
        return (self.folder / "out.log").read_text(errors="replace")


def _is_rejected(frames: Frames, target: _Target, shaped: bool) -> bool:
    try:
        if ticket_of(frames[0], target.id) is None and shaped:
            return True
        return decode(frames[1:], target.run).sender >= NODES
    except MessageError:
        return True


def _control_messages(node: NodeId, run: str) -> list[control.FromNode]:
    """Valid messages, except for their sender."""
    return [
        control.NodeListening(node, run, "tcp://127.0.0.1:1"),
        control.NetworkListening(run, "tcp://127.0.0.1:1"),
        control.FirstRoundStarted(node),
        control.Heartbeat(node, True),
        control.ModelSnapshot(node, 1, 1.0),
        control.ProgressReport(node, 10**6, 1),
        control.NodeDone(node),
        control.NodeFailed(node, run, "not me"),
    ]


def _connected(context: zmq.Context[Any], kind: int, port: int, name: bytes = b"") -> Any:
    line = context.socket(kind)
    if name:
        line.setsockopt(zmq.IDENTITY, name)
    line.setsockopt(zmq.SNDTIMEO, int(1000 * TIMEOUT))
    line.connect(f"tcp://127.0.0.1:{port}")
    return line


def _share(total: int, rounds: range, round: int) -> int:
    place = rounds.index(round)
    return total * (place + 1) // len(rounds) - total * place // len(rounds)


def _listens_on(process: psutil.Process, run: subprocess.Popen[bytes]) -> int:
    def port() -> int | None:
        lines = process.net_connections("tcp")
        return next((line.laddr.port for line in lines if line.status == psutil.CONN_LISTEN), None)

    return int(_until(port, run))


def _uss(process: psutil.Process) -> float:
    return float(process.memory_full_info().uss / MIB)


def _until(condition: Callable[[], Any], run: subprocess.Popen[bytes]) -> Any:
    """The first true value of `condition` while the run lasts."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline and run.poll() is None:
        if found := condition():
            return found
        time.sleep(0.02)
    raise TimeoutError("the run has ended" if run.poll() is not None else f"no progress for {TIMEOUT:g} s")
