"""Secure aggregation with wrong seeds and forged key shares: sums are exact or stay masked."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from secure_world import (
    ONE_MAY_FAIL,
    RecordingSharing,
    altered,
    lying,
    one_receiver,
    recording_sharings,
)
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.sharing.secure import shamir
from shoal.sharing.secure.masks import Keys
from shoal.sharing.secure.messages import to_node_ids, to_rows
from shoal.sharing.secure.responder import UnmaskingResponder

# Seeds and key shares


def test_two_halves_that_have_not_masked_with_each_other_are_not_unmasked_as_one_sum() -> None:
    """Each half would be a separate sum with too few senders."""
    senders = recording_sharings(6, threshold=0.3)
    for node, sharing in enumerate(senders, 1):
        sharing.key_exchange.rejected.update({4, 5, 6} if node <= 3 else {1, 2, 3})
    world = one_receiver(senders).run()
    (closed,) = world.events(0)
    assert closed[0] == "sum not unmasked"
    assert "some senders did not mask with others, and parts of the sum would be visible" in closed[1]
    assert not any(message.kind == "secure-open" for _, message in world.sent)


class LyingResponder(UnmaskingResponder):
    """Changes its answers with the given functions."""

    def __init__(self, opened: Any = None, recovered: Any = None) -> None:
        super().__init__()
        self.lies = opened, recovered

    def seeds(self, node: Node, keys: Keys, asked: Message) -> Payload:
        payload = super().seeds(node, keys, asked)
        return payload if self.lies[0] is None else self.lies[0](payload)

    def key_shares(self, node: Node, keys: Keys, asked: Message) -> Payload:
        payload = super().key_shares(node, keys, asked)
        return payload if self.lies[1] is None else self.lies[1](payload)


def with_answers(opened: Any = None, recovered: Any = None, **options: Any) -> RecordingSharing:
    sharing = RecordingSharing(**options)
    sharing.responder = LyingResponder(opened, recovered)
    return sharing


def forging(**options: Any) -> RecordingSharing:
    """Reveals forged key shares."""
    return with_answers(
        recovered=lambda p: Payload({**p.arrays, "shares": p.arrays["shares"] ^ np.uint8(1)}), **options
    )


FAILS_AFTER_UPDATE = 4
"""Messages of one of four senders: three keys and its update."""


def test_a_forged_key_share_is_found_and_its_holder_reported() -> None:
    world = (
        one_receiver([forging(**ONE_MAY_FAIL), *recording_sharings(3, **ONE_MAY_FAIL)])
        .fails(4, FAILS_AFTER_UPDATE)
        .run()
    )
    assert world.events(0) == [("payload rejected", "from node 1: a forged key share of node 4")]
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4)
    assert world.check_sums() == 1


def test_key_shares_are_requested_only_from_nodes_that_masked_with_the_owner() -> None:
    senders = recording_sharings(6, threshold=0.6)
    senders[0].key_exchange.rejected.add(5)
    senders[4].key_exchange.rejected.add(1)
    world = one_receiver(senders).fails(5, after=6).fails(6, after=6).run()
    asked = {to: m.payload.arrays["of"].tolist() for to, m in world.sent if m.kind == "secure-help"}
    assert asked == {1: [6], 2: [5, 6], 3: [5, 6], 4: [5, 6]}
    assert not any(node.rejected_count for node in world.nodes)
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4, 5, 6)
    assert world.check_sums() == 1


def test_too_many_forged_key_shares_keep_the_sum_masked() -> None:
    world = (
        one_receiver([forging(**ONE_MAY_FAIL), forging(**ONE_MAY_FAIL), *recording_sharings(2, **ONE_MAY_FAIL)])
        .fails(4, FAILS_AFTER_UPDATE)
        .run()
    )
    assert world.events(0) == [
        ("sum not unmasked", "round 0: node 4 did not unmask its update, and its key shares do not fit together: one "
         "is forged; the model stays unchanged")
    ]  # fmt: skip
    assert not world.sharings[0].sums


def test_a_forged_key_share_among_many_is_found_with_few_trials() -> None:
    senders = [forging(partners=24), *recording_sharings(23, partners=24)]
    world = one_receiver(senders, size=4).fails(24, after=24)
    with mock.patch.object(shamir, "combine", wraps=shamir.combine) as combine:
        world.run()
    assert world.events(0) == [("payload rejected", "from node 1: a forged key share of node 24")]
    assert world.check_sums() == 1
    assert combine.call_count < 50


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda payload: Payload({"of": payload.arrays["of"]}), "expected an array 'shares' of rows of 16 bytes"),
        (lambda payload: Payload({**payload.arrays, "shares": payload.arrays["shares"][:0]}),
         "expected 1 seeds in the key share of node 4"),
        (lambda payload: Payload({**payload.arrays, "of": to_node_ids([3])}),
         "a key share of node 3, which was not requested"),
        (lambda payload: Payload({"shares": payload.arrays["shares"]}),
         "expected an array 'of' of increasing node ids"),
        (lambda payload: Payload({}), "expected an array 'shares' of rows of 16 bytes"),
    ],
)  # fmt: skip
def test_an_invalid_key_share_answer_is_rejected_and_the_others_suffice(lie: Any, why: str) -> None:
    world = (
        one_receiver([with_answers(recovered=lie, **ONE_MAY_FAIL), *recording_sharings(3, **ONE_MAY_FAIL)])
        .fails(4, FAILS_AFTER_UPDATE)
        .run()
    )
    ((what, detail),) = world.events(0)
    assert what == "payload rejected"
    assert detail.startswith(f"from node 1: {why}")
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4)
    assert world.check_sums() == 1


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda payload: Payload({**payload.arrays, "own": payload.arrays["own"] ^ np.uint8(1)}),
         "a seed does not match its commitment (with node 2)"),
        (lambda payload: Payload({**payload.arrays, "pairs": to_rows([bytes(16)])}),
         "expected the seed of its self mask and 0 others"),
        (lambda payload: Payload({**payload.arrays, "own": to_rows([])}),
         "expected the seed of its self mask and 0 others"),
        (lambda payload: Payload({**payload.arrays, "own": payload.arrays["own"][0]}),
         "expected an array 'own' of rows"),
        (lambda payload: Payload({}), "expected an array 'own' of rows of 16 bytes"),
        (lambda payload: Payload({}, {"refused": 7}), "expected an array 'own' of rows of 16 bytes"),
    ],
)  # fmt: skip
def test_wrong_seeds_are_rejected_and_key_shares_give_the_right_ones(lie: Any, why: str) -> None:
    world = one_receiver([RecordingSharing(), with_answers(opened=lie), *recording_sharings(2)]).run()
    ((what, detail),) = world.events(0)
    assert what == "payload rejected"
    assert detail.startswith(f"from node 2: {why}")
    assert world.sharings[0].sums[0].senders == (1, 2, 3, 4)
    assert world.check_sums() == 1


def test_wrong_seeds_of_an_absent_partner_are_found_too() -> None:
    misleading = with_answers(
        lambda payload: Payload({**payload.arrays, "pairs": payload.arrays["pairs"] ^ np.uint8(1)}), **ONE_MAY_FAIL
    )
    world = (
        one_receiver([RecordingSharing(**ONE_MAY_FAIL), misleading, *recording_sharings(2, **ONE_MAY_FAIL)])
        .fails(4, after=3)
        .run()
    )  # all have its key
    assert ("payload rejected", "from node 2: a seed does not match its commitment (with node 4)") in (world.events(0))
    assert world.sharings[0].sums[0].senders == (1, 2, 3)
    assert world.check_sums() == 1


def test_a_node_that_rejects_unmasking_keeps_the_sum_masked() -> None:
    unwilling = with_answers(lambda _: Payload({}, {"refused": "I would rather not" + 1000 * "!"}))
    world = one_receiver([unwilling, *recording_sharings(3)]).run()
    assert world.events(0)[0][1] == (
        "round 0: node 1 does not unmask its update: I would rather not" + 182 * "!" + "; the model stays unchanged"
    )


def test_altered_key_shares_recover_nothing() -> None:
    garbled = lying(altered(shares=lambda a: a ^ np.uint8(1)))
    world = one_receiver([*recording_sharings(3), garbled], models=lambda node: np.full(32, node)).fails(
        4, FAILS_AFTER_UPDATE
    )
    world.run()
    for node in (1, 2, 3):
        assert world.events(node) == [
            ("payload rejected", "from node 0: decryption failed: the data was altered, or encrypted with another key")
        ]
    assert world.events(0)[0][1].startswith("round 0: node 4 did not unmask its update, and 0 of its key shares")
    assert not world.nodes[0].params.any()
