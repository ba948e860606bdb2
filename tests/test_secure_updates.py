"""Secure aggregation with invalid updates and invalid keys: their senders are excluded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from secure_world import (
    NOT_MASKS,
    ONE_MAY_FAIL,
    RUN,
    RecordingSharing,
    SecureWorld,
    altered,
    lying,
    one_receiver,
    recording_sharings,
)
from shoal.algorithms.dpsgd import DPSGD
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.key_exchange import KeyExchange
from shoal.sharing.secure.masks import Keys
from shoal.topologies.static import Full as FullGraph


def with_three_others(second: RecordingSharing) -> list[RecordingSharing]:
    """Return the sharings of four senders, of which `second` is node 2."""
    first, *others = recording_sharings(3, **ONE_MAY_FAIL)
    return [first, second, *others]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (altered(words=lambda a: a.astype(np.uint64)), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(words=lambda a: a.astype(np.float32)), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(words=lambda a: a[:-1]), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(words=lambda a: a.reshape(2, 16)), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(words=None), "expected an array 'words' of 32 integers of 32 bits"),
        (altered(seals=None), "expected 'seals', or the field 'plain' if the update is not masked"),
        (altered(plain=True), "expected 'seals', or the field 'plain' if the update is not masked"),
        (altered(plain=True, seals=None), "its update is not masked"),
        (altered(seals=lambda a: a[:-1]), "expected 4 commitments 'seals' of 16 bytes each"),
        (altered(seals=lambda a: a.astype(np.int8)), "expected 4 commitments 'seals' of 16 bytes each"),
        (altered(seals=lambda a: a[:, 0]), "expected 4 commitments 'seals' of 16 bytes each"),
        (altered(shares=None), "expected 3 encrypted key shares 'shares' of 80 bytes each"),
        (altered(shares=lambda a: a[:, :-1]), "expected 3 encrypted key shares 'shares' of 80 bytes each"),
        (altered(shares=lambda a: a.astype(np.uint16)), "expected 3 encrypted key shares 'shares' of 80 bytes each"),
        (altered(seals=lambda a: a ^ np.uint8(1)), NOT_MASKS),
    ],
)  # fmt: skip
def test_invalid_updates_are_rejected_and_the_sum_of_the_others_is_unmasked(lie: Any, why: str) -> None:
    senders = with_three_others(lying(lie, **ONE_MAY_FAIL))
    world = one_receiver(senders).run()
    assert world.events(0) == [("payload rejected", f"from node 2: {why}")]
    assert world.nodes[0].rejected_count == 1
    assert world.sharings[0].sums[0].senders == (1, 3, 4)
    assert world.check_sums() == 1


def test_updates_of_another_round_are_rejected() -> None:
    kept: list[Payload] = []

    def replay(payload: Payload, receiver: int, round: int) -> Payload:
        kept.append(payload)
        return kept[0]

    world = one_receiver(with_three_others(lying(replay, **ONE_MAY_FAIL)), rounds=3).run()
    assert [found.senders for found in world.sharings[0].sums.values()] == [(1, 2, 3, 4), (1, 3, 4), (1, 3, 4)]
    assert world.events(0) == [("payload rejected", f"from node 2: {NOT_MASKS}")] * 2
    assert world.check_sums() == 3


def test_updates_for_another_receiver_are_rejected() -> None:
    kept: list[Payload] = []

    def misdirect(payload: Payload, receiver: int, round: int) -> Payload:
        kept.append(payload)
        return kept[0]  # the update for node 0, for all receivers

    world = SecureWorld(
        DPSGD(1), [*recording_sharings(4, **ONE_MAY_FAIL), lying(misdirect, **ONE_MAY_FAIL)], topology=FullGraph()
    ).run()
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4)
    for node in (1, 2, 3):
        assert set(world.sharings[node].sums[0].senders) == {0, 1, 2, 3} - {node}
    assert world.check_sums() == 5


def test_a_repeated_message_changes_nothing() -> None:
    world = SecureWorld(DPSGD(3), recording_sharings(5), topology=FullGraph())
    for runtime in world.world.runtimes:

        async def twice(to: int, message: Message, send: Any = runtime.send) -> bool:
            await send(to, message)
            return bool(await send(to, message))

        runtime.send = twice  # type: ignore[method-assign]
    world.run()
    assert world.check_sums() == 15
    assert all(len(found.senders) == 4 for sharing in world.sharings for found in sharing.sums.values())
    assert not any(node.rejected_count for node in world.nodes)


# Keys


class WithKey(KeyExchange):
    """Sends the given key; masks with its own if only the public key is given."""

    def __init__(self, given: Keys | bytes) -> None:
        super().__init__()
        self._keys = Keys(RUN)
        if isinstance(given, Keys):
            # Two nodes with one private key: no public way leads to this.
            self._keys._private, self._keys.public = given._private, given.public
        else:
            self._keys.public = given


def exchanging(exchange: KeyExchange) -> RecordingSharing:
    sharing = RecordingSharing(**ONE_MAY_FAIL)
    sharing.key_exchange = exchange
    return sharing


def test_a_node_that_masks_with_another_key_than_it_sent_is_excluded() -> None:
    world = one_receiver(with_three_others(exchanging(WithKey(Keys(RUN).public))), rounds=2).run()
    assert world.events(0) == [("payload rejected", f"from node 2: {NOT_MASKS}")] * 2
    assert [found.senders for found in world.sharings[0].sums.values()] == [(1, 3, 4)] * 2
    assert world.check_sums() == 2


def test_the_sum_of_two_updates_that_do_not_match_stays_masked() -> None:
    world = one_receiver([RecordingSharing(**ONE_MAY_FAIL), exchanging(WithKey(Keys(RUN).public))]).run()
    assert world.events(0)[0] == (
        "payload rejected", "from node 2: its masks do not match those of 1: another key, or another round",
    )  # fmt: skip
    assert world.events(0)[1][1].startswith("round 0: 1 of 2 updates are in the sum, and 2 are needed")
    assert not world.sharings[0].sums


def test_a_key_that_two_nodes_send_is_rejected_for_both() -> None:
    twin = Keys(RUN)
    world = one_receiver(
        [
            RecordingSharing(**ONE_MAY_FAIL),
            exchanging(WithKey(twin)),
            exchanging(WithKey(twin)),
            *recording_sharings(2, **ONE_MAY_FAIL),
        ],
        rounds=2,
    ).run()
    for node in (1, 4, 5):
        assert world.events(node) == [
            ("payload rejected", "from node 2: its key is also the key of node 3: the true owner is unknown"),
            ("payload rejected", "from node 3: its key is also the key of node 2; every node needs its own key"),
        ]
    assert world.events(2)[0][1] == ("from node 3: its key is this node's own key; every node needs its own key")
    assert [found.senders for found in world.sharings[0].sums.values()] == [(1, 4, 5)] * 2
    assert world.check_sums() == 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (bytes(32), "its key is not valid for a key agreement"),
        (b"short", "expected a public key, 32 bytes"),
    ],
)
def test_an_invalid_key_is_rejected_and_its_owner_excluded(given: bytes, why: str) -> None:
    world = one_receiver(with_three_others(exchanging(WithKey(given))), rounds=2).run()
    for node in (1, 3, 4):
        ((what, detail),) = world.events(node)
        assert what == "payload rejected"
        assert detail.startswith(f"from node 2: {why}")
    assert [found.senders for found in world.sharings[0].sums.values()] == [(1, 3, 4)] * 2
    assert world.check_sums() == 2


def test_a_node_without_mask_partners_is_excluded_and_stays_hidden() -> None:
    class Isolated(WithKey):
        """Rejects all keys, and sends an invalid one."""

        async def run(self, node: Node, partners: set[int]) -> None:
            self.rejected.update(partners)
            await super().run(node, partners)

    world = one_receiver(with_three_others(exchanging(Isolated(bytes(32))))).run()
    assert world.events(0) == [("excluded from sum", "round 0: too few partners have masked with 2")]
    assert world.sharings[0].sums[0].senders == (1, 3, 4)
    assert world.check_sums() == 1
    values, model = world.sharings[0].received[0][2].arrays["words"], world.sharings[2].models[0]
    assert not np.array_equal(values, FixedPoint(32, 64.0).encode(model, 0.2))
