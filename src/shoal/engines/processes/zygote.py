"""The zygote: imports, loads and warms up once, then forks a process for every node.

It is a fresh interpreter that the supervisor starts, so that neither threads nor sockets of the caller's process are
forked with it. It stays free of both itself: nodes make theirs after the fork. It lives as long as the run, reaps its
children, tells the supervisor of their ends, and ends them all when the supervisor is gone.
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

import numpy as np

from shoal.engines.operating_system import exit_with_parent, raise_file_limit
from shoal.engines.processes import control
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.network_process import NetworkProcess
from shoal.engines.processes.node_process import run_node
from shoal.engines.processes.slots import Slots
from shoal.errors import ExperimentError, ShoalError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.results.records import Average, RecordFile, RunFolder
from shoal.types import NodeId


class Zygote:
    """One run's zygote, on its end of the pipe to the supervisor."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._pid = os.getpid()
        self._setup: Setup | None = None
        self._slots = Slots()
        self._nodes: dict[int, NodeId] = {}
        """Process to node."""
        self._averages: dict[int, int] = {}
        """Process to round."""
        self._network: int | None = None
        """The network's process."""
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the supervisor hangs up."""
        try:
            while True:
                ready = wait([self._pipe, self._wake])
                if self._wake in ready:
                    os.read(self._wake, 4096)
                    self._reap()
                if self._pipe in ready:
                    self._obey(control.decode_to_zygote(self._pipe.recv_bytes()))
        except (EOFError, ConnectionError):
            self._kill([*self._nodes, *self._averages, *([] if self._network is None else [self._network])])

    def _obey(self, said: control.ToZygote) -> None:
        if isinstance(said, control.Prepare):
            self._prepare(said)
        elif isinstance(said, control.StartNodes):
            self._fork_all(said)
        elif isinstance(said, control.KillNodes):
            self._kill([pid for pid, node in self._nodes.items() if node in said.nodes])
        else:
            self._evaluate(said)

    def _prepare(self, said: control.Prepare) -> None:
        try:
            experiment = Experiment.from_table(said.experiment, base=Path(said.base))
            self._slots = Slots(experiment.processes.training_slots)
            with warnings.catch_warnings(record=True) as caught:
                self._setup = Setup(experiment, shared=True)
            self._setup.warm_up()
        except ExperimentError as error:
            self._say(control.StartFailed("ExperimentError", str(error), list(error.problems)))
        except ShoalError as error:
            self._say(control.StartFailed(type(error).__name__, str(error), []))
        except Exception:
            self._say(control.StartFailed("RunError", traceback.format_exc(), []))
        else:
            # What exists now is never garbage: keep the collector, and with it copy-on-write, away from it.
            gc.collect()
            gc.freeze()
            self._say(control.Prepared(self._setup.initial.size, [str(warning.message) for warning in caught]))

    def _fork_all(self, said: control.StartNodes) -> None:
        if said.with_network:
            self._fork_network(said)
        for node in said.nodes:
            try:
                self._fork(node, said)
            except OSError as error:
                why = f"only {len(self._nodes)} of {len(said.nodes)} nodes could be started: {error.strerror}"
                self._say(control.StartFailed("LaunchError", f"{why}; use fewer, or engine = 'simulation'", []))
                return

    def _fork(self, node: NodeId, said: control.StartNodes) -> None:
        assert self._setup is not None
        setup = self._setup
        pair = self._new_pair(node, said) if said.key_folder is None else None
        pid = os.fork()
        if pid:
            self._nodes[pid] = node
        else:
            self._become(lambda: run_node(setup, node, self._slots, said, pair))

    def _fork_network(self, said: control.StartNodes) -> None:
        assert self._setup is not None
        setup = self._setup
        pair = self._new_pair(None, said)
        pid = os.fork()
        if pid:
            self._network = pid
        else:
            self._become(lambda: NetworkProcess(setup, said, pair).serve())

    def _new_pair(self, node: NodeId | None, said: control.StartNodes) -> KeyPair | None:
        """The keys of a process that is about to be forked, where links are sealed.

        The supervisor knows the public one before anybody can knock with it; nobody but the child keeps the secret one.
        """
        # It is freed here, not wiped: what is forked later may find earlier secrets in memory that nobody uses. All of
        # these processes are one user's, who can read the memory of each. With a folder of keys no secret is ever here
        # but that of the network's process.
        if said.coordinator_key is None:
            return None
        pair = KeyPair.fresh()
        self._say(control.KeyAnnounced(node, pair.public))
        return pair

    def _evaluate(self, said: control.EvaluateAverage) -> None:
        assert self._setup is not None
        setup = self._setup
        pid = os.fork()
        if pid:
            self._averages[pid] = said.round
        else:
            self._become(lambda: _evaluate(setup, said))

    def _become(self, life: Callable[[], int]) -> None:
        """In the child: leave the zygote behind, live, and exit."""
        code = 1
        try:
            exit_with_parent(self._pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._pipe.close()
            os.close(self._wake)
            os.close(self._woken)
            code = life()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._nodes or self._averages or self._network is not None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self._nodes:
                self._say(control.NodeExited(self._nodes.pop(pid), code))
            elif pid == self._network:
                self._network = None
                self._say(control.NetworkExited(code))
            elif pid in self._averages:
                self._say(control.AverageEvaluated(self._averages.pop(pid), code))

    @staticmethod
    def _kill(pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # ours until reaped, so the number cannot be another's

    def _say(self, said: control.FromZygote) -> None:
        self._pipe.send_bytes(control.encode(said))


def _evaluate(setup: Setup, said: control.EvaluateAverage) -> int:
    scores = setup.evaluate(np.frombuffer(said.params, np.float32))
    record = Average(said.round, said.time, said.nodes, said.consensus_distance, scores, said.tick)
    RecordFile(RunFolder(Path(said.folder)).averages).write(record)
    return 0


def main() -> None:
    exit_with_parent(int(sys.argv[2]))
    raise_file_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what a Ctrl-C means
    Zygote(Connection(int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
