"""Curves of a run as points, each of which is computed once, also while the run goes on."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from shoal.results.monitor import Awaited, SentTraffic
from shoal.results.record_reader import RecordReader
from shoal.results.records import Average, End, Evaluation, Record, Round, RunFolder
from shoal.results.statistics import statistics
from shoal.types import NodeId

BYTES_AT_ONCE = 2**16
"""The part of a node's file that is read at once, so that the memory does not grow with the length of the run."""
QUIET_SECONDS = 30.0
QUIET_GAPS = 3.0
"""In a run in progress, a node that has probably failed does not hold up the points of the others: it has written no
record for these seconds and, on the run's clock, for so many times the longest time between two records of a node."""


@dataclass(frozen=True)
class Point:
    """Values at one moment of a run."""

    step: int
    """The number of finished rounds or, for evaluations at fixed times, the number of the evaluation."""
    time: float
    """Seconds of the run's clock: virtual in the simulation."""
    values: Mapping[str, float]


class RunPoints:
    """Reads the records of a run, and returns the points that are complete.

    | name | value |
    |---|---|
    | `train_loss` | mean over the nodes that finished the round |
    | `nodes` | the number of these nodes |
    | `bytes_sent`, `messages_sent` | of all nodes since the start of the run |
    | `accuracy/mean`, `/min`, `/max`, … | over the nodes, for each metric |
    | `averaged_model/accuracy`, … | of the average of all models |
    | `consensus_distance` | root mean square distance of the nodes to the average |
    | `node/3/accuracy`, `node/3/train_loss`, … | of the nodes in `detailed` |
    """

    def __init__(self, folder: RunFolder, nodes: int, evaluated: int, detailed: Collection[NodeId] = ()) -> None:
        """`nodes` is the number of training nodes, and `evaluated` how many of them are evaluated."""
        self._reader = RecordReader(folder, from_start=True)
        self._detailed = frozenset(detailed)
        self._training = range(nodes)
        self._evaluated_count = evaluated
        self._evaluated: set[NodeId] = set()
        self._has_server = False
        self._rounds: Awaited[Round] = Awaited(self._training)
        self._evaluations: Awaited[Evaluation] = Awaited(self._training)
        self._traffic = _Traffic()
        self._presence = _Presence(self._training)

    def read(self, in_progress: bool) -> Iterator[Point]:
        """Read the records that were written since the last call, and yield the points that are complete now.

        If the run is not in progress, all points are.
        """
        while True:
            active = set()
            for node, record in self._reader.new_records(BYTES_AT_ONCE):
                active.add(node)
                yield from self._add(node, record)
            for node in self._presence.new_quiet_nodes(active, in_progress):
                self._rounds.leave(node)
                self._evaluations.leave(node)
            yield from self._complete()
            if not active:
                break
        for record in self._reader.new_averages():
            if isinstance(record, Average):
                yield _average_point(record)

    def _add(self, node: NodeId, record: Record) -> Iterator[Point]:
        """Take a record of a node. Yield its own point, if the user wants to see the node."""
        self._traffic.add(node, record)
        if self._presence.add(node, record) and not self._has_server:
            self._rounds.join(node)
            if node in self._evaluated or len(self._evaluated) < self._evaluated_count:
                self._evaluations.join(node)
        if isinstance(record, Round):
            if node not in self._training and not self._has_server:
                self._has_server = True  # its rounds are those of the run, and it is evaluated after them
                self._rounds.leave_all()
                self._evaluations.leave_all()
            self._rounds.add(node, record.round, record)
            if node in self._detailed:
                yield _node_round(node, record)
        elif isinstance(record, Evaluation):
            self._add_evaluation(node, record)
            if node in self._detailed:
                values = {f"node/{node}/{name}": score for name, score in record.scores.items()}
                yield Point(_step(record), record.time, values)
        elif isinstance(record, End):
            self._rounds.leave(node)

    def _add_evaluation(self, node: NodeId, record: Evaluation) -> None:
        self._evaluations.add(node, record.round if record.tick is None else record.tick, record)
        self._evaluated.add(node)
        if len(self._evaluated) == self._evaluated_count < len(self._training):
            for other in self._training:
                if other not in self._evaluated:
                    self._evaluations.leave(other)

    def _complete(self) -> Iterator[Point]:
        for round, finished in self._rounds.complete():
            losses = [record.loss for record in finished.values() if record.loss is not None]
            sent, messages = self._traffic.until(round)
            values: dict[str, float] = {"nodes": len(finished), "bytes_sent": sent, "messages_sent": messages}
            if losses:
                values["train_loss"] = math.fsum(losses) / len(losses)
            yield Point(round + 1, max(record.time for record in finished.values()), values)
        for _, evaluated in self._evaluations.complete():
            yield _evaluation_point(list(evaluated.values()))


class _Presence:
    """Which nodes still write records."""

    def __init__(self, nodes: Collection[NodeId]) -> None:
        self._read = dict.fromkeys(nodes, time.monotonic())
        """When the latest record of each node was read, on the clock of this machine."""
        self._times = dict.fromkeys(nodes, 0.0)
        """The time of the latest record of each node, on the run's clock."""
        self._longest_gap = 0.0
        self._quiet: set[NodeId] = set()

    def add(self, node: NodeId, record: Record) -> bool:
        """Take a record. Return whether its node was quiet before."""
        self._longest_gap = max(self._longest_gap, record.time - self._times.get(node, 0.0))
        self._times[node] = record.time
        was_quiet = node in self._quiet
        self._quiet.discard(node)
        return was_quiet

    def new_quiet_nodes(self, active: Collection[NodeId], in_progress: bool) -> list[NodeId]:
        """Return the nodes that became quiet. `active` nodes have new records. After the run, all others are quiet."""
        now, latest = time.monotonic(), max(self._times.values(), default=0.0)
        self._read.update(dict.fromkeys(active, now))
        quiet = [
            node
            for node, read in self._read.items()
            if node not in active
            and node not in self._quiet
            and (
                not in_progress
                or (now - read > QUIET_SECONDS and latest - self._times[node] > QUIET_GAPS * self._longest_gap)
            )
        ]
        self._quiet.update(quiet)
        return quiet


class _Traffic:
    """The bytes and messages that all nodes had sent when they finished a round."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, SentTraffic] = defaultdict(SentTraffic)
        self._pending: dict[NodeId, deque[tuple[int, int, int]]] = defaultdict(deque)
        self._counted: dict[NodeId, tuple[int, int]] = {}
        self._bytes = self._messages = 0

    def add(self, node: NodeId, record: Record) -> None:
        self._nodes[node].add(record)
        if isinstance(record, Round):
            self._pending[node].append((record.round, self._nodes[node].bytes, self._nodes[node].messages))

    def until(self, round: int) -> tuple[int, int]:
        """Return the totals of all nodes at their latest round up to this one. Rounds must be asked for in order."""
        for node, pending in self._pending.items():
            while pending and pending[0][0] <= round:
                _, sent, messages = pending.popleft()
                before = self._counted.get(node, (0, 0))
                self._bytes += sent - before[0]
                self._messages += messages - before[1]
                self._counted[node] = sent, messages
        return self._bytes, self._messages


def _step(record: Evaluation | Average) -> int:
    return record.round + 1 if record.tick is None else record.tick


def _node_round(node: NodeId, record: Round) -> Point:
    values: dict[str, float] = {"bytes_sent": record.bytes_sent, "messages_sent": record.messages_sent}
    if record.loss is not None:
        values["train_loss"] = record.loss
    return Point(record.round + 1, record.time, {f"node/{node}/{name}": value for name, value in values.items()})


def _evaluation_point(records: list[Evaluation]) -> Point:
    scores: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, score in record.scores.items():
            scores[name].append(score)
    values: dict[str, float] = {}
    for name, found in scores.items():
        of_nodes = statistics(found) or {}
        values.update({f"{name}/{what}": of_nodes[what] for what in ("mean", "min", "max")})
    return Point(_step(max(records, key=_step)), max(record.time for record in records), values)


def _average_point(record: Average) -> Point:
    scores = {f"averaged_model/{name}": score for name, score in record.scores.items()}
    return Point(_step(record), record.time, {**scores, "consensus_distance": record.consensus_distance})
