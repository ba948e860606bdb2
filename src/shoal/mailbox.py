"""What a receive means: the messages of one node, and which of its tasks waits for which of them.

Both engines use `Mailbox`, so that a receive means the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from shoal.message import Message
from shoal.message_budget import MessageBudget
from shoal.types import NodeId


class Filter(msgspec.Struct, frozen=True, gc=False):
    """Which messages a receive waits for.

    With `senders`, one message from each of them, or with `first` one from any of them; without, one message from
    anyone. `round` None is any round. One message from each for a round is all that there is to say of this kind in it:
    when a sender's has been received so, another of the same kind and round is a repetition, and is dropped.
    """

    kind: str
    round: int | None = None
    senders: tuple[NodeId, ...] | None = None
    first: bool = False
    more: bool = False
    """Whether a sender may have more to say of this kind in a round, and the next of it is wanted."""

    @property
    def once(self) -> bool:
        """Whether a second message of a sender would be a repetition."""
        return self.round is not None and self.senders is not None and not self.first and not self.more

    def __str__(self) -> str:
        which = f"{self.kind!r}" if self.round is None else f"{self.kind!r} of round {self.round}"
        if self.senders is None:
            return f"{which} from anyone"
        return f"{which} from {'any of ' if self.first else ''}{', '.join(str(s) for s in self.senders)}"


class Waiter:
    """A receive under way."""

    __slots__ = ("_missing", "kind", "messages", "once", "round", "wake", "wanted")

    def __init__(self, wanted: Filter, wake: Callable[[], None]) -> None:
        self.wanted = wanted
        self.kind = wanted.kind
        self.round = wanted.round
        self.once = wanted.once
        self.messages: list[Message] = []
        self.wake = wake
        self._missing = None if wanted.senders is None else set(wanted.senders)

    def offer(self, message: Message) -> bool:
        """Take `message` if it is wanted."""
        if message.kind != self.kind or (self.round is not None and message.round != self.round):
            return False
        if self._missing is None:
            if self.messages:
                return False
        elif message.sender in self._missing:
            if self.wanted.first:
                self._missing.clear()
            else:
                self._missing.remove(message.sender)
        else:
            return False
        self.messages.append(message)
        return True

    def give_up_on(self, nodes: Collection[NodeId]) -> set[NodeId]:
        """Stop waiting for `nodes`; returns those that were waited for."""
        given_up = self._missing.intersection(nodes) if self._missing else set()
        if self._missing is not None:
            self._missing -= given_up
        return given_up

    @property
    def missing(self) -> list[NodeId]:
        return sorted(self._missing or ())

    @property
    def done(self) -> bool:
        return bool(self.messages) if self._missing is None else not self._missing


class Mailbox:
    """The messages of one node that nobody has asked for yet, and the receives that wait for more."""

    LIMIT = 100_000
    """The most unclaimed messages kept without a `MessageBudget`; more are dropped and counted in `dropped`."""
    REMEMBERED = 16
    """Of how many rounds, each of one kind, it is known who was heard; what comes for those before them is late."""

    def __init__(self, budget: MessageBudget | None = None) -> None:
        """Without `budget` for what nobody has asked for, there is a limit to its number only."""
        self.budget = budget
        self.failed: set[NodeId] = set()
        self.late = 0
        """Messages that came after the receive that wanted them had given up."""
        self.dropped = 0
        """Messages that nobody had asked for, and for which there was no room."""
        self.repeated = 0
        """Messages that had been received before: of the same sender, kind and round."""
        self._unclaimed: list[Message] = []
        self._waiters: list[Waiter] = []
        self._given_up: dict[tuple[str, NodeId], int] = {}
        """The latest round in which a receive of this kind went on without this sender."""
        self._back: dict[NodeId, int] = {}
        """Those that died and came back: from which round on they are waited for."""
        self._asked: dict[str, int] = {}
        """The latest round that a message of this kind was asked for."""
        self._heard: dict[tuple[str, int], set[NodeId] | tuple[NodeId, ...]] = {}
        """Whose one message of a kind and a round has been received. A tuple when the receive is over: it takes a tenth
        of a set's memory, and nothing where the same were heard before, which counts where nodes are many."""
        self._heard_last: tuple[NodeId, ...] = ()
        """Those of the receive that was over last."""
        self._over: dict[str, int] = {}
        """The latest round of a kind that is no longer remembered."""
        self._any_round: set[str] = set()
        """The kinds that were asked for without a round."""

    def put(self, message: Message) -> None:
        """Deliver a message; wakes the receive that it completes."""
        if self._heard and message.sender in self._heard.get((message.kind, message.round), ()):
            self.repeated += 1
            return
        for waiter in self._waiters:
            if waiter.offer(message):
                if waiter.once:
                    self._remember(message)
                if waiter.done:
                    self._end(waiter)
                    waiter.wake()
                return
        if self._is_over(message) or (self._given_up and self._is_late(message)):
            self.late += 1
        elif self.budget is None and len(self._unclaimed) >= self.LIMIT:
            self.dropped += 1
        else:
            self._unclaimed.append(message)
            if self.budget is not None and self.budget.seems_full(message):
                kept = self.budget.kept(self._unclaimed, self._asked, self._any_round)
                self.dropped += len(self._unclaimed) - len(kept)
                self._unclaimed = kept

    def ask(self, wanted: Filter, wake: Callable[[], None]) -> Waiter:
        """Claim what is here. If the waiter is not `done` by then, `wake` is called once when it is."""
        waiter = Waiter(wanted, wake)
        if wanted.round is None:
            self._any_round.add(wanted.kind)
        elif wanted.round > self._asked.get(wanted.kind, -1):
            self._asked[wanted.kind] = wanted.round
            if self._given_up and self._unclaimed:
                kept = [m for m in self._unclaimed if not self._is_late(m)]
                self.late += len(self._unclaimed) - len(kept)
                self._unclaimed = kept
        if self._unclaimed:
            self._unclaimed = [m for m in self._unclaimed if waiter.done or not waiter.offer(m)]
            if waiter.once and waiter.messages:
                self._remember_all(waiter.messages)
        if self.failed:
            self._give_up(waiter, self.failed)
        if self._back and wanted.round is not None:
            self._give_up(waiter, [node for node, round in self._back.items() if wanted.round < round])
        if waiter.done:
            self._keep_heard(waiter)
        else:
            self._waiters.append(waiter)
        return waiter

    def collect(self, kind: str) -> list[Message]:
        """Claim all that is here of this kind."""
        self._any_round.add(kind)
        found = [m for m in self._unclaimed if m.kind == kind]
        if found:
            self._unclaimed = [m for m in self._unclaimed if m.kind != kind]
        return found

    def withdraw(self, waiter: Waiter) -> None:
        """End a receive whose time is up. What it still wanted is late once a later round is asked for."""
        if waiter in self._waiters:
            self._end(waiter)
            self._give_up(waiter, waiter.missing)

    def mark_failed(self, node: NodeId) -> None:
        """`node` has died: nobody waits for it any longer."""
        self.failed.add(node)
        self._back.pop(node, None)
        for waiter in list(self._waiters):
            self._give_up(waiter, (node,))
            if waiter.done:
                self._end(waiter)
                waiter.wake()

    def mark_rejoined(self, node: NodeId, round: int) -> None:
        """`node` is back: it is waited for again from `round` on."""
        self.failed.discard(node)
        self._back[node] = round
        for what, heard in self._heard.items():
            if node in heard:  # it knows nothing of what it said before
                self._heard[what] = tuple(sender for sender in heard if sender != node)

    @property
    def waiting(self) -> list[Waiter]:
        return list(self._waiters)

    def _end(self, waiter: Waiter) -> None:
        self._waiters.remove(waiter)
        self._keep_heard(waiter)

    def _keep_heard(self, waiter: Waiter) -> None:
        """The receive is over. Who was heard in it is kept, in less memory."""
        if not waiter.once or waiter.round is None:
            return
        heard = self._heard.get((waiter.kind, waiter.round))
        if isinstance(heard, set):
            senders = tuple(sorted(heard))
            if senders != self._heard_last:
                self._heard_last = senders
            self._heard[waiter.kind, waiter.round] = self._heard_last

    def _give_up(self, waiter: Waiter, nodes: Collection[NodeId]) -> None:
        given_up = waiter.give_up_on(nodes)
        if waiter.round is not None:
            for node in given_up:
                self._given_up[waiter.kind, node] = max(waiter.round, self._given_up.get((waiter.kind, node), -1))

    def _remember_all(self, messages: list[Message]) -> None:
        """`messages` of one kind and round have been received: what repeats them is no longer wanted."""
        for message in messages:
            self._remember(message)
        kind, round = messages[0].kind, messages[0].round
        heard = self._heard[kind, round]
        kept = [m for m in self._unclaimed if m.round != round or m.kind != kind or m.sender not in heard]
        self.repeated += len(self._unclaimed) - len(kept)
        self._unclaimed = kept

    def _remember(self, message: Message) -> None:
        """`message` has been received where one of its sender's was wanted."""
        heard = self._heard.get((message.kind, message.round))
        if isinstance(heard, set):
            heard.add(message.sender)
            return
        self._heard[message.kind, message.round] = {message.sender, *(heard or ())}
        if len(self._heard) > self.REMEMBERED:
            kind, round = next(iter(self._heard))
            del self._heard[kind, round]
            self._over[kind] = max(round, self._over.get(kind, -1))

    def _is_over(self, message: Message) -> bool:
        """Whether the message is for a round so long ago that nobody knows who was heard in it."""
        return bool(self._over) and message.round <= self._over.get(message.kind, -1)

    def _is_late(self, message: Message) -> bool:
        """Whether the node gave up on this message, and has gone on to a later round."""
        given_up = self._given_up.get((message.kind, message.sender), -1)
        return message.round <= given_up and message.round < self._asked.get(message.kind, -1)
