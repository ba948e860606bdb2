"""When a node saves its state: after every few rounds, or before it begins a round that comes after a checkpoint.

A node that iterates over `Node.rounds` saves its state at the end of a round. A node whose rounds are requested by
other nodes (a client of a server, a peer sampler) may take no part in a round, so it cannot save its state then. Its
state after round r is the state that it has when it begins a later round. It saves this state before the later round,
or earlier if the engine asks for it, because the server has finished round r.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.node_context import CheckpointSaver


class NodeCheckpoints:
    """The checkpoints of one node. Without a saver it does nothing."""

    def __init__(self, saver: CheckpointSaver | None) -> None:
        self._saver = saver
        self._in_round = False
        self._requested: int | None = None
        self.saved_round = -1
        """The round of the last checkpoint that has the node's state."""

    def after_round(self, round: int) -> None:
        """Save the state after `round`, if a checkpoint is due."""
        if self._saver is not None and (round + 1) % self._saver.every == 0:
            self._save(round)

    def begin_requested_round(self, round: int) -> None:
        """Save the state after the last due round before `round`, if that has not been done."""
        self._in_round = True
        if self._saver is not None:
            self._save(round - round % self._saver.every - 1)

    def end_requested_round(self) -> None:
        self._in_round = False
        if self._requested is not None:
            self._save(self._requested)
            self._requested = None

    def request(self, round: int) -> None:
        """Save the state after `round`, for which no other node will request anything any more."""
        if self._in_round:
            self._requested = round
        else:
            self._save(round)

    def leave(self) -> None:
        """Take no part in checkpoints: this service node has no state, and begins again when a run is resumed."""
        if self._saver is not None:
            self._saver.leave()

    def _save(self, round: int) -> None:
        if self._saver is not None and round > self.saved_round:
            self.saved_round = round
            self._saver.save(round)
