"""A mailbox has room for what is ahead of its time, and whoever fills it takes nothing from the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.message import Message, Payload
from shoal.runtime import Filter, Mailbox, Room

MODEL = 40_000
"""Bytes."""
NODES = 6
FAR = 10**9


def model(sender: int = 1, round: int = 0, kind: str = "model", size: int = MODEL) -> Message:
    return Message(sender, kind, round, Payload({"params": np.zeros(size // 4, np.float32)}))


def mailbox() -> Mailbox:
    return Mailbox(Room(MODEL, NODES))


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
    assert sum(message.wire_size for message in kept) <= Room(MODEL, NODES).size < 2**24
    assert full.dropped == 2_000 - len(kept) > 0


def test_many_small_messages_do_not_fill_it_either() -> None:
    full = mailbox()
    for number in range(20_000):
        full.put(model(1, FAR + number, size=0))
    assert len(full.collect("model")) * Room.EACH <= Room(MODEL, NODES).size
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
    everybody = Mailbox(Room(MODEL, 500))
    for round in range(Room.AHEAD):
        for sender in range(500):
            everybody.put(model(sender, round))
    assert everybody.dropped == 0


def test_a_node_that_sends_long_messages_has_room_for_those_of_others() -> None:
    long = 100 * MODEL
    modest, talkative = mailbox(), mailbox()
    assert talkative.room is not None
    talkative.room.expect(long)
    for each in (modest, talkative):
        for round in range(Room.AHEAD):
            for sender in range(NODES):
                each.put(model(sender, round, size=long))
    assert modest.dropped > 0
    assert talkative.dropped == 0
    assert all(asked(modest, sender, 0) for sender in range(NODES)), "the next message of each is kept, however long"


def test_what_is_claimed_makes_room_again() -> None:
    ordinary = mailbox()
    for round in range(1_000):
        ordinary.put(model(1, round))
        assert asked(ordinary, 1, round)
    assert ordinary.dropped == 0


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


@given(messages, st.integers(0, 3 * MODEL), st.sets(st.sampled_from(["model", "other"])))
def test_what_is_kept_fits_is_in_order_and_has_the_next_of_everybody(
    script: list[tuple[int, str, int, int]], usual: int, kinds: set[str]
) -> None:
    small = Room(usual, 1)
    small.SPARE, small.BESIDE = 2, 0  # type: ignore[misc]
    put = [model(sender, round, kind, size) for sender, kind, round, size in script]
    kept = small.kept(put, kinds)
    places = [next(place for place, each in enumerate(put) if each is message) for message in kept]
    assert places == sorted(places)
    first = {}
    for message in sorted(put, key=lambda m: (m.kind not in kinds, m.round)):
        first.setdefault(message.sender, message)
    assert all(any(message is each for each in kept) for message in first.values())
    beside = [message for message in kept if not any(message is each for each in first.values())]
    assert sum(message.wire_size + Room.EACH for message in beside) <= small.size or len(kept) == len(put)
