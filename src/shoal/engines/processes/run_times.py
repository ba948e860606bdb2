"""When a run was requested, when it began, and when its nodes reached their first rounds."""

from __future__ import annotations

import time
from collections.abc import Collection

from shoal.types import NodeId


class RunTimes:
    """The clock of a run: seconds since `Start` was sent to all nodes. Also measures the startup."""

    def __init__(self, command_time: float | None, round_nodes: Collection[NodeId]) -> None:
        """`command_time` is when the user asked for the run, on the clock of `time.time`; by default now."""
        self._command_time = time.time() if command_time is None else command_time
        self.epoch = 0.0
        """When the run began, on the clock of `monotonic`."""
        self._shift = 0.0
        self.startup: float | None = None
        """Seconds from the command until every node of `round_nodes` that is there began its first round."""
        self.first_round: float | None = None
        """Seconds from the command until every node of `round_nodes` that is there ended its first round."""
        self.finished_at: float | None = None
        """When the last node was done, on the machine's monotonic clock."""
        self._to_begin = set(round_nodes)
        self._to_end = set(round_nodes)

    def start(self, at: float = 0.0) -> None:
        """Start the clock; `at` is the time at which a resumed run continues."""
        self.epoch = self.monotonic() - at

    def restore(self, epoch: float, shift: float, startup: float | None, first_round: float | None) -> None:
        """Continue the clock of an earlier coordinator. `shift` is how far its clock is ahead of this machine's."""
        self.epoch, self._shift = epoch, shift
        self.startup, self.first_round = startup, first_round

    def monotonic(self) -> float:
        """The monotonic clock that all machines of the run refer to: that of the machine of its first coordinator."""
        return time.monotonic() + self._shift

    def now(self) -> float:
        return self.monotonic() - self.epoch

    def since_command(self) -> float:
        return time.time() - self._command_time

    def do_not_await(self, nodes: Collection[NodeId]) -> None:
        """The first rounds of these nodes are not part of the startup: they are not there when the run begins."""
        self._to_begin.difference_update(nodes)
        self._to_end.difference_update(nodes)

    def first_round_began(self, node: NodeId) -> bool:
        """Note that a node began its first round. True if it was the last node to do so."""
        self._to_begin.discard(node)
        if self._to_begin or self.startup is not None:
            return False
        self.startup = self.since_command()
        return True

    def first_round_ended(self, node: NodeId) -> bool:
        """Note that a node ended its first round. True if it was the last node to do so."""
        self._to_end.discard(node)
        if self._to_end or self.first_round is not None:
            return False
        self.first_round = self.since_command()
        return True
