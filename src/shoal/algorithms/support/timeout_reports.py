"""Reports of timeouts, for directed graphs: a node may send to a peer that it never receives from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.algorithms.support.peer_monitor import PeerMonitor
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Check, Node
from shoal.topologies.graph import Peers
from shoal.types import NodeId

REPORTS = "silence"
"""The array of a payload that holds the reports: rows of a node, a round, and 1 for timed out or 0 for received."""


class TimeoutReports:
    """The nodes that timed out, from this node's own receives and its peers' reports. The latest round counts."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._monitor = PeerMonitor(node)
        self._reports: dict[NodeId, tuple[int, int]] = {
            n: (r, flag) for n, r, flag in node.algorithm_state.get(REPORTS, [])
        }
        """Of each node that ever timed out: the round of the latest report, and 1 for timed out or 0 for received."""

    def split(self, peers: Peers) -> tuple[list[NodeId], list[NodeId]]:
        """Split the receivers that have not failed into peers in time and peers that timed out.

        If this node itself is reported to have timed out, all count as timed out: its messages would be too late.
        """
        failed = self._node.failed_peers
        running = [peer for peer in peers.receivers if peer not in failed]
        if self._timed_out(self._node.id):
            return [], running
        return [p for p in running if not self._timed_out(p)], [p for p in running if self._timed_out(p)]

    def arrays(self) -> dict[str, NDArray[np.int32]]:
        """The reports to send: none if no node ever timed out."""
        rows = [(node, *report) for node, report in sorted(self._reports.items())]
        return {REPORTS: np.array(rows, np.int32)} if rows else {}

    async def receive(self, peers: Peers, *, round: int, kind: str, check: Check) -> dict[NodeId, Payload]:
        """Receive from peers, in ascending order of sender, and update the reports."""
        received = await self._monitor.receive(peers, round=round, kind=kind, check=check)
        for peer in self._monitor.timed_out.intersection(peers.weights):
            self._reports[peer] = (round, 1)
        for payload in received.values():
            for node, *report in payload.arrays.get(REPORTS, np.empty((0, 3), np.int32)).tolist():
                self._reports[node] = max(self._reports.get(node, (-1, 0)), (report[0], report[1]))
        for peer in received:
            if peer in self._reports:
                self._reports[peer] = max(self._reports[peer], (round, 0))
        self._node.algorithm_state[REPORTS] = [[node, *report] for node, report in sorted(self._reports.items())]
        return received

    def _timed_out(self, node: NodeId) -> bool:
        return self._reports.get(node, (0, 0))[1] == 1


def check_reports(payload: Payload, nodes: int, rounds: int) -> None:
    """Raise `MessageError` for reports that are invalid for this number of nodes and rounds."""
    reports = payload.arrays.get(REPORTS)
    if reports is None:
        return
    if reports.dtype != np.int32 or reports.ndim != 2 or reports.shape[1] != 3 or len(reports) > nodes:
        raise MessageError(f"{REPORTS!r}: expected at most {nodes} rows of three int32")
    if (reports < 0).any() or (reports >= (nodes, rounds, 2)).any():
        raise MessageError(f"{REPORTS!r}: expected rows of a node, a round, and 0 or 1")
