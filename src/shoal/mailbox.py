"""Receive semantics: the messages of one node, and the receives that wait for them.

All engines use `Mailbox`, so a receive means the same in all of them. A message is in one of these states:

- unclaimed: it has arrived, and no receive has taken it yet;
- taken: a receive wanted it;
- repeated: the receive of its kind and round already took a message from the same sender; discarded, counted in
  `repeated`;
- late: its receive timed out, and a receive for a later round has started since; discarded, counted in `late`;
- dropped: discarded because the unclaimed messages exceeded the limit, or because its sender has been restarted since;
  counted in `dropped`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import msgspec

from shoal.message import Message
from shoal.message_budget import MessageBudget
from shoal.receive_history import ReceiveHistory
from shoal.types import NodeId


class Filter(msgspec.Struct, frozen=True, gc=False):
    """The messages that a receive waits for.

    With `senders`, a receive takes one message from each sender, or with `any_sender` one message from any of them.
    Without `senders`, it takes one message from any node. `round` None matches every round. If a receive takes one
    message from each sender in a given round, every further message of this kind and round from the same sender is a
    repetition and is discarded.
    """

    kind: str
    round: int | None = None
    senders: tuple[NodeId, ...] | None = None
    any_sender: bool = False
    several: bool = False
    """Whether a sender may send several messages of this kind in a round; the receive takes the next one."""

    @property
    def one_per_sender(self) -> bool:
        """Whether a second message from the same sender is a repetition."""
        return self.round is not None and self.senders is not None and not self.any_sender and not self.several

    def __str__(self) -> str:
        which = f"{self.kind!r}" if self.round is None else f"{self.kind!r} of round {self.round}"
        if self.senders is None:
            return f"{which} from any node"
        return f"{which} from {'any of ' if self.any_sender else ''}{', '.join(str(s) for s in self.senders)}"


class Waiter:
    """A receive in progress."""

    __slots__ = ("_missing", "_not_taken", "kind", "messages", "one_per_sender", "round", "wake", "wanted")

    def __init__(self, wanted: Filter, wake: Callable[[], None]) -> None:
        self.wanted = wanted
        self.kind = wanted.kind
        self.round = wanted.round
        self.one_per_sender = wanted.one_per_sender
        self.messages: list[Message] = []
        self.wake = wake
        self._missing = None if wanted.senders is None else set(wanted.senders)
        self._not_taken: set[NodeId] | None = None
        """Wanted senders that are not missing, although no message of theirs was taken, or an outdated one."""

    def offer(self, message: Message) -> bool:
        """Take `message` if the receive wants it. Returns whether it did."""
        if message.kind != self.kind or (self.round is not None and message.round != self.round):
            return False
        if self._missing is None:
            if self.messages:
                return False
        elif message.sender in self._missing:
            if self.wanted.any_sender:
                self._missing.clear()
            else:
                self._missing.remove(message.sender)
        else:
            return False
        self.messages.append(message)
        return True

    def give_up_on(self, nodes: Collection[NodeId]) -> set[NodeId]:
        """Stop waiting for `nodes`. Returns the nodes whose messages were still missing."""
        given_up = self._missing.intersection(nodes) if self._missing else set()
        if self._missing is not None:
            self._missing -= given_up
        if given_up:
            self._not_taken = given_up.union(self._not_taken or ())
        return given_up

    def forget(self, node: NodeId) -> None:
        """`node` has rejoined: its next message does not repeat one that was taken."""
        if self._missing is not None and node not in self._missing:
            self._not_taken = {node, *(self._not_taken or ())}

    def has_taken(self, message: Message) -> bool:
        """Whether the receive took the one message of this kind and round from the same sender."""
        return (
            self.one_per_sender
            and message.kind == self.kind
            and message.round == self.round
            and message.sender in (self.wanted.senders or ())
            and message.sender not in (self._missing or ())
            and message.sender not in (self._not_taken or ())
        )

    @property
    def taken_senders(self) -> tuple[NodeId, ...]:
        """The senders of the messages that were taken, in a receive of one message per sender."""
        senders = self.wanted.senders or ()
        left_out = (self._missing or set()) | (self._not_taken or set())
        return tuple(sender for sender in senders if sender not in left_out) if left_out else senders

    @property
    def missing(self) -> list[NodeId]:
        return sorted(self._missing or ())

    @property
    def done(self) -> bool:
        return bool(self.messages) if self._missing is None else not self._missing


class Mailbox:
    """The unclaimed messages of one node, and its receives in progress."""

    LIMIT = 100_000
    """The most unclaimed messages without a `MessageBudget`; further ones are dropped."""
    REMEMBERED = 16
    """How many combinations of kind and round the mailbox remembers the senders of. A message for an earlier round that
    no receive is waiting for counts as late."""

    def __init__(self, budget: MessageBudget | None = None) -> None:
        """`budget` limits the memory of unclaimed messages; without it only their number is limited."""
        self.budget = budget
        self.failed: set[NodeId] = set()
        self.late = 0
        self.late_from: Counter[NodeId] = Counter()
        """The late messages of each sender."""
        self.dropped = 0
        self.repeated = 0
        self._unclaimed: list[Message] = []
        self._waiters: list[Waiter] = []
        self._history = ReceiveHistory(self.REMEMBERED)
        self._rejoined: dict[NodeId, int] = {}
        """The first round in which each rejoined node sends."""
        self._incarnations: dict[NodeId, int] = {}
        """The incarnation of each node that was restarted, by its latest message."""

    def put(self, message: Message) -> None:
        """Deliver a message. Wakes the receive that it completes."""
        history = self._history
        if (message.incarnation or self._incarnations) and not self._is_latest(message):
            self.dropped += 1
            return
        if history.is_repeated(message):
            self.repeated += 1
            return
        for waiter in self._waiters:
            if waiter.offer(message):
                if waiter.done:
                    self._end(waiter)
                    waiter.wake()
                return
            if waiter.has_taken(message):
                self.repeated += 1
                return
        if history.is_forgotten(message) or history.is_late(message):
            self._count_late(message)
        elif self.budget is None and len(self._unclaimed) >= self.LIMIT:
            self.dropped += 1
        else:
            self._unclaimed.append(message)
            if self.budget is not None and self.budget.may_exceed(message):
                kept = self.budget.select(self._unclaimed, history.latest_round, history.any_round)
                self.dropped += len(self._unclaimed) - len(kept)
                self._unclaimed = kept

    def start_receive(self, wanted: Filter, wake: Callable[[], None]) -> Waiter:
        """Take the wanted messages that have arrived.

        If messages are still missing, `wake` is called once, when the receive is complete.
        """
        waiter = Waiter(wanted, wake)
        if self._history.start(wanted.kind, wanted.round) and self._unclaimed:
            self._drop_late()
        if self._unclaimed:
            self._unclaimed = [m for m in self._unclaimed if waiter.done or not waiter.offer(m)]
            if self._unclaimed and waiter.messages:
                self._drop_repetitions(waiter)
        if self.failed:
            self._give_up(waiter, self.failed)
        if self._rejoined and wanted.round is not None:
            self._give_up(waiter, [node for node, round in self._rejoined.items() if wanted.round < round])
        if waiter.done:
            self._compact(waiter)
        else:
            self._waiters.append(waiter)
        return waiter

    def receive_available(self, kind: str) -> list[Message]:
        """Take all messages of this kind that have arrived."""
        self._history.start(kind, None)
        found = [m for m in self._unclaimed if m.kind == kind]
        if found:
            self._unclaimed = [m for m in self._unclaimed if m.kind != kind]
        return found

    def end_receive(self, waiter: Waiter) -> None:
        """End a receive that has timed out.

        A missing message that arrives afterwards is unclaimed until a receive for a later round starts; then it is
        late.
        """
        if waiter in self._waiters:
            self._end(waiter)
            self._give_up(waiter, waiter.missing)

    def mark_failed(self, node: NodeId) -> None:
        """Stop waiting for `node`, which has failed."""
        self.failed.add(node)
        self._rejoined.pop(node, None)
        for waiter in list(self._waiters):
            self._give_up(waiter, (node,))
            if waiter.done:
                self._end(waiter)
                waiter.wake()

    def mark_rejoined(self, node: NodeId, round: int) -> None:
        """Wait for `node`, which has rejoined, from `round` on."""
        self.failed.discard(node)
        self._rejoined[node] = round
        self._history.remove(node)
        for waiter in self._waiters:
            waiter.forget(node)

    @property
    def waiting(self) -> list[Waiter]:
        return list(self._waiters)

    def _is_latest(self, message: Message) -> bool:
        """Whether a message is of the latest incarnation of its sender. Drops the messages of earlier incarnations.

        A restarted node has lost its state, so its earlier messages must not be merged with its new ones.
        """
        latest = self._incarnations.get(message.sender, 0)
        if message.incarnation <= latest:
            return message.incarnation == latest
        self._incarnations[message.sender] = message.incarnation
        kept = [m for m in self._unclaimed if m.sender != message.sender]
        self.dropped += len(self._unclaimed) - len(kept)
        self._unclaimed = kept
        return True

    def _drop_late(self) -> None:
        kept = []
        for message in self._unclaimed:
            if self._history.is_late(message):
                self._count_late(message)
            else:
                kept.append(message)
        self._unclaimed = kept

    def _count_late(self, message: Message) -> None:
        self.late += 1
        self.late_from[message.sender] += 1

    def _drop_repetitions(self, waiter: Waiter) -> None:
        """Drop unclaimed repetitions of messages that a receive has taken."""
        kept = [m for m in self._unclaimed if not waiter.has_taken(m)]
        self.repeated += len(self._unclaimed) - len(kept)
        self._unclaimed = kept

    def _end(self, waiter: Waiter) -> None:
        self._waiters.remove(waiter)
        self._compact(waiter)

    def _compact(self, waiter: Waiter) -> None:
        if waiter.one_per_sender and waiter.round is not None:
            self._history.end(waiter.kind, waiter.round, waiter.taken_senders)

    def _give_up(self, waiter: Waiter, nodes: Collection[NodeId]) -> None:
        given_up = waiter.give_up_on(nodes)
        if waiter.round is not None:
            self._history.give_up(waiter.kind, waiter.round, given_up)
