"""The network process with invalid reports: it ignores them, and its clock is not affected."""

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
"""Milliseconds: a generous timeout for operations that are fast on an idle machine."""


def empty(links: Uniform = Uniform()) -> Timetable:  # noqa: B008 - frozen
    """A timetable of three nodes, before the run begins."""
    return Timetable(NetworkModel(links.build(3, seed=0).initial_state, 3, seed=0), iter(()))


def left_at(node: Any, ticket: int) -> float:
    """Send a message, and return when it has left."""
    node.send(encode(Submission(ticket, 2, 100, time.monotonic(), True)))
    assert node.poll(LONG), "the network process does not answer"
    (report,) = decode_network_reports(node.recv())
    assert report == Departure(ticket, report.time or 0.0, True)
    return float(report.time)


IMPLAUSIBLE_TIMES = pytest.mark.parametrize("ahead", [math.inf, math.nan, -math.inf, 100.0, 1e300, -1e9])
"""Seconds from now: in the future, long before the run, or not a time."""


@IMPLAUSIBLE_TIMES
def test_a_submission_outside_the_time_of_the_run_is_ignored(network: Any, ahead: float) -> None:  # noqa: F811
    node, _ = network
    honest, forger = node(0), node(1)
    before = left_at(honest, 1)
    forger.send(encode(Submission(9, 2, 100, time.monotonic() + ahead, True)))
    assert left_at(forger, 10) > before, "its later messages are processed"
    asked = time.monotonic()
    assert asked < left_at(honest, 2) < time.monotonic()
    assert not forger.poll(100), "an ignored message has no reports"


@IMPLAUSIBLE_TIMES
def test_a_registration_outside_the_time_of_the_run_is_ignored(ahead: float) -> None:
    """A failure of a node that registers with a future time would never be noticed."""
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


def test_a_negative_message_size_is_invalid() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_node_report(encode(Submission(1, 2, -5, 1.0, True)))


def test_reports_of_the_current_time_are_plausible() -> None:
    timetable = empty()
    timetable.begin(5.0)
    for since in (5.0, 7.0):
        assert timetable.is_plausible(Registration(since), 7.0)
        assert timetable.is_plausible(Submission(1, 2, 0, since, True), 7.0)


def test_a_receiver_learns_that_a_message_is_in_transit_and_then_when_it_arrives() -> None:
    timetable = empty(Uniform(upload=8.0, latency=0.5))
    timetable.begin(10.0)
    reports: ReportsByNode = {}
    timetable.submit(0, Submission(7, 1, 1_000_000, 10.0, True), reports)
    timetable.catch_up(0.01, reports)
    assert not reports, "it may leave soon"
    assert timetable.next_time() == pytest.approx(0.02)
    timetable.catch_up(0.02, reports)
    assert reports == {1: {(0, 7): Arrival(0, 7, math.inf)}}
    timetable.catch_up(1.1, reports)
    assert reports.pop(0) == {(None, 7): Departure(7, pytest.approx(11.0), True)}
    assert reports == {1: {(0, 7): Arrival(0, 7, pytest.approx(11.5))}}, "the later report replaces the first"


def test_a_receiver_gets_one_report_of_a_message_that_leaves_quickly() -> None:
    timetable = empty()
    timetable.begin(0.0)
    reports: ReportsByNode = {}
    timetable.submit(0, Submission(7, 1, 100, 0.0, False), reports)
    timetable.catch_up(0.0, reports)
    assert reports.pop(1) == {(0, 7): Arrival(0, 7, pytest.approx(0.001))}
    timetable.catch_up(1.0, reports)
    assert not reports
