"""The network process: reports to nodes, and invalid reports, which it ignores and which do not affect its clock."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.network_process import NetworkProcess, NodeReports, ReportsByNode, Timetable
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
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup

LONG = 60_000
"""Milliseconds: a generous timeout for operations that are fast on an idle machine."""


EXPERIMENT = Experiment(
    nodes=6,
    engine="processes",
    network={"name": "uniform", "latency": 0.02, "upload": 20, "download": 20},
    model={"name": "mlp", "hidden": (32,)},
)


def empty(links: Uniform = Uniform()) -> Timetable:  # noqa: B008 - frozen
    """A timetable of three nodes, before the run begins."""
    return Timetable(NetworkModel(links.build(3, seed=0).initial_state, 3, seed=0), iter(()))


@pytest.fixture
def network() -> Iterator[tuple[Callable[[int], Any], float]]:
    """A function that connects a node to a network process, which runs in a thread, and the start of the run."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as coordinator:
        port = coordinator.bind_to_random_port("tcp://127.0.0.1")
        process = NetworkProcess(
            Setup(EXPERIMENT), control.StartNodes([], "run", control_endpoint=f"tcp://127.0.0.1:{port}")
        )
        thread = threading.Thread(target=process.serve)
        thread.start()
        line, hello = coordinator.recv_multipart()
        epoch = time.monotonic()
        coordinator.send_multipart([line, control.encode(control.Start([], epoch))])
        nodes = []

        def node(id: int, name: bytes | None = None) -> Any:
            nodes.append(socket := context.socket(zmq.DEALER))
            socket.setsockopt(zmq.IDENTITY, name or identity(id, "run"))
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(control.decode_from_node(hello).endpoint)
            socket.send(encode(Registration(time.monotonic())))
            return socket

        yield node, epoch
        coordinator.send_multipart([line, control.encode(control.Finish())])
        thread.join(60)
        for socket in nodes:
            socket.close()
        assert not thread.is_alive()


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
def test_a_submission_outside_the_time_of_the_run_is_ignored(network: Any, ahead: float) -> None:
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
        node.setsockopt(zmq.IDENTITY, identity(1, "run"))
        node.connect("inproc://nodes")
        reports = NodeReports(nodes, 3, "run", timetable, None, pytest.fail)
        node.send(encode(Registration(time.monotonic() + ahead)))
        assert reports.read() == []
        assert not reports.registered
        since = time.monotonic()
        node.send(encode(Registration(since)))
        assert reports.read() == []
        assert reports.registered == {1: since}


def test_a_process_without_the_secret_of_the_run_cannot_take_over_an_identity(network: Any) -> None:
    node, _ = network
    honest = node(0)
    left_at(honest, 1)
    for claimed in (b"n0", b"n00", identity(0, "guess"), identity(0, ""), b"n0 run 12345678"[:-1]):
        forger = node(0, claimed)
        forger.send(encode(Submission(9, 2, 100, time.monotonic(), True)))
        assert not forger.poll(200), "it gets no reports"
        left_at(honest, 2)


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


def test_a_node_that_registers_late_learns_of_earlier_messages(network: Any) -> None:
    node, epoch = network
    early = node(0)
    early.send(encode(Submission(7, 1, 100, epoch, True)))
    (left,) = decode_network_reports(early.recv())
    assert left == Departure(7, left.time or 0.0, True)
    time.sleep(0.1)
    late = node(1)
    assert late.poll(60_000)
    (due,) = decode_network_reports(late.recv())
    assert due == Arrival(0, 7, due.time)
    assert due.time == pytest.approx(epoch + 0.02 + 100 / (20 * 125_000), abs=1e-3)
