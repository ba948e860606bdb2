"""The memory budget for unclaimed messages: how much a node keeps, and which messages it drops first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from shoal.message import Message, Scalar
from shoal.types import NodeId


class MessageBudget:
    """The memory for messages that have arrived and that no receive has asked for yet.

    The budget holds `MESSAGES_PER_NODE` typical messages of each node, and of `EXTRA_NODES` nodes more, so that nodes
    that are ahead do not lose messages, wherever they are in the graph. A typical message has the size of the model, or
    of the longest message that this node has sent.

    When the budget is exceeded, the senders that use the most memory lose their lowest-priority messages first. So a
    sender that fills a mailbox, with far rounds or unknown kinds, takes nothing from the others, and every sender keeps
    at least one message. Priorities:

    1. Kinds that the node has asked for come before kinds that it has not asked for.
    2. If it asks for a kind by round, low rounds come first, because it asks for them first.
    3. If it asks for a kind without a round, new messages come first, because they replace old ones.
    4. If it has not asked for the kind yet, it may do either: during its first training, other nodes may already be
       hundreds of rounds ahead. Then the lowest rounds and the newest messages are kept, in turn.
    """

    MESSAGES_PER_NODE = 2
    EXTRA_NODES = 64
    SMALL_MESSAGES = 2**16
    """Bytes of small messages for each typical message."""
    OVERHEAD = 2**13
    """Bytes of memory that a message needs in addition to its wire size, at most."""
    MAX_MESSAGES = 100_000
    """The most messages: each counts as at least 1 / `MAX_MESSAGES` of the budget."""

    def __init__(self, typical: int, nodes: int) -> None:
        """`typical`: the bytes of a typical message."""
        self._typical = typical
        self._nodes = nodes
        self._used = 0
        """An upper bound: messages that were taken count until the next `select`."""

    def expect(self, size: int) -> None:
        """Raise the size of a typical message to `size` bytes."""
        self._typical = max(self._typical, size)

    @property
    def size(self) -> int:
        """The budget in bytes."""
        return (self._nodes + self.EXTRA_NODES) * self.MESSAGES_PER_NODE * (self._typical + self.SMALL_MESSAGES)

    def may_exceed(self, message: Message) -> bool:
        """Count one more message. Returns whether the budget may be exceeded; then call `select`."""
        self._used += self._cost(message)
        return self._used > self.size

    def select(
        self, unclaimed: Sequence[Message], by_round: Collection[str], any_round: Collection[str] = ()
    ) -> list[Message]:
        """Return the messages to keep, in order.

        `by_round` and `any_round` are the kinds that the node has asked for so far, by round and without a round.
        """
        costs = [self._cost(message) for message in unclaimed]
        places: dict[NodeId, list[int]] = {}
        for place, message in enumerate(unclaimed):
            places.setdefault(message.sender, []).append(place)
        sizes = {sender: sum(costs[place] for place in own) for sender, own in places.items()}
        self._used = sum(sizes.values())
        if self._used <= self.size:
            # Leave a margin of one sixteenth: this scan must not run for every message in a nearly full mailbox.
            self._used = min(self._used, self.size * 15 // 16)
            return list(unclaimed)
        quota = self._quota(sorted(sizes.values()))
        kept = set()
        self._used = 0
        for sender, own in places.items():
            used = 0
            if sizes[sender] > quota:
                own = _by_priority(unclaimed, own, by_round, any_round)
            for place in own:
                if not used or used + costs[place] <= quota:
                    used += costs[place]
                    kept.add(place)
            self._used += used
        return [message for place, message in enumerate(unclaimed) if place in kept]

    def _quota(self, sizes: list[int]) -> int:
        """Return the bytes that each sender may use, from the ascending `sizes` that senders use now.

        The quota is such that senders below it keep all their messages and the others share the rest. One eighth of the
        budget stays free, so that the scan does not run for every message. The quota is never below
        `MESSAGES_PER_NODE` typical messages: the budget holds these for any number of nodes.
        """
        left = self.size * 7 // 8
        for place, size in enumerate(sizes):
            quota = left // (len(sizes) - place)
            if size > quota:
                return max(quota, self.MESSAGES_PER_NODE * (self._typical + self.SMALL_MESSAGES))
            left -= size
        return sizes[-1]

    def _cost(self, message: Message) -> int:
        return max(message.wire_size + self.OVERHEAD, self.size // self.MAX_MESSAGES)


def _by_priority(
    unclaimed: Sequence[Message], places: list[int], by_round: Collection[str], any_round: Collection[str]
) -> list[int]:
    """Return the places of one sender's messages, in order of priority."""
    ascending = sorted(places, key=lambda place: unclaimed[place].round)
    ranks = dict.fromkeys(ascending, len(places))
    for order, these, others in (
        (ascending, by_round, any_round),
        (_newest_first(unclaimed, ascending), any_round, by_round),
    ):
        rank_in_kind: defaultdict[str, Iterator[int]] = defaultdict(count)
        for place in order:
            kind = unclaimed[place].kind
            if kind in these or kind not in others:  # a kind that was not asked for has a rank in both orders
                ranks[place] = min(ranks[place], next(rank_in_kind[kind]))

    def priority(place: int) -> tuple[bool, int]:
        kind = unclaimed[place].kind
        return kind not in by_round and kind not in any_round, ranks[place]

    return sorted(ascending, key=priority)


def _newest_first(unclaimed: Sequence[Message], ascending: list[int]) -> list[int]:
    """Return the same places: first messages that no newer one replaces, then messages that one replaces, and so on.

    A message replaces another one of its kind with the same fields. So if a model is sent in fragments, the newest
    message of each fragment is kept, even if some fragments arrive more often than others.
    """
    replaced: dict[int, int] = {}
    newer: defaultdict[tuple[str, frozenset[tuple[str, Scalar]]], Iterator[int]] = defaultdict(count)
    for place in reversed(ascending):
        what = unclaimed[place].kind, frozenset(unclaimed[place].payload.fields.items())
        replaced[place] = next(newer[what])
    return sorted(replaced, key=replaced.__getitem__)
