"""How much a node keeps of what has come to it and nobody has asked for yet, and what goes when it is too much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from shoal.message import Message, Scalar
from shoal.types import NodeId


class MessageBudget:
    """How much of what has come and nobody has asked for yet is kept in memory, and what goes when it is more.

    There is room for `AHEAD` usual messages of each node, and of some nodes more, so that those who are ahead of their
    time find it, wherever they are in the graph. A usual message is as long as the model, or as the longest that the
    node has sent itself. When that is exceeded, those who have taken most of it lose what is asked for last, if ever:
    first messages of kinds that nobody has asked for so far, then by how the node asks for a kind. If by rounds, it
    comes to the lowest first. If without, as when it collects all that has come, the newest counts, and replaces what
    was said before it. So whoever fills a mailbox, with rounds far ahead or with words that nobody knows, takes nothing
    from the others; and each keeps one.

    Before a node asks for a kind, nobody knows how it will: it may be busy with its first training while others are
    hundreds of rounds ahead. Then the lowest and the newest are kept, in turn, and those between them go. So no
    algorithm has to say beforehand how it is going to ask, and what it asks for first is there.
    """

    AHEAD = 2
    SPARE = 64
    """So many nodes more."""
    BESIDE = 2**16
    """Bytes of small messages beside each large one."""
    EACH = 2**13
    """Bytes of memory that a message may take, however short it is."""
    MOST = 100_000
    """Messages in all: each takes that part of the room at the least."""

    def __init__(self, usual: int, nodes: int) -> None:
        self._usual = usual
        self._nodes = nodes
        self._taken = 0
        """By all that was put in since there was last a look at what is left."""

    def expect(self, size: int) -> None:
        """Messages of so many bytes are usual here."""
        self._usual = max(self._usual, size)

    @property
    def size(self) -> int:
        return (self._nodes + self.SPARE) * self.AHEAD * (self._usual + self.BESIDE)

    def seems_full(self, message: Message) -> bool:
        """Whether it may be too much with one more; `kept` has the answer."""
        self._taken += self._cost(message)
        return self._taken > self.size

    def kept(
        self, unclaimed: Sequence[Message], by_round: Collection[str], any_round: Collection[str] = ()
    ) -> list[Message]:
        """Those that stay, in order. So far kinds were asked for by their rounds, without a round, or in both ways."""
        costs = [self._cost(message) for message in unclaimed]
        places: dict[NodeId, list[int]] = {}
        for place, message in enumerate(unclaimed):
            places.setdefault(message.sender, []).append(place)
        sizes = {sender: sum(costs[place] for place in own) for sender, own in places.items()}
        self._taken = sum(sizes.values())
        if self._taken <= self.size:
            # Lest all be looked through for every message that comes and is claimed at once. A sixteenth more may come.
            self._taken = min(self._taken, self.size * 15 // 16)
            return list(unclaimed)
        share = self._share(sorted(sizes.values()))
        kept = set()
        self._taken = 0
        for sender, own in places.items():
            taken = 0
            if sizes[sender] > share:
                own = _by_turns(unclaimed, own, by_round, any_round)
            for place in own:
                if not taken or taken + costs[place] <= share:
                    taken += costs[place]
                    kept.add(place)
            self._taken += taken
        return [message for place, message in enumerate(unclaimed) if place in kept]

    def _share(self, sizes: list[int]) -> int:
        """What each may have, if nobody is to have more than that: all have less, or there is some room left then.

        That is an eighth, lest all be looked through for every message that comes. But everybody may have `AHEAD`
        usual messages, for which there is room, however many nodes there are.
        """
        left = self.size * 7 // 8
        for place, size in enumerate(sizes):
            share = left // (len(sizes) - place)
            if size > share:
                return max(share, self.AHEAD * (self._usual + self.BESIDE))
            left -= size
        return sizes[-1]

    def _cost(self, message: Message) -> int:
        return max(message.wire_size + self.EACH, self.size // self.MOST)


def _by_turns(
    unclaimed: Sequence[Message], places: list[int], by_round: Collection[str], any_round: Collection[str]
) -> list[int]:
    """The places of one sender's messages, those first that a node will want first."""
    rising = sorted(places, key=lambda place: unclaimed[place].round)
    turns = dict.fromkeys(rising, len(places))
    for order, these, others in (
        (rising, by_round, any_round),
        (_newest_first(unclaimed, rising), any_round, by_round),
    ):
        of_kind: defaultdict[str, Iterator[int]] = defaultdict(count)
        for place in order:
            kind = unclaimed[place].kind
            if kind in these or kind not in others:  # if in neither, it has a turn in both
                turns[place] = min(turns[place], next(of_kind[kind]))

    def turn(place: int) -> tuple[bool, int]:
        kind = unclaimed[place].kind
        return kind not in by_round and kind not in any_round, turns[place]

    return sorted(rising, key=turn)


def _newest_first(unclaimed: Sequence[Message], rising: list[int]) -> list[int]:
    """The same places: what nothing newer replaces, then what one newer message does, and so on; of these the newest.

    A message replaces another of its kind that has the same fields. So where a model is sent in fragments, the newest
    of each fragment is kept, though some come more often than others.
    """
    replaced: dict[int, int] = {}
    newer: defaultdict[tuple[str, frozenset[tuple[str, Scalar]]], Iterator[int]] = defaultdict(count)
    for place in reversed(rising):
        what = unclaimed[place].kind, frozenset(unclaimed[place].payload.fields.items())
        replaced[place] = next(newer[what])
    return sorted(replaced, key=replaced.__getitem__)
