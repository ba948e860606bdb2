"""A node and its supervisor: the line between them, and what the node is watched for."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.runtime import ProcessRuntime
from shoal.engines.processes.sealing import Seal
from shoal.environment.faults import Fault
from shoal.errors import NodeError
from shoal.node import Node
from shoal.results.progress import main_score
from shoal.results.records import Evaluation, Event, Record, RecordFile, Round, RunFolder
from shoal.types import NodeId, Params

REPORT_EVERY = 0.5


class CoordinatorLink:
    """The node's end of the line to its supervisor."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        seal: Seal | None = None,
        key: bytes | None = None,
    ) -> None:
        """`key` is the supervisor's, where links are sealed."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 5000)
        if seal is not None:
            seal.secure_client(self._socket, key)
        self._socket.connect(endpoint)
        self._loop = asyncio.get_running_loop()
        self.go: asyncio.Future[control.Start] = self._loop.create_future()
        self.finish: asyncio.Future[control.Finish] = self._loop.create_future()
        self.on_gone: Any = None
        self.on_back: Any = None
        # Of what happens to one that was started again, and waits for others that are, it hears when it begins.
        self.on_attend: Any = lambda online: None
        self.on_strike: Any = lambda said: None
        self.on_stop: Any = None
        self.heeding = False
        """Whether the node is ready for what comes after its start."""
        self._loop.add_reader(self._socket.FD, self._drain)

    def heed(self) -> None:
        """Take in what was said since the start, and what will be."""
        self.heeding = True
        self._drain()

    def say(self, said: control.FromNode, params: Params | None = None) -> None:
        frames = [control.encode(said)] if params is None else [control.encode(said), params.tobytes()]
        self._socket.send_multipart(frames)
        self._loop.call_soon(self._drain)  # sending may have swallowed the signal that something has come

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()

    def _drain(self) -> None:
        while not self._socket.closed and not (self.go.done() and not self.heeding):
            try:
                said = control.decode_to_node(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(said, control.Start):
                self.go.set_result(said)
            elif isinstance(said, control.PeerFailed):
                self.on_gone(said.node, said.time)
            elif isinstance(said, control.PeerRestarted):
                self.on_back(said)
            elif isinstance(said, control.SetOnline):
                self.on_attend(said.online)
            elif isinstance(said, control.InjectFault):
                self.on_strike(said)
            elif said.stopped:
                self.on_stop(said)
            elif not self.finish.done():
                self.finish.set_result(said)


class NodeObserver:
    """The observer of one node process: its records go to its file, the news to the supervisor."""

    def __init__(self, id: NodeId, lines: RecordFile, line: CoordinatorLink, faults: list[Fault]) -> None:
        self._id = id
        self._lines = lines
        self._line = line
        self._faults = faults
        self._began = False
        self._reported = 0.0
        self._latest: tuple[int, int] = (0, 0)
        self._evaluation: Evaluation | None = None
        self.now: Any = None
        self.runtime: ProcessRuntime | None = None
        self.later: DeferredEvaluations | None = None
        """Where models are kept that are tested when the run is over; None where they are tested at once."""
        self.ticks = 0
        """The last moment at which the model was looked at, where that is done by the clock."""

    def record(self, record: Record) -> None:
        self._lines.write(record)
        if isinstance(record, Round):
            self._latest = (record.round + 1, record.bytes_sent)
            if record.round == 0 or time.monotonic() - self._reported > REPORT_EVERY:
                self.report()
        elif isinstance(record, Evaluation):
            self._evaluation = record
            self.report()

    def report(self) -> None:
        self._reported = time.monotonic()
        evaluation, self._evaluation = self._evaluation, None
        rounds, sent = self._latest
        if evaluation is None:
            self._line.say(control.ProgressReport(self._id, rounds, sent))
        else:
            score = main_score(evaluation.scores)
            self._line.say(control.ProgressReport(self._id, rounds, sent, evaluation.round, score))

    def model(self, round: int, params: Params, tick: int | None = None) -> None:
        self._line.say(control.ModelSnapshot(self._id, round, self.now(), tick), params)

    def defer_evaluation(self, round: int, params: Params) -> bool:
        if self.later is None:
            return False
        self.later.keep(round, self.now(), params)
        return True

    async def before_round(self, round: int) -> None:
        if not self._began:
            self._began = True
            self._line.say(control.FirstRoundStarted(self._id))
        if self._faults and self._faults[0].strikes_at(round):
            fault = self._faults.pop(0)
            self.record(Event("fault", self.now(), f"{fault.kind} at round {round}"))
            if fault.kind == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "raise":
                raise NodeError(f"fault on schedule: node {self._id} raises at round {round}")
            assert self.runtime is not None
            self.runtime.hang()
            await asyncio.Event().wait()  # nobody sets it

    def strike(self, said: control.InjectFault) -> None:
        """A fault that the clock brings."""
        assert self.runtime is not None
        self.record(Event("fault", self.now(), said.detail))
        if said.kind == "slow":
            if said.factor is not None:
                self.runtime.slow_down(said.factor)
        elif said.kind == "hang":
            self.runtime.hang()
        else:
            self.runtime.fail(NodeError(f"fault on schedule: {said.detail}"))


class DeferredEvaluations:
    """Models that are tested when the run is over, so that testing takes no time from anybody's training.

    They lie in a nameless file: gone with the process, whatever becomes of it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._file = tempfile.TemporaryFile(dir=folder.path)  # noqa: SIM115 - lives as long as the process
        self._kept: list[tuple[int, float, int | None]] = []

    def keep(self, round: int, time: float, params: Params, tick: int | None = None) -> None:
        self._file.seek(len(self._kept) * params.nbytes)
        self._file.write(params.data)
        self._kept.append((round, time, tick))

    def forget_after(self, tick: int) -> None:
        """Drop what was kept at later moments than this one."""
        while self._kept and (self._kept[-1][2] or 0) > tick:
            self._kept.pop()

    def test(self, node: Node, latest_first: bool = False) -> Iterator[Evaluation]:
        """Test all of them, in order or the other way round."""
        size, kept = node.params.nbytes, list(enumerate(self._kept))
        for place, (round, moment, tick) in reversed(kept) if latest_first else kept:
            self._file.seek(place * size)
            params = np.frombuffer(self._file.read(size), np.float32)
            yield Evaluation(round, moment, node.trainer.evaluate(params), tick)
