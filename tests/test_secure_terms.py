"""Secure aggregation: the masks of two senders cancel only if both agree on everything that the sum depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from secure_world import (
    NOT_MASKS,
    RUN,
    InwardStar,
    InwardStarGraph,
    RecordingSharing,
    SecureWorld,
    one_receiver,
    recording_sharings,
)
from shoal.algorithms.dpsgd import DPSGD
from shoal.compression.indices import GolombRice
from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node, Received
from shoal.sharing.secure import masks
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.masks import Keys
from shoal.sharing.secure.messages import INCLUDED, ProtocolRound, describe_content, mask_update, to_node_ids, to_rows
from shoal.sharing.topk import TopK

# Two senders

WEIGHTS = {1: 0.25, 2: 0.25, 3: 0.125}
POSITIONS = np.array([0, 3, 7])


def content(bits: Any = 32, range: float = 64.0, weights: Any = WEIGHTS, positions: Any = POSITIONS) -> bytes:
    return describe_content(FixedPoint(bits, range), weights, positions)


AGREED = ProtocolRound(9, 4, (1, 2), max_partners=8, threshold=0.75, seed=0, content=content())


SAME: dict[str, dict[str, Any]] = {
    "nothing": {},
    "order of senders": {"senders": [2, 1]},
    "order of weights": {"content": content(weights=dict(reversed(WEIGHTS.items())))},
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "receiver": {"receiver": 8},
    "round": {"round": 5},
    "senders": {"senders": (1, 2, 3)},
    "partners": {"max_partners": 6},
    "threshold": {"threshold": 0.5},
    "bits": {"content": content(bits=64)},
    "range": {"content": content(range=32.0)},
    "a weight": {"content": content(weights={**WEIGHTS, 3: 0.25})},
    "the owner of a weight": {"content": content(weights={1: 0.25, 2: 0.25, 4: 0.125})},
    "unknown weights": {"content": content(weights={})},
    "a coordinate": {"content": content(positions=np.array([0, 3, 8]))},
    "fewer coordinates": {"content": content(positions=np.array([0, 3]))},
    "all coordinates": {"content": content(positions=None)},
}


@pytest.mark.parametrize("what", [*SAME, *DIFFERENT])
def test_masks_cancel_and_shares_can_be_decrypted_only_if_both_senders_agree(what: str) -> None:
    cancel = what in SAME
    rounds = {1: AGREED, 2: replace(AGREED, **{**SAME, **DIFFERENT}[what])}
    keys = {1: Keys(RUN), 2: Keys(RUN)}
    total, updates = np.zeros(16, np.uint32), {}
    for sender, other in ((1, 2), (2, 1)):
        keys[sender].agree(other, keys[other].public)
        values = np.arange(16, dtype=np.uint32)
        updates[sender] = mask_update(values, sender, rounds[sender], keys[sender], {other})
        total += values
        masks.subtract(total, keys[sender].self_mask_seed(rounds[sender].receiver, rounds[sender].round))
    assert np.array_equal(total, 2 * np.arange(16)) == cancel
    assert (updates[1].commitments[1] == updates[2].commitments[1]) == cancel
    secrets = keys[1].pair_secrets(2, rounds[1].terms)
    share = updates[2].key_shares[rounds[2].partners[2].index(1)]
    if cancel:
        assert len(secrets.decrypt(share, from_lower=False)) == 32
    else:
        with pytest.raises(MessageError, match="altered, or encrypted with another key"):
            secrets.decrypt(share, from_lower=False)


# Nodes


@pytest.mark.parametrize("option", [{"range": 32.0}, {"threshold": 0.7}, {"partners": 6}], ids=str)
def test_a_sender_with_other_options_is_excluded(option: Any) -> None:
    given = {"range": 64.0, "threshold": 0.75, "partners": 8}
    senders = recording_sharings(4, **given)
    senders[1] = RecordingSharing(**{**given, **option})
    world = one_receiver(senders).run()
    assert world.events(0)[0] == ("payload rejected", f"from node 2: {NOT_MASKS}")
    assert all(2 not in found.senders for found in world.sharings[0].sums.values())


@dataclass(frozen=True)
class OtherWeights:
    """The graph of `InwardStar`, in which node 3 has more neighbours, and so less weight."""

    def build(self, nodes: int, seed: int) -> OtherWeightsGraph:
        return OtherWeightsGraph(nodes)


class OtherWeightsGraph(InwardStarGraph):
    def degree(self, node: int, round: int) -> int:
        return 9 if node == 3 else super().degree(node, round)


@pytest.mark.parametrize("other", [False, True], ids=["same weights", "other weights"])
def test_a_sender_that_computes_other_weights_of_the_others_is_excluded(other: bool) -> None:
    world = one_receiver(recording_sharings(4, threshold=0.5))
    world.nodes[2].set_topology(OtherWeights() if other else InwardStar())
    world.run()
    assert world.events(0) == ([("payload rejected", f"from node 2: {NOT_MASKS}")] if other else [])
    assert world.sharings[0].sums[0].senders == ((1, 3, 4) if other else (1, 2, 3, 4))


# A receiver that lies about coordinates

VICTIM, SECRET, KNOWN = 1, slice(0, 8), slice(8, 16)
SENDERS = (1, 2, 3, 4)


class CoordinateAttacker(RecordingSharing):
    """A receiver that knows all values at the coordinates `KNOWN`, and unmasks every sum without any check."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.read = np.empty(0)
        """The values of the victim, as the attacker computes them."""
        self.shares: dict[int, int] = {}
        """The number of the victim's key shares that each of the other senders has decrypted."""

    async def after_receive(self, node: Node, received: Any, round: int) -> Any:
        request = Payload({INCLUDED: to_node_ids(SENDERS)})
        await node.send(SENDERS, request, round=round, kind="secure-open")
        answers = await node.receive_each(SENDERS, round=round, kind="secure-opened")
        total = np.zeros(8, np.uint32)
        for sender in SENDERS:
            total += received[sender].arrays["words"]
            masks.subtract(total, answers[sender].arrays["own"].tobytes())
        self.read = FixedPoint(32, 64.0).decode(total) / 0.2 - sum(known_values(s) for s in SENDERS if s != VICTIM)
        encrypted = received[VICTIM].arrays["shares"]

        def ask(helper: int) -> Payload:
            share = encrypted[SENDERS.index(helper) - 1].tobytes()
            return Payload({"of": to_node_ids([VICTIM]), "shares": to_rows([share])})

        helpers = [sender for sender in SENDERS if sender != VICTIM]
        await node.send(helpers, ask, round=round, kind="secure-help")
        answers = await node.receive_each(helpers, round=round, kind="secure-helped")
        self.shares = {helper: answer.arrays["of"].size for helper, answer in answers.items()}
        return Received(received.peers)


def known_values(sender: int) -> Any:
    return np.linspace(-sender, sender, 8)


def values_of(node: int) -> Any:
    model = np.random.default_rng(node).uniform(-2, 2, 32)
    model[KNOWN] = known_values(node)
    return model


def attacked(lies: bool) -> SecureWorld:
    """The attacker requests the coordinates `KNOWN` from its senders; if it lies, `SECRET` from its victim."""
    world = SecureWorld(
        DPSGD(1),
        [CoordinateAttacker(inner=TopK(0.25)), *recording_sharings(4, inner=TopK(0.25))],
        topology=InwardStar(),
        models=values_of,
        receive_timeout=5.0,  # the attacker sends no final message
    )
    runtime = world.world.runtimes[0]
    send = runtime.send

    async def lie(to: int, message: Message) -> bool:
        if message.kind == "secure-support":
            requested = SECRET if lies and to == VICTIM else KNOWN
            code = GolombRice().encode(np.arange(32)[requested], 32)
            message = Message(0, message.kind, message.round, Payload({"secure-support": code}), message.run)
        return bool(await send(to, message))

    runtime.send = lie  # type: ignore[method-assign]
    return world.run()


def test_a_receiver_that_requests_other_coordinates_from_one_sender_cannot_read_its_values() -> None:
    attacker = attacked(lies=True).sharings[0]
    error = np.abs(attacker.read - values_of(VICTIM)[SECRET])
    assert np.median(error) > 1.0  # masks are left: the values are uniform in ±640
    assert attacker.shares == {2: 0, 3: 0, 4: 0}


def test_the_same_attacker_reads_the_sum_if_all_senders_get_the_same_coordinates() -> None:
    attacker = attacked(lies=False).sharings[0]
    np.testing.assert_allclose(attacker.read, known_values(VICTIM), atol=1e-6)
    assert attacker.shares == {2: 1, 3: 1, 4: 1}
