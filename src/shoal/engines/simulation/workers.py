"""Computing the work of many simulated nodes in workers, at the same time as this process runs the nodes.

A node always uses the same worker, which has its batches and optimizer state. Work is sent as soon as its worker is
free, before its result is needed: while a worker trains, this process receives and merges the models of other nodes.
A worker that stacks nodes gets full stacks. Which nodes are in a stack depends only on the order of the work, and not
on how fast the workers are, so a run can be repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from shoal.engines.simulation.compute import StackingNotices, WorkItem
from shoal.engines.stacking import STACK_SIZE
from shoal.engines.worker import MAX_COMMANDS, Command, Reply, Rows, Worker, decode_state, encode_state
from shoal.errors import NodeError
from shoal.runtime import Work
from shoal.state import State, Stateful
from shoal.training.trainer import Evaluate, Train, Trained, Trainer
from shoal.types import NodeId

WAIT_SECONDS = 0.005
"""How long to wait for one worker before looking whether others are free."""


class _Queue:
    """The work of one worker, in order."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.open: dict[WorkItem, None] = {}
        """Items for the next batch."""
        self.batches: deque[list[WorkItem]] = deque()
        """Complete batches that were not sent yet."""
        self.sent: list[WorkItem] = []
        """The batch that the worker computes."""

    def complete_batch(self) -> None:
        if self.open:
            self.batches.append(list(self.open))
            self.open.clear()


class WorkerExecutor:
    """Distributes work over workers. With `stacked`, each worker computes nodes together in stacks."""

    def __init__(self, trainers: Sequence[Trainer], workers: Sequence[Worker], stacked: bool = False) -> None:
        """`trainers` are those of all nodes, by node id. Work for other trainers is computed here."""
        self.external_cpu_seconds = 0.0
        self._trainers = list(trainers)  # keeps their ids in use
        self._nodes = {id(trainer): node for node, trainer in enumerate(trainers)}
        self._queues = [_Queue(worker) for worker in workers]
        self._stacked = stacked
        self._batch_size = STACK_SIZE if stacked else MAX_COMMANDS
        self._notices = StackingNotices()

    @property
    def trained_together(self) -> bool:
        return self._notices.trained_together

    def submit(self, item: WorkItem) -> None:
        queue = self._queue(item.work)
        if queue is None:
            return  # `finish` computes it
        queue.open[item] = None
        if len(queue.open) == self._batch_size:
            queue.complete_batch()
        self._advance(queue)

    def discard(self, item: WorkItem) -> None:
        queue = self._queue(item.work)
        if queue is not None:
            queue.open.pop(item, None)

    def finish(self, item: WorkItem) -> None:
        if item.done:
            return
        own = self._queue(item.work)
        if own is None:
            item.result = item.work.run()
            return
        if item in own.open:
            for queue in self._queues:
                queue.complete_batch()
        while not item.done:
            for queue in self._queues:
                self._advance(queue)
            if not item.done and own.worker.has_reply(WAIT_SECONDS):
                self._collect(own)

    def run(self, works: Sequence[Work[Any]]) -> list[Any]:
        items = [WorkItem(work) for work in works]
        for item in items:
            self.submit(item)
        for item in items:
            self.finish(item)
        return [item.result for item in items]

    def trainer_state(self, trainer: Trainer) -> State:
        """Return the state of a trainer, which is up to date only in its worker."""
        return decode_state(self._request(trainer, Command("state", self._nodes[id(trainer)])).state)

    def restore_trainers(self) -> None:
        """Send the state of every trainer to its worker, which has built the trainer itself."""
        for node, trainer in enumerate(self._trainers):
            if isinstance(trainer, Stateful):
                self._request(trainer, Command("restore", node, state=encode_state(trainer.state())))

    def close(self) -> None:
        for queue in self._queues:
            queue.worker.close()
        self._queues = []

    def _queue(self, work: Any) -> _Queue | None:
        """Return the queue of the worker that has the work's trainer; None if no worker has it."""
        if not isinstance(work, Train | Evaluate) or (node := self._nodes.get(id(work.trainer))) is None:
            return None
        return self._queues[node % len(self._queues)]

    def _advance(self, queue: _Queue) -> None:
        """Send the next batch if the worker is free. Never waits."""
        if not queue.batches and (self._stacked or not queue.open):
            return
        if queue.sent and queue.worker.has_reply():
            self._collect(queue)
        if not queue.sent:
            if not queue.batches:
                queue.complete_batch()
            items = queue.batches.popleft()
            queue.worker.send([self._command(item.work) for item in items], [_params(item) for item in items])
            queue.sent = items

    def _collect(self, queue: _Queue) -> None:
        """Receive the results of the batch that was sent. Waits for them."""
        replies, rows = queue.worker.receive()
        items, queue.sent = queue.sent, []
        if isinstance(replies, str):
            raise NodeError(f"training failed in a worker process:\n{replies}")
        if self._stacked:
            rows = rows[: len(items)].copy()
            self._notices.note([item.work for item in items], [reply.stacking for reply in replies])
        for i, (item, reply) in enumerate(zip(items, replies, strict=True)):
            item.result = self._result(item.work, reply, rows, i)
            if queue.worker.external:
                self.external_cpu_seconds += reply.cpu_seconds

    def _result(self, work: Any, reply: Reply, rows: Rows, i: int) -> Any:
        if isinstance(work, Evaluate):
            return reply.scores
        work.trainer.cpu_seconds += reply.cpu_seconds
        params = rows[i] if self._stacked else rows[i].copy()
        params.setflags(write=False)
        return Trained(params, reply.loss, reply.steps_left_out)

    def _request(self, trainer: Trainer, command: Command) -> Reply:
        """Send one command without parameters, when the worker is free, and wait for its reply."""
        queue = self._queues[command.node % len(self._queues)]
        if queue.sent:
            self._collect(queue)
        queue.worker.send([command], [])
        replies, _ = queue.worker.receive()
        if isinstance(replies, str):
            raise NodeError(f"the state of a trainer cannot be read or restored in a worker process:\n{replies}")
        return replies[0]

    def _command(self, work: Any) -> Command:
        node: NodeId = self._nodes[id(work.trainer)]
        if isinstance(work, Train):
            return Command("train", node, work.trainer.steps(work.steps), round=work.round, step=work.step)
        return Command("evaluate", node, round=work.round, step=work.step)


def _params(item: WorkItem) -> Any:
    return item.work.params  # type: ignore[attr-defined]
