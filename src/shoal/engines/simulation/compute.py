"""Computing the work of many simulated nodes.

Work that has begun when the first result is needed overlaps in virtual time, and is computed together: by stacking the
nodes' parameters, by a pool of worker processes, or one after another. A pool gives the same bits as sequential
computation. Stacking gives the same results within float tolerance.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
import traceback
from collections.abc import Hashable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

import msgspec
import numpy as np

from shoal.engines.operating_system import exit_with_parent
from shoal.errors import NodeError, RunError
from shoal.runtime import Work
from shoal.training.trainer import Evaluate, Train, Trained, Trainer
from shoal.types import Params

STACK_SIZE = 256
"""How many nodes are stacked at once: enough to hide the overhead, few enough for the caches."""


class Executor(Protocol):
    """A way to compute units of work that are ready at the same time."""

    max_batch: int
    """The most units of work for one call of `run`."""

    def run(self, works: Sequence[Work[Any]]) -> list[Any]: ...

    def close(self) -> None: ...


class SequentialExecutor:
    """Computes one unit of work after another."""

    max_batch = 1

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        return [work.run() for work in works]

    def close(self) -> None:
        """Nothing to release."""


class StackedExecutor:
    """Computes work with equal batch keys in one call of `run_batch`, and the rest one after another."""

    max_batch = STACK_SIZE

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        groups: dict[Hashable, list[int]] = {}
        for i, work in enumerate(works):
            groups.setdefault(work.batch_key, []).append(i)
        results: list[Any] = [None] * len(works)
        for members in groups.values():
            group = [works[i] for i in members]
            done = group[0].run_batch(group) if len(group) > 1 else [group[0].run()]
            for i, result in zip(members, done, strict=True):
                results[i] = result
        return results

    def close(self) -> None:
        """Nothing to release."""


class WorkerPool:
    """Worker processes, each with a part of the trainers: a trainer's batches and optimizer state stay in one process.

    Parameters travel through shared memory, commands and losses through pipes.
    """

    SLOTS = 32
    """Parameter vectors that a worker holds at a time."""

    def __init__(self, trainers: Sequence[Trainer], workers: int, size: int) -> None:
        self.max_batch = 4 * workers * self.SLOTS
        self._index = {id(trainer): i for i, trainer in enumerate(trainers)}
        self._trainers = list(trainers)
        self._size = size
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(_Worker(self._trainers, size, self._workers))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise RunError(f"cannot start {workers} worker processes: {error}; set simulation.workers") from error
            raise

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        results: list[Any] = [None] * len(works)
        queues: list[list[int]] = [[] for _ in self._workers]
        for i, work in enumerate(works):
            if isinstance(work, Train | Evaluate) and id(work.trainer) in self._index:
                queues[self._index[id(work.trainer)] % len(queues)].append(i)
            else:
                results[i] = work.run()
        rest = [list(reversed(queue)) for queue in queues]
        while any(rest):
            sent = []
            for worker, queue in zip(self._workers, rest, strict=True):
                some = [queue.pop() for _ in range(min(self.SLOTS, len(queue)))]
                if some:
                    worker.send([self._command(works[i]) for i in some], [_params(works[i]) for i in some])
                    sent.append((worker, some))
            for worker, some in sent:
                for slot, (i, reply) in enumerate(zip(some, worker.replies(), strict=True)):
                    results[i] = self._result(works[i], reply, worker, slot)
        return results

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _command(self, work: Any) -> tuple[str, int, int]:
        index = self._index[id(work.trainer)]
        if isinstance(work, Train):
            return ("train", index, work.trainer.steps(work.steps))
        return ("evaluate", index, 0)

    def _result(self, work: Any, reply: Any, worker: _Worker, slot: int) -> Any:
        if isinstance(work, Evaluate):
            return reply
        loss, seconds = reply
        work.trainer.cpu_seconds += seconds
        params = worker.slots[slot].copy()
        params.flags.writeable = False
        return Trained(params, loss)


class _Worker:
    """One forked process of the pool, seen from the parent."""

    def __init__(self, trainers: list[Trainer], size: int, earlier: Sequence[_Worker]) -> None:
        memory = mmap.mmap(-1, max(1, WorkerPool.SLOTS * size * 4))
        self.slots = np.frombuffer(memory, np.float32)[: WorkerPool.SLOTS * size].reshape(WorkerPool.SLOTS, size)
        self._pipe, theirs = Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            exit_with_parent(parent)
            self._pipe.close()
            for worker in earlier:
                worker._pipe.close()
            _serve(theirs, self.slots, trainers)
        theirs.close()

    def send(self, commands: list[tuple[str, int, int]], params: list[Params]) -> None:
        for slot, vector in enumerate(params):
            self.slots[slot] = vector
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(commands))
        except OSError as error:
            raise RunError(f"a worker process of the simulation has ended: {error}") from error

    def replies(self) -> list[Any]:
        try:
            replies = msgspec.msgpack.decode(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise RunError("a worker process of the simulation has ended") from error
        if isinstance(replies, str):
            raise NodeError(f"training failed in a worker process:\n{replies}")
        return list(replies)

    def close(self) -> None:
        self._pipe.close()
        os.kill(self._pid, signal.SIGKILL)  # it has nothing to save
        os.waitpid(self._pid, 0)


def _serve(pipe: Connection, slots: np.ndarray[Any, np.dtype[np.float32]], trainers: list[Trainer]) -> None:
    """Run as a worker: read commands and send results until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status = 0
    try:
        while True:
            replies: Any = []
            try:
                for slot, (kind, index, steps) in enumerate(msgspec.msgpack.decode(pipe.recv_bytes())):
                    trainer = trainers[index]
                    params = slots[slot]
                    if kind == "train":
                        started = time.thread_time()
                        trained = trainer.train(params, steps)
                        params[:] = trained.params
                        replies.append((trained.loss, time.thread_time() - started))
                    else:
                        replies.append(trainer.evaluate(params))
            except (EOFError, OSError):
                break
            except Exception:
                replies = traceback.format_exc()
            pipe.send_bytes(msgspec.msgpack.encode(replies))
    except BrokenPipeError:
        status = 1
    finally:
        os._exit(status)


def _params(work: Any) -> Params:
    params: Params = work.params
    return params
