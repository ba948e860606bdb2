"""The memory budget of a mailbox: early messages are kept, and a sender that fills it takes nothing from the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.mailbox import Filter, Mailbox
from shoal.message import Message, Payload, Scalar
from shoal.message_budget import MessageBudget

MODEL = 40_000
"""Bytes."""
NODES = 6
FAR = 10**9


@cache
def zeros(size: int) -> NDArray[np.float32]:
    return np.zeros(size // 4, np.float32)


def model(
    sender: int = 1, round: int = 0, kind: str = "model", size: int = MODEL, fields: dict[str, Scalar] | None = None
) -> Message:
    return Message(sender, kind, round, Payload({"params": zeros(size)}, fields or {}))


def mailbox() -> Mailbox:
    return Mailbox(MessageBudget(MODEL, NODES))


def taken_by(mailbox: Mailbox, kind: str) -> int:
    return sum(message.wire_size for message in mailbox.receive_available(kind))


def asked(mailbox: Mailbox, sender: int, round: int) -> bool:
    return mailbox.start_receive(Filter("model", round, (sender,)), lambda: None).done


@pytest.mark.parametrize(("kind", "first"), [("model", FAR), ("unknown", 0)], ids=["far rounds", "unknown kinds"])
def test_unclaimed_messages_do_not_fill_the_memory(kind: str, first: int) -> None:
    full = mailbox()
    for number in range(2_000):  # 80 MB
        full.put(model(1, first + number, kind))
    kept = full.receive_available(kind)
    assert sum(message.wire_size for message in kept) <= MessageBudget(MODEL, NODES).size < 2**24
    assert full.dropped == 2_000 - len(kept) > 0


def test_many_small_messages_do_not_fill_the_memory() -> None:
    full = mailbox()
    for number in range(20_000):
        full.put(model(1, FAR + number, size=0))
    assert len(full.receive_available("model")) * MessageBudget.OVERHEAD <= MessageBudget(MODEL, NODES).size
    assert full.dropped > 0


def test_a_sender_that_fills_a_mailbox_takes_nothing_from_the_others() -> None:
    full = mailbox()
    for number in range(1_000):
        full.put(model(5, FAR + number))
        if number in (10, 400, 990):
            for sender in (1, 2, 3):
                full.put(model(sender, number))
    assert full.dropped > 500
    assert all(asked(full, sender, round) for round in (10, 400, 990) for sender in (1, 2, 3))


def test_messages_for_the_next_rounds_are_kept_even_from_a_sender_that_fills_a_mailbox() -> None:
    full = mailbox()
    assert not asked(full, 2, 0)  # the node asks for models by round
    for number in range(1_000):
        full.put(model(5, FAR + number, "unknown" if number % 2 else "model"))
    for round in range(4):
        full.put(model(5, round))
    for number in range(1_000):
        full.put(model(5, FAR + number))
    assert all(asked(full, 5, round) for round in range(4))


def test_all_nodes_may_be_one_round_ahead() -> None:
    mailbox_of_500 = Mailbox(MessageBudget(MODEL, 500))
    for round in range(MessageBudget.MESSAGES_PER_NODE):
        for sender in range(500):
            mailbox_of_500.put(model(sender, round))
    assert mailbox_of_500.dropped == 0


def test_the_budget_grows_with_the_messages_that_a_node_sends() -> None:
    long = 100 * MODEL
    small, large = mailbox(), mailbox()
    assert large.budget is not None
    large.budget.expect(long)
    for each in (small, large):
        for round in range(MessageBudget.MESSAGES_PER_NODE):
            for sender in range(NODES):
                each.put(model(sender, round, size=long))
    assert small.dropped > 0
    assert large.dropped == 0
    assert all(asked(small, sender, 0) for sender in range(NODES)), (
        "the next message of each sender is kept at any size"
    )


# Priorities


def collect(mailbox: Mailbox) -> None:
    mailbox.receive_available("model")


def receive_any(mailbox: Mailbox) -> None:
    mailbox.end_receive(mailbox.start_receive(Filter("model"), lambda: None))


def receive_a_round(mailbox: Mailbox) -> None:
    mailbox.end_receive(mailbox.start_receive(Filter("model", 0, (NODES,)), lambda: None))  # a node that never sends


def nothing(mailbox: Mailbox) -> None:
    """Ask for nothing: the node is still in its first training."""


def overflowing(before: Callable[[Mailbox], None]) -> Mailbox:
    """Return a mailbox after 300 rounds of five senders; the last one sends a hundred messages in each round."""
    full = mailbox()
    before(full)
    for round in range(300):
        for sender in range(1, 5):
            full.put(model(sender, round))
        for _ in range(100):
            full.put(model(5, round, size=MODEL // 10))
    assert full.dropped > 10_000
    return full


@pytest.mark.parametrize("before", [nothing, collect, receive_any])
def test_the_newest_message_of_each_sender_is_kept_for_collect(before: Callable[[Mailbox], None]) -> None:
    newest: dict[int, int] = {}
    for message in overflowing(before).receive_available("model"):
        newest[message.sender] = max(message.round, newest.get(message.sender, -1))
    assert newest == dict.fromkeys(range(1, 6), 299)


@pytest.mark.parametrize("before", [nothing, receive_a_round])
def test_the_next_messages_of_each_sender_are_kept_for_receives_by_round(before: Callable[[Mailbox], None]) -> None:
    full = overflowing(before)
    assert all(asked(full, sender, round) for round in range(10) for sender in range(1, 5))
    assert asked(full, 5, 0)


def test_both_are_kept_if_a_kind_is_asked_for_in_both_ways() -> None:
    full = mailbox()
    receive_a_round(full)
    collect(full)
    for round in range(1_000):
        full.put(model(1, round))
    assert full.dropped > 500
    rounds = [message.round for message in full.receive_available("model")]
    assert rounds == sorted(rounds)
    assert {*range(100), *range(900, 1_000)} <= set(rounds)


@pytest.mark.parametrize("before", [collect, receive_any])
def test_the_last_messages_of_one_round_are_kept_for_collect(
    before: Callable[[Mailbox], None],
) -> None:
    full = mailbox()
    before(full)
    for number in range(1_000):
        full.put(model(1, 0, fields={"number": number}))
    numbers = [message.payload.fields["number"] for message in full.receive_available("model")]
    assert full.dropped > 500
    assert numbers == list(range(1_000 - len(numbers), 1_000))


@pytest.mark.parametrize("before", [nothing, collect])
def test_the_newest_message_of_each_fragment_is_kept(before: Callable[[Mailbox], None]) -> None:
    """Some fragments of a model arrive rarely."""
    full = mailbox()
    before(full)
    for round in range(1_000):
        for part in range(5, 10) if round == 400 else [round % 5]:
            full.put(model(1, round, fields={"part": part}))
    newest: dict[Scalar, int] = {}
    for message in full.receive_available("model"):
        newest[message.payload.fields["part"]] = message.round
    assert full.dropped > 500
    assert newest == {**{part: 995 + part for part in range(5)}, **dict.fromkeys(range(5, 10), 400)}


# Size


def test_each_sender_keeps_its_quota_even_if_many_nodes_are_ahead() -> None:
    nodes, typical = 600, 2**22
    full = Mailbox(MessageBudget(typical, nodes))
    for round in range(MessageBudget.MESSAGES_PER_NODE):
        for sender in range(1, nodes):
            full.put(model(sender, round, size=typical))
    for number in range(1_000):
        full.put(model(0, FAR + number, size=typical))
    assert full.dropped > 500
    assert all(
        asked(full, sender, round) for round in range(MessageBudget.MESSAGES_PER_NODE) for sender in range(1, nodes)
    )


def test_short_messages_leave_memory_for_messages_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Mailbox, "LIMIT", 1_000)
    monkeypatch.setattr(MessageBudget, "MAX_MESSAGES", 1_000, raising=False)
    full = Mailbox(MessageBudget(100 * MODEL, NODES))
    for number in range(3_000):
        full.put(model(1, FAR + number, size=0))
    full.put(model(2, 0))
    assert asked(full, 2, 0)
    assert len(full.receive_available("model")) <= 1_000


def test_taking_a_message_frees_its_memory() -> None:
    ordinary = mailbox()
    for round in range(1_000):
        ordinary.put(model(1, round))
        assert asked(ordinary, 1, round)
    assert ordinary.dropped == 0


def test_a_nearly_full_mailbox_is_not_scanned_for_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    scans = list[int]()
    kept = MessageBudget.select
    monkeypatch.setattr(MessageBudget, "select", lambda budget, *given: scans.append(1) or kept(budget, *given))
    budget = MessageBudget(MODEL, NODES)
    nearly_full = Mailbox(budget)
    size = model(size=0).wire_size + MessageBudget.OVERHEAD
    for number in range(budget.size // size - 12):  # leaves memory for one model, which needs as much as six of them
        nearly_full.put(model(2, FAR + number, size=0))
    for round in range(1_000):
        nearly_full.put(model(1, round))
        assert asked(nearly_full, 1, round)
    assert 0 < len(scans) < 100
    assert nearly_full.dropped == 0


def test_without_a_budget_nothing_is_dropped() -> None:
    unlimited = Mailbox()
    for number in range(1_000):
        unlimited.put(model(1, FAR + number))
    assert unlimited.dropped == 0
    assert len(unlimited.receive_available("model")) == 1_000


messages = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["model", "other"]), st.integers(0, 9), st.integers(0, 10 * MODEL)),
    max_size=60,
)
kinds = st.sets(st.sampled_from(["model", "other"]))


@given(messages, st.integers(0, 3 * MODEL), kinds, kinds)
def test_kept_messages_fit_the_budget_are_in_order_and_come_from_every_sender(
    script: list[tuple[int, str, int, int]], typical: int, by_round: set[str], any_round: set[str]
) -> None:
    small = MessageBudget(typical, 4)
    small.EXTRA_NODES, small.SMALL_MESSAGES = 2, 0  # type: ignore[misc]
    put = [model(sender, round, kind, size) for sender, kind, round, size in script]
    kept = small.select(put, by_round, any_round)
    places = [next(place for place, each in enumerate(put) if each is message) for message in kept]
    assert places == sorted(places)
    assert {message.sender for message in kept} == {message.sender for message in put}
    known = by_round | any_round
    asked_for = {message.sender for message in put if message.kind in known}
    assert {message.sender for message in kept if message.kind in known} == asked_for
    largest = {message.sender: message for message in sorted(kept, key=lambda m: m.wire_size)}
    beside = [message for message in kept if message is not largest[message.sender]]
    assert sum(message.wire_size + MessageBudget.OVERHEAD for message in beside) <= small.size or len(kept) == len(put)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, MODEL)), max_size=100),
    kinds,
    kinds,
)
def test_the_first_typical_message_of_every_sender_is_kept(
    script: list[tuple[int, int, int]], by_round: set[str], any_round: set[str]
) -> None:
    small = MessageBudget(MODEL, 4)
    small.EXTRA_NODES = 0  # type: ignore[misc]
    put = [model(sender, round, size=size) for sender, round, size in script]
    kept = small.select(put, by_round, any_round)
    unknown = "model" not in by_round | any_round
    for sender in range(4):
        ascending = sorted((message for message in put if message.sender == sender), key=lambda m: m.round)
        if ascending and ("model" in by_round or unknown):
            assert any(message is ascending[0] for message in kept)
        if ascending and ("model" in any_round or unknown):
            assert any(message is ascending[-1] for message in kept)
