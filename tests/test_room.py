"""A mailbox has room for what is ahead of its time, and whoever fills it takes nothing from the others."""

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
    return sum(message.wire_size for message in mailbox.collect(kind))


def asked(mailbox: Mailbox, sender: int, round: int) -> bool:
    return mailbox.ask(Filter("model", round, (sender,)), lambda: None).done


@pytest.mark.parametrize(("kind", "first"), [("model", FAR), ("unheard of", 0)], ids=["far rounds", "unknown kinds"])
def test_what_nobody_asks_for_does_not_fill_the_memory(kind: str, first: int) -> None:
    full = mailbox()
    for number in range(2_000):  # 80 MB
        full.put(model(1, first + number, kind))
    kept = full.collect(kind)
    assert sum(message.wire_size for message in kept) <= MessageBudget(MODEL, NODES).size < 2**24
    assert full.dropped == 2_000 - len(kept) > 0


def test_many_small_messages_do_not_fill_it_either() -> None:
    full = mailbox()
    for number in range(20_000):
        full.put(model(1, FAR + number, size=0))
    assert len(full.collect("model")) * MessageBudget.EACH <= MessageBudget(MODEL, NODES).size
    assert full.dropped > 0


def test_who_fills_a_mailbox_takes_nothing_from_the_others() -> None:
    full = mailbox()
    for number in range(1_000):
        full.put(model(5, FAR + number))
        if number in (10, 400, 990):
            for sender in (1, 2, 3):
                full.put(model(sender, number))
    assert full.dropped > 500
    assert all(asked(full, sender, round) for round in (10, 400, 990) for sender in (1, 2, 3))


def test_who_fills_a_mailbox_is_still_heard_in_the_rounds_that_come() -> None:
    full = mailbox()
    assert not asked(full, 2, 0)  # models are what is asked for here
    for number in range(1_000):
        full.put(model(5, FAR + number, "unheard of" if number % 2 else "model"))
    for round in range(4):
        full.put(model(5, round))
    for number in range(1_000):
        full.put(model(5, FAR + number))
    assert all(asked(full, 5, round) for round in range(4))


def test_all_nodes_may_be_ahead_by_a_round() -> None:
    everybody = Mailbox(MessageBudget(MODEL, 500))
    for round in range(MessageBudget.AHEAD):
        for sender in range(500):
            everybody.put(model(sender, round))
    assert everybody.dropped == 0


def test_a_node_that_sends_long_messages_has_room_for_those_of_others() -> None:
    long = 100 * MODEL
    modest, talkative = mailbox(), mailbox()
    assert talkative.budget is not None
    talkative.budget.expect(long)
    for each in (modest, talkative):
        for round in range(MessageBudget.AHEAD):
            for sender in range(NODES):
                each.put(model(sender, round, size=long))
    assert modest.dropped > 0
    assert talkative.dropped == 0
    assert all(asked(modest, sender, 0) for sender in range(NODES)), "the next message of each is kept, however long"


# The next and the newest


def collect(mailbox: Mailbox) -> None:
    mailbox.collect("model")


def receive_any(mailbox: Mailbox) -> None:
    mailbox.withdraw(mailbox.ask(Filter("model"), lambda: None))


def receive_a_round(mailbox: Mailbox) -> None:
    mailbox.withdraw(mailbox.ask(Filter("model", 0, (NODES,)), lambda: None))  # of nobody who speaks here


def nothing(mailbox: Mailbox) -> None:
    """The node is busy with its first training."""


def overflowing(before: Callable[[Mailbox], None]) -> Mailbox:
    """After 300 rounds of five senders, the last of whom says a hundred times as much as the others."""
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
def test_of_what_is_collected_the_newest_of_each_is_kept(before: Callable[[Mailbox], None]) -> None:
    newest: dict[int, int] = {}
    for message in overflowing(before).collect("model"):
        newest[message.sender] = max(message.round, newest.get(message.sender, -1))
    assert newest == dict.fromkeys(range(1, 6), 299)


@pytest.mark.parametrize("before", [nothing, receive_a_round])
def test_of_what_is_received_by_rounds_the_next_of_each_are_kept(before: Callable[[Mailbox], None]) -> None:
    full = overflowing(before)
    assert all(asked(full, sender, round) for round in range(10) for sender in range(1, 5))
    assert asked(full, 5, 0)


def test_of_what_is_asked_for_in_both_ways_both_are_kept() -> None:
    full = mailbox()
    receive_a_round(full)
    collect(full)
    for round in range(1_000):
        full.put(model(1, round))
    assert full.dropped > 500
    rounds = [message.round for message in full.collect("model")]
    assert rounds == sorted(rounds)
    assert {*range(100), *range(900, 1_000)} <= set(rounds)


@pytest.mark.parametrize("before", [collect, receive_any])
def test_of_messages_of_one_round_that_are_collected_the_last_to_come_are_kept(
    before: Callable[[Mailbox], None],
) -> None:
    full = mailbox()
    before(full)
    for number in range(1_000):
        full.put(model(1, 0, fields={"number": number}))
    numbers = [message.payload.fields["number"] for message in full.collect("model")]
    assert full.dropped > 500
    assert numbers == list(range(1_000 - len(numbers), 1_000))


@pytest.mark.parametrize("before", [nothing, collect])
def test_of_what_is_collected_in_parts_the_newest_of_each_part_is_kept(before: Callable[[Mailbox], None]) -> None:
    """As those of models that are sent in fragments, of which some come seldom."""
    full = mailbox()
    before(full)
    for round in range(1_000):
        for part in range(5, 10) if round == 400 else [round % 5]:
            full.put(model(1, round, fields={"part": part}))
    newest: dict[Scalar, int] = {}
    for message in full.collect("model"):
        newest[message.payload.fields["part"]] = message.round
    assert full.dropped > 500
    assert newest == {**{part: 995 + part for part in range(5)}, **dict.fromkeys(range(5, 10), 400)}


# How much


def test_who_fills_a_mailbox_leaves_the_others_what_each_may_have_where_many_are_ahead() -> None:
    nodes, usual = 600, 2**22
    full = Mailbox(MessageBudget(usual, nodes))
    for round in range(MessageBudget.AHEAD):
        for sender in range(1, nodes):
            full.put(model(sender, round, size=usual))
    for number in range(1_000):
        full.put(model(0, FAR + number, size=usual))
    assert full.dropped > 500
    assert all(asked(full, sender, round) for round in range(MessageBudget.AHEAD) for sender in range(1, nodes))


def test_who_fills_a_mailbox_with_short_messages_leaves_room_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Mailbox, "LIMIT", 1_000)
    monkeypatch.setattr(MessageBudget, "MOST", 1_000, raising=False)
    full = Mailbox(MessageBudget(100 * MODEL, NODES))
    for number in range(3_000):
        full.put(model(1, FAR + number, size=0))
    full.put(model(2, 0))
    assert asked(full, 2, 0)
    assert len(full.collect("model")) <= 1_000


def test_what_is_claimed_makes_room_again() -> None:
    ordinary = mailbox()
    for round in range(1_000):
        ordinary.put(model(1, round))
        assert asked(ordinary, 1, round)
    assert ordinary.dropped == 0


def test_a_room_that_is_nearly_full_is_not_looked_through_for_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[int]()
    kept = MessageBudget.kept
    monkeypatch.setattr(MessageBudget, "kept", lambda budget, *given: looks.append(1) or kept(budget, *given))
    budget = MessageBudget(MODEL, NODES)
    nearly_full = Mailbox(budget)
    size = model(size=0).wire_size + MessageBudget.EACH
    for number in range(budget.size // size - 12):  # one model has room beside them, which takes as much as six
        nearly_full.put(model(2, FAR + number, size=0))
    for round in range(1_000):
        nearly_full.put(model(1, round))
        assert asked(nearly_full, 1, round)
    assert 0 < len(looks) < 100
    assert nearly_full.dropped == 0


def test_without_room_nothing_is_dropped() -> None:
    unlimited = Mailbox()
    for number in range(1_000):
        unlimited.put(model(1, FAR + number))
    assert unlimited.dropped == 0
    assert len(unlimited.collect("model")) == 1_000


messages = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["model", "other"]), st.integers(0, 9), st.integers(0, 10 * MODEL)),
    max_size=60,
)
kinds = st.sets(st.sampled_from(["model", "other"]))


@given(messages, st.integers(0, 3 * MODEL), kinds, kinds)
def test_what_is_kept_fits_is_in_order_and_has_something_of_everybody(
    script: list[tuple[int, str, int, int]], usual: int, by_round: set[str], any_round: set[str]
) -> None:
    small = MessageBudget(usual, 4)
    small.SPARE, small.BESIDE = 2, 0  # type: ignore[misc]
    put = [model(sender, round, kind, size) for sender, kind, round, size in script]
    kept = small.kept(put, by_round, any_round)
    places = [next(place for place, each in enumerate(put) if each is message) for message in kept]
    assert places == sorted(places)
    assert {message.sender for message in kept} == {message.sender for message in put}
    known = by_round | any_round
    asked_for = {message.sender for message in put if message.kind in known}
    assert {message.sender for message in kept if message.kind in known} == asked_for
    largest = {message.sender: message for message in sorted(kept, key=lambda m: m.wire_size)}
    beside = [message for message in kept if message is not largest[message.sender]]
    assert sum(message.wire_size + MessageBudget.EACH for message in beside) <= small.size or len(kept) == len(put)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, MODEL)), max_size=100),
    kinds,
    kinds,
)
def test_of_usual_messages_those_that_are_asked_for_first_are_kept_of_everybody(
    script: list[tuple[int, int, int]], by_round: set[str], any_round: set[str]
) -> None:
    small = MessageBudget(MODEL, 4)
    small.SPARE = 0  # type: ignore[misc]
    put = [model(sender, round, size=size) for sender, round, size in script]
    kept = small.kept(put, by_round, any_round)
    unknown = "model" not in by_round | any_round
    for sender in range(4):
        rising = sorted((message for message in put if message.sender == sender), key=lambda m: m.round)
        if rising and ("model" in by_round or unknown):
            assert any(message is rising[0] for message in kept)
        if rising and ("model" in any_round or unknown):
            assert any(message is rising[-1] for message in kept)
