"""Worker processes on this machine, forked from the simulation."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe

import msgspec
import numpy as np

from shoal.engines.operating_system import exit_with_parent
from shoal.engines.worker import MAX_COMMANDS, Command, Replies, Reply, Rows, compute
from shoal.errors import RunError
from shoal.training.trainer import Trainer
from shoal.types import Params

_commands = msgspec.msgpack.Decoder(list[Command])
_replies = msgspec.msgpack.Decoder(list[Reply] | str)


def fork_workers(trainers: Sequence[Trainer], count: int, size: int) -> list[ForkedWorker]:
    """Start `count` workers with all trainers; `size` is the number of parameters of the model."""
    workers: list[ForkedWorker] = []
    try:
        for _ in range(count):
            workers.append(ForkedWorker(trainers, size, workers))
    except BaseException as error:
        for worker in workers:
            worker.close()
        if isinstance(error, OSError):
            raise RunError(f"cannot start {count} worker processes: {error}; set simulation.workers") from error
        raise
    return workers


class ForkedWorker:
    """A forked process. Parameters travel through shared memory, commands and replies through a pipe."""

    external = False

    def __init__(self, trainers: Sequence[Trainer], size: int, earlier: Sequence[ForkedWorker]) -> None:
        memory = mmap.mmap(-1, max(1, MAX_COMMANDS * size * 4))
        self._rows: Rows = np.frombuffer(memory, np.float32)[: MAX_COMMANDS * size].reshape(MAX_COMMANDS, size)
        self._pipe, theirs = Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            exit_with_parent(parent)
            self._pipe.close()
            for worker in earlier:
                worker._pipe.close()
            _serve(theirs, self._rows, trainers)
        theirs.close()

    def send(self, commands: Sequence[Command], params: Sequence[Params]) -> None:
        for row, vector in zip(self._rows, params, strict=False):
            row[:] = vector
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(commands))
        except OSError as error:
            raise RunError(f"a worker process of the simulation has ended: {error}") from error

    def receive(self) -> tuple[Replies, Rows]:
        try:
            return _replies.decode(self._pipe.recv_bytes()), self._rows
        except (EOFError, OSError) as error:
            raise RunError("a worker process of the simulation has ended") from error

    def close(self) -> None:
        self._pipe.close()
        os.kill(self._pid, signal.SIGKILL)  # it has nothing to save
        os.waitpid(self._pid, 0)


def _serve(pipe: Connection, rows: Rows, trainers: Sequence[Trainer]) -> None:
    """Run as a worker: read commands and send replies until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    by_node = dict(enumerate(trainers))
    try:
        while True:
            commands = _commands.decode(pipe.recv_bytes())
            pipe.send_bytes(msgspec.msgpack.encode(compute(by_node, commands, rows)))
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)
