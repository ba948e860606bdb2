"""What each node of a run did, and to which nodes it sent models, as columns.

    segments = read_segments(folder)      # the timeline of all nodes
    edges = read_edges(folder)
    edges.at_round(7)                     # the senders and receivers of models in round 7

Segments are the spans of the records, and what follows from other records:

| kind | what the node does |
|---|---|
| `train`, `wait`, `send` | as in `spans.py` |
| `idle` | anything else: it sleeps, evaluates its model, or waits for a processor |
| `offline` | its device is offline, or the node has not joined the run yet |
| `failed` | it crashed, hangs or ended with an error, and was not restarted yet |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.results.frames import Floats, Integers, RunRecords, last_of_each
from shoal.results.records import JOINED, REJOINED, Event, RunFolder, decode_lines
from shoal.results.spans import ACTIVITIES, OFFLINE, Span
from shoal.results.thinning import ALL_ROUNDS, written_step
from shoal.types import NodeId

IDLE, FAILED = "idle", "failed"
KINDS = (*ACTIVITIES, IDLE, FAILED)
"""The kinds of segments; `Segments.kind` has their indices."""
CODES = {kind: code for code, kind in enumerate(KINDS)}
OLD_RUN = "an earlier version of Shoal wrote the run; run the experiment again"
FAULTS = ("crash", "crashes", "hang", "hangs", "raise", "raises")
"""The verbs of faults that end the activity of a node."""
STARTS = ("restart", "restarts", "join", "joins")
"""The verbs of faults that start a node."""

Codes: TypeAlias = NDArray[np.int8]
Times: TypeAlias = tuple[str, float, float]
"""A kind of segment, its start and its end."""


@dataclass(frozen=True)
class Segments:
    """The timelines of all nodes. All columns have one item per segment, sorted by node and time, without overlaps."""

    nodes: tuple[NodeId, ...]
    """The nodes that have records."""
    node: Integers
    kind: Codes
    """The index of the kind in `KINDS`."""
    start: Floats
    end: Floats
    """Seconds of the run's clock."""

    @property
    def duration(self) -> float:
        return float(self.end.max(initial=0.0))

    def of(self, node: NodeId) -> list[Times]:
        """Return the segments of one node, in order."""
        first, last = np.searchsorted(self.node, (node, node + 1))
        kinds = [KINDS[code] for code in self.kind[first:last]]
        return list(zip(kinds, self.start[first:last].tolist(), self.end[first:last].tolist(), strict=True))


@dataclass(frozen=True)
class Edges:
    """The nodes that each node sent models to. The columns have one item per `round` record, sorted by node."""

    node: Integers
    round: Integers
    time: Floats
    list: Integers
    """The number of the record's list of receivers; -1: unknown."""
    first: Integers
    """Where each list begins in `receivers`; one more item is the end of the last list."""
    receivers: Integers

    @property
    def last_round(self) -> int:
        """The highest round in the records."""
        return int(self.round.max(initial=0))

    def common_round(self, failed: Collection[NodeId]) -> int:
        """Return the highest round that all nodes have finished, except failed ones."""
        nodes, last = last_of_each(self.node)
        rounds = [int(self.round[row]) for node, row in zip(nodes, last, strict=True) if node not in failed]
        return min(rounds, default=self.last_round)

    @property
    def static(self) -> bool:
        """Whether nodes sent to the same nodes in most rounds; they may have omitted failed ones."""
        nodes, lists = len(np.unique(self.node)), len(self.first) - 1
        return 2 * (lists - nodes) <= len(self.node) - nodes

    def at_round(self, round: int) -> Integers:
        """Return the edges of a round: one row per edge, its sender and its receiver.

        In a long run not every round has a record: a round has the edges of the latest record before it.
        """
        return self._of((self.round <= round) & (self.round > round - written_step(round, ALL_ROUNDS)))

    def at_time(self, time: float) -> Integers:
        """Return the edges of the latest round that each node had finished at this time."""
        return self._of(self.time <= time)

    def _of(self, records: NDArray[np.bool_]) -> Integers:
        """Return the edges of the last one of `records` of each node."""
        rows = np.flatnonzero(records & (self.list >= 0))
        senders, last = last_of_each(self.node[rows])
        lists = self.list[rows[last]]
        begin, counts = self.first[lists], self.first[lists + 1] - self.first[lists]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack([np.repeat(senders, counts), self.receivers[np.repeat(begin, counts) + offsets]], axis=1)


class _Activity(msgspec.Struct, tag="round", tag_field="kind", frozen=True, gc=False):
    time: float
    spans: list[Span] = []


class _End(msgspec.Struct, tag="end", tag_field="kind", frozen=True, gc=False):
    time: float
    spans: list[Span] = []


class _Event(msgspec.Struct, tag="event", tag_field="kind", frozen=True, gc=False):
    time: float
    what: str
    detail: str


class _Evaluation(msgspec.Struct, tag="evaluation", tag_field="kind", frozen=True, gc=False):
    time: float


class _Sent(msgspec.Struct, tag="round", tag_field="kind", frozen=True, gc=False):
    round: int
    time: float
    sent_to: list[NodeId] | None = None


class _OtherEnd(msgspec.Struct, tag="end", tag_field="kind", frozen=True, gc=False):
    time: float


class _OtherEvent(msgspec.Struct, tag="event", tag_field="kind", frozen=True, gc=False):
    time: float


WITH_SPANS = (_Activity, _End)
_span_decoder = msgspec.json.Decoder(_Activity | _End | _Event | _Evaluation)
_sent_decoder = msgspec.json.Decoder(_Sent | _OtherEnd | _OtherEvent | _Evaluation)


def read_segments(folder: RunFolder) -> Segments:
    """Read the timelines of all nodes. Raises `DataError` if the run has none, or if a file is damaged."""
    lines = [_Timeline(node, _decode(folder.node(node), _span_decoder)) for node in folder.recorded_nodes()]
    _check_started(folder, any(line.has_rounds for line in lines))
    if not any(line.has_spans for line in lines):
        raise DataError(f"{folder.path}: no record has 'spans', the activities of a node: {OLD_RUN}")
    ended = any(line.ended for line in lines)
    last = max(line.last for line in lines)
    parts = [line.segments(last, failed=ended and not line.ended) for line in lines]
    codes, starts, ends = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    nodes = np.repeat([line.node for line in lines], [len(part[0]) for part in parts])
    return Segments(tuple(line.node for line in lines), nodes.astype(np.int64), codes, starts, ends)


def read_edges(folder: RunFolder) -> Edges:
    """Read the nodes that each node sent to. Raises `DataError` if the run does not have them, or a file is damaged."""
    found: list[tuple[Integers, Integers, Floats, Integers]] = []
    lists: list[list[NodeId]] = []
    for node in folder.recorded_nodes():
        records = [r for r in _decode(folder.node(node), _sent_decoder) if isinstance(r, _Sent)]
        has_list = np.array([record.sent_to is not None for record in records], bool)
        numbers = np.cumsum(has_list) - 1
        numbers[numbers >= 0] += len(lists)
        lists += [record.sent_to for record in records if record.sent_to is not None]
        rounds = np.array([record.round for record in records], np.int64)
        times = np.array([record.time for record in records], np.float64)
        found.append((np.full(len(records), node, np.int64), rounds, times, numbers.astype(np.int64)))
    _check_started(folder, any(len(rounds) for _, rounds, _, _ in found))
    if not lists:
        raise DataError(f"{folder.path}: no record has 'sent_to', the nodes that a node sent to: {OLD_RUN}")
    senders, rounds, times, numbers = (np.concatenate(column) for column in zip(*found, strict=True))
    first = np.cumsum([0, *map(len, lists)])
    receivers = np.fromiter(chain.from_iterable(lists), np.int64, int(first[-1]))
    return Edges(senders, rounds, times, numbers, first, receivers)


def _check_started(folder: RunFolder, has_rounds: bool) -> None:
    if not has_rounds:
        raise DataError(f"{folder.path}: no node has finished a round yet")


def _decode(path: Path, decoder: msgspec.json.Decoder[Any]) -> Sequence[Any]:
    """Decode the complete lines of a file. Raises `DataError` if a line is damaged."""
    content = path.read_bytes()
    content = content[: content.rfind(b"\n") + 1]
    try:
        return decoder.decode_lines(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        for _ in decode_lines(content.split(b"\n")[:-1], path):
            """It raises an error with the number of the line."""
        raise DataError(f"{path} is damaged: {error}") from error


class _Timeline:
    """The timeline of one node, from its records in order."""

    def __init__(self, node: NodeId, records: Sequence[Any]) -> None:
        self.node = node
        # After the end there may be evaluations by time. If rounds follow, the node has rejoined the run.
        activities = [record for record in records if type(record) in WITH_SPANS]
        self.ended = bool(activities) and type(activities[-1]) is _End
        self.last = activities[-1].time if self.ended else max((record.time for record in records), default=0.0)
        """The time of the last record; of a node that has ended, the time of its end."""
        self.has_rounds = bool(activities)
        self._spans = _columns(list(chain.from_iterable([r.spans for r in records if type(r) in WITH_SPANS])))
        self.has_spans = len(self._spans[0]) > 0
        self._events = [record for record in records if type(record) is _Event]

    def segments(self, last: float, failed: bool) -> tuple[Codes, Floats, Floats]:
        """Return the kinds, starts and ends of all segments. `last` is when the run ended.

        With `failed`, the node did not reach the end of its algorithm, and others did.
        """
        absent = _absences(self._events, self.last if failed else None, last)
        until = max([self.last, *(end for _, _, end in absent)])
        codes, starts, ends = self._spans
        if absent:
            others = _columns(absent)
            order = np.argsort(np.concatenate([starts, others[1]]), kind="stable")
            codes = np.concatenate([codes, others[0]])[order]
            starts = np.concatenate([starts, others[1]])[order]
            ends = np.concatenate([ends, others[2]])[order]
        return _with_idle(codes, starts, ends, until)


def failed_nodes(records: RunRecords, time: float) -> set[NodeId]:
    """Return the nodes that had failed before this time, and had not been restarted."""
    events: dict[NodeId, list[Event]] = {node: [] for node in records.last_times}
    for _, node, event in records.events:
        events[node].append(event)
    ended = {node for _, node, _ in records.ends}
    last = max(records.last_times.values(), default=0.0)
    found = set()
    for node, own in events.items():
        absent = _absences(own, records.last_times[node] if ended and node not in ended else None, last)
        if any(kind == FAILED and start < time and (time < end or end == last) for kind, start, end in absent):
            found.add(node)
    return found


def _absences(events: Iterable[_Event | Event], lost_at: float | None, last: float) -> list[Times]:
    """Return when a node had failed, or had not joined the run yet, from its events in order.

    `lost_at` is the time of the last record of a node that did not reach its end, though others did. `last` is when the
    run ended.
    """
    found: list[Times] = []
    failed_at: float | None = None
    for event in events:
        verb = fault_verb(event.detail) if event.what == "fault" else ""
        if verb in FAULTS and failed_at is None:
            failed_at = event.time
        elif verb in STARTS or event.what in (REJOINED, JOINED):
            if failed_at is not None:
                found.append((FAILED, failed_at, event.time))
            elif not found and (event.what == JOINED or verb.startswith("join")):
                found.append((OFFLINE, 0.0, event.time))
            failed_at = None
    failed_at = lost_at if failed_at is None else failed_at
    return found if failed_at is None else [*found, (FAILED, failed_at, last)]


def _columns(spans: Sequence[Times]) -> tuple[Codes, Floats, Floats]:
    """Return the kinds, starts and ends of spans. A kind that this version does not know is idle."""
    if not spans:
        return np.empty(0, np.int8), np.empty(0), np.empty(0)
    flat: list[Any] = list(chain.from_iterable(spans))  # slices of it are faster than `zip`
    codes = list(map(CODES.get, flat[::3]))
    if None in codes:
        codes = [CODES[IDLE] if code is None else code for code in codes]
    return np.array(codes, np.int8), np.array(flat[1::3], np.float64), np.array(flat[2::3], np.float64)


def fault_verb(detail: str) -> str:
    """Return the verb of a fault: "node 3 crashes", "nodes 1-3 crash" or, by round, "crash at round 6"."""
    words = detail.split()
    by_round = len(words) > 1 and words[1] == "at"
    return words[0 if by_round else -1] if words else ""


def _with_idle(codes: Codes, starts: Floats, ends: Floats, until: float) -> tuple[Codes, Floats, Floats]:
    """Remove overlaps, and fill the gaps from 0 to `until` with idle segments."""
    before = np.concatenate([[0.0], np.maximum.accumulate(ends)])
    starts = np.maximum(starts, before[:-1])
    kept = ends > starts
    codes, starts, ends = codes[kept], starts[kept], ends[kept]
    gap_starts, gap_ends = np.concatenate([[0.0], ends]), np.concatenate([starts, [until]])
    gaps = np.flatnonzero(gap_ends > gap_starts)
    if not len(gaps):
        return codes, starts, ends
    codes = np.insert(codes, gaps, CODES[IDLE])
    return codes, np.insert(starts, gaps, gap_starts[gaps]), np.insert(ends, gaps, gap_ends[gaps])
