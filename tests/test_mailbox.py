"""A mailbox keeps what nobody has asked for, wakes whoever waits, and loses or doubles nothing."""

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


def ask(mailbox: Mailbox, kind: str = "model", round: int | None = None, *senders: int) -> tuple[Waiter, Woken]:
    woken = Woken()
    return mailbox.ask(Filter(kind, round, senders or None), woken), woken


# Asking


def test_what_came_early_is_there_when_it_is_asked_for() -> None:
    mailbox = Mailbox()
    early = message()
    mailbox.put(early)
    waiter, woken = ask(mailbox, "model", 0, 1)
    assert waiter.done
    assert waiter.messages == [early]
    assert woken.times == 0  # nobody was asleep


def test_a_waiter_is_woken_once_when_the_last_it_wants_has_come() -> None:
    mailbox = Mailbox()
    waiter, woken = ask(mailbox, "model", 0, 1, 2)
    mailbox.put(message(1))
    assert (waiter.done, woken.times, waiter.missing) == (False, 0, [2])
    mailbox.put(message(2))
    assert (waiter.done, woken.times, waiter.missing) == (True, 1, [])
    assert mailbox.waiting == []


def test_early_and_later_messages_make_up_one_receive() -> None:
    mailbox = Mailbox()
    mailbox.put(message(2))
    waiter, woken = ask(mailbox, "model", 0, 1, 2)
    assert not waiter.done
    mailbox.put(message(1))
    assert woken.times == 1
    assert [m.sender for m in waiter.messages] == [2, 1]


@pytest.mark.parametrize("other", [message(round=1), message(kind="request"), message(sender=3)], ids=str)
def test_other_rounds_kinds_and_senders_are_left_for_who_asks_for_them(other: Message) -> None:
    mailbox = Mailbox()
    waiter, _ = ask(mailbox, "model", 0, 1)
    mailbox.put(other)
    assert waiter.messages == []
    found, _ = ask(mailbox, other.kind, other.round, other.sender)
    assert found.messages == [other]


def test_a_receive_for_a_round_takes_one_message_of_each_sender_and_drops_what_repeats_it() -> None:
    mailbox = Mailbox()
    first = message(1)
    mailbox.put(first)
    mailbox.put(message(1))  # before the first was asked for
    waiter, _ = ask(mailbox, "model", 0, 1, 2)
    assert (waiter.messages, mailbox.repeated) == ([first], 1)
    mailbox.put(message(1))  # while others are waited for
    mailbox.put(message(2))
    assert (waiter.done, len(waiter.messages), mailbox.repeated) == (True, 2, 2)
    mailbox.put(message(1))  # when the receive is over
    again, _ = ask(mailbox, "model", 0, 1)
    mailbox.put(message(1))  # and when somebody asks once more
    assert (again.messages, mailbox.repeated) == ([], 4)
    assert mailbox.collect("model") == []


def test_what_repeats_a_round_is_not_taken_for_the_next() -> None:
    mailbox = Mailbox()
    for round in (0, 0, 1, 0, 1):
        mailbox.put(message(1, round))
    assert [m.round for r in range(3) for m in ask(mailbox, "model", r, 1)[0].messages] == [0, 1]
    assert (mailbox.repeated, mailbox.late) == (3, 0)


@pytest.mark.parametrize(
    "wanted",
    [
        Filter("model"),
        Filter("model", 0),
        Filter("model", None, (1,)),
        Filter("model", 0, (1, 2), first=True),
        Filter("model", 0, (1,), more=True),
    ],
    ids=str,
)
def test_whoever_does_not_ask_for_one_of_each_and_a_round_gets_all_of_a_sender(wanted: Filter) -> None:
    mailbox = Mailbox()
    for _ in range(3):
        mailbox.put(message(1))
    assert [mailbox.ask(wanted, Woken()).done for _ in range(4)] == [True, True, True, False]
    assert mailbox.repeated == 0


def test_what_one_that_came_back_says_is_not_taken_for_what_it_said_before() -> None:
    mailbox = Mailbox()
    mailbox.put(message(1))
    assert ask(mailbox, "model", 0, 1)[0].done
    mailbox.mark_failed(1)
    mailbox.mark_rejoined(1, 0)
    mailbox.put(message(1))
    assert ask(mailbox, "model", 0, 1)[0].done
    assert mailbox.repeated == 0


def test_a_round_that_is_asked_for_in_parts_is_remembered_as_a_whole() -> None:
    mailbox = Mailbox()
    for asked in ((1, 2), (3,), (4, 5)):
        mailbox.put(message(asked[0]))
        waiter, _ = ask(mailbox, "model", 0, *asked)
        for sender in asked[1:]:
            mailbox.put(message(sender))
        assert waiter.done
    for sender in range(1, 6):
        mailbox.put(message(sender))
    assert (mailbox.repeated, mailbox.collect("model")) == (5, [])


@pytest.mark.parametrize("early", [False, True], ids=["waited for", "early"])
def test_who_was_heard_takes_little_memory(early: bool) -> None:
    """There is a mailbox for every node of a simulation, and they may be ten thousand."""

    def rounds_go_by(mailbox: Mailbox) -> None:
        for round in range(2 * Mailbox.REMEMBERED):
            senders = tuple(range(20))
            for sender in senders if early else ():
                mailbox.put(message(sender, round))
            waiter, _ = ask(mailbox, "model", round, *senders)
            for sender in senders if not early else ():
                mailbox.put(message(sender, round))
            assert waiter.done

    rounds_go_by(Mailbox())  # what is only made once is there
    mailbox = Mailbox()
    tracemalloc.start()
    try:
        rounds_go_by(mailbox)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 8_000


def test_what_repeats_a_round_of_long_ago_is_late() -> None:
    mailbox = Mailbox()
    rounds = Mailbox.REMEMBERED + 3
    for round in range(rounds):
        mailbox.put(message(1, round))
        assert ask(mailbox, "model", round, 1)[0].done
    for round in range(rounds):
        mailbox.put(message(1, round))
    assert (mailbox.late, mailbox.repeated) == (3, Mailbox.REMEMBERED)
    mailbox.put(message(2, 2))  # who was never asked in that round is late as well
    mailbox.put(message(1, 2, "other"))  # other kinds have rounds of their own
    assert mailbox.late == 4
    assert ask(mailbox, "other", 2, 1)[0].done


def test_a_receive_from_anyone_takes_one_message_in_order_of_arrival() -> None:
    mailbox = Mailbox()
    for sender in (5, 3, 4):
        mailbox.put(message(sender))
    assert [ask(mailbox)[0].messages[0].sender for _ in range(3)] == [5, 3, 4]


def test_without_a_round_any_round_will_do() -> None:
    mailbox = Mailbox()
    waiter, woken = ask(mailbox, "model", None, 1)
    mailbox.put(message(1, round=41))
    assert (waiter.messages[0].round, woken.times) == (41, 1)


def test_asking_for_nobody_is_done_at_once() -> None:
    waiter = Mailbox().ask(Filter("model", 0, ()), Woken())
    assert waiter.done
    assert waiter.messages == []


def test_who_asked_first_is_served_first() -> None:
    mailbox = Mailbox()
    (_, first), (_, second) = ask(mailbox), ask(mailbox)
    mailbox.put(message())
    assert (first.times, second.times) == (1, 0)
    mailbox.put(message())
    assert (first.times, second.times) == (1, 1)


# Giving up


def test_a_withdrawn_receive_keeps_what_came_and_is_never_woken() -> None:
    mailbox = Mailbox()
    waiter, woken = ask(mailbox, "model", 0, 1, 2)
    mailbox.put(message(1))
    mailbox.withdraw(waiter)
    assert [m.sender for m in waiter.messages] == [1]
    mailbox.put(message(2))
    assert woken.times == 0


def test_what_comes_after_its_receive_gave_up_is_late_and_counted() -> None:
    mailbox = Mailbox()
    waiter, _ = ask(mailbox, "model", 0, 1, 2)
    mailbox.withdraw(waiter)
    mailbox.put(message(2))
    mailbox.put(message(2, round=1))  # the next round is not late
    assert ask(mailbox, "model", 1, 2)[0].done
    assert mailbox.late == 1
    mailbox.put(message(1))  # nor is it too late to count
    assert mailbox.late == 2


def test_asking_again_for_what_was_given_up_finds_what_came_meanwhile() -> None:
    mailbox = Mailbox()
    mailbox.withdraw(ask(mailbox, "model", 0, 1)[0])
    mailbox.put(message(1))
    again, _ = ask(mailbox, "model", 0, 1)
    assert [m.sender for m in again.messages] == [1]
    assert mailbox.late == 0


def test_withdrawing_what_is_done_changes_nothing() -> None:
    mailbox = Mailbox()
    waiter, _ = ask(mailbox, "model", 0, 1)
    mailbox.put(message(1))
    mailbox.withdraw(waiter)
    mailbox.put(message(1))
    assert (mailbox.late, mailbox.repeated) == (0, 1)


# Death


def test_a_receive_goes_on_without_the_dead() -> None:
    mailbox = Mailbox()
    waiter, woken = ask(mailbox, "model", 0, 1, 2)
    mailbox.put(message(1))
    mailbox.mark_failed(2)
    assert (waiter.done, woken.times) == (True, 1)
    assert [m.sender for m in waiter.messages] == [1]
    assert mailbox.failed == {2}


def test_a_receive_that_others_still_owe_goes_on_waiting() -> None:
    mailbox = Mailbox()
    waiter, woken = ask(mailbox, "model", 0, 1, 2)
    mailbox.mark_failed(2)
    assert (waiter.done, woken.times, waiter.missing) == (False, 0, [1])


def test_the_dead_are_not_waited_for_but_their_last_words_are_heard() -> None:
    mailbox = Mailbox()
    mailbox.put(message(2, round=0))
    mailbox.mark_failed(2)
    assert [m.sender for m in ask(mailbox, "model", 0, 2)[0].messages] == [2]
    gone, _ = ask(mailbox, "model", 1, 2)
    assert gone.done
    assert gone.messages == []


def test_a_receive_from_anyone_does_not_end_with_a_death() -> None:
    mailbox = Mailbox()
    waiter, woken = ask(mailbox)
    mailbox.mark_failed(2)
    assert (waiter.done, woken.times) == (False, 0)


# Limits and laws


def test_beyond_the_limit_messages_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mailbox, "LIMIT", 3)
    mailbox = Mailbox()
    for round in range(5):
        mailbox.put(message(round=round))
    assert mailbox.dropped == 2
    assert ask(mailbox, "model", 2)[0].done
    assert not ask(mailbox, "model", 3)[0].done


def test_a_filter_says_what_it_waits_for() -> None:
    assert str(Filter("model", 3, (1, 2))) == "'model' of round 3 from 1, 2"
    assert str(Filter("request")) == "'request' from anyone"


small = st.integers(0, 2)
steps = st.one_of(
    st.tuples(st.just("put"), small, small),
    st.tuples(st.just("ask"), st.none() | small, st.none() | st.sets(small).map(tuple)),
    st.tuples(st.just("withdraw"), small, small),
    st.tuples(st.just("lose"), small, small),
)


@given(st.lists(steps, max_size=40))
def test_every_message_goes_to_one_receive_or_is_kept_or_is_counted_as_late_or_repeated(script: list[Any]) -> None:
    mailbox = Mailbox()
    asked: list[tuple[Waiter, Woken, bool]] = []
    withdrawn: set[int] = set()
    put = 0
    for step, *details in script:
        if step == "put":
            mailbox.put(message(details[0], details[1]))
            put += 1
        elif step == "ask":
            woken = Woken()
            waiter = mailbox.ask(Filter("model", details[0], details[1]), woken)
            asked.append((waiter, woken, waiter.done))
        elif step == "lose":
            mailbox.mark_failed(details[0])
        elif mailbox.waiting:
            waiter = mailbox.waiting[details[0] % len(mailbox.waiting)]
            withdrawn.add(id(waiter))
            mailbox.withdraw(waiter)

    for waiter, woken, done_at_once in asked:
        assert woken.times == (1 if waiter.done and not done_at_once and id(waiter) not in withdrawn else 0)
        for m in waiter.messages:
            assert waiter.wanted.round in (None, m.round)
            assert waiter.wanted.senders is None or m.sender in waiter.wanted.senders
    for waiter in mailbox.waiting:
        mailbox.withdraw(waiter)
    taken = [id(m) for waiter, _, _ in asked for m in waiter.messages]
    while (rest := mailbox.ask(Filter("model"), Woken())).done:
        taken.extend(id(m) for m in rest.messages)
    assert len(set(taken)) == len(taken)
    assert len(taken) + mailbox.late + mailbox.repeated == put


# The first of several


def test_the_first_of_several_ends_the_wait_and_the_others_are_left() -> None:
    mailbox = Mailbox()
    woken = Woken()
    waiter = mailbox.ask(Filter("model", None, (1, 2), first=True), woken)
    for sender in (3, 2, 1):
        mailbox.put(message(sender))
    assert (waiter.done, woken.times, [m.sender for m in waiter.messages]) == (True, 1, [2])
    assert [m.sender for m in ask(mailbox, "model", None, 1)[0].messages] == [1]


def test_a_wait_for_the_first_of_several_ends_when_all_of_them_have_died() -> None:
    mailbox = Mailbox()
    woken = Woken()
    waiter = mailbox.ask(Filter("model", None, (1, 2), first=True), woken)
    mailbox.mark_failed(1)
    assert not waiter.done
    mailbox.mark_failed(2)
    assert (waiter.done, woken.times, waiter.messages) == (True, 1, [])
    assert mailbox.ask(Filter("model", None, (), first=True), woken).done
