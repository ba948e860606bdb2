"""The process of one node, from fork to exit: an event loop that always responds, and one thread that trains."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import traceback
from pathlib import Path

import zmq

from shoal.engines.processes import control
from shoal.engines.processes.coordinator_link import CoordinatorLink
from shoal.engines.processes.keys import KeyPair, read_pair
from shoal.engines.processes.namespaces import enter
from shoal.engines.processes.node_network import NodeNetwork
from shoal.engines.processes.node_run import NodeLaunch, NodeRun, RejectionLog
from shoal.engines.processes.runtime import RunClock
from shoal.engines.processes.sealing import Seal
from shoal.engines.processes.task_scope import TaskScope
from shoal.errors import LaunchError, NoFreePortError, StorageError
from shoal.results.record_writer import PauseReport, RecordWriter
from shoal.results.records import Record

MAX_ERROR_CHARACTERS = 2**13
"""The most characters of an error that a node sends to the coordinator: the last ones, which name the error."""


def run_node(launch: NodeLaunch, pair: KeyPair | None = None) -> int:
    """Run a node, and return the exit code. `pair` is the node's key pair, unless it is in a folder of keys."""
    id, start = launch.id, launch.start
    try:
        if start.key_folder is not None:
            pair = read_pair(Path(start.key_folder), id, start.public_keys[id])
    except LaunchError as error:
        # To the run's nodes.log. Without a key pair the node cannot connect to the coordinator.
        print(f"node {id}: {error}", file=sys.stderr)
        return control.EXIT_UNUSABLE_KEYS
    try:
        if start.namespaces:
            enter(start.namespaces[id])  # before any socket, and before any thread that opens one
        with asyncio.Runner(loop_factory=lambda: RunEventLoop(start.clock_offset)) as runner:
            return runner.run(_run(launch, pair))
    except Exception:
        traceback.print_exc()  # to the run's nodes.log; the coordinator sees the exit code
        return control.EXIT_ERROR


class RunEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is the coordinator's monotonic clock, as far as it is known on this machine."""

    def __init__(self, clock_offset: float) -> None:
        """`clock_offset` is added to the machine's monotonic clock."""
        super().__init__()
        self._clock_offset = clock_offset

    def time(self) -> float:
        return super().time() + self._clock_offset


async def _run(launch: NodeLaunch, pair: KeyPair | None) -> int:
    return await NodeProcess(launch, pair).run()


class NodeProcess:
    """Owns what a node has before the run starts: its ZeroMQ context, its keys, and its link to the coordinator.

    Reports an error of any of the node's tasks to the coordinator.
    """

    def __init__(self, launch: NodeLaunch, pair: KeyPair | None) -> None:
        start = launch.start
        assert (pair is None) == (start.control_key is None)
        self._launch = launch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # One connection to every node, and those that still linger after their eviction.
        self._context.set(zmq.MAX_SOCKETS, 2 * launch.experiment.size + 128)
        self._scope = TaskScope()
        self._clock = RunClock()
        self._records = RecordWriter(launch.folder, self._report_pause)
        self._records.open(launch.id)
        self._unauthenticated = RejectionLog("unauthenticated connection", self._record, self._clock)
        self._seal = None if pair is None else self._new_seal(pair)
        self._network: NodeNetwork | None = None
        self._run: NodeRun | None = None
        self._link = CoordinatorLink(self._context, start.control_endpoint, self, self._seal, start.control_key)

    async def run(self) -> int:
        """Take part in the run, and return the exit code. Sockets that are still open end with the process."""
        try:
            async with self._scope:
                await self._take_part()
        except NoFreePortError:
            return control.EXIT_NO_FREE_PORT
        except Exception as error:
            with contextlib.suppress(StorageError):  # the coordinator reports the first error
                self._records.finish()
            self._report(error)
            return control.EXIT_ERROR
        return 0

    async def _take_part(self) -> None:
        launch = self._launch
        rejected = RejectionLog("message rejected", self._record, self._clock)
        network = NodeNetwork(self._context, launch.setup, launch.id, launch.start, rejected, self._seal)
        self._network = network
        try:
            if self._seal is not None:
                self._scope.start(self._seal.serve())
            listening_since = asyncio.get_running_loop().time()
            self._link.send(control.NodeListening(launch.id, launch.start.run, network.transport.endpoint))
            message = await self._link.started
            network.start(message)
            self._clock.start(message.epoch)
            run = NodeRun(launch, message, network, self._link, self._records, self._clock, self._scope)
            self._run = run
            for node in message.failed_nodes:
                network.mark_failed(node, listening_since)
            await run.run()
            if self._seal is not None:
                self._seal.count_remaining()
            self._record(run.end_record(rejected.count, self._unauthenticated.count))
            await run.write_finally(self._records.finish)
            self._link.close(control.NodeExiting(launch.id))
        finally:
            network.close()

    # Messages from the coordinator.

    def peer_failed(self, message: control.PeerFailed) -> None:
        if self._network is not None:
            self._network.mark_failed(message.node, message.time)

    def peer_restarted(self, message: control.PeerRestarted) -> None:
        if self._network is not None:
            self._network.mark_restarted(message)

    def set_online(self, online: bool) -> None:
        if self._run is not None:  # else the start message has the node's availability
            self._run.runtime.set_online(online)

    def inject_fault(self, message: control.InjectFault) -> None:
        if self._run is not None:
            self._run.observer.inject_fault(message)

    def save_checkpoint(self, round: int) -> None:
        if self._run is not None:
            self._run.save_checkpoint(round)

    def stop(self, message: control.Finish) -> None:
        if self._run is None:
            os._exit(0)
        self._run.stop(message)

    def fail(self, error: Exception) -> None:
        self._scope.fail(error)

    def _record(self, record: Record) -> None:
        self._records.write(self._launch.id, record)

    def _report_pause(self, report: PauseReport) -> None:
        self._link.send(control.DiskReport(self._launch.id, report.paused, report.text, report.dropped))

    def _new_seal(self, pair: KeyPair) -> Seal:
        # Peers may connect before the start message with their keys arrives: they wait for it.
        return Seal(self._context, pair, self._unauthenticated, asyncio.get_running_loop().time, math.inf)

    def _report(self, error: Exception) -> None:
        """Send an error to the coordinator, and wait until it is read."""
        id = self._launch.id
        text = str(error) if isinstance(error, LaunchError | StorageError) else traceback.format_exc()
        if len(text) > MAX_ERROR_CHARACTERS:
            print(f"node {id}: {text}", file=sys.stderr)  # to the run's nodes.log
            text = f"… {text[-MAX_ERROR_CHARACTERS:]}"
        self._link.close(control.NodeFailed(id, self._launch.start.run, text))
