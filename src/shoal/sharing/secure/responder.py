"""The speaker's part after its words: hand out what takes its masks off, to those who may ask, and no more."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.secure.masks import SEED_BYTES, TAG_BYTES, Keys
from shoal.sharing.secure.messages import (
    HELP,
    HELPED,
    OF,
    OPEN,
    OPENED,
    OWN,
    PAIRS,
    REFUSED,
    SHARES,
    SPEAKERS,
    Gathering,
    ids,
    naming,
    rows,
    strings,
)
from shoal.types import NodeId

REMEMBERED = 16
"""Rounds in which a receiver was spoken to: of more, the earliest are forgotten, and cannot be opened any longer. One
whose sums stay closed never says that it needs them no more."""


@dataclass(frozen=True)
class Said:
    """What a node remembers of its words to a receiver, until it is asked about a later round."""

    gathering: Gathering
    partners: tuple[NodeId, ...]
    """Those that it masked with."""
    speakers: tuple[NodeId, ...] | None = None
    """Whose words were in the sum that it has helped to open."""


class Answers:
    """One node's, to all who ask it."""

    def __init__(self) -> None:
        self._said: dict[NodeId, dict[int, Said]] = {}

    def remember(self, gathering: Gathering, partners: tuple[NodeId, ...]) -> None:
        """The node speaks to a receiver, and has masked with these."""
        said = self._said.setdefault(gathering.receiver, {})
        said[gathering.round] = Said(gathering, partners)
        while len(said) > REMEMBERED:
            del said[next(iter(said))]

    @property
    def receivers(self) -> Set[NodeId]:
        """Those that may ask."""
        return self._said.keys()

    async def attend(self, node: Node, keys: Keys) -> None:
        node.background(self._help(node, keys))
        while True:
            asked = await node.receive(kind=OPEN)
            if asked is not None:
                await node.send([asked.sender], self.opened(node, keys, asked), round=asked.round, kind=OPENED)

    async def _help(self, node: Node, keys: Keys) -> None:
        while True:
            asked = await node.receive(kind=HELP)
            if asked is not None:
                await node.send([asked.sender], self.helped(node, keys, asked), round=asked.round, kind=HELPED)

    def opened(self, node: Node, keys: Keys, asked: Message) -> Payload:
        """The seeds that take the masks off this node's words, and off the sum those of the absent."""
        try:
            said, speakers = self._agreed(node, asked)
        except MessageError as error:
            node.reject(asked.sender, str(error))
            return Payload({}, {REFUSED: str(error)})
        receiver, round = asked.sender, asked.round
        absent = [p for p in said.partners if p not in speakers]
        pairs = [keys.with_peer(partner, receiver, round).seed for partner in absent]
        return Payload({OWN: rows([keys.own_seed(receiver, round)]), PAIRS: rows(pairs)})

    def _agreed(self, node: Node, asked: Message) -> tuple[Said, tuple[NodeId, ...]]:
        """What was said, and whose words are in the sum. Raises `MessageError` where that must not be opened."""
        said = self._said.get(asked.sender, {}).get(asked.round)
        if said is None:
            raise MessageError(f"nothing was said to it in round {asked.round}, or a later round was opened since")
        speakers = ids(asked.payload, SPEAKERS)
        if node.id not in speakers:
            raise MessageError("this node's words are not in the sum: it has nothing to take off")
        if (why := said.gathering.why_not(speakers)) is not None:
            raise MessageError(why)
        if len(set(said.partners) & set(speakers)) < (needed := said.gathering.links_needed):
            raise MessageError(f"this node has masked with fewer than {needed} of them: its words would show")
        if said.speakers not in (None, speakers):
            raise MessageError("another sum of this round was opened before: their difference would show")
        # What was said in earlier rounds is not asked for any more.
        earlier = self._said[asked.sender]
        self._said[asked.sender] = {r: kept for r, kept in earlier.items() if r > asked.round}
        self._said[asked.sender][asked.round] = Said(said.gathering, said.partners, speakers)
        return said, speakers

    def helped(self, node: Node, keys: Keys, asked: Message) -> Payload:
        """This node's shares of what others, who have died since they spoke, would have handed out."""
        of: list[NodeId] = []
        handed: list[bytes] = []
        try:
            receiver, round = asked.sender, asked.round
            said = self._said.get(receiver, {}).get(round)
            if said is None or said.speakers is None:
                raise MessageError(f"no sum was opened to it in round {round}, or a later one since")
            dealers = ids(asked.payload, OF)
            shares = strings(asked.payload, SHARES, (1 + said.gathering.holders) * SEED_BYTES + TAG_BYTES)
            if len(shares) != len(dealers):
                raise MessageError(f"expected a share for each of {len(dealers)} nodes, not {len(shares)}")
            for dealer, sealed in zip(dealers, shares, strict=True):
                if dealer not in said.partners or dealer not in said.speakers:
                    raise MessageError(f"there is no share here of what node {dealer} said to it")
                plain = keys.with_peer(dealer, receiver, round).unseal(sealed, from_lower=dealer < node.id)
                share = [plain[i : i + SEED_BYTES] for i in range(0, len(plain), SEED_BYTES)]
                partners = said.gathering.partners[dealer]
                absent = [1 + place for place, other in enumerate(partners) if other not in said.speakers]
                of.append(dealer)
                handed.extend(share[place] for place in (0, *absent))
        except MessageError as error:
            node.reject(asked.sender, str(error))
        return Payload({OF: naming(of), SHARES: rows(handed)})
