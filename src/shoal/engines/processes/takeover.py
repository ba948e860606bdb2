"""A run on agents whose coordinator was killed: what the coordinator leaves, and how another one continues it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.node_registry import NodeEntry, NodeRegistry, NodeState
from shoal.engines.processes.remote.protocol import NodeReport, RunReport
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.run_tracker import RunTracker
from shoal.errors import StorageError
from shoal.experiment.writing import experiment_hash
from shoal.results.coordinator_file import (
    AgentShare,
    CoordinatorFile,
    boot_id,
    remove_coordinator_file,
    write_coordinator_file,
)
from shoal.results.records import NOT_JOINED, RunFolder
from shoal.types import NodeId


class CoordinatorFileWriter:
    """Keeps the coordinator's file of a run up to date. A run that cannot be continued has none."""

    def __init__(self, folder: RunFolder, agents: AgentGroup, tracker: RunTracker, times: RunTimes) -> None:
        self._folder = folder
        self._agents = agents
        self._tracker = tracker
        self._times = times
        self._outdated = False
        """Whether the file could not be written when the state last changed."""

    def write(self) -> None:
        """Write the file now or, if that is impossible, with the next `write_again` that succeeds."""
        shares = self._agents.shares()
        if shares is None:
            return
        try:
            write_coordinator_file(self._folder, self._content(shares))
        except StorageError as error:
            if not self._outdated:
                self._tracker.listener.notice(f"if this process is killed, another may not continue the run: {error}")
            self._outdated = True
        else:
            self._outdated = False

    def write_again(self) -> None:
        if self._outdated:
            self.write()

    def _content(self, shares: list[AgentShare]) -> CoordinatorFile:
        experiment, times = self._tracker.experiment, self._times
        return CoordinatorFile(
            shares,
            str(experiment.base.resolve()),
            experiment_hash(experiment),
            boot_id(),
            times.epoch,
            time.time() - self._tracker.training_seconds(),
            times.startup,
            times.first_round,
            self._agents.clock_error,
            {str(node): count for node, count in sorted(self._tracker.incarnations.items())},
            {str(node): reason for node, reason in sorted(self._tracker.lost.items())},
        )

    def remove(self) -> None:
        remove_coordinator_file(self._folder)


@dataclass(frozen=True)
class TakenOver:
    """A run that this coordinator continues."""

    left: CoordinatorFile
    reports: Mapping[str, RunReport]
    """What agents have reported, by name. The other agents of the run are lost."""
    clock_offsets: Mapping[str, float]
    """Seconds to add to the clock of each of these agents to get the clock of this coordinator."""

    @property
    def run(self) -> str:
        """The run's secret identifier."""
        return self._first.run

    @property
    def away(self) -> float:
        """Seconds since the last sign of the earlier coordinator."""
        return min(report.away for report in self.reports.values())

    @property
    def last_average(self) -> int:
        return max(report.last_average for report in self.reports.values())

    @property
    def network(self) -> tuple[str | None, bytes | None]:
        """Where the network process listens, and its public key; None where there is none."""
        report = self.reports.get(self.left.agents[0].name)
        return (None, None) if report is None else (report.network_endpoint, report.network_key)

    @property
    def clock_shift(self) -> float:
        """Seconds to add to this machine's monotonic clock to get the clock of the earlier coordinator."""
        if self.left.boot == boot_id():
            return 0.0
        name = min(self.reports)
        return self.reports[name].clock_offset - self.clock_offsets[name]

    @property
    def _first(self) -> RunReport:
        return next(iter(self.reports.values()))

    def nodes(self) -> list[NodeReport]:
        """What is known of each node that the agents have started."""
        return [entry for report in self.reports.values() for entry in report.nodes]

    def restore_times(self, times: RunTimes, tracker: RunTracker) -> None:
        left = self.left
        times.restore(left.epoch, self.clock_shift, left.startup_s, left.first_round_s)
        tracker.start_training_clock(time.time() - left.training_began)

    def restore_nodes(self, registry: NodeRegistry, tracker: RunTracker, now: float) -> list[NodeId]:
        """Bring nodes into their states. `now` is on the coordinator's `WatchClock`.

        Returns the nodes that run although the earlier coordinator had declared them failed: they have to be ended.
        """
        for name, count in self.left.incarnations.items():
            tracker.incarnations[int(name)] = count
        known = {entry.node: entry for entry in self.nodes()}
        lost = {int(name): reason for name, reason in self.left.lost.items()}
        for node in known.keys() & {node for node, reason in lost.items() if reason == NOT_JOINED}:
            del lost[node]  # it has started since the file was written
        for node in tracker.not_joined - lost.keys():
            tracker.node_restarted(node)
        for node, reason in lost.items():
            tracker.node_lost(node, reason)
        agents = {node: share.name for share in self.left.agents for node in share.nodes}
        for entry in registry:
            entry.failure = lost.get(entry.id)
            entry.public_key = KeyPair.fresh().public  # of no process, if the node's own is not known
            report = known.get(entry.id)
            if report is None and entry.id not in lost and agents.get(entry.id) in self.reports:
                report = NodeReport(entry.id)  # the agent sends again that the node listens
            if report is not None:
                _restore(entry, report, tracker, now)
            else:
                entry.state = NodeState.EXITED
                if entry.id not in lost:
                    tracker.node_lost(entry.id, f"its agent {agents.get(entry.id, '?')!r} is lost")
        return [entry.id for entry in registry if entry.present and entry.id in lost]


def _restore(entry: NodeEntry, report: NodeReport, tracker: RunTracker, now: float) -> None:
    entry.public_key = report.key or entry.public_key
    entry.endpoint, entry.rounds, entry.bytes_sent = report.endpoint, report.rounds, report.bytes_sent
    entry.state, entry.last_message, entry.last_busy = _state(report), now, now
    if report.done:
        tracker.expect_no_more_models([entry.id])
    if report.exit_code is not None and (report.exit_code or report.failure is not None or not report.done):
        entry.fail(report.failure or f"exited with code {report.exit_code}")
        tracker.node_lost(entry.id, str(entry.failure).strip().splitlines()[-1])


def _state(report: NodeReport) -> NodeState:
    if report.exit_code is not None:
        return NodeState.EXITED
    if report.done:
        return NodeState.DONE
    if report.runs:
        return NodeState.RUNNING
    return NodeState.LISTENING if report.starts else NodeState.STARTING
