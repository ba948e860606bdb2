"""Which records of a node are written, so that the file of a long run stays small.

A node writes one record per round, and may write events in every round. Of these, all are written at first, then every
10th, then every 100th and so on, so that a file grows with the logarithm of the number of rounds:

| number | rounds that are written | events of one kind that are written |
|---|---|---|
| below 1,000 | all | all |
| 1,000 to 9,999 | all | every 10th |
| 10,000 to 99,999 | every 10th | every 100th |
| 100,000 to 999,999 | every 100th | every 1,000th |

This depends only on the number of the round or event. Evaluations are always written. The latest round is written
before an evaluation, an event or the end of the node, so the last round and all totals are in the records.

A round that is written after rounds that were left out has one span of each activity, with the total time of all these
rounds (`condensed` in spans.py). Its `sent_to` are the nodes that the node sent to in this round. It is never None if
they changed in a round that was left out.
"""

from __future__ import annotations

import msgspec

from shoal.results.records import REJOINED, RESUMED, End, Event, Record, Round
from shoal.results.spans import condensed

ALL_ROUNDS = 10_000
"""All rounds before this one are written."""
ALL_EVENTS = 1_000
"""So many events of each kind are written one by one."""
ALWAYS_WRITTEN = (REJOINED, RESUMED)
"""Events that other records cannot be understood without."""


def written_step(number: int, limit: int) -> int:
    """Return the distance of rounds or events that are written, around this number: 1 below `limit`, then 10, …"""
    step = 1
    while number >= limit * step:
        step *= 10
    return step


def is_written(number: int, limit: int) -> bool:
    """Whether the round or event with this number, from 0, is written."""
    return number % written_step(number, limit) == 0


def join_rounds(left_out: Round, following: Round) -> Round:
    """Return `following` with what a reader needs of the round before it, which is not written."""
    spans = condensed([*left_out.spans, *following.spans], parts=1)
    sent_to = left_out.sent_to if following.sent_to is None else following.sent_to
    return msgspec.structs.replace(following, sent_to=sent_to, spans=spans)


class Thinning:
    """Chooses the records of one node that are written. Records that are left out are held back until a later one."""

    __slots__ = ("_counts", "_held_events", "_held_round")

    def __init__(self) -> None:
        self._held_round: Round | None = None
        """The latest round, if it was left out."""
        self._counts: dict[str, int] = {}
        """Events of each kind so far."""
        self._held_events: dict[str, Event] = {}
        """The latest event of each kind, if it was left out, with the number of events that were left out."""

    def add(self, record: Record) -> list[Record]:
        """Return the records to write now."""
        if isinstance(record, Round):
            if self._held_round is not None:
                record = join_rounds(self._held_round, record)
            written = is_written(record.round, ALL_ROUNDS)
            self._held_round = None if written else record
            return [record] if written else []
        if isinstance(record, End):
            return [*self.rest(), record]
        if isinstance(record, Event) and record.what not in ALWAYS_WRITTEN:
            counted = self._count(record)
            return [] if counted is None else [*self._latest_round(), counted]
        return [*self._latest_round(), record]

    def rest(self) -> list[Record]:
        """Return what is held back, because the node ends."""
        held = [*self._latest_round(), *self._held_events.values()]
        self._held_events.clear()
        return sorted(held, key=lambda record: record.time)

    def _latest_round(self) -> list[Record]:
        held, self._held_round = self._held_round, None
        return [] if held is None else [held]

    def _count(self, event: Event) -> Event | None:
        """Return the event with the number of events that it stands for; None if it is left out."""
        number = self._counts.get(event.what, 0)
        self._counts[event.what] = number + 1
        held = self._held_events.pop(event.what, None)
        counted = event if held is None else Event(event.what, event.time, event.detail, held.count + event.count)
        if is_written(number, ALL_EVENTS):
            return counted
        self._held_events[event.what] = counted
        return None
