"""Models that a node keeps during a run and evaluates after it, so that evaluation delays no training."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from shoal.engines.processes import control
from shoal.engines.processes.coordinator_link import CoordinatorLink
from shoal.engines.processes.runtime import TrainingThread
from shoal.engines.processes.slots import Slots
from shoal.errors import CheckpointError, DiskFullError
from shoal.node import Node
from shoal.results.records import Evaluation, RunFolder, writing_to
from shoal.types import Params

NOT_EVALUATED = "not evaluated"
"""The event of a model that could not be kept for its evaluation."""


class DeferredEvaluations:
    """Models that wait for their evaluation. By default in a file without a name, which ends with the process."""

    def __init__(self, folder: RunFolder, path: Path | None = None) -> None:
        """`path` is a file that outlives the process, so that a resumed run can evaluate the models."""
        self._folder = folder
        self._path = path
        self._file: IO[bytes]
        with writing_to(folder.path):
            if path is None:
                # Open as long as the process runs.
                self._file = tempfile.TemporaryFile(dir=folder.path, buffering=0)  # noqa: SIM115
            else:
                path.parent.mkdir(exist_ok=True)
                path.touch()
                self._file = path.open("r+b", buffering=0)
        self._kept: list[tuple[int, float, int | None, tuple[int, int]]] = []
        """Round, time, tick and progress of each model in the file."""
        self.latest_first = False
        """Whether the latest of the remaining models is evaluated next. It may change between two evaluations."""
        self.latest_evaluated = False
        """Whether the latest of all models has been evaluated."""

    def keep(
        self, round: int, time: float, params: Params, tick: int | None = None, progress: tuple[int, int] = (0, 0)
    ) -> bool:
        """Keep a model. Returns False if the disk is full: the model is not evaluated.

        `progress` is the node's round and the number of its local steps, for fine-tuning before the evaluation.
        """
        left = params.data.cast("B")
        try:
            with writing_to(self._folder.path):
                self._file.seek(len(self._kept) * params.nbytes)
                while left:
                    left = left[self._file.write(left) :]
        except DiskFullError:
            return False
        self._kept.append((round, time, tick, progress))
        return True

    def state(self) -> list[list[Any]]:
        """The round, time, tick and progress of each model in the file."""
        return [list(kept) for kept in self._kept]

    def restore(self, state: list[list[Any]], model_bytes: int) -> None:
        """Continue with the models that the file had when `state` was saved."""
        self._kept = []
        for round, time, tick, *rest in state:
            training_round, step = rest[0] if rest else (round, 0)  # states of earlier versions have no progress
            self._kept.append((round, time, tick, (training_round, step)))
        size = len(self._kept) * model_bytes
        if os.fstat(self._file.fileno()).st_size < size:
            raise CheckpointError(
                f"{self._path} does not have the models that were to be evaluated after the run: it was changed or "
                "removed, so the run cannot be resumed; start it again"
            )
        self._file.truncate(size)

    def remove_file(self) -> None:
        """Delete the file: all its models are evaluated."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def discard_after(self, tick: int) -> None:
        """Discard the models of later ticks than this one."""
        while self._kept and (self._kept[-1][2] or 0) > tick:
            self._kept.pop()

    def evaluate(self, node: Node) -> Iterator[Evaluation]:
        """Evaluate all models, each of them once: the earliest first, or the latest first while `latest_first`."""
        size, remaining = node.params.nbytes, deque(enumerate(self._kept))
        while remaining:
            place, (round, time, tick, progress) = remaining.pop() if self.latest_first else remaining.popleft()
            self._file.seek(place * size)
            params = np.frombuffer(self._file.read(size), np.float32)
            scores = node.training.evaluation(params, progress).run()
            self.latest_evaluated |= place == len(self._kept) - 1
            yield Evaluation(round, time, scores, tick)


async def in_training_slot(
    evaluations: Iterator[Evaluation], node: Node, slots: Slots, link: CoordinatorLink
) -> AsyncIterator[Evaluation]:
    """Compute evaluations in a thread that holds a training slot, and send a heartbeat after each of them."""
    thread = TrainingThread()

    def evaluate_next() -> Evaluation | None:
        with slots.taken():
            return next(evaluations, None)

    while (evaluation := await thread.call(evaluate_next)) is not None:
        link.send(control.Heartbeat(node.id, busy=True))
        yield evaluation
    thread.end()


class SnapshotReceiver(Protocol):
    """Takes a node's model to average it with the other nodes' models."""

    def submit_for_average(self, round: int, params: Params, tick: int | None = None) -> None: ...


class SnapshotTimer:
    """Takes a snapshot of a node's model every `seconds` of the run: tick k is at k × `seconds`.

    A snapshot is kept for its evaluation, or sent to be averaged, or both.
    """

    def __init__(
        self,
        node: Node,
        receiver: SnapshotReceiver,
        deferred: DeferredEvaluations | None,
        now: Callable[[], float],
        seconds: float,
        last_tick: int = 0,
    ) -> None:
        """Begin after `last_tick`: a node that restarts takes no snapshots of ticks before its restart."""
        self._node = node
        self._receiver = receiver
        self._deferred = deferred
        self._now = now
        self._seconds = seconds
        self._last_tick = last_tick

    @property
    def last_tick(self) -> int:
        """The tick of the last snapshot."""
        return self._last_tick

    async def run(self) -> None:
        """Take snapshots until cancelled. A node that is late takes those it missed at once."""
        while True:
            tick = self._last_tick + 1
            await asyncio.sleep(max(0.0, tick * self._seconds - self._now()))
            self._take(tick, tick * self._seconds)

    def take_last(self, finish: control.Finish) -> None:
        """Take the snapshots up to the last tick of the run, which is at the run's end.

        The other nodes may have taken snapshots that this node is late for. Snapshots after the last tick, of a node
        that is informed late of the run's end, are discarded.
        """
        if finish.tick is None:
            return
        if self._deferred is not None:
            self._deferred.discard_after(finish.tick)
        for tick in range(self._last_tick + 1, finish.tick):
            self._take(tick, tick * self._seconds)
        if self._last_tick < finish.tick:
            self._take(finish.tick, finish.time)

    def _take(self, tick: int, time: float) -> None:
        self._last_tick = tick
        node = self._node
        round = max(0, node.next_round - 1)
        deferred = self._deferred if node.context.schedule.evaluated else None
        if deferred is not None and not deferred.keep(round, time, node.params, tick, node.training.progress):
            node.record_event(NOT_EVALUATED, f"tick {tick}: the disk is full")
        if node.context.schedule.averaged:
            self._receiver.submit_for_average(round, node.params, tick)
