"""A mailbox keeps unclaimed messages, wakes receives, and neither loses nor duplicates messages."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.mailbox import Filter, Mailbox, Waiter
from shoal.message import Message, Payload


def message(sender: int = 1, round: int = 0, kind: str = "model") -> Message:
    return Message(sender, kind, round, Payload({}))


class Woken:
    """Counts how often it was called."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def start_receive(
    mailbox: Mailbox, kind: str = "model", round: int | None = None, *senders: int
) -> tuple[Waiter, Woken]:
    woken = Woken()
    return mailbox.start_receive(Filter(kind, round, senders or None), woken), woken


# Receives


def test_a_receive_finds_messages_that_arrived_before_it() -> None:
    mailbox = Mailbox()
    early = message()
    mailbox.put(early)
    waiter, woken = start_receive(mailbox, "model", 0, 1)
    assert waiter.done
    assert waiter.messages == [early]
    assert woken.times == 0  # it did not have to wait


def test_a_waiter_is_woken_once_when_its_last_message_arrives() -> None:
    mailbox = Mailbox()
    waiter, woken = start_receive(mailbox, "model", 0, 1, 2)
    mailbox.put(message(1))
    assert (waiter.done, woken.times, waiter.missing) == (False, 0, [2])
    mailbox.put(message(2))
    assert (waiter.done, woken.times, waiter.missing) == (True, 1, [])
    assert mailbox.waiting == []


def test_early_and_later_messages_make_up_one_receive() -> None:
    mailbox = Mailbox()
    mailbox.put(message(2))
    waiter, woken = start_receive(mailbox, "model", 0, 1, 2)
    assert not waiter.done
    mailbox.put(message(1))
    assert woken.times == 1
    assert [m.sender for m in waiter.messages] == [2, 1]


@pytest.mark.parametrize("other", [message(round=1), message(kind="request"), message(sender=3)], ids=str)
def test_messages_of_other_rounds_kinds_and_senders_stay_for_other_receives(other: Message) -> None:
    mailbox = Mailbox()
    waiter, _ = start_receive(mailbox, "model", 0, 1)
    mailbox.put(other)
    assert waiter.messages == []
    found, _ = start_receive(mailbox, other.kind, other.round, other.sender)
    assert found.messages == [other]


def test_a_receive_for_a_round_takes_one_message_of_each_sender_and_drops_repetitions() -> None:
    mailbox = Mailbox()
    first = message(1)
    mailbox.put(first)
    mailbox.put(message(1))  # before the first was asked for
    waiter, _ = start_receive(mailbox, "model", 0, 1, 2)
    assert (waiter.messages, mailbox.repeated) == ([first], 1)
    mailbox.put(message(1))  # while the receive waits for others
    mailbox.put(message(2))
    assert (waiter.done, len(waiter.messages), mailbox.repeated) == (True, 2, 2)
    mailbox.put(message(1))  # after the end of the receive
    again, _ = start_receive(mailbox, "model", 0, 1)
    mailbox.put(message(1))  # during a second receive
    assert (again.messages, mailbox.repeated) == ([], 4)
    assert mailbox.receive_available("model") == []


def test_repetitions_of_a_round_are_not_taken_for_the_next_round() -> None:
    mailbox = Mailbox()
    for round in (0, 0, 1, 0, 1):
        mailbox.put(message(1, round))
    assert [m.round for r in range(3) for m in start_receive(mailbox, "model", r, 1)[0].messages] == [0, 1]
    assert (mailbox.repeated, mailbox.late) == (3, 0)


@pytest.mark.parametrize(
    "wanted",
    [
        Filter("model"),
        Filter("model", 0),
        Filter("model", None, (1,)),
        Filter("model", 0, (1, 2), any_sender=True),
        Filter("model", 0, (1,), several=True),
    ],
    ids=str,
)
def test_other_receives_take_all_messages_of_a_sender(wanted: Filter) -> None:
    mailbox = Mailbox()
    for _ in range(3):
        mailbox.put(message(1))
    assert [mailbox.start_receive(wanted, Woken()).done for _ in range(4)] == [True, True, True, False]
    assert mailbox.repeated == 0


def test_messages_of_a_rejoined_node_do_not_count_as_repetitions() -> None:
    mailbox = Mailbox()
    mailbox.put(message(1))
    assert start_receive(mailbox, "model", 0, 1)[0].done
    mailbox.mark_failed(1)
    mailbox.mark_rejoined(1, 0)
    mailbox.put(message(1))
    assert start_receive(mailbox, "model", 0, 1)[0].done
    assert mailbox.repeated == 0


def test_a_round_that_is_asked_for_in_parts_is_remembered_as_a_whole() -> None:
    mailbox = Mailbox()
    for asked in ((1, 2), (3,), (4, 5)):
        mailbox.put(message(asked[0]))
        waiter, _ = start_receive(mailbox, "model", 0, *asked)
        for sender in asked[1:]:
            mailbox.put(message(sender))
        assert waiter.done
    for sender in range(1, 6):
        mailbox.put(message(sender))
    assert (mailbox.repeated, mailbox.receive_available("model")) == (5, [])


@pytest.mark.parametrize("early", [False, True], ids=["in time", "early"])
def test_remembered_senders_need_little_memory(early: bool) -> None:
    """A simulation of ten thousand nodes has as many mailboxes."""

    def run_rounds(mailbox: Mailbox) -> None:
        for round in range(2 * Mailbox.REMEMBERED):
            senders = tuple(range(20))
            for sender in senders if early else ():
                mailbox.put(message(sender, round))
            waiter, _ = start_receive(mailbox, "model", round, *senders)
            for sender in senders if not early else ():
                mailbox.put(message(sender, round))
            assert waiter.done

    run_rounds(Mailbox())  # allocate what is allocated only once
    mailbox = Mailbox()
    tracemalloc.start()
    try:
        run_rounds(mailbox)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 8_000


def test_a_repetition_for_a_round_that_is_not_remembered_is_late() -> None:
    mailbox = Mailbox()
    rounds = Mailbox.REMEMBERED + 3
    for round in range(rounds):
        mailbox.put(message(1, round))
        assert start_receive(mailbox, "model", round, 1)[0].done
    for round in range(rounds):
        mailbox.put(message(1, round))
    assert (mailbox.late, mailbox.repeated) == (3, Mailbox.REMEMBERED)
    mailbox.put(message(2, 2))  # senders that were not asked in that round are late too
    mailbox.put(message(1, 2, "other"))  # other kinds have their own rounds
    assert mailbox.late == 4
    assert start_receive(mailbox, "other", 2, 1)[0].done


def test_a_receive_from_any_node_takes_one_message_in_order_of_arrival() -> None:
    mailbox = Mailbox()
    for sender in (5, 3, 4):
        mailbox.put(message(sender))
    assert [start_receive(mailbox)[0].messages[0].sender for _ in range(3)] == [5, 3, 4]


def test_a_receive_without_a_round_takes_any_round() -> None:
    mailbox = Mailbox()
    waiter, woken = start_receive(mailbox, "model", None, 1)
    mailbox.put(message(1, round=41))
    assert (waiter.messages[0].round, woken.times) == (41, 1)


def test_a_receive_from_no_senders_is_done_at_once() -> None:
    waiter = Mailbox().start_receive(Filter("model", 0, ()), Woken())
    assert waiter.done
    assert waiter.messages == []


def test_the_earliest_receive_is_served_first() -> None:
    mailbox = Mailbox()
    (_, first), (_, second) = start_receive(mailbox), start_receive(mailbox)
    mailbox.put(message())
    assert (first.times, second.times) == (1, 0)
    mailbox.put(message())
    assert (first.times, second.times) == (1, 1)


# Timeouts


def test_an_ended_receive_keeps_its_messages_and_is_never_woken() -> None:
    mailbox = Mailbox()
    waiter, woken = start_receive(mailbox, "model", 0, 1, 2)
    mailbox.put(message(1))
    mailbox.end_receive(waiter)
    assert [m.sender for m in waiter.messages] == [1]
    mailbox.put(message(2))
    assert woken.times == 0


def test_messages_after_the_end_of_their_receive_are_late_and_counted() -> None:
    mailbox = Mailbox()
    waiter, _ = start_receive(mailbox, "model", 0, 1, 2)
    mailbox.end_receive(waiter)
    mailbox.put(message(2))
    mailbox.put(message(2, round=1))  # the next round is not late
    assert start_receive(mailbox, "model", 1, 2)[0].done
    assert mailbox.late == 1
    mailbox.put(message(1))  # it is still counted
    assert mailbox.late == 2


def test_a_second_receive_for_the_same_round_finds_messages_that_arrived_meanwhile() -> None:
    mailbox = Mailbox()
    mailbox.end_receive(start_receive(mailbox, "model", 0, 1)[0])
    mailbox.put(message(1))
    again, _ = start_receive(mailbox, "model", 0, 1)
    assert [m.sender for m in again.messages] == [1]
    assert mailbox.late == 0


def test_ending_a_receive_that_is_done_changes_nothing() -> None:
    mailbox = Mailbox()
    waiter, _ = start_receive(mailbox, "model", 0, 1)
    mailbox.put(message(1))
    mailbox.end_receive(waiter)
    mailbox.put(message(1))
    assert (mailbox.late, mailbox.repeated) == (0, 1)


# Failures


def test_a_receive_continues_without_failed_nodes() -> None:
    mailbox = Mailbox()
    waiter, woken = start_receive(mailbox, "model", 0, 1, 2)
    mailbox.put(message(1))
    mailbox.mark_failed(2)
    assert (waiter.done, woken.times) == (True, 1)
    assert [m.sender for m in waiter.messages] == [1]
    assert mailbox.failed == {2}


def test_a_receive_still_waits_for_nodes_that_have_not_failed() -> None:
    mailbox = Mailbox()
    waiter, woken = start_receive(mailbox, "model", 0, 1, 2)
    mailbox.mark_failed(2)
    assert (waiter.done, woken.times, waiter.missing) == (False, 0, [1])


def test_failed_nodes_are_not_waited_for_but_their_last_messages_are_received() -> None:
    mailbox = Mailbox()
    mailbox.put(message(2, round=0))
    mailbox.mark_failed(2)
    assert [m.sender for m in start_receive(mailbox, "model", 0, 2)[0].messages] == [2]
    later, _ = start_receive(mailbox, "model", 1, 2)
    assert later.done
    assert later.messages == []


def test_a_receive_from_any_node_does_not_end_with_a_failure() -> None:
    mailbox = Mailbox()
    waiter, woken = start_receive(mailbox)
    mailbox.mark_failed(2)
    assert (waiter.done, woken.times) == (False, 0)


# Limits and invariants


def test_beyond_the_limit_messages_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mailbox, "LIMIT", 3)
    mailbox = Mailbox()
    for round in range(5):
        mailbox.put(message(round=round))
    assert mailbox.dropped == 2
    assert start_receive(mailbox, "model", 2)[0].done
    assert not start_receive(mailbox, "model", 3)[0].done


def test_a_filter_describes_what_it_waits_for() -> None:
    assert str(Filter("model", 3, (1, 2))) == "'model' of round 3 from 1, 2"
    assert str(Filter("request")) == "'request' from any node"


small = st.integers(0, 2)
steps = st.one_of(
    st.tuples(st.just("put"), small, small),
    st.tuples(st.just("ask"), st.none() | small, st.none() | st.sets(small).map(tuple)),
    st.tuples(st.just("end"), small, small),
    st.tuples(st.just("fail"), small, small),
)


@given(st.lists(steps, max_size=40))
def test_every_message_is_taken_once_or_kept_or_counted_as_late_or_repeated(script: list[Any]) -> None:
    mailbox = Mailbox()
    asked: list[tuple[Waiter, Woken, bool]] = []
    ended: set[int] = set()
    put = 0
    for step, *details in script:
        if step == "put":
            mailbox.put(message(details[0], details[1]))
            put += 1
        elif step == "ask":
            woken = Woken()
            waiter = mailbox.start_receive(Filter("model", details[0], details[1]), woken)
            asked.append((waiter, woken, waiter.done))
        elif step == "fail":
            mailbox.mark_failed(details[0])
        elif mailbox.waiting:
            waiter = mailbox.waiting[details[0] % len(mailbox.waiting)]
            ended.add(id(waiter))
            mailbox.end_receive(waiter)

    for waiter, woken, done_at_once in asked:
        assert woken.times == (1 if waiter.done and not done_at_once and id(waiter) not in ended else 0)
        for m in waiter.messages:
            assert waiter.wanted.round in (None, m.round)
            assert waiter.wanted.senders is None or m.sender in waiter.wanted.senders
    for waiter in mailbox.waiting:
        mailbox.end_receive(waiter)
    taken = [id(m) for waiter, _, _ in asked for m in waiter.messages]
    while (rest := mailbox.start_receive(Filter("model"), Woken())).done:
        taken.extend(id(m) for m in rest.messages)
    assert len(set(taken)) == len(taken)
    assert len(taken) + mailbox.late + mailbox.repeated == put


# The first of several


def test_the_first_of_several_ends_the_receive_and_the_others_stay() -> None:
    mailbox = Mailbox()
    woken = Woken()
    waiter = mailbox.start_receive(Filter("model", None, (1, 2), any_sender=True), woken)
    for sender in (3, 2, 1):
        mailbox.put(message(sender))
    assert (waiter.done, woken.times, [m.sender for m in waiter.messages]) == (True, 1, [2])
    assert [m.sender for m in start_receive(mailbox, "model", None, 1)[0].messages] == [1]


def test_a_receive_for_the_first_of_several_ends_when_all_have_failed() -> None:
    mailbox = Mailbox()
    woken = Woken()
    waiter = mailbox.start_receive(Filter("model", None, (1, 2), any_sender=True), woken)
    mailbox.mark_failed(1)
    assert not waiter.done
    mailbox.mark_failed(2)
    assert (waiter.done, woken.times, waiter.messages) == (True, 1, [])
    assert mailbox.start_receive(Filter("model", None, (), any_sender=True), woken).done


# Senders that were restarted


def test_messages_of_an_earlier_incarnation_are_dropped() -> None:
    def sent(round: int, incarnation: int) -> Message:
        return Message(1, "model", round, Payload({}), incarnation=incarnation)

    mailbox = Mailbox()
    mailbox.put(sent(4, 0))
    mailbox.put(sent(5, 0))
    assert mailbox.start_receive(Filter("model", 4, (1,)), lambda: None).messages
    mailbox.mark_failed(1)
    mailbox.put(Message(1, "rejoin", 0, Payload({}), incarnation=1))
    mailbox.mark_rejoined(1, 5)
    late, new = sent(5, 0), sent(5, 1)
    mailbox.put(late)  # it was in transit for long
    mailbox.put(new)
    assert mailbox.start_receive(Filter("model", 5, (1,)), lambda: None).messages == [new]
    assert (mailbox.dropped, mailbox.repeated, mailbox.late) == (2, 0, 0)


def test_a_message_is_repeated_while_its_receive_still_waits_for_others() -> None:
    mailbox = Mailbox()
    waiter, woken = start_receive(mailbox, "model", 0, 1, 2)
    first = message(1)
    mailbox.put(first)
    mailbox.put(message(1))
    assert (mailbox.repeated, waiter.messages, woken.times) == (1, [first], 0)
    mailbox.put(message(2))
    mailbox.put(message(2))
    assert (mailbox.repeated, woken.times) == (2, 1)


def test_a_message_of_a_node_that_rejoined_during_a_receive_repeats_nothing() -> None:
    mailbox = Mailbox()
    waiter, _ = start_receive(mailbox, "model", 0, 1, 2)
    mailbox.put(message(1))
    mailbox.mark_failed(1)
    mailbox.mark_rejoined(1, 0)
    again = Message(1, "model", 0, Payload({}), incarnation=1)
    mailbox.put(again)
    assert mailbox.repeated == 0
    mailbox.put(message(2))
    assert waiter.done
    later, _ = start_receive(mailbox, "model", 0, 1)
    assert later.messages == [again]


def test_a_sender_that_a_receive_gave_up_on_may_still_send() -> None:
    mailbox = Mailbox()
    waiter, _ = start_receive(mailbox, "model", 0, 1, 2)
    mailbox.put(message(1))
    mailbox.end_receive(waiter)
    late = message(2)
    mailbox.put(late)
    mailbox.put(message(1))
    assert mailbox.repeated == 1
    again, _ = start_receive(mailbox, "model", 0, 2)
    assert again.messages == [late]
