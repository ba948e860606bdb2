"""The workers of an asynchronous parameter server: their iterations, timeouts and staleness."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.algorithms.support.server import RoundServer, running_clients
from shoal.message import Message
from shoal.node import Node
from shoal.types import NodeId

MAX_TIMEOUTS = 10
"""The number of timeouts in a row, without a push from any worker, after which training workers are abandoned."""


class AsyncWorkers:
    """Starts iterations, receives pushes, and keeps track of the progress of each worker.

    `max_lead` is how many iterations the fastest worker may be ahead of the slowest; None is no limit. If no push
    arrives within the timeout, the server goes on waiting, but the workers that timed out no longer hold back the
    fastest: a late push counts as any other. Checkpoints hold the progress of each worker, but no messages in transit:
    a restored server starts all workers again.
    """

    def __init__(self, node: Node, server: RoundServer, *, rounds: int, max_lead: int | None) -> None:
        self._node = node
        self._server = server
        self._rounds = rounds
        self._max_lead = max_lead
        self._pushes: dict[NodeId, int] = dict(enumerate(node.algorithm_state.get("clocks", [0] * node.nodes)))
        """The number of steps that each worker has pushed."""
        self._pulled: dict[NodeId, int] = {}
        """The workers that train, with the number of steps in the model that each started from."""
        self._timed_out: set[NodeId] = set()
        """The training workers whose push did not arrive within the timeout."""
        self._abandoned: set[NodeId] = set()
        self._rejoin_counts = dict(node.rejoin_counts)
        self._steps, self._staleness_sum, self._staleness_max = node.algorithm_state.get("staleness", [0, 0, 0])

    def remaining(self) -> list[NodeId]:
        """The workers that may still push: neither failed nor abandoned."""
        return [worker for worker in running_clients(self._node) if worker not in self._abandoned]

    async def next_push(self) -> Message | None:
        """Start the workers that may begin an iteration, and wait for any push. Returns None if no worker trains.

        The push may hold values that are not finite: its worker has ended its iteration, and waits for the next model.
        """
        timeouts = 0
        while timeouts < MAX_TIMEOUTS:
            self._reset_rejoined()
            for worker in self._ready():
                self._pulled[worker] = self._steps
                await self._server.start_round([worker], self._pushes[worker])
            training = [worker for worker in self.remaining() if worker in self._pulled]
            if not training:
                return None
            push = await self._node.receive_first(training, finite=False)
            if push is None:
                timeouts += 1
                self._record_timeout(training)
            elif push.round == self._pushes[push.sender]:  # else a duplicate: its sender failed and was started again
                return push
        self._abandon_training()
        return None

    def record_push(self, worker: NodeId) -> None:
        """Count a push that has been applied, or rejected."""
        stale = self._steps - self._pulled.pop(worker)
        self._timed_out.discard(worker)
        self._pushes[worker] += 1
        self._steps += 1
        self._staleness_sum += stale
        self._staleness_max = max(self._staleness_max, stale)
        self._node.algorithm_state["clocks"] = list(self._pushes.values())
        self._node.algorithm_state["staleness"] = [self._steps, self._staleness_sum, self._staleness_max]

    def report_staleness(self) -> None:
        if self._steps:
            mean = self._staleness_sum / self._steps
            detail = f"steps of other workers between a pull and its push: mean {mean:.3g}, max {self._staleness_max}"
            self._node.record_event("staleness", detail)

    def _ready(self) -> list[NodeId]:
        """The workers that may begin another iteration now."""
        workers = self.remaining()
        slowest = min((self._pushes[worker] for worker in workers if worker not in self._timed_out), default=0)
        limit = self._rounds if self._max_lead is None else min(self._rounds, slowest + self._max_lead + 1)
        return [worker for worker in workers if worker not in self._pulled and self._pushes[worker] < limit]

    def _reset_rejoined(self) -> None:
        """Start workers again that failed and rejoined: they have lost the model they trained."""
        for worker, times in self._node.rejoin_counts.items():
            if times != self._rejoin_counts.get(worker):
                self._rejoin_counts[worker] = times
                self._pulled.pop(worker, None)
                self._timed_out.discard(worker)
                self._abandoned.discard(worker)

    def _record_timeout(self, workers: Iterable[NodeId]) -> None:
        timed_out = set(workers).intersection(running_clients(self._node))
        if new := sorted(timed_out - self._timed_out):
            self._node.record_event("timed out", f"no push from {', '.join(map(str, new))}; the other workers continue")
        self._timed_out |= timed_out

    def _abandon_training(self) -> None:
        """Stop waiting for the workers that train."""
        lost = sorted(worker for worker in self.remaining() if worker in self._pulled)
        self._node.record_event(
            "workers abandoned", f"no push from {', '.join(map(str, lost))} in {MAX_TIMEOUTS} timeouts"
        )
        self._abandoned.update(lost)
