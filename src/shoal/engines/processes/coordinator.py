"""The coordinator: follows a run from the start of its nodes to the exit of the last one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal import errors
from shoal.engines.operating_system import MIB
from shoal.engines.processes import control
from shoal.engines.processes.agent import Agent, Report
from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.average_evaluations import AverageEvaluations
from shoal.engines.processes.checkpoints import CheckpointCollector
from shoal.engines.processes.control_server import ControlMessage
from shoal.engines.processes.disk_reports import DiskReports
from shoal.engines.processes.interrupts import Interrupts
from shoal.engines.processes.liveness import STOP_SECONDS, LivenessMonitor, Timeouts
from shoal.engines.processes.node_commands import NodeCommands
from shoal.engines.processes.node_registry import NodeRegistry, NodeState
from shoal.engines.processes.node_starter import NodeStarter
from shoal.engines.processes.progress_reporter import ProgressReporter
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.processes.scheduled_events import ProcessEvents
from shoal.engines.processes.takeover import CoordinatorFileWriter, TakenOver
from shoal.engines.processes.transport import NO_FREE_PORT
from shoal.engines.processes.watch_clock import WatchClock
from shoal.engines.run_tracker import RunTracker
from shoal.environment.environment import Environment
from shoal.errors import ExperimentError, LaunchError, RunError
from shoal.experiment import Experiment
from shoal.experiment.mapping import LOCALHOST
from shoal.message import MAX_HEADER_BYTES
from shoal.results.checkpoints import Manifest
from shoal.results.progress import PROGRESS_INTERVAL, Outcome, Status
from shoal.results.record_reader import RecordReader
from shoal.results.record_writer import END_SECONDS
from shoal.results.records import RunFolder
from shoal.types import NodeId

COLLECT_SECONDS = 30.0
"""How long to wait for further files of nodes on other machines."""


@dataclass(frozen=True)
class RunContext:
    """The run that a coordinator follows."""

    experiment: Experiment
    environment: Environment
    folder: RunFolder
    id: str
    """A random secret of this run's processes. It must not be printed, recorded or passed on a command line."""
    resumed: Manifest | None = None
    """The checkpoint that the run continues from."""


class Coordinator:
    """Follows one run: dispatches messages and reports to the parts that handle them, and decides when it ends."""

    def __init__(
        self,
        run: RunContext,
        registry: NodeRegistry,
        agents: AgentGroup,
        tracker: RunTracker,
        times: RunTimes,
        interrupts: Interrupts,
    ) -> None:
        experiment, environment = run.experiment, run.environment
        self._run = run
        self._registry = registry
        self._agents = agents
        self._tracker = tracker
        self._times = times
        self._interrupts = interrupts
        self._checkpoints = CheckpointCollector(experiment, run.folder, tracker, agents, registry, times, run.resumed)
        self._averages = AverageEvaluations(tracker, agents, run.folder, after_run=environment.timing_matters)
        self._averages.restore(run.resumed)
        self._progress = ProgressReporter(tracker, registry, self._averages, environment.timing_matters)
        self._commands = NodeCommands(registry, agents, times, experiment.evaluation.seconds)
        self._clock = WatchClock()
        self._starter = NodeStarter(registry, agents, tracker, times, self._clock)
        self._events = ProcessEvents(environment, registry, self._commands, self._starter, tracker, times)
        timeouts = Timeouts.from_hang_timeout(experiment.processes.hang_timeout)
        self._liveness = LivenessMonitor(
            registry,
            tracker.training_nodes,
            self._starter.monitor,
            self._commands,
            timeouts,
            self._clock,
            str(run.folder.log),
        )
        self._disks = DiskReports(tracker.listener.notice)
        self._records = RecordReader(run.folder) if tracker.listener.wants_records else None
        tracker.listener.evaluates_after_end |= environment.timing_matters
        self._network_reported = self._network_exited = False
        self._file = CoordinatorFileWriter(run.folder, agents, tracker, times)
        self._prepared: dict[str, control.Prepared] = {}
        """The reports of agents that have built what their nodes share, by the name of the agent."""

    def run(self, taken_over: TakenOver | None = None) -> Outcome:
        """Follow the run until its nodes have ended, or the user ends it.

        `taken_over` is a run whose nodes an earlier coordinator has started.
        """
        self._tracker.phase = "loading"
        try:
            if taken_over is not None:
                self._continue(taken_over)
            status = self._follow()
        except RunError:
            if self._interrupts.signal is None:
                raise
            status = "interrupted"  # the second signal killed the processes
        finally:
            complete = self._collect()
            self._agents.count_remaining()
            self._file.remove()
        self._report_records()
        if status == "completed" and not complete:
            status = "incomplete"
        return Outcome(
            status,
            wall_s=self._tracker.training_seconds(self._times.finished_at),
            startup_s=self._times.startup or self._times.since_command(),
            lost=dict(sorted(self._tracker.lost.items())),
            facts={"first_round_s": self._times.first_round, "signal": self._interrupts.signal},
            unauthenticated_connections=self._agents.unauthenticated_connections,
        )

    def _follow(self) -> Status:
        while True:
            self._poll()
            if self._interrupts.signal is not None:
                self._stop()
                return "interrupted"
            self._events.apply_due()
            self._liveness.check_agents(self._agents.agents)
            self._liveness.note_full_disk(self._agents.waiting_for_space(), self._agents.agents[0].waits_for_space)
            self._liveness.end_nodes_that_do_not_start()
            self._liveness.end_unresponsive_nodes()
            if self._tracker.phase == "running":
                self._liveness.check_network()
                self._liveness.end_hung_nodes(self._events.offline_forever)
                if self._all_done():
                    self._finish()
            if self._times.finished_at is not None:
                self._liveness.end_nodes_that_do_not_finish()
                if not self._registry.present and self._all_evaluated():
                    break
        self._finish_network()
        return self._tracker.final_status

    def _all_done(self) -> bool:
        return not self._registry.working & self._tracker.training_nodes and not self._averages.pending

    def _finish(self) -> None:
        """All training nodes have ended: ask all nodes to write their remaining records and exit."""
        self._times.finished_at = time.monotonic()
        self._liveness.finishing_since = self._clock.seconds
        self._tracker.phase = "finishing"
        self._averages.last_tick = self._commands.finish_all().tick
        self._averages.evaluate_complete()

    def _all_evaluated(self) -> bool:
        """Whether all averages are evaluated, of the models of nodes that have all exited."""
        if self._run.experiment.evaluation.seconds is not None:
            self._tracker.expect_no_more_models()
            self._averages.evaluate_complete()
        return not self._averages.pending

    def _poll(self) -> None:
        """Handle what has arrived, or wait briefly for something to arrive."""
        self._agents.wait(min(PROGRESS_INTERVAL, self._events.seconds_to_next()))
        self._clock.tick(time.monotonic())
        for agent, report in self._agents.reports():
            self._handle_report(agent, report)
        if self._tracker.progress_due():
            self._run.folder.check()
            self._report_records()
            self._file.write_again()
            self._progress.report()

    def _report_records(self) -> None:
        """Report the new records of nodes to the callbacks of the user."""
        if self._records is not None:
            self._tracker.listener.add_records(self._records.new_records())

    # Reports of agents

    def _handle_report(self, agent: Agent, report: Report) -> None:
        if isinstance(report, ControlMessage):
            self._handle_message(report)
        elif isinstance(report, control.Prepared):
            self._handle_prepared(agent, report)
        elif isinstance(report, control.StartFailed):
            _raise_start_failure(report, self._run.experiment.name, agent.name)
        elif isinstance(report, control.KeyAnnounced):
            self._starter.set_key(report.node, report.key)
        elif isinstance(report, control.NodeExited):
            self._handle_exit(report.node, report.code)
        elif isinstance(report, control.NetworkExited):
            self._handle_network_exit(report.code)
        elif isinstance(report, control.Notice):
            self._tracker.listener.notice(report.text)
        elif isinstance(report, control.AgentDiskReport):
            self._disks.handle(agent.name, report)
        else:
            self._averages.evaluated(report)

    def _handle_prepared(self, agent: Agent, report: control.Prepared) -> None:
        """Start the nodes once all agents have prepared the same data and model."""
        for warning in report.warnings:
            self._tracker.listener.notice(warning)
        self._prepared[agent.name] = report
        if len(self._prepared) == len(self._agents):
            _check_equal_machines(self._prepared)
            self._start_nodes(report.parameters)

    def _start_nodes(self, parameters: int) -> None:
        experiment = self._run.experiment
        _check_settings(experiment, parameters)
        self._tracker.phase = "forking"
        self._starter.start_all(self._start_request())

    def _start_request(self) -> control.StartNodes:
        experiment, plan = self._run.experiment, self._run.experiment.processes
        return control.StartNodes(
            sorted(self._registry.present),
            self._run.id,
            training_nodes=experiment.nodes,
            late_nodes=sorted(self._tracker.not_joined),
            with_network=self._run.environment.needs_network_model,
            key_folder=None if plan.keys is None else str(plan.keys),
            public_keys=[] if plan.keys is None else self._registry.public_keys(),
            states=self._checkpoints.states(),
            resumed_tick=0 if self._run.resumed is None else self._run.resumed.ticks,
        )

    def _handle_exit(self, node: NodeId, code: int) -> None:
        entry, phase = self._registry[node], self._tracker.phase
        was_starting = entry.state in (NodeState.STARTING, NodeState.LISTENING)
        entry.state = NodeState.EXITED
        self._starter.monitor.settle(node)
        exited_well = code == 0 and entry.failure is None
        self._disks.exited(self._agents.agent_of(node).name, node, exited_well)
        if phase == "finishing" and (exited_well or self._interrupts.signal is not None):
            return
        reason = (entry.failure or self._explain_exit(code)).strip()
        if phase not in ("running", "finishing"):
            # The reason of an unexplained exit may be in nodes.log, so that the folder of the run must stay.
            self._tracker.listener.started = entry.failure is None and code != control.EXIT_NO_FREE_PORT
            raise LaunchError(f"node {node} could not start: {reason}")
        self._tracker.node_lost(node, reason.splitlines()[-1])
        description = self._run.experiment.describe_failure(node, "was lost")
        self._tracker.listener.notice(f"{description}. {reason}")
        self._commands.announce_failure(node)
        self._file.write()
        self._averages.evaluate_complete()
        self._checkpoints.nodes_changed()
        if not self._events.restart_exited(node) and was_starting:
            self._starter.release_restarted()

    def _explain_exit(self, code: int) -> str:
        """The reason of an exit that the node did not report itself."""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        keys = self._run.experiment.processes.keys
        if code == control.EXIT_UNUSABLE_KEYS and keys is not None:
            return (
                f"its keys in {str(keys)!r} changed since the run began, or cannot be used: do not change keys during "
                f"a run; check them with 'shoal keys check' and start the run again (see also {self._run.folder.log})"
            )
        if code == control.EXIT_NO_FREE_PORT:
            return NO_FREE_PORT
        return f"exited with code {code}; see {self._run.folder.log}"

    def _handle_network_exit(self, code: int) -> None:
        if code == control.EXIT_NO_FREE_PORT:
            raise LaunchError(f"the network process could not start: {NO_FREE_PORT}")
        if self._tracker.phase != "finishing":
            raise RunError(f"the network process exited unexpectedly; see {self._run.folder.log}")
        self._network_exited = True

    # Messages of nodes

    def _handle_message(self, received: ControlMessage) -> None:
        message = received.message
        if isinstance(message, control.NetworkListening):
            self._starter.network_endpoint = message.endpoint
            self._begin_if_ready()
        elif isinstance(message, control.UnauthenticatedConnections):
            self._network_reported = message.final
        elif isinstance(message, control.NetworkHeartbeat):
            self._liveness.network_last_message = self._clock.seconds
        elif isinstance(message, control.NodeListening):
            if message.node in self._tracker.lost:  # an earlier coordinator has restarted it
                self._tracker.node_restarted(message.node)
                self._registry[message.node].failure = None
            self._starter.node_listening(message)
            if self._tracker.phase in ("running", "finishing"):
                self._file.write()  # the node has another incarnation
                self._starter.release_restarted()
            else:
                self._begin_if_ready()
        else:
            self._handle_node_message(message, received)

    def _handle_node_message(self, message: control.FromOneNode, received: ControlMessage) -> None:
        entry = self._registry[message.node]
        entry.note_message(self._clock.seconds, busy=not isinstance(message, control.Heartbeat) or message.busy)
        if isinstance(message, control.ProgressReport):
            entry.rounds, entry.bytes_sent = message.rounds, message.bytes_sent
            if message.node in self._tracker.round_nodes:
                self._events.round_begins(message.rounds)
            if message.evaluated is not None and message.score is not None:
                self._tracker.add_score(message.evaluated, message.score)
            if message.diverged is not None:
                self._tracker.node_diverged(message.node, message.diverged)
            if message.rounds >= 1 and self._times.first_round_ended(message.node):
                self._file.write()
        elif isinstance(message, control.FirstRoundStarted):
            if self._times.first_round_began(message.node):
                self._tracker.start_training_clock(self._checkpoints.wall_s)
                self._file.write()
        elif isinstance(message, control.ModelSnapshot):
            assert received.params is not None
            self._averages.add_model(message, received.params)
        elif isinstance(message, control.CheckpointSaved | control.CheckpointFailed):
            self._checkpoints.handle(message)
        elif isinstance(message, control.DiskReport):
            self._disks.handle(self._agents.agent_of(message.node).name, message)
        elif isinstance(message, control.NodeDone):
            self._handle_done(message.node)
        elif isinstance(message, control.NodeFailed):
            entry.failure = message.text
            self._commands.kill([message.node])  # it sends nothing more

    def _handle_done(self, node: NodeId) -> None:
        if self._registry[node].present:
            self._registry[node].state = NodeState.DONE
        if self._run.experiment.evaluation.seconds is None:
            self._tracker.expect_no_more_models([node])
        self._averages.evaluate_complete()

    def _begin_if_ready(self) -> None:
        """Start the algorithm once every process listens."""
        if not self._starter.all_listening:
            return
        if self._run.environment.needs_network_model and self._starter.network_endpoint is None:
            return
        self._tracker.phase = "running"
        self._tracker.listener.started = True
        self._times.start(self._checkpoints.start_time)
        if self._run.environment.needs_network_model:
            self._liveness.network_last_message = self._clock.seconds
        self._events.begin(self._checkpoints.start_time)
        self._file.write()
        self._starter.send_start()
        self._events.apply_due()

    def _continue(self, run: TakenOver) -> None:
        """Continue a run whose nodes an earlier coordinator has started: they run, are done, or have failed."""
        run.restore_times(self._times, self._tracker)
        to_end = run.restore_nodes(self._registry, self._tracker, self._clock.seconds)
        self._tracker.phase = "running"
        self._tracker.listener.started = True
        self._file.write()
        self._averages.skip(run.last_average)
        self._checkpoints.restore(run.nodes())
        if self._run.environment.needs_network_model:
            self._liveness.network_last_message = self._clock.seconds
        for node in self._tracker.lost:
            self._commands.announce_failure(node)
        if to_end:
            self._commands.kill(to_end)
        self._events.begin(max(0.0, self._times.now() - run.away))
        self._starter.restore(self._start_request(), run.network)
        self._starter.announce_again({entry.node for entry in run.nodes() if entry.starts > 1 and entry.runs})
        self._tracker.listener.notice(
            f"continues at {self._times.now():.0f} s of the run, which had no coordinator for {run.away:.0f} s"
        )
        if run.last_average >= 0:
            self._tracker.listener.notice(
                f"averages of all models up to evaluation {run.last_average} are not evaluated, unless they were before"
            )
        if self._all_done():
            self._finish()  # before the exits of nodes arrive that an earlier coordinator has asked to finish

    # The end

    def _stop(self) -> None:
        """The user ends the run: give nodes a short time to save their models."""
        self._averages.cancel()
        if self._tracker.phase not in ("running", "finishing"):
            return
        extra = " and evaluate their last models; interrupt again to exit at once"
        self._tracker.listener.notice(
            f"stopping: nodes write their records{extra if self._run.environment.timing_matters else ''}"
        )
        self._commands.stop(self._registry.present)
        stopped = self._clock.seconds
        while self._registry.present:
            if self._clock.seconds > STOP_SECONDS + max(stopped, self._liveness.last_sign_of_progress()):
                break
            self._tracker.phase = "finishing"
            self._poll()
        self._finish_network()

    def _collect(self) -> bool:
        """Wait until the files that nodes have written on other machines are in the folder of the run.

        Returns whether all of them are. If the disk is full, wait for space, unless the user has interrupted the run.
        """
        self._agents.collect()
        began, received, was_full = time.monotonic(), self._agents.received_bytes, False
        while not self._agents.collected:
            full = self._disks.any_paused or self._agents.any_waits_for_space
            if was_full and not full:
                began = time.monotonic()  # from now on, data can arrive
            was_full = full
            seconds = time.monotonic() - began
            if seconds > (END_SECONDS if full else COLLECT_SECONDS) or (full and self._interrupts.signal is not None):
                self._tracker.listener.notice("some records and models have not arrived in the folder of the run")
                break
            self._agents.wait(PROGRESS_INTERVAL)
            self._progress.report("waiting for the files of agents")
            for agent, report in self._agents.reports():
                if isinstance(report, control.Notice):
                    self._tracker.listener.notice(report.text)
                elif isinstance(report, control.AgentDiskReport):
                    self._disks.handle(agent.name, report)
            if self._agents.received_bytes > received:
                began, received = time.monotonic(), self._agents.received_bytes
        return self._agents.collected and not any(agent.is_lost for agent in self._agents.agents)

    def _finish_network(self) -> None:
        """End the network process and wait for its final count of unauthenticated connections."""
        sealed = self._run.experiment.processes.sealed
        if not sealed or self._starter.network_endpoint is None or self._network_exited:
            return
        self._network_reported = False
        self._tracker.phase = "finishing"
        self._commands.finish_network()
        deadline = time.monotonic() + STOP_SECONDS
        while not (self._network_reported and self._network_exited) and time.monotonic() < deadline:
            self._poll()


def _check_equal_machines(prepared: dict[str, control.Prepared]) -> None:
    """Raise `LaunchError` if machines have different data, or start from different models."""
    names = {
        "data sets": {name: report.data_digest for name, report in prepared.items()},
        "initial models": {name: report.model_digest for name, report in prepared.items()},
    }
    for what, digests in names.items():
        if len(set(digests.values())) > 1:
            shown = ", ".join(f"{name}: {digest[:8]}" for name, digest in digests.items())
            raise LaunchError(
                f"the agents have different {what} ({shown}): copy the same files to all machines, and install the "
                "same versions of all packages"
            )


def _check_settings(experiment: Experiment, parameters: int) -> None:
    """Raise `LaunchError` for settings that do not suit the number of nodes or the size of the model."""
    plan, size = experiment.processes, experiment.size
    if plan.base_port is not None and plan.base_port + size - 1 > 65535:
        raise LaunchError(
            f"processes.base_port = {plan.base_port}: {size} nodes need ports up to {plan.base_port + size - 1}, and "
            f"the last port is 65535; set it to at most {65536 - size}"
        )
    needed = (4 * parameters + MAX_HEADER_BYTES) / MIB
    largest = plan.max_message_bytes(None) / MIB  # the limit of the control socket, which was opened before
    if needed > largest:
        raise LaunchError(
            f"processes.max_message_mib = {largest:g}: a model of {parameters:,} parameters needs {needed:.3g}; set it "
            "to a larger value"
        )


def _raise_start_failure(report: control.StartFailed, source: str, agent: str) -> None:
    if report.error == "ExperimentError":
        raise ExperimentError(report.problems, source)
    kind: Callable[[str], Exception] = getattr(errors, report.error, RunError)
    raise kind(report.text if agent == LOCALHOST else f"agent {agent!r}: {report.text}")
