"""The records of one run in memory, and what the page gets of them: changes since a version, and past states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.dashboard.columns import Array, Columns, PerNode
from shoal.dashboard.statistics import NodeStatistics
from shoal.dashboard.tail import RecordTail
from shoal.results.activity import FAULTS, STARTS, fault_verb
from shoal.results.records import JOINED, REJOINED, RESUMED, Average, End, Evaluation, Event, Record, Round, RunFolder
from shoal.results.spans import ACTIVITIES
from shoal.types import NodeId

MAX_METRICS = 64
MAX_NUMBER = 2**53
"""The numbers of rounds, bytes and messages are below it, so that they are exact in a browser."""
MAX_BATCH = 20_000
"""Rounds that are read before they become rows of columns: columns need less memory."""
RUNNING, ENDED, FAILED = range(3)
"""The states of a node."""

_CODES = {activity: code for code, activity in enumerate(ACTIVITIES)}


def fault_state(event: Event) -> int | None:
    """Return the state of a node after an event; None if the event does not change it."""
    if event.what in (REJOINED, JOINED, RESUMED):
        return RUNNING
    if event.what != "fault":
        return None
    verb = fault_verb(event.detail)
    return FAILED if verb in FAULTS else RUNNING if verb in STARTS else None


class RunFeed:
    """One run. `refresh` reads what is new; it must not run in two threads at the same time."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.version = 0
        self.incarnation = 0
        """How often everything was read again, because a file was cut or replaced."""
        self._clear()

    def _clear(self) -> None:
        self.tail = RecordTail(self.folder)
        self.ids: list[NodeId] = []
        """The nodes, in the order of the arrays."""
        self._indices: dict[NodeId, int] = {}
        self.rounds = Columns(node="i4", round="i8", time="f8", loss="f8", bytes="f8", messages="f8")
        self.evaluated = Columns(node="i4", moment="i8", round="i8", time="f8")
        self.scores: dict[str, Columns] = {}
        self.sends = Columns(node="i4", time="f8", start="i8", count="i8")
        self.receivers = Columns(node="i8")
        """Ids of nodes, not indices: a node may send to one without records."""
        self.spans = Columns(node="i4", activity="i1", start="f8", end="f8")
        self.states = Columns(node="i4", time="f8", state="i1")
        self.averages: list[Average] = []
        self.by_ticks = False
        self.curves: dict[str, NodeStatistics] = {}
        """By metric: scores of the nodes by evaluation."""
        self.tick_rounds = NodeStatistics(carry=True)
        self.training = {
            "loss": NodeStatistics(carry=False),
            "bytes": NodeStatistics(carry=True),
            "messages": NodeStatistics(carry=True),
        }
        """By round."""
        self.latest = {
            "round": PerNode("i8", -1),
            "time": PerNode("f8", 0.0),
            "loss": PerNode("f8", np.nan),
            "state": PerNode("i1", RUNNING),
            "sent": PerNode("i8", -1),
            "version": PerNode("i8", 0),
            "edges_version": PerNode("i8", 0),
        }
        """The latest values of each node; `sent` is the row in `sends`."""
        self.latest_scores: dict[str, PerNode] = {}
        self._sent_before: dict[int, tuple[int, int]] = {}
        self._sent: dict[int, tuple[int, int]] = {}
        self.averages_version = 0
        self.is_limited = False

    # Reading

    def refresh(self) -> bool:
        """Read what was appended. Returns whether anything was new."""
        batch, before = _Batch(), self.version
        for node, records in self.tail.read():
            if node is None:
                found = [record for record in records if isinstance(record, Average)]
                self.averages += found
                batch.averages = bool(found)
            else:
                self._collect(batch, node, records)
            if len(batch.rounds) > MAX_BATCH:
                self._add(batch)
                batch = _Batch()
        if self.tail.replaced:
            self._clear()
            self.incarnation += 1
            return self.refresh()
        if batch.changed:
            self._add(batch)
        return self.version > before

    def _collect(self, batch: _Batch, node: NodeId, records: Iterable[Record]) -> None:
        index = self._indices.get(node)
        if index is None:
            index = self._indices[node] = len(self.ids)
            self.ids.append(node)
        batch.nodes.append(index)
        for record in records:
            if type(record) is Round:
                if _fits(record):
                    self._collect_round(batch, index, record)
                else:
                    self.tail.damaged += 1
            elif type(record) is Evaluation:
                if abs(record.round) < MAX_NUMBER and (record.tick is None or 0 <= record.tick < MAX_NUMBER):
                    batch.evaluations.append((index, record))
                else:
                    self.tail.damaged += 1
            elif type(record) is Event:
                if record.what == REJOINED:
                    self._sent_before[index] = self._sent.get(index, (0, 0))
                if (state := fault_state(record)) is not None:
                    batch.states.append((index, record.time, state))
            elif type(record) is End:
                batch.states.append((index, record.time, ENDED))
                batch.spans += [(index, _CODES.get(what, -1), start, end) for what, start, end in record.spans]

    def _collect_round(self, batch: _Batch, index: int, record: Round) -> None:
        sent_bytes, messages = record.bytes_sent, record.messages_sent
        if index in self._sent_before:  # the node has rejoined, and counts from 0 again
            sent_bytes += self._sent_before[index][0]
            messages += self._sent_before[index][1]
        batch.rounds.append((index, record.round, record.time, record.loss, sent_bytes, messages))
        self._sent[index] = sent_bytes, messages
        if record.sent_to is not None:
            first = self.receivers.size + len(batch.receivers)
            batch.sends.append((index, record.time, first, len(record.sent_to)))
            batch.receivers += record.sent_to
        for what, start, end in record.spans:
            batch.spans.append((index, _CODES.get(what, -1), start, end))

    def _add(self, batch: _Batch) -> None:
        self.version += 1
        count = len(self.ids)
        for values in (*self.latest.values(), *self.latest_scores.values()):
            values.reserve(count)
        self.latest["version"].values[batch.nodes] = self.version
        if batch.averages:
            self.averages_version = self.version
        if batch.rounds:
            node, round, time, loss, sent, messages = zip(*batch.rounds, strict=True)
            losses = np.array(loss, np.float64)  # None becomes NaN
            self._add_rounds(
                np.array(node), np.array(round), np.array(time), losses, np.array(sent), np.array(messages)
            )
        if batch.evaluations:
            self._add_evaluations(batch.evaluations)
        if batch.sends:
            self._add_sends(batch)
        if batch.spans:
            node, activity, start, end = zip(*batch.spans, strict=True)
            self.spans.append(node=node, activity=activity, start=start, end=end)
        if batch.states:
            node, time, state = zip(*batch.states, strict=True)
            self.states.append(node=node, time=time, state=state)
            self.latest["state"].values[list(node)] = state
            self.latest["time"].values[list(node)] = time
        for curve in (*self.curves.values(), *self.training.values(), self.tick_rounds):
            curve.update(self.version)

    def _add_rounds(self, node: Array, round: Array, time: Array, loss: Array, sent: Array, messages: Array) -> None:
        self.rounds.append(node=node, round=round, time=time, loss=loss, bytes=sent, messages=messages)
        for name, values in (("round", round), ("time", time), ("loss", loss)):
            self.latest[name].values[node] = values
        has_loss = ~np.isnan(loss)
        self.training["loss"].add(round[has_loss], node[has_loss], time[has_loss], loss[has_loss])
        self.training["bytes"].add(round, node, time, sent)
        self.training["messages"].add(round, node, time, messages)

    def _add_evaluations(self, evaluations: list[tuple[int, Evaluation]]) -> None:
        if not self.by_ticks and any(record.tick is not None for _, record in evaluations):
            self.by_ticks = True
        node = np.array([index for index, _ in evaluations])
        round = np.array([record.round for _, record in evaluations])
        time = np.array([record.time for _, record in evaluations])
        ticks = np.array([-1 if record.tick is None else record.tick for _, record in evaluations])
        moment = ticks if self.by_ticks else round
        counted = moment >= 0
        self.evaluated.append(node=node, moment=moment, round=round, time=time)
        if self.by_ticks:
            self.tick_rounds.add(moment[counted], node[counted], time[counted], round[counted] + 1)
        names = dict.fromkeys(name for _, record in evaluations for name in record.scores)
        for name in names:
            if name not in self.curves and len(self.curves) == MAX_METRICS:
                continue
            self.curves.setdefault(name, NodeStatistics(carry=True))
            self.scores.setdefault(name, Columns(node="i4", time="f8", score="f8"))
            latest = self.latest_scores.setdefault(name, PerNode("f8", np.nan))
            latest.reserve(len(self.ids))
            has = np.array([name in record.scores for _, record in evaluations])
            values = np.array([record.scores.get(name, np.nan) for _, record in evaluations])
            self.scores[name].append(node=node[has], time=time[has], score=values[has])
            latest.values[node[has]] = values[has]
            has &= counted
            self.curves[name].add(moment[has], node[has], time[has], values[has])

    def _add_sends(self, batch: _Batch) -> None:
        first = self.sends.size
        node, time, start, count = zip(*batch.sends, strict=True)
        self.receivers.append(node=batch.receivers)
        self.sends.append(node=node, time=time, start=start, count=count)
        self.latest["sent"].values[list(node)] = np.arange(first, self.sends.size)
        self.latest["edges_version"].values[list(node)] = self.version

    def end(self, lost: Mapping[str, Any]) -> None:
        """Take the end of the run into account: nodes that failed count until their last record."""
        if self.is_limited:
            return
        self.is_limited = True
        self.version += 1
        count = len(self.ids)
        ended = self.states["node"][self.states["state"] == ENDED]
        failed = np.ones(count, bool)
        failed[ended] = False
        if len(ended):
            last = self.latest["time" if self.by_ticks else "round"].values[:count]
            limits = np.where(failed, last, np.inf)
            for curve in (*self.curves.values(), self.tick_rounds):
                curve.limit(limits, are_times=self.by_ticks)
                curve.update(self.version)
        for id in lost:
            index = self._indices.get(int(id)) if id.isdecimal() else None
            if index is not None and self.latest["state"].values[index] != FAILED:
                time = self.latest["time"].values[index]
                self.states.append(node=[index], time=[time], state=[FAILED])
                self.latest["state"].values[index] = FAILED
        self.latest["version"].values[:count] = self.version

    # Past states

    @property
    def duration(self) -> float:
        """Seconds of the run's clock until the latest record."""
        times = self.latest["time"].values[: len(self.ids)]
        return float(times.max()) if len(times) else 0.0

    def latest_rows(self, table: Columns, at: float) -> NDArray[np.int64]:
        """Return the latest row of each node in a table at a time; -1 if it has none."""
        found = np.full(len(self.ids), -1)
        rows = np.flatnonzero(table["time"] <= at)
        found[table["node"][rows]] = rows  # of several rows of a node, the last one is kept
        return found

    def edges_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of receivers of each row in `sends` (0 for -1), and all receivers."""
        if not self.sends.size:
            return np.zeros(len(rows), np.int64), np.empty(0, np.int64)
        counts = np.where(rows >= 0, self.sends["count"][rows], 0)
        starts = np.where(rows >= 0, self.sends["start"][rows], 0)
        ends = np.cumsum(counts)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
        return counts, self.receivers["node"][places]


class _Batch:
    """Records that are read in one refresh."""

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.rounds: list[tuple[int, int, float, float | None, int, int]] = []
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.sends: list[tuple[int, float, int, int]] = []
        self.receivers: list[NodeId] = []
        self.spans: list[tuple[int, int, float, float]] = []
        self.states: list[tuple[int, float, int]] = []
        self.averages = False

    @property
    def changed(self) -> bool:
        return self.averages or bool(self.nodes)


def _fits(record: Round) -> bool:
    """Whether the numbers of a record fit in the columns. Those of a damaged file may not."""
    counts = (record.round, record.bytes_sent, record.messages_sent)
    receivers = record.sent_to or ()
    return min(counts) >= 0 and max(counts) < MAX_NUMBER and all(0 <= node < 2**31 for node in receivers)
