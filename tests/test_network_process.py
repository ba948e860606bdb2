"""The network's process when it is told nonsense: it goes on, by its own clock."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import pytest
import zmq

from shoal.engines.processes.network_process import NodeReports, ReportsByNode, Timetable
from shoal.engines.processes.shaper import (
    Arrival,
    Departure,
    Registration,
    Submission,
    decode_network_reports,
    decode_node_report,
    encode,
    identity,
)
from shoal.environment.network.links import Uniform
from shoal.environment.network.model import NetworkModel
from test_environment_processes import network  # noqa: F401 - a fixture

LONG = 60_000
"""Milliseconds for what takes a moment on a machine that has time."""


def empty(links: Uniform = Uniform()) -> Timetable:  # noqa: B008 - frozen
    """Of three nodes, before the run begins."""
    return Timetable(NetworkModel(links.build(3, seed=0).initial_state, 3, seed=0), iter(()))


def left_at(node: Any, ticket: int) -> float:
    """When a message has left that is sent now."""
    node.send(encode(Submission(ticket, 2, 100, time.monotonic(), True)))
    assert node.poll(LONG), "nobody gets an answer any longer"
    (said,) = decode_network_reports(node.recv())
    assert said == Departure(ticket, said.time or 0.0, True)
    return float(said.time)


NEVER = pytest.mark.parametrize("ahead", [math.inf, math.nan, -math.inf, 100.0, 1e300, -1e9])
"""Seconds from now: not yet, long before the run, or at no time."""


@NEVER
def test_a_message_that_was_sent_at_no_time_of_the_run_is_left_out(network: Any, ahead: float) -> None:  # noqa: F811
    node, _ = network
    honest, liar = node(0), node(1)
    before = left_at(honest, 1)
    liar.send(encode(Submission(9, 2, 100, time.monotonic() + ahead, True)))
    assert left_at(liar, 10) > before, "what it says after that is heard"
    asked = time.monotonic()
    assert asked < left_at(honest, 2) < time.monotonic()
    assert not liar.poll(100), "nothing is said of what was left out"


@NEVER
def test_one_that_listens_since_no_time_of_the_run_is_not_there(ahead: float) -> None:
    """One that listens since a time to come could never be known to have died."""
    timetable = empty()
    timetable.begin(time.monotonic())
    with zmq.Context() as context, context.socket(zmq.ROUTER) as nodes, context.socket(zmq.DEALER) as node:
        nodes.bind("inproc://nodes")
        node.setsockopt(zmq.IDENTITY, identity(1))
        node.connect("inproc://nodes")
        reports = NodeReports(nodes, 3, timetable, None, pytest.fail)
        node.send(encode(Registration(time.monotonic() + ahead)))
        assert reports.read() == []
        assert not reports.registered
        since = time.monotonic()
        node.send(encode(Registration(since)))
        assert reports.read() == []
        assert reports.registered == {1: since}


def test_a_message_of_less_than_nothing_is_none() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_node_report(encode(Submission(1, 2, -5, 1.0, True)))


def test_what_is_said_at_this_very_moment_is_believed() -> None:
    timetable = empty()
    timetable.begin(5.0)
    for since in (5.0, 7.0):
        assert timetable.is_plausible(Registration(since), 7.0)
        assert timetable.is_plausible(Submission(1, 2, 0, since, True), 7.0)


def test_a_receiver_is_told_that_a_message_is_on_its_way_and_then_when_it_is_there() -> None:
    timetable = empty(Uniform(upload=8.0, latency=0.5))
    timetable.begin(10.0)
    told: ReportsByNode = {}
    timetable.submit(0, Submission(7, 1, 1_000_000, 10.0, True), told)
    timetable.catch_up(0.01, told)
    assert not told, "it might be there in a moment"
    assert timetable.next_time() == pytest.approx(0.02)
    timetable.catch_up(0.02, told)
    assert told == {1: {(0, 7): Arrival(0, 7, math.inf)}}
    timetable.catch_up(1.1, told)
    assert told.pop(0) == {(None, 7): Departure(7, pytest.approx(11.0), True)}
    assert told == {1: {(0, 7): Arrival(0, 7, pytest.approx(11.5))}}, "the later word takes the place of the first"


def test_a_receiver_is_told_once_of_a_message_that_has_left_in_a_moment() -> None:
    timetable = empty()
    timetable.begin(0.0)
    told: ReportsByNode = {}
    timetable.submit(0, Submission(7, 1, 100, 0.0, False), told)
    timetable.catch_up(0.0, told)
    assert told.pop(1) == {(0, 7): Arrival(0, 7, pytest.approx(0.001))}
    timetable.catch_up(1.0, told)
    assert not told
