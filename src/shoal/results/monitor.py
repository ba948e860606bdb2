"""What the caller of a run follows: its progress, its rounds and evaluations, and whether nodes have started."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from shoal.results.progress import NullProgressListener, Progress, ProgressListener
from shoal.results.records import REJOINED, End, Evaluation, Event, Record, Round
from shoal.types import NodeId


@dataclass(frozen=True)
class RoundReport:
    """A round that all nodes have finished, except nodes that have failed."""

    round: int
    """Counted from 0."""
    time: float
    """When the last node finished it, in seconds of the run's clock."""
    loss: float | None
    """The mean training loss of the nodes; None if no node reports one."""
    nodes: int
    """The number of nodes that finished it."""
    bytes_sent: int
    """The bytes that these nodes had sent when they finished it, since the start of the run."""


@dataclass(frozen=True)
class EvaluationReport:
    """The scores of all nodes that are evaluated, after a round or at a time of the run's clock."""

    round: int
    """The round of the nodes; the latest one if they are in different rounds."""
    time: float
    """When the last node was evaluated, in seconds of the run's clock."""
    scores: Mapping[str, float]
    """The mean over the nodes, by metric."""
    by_node: Mapping[NodeId, Mapping[str, float]]
    """The scores of each node, by metric."""


R = TypeVar("R")
OnRound: TypeAlias = Callable[[RoundReport], object]
OnEvaluation: TypeAlias = Callable[[EvaluationReport], object]


class RunMonitor:
    """Follows one run for its caller: a `ProgressListener` that passes progress and notices on to another one.

    `on_round` and `on_evaluation` are called in the process of the caller. An exception that they raise ends the run.
    """

    def __init__(
        self,
        listener: ProgressListener | None = None,
        on_round: OnRound | None = None,
        on_evaluation: OnEvaluation | None = None,
    ) -> None:
        for name, callback in (("on_round", on_round), ("on_evaluation", on_evaluation)):
            if callback is not None and not callable(callback):
                raise TypeError(f"{name} = {callback!r}: expected a function, which gets a report")
        self._listener = listener or NullProgressListener()
        self._on_round = on_round or _ignore
        self._on_evaluation = on_evaluation or _ignore
        self._has_callbacks = on_round is not None or on_evaluation is not None
        self.started = False
        """Whether nodes have started. Before that, a run has no results, and an error leaves no folder."""
        self.error: Exception | None = None
        """The exception of a callback."""
        self._rounds: _Awaited[tuple[Round, int]] = _Awaited()
        self._evaluations: _Awaited[Evaluation] = _Awaited()
        self._sent: dict[NodeId, SentTraffic] = {}
        self.evaluates_after_end = False
        """Whether nodes are evaluated after their end: by the clock, or where the timing of a run matters."""

    @classmethod
    def of(cls, listener: ProgressListener | None) -> RunMonitor:
        """Return the listener itself if it is a monitor, or else a monitor that passes everything on to it."""
        return listener if isinstance(listener, cls) else cls(listener)

    def progress(self, progress: Progress) -> None:
        self._listener.progress(progress)

    def notice(self, text: str) -> None:
        self._listener.notice(text)

    # Callbacks

    @property
    def wants_records(self) -> bool:
        """Whether `add_records` has any effect."""
        return self._has_callbacks and self.error is None

    def expect(self, rounds: Collection[NodeId], evaluations: Collection[NodeId], absent: Collection[NodeId]) -> None:
        """Set the nodes that a round, and an evaluation, waits for. `absent` nodes have not joined yet."""
        self._rounds = _Awaited(rounds, absent)
        self._evaluations = _Awaited(evaluations, absent)

    def add_records(self, records: Iterable[tuple[NodeId, Record]]) -> None:
        """Take new records of nodes, and report what is complete. The records of a node must come in order."""
        for node, record in records:
            self._add(node, record)
        self._report()

    def _add(self, node: NodeId, record: Record) -> None:
        sent = self._sent.setdefault(node, SentTraffic())
        sent.add(record)
        if isinstance(record, Round):
            self._rounds.add(node, record.round, (record, sent.bytes))
        elif isinstance(record, Evaluation):
            self._evaluations.add(node, record.round if record.tick is None else record.tick, record)
        elif isinstance(record, End):
            self._rounds.leave(node)
            if not self.evaluates_after_end:
                self._evaluations.leave(node)

    def node_left(self, node: NodeId) -> None:
        """Do not wait for this node any longer: it has failed."""
        self._rounds.leave(node)
        self._evaluations.leave(node)

    def node_joined(self, node: NodeId) -> None:
        """Wait for this node, which was restarted or joins late."""
        self._rounds.join(node)
        self._evaluations.join(node)

    def finish(self) -> None:
        """Report what is left: the run has ended."""
        self._rounds.leave_all()
        self._evaluations.leave_all()
        self._report()

    def _report(self) -> None:
        """Call the callbacks for every round and evaluation that is complete, in the order of time."""
        if not self.wants_records:
            return
        reports: list[RoundReport | EvaluationReport] = [
            _round_report(round, finished) for round, finished in self._rounds.complete()
        ]
        reports += [_evaluation_report(evaluated) for _, evaluated in self._evaluations.complete()]
        for report in sorted(reports, key=lambda report: report.time):
            try:
                if isinstance(report, EvaluationReport):
                    self._on_evaluation(report)
                else:
                    self._on_round(report)
            except Exception as error:
                self.error = error
                raise


def _ignore(report: object) -> None:
    """The callback of a run without one."""


def _round_report(round: int, finished: Mapping[NodeId, tuple[Round, int]]) -> RoundReport:
    losses = [record.loss for record, _ in finished.values() if record.loss is not None]
    return RoundReport(
        round,
        time=max(record.time for record, _ in finished.values()),
        loss=math.fsum(losses) / len(losses) if losses else None,
        nodes=len(finished),
        bytes_sent=sum(sent for _, sent in finished.values()),
    )


def _evaluation_report(evaluated: Mapping[NodeId, Evaluation]) -> EvaluationReport:
    by_node = {node: dict(record.scores) for node, record in sorted(evaluated.items())}
    return EvaluationReport(
        round=max(record.round for record in evaluated.values()),
        time=max(record.time for record in evaluated.values()),
        scores=_mean(by_node.values()),
        by_node=by_node,
    )


class _Awaited(Generic[R]):
    """Records with numbers, such as rounds. A number is complete when no expected node has a lower one."""

    def __init__(self, nodes: Collection[NodeId] = (), absent: Collection[NodeId] = ()) -> None:
        self._nodes = frozenset(nodes)
        self._present = set(nodes).difference(absent)
        self._latest: dict[NodeId, int] = {}
        self._pending: dict[int, dict[NodeId, R]] = {}
        self._lowest: int | None = None
        """The number that is complete next."""
        self._behind: set[NodeId] = set()
        """The nodes that it waits for."""
        self._reported = -1

    def add(self, node: NodeId, number: int, record: R) -> None:
        """Add a record; one whose number is complete already is ignored."""
        self._latest[node] = number
        if number > self._reported:
            self._pending.setdefault(number, {})[node] = record
        if self._lowest is not None and number >= self._lowest:
            self._behind.discard(node)

    def leave(self, node: NodeId) -> None:
        self._present.discard(node)
        self._behind.discard(node)

    def leave_all(self) -> None:
        self._present.clear()
        self._behind.clear()

    def join(self, node: NodeId) -> None:
        """Wait for a node from its next number on."""
        if node in self._nodes:
            self._present.add(node)
            self._latest[node] = max(self._pending, default=self._reported)

    def complete(self) -> Iterator[tuple[int, dict[NodeId, R]]]:
        """Remove and return the records of every complete number, in order."""
        while self._pending:
            lowest = min(self._pending)
            if lowest != self._lowest:
                self._lowest = lowest
                self._behind = {node for node in self._present if self._latest.get(node, -1) < lowest}
            if self._behind:
                return
            self._reported, self._lowest = lowest, None
            yield lowest, self._pending.pop(lowest)


def _mean(scores: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric, over the nodes that have it."""
    names = dict.fromkeys(name for own in scores for name in own)
    values = {name: [own[name] for own in scores if name in own] for name in names}
    return {name: math.fsum(found) / len(found) for name, found in values.items()}


class SentTraffic:
    """The bytes and messages that one node sent, from its records in order.

    A node that rejoins starts to count from zero; this adds what it had sent before.
    """

    def __init__(self) -> None:
        self.bytes = self.messages = 0
        self._before_rejoining = 0, 0

    def add(self, record: Record) -> None:
        if isinstance(record, Round | End):
            self.bytes = self._before_rejoining[0] + record.bytes_sent
            self.messages = self._before_rejoining[1] + record.messages_sent
        elif isinstance(record, Event) and record.what == REJOINED:
            self._before_rejoining = self.bytes, self.messages
