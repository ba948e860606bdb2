"""The receiver's part: find out whose words fit together, have their masks taken off, and add them up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.fixed_point import Words
from shoal.sharing.secure.mask_graph import connected
from shoal.sharing.secure.masks import SEED_BYTES, commitment
from shoal.sharing.secure.messages import (
    HELP,
    HELPED,
    NO_SEAL,
    OF,
    OPEN,
    OPENED,
    OWN,
    PAIRS,
    REFUSED,
    SHARES,
    SPEAKERS,
    Gathering,
    Statement,
    ids,
    naming,
    rows,
    strings,
)
from shoal.types import NodeId

REASON = 200
"""Characters of another node's reason that are written down."""
TRIALS = 1000
"""How many parts of the shares of a secret are tried for one without a forged share."""


@dataclass(frozen=True)
class Sum:
    speakers: tuple[NodeId, ...]
    words: Words


class ClosedError(Exception):
    """The sum stays closed, for this reason."""


def _parts(holders: list[int], count: int) -> Iterator[tuple[int, ...]]:
    """All parts of `count` holders: first the foremost, then with one left out of those and the next put in, and so
    on. So a single forged share is soon left out, whosever it is."""
    for last in range(count - 1, len(holders)):
        for others in itertools.combinations(holders[:last], count - 1):
            yield (*others, holders[last])


class Opening:
    """One receiver in one round."""

    def __init__(self, node: Node, gathering: Gathering, received: Mapping[NodeId, Payload]) -> None:
        self._node = node
        self._gathering = gathering
        self._statements: dict[NodeId, Statement] = {}
        for sender, payload in received.items():
            try:
                self._statements[sender] = Statement.read(payload, len(gathering.partners[sender]))
            except MessageError as error:
                node.reject(sender, str(error))

    async def open(self) -> Sum:
        """Raises `ClosedError`: then no model shows. The seeds of some speakers' own masks may be out by then, but each
        of their models is still under the masks of pairs."""
        speakers = self._consistent()
        if self._gathering.why_not(speakers) is None:
            speakers = self._hidden(speakers)
        if (why := self._gathering.why_not(speakers)) is not None:
            raise ClosedError(why)
        if not connected({one: self._masked_with(one) for one in speakers}, speakers):
            raise ClosedError("some did not mask with others, and parts of the sum would show")
        request = Payload({SPEAKERS: naming(speakers)})
        round = self._gathering.round
        await self._node.send(speakers, request, round=round, kind=OPEN)
        answers = await self._node.receive_each(speakers, round=round, kind=OPENED)
        seeds: dict[NodeId, dict[NodeId, bytes]] = {}
        for speaker, answer in answers.items():
            if isinstance(refused := answer.fields.get(REFUSED), str):
                raise ClosedError(f"node {speaker} does not take off its masks: {refused[:REASON]}")
            try:
                seeds[speaker] = self._seeds(speaker, speakers, answer)
            except MessageError as error:
                self._node.reject(speaker, str(error))
        if silent := [speaker for speaker in speakers if speaker not in seeds]:
            seeds.update(await self._recovered(silent, list(seeds), speakers))
        return Sum(tuple(speakers), self._added(speakers, seeds))

    def _consistent(self) -> list[NodeId]:
        """Those whose words fit together: of each pair both have masked with the other, by the same seed.

        Of two that do not fit, the one goes that fits with fewer of the others: one that has died before others
        masked, one with another's key or an old one, a message of another round.
        """
        left = set(self._statements)
        partners = self._gathering.partners
        unfit = {
            one: {
                other for other in partners[one] if other in left and self._seal(one, other) != self._seal(other, one)
            }
            for one in left
        }
        while any(unfit[one] & left for one in left):
            worst = max(left, key=lambda one: (len(unfit[one] & left), one))
            others = unfit[worst] & left
            named = ", ".join(map(str, sorted(others)))
            if any(NO_SEAL not in (self._seal(worst, other), self._seal(other, worst)) for other in others):
                self._node.reject(worst, f"its masks do not fit those of {named}: another key, or another round")
            else:  # nobody's fault, or not for the receiver to know
                reason = f"node {worst} and {named} have not masked with each other: a key has not come"
                self._node.event("left out of the sum", f"round {self._gathering.round}: {reason}")
            left.discard(worst)
        return sorted(left)

    def _hidden(self, speakers: list[NodeId]) -> list[NodeId]:
        """Those that have masked with enough of the others: the rest would not take off their masks."""
        left = set(speakers)
        while bare := {one for one in left if len(self._masked_with(one) & left) < self._gathering.links_needed}:
            named = ", ".join(map(str, sorted(bare)))
            self._node.event("left out of the sum", f"round {self._gathering.round}: too few mask with {named}")
            left -= bare
        return sorted(left)

    def _masked_with(self, one: NodeId) -> set[NodeId]:
        return {other for other in self._gathering.partners[one] if self._seal(one, other) != NO_SEAL}

    def _seal(self, one: NodeId, other: NodeId) -> bytes:
        """What `one` committed itself to for its mask with `other`."""
        return self._statements[one].seals[1 + self._gathering.partners[one].index(other)]

    def _absent(self, speaker: NodeId, speakers: Iterable[NodeId]) -> list[NodeId]:
        """Those that a speaker has masked with, and whose words are not in the sum."""
        return sorted(self._masked_with(speaker) - set(speakers))

    def _seeds(self, speaker: NodeId, speakers: list[NodeId], answer: Payload) -> dict[NodeId, bytes]:
        """The seeds of the masks that are to be taken off a speaker's words: its own, and of those that are absent."""
        absent = self._absent(speaker, speakers)
        own, pairs = strings(answer, OWN, SEED_BYTES), strings(answer, PAIRS, SEED_BYTES)
        if len(own) != 1 or len(pairs) != len(absent):
            raise MessageError(f"expected its own seed and {len(absent)} others")
        seeds = dict(zip((speaker, *absent), (*own, *pairs), strict=True))
        for other, seed in seeds.items():
            if not self._holds(speaker, other, seed):
                raise MessageError(f"a seed is not the one that it committed itself to (with node {other})")
        return seeds

    def _holds(self, speaker: NodeId, other: NodeId, seed: bytes) -> bool:
        seal = self._statements[speaker].seals[0] if other == speaker else self._seal(speaker, other)
        return commitment(seed, self._gathering.receiver, self._gathering.round) == seal

    async def _recovered(
        self, silent: list[NodeId], helpers: list[NodeId], speakers: list[NodeId]
    ) -> dict[NodeId, dict[NodeId, bytes]]:
        """What those would have said that do not answer any more, from the shares that others hold."""
        gathering, round = self._gathering, self._gathering.round
        asked = {h: [one for one in silent if h in self._masked_with(one)] for h in helpers}
        asked = {helper: of for helper, of in asked.items() if of}

        def request(helper: NodeId) -> Payload:
            sealed = [self._statements[one].shares[gathering.partners[one].index(helper)] for one in asked[helper]]
            return Payload({OF: naming(asked[helper]), SHARES: rows(sealed)})

        await self._node.send(list(asked), request, round=round, kind=HELP)
        answers = await self._node.receive_each(list(asked), round=round, kind=HELPED)
        wanted = {one: [one, *(p for p in gathering.partners[one] if p not in speakers)] for one in silent}
        shares: dict[NodeId, dict[int, shamir.Bytes]] = {one: {} for one in silent}
        for helper, answer in answers.items():
            try:
                said = iter(strings(answer, SHARES, SEED_BYTES))
                for one in ids(answer, OF):
                    if one not in asked[helper]:
                        raise MessageError(f"it was not asked for its shares of what node {one} said")
                    share = list(itertools.islice(said, len(wanted[one])))
                    if len(share) < len(wanted[one]):
                        raise MessageError(f"expected {len(wanted[one])} shares of what node {one} said")
                    shares[one][gathering.partners[one].index(helper)] = rows(share)
            except MessageError as error:
                self._node.reject(helper, str(error))
        return {one: self._combined(one, wanted[one], shares[one]) for one in silent}

    def _combined(self, one: NodeId, wanted: list[NodeId], shares: dict[int, shamir.Bytes]) -> dict[NodeId, bytes]:
        """A node's secrets. Shares may be forged: those that fit with what it committed itself to are not."""
        needed = self._gathering.shares_needed
        for some in itertools.islice(_parts(sorted(shares), needed), TRIALS):
            secret = shamir.combine({holder: shares[holder] for holder in some})
            seeds = {other: bytes(row) for other, row in zip(wanted, secret, strict=True)}
            seeds = {other: seed for other, seed in seeds.items() if other == one or self._seal(one, other) != NO_SEAL}
            if all(self._holds(one, other, seed) for other, seed in seeds.items()):
                if len(some) < len(shares):
                    self._name_forgers(one, secret, shares, some)
                return seeds
        if len(shares) < needed:
            why = f"of the shares of its secrets {len(shares)} came, not {needed}"
        else:
            why = "the shares of its secrets do not fit together: one is forged"
        raise ClosedError(f"node {one} did not take off its masks, and {why}")

    def _name_forgers(
        self, one: NodeId, secret: shamir.Bytes, shares: dict[int, shamir.Bytes], true: tuple[int, ...]
    ) -> None:
        """Refuse shares that are not on the polynomial of those that are true."""
        for holder in shares.keys() - set(true):
            trial = {h: shares[h] for h in (*true[1:], holder)}
            if not np.array_equal(shamir.combine(trial), secret):
                self._node.reject(self._gathering.partners[one][holder], f"a forged share of a secret of node {one}")

    def _added(self, speakers: list[NodeId], seeds: Mapping[NodeId, Mapping[NodeId, bytes]]) -> Words:
        total = np.zeros_like(self._statements[speakers[0]].words)
        for speaker in speakers:
            total += self._statements[speaker].words
            for other, seed in seeds[speaker].items():
                # What was added is taken off: the own mask, and that of a pair by the lower of the two.
                (masks.subtract if speaker <= other else masks.add)(total, seed)
        return total
