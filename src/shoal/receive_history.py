"""What the receives of one node have asked for and taken, so that it is known which messages are repeated or late."""

from __future__ import annotations

from collections.abc import Collection

from shoal.message import Message
from shoal.types import NodeId


class ReceiveHistory:
    """The receives of one node so far."""

    __slots__ = ("_forgotten", "_given_up", "_last_senders", "_limit", "_senders", "any_round", "latest_round")

    def __init__(self, limit: int) -> None:
        """`limit`: how many combinations of kind and round it remembers the senders of."""
        self.latest_round: dict[str, int] = {}
        """The latest round of each kind that a receive has asked for."""
        self.any_round: set[str] = set()
        """The kinds that receives have asked for without a round."""
        self._limit = limit
        self._senders: dict[tuple[str, int], tuple[NodeId, ...]] = {}
        """By kind and round: the senders whose one message was taken. Receives with equal senders share one tuple,
        which saves memory with many nodes."""
        self._last_senders: tuple[NodeId, ...] = ()
        """The senders of the receive that ended last."""
        self._forgotten: dict[str, int] = {}
        """For each kind: the highest round whose senders are not remembered any more."""
        self._given_up: dict[tuple[str, NodeId], int] = {}
        """By kind and sender: the highest round in which a receive ended without a message from this sender."""

    def start(self, kind: str, round: int | None) -> bool:
        """Note what a receive asks for. Returns whether unclaimed messages may be late from now on."""
        if round is None:
            self.any_round.add(kind)
            return False
        if round <= self.latest_round.get(kind, -1):
            return False
        self.latest_round[kind] = round
        return bool(self._given_up)

    def give_up(self, kind: str, round: int, senders: Collection[NodeId]) -> None:
        """Note that a receive ends without messages from `senders`."""
        for node in senders:
            self._given_up[kind, node] = max(round, self._given_up.get((kind, node), -1))

    def end(self, kind: str, round: int, senders: tuple[NodeId, ...]) -> None:
        """Note that a receive of one message per sender has ended, and took the messages of `senders`."""
        if not senders:
            return
        key = kind, round
        if (known := self._senders.get(key)) is not None:
            senders = tuple(sorted({*known, *senders}))
        if senders != self._last_senders:
            self._last_senders = senders
        self._senders[key] = self._last_senders
        if len(self._senders) > self._limit:
            kind, round = first = next(iter(self._senders))
            del self._senders[first]
            self._forgotten[kind] = max(round, self._forgotten.get(kind, -1))

    def remove(self, node: NodeId) -> None:
        """Forget what was received from a node that has lost its state: its new messages do not repeat the old ones."""
        for key, known in self._senders.items():
            if node in known:
                self._senders[key] = tuple(sender for sender in known if sender != node)

    def is_repeated(self, message: Message) -> bool:
        """Whether a receive that has ended took the one message of this kind and round from the same sender."""
        return bool(self._senders) and message.sender in self._senders.get((message.kind, message.round), ())

    def is_late(self, message: Message) -> bool:
        """Whether the receive of this message has ended and a later round has been asked for."""
        if not self._given_up:
            return False
        given_up = self._given_up.get((message.kind, message.sender), -1)
        return message.round <= given_up and message.round < self.latest_round.get(message.kind, -1)

    def is_forgotten(self, message: Message) -> bool:
        """Whether the message is for a round whose senders are not remembered any more."""
        return bool(self._forgotten) and message.round <= self._forgotten.get(message.kind, -1)
