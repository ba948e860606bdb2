"""Computing the work of many simulated nodes.

Work that has begun when the first result is needed overlaps in virtual time, and is computed together: by stacking the
nodes' parameters, by workers, or one after another. Workers give the same bits as sequential computation. Stacking
gives the same results within float tolerance.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from shoal.engines.worker import MAX_COMMANDS, Command, Reply, Worker, decode_state, encode_state
from shoal.errors import NodeError
from shoal.runtime import Work
from shoal.state import State, Stateful
from shoal.training.module_draws import NotStackableError
from shoal.training.trainer import Evaluate, Train, Trained, Trainer
from shoal.types import Params

STACK_SIZE = 256
"""How many nodes are stacked at once: enough to hide the overhead, few enough for the caches."""


class Executor(Protocol):
    """A way to compute units of work that are ready at the same time."""

    max_batch: int
    """The most units of work for one call of `run`."""
    external_cpu_seconds: float
    """Processor time of workers that are not children of this process."""

    def run(self, works: Sequence[Work[Any]]) -> list[Any]: ...

    def close(self) -> None: ...


class SequentialExecutor:
    """Computes one unit of work after another."""

    max_batch = 1
    external_cpu_seconds = 0.0

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        return [work.run() for work in works]

    def close(self) -> None:
        """Nothing to release."""


class StackedExecutor:
    """Computes work with equal batch keys in one call of `run_batch`, and the rest one after another."""

    max_batch = STACK_SIZE
    external_cpu_seconds = 0.0

    def __init__(self) -> None:
        self.trained_together = False
        """Whether some nodes were trained together."""
        self._warned: set[str] = set()

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        groups: dict[Hashable, list[int]] = {}
        for i, work in enumerate(works):
            groups.setdefault(work.batch_key, []).append(i)
        results: list[Any] = [None] * len(works)
        for members in groups.values():
            group = [works[i] for i in members]
            done = self._run_group(group) if len(group) > 1 else [group[0].run()]
            for i, result in zip(members, done, strict=True):
                results[i] = result
        return results

    def _run_group(self, group: Sequence[Work[Any]]) -> list[Any]:
        """Compute work with one batch key together or, if that turns out to be impossible, one after another."""
        try:
            done = group[0].run_batch(group)
        except NotStackableError as error:
            self._warn("evaluated", len(group), str(error))
            return [work.run() for work in group]
        if isinstance(group[0], Train):
            self._note_training(done)
        return done

    def _note_training(self, done: Sequence[Trained]) -> None:
        """Note whether these nodes were trained together. Warn of the first ones that were not."""
        reasons = [trained.not_batched for trained in done if trained.not_batched]
        self.trained_together |= len(reasons) < len(done)
        if reasons:
            self._warn("trained", len(reasons), reasons[0])

    def _warn(self, what: str, nodes: int, reason: str) -> None:
        """Warn of the first nodes that are trained, or evaluated, one by one."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"simulation.batching = 'vmap': {nodes} nodes are {what} one by one from now on: {reason}",
                stacklevel=2,
            )

    def close(self) -> None:
        """Nothing to release."""


class WorkerExecutor:
    """Distributes work over workers. A node always uses the same worker, which has its batches and optimizer state."""

    def __init__(self, trainers: Sequence[Trainer], workers: Sequence[Worker]) -> None:
        """`trainers` are those of all nodes, by node id. Work for other trainers is computed here."""
        self.max_batch = 4 * len(workers) * MAX_COMMANDS
        self.external_cpu_seconds = 0.0
        self._trainers = list(trainers)  # keeps their ids in use
        self._nodes = {id(trainer): node for node, trainer in enumerate(trainers)}
        self._workers = list(workers)

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        results: list[Any] = [None] * len(works)
        queues: list[list[int]] = [[] for _ in self._workers]
        for i, work in enumerate(works):
            if isinstance(work, Train | Evaluate) and id(work.trainer) in self._nodes:
                queues[self._nodes[id(work.trainer)] % len(queues)].append(i)
            else:
                results[i] = work.run()
        for start in range(0, max(map(len, queues)), MAX_COMMANDS):
            sent = [
                (worker, some)
                for worker, queue in zip(self._workers, queues, strict=True)
                if (some := queue[start : start + MAX_COMMANDS])
            ]
            for worker, some in sent:
                worker.send([self._command(works[i]) for i in some], [_params(works[i]) for i in some])
            for worker, some in sent:
                self._collect(worker, some, works, results)
        return results

    def trainer_state(self, trainer: Trainer) -> State:
        """Return the state of a trainer, which is up to date only in its worker."""
        node = self._nodes[id(trainer)]
        worker = self._workers[node % len(self._workers)]
        worker.send([Command("state", node)], [])
        replies, _ = worker.receive()
        if isinstance(replies, str):
            raise NodeError(f"reading the state of a trainer failed in a worker process:\n{replies}")
        return decode_state(replies[0].state)

    def restore_trainers(self) -> None:
        """Send the state of every trainer to its worker, which has built the trainer itself."""
        for node, trainer in enumerate(self._trainers):
            if isinstance(trainer, Stateful):
                worker = self._workers[node % len(self._workers)]
                worker.send([Command("restore", node, state=encode_state(trainer.state()))], [])
                replies, _ = worker.receive()
                if isinstance(replies, str):
                    raise NodeError(f"restoring a trainer failed in a worker process:\n{replies}")

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _command(self, work: Any) -> Command:
        node = self._nodes[id(work.trainer)]
        if isinstance(work, Train):
            return Command("train", node, work.trainer.steps(work.steps), round=work.round, step=work.step)
        return Command("evaluate", node, round=work.round, step=work.step)

    def _collect(self, worker: Worker, members: list[int], works: Sequence[Any], results: list[Any]) -> None:
        """Put the results of a worker into the places `members` of `results`."""
        replies, rows = worker.receive()
        if isinstance(replies, str):
            raise NodeError(f"training failed in a worker process:\n{replies}")
        for i, reply, row in zip(members, replies, rows, strict=False):
            results[i] = _result(works[i], reply, row)
            if worker.external:
                self.external_cpu_seconds += reply.cpu_seconds


def _result(work: Any, reply: Reply, row: Params) -> Any:
    if isinstance(work, Evaluate):
        return reply.scores
    work.trainer.cpu_seconds += reply.cpu_seconds
    params = row.copy()
    params.setflags(write=False)
    return Trained(params, reply.loss, reply.steps_left_out)


def _params(work: Any) -> Params:
    params: Params = work.params
    return params
