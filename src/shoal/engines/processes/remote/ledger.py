"""What a coordinator knows of an agent's nodes, kept by the agent, so that another coordinator can continue the run."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.engines.processes import control
from shoal.engines.processes.remote import protocol
from shoal.results.checkpoints import SavedNode
from shoal.types import NodeId

KEPT_STATES = 4
"""Saved states of each node that a coordinator may need to complete a checkpoint."""


class Ledger:
    """Collects the reports that the coordinator has acknowledged. Its size does not grow with the rounds."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, protocol.NodeReport] = {}
        self._parameters = 0
        self._network_endpoint: str | None = None
        self._network_key: bytes | None = None
        self._last_average = -1

    def note(self, frames: list[bytes]) -> None:
        """Note a message that the coordinator has acknowledged."""
        report = protocol.decode_from_remote(frames[0])
        if isinstance(report, protocol.FromNode):
            self._note_message(report.message)
        elif isinstance(report, control.Prepared):
            self._parameters = report.parameters
        elif isinstance(report, control.KeyAnnounced):
            if report.node is None:
                self._network_key = report.key
            else:
                self._node(report.node).key = report.key
        elif isinstance(report, control.NodeExited):
            self._node(report.node).exit_code = report.code

    def report(self, run: str, away: float, clock_offset: float) -> protocol.RunReport:
        """The report for a new coordinator."""
        return protocol.RunReport(
            run,
            self._parameters,
            sorted(self._nodes.values(), key=lambda entry: entry.node),
            self._network_endpoint,
            self._network_key,
            self._last_average,
            away,
            clock_offset,
        )

    def _node(self, node: NodeId) -> protocol.NodeReport:
        return self._nodes.setdefault(node, protocol.NodeReport(node))

    def _note_message(self, message: control.FromNode) -> None:
        if isinstance(message, control.NetworkListening):
            self._network_endpoint = message.endpoint
        elif not isinstance(message, control.FromNetwork):
            self._note_node(self._node(message.node), message)

    def _note_node(self, entry: protocol.NodeReport, message: control.NodeListening | control.FromOneNode) -> None:
        if isinstance(message, control.NodeListening):
            self._nodes[entry.node] = protocol.NodeReport(
                entry.node, entry.key, message.endpoint, starts=entry.starts + 1, saved=entry.saved
            )
            return
        entry.runs = True
        if isinstance(message, control.ProgressReport):
            entry.rounds, entry.bytes_sent = message.rounds, message.bytes_sent
        elif isinstance(message, control.ModelSnapshot):
            moment = message.round if message.tick is None else message.tick
            self._last_average = max(self._last_average, moment)
        elif isinstance(message, control.CheckpointSaved):
            entry.has_state = message.saved is not None
            entry.saved = [*entry.saved, *_given(message.saved)][-KEPT_STATES:]
        elif isinstance(message, control.NodeDone):
            entry.done = True
        elif isinstance(message, control.NodeFailed):
            entry.failure = message.text


def _given(saved: SavedNode | None) -> Iterable[SavedNode]:
    return () if saved is None else (saved,)
