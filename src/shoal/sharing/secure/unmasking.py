"""The receiver's part: find the updates whose masks match, remove the masks, and return the sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.fixed_point import RingVector
from shoal.sharing.secure.mask_graph import connected
from shoal.sharing.secure.masks import SEED_BYTES, commitment
from shoal.sharing.secure.messages import (
    INCLUDED,
    KEY_SHARES,
    NO_COMMITMENT,
    OWNERS,
    PAIR_SEEDS,
    REFUSAL,
    SELF_SEED,
    SHARES_ANSWER,
    SHARES_REQUEST,
    UNMASK_ANSWER,
    UNMASK_REQUEST,
    MaskedUpdate,
    ProtocolRound,
    read_node_ids,
    read_rows,
    to_node_ids,
    to_rows,
)
from shoal.types import NodeId

REASON_LENGTH = 200
"""The characters of another node's reason that are recorded."""
MAX_SUBSETS = 1000
"""The subsets of key shares that are tried to find one without a forged share."""


@dataclass(frozen=True)
class UnmaskedSum:
    senders: tuple[NodeId, ...]
    values: RingVector


class UnmaskingError(Exception):
    """The sum stays masked, for this reason."""


class Unmasking:
    """The unmasking of one sum, by one receiver in one round."""

    def __init__(self, node: Node, protocol_round: ProtocolRound, received: Mapping[NodeId, Payload]) -> None:
        self._node = node
        self._protocol_round = protocol_round
        self._updates: dict[NodeId, MaskedUpdate] = {}
        for sender, payload in received.items():
            try:
                self._updates[sender] = MaskedUpdate.from_payload(payload, len(protocol_round.partners[sender]))
            except MessageError as error:
                node.reject(sender, str(error))

    async def run(self) -> UnmaskedSum:
        """Return the sum. Raises `UnmaskingError`; then no model is visible to this receiver.

        At that time some senders may have revealed the seeds of their self masks, but pairwise masks still hide each
        of their models.
        """
        included = self._consistent_senders()
        if self._protocol_round.objection(included) is None:
            included = self._hidden_senders(included)
        if (objection := self._protocol_round.objection(included)) is not None:
            raise UnmaskingError(objection)
        if not connected({sender: self._masked_with(sender) for sender in included}, included):
            raise UnmaskingError("some senders did not mask with others, and parts of the sum would be visible")
        request = Payload({INCLUDED: to_node_ids(included)})
        round = self._protocol_round.round
        await self._node.send(included, request, round=round, kind=UNMASK_REQUEST)
        answers = await self._node.receive_each(included, round=round, kind=UNMASK_ANSWER)
        seeds: dict[NodeId, dict[NodeId, bytes]] = {}
        for sender, answer in answers.items():
            if isinstance(refusal := answer.fields.get(REFUSAL), str):
                raise UnmaskingError(f"node {sender} does not unmask its update: {refusal[:REASON_LENGTH]}")
            try:
                seeds[sender] = self._read_seeds(sender, included, answer)
            except MessageError as error:
                self._node.reject(sender, str(error))
        if missing := [sender for sender in included if sender not in seeds]:
            seeds.update(await self._recover_seeds(missing, list(seeds), included))
        return UnmaskedSum(tuple(included), self._sum(included, seeds))

    def _consistent_senders(self) -> list[NodeId]:
        """Return the senders whose updates match: both nodes of each pair have masked with the same seed.

        Of two senders that do not match, the one that matches fewer others is excluded: a node that failed before
        others masked, a node with another node's key or an old key, or a message of another round.
        """
        left = set(self._updates)
        partners = self._protocol_round.partners
        mismatches = {
            one: {
                other
                for other in partners[one]
                if other in left and self._commitment(one, other) != self._commitment(other, one)
            }
            for one in left
        }
        while any(mismatches[one] & left for one in left):
            worst = max(left, key=lambda one: (len(mismatches[one] & left), one))
            others = mismatches[worst] & left
            named = ", ".join(map(str, sorted(others)))
            if any(
                NO_COMMITMENT not in (self._commitment(worst, other), self._commitment(other, worst))
                for other in others
            ):
                self._node.reject(worst, f"its masks do not match those of {named}: another key, or another round")
            else:  # the receiver cannot know which of the two is at fault
                self._report_excluded(f"node {worst} and {named} have not masked with each other: a key is missing")
            left.discard(worst)
        return sorted(left)

    def _hidden_senders(self, senders: list[NodeId]) -> list[NodeId]:
        """Return the senders that have masked with enough of the others. The others would not unmask."""
        left = set(senders)
        needed = self._protocol_round.masks_needed
        while exposed := {one for one in left if len(self._masked_with(one) & left) < needed}:
            self._report_excluded(f"too few partners have masked with {', '.join(map(str, sorted(exposed)))}")
            left -= exposed
        return sorted(left)

    def _report_excluded(self, reason: str) -> None:
        self._node.record_event("excluded from sum", f"round {self._protocol_round.round}: {reason}")

    def _masked_with(self, sender: NodeId) -> set[NodeId]:
        partners = self._protocol_round.partners[sender]
        return {other for other in partners if self._commitment(sender, other) != NO_COMMITMENT}

    def _commitment(self, sender: NodeId, partner: NodeId) -> bytes:
        """Return the commitment of `sender` to the seed of its pairwise mask with `partner`."""
        return self._updates[sender].commitments[1 + self._protocol_round.partners[sender].index(partner)]

    def _absent(self, sender: NodeId, included: Iterable[NodeId]) -> list[NodeId]:
        """Return the nodes that a sender has masked with and whose updates are not in the sum."""
        return sorted(self._masked_with(sender) - set(included))

    def _read_seeds(self, sender: NodeId, included: list[NodeId], answer: Payload) -> dict[NodeId, bytes]:
        """Return the seeds of the masks to remove: the self mask, and pairwise masks with absent nodes."""
        absent = self._absent(sender, included)
        own, pairs = read_rows(answer, SELF_SEED, SEED_BYTES), read_rows(answer, PAIR_SEEDS, SEED_BYTES)
        if len(own) != 1 or len(pairs) != len(absent):
            raise MessageError(f"expected the seed of its self mask and {len(absent)} others")
        seeds = dict(zip((sender, *absent), (*own, *pairs), strict=True))
        for other, seed in seeds.items():
            if not self._matches(sender, other, seed):
                raise MessageError(f"a seed does not match its commitment (with node {other})")
        return seeds

    def _matches(self, sender: NodeId, other: NodeId, seed: bytes) -> bool:
        expected = self._updates[sender].commitments[0] if other == sender else self._commitment(sender, other)
        return commitment(seed, self._protocol_round.receiver, self._protocol_round.round) == expected

    async def _recover_seeds(
        self, missing: list[NodeId], helpers: list[NodeId], included: list[NodeId]
    ) -> dict[NodeId, dict[NodeId, bytes]]:
        """Return the seeds of senders that did not answer, from the key shares that their partners hold."""
        protocol_round, round = self._protocol_round, self._protocol_round.round
        asked = {h: [one for one in missing if h in self._masked_with(one)] for h in helpers}
        asked = {helper: owners for helper, owners in asked.items() if owners}

        def request(helper: NodeId) -> Payload:
            shares = [
                self._updates[one].key_shares[protocol_round.partners[one].index(helper)] for one in asked[helper]
            ]
            return Payload({OWNERS: to_node_ids(asked[helper]), KEY_SHARES: to_rows(shares)})

        await self._node.send(list(asked), request, round=round, kind=SHARES_REQUEST)
        answers = await self._node.receive_each(list(asked), round=round, kind=SHARES_ANSWER)
        wanted = {one: [one, *(p for p in protocol_round.partners[one] if p not in included)] for one in missing}
        shares: dict[NodeId, dict[int, shamir.Bytes]] = {one: {} for one in missing}
        for helper, answer in answers.items():
            try:
                received = iter(read_rows(answer, KEY_SHARES, SEED_BYTES))
                for one in read_node_ids(answer, OWNERS):
                    if one not in asked[helper]:
                        raise MessageError(f"a key share of node {one}, which was not requested")
                    share = list(itertools.islice(received, len(wanted[one])))
                    if len(share) < len(wanted[one]):
                        raise MessageError(f"expected {len(wanted[one])} seeds in the key share of node {one}")
                    shares[one][protocol_round.partners[one].index(helper)] = to_rows(share)
            except MessageError as error:
                self._node.reject(helper, str(error))
        return {one: self._combine_shares(one, wanted[one], shares[one]) for one in missing}

    def _combine_shares(
        self, owner: NodeId, wanted: list[NodeId], shares: dict[int, shamir.Bytes]
    ) -> dict[NodeId, bytes]:
        """Return the secrets of `owner`. Shares may be forged; a subset that matches its commitments is not."""
        needed = self._protocol_round.shares_needed
        for subset in itertools.islice(subsets(sorted(shares), needed), MAX_SUBSETS):
            secret = shamir.combine({holder: shares[holder] for holder in subset})
            seeds = {other: bytes(row) for other, row in zip(wanted, secret, strict=True)}
            seeds = {
                other: seed
                for other, seed in seeds.items()
                if other == owner or self._commitment(owner, other) != NO_COMMITMENT
            }
            if all(self._matches(owner, other, seed) for other, seed in seeds.items()):
                if len(subset) < len(shares):
                    self._reject_forged_shares(owner, secret, shares, subset)
                return seeds
        if len(shares) < needed:
            reason = f"{len(shares)} of its key shares arrived, but {needed} are needed"
        else:
            reason = "its key shares do not fit together: one is forged"
        raise UnmaskingError(f"node {owner} did not unmask its update, and {reason}")

    def _reject_forged_shares(
        self, owner: NodeId, secret: shamir.Bytes, shares: dict[int, shamir.Bytes], genuine: tuple[int, ...]
    ) -> None:
        """Reject the shares that are not on the polynomial of the genuine ones."""
        for holder in shares.keys() - set(genuine):
            trial = {h: shares[h] for h in (*genuine[1:], holder)}
            if not np.array_equal(shamir.combine(trial), secret):
                self._node.reject(self._protocol_round.partners[owner][holder], f"a forged key share of node {owner}")

    def _sum(self, included: list[NodeId], seeds: Mapping[NodeId, Mapping[NodeId, bytes]]) -> RingVector:
        total = np.zeros_like(self._updates[included[0]].values)
        for sender in included:
            total += self._updates[sender].values
            for other, seed in seeds[sender].items():
                # Each sender added its self mask, and the lower node of a pair added the pairwise mask.
                (masks.subtract if sender <= other else masks.add)(total, seed)
        return total


def subsets(holders: list[int], count: int) -> Iterator[tuple[int, ...]]:
    """Yield all subsets of `count` holders.

    The first subset has the first holders; the next ones replace one holder after another. So a single forged share is
    soon left out.
    """
    for last in range(count - 1, len(holders)):
        for others in itertools.combinations(holders[:last], count - 1):
            yield (*others, holders[last])
