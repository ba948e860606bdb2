"""The sender's part after it has sent its update: reveal the seeds that remove its masks, to the receiver alone."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.secure.masks import SEED_BYTES, TAG_BYTES, Keys
from shoal.sharing.secure.messages import (
    INCLUDED,
    KEY_SHARES,
    OWNERS,
    PAIR_SEEDS,
    REFUSAL,
    SELF_SEED,
    SHARES_ANSWER,
    SHARES_REQUEST,
    UNMASK_ANSWER,
    UNMASK_REQUEST,
    ProtocolRound,
    read_node_ids,
    read_rows,
    to_node_ids,
    to_rows,
)
from shoal.types import NodeId

REMEMBERED_ROUNDS = 16
"""The rounds that a node remembers for each receiver. The sums of earlier rounds cannot be unmasked any more. Without a
limit, the memory would grow for a receiver whose sums stay masked."""


@dataclass(frozen=True)
class SentUpdate:
    """What a node remembers of an update, until the receiver asks about a later round."""

    protocol_round: ProtocolRound
    partners: tuple[NodeId, ...]
    """The partners that it masked with."""
    included: tuple[NodeId, ...] | None = None
    """The senders in the sum that it has helped to unmask."""


class UnmaskingResponder:
    """Answers the unmasking requests of all receivers of one node."""

    def __init__(self) -> None:
        self._sent: dict[NodeId, dict[int, SentUpdate]] = {}
        """By receiver and round."""

    def remember(self, protocol_round: ProtocolRound, partners: tuple[NodeId, ...]) -> None:
        """Remember that the node sends an update that is masked with `partners`."""
        sent = self._sent.setdefault(protocol_round.receiver, {})
        sent[protocol_round.round] = SentUpdate(protocol_round, partners)
        while len(sent) > REMEMBERED_ROUNDS:
            del sent[next(iter(sent))]

    @property
    def receivers(self) -> Set[NodeId]:
        """The nodes that may send requests."""
        return self._sent.keys()

    def remembered_rounds(self, receiver: NodeId) -> list[int]:
        """The rounds in which the node sent to `receiver` and still answers its requests. For tests."""
        return list(self._sent.get(receiver, ()))

    async def serve(self, node: Node, keys: Keys) -> None:
        node.background(self._serve_key_shares(node, keys))
        while True:
            request = await node.receive(kind=UNMASK_REQUEST)
            if request is not None:
                answer = self.seeds(node, keys, request)
                await node.send([request.sender], answer, round=request.round, kind=UNMASK_ANSWER)

    async def _serve_key_shares(self, node: Node, keys: Keys) -> None:
        while True:
            request = await node.receive(kind=SHARES_REQUEST)
            if request is not None:
                answer = self.key_shares(node, keys, request)
                await node.send([request.sender], answer, round=request.round, kind=SHARES_ANSWER)

    def seeds(self, node: Node, keys: Keys, request: Message) -> Payload:
        """Return the seed of this node's self mask, and of its pairwise masks with senders that are not in the sum."""
        try:
            sent, included = self._checked(node, request)
        except MessageError as error:
            node.reject(request.sender, str(error))
            return Payload({}, {REFUSAL: str(error)})
        receiver, round = request.sender, request.round
        absent = [partner for partner in sent.partners if partner not in included]
        terms = sent.protocol_round.terms
        pairs = [keys.pair_secrets(partner, terms).seed for partner in absent]
        return Payload({SELF_SEED: to_rows([keys.self_mask_seed(receiver, round)]), PAIR_SEEDS: to_rows(pairs)})

    def _checked(self, node: Node, request: Message) -> tuple[SentUpdate, tuple[NodeId, ...]]:
        """Return the update and the senders in the sum. Raises `MessageError` if the sum must not be unmasked."""
        receiver, round = request.sender, request.round
        sent = self._sent.get(receiver, {}).get(round)
        if sent is None:
            raise MessageError(f"nothing was sent to it in round {round}, or a later sum was unmasked since")
        included = read_node_ids(request.payload, INCLUDED)
        if node.id not in included:
            raise MessageError("this node's update is not in the sum: there is nothing to unmask")
        if (objection := sent.protocol_round.objection(included)) is not None:
            raise MessageError(objection)
        if len(set(sent.partners) & set(included)) < (needed := sent.protocol_round.masks_needed):
            raise MessageError(f"this node has masked with fewer than {needed} of them: its update would be visible")
        if sent.included not in (None, included):
            raise MessageError("another sum of this round was unmasked before: the difference would be visible")
        # A receiver does not ask about earlier rounds again.
        self._sent[receiver] = {r: kept for r, kept in self._sent[receiver].items() if r > round}
        self._sent[receiver][round] = replace(sent, included=included)
        return sent, included

    def key_shares(self, node: Node, keys: Keys, request: Message) -> Payload:
        """Return this node's key shares of senders that have failed since they sent their updates."""
        owners: list[NodeId] = []
        revealed: list[bytes] = []
        try:
            receiver, round = request.sender, request.round
            sent = self._sent.get(receiver, {}).get(round)
            if sent is None or sent.included is None:
                raise MessageError(f"no sum of round {round} was unmasked for it, or a later one was since")
            requested = read_node_ids(request.payload, OWNERS)
            shares = read_rows(
                request.payload, KEY_SHARES, (1 + sent.protocol_round.partner_count) * SEED_BYTES + TAG_BYTES
            )
            if len(shares) != len(requested):
                raise MessageError(f"expected a key share for each of {len(requested)} nodes, not {len(shares)}")
            for owner, encrypted in zip(requested, shares, strict=True):
                if owner not in sent.partners or owner not in sent.included:
                    raise MessageError(f"this node holds no key share of node {owner} for it")
                secrets = keys.pair_secrets(owner, sent.protocol_round.terms)
                plain = secrets.decrypt(encrypted, from_lower=owner < node.id)
                share = [plain[i : i + SEED_BYTES] for i in range(0, len(plain), SEED_BYTES)]
                partners = sent.protocol_round.partners[owner]
                absent = [1 + place for place, other in enumerate(partners) if other not in sent.included]
                owners.append(owner)
                revealed.extend(share[place] for place in (0, *absent))
        except MessageError as error:
            node.reject(request.sender, str(error))
        return Payload({OWNERS: to_node_ids(owners), KEY_SHARES: to_rows(revealed)})
