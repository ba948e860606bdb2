"""Attacks on secure aggregation by nodes that follow the protocol and collude, and by an eavesdropper on plain links.

`read_by` computes which models colluders can read. They know

- the sums that they have received: each is a linear equation in the models of its senders;
- shares of the secrets of these senders. With enough shares of a sender they reconstruct its secrets. They then know
  all its masks, read its model from its update, and the rest of the sum may fall apart into several equations.

Each round has its own equations, because all models change between two rounds. A model is counted as read if the
equations determine it: if its unit vector is in their row space. This is computed with fractions, without rounding.

`attack` does it: from the messages of a simulated run it decrypts shares, removes masks and solves the equations.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, TypeAlias
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from shoal import Experiment
from shoal.engines.simulation.world import SimulatedRuntime
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.messages import (
    SELF_SEED,
    UNMASK_ANSWER,
    VALUES,
    MaskedUpdate,
    ProtocolRound,
    describe_content,
)
from shoal.sharing.secure.secure import Secure
from shoal.types import NodeId, Params

Nodes: TypeAlias = frozenset[NodeId]


# What colluders know


def read_by(protocol_rounds: Iterable[ProtocolRound], colluders: Collection[NodeId]) -> Nodes:
    """Return the other nodes whose models the colluders read, if all updates are in the sums of these receivers.

    All weights of a sum must be equal, as on a regular graph.
    """
    return determined(members for one in protocol_rounds for members in known_sums(one, colluders))


def known_sums(protocol_round: ProtocolRound, colluders: Collection[NodeId]) -> Iterator[Nodes]:
    """Yield the sets of other senders whose weighted sums the colluders learn from the sum of all senders."""
    if protocol_round.receiver not in colluders:
        return
    recovered = recovered_senders(protocol_round, colluders)
    yield from (frozenset({sender}) for sender in recovered)
    left = set(protocol_round.senders) - set(colluders) - recovered
    while left:  # nodes that masks link, which the colluders do not know
        found, reached = set(), [left.pop()]
        while reached:
            sender = reached.pop()
            found.add(sender)
            linked = left & set(protocol_round.partners[sender])
            left -= linked
            reached += linked
        yield frozenset(found)


def recovered_senders(protocol_round: ProtocolRound, colluders: Collection[NodeId]) -> Nodes:
    """Return the other senders whose secrets the colluders can reconstruct from their key shares."""
    return frozenset(
        sender
        for sender, partners in protocol_round.partners.items()
        if sender not in colluders and len(set(partners) & set(colluders)) >= protocol_round.shares_needed
    )


def determined(sums: Iterable[Nodes]) -> Nodes:
    """Return the nodes whose models follow from these sums of models, by exact elimination."""
    reduced: dict[NodeId, dict[NodeId, Fraction]] = {}
    """The rows of a matrix in reduced row echelon form, by the column of their pivot."""
    for members in set(sums):
        row = dict.fromkeys(members, Fraction(1))
        for pivot in [node for node in row if node in reduced]:
            _subtract(row, reduced[pivot], row[pivot])
        if not row:
            continue
        pivot = min(row)
        row = {node: value / row[pivot] for node, value in row.items()}
        for other in reduced.values():
            if pivot in other:
                _subtract(other, row, other[pivot])
        reduced[pivot] = row
    return frozenset(pivot for pivot, row in reduced.items() if len(row) == 1)


def _subtract(row: dict[NodeId, Fraction], other: Mapping[NodeId, Fraction], factor: Fraction) -> None:
    for node, value in other.items():
        row[node] = row.get(node, Fraction(0)) - factor * value
        if not row[node]:
            del row[node]


# Attacks on a run


class Observed(Secure):
    """Secure aggregation that gives access to its nodes and models."""

    nodes: ClassVar[dict[NodeId, Node]] = {}
    """The nodes of the latest run."""
    model: Params
    """The model that the node has sent."""

    def outgoing(self, params: Params, round: int) -> Callable[[NodeId], Payload]:
        self.model = np.array(params)
        return super().outgoing(params, round)

    async def before_send(self, node: Node, to: Any, round: int) -> Any:
        self.nodes[node.id] = node
        return await super().before_send(node, to, round)


class AttackedRun:
    """A simulated run of one round, without failures, with the messages that its nodes sent to each other."""

    def __init__(self, settings: Mapping[str, Any], **options: Any) -> None:
        """Run an experiment with these settings, and with secure aggregation with these options."""
        self._options = Observed(**options)
        self._codec = FixedPoint(self._options.bits, self._options.range)
        self._updates: dict[tuple[NodeId, NodeId], Payload] = {}
        """By sender and receiver."""
        self._answers: dict[tuple[NodeId, NodeId], Payload] = {}
        kept = {"model": self._updates, UNMASK_ANSWER: self._answers}
        send = SimulatedRuntime.send

        async def record(runtime: SimulatedRuntime, to: NodeId, message: Message) -> bool:
            if message.kind in kept:
                kept[message.kind][message.sender, to] = message.payload
            return await send(runtime, to, message)

        Observed.nodes = {}
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(SimulatedRuntime, "send", record):
            Experiment(**settings, algorithm={"name": "dpsgd", "rounds": 1}, sharing=self._options).run(folder)
        self.nodes = Observed.nodes

    def model(self, node: NodeId) -> Params:
        """Return the model that a node has sent, to compare it with the result of an attack."""
        model: Params = self.nodes[node].sharing.model  # type: ignore[attr-defined]
        return model

    def weights(self, receiver: NodeId) -> Mapping[NodeId, float]:
        return self.nodes[receiver].mixing.peers(receiver, 0).weights

    def protocol_round(self, receiver: NodeId) -> ProtocolRound:
        """Return the protocol round of a receiver, as each of its senders computes it."""
        weights, options = self.weights(receiver), self._options
        content = describe_content(self._codec, weights, None)
        seed = self.nodes[receiver].seed
        return ProtocolRound(receiver, 0, tuple(weights), options.partners, options.threshold, seed, content)

    def sum(self, receiver: NodeId, members: Nodes, colluders: Collection[NodeId]) -> NDArray[np.float64]:
        """Return the weighted sum of the models of `members`, from messages to `receiver` and keys of colluders.

        Masks between members cancel. The colluders must know all other masks of members.
        """
        protocol_round = self.protocol_round(receiver)
        total = np.zeros_like(next(iter(self._updates.values())).arrays[VALUES])
        for member in members:
            total += self._updates[member, receiver].arrays[VALUES]
            masks.subtract(total, self._answers[member, receiver].arrays[SELF_SEED].tobytes())
            for partner in set(protocol_round.partners[member]) - members:
                seed = self._pair_seed(protocol_round, member, partner, colluders)
                (masks.subtract if member < partner else masks.add)(total, seed)
        return self._codec.decode(total)

    def _pair_seed(
        self, protocol_round: ProtocolRound, one: NodeId, other: NodeId, colluders: Collection[NodeId]
    ) -> bytes:
        """Return the seed of a pairwise mask, from the keys of colluders."""
        if other in colluders:
            return self._keys(other).pair_secrets(one, protocol_round.terms).seed
        owner, partner = (one, other) if one in recovered_senders(protocol_round, colluders) else (other, one)
        partners = protocol_round.partners[owner]
        update = self._updates[owner, protocol_round.receiver]
        encrypted = MaskedUpdate.from_payload(update, len(partners)).key_shares
        shares = {}
        for place, holder in enumerate(partners):
            if holder in colluders and len(shares) < protocol_round.shares_needed:
                pair = self._keys(holder).pair_secrets(owner, protocol_round.terms)
                plain = pair.decrypt(encrypted[place], from_lower=owner < holder)
                shares[place] = np.frombuffer(plain, np.uint8).reshape(-1, masks.SEED_BYTES)
        return bytes(shamir.combine(shares)[1 + partners.index(partner)])

    def _keys(self, node: NodeId) -> masks.Keys:
        keys: masks.Keys = self.nodes[node].sharing.key_exchange.keys(self.nodes[node])  # type: ignore[attr-defined]
        return keys


@dataclass(frozen=True)
class Attack:
    """The models that an attacker computes, compared with the real ones."""

    read: Nodes
    """The nodes whose models are determined by what the attacker knows."""
    errors: Mapping[NodeId, float]
    """The largest error of a value in the model of each node that does not collude."""

    @property
    def error(self) -> float:
        """The largest error in the models that are read."""
        return max((self.errors[node] for node in self.read), default=0.0)

    @property
    def least_error_of_others(self) -> float:
        """The largest error in the model that is closest to the real one, of those that are not read."""
        return min((error for node, error in self.errors.items() if node not in self.read), default=np.inf)


def attack(run: AttackedRun, colluders: Collection[NodeId] | None = None) -> Attack:
    """Solve all known sums for the models of the other nodes; without colluders, as an eavesdropper on all links."""
    hidden = sorted(run.nodes.keys() - set(colluders or ()))
    rows, values, sums = [], [], []
    for receiver in sorted(run.nodes if colluders is None else colluders):
        protocol_round, weights = run.protocol_round(receiver), run.weights(receiver)
        whole = [frozenset(protocol_round.senders)]
        for members in whole if colluders is None else known_sums(protocol_round, colluders):
            sums.append(members)
            rows.append([weights[node] if node in members else 0.0 for node in hidden])
            values.append(run.sum(receiver, members, colluders or ()))
    solved = np.linalg.lstsq(np.array(rows), np.array(values), rcond=1e-9)[0]
    errors = {node: float(np.abs(model - run.model(node)).max()) for node, model in zip(hidden, solved, strict=True)}
    return Attack(determined(sums), errors)
