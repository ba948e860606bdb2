"""The zygote: imports, loads data and warms up once, then forks a process for every node.

It is a new interpreter that the agent starts, or a fork of a template (`zygote_template.py`), which began as one. So no
thread and no socket of the caller's process is forked with it. It has no threads and sockets of its own either: nodes
create theirs after the fork. It lives as long as the run, reaps its children, reports their exits, and kills them all
when the agent's end of the pipe is closed. A zygote that was forked from a template ends with the template.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from shoal.engines.heap import occupy_free_blocks, occupy_free_chunks
from shoal.engines.operating_system import (
    exit_with_parent,
    is_stopped_child,
    raise_file_limit,
    release_memory,
    resident_memory,
)
from shoal.engines.processes import control
from shoal.engines.processes.capacity import KeptMemory, kept_memory, memory_warning
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.network_process import NetworkProcess
from shoal.engines.processes.node_process import run_node
from shoal.engines.processes.node_run import NodeLaunch
from shoal.engines.processes.slots import Slots
from shoal.engines.processes.zygote_process import PRELOAD
from shoal.engines.setup_fingerprint import content_hash, data_hash
from shoal.errors import ExperimentError, NoFreePortError, ShoalError, StorageError
from shoal.experiment import Experiment
from shoal.experiment.checks import uses_accelerator
from shoal.experiment.process_state import process_state_kept
from shoal.experiment.setup import Setup
from shoal.results.node_data import write_node_data
from shoal.results.record_writer import RETRY_SECONDS, PauseReport, RecordWriter
from shoal.results.records import Average, Event, Record, RunFolder, decode, encode
from shoal.types import NodeId


class Zygote:
    """The zygote of one run, at its end of the pipe to the agent."""

    def __init__(self, pipe: Connection, folder: RunFolder) -> None:
        self._pipe = pipe
        self._folder = folder
        self._pid = os.getpid()
        self._setup: Setup | None = None
        self._slots: Slots | None = None
        self._kept_memory = KeptMemory()
        """What nodes keep of the memory of a training for the next one."""
        self._nodes: dict[int, NodeId] = {}
        """Node by process id."""
        self._started: set[NodeId] = set()
        """All nodes that were ever forked."""
        self._averages: dict[int, tuple[int, int]] = {}
        """By the id of the process that evaluates an average: the round, and the file in memory for the record."""
        self._records = RecordWriter(folder, self._report_pause)
        self._network: int | None = None
        """The id of the network process."""
        self._child_exited, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Handle requests until the agent closes the pipe."""
        try:
            while True:
                ready = wait([self._pipe, self._child_exited], RETRY_SECONDS if self._records.paused else None)
                self._records.flush_if_due()
                if self._child_exited in ready:
                    os.read(self._child_exited, 4096)
                    self._reap()
                if self._pipe in ready:
                    self._handle(control.decode_to_zygote(self._pipe.recv_bytes()))
        except (EOFError, ConnectionError):
            self._kill([*self._nodes, *self._averages, *([] if self._network is None else [self._network])])

    def _handle(self, request: control.ToZygote) -> None:
        if isinstance(request, control.Prepare):
            self._prepare(request)
        elif isinstance(request, control.StartNodes):
            self._start_nodes(request)
        elif isinstance(request, control.KillNodes):
            self._kill([pid for pid, node in self._nodes.items() if node in request.nodes])
            for node in request.nodes:
                if node not in self._started:  # the request of an earlier coordinator to start it has not arrived
                    self._report(control.NodeExited(node, -signal.SIGKILL))
        elif isinstance(request, control.EvaluateAverage):
            self._evaluate(request)
        else:
            for node, event in request.events:
                self._record(node, event)

    def _prepare(self, request: control.Prepare) -> None:
        try:
            experiment = Experiment.from_table(request.experiment, base=Path(request.base))
            self._slots = Slots(experiment.processes.training_slots or request.cores)
            with warnings.catch_warnings(record=True) as caught:
                self._setup = Setup(experiment, shared=True)
            shown = [str(warning.message) for warning in caught]
            if (warning := _memory_warning(self._setup, request.nodes)) is not None:
                shown.append(warning)
            write_node_data(self._folder, self._setup.node_data())
            release_memory()  # of the setup, so that what is freed next is the memory of the training
            self._setup.warm_up()
            self._check_trainers(self._setup)
            used = resident_memory()
            release_memory()
            training_memory = max(0, used - resident_memory())
            self._kept_memory = kept_memory(request.nodes, self._setup.initial.size, training_memory)
        except ExperimentError as error:
            self._report(control.StartFailed("ExperimentError", str(error), list(error.problems)))
        except ShoalError as error:
            self._report(control.StartFailed(type(error).__name__, str(error), []))
        except Exception:
            self._report(control.StartFailed("SetupError", traceback.format_exc(), []))
        else:
            # What exists now is never garbage. Without this the collector would write to it, and unshare its memory.
            gc.collect()
            gc.freeze()
            occupy_free_blocks()
            occupy_free_chunks()
            hashes = (data_hash(self._setup), content_hash([self._setup.initial])) if request.compares else ("", "")
            self._report(control.Prepared(self._setup.initial.size, shown, *hashes))

    def _check_trainers(self, setup: Setup) -> None:
        """Raise an error about the trainers before nodes start: it is the error of the run, and not of each node.

        If this process used an accelerator, nodes could not use it, because they are forks. So another fork checks it.
        """
        if not uses_accelerator(setup.experiment):
            setup.check_trainers()
            return
        file = os.memfd_create("problems")
        pid = os.fork()
        if not pid:
            self._run_child(lambda: _list_problems(setup, file))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with os.fdopen(file, "rb") as written:
            written.seek(0)
            problems = written.read().decode().splitlines()
        if problems:
            raise ExperimentError(problems, setup.experiment.name)
        if code:
            raise RuntimeError(f"the process that tries training.device ended with code {code}; see nodes.log")

    def _start_nodes(self, request: control.StartNodes) -> None:
        if request.with_network:
            self._fork_network(request)
        running = set(self._nodes.values())  # a coordinator that continues a run may not know of the latest
        for node in (node for node in request.nodes if node not in running):
            try:
                self._fork_node(node, request)
            except OSError as error:
                reason = f"only {len(self._nodes)} of {len(request.nodes)} nodes could be started: {error.strerror}"
                self._report(
                    control.StartFailed("LaunchError", f"{reason}; use fewer nodes, or engine = 'simulation'", [])
                )
                return

    def _fork_node(self, node: NodeId, request: control.StartNodes) -> None:
        assert self._setup is not None
        assert self._slots is not None
        launch = NodeLaunch(self._setup, node, self._slots, request, self._kept_memory)
        pair = self._new_pair(node, request) if request.key_folder is None else None
        pid = os.fork()
        if pid:
            self._nodes[pid] = node
            self._started.add(node)
        else:
            self._run_child(lambda: run_node(launch, pair))

    def _fork_network(self, request: control.StartNodes) -> None:
        assert self._setup is not None
        setup = self._setup
        pair = self._new_pair(None, request)
        pid = os.fork()
        if pid:
            self._network = pid
        else:
            self._run_child(lambda: _run_network(setup, request, pair))

    def _new_pair(self, node: NodeId | None, request: control.StartNodes) -> KeyPair | None:
        """The key pair of a process that is about to be forked, where links are sealed.

        The public key is reported before the process can connect with it. Only the child keeps the secret key.
        """
        # The secret key is freed here, not wiped: a process that is forked later may find it in unused memory. All of
        # these processes belong to one user, who can read the memory of each. With a folder of keys the only secret
        # key here is the one of the network process.
        if request.control_key is None:
            return None
        pair = KeyPair.fresh()
        self._report(control.KeyAnnounced(node, pair.public))
        return pair

    def _evaluate(self, request: control.EvaluateAverage) -> None:
        assert self._setup is not None
        setup = self._setup
        file = os.memfd_create("average")
        pid = os.fork()
        if pid:
            self._averages[pid] = request.round, file
        else:
            self._run_child(lambda: _evaluate_average(setup, request, file))

    def _run_child(self, main: Callable[[], int]) -> None:
        """In the child: release what belongs to the zygote, run `main`, and exit with its code."""
        code = 1
        try:
            exit_with_parent(self._pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._pipe.close()
            os.close(self._child_exited)
            os.close(self._wakeup)
            code = main()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        self._kill([pid for pid in self._averages if is_stopped_child(pid)])  # the run would wait for it
        while self._nodes or self._averages or self._network is not None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if self._slots is not None:
                self._slots.restore_lost()
            code = os.waitstatus_to_exitcode(status)
            if pid in self._nodes:
                self._report(control.NodeExited(self._nodes.pop(pid), code))
            elif pid == self._network:
                self._network = None
                self._report(control.NetworkExited(code))
            elif pid in self._averages:
                round, file = self._averages.pop(pid)
                if code == 0:
                    self._record(None, decode(os.pread(file, os.fstat(file).st_size, 0)))
                os.close(file)
                self._report(control.AverageEvaluated(round, code))

    def _record(self, node: NodeId | None, record: Record) -> None:
        """Write a record of a node, or of an average. If that is impossible, the run goes on without it."""
        try:
            self._records.write(node, record)
        except StorageError as error:  # to the run's nodes.log
            what = f"the event {record.detail!r} of node {node}" if isinstance(record, Event) else "an average"
            print(f"{what}: {error}", file=sys.stderr, flush=True)

    def _report_pause(self, report: PauseReport) -> None:
        self._report(control.AgentDiskReport(report.paused, report.text))

    @staticmethod
    def _kill(pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # the id cannot belong to another process before ours is reaped

    def _report(self, report: control.FromZygote) -> None:
        self._pipe.send_bytes(control.encode(report))


def _memory_warning(setup: Setup, nodes: int) -> str | None:
    """Return a warning if the models that `nodes` nodes of this machine receive in a round need too much memory."""
    if not setup.experiment.sharing.traits.sends_whole_models:
        return None
    graph = setup.mixing.graph
    neighbours = sum(graph.degree(node, 0) for node in range(graph.nodes)) / graph.nodes
    return memory_warning(nodes, setup.initial.size, neighbours)


def _list_problems(setup: Setup, file: int) -> int:
    """Write the problems of the trainers to a file in memory, one per line."""
    try:
        setup.check_trainers()
    except ExperimentError as error:
        os.write(file, "\n".join(" ".join(problem.split()) for problem in error.problems).encode())
    return 0


def _run_network(setup: Setup, request: control.StartNodes, pair: KeyPair | None) -> int:
    """Run the network process, and return its exit code."""
    try:
        network = NetworkProcess(setup, request, pair)
    except NoFreePortError:
        return control.EXIT_NO_FREE_PORT
    return network.serve()


def _evaluate_average(setup: Setup, request: control.EvaluateAverage, file: int) -> int:
    """Evaluate an average, and write the record to a file in memory: the zygote waits if the disk is full."""
    scores = setup.evaluate(request.array)
    record = Average(request.round, request.time, request.nodes, request.consensus_distance, scores, request.tick)
    with os.fdopen(os.dup(file), "wb") as written:
        written.write(encode(record))
    return 0


def preload() -> None:
    """Build a small setup and take a step with it: that imports and initialises what almost every run needs."""
    experiment = Experiment(nodes=2, engine="processes")
    with process_state_kept(experiment):
        Setup(experiment).warm_up()


def main() -> None:
    exit_with_parent(int(sys.argv[3]))
    raise_file_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides what a Ctrl-C means
    pipe = Connection(int(sys.argv[2]))
    if PRELOAD in sys.argv:
        preload()
    serve(pipe)


def serve(pipe: Connection) -> None:
    """Be the zygote of the run in the folder that the agent sends first."""
    try:
        folder = RunFolder(Path(os.fsdecode(pipe.recv_bytes())))
    except (EOFError, ConnectionError):
        return  # the agent has ended, and there was no run
    with open(folder.log, "ab") as log:
        for output in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), output.fileno())
    Zygote(pipe, folder).serve()
