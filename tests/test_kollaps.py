"""Networks that are built from Kollaps files: routes, events and replicas."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kollaps_files import LINKS, SCHEDULE, SERVICES, text
from routes import bandwidth, route
from shoal.environment.network import AvailabilityChange, NetworkTimeline
from shoal.environment.network.kollaps import Description, Kollaps, Link, Service, ServiceEvent, write
from shoal.environment.network.network import MEGABIT


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., NetworkTimeline]:
    def build(nodes: int, seed: int = 0, options: dict[str, Any] | None = None, **sections: str) -> NetworkTimeline:
        file = tmp_path / "net.xml"
        file.write_text(text(**sections))
        return Kollaps(file, **(options or {})).build(nodes, seed)

    return build


# End-to-end routes


def test_a_route_has_the_sum_of_latencies_and_the_least_bandwidth(built: Callable[..., NetworkTimeline]) -> None:
    ((_, network),) = built(4).states
    there, back = route(network, 0, 2), route(network, 2, 0)
    assert there.latency == back.latency == pytest.approx(0.016)
    assert there.jitter == back.jitter == pytest.approx(0.005)
    assert there.loss == back.loss == pytest.approx(1 - 0.9 * 0.8)
    assert bandwidth(network, 0, 2) == 20
    assert bandwidth(network, 2, 0) == 0.5
    assert bandwidth(network, 0, 1) == 50
    assert route(network, 0, 1).loss == pytest.approx(1 - 0.9 * 0.9)


def test_replicas_have_their_own_links_and_share_links_between_bridges(built: Callable[..., NetworkTimeline]) -> None:
    ((_, network),) = built(4).states
    one, other = route(network, 0, 2).links, route(network, 1, 3).links
    assert len(one) == len(other) == 3
    assert set(one) & set(other) == {one[1]}
    assert not set(one) & set(route(network, 2, 0).links)  # each direction is a link
    assert [len(network.access(node)) for node in range(4)] == [2] * 4
    assert one[0] in network.access(0)
    assert one[2] in network.access(2)


def test_replicas_may_share_their_link(built: Callable[..., NetworkTimeline]) -> None:
    services = SERVICES.replace('name="client"', 'name="client" share="true"')
    ((_, network),) = built(4, services=services).states
    one, other = route(network, 0, 2), route(network, 1, 3)
    assert one.latency == pytest.approx(0.016)
    assert one.loss == pytest.approx(1 - 0.9 * 0.8)
    assert bandwidth(network, 0, 2) == 20
    assert len(set(one.links) & set(other.links)) == 2
    assert route(network, 0, 1).latency == 0  # on their side of the link


def test_an_event_changes_a_shared_link_once_for_all_replicas(built: Callable[..., NetworkTimeline]) -> None:
    services = SERVICES.replace('name="client"', 'name="client" share="true"')
    dynamic = '<schedule origin="client" dest="left" time="1" latency="50" upload="2Mbps" download="3Mbps" drop="0"/>'
    (_, after) = (network for _, network in built(4, services=services, dynamic=dynamic).states)
    assert route(after, 0, 2).latency == route(after, 2, 1).latency == pytest.approx(0.061)
    assert route(after, 0, 2).loss == pytest.approx(0.2)
    assert (bandwidth(after, 0, 2), float(after.capacities[route(after, 2, 0).links[2]]) / MEGABIT) == (2, 3)
    assert route(after, 0, 1).latency == 0


def test_a_link_without_a_download_is_one_way(built: Callable[..., NetworkTimeline]) -> None:
    links = '<link origin="client" dest="server" latency="1" upload="1Mbps"/>'
    ((_, network),) = built(4, links=links).states
    assert len(route(network, 0, 2).links) == 1
    assert network.route(2, 0) is None
    assert network.route(0, 1) is None


def test_the_shortest_path_has_the_fewest_links_or_the_least_latency(
    built: Callable[..., NetworkTimeline],
) -> None:
    links = LINKS + '<link origin="client" dest="right" latency="100" upload="9Mbps" download="9Mbps"/>'
    by_hops = built(4, links=links).initial_state
    by_latency = built(4, links=links, options={"by": "latency"}).initial_state
    assert route(by_hops, 0, 2).latency == pytest.approx(0.101)
    assert route(by_latency, 0, 2).latency == pytest.approx(0.016)
    parallel = LINKS + '<link origin="left" dest="right" latency="2" upload="7Mbps" download="7Mbps"/>'
    assert bandwidth(built(4, links=parallel).initial_state, 0, 2) == 7  # as many links, and less latency
    assert bandwidth(built(4, links=parallel, options={"by": "latency"}).initial_state, 0, 2) == 7
    alike = LINKS + '<link origin="left" dest="right" latency="10" upload="7Mbps" download="7Mbps"/>'
    assert bandwidth(built(4, links=alike).initial_state, 0, 2) == 20  # the first in the file


NAMES = ["a", "b", "c", "d", "e"]
link_lists = st.lists(
    st.builds(
        lambda ends, latency, upload, download, jitter, drop: Link(*ends, latency, upload, download, jitter, drop),
        st.sampled_from(list(itertools.permutations(NAMES, 2))),
        st.integers(0, 50).map(float),
        st.floats(0.1, 1e4),
        st.none() | st.floats(0.1, 1e4),
        st.floats(0, 10),
        st.floats(0, 1),
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(link_lists, st.sampled_from(["hops", "latency"]))
def test_paths_are_as_short_as_in_networkx(
    tmp_path_factory: pytest.TempPathFactory, links: list[Link], by: Any
) -> None:
    linked = sorted({end for link in links for end in (link.origin, link.dest)})
    if not linked:
        return
    file = tmp_path_factory.getbasetemp() / "paths.xml"
    write(Description(tuple(map(Service, linked)), links=tuple(links)), file)
    ((_, network),) = Kollaps(file, by=by).build(len(linked), 0).states
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    directed: list[tuple[str, str, Link, float]] = []  # in the order of link numbers
    for link in links:
        directed.append((link.origin, link.dest, link, link.upload))
        if link.download is not None:
            directed.append((link.dest, link.origin, link, link.download))
    for start, end, link, _ in directed:
        weight = 1.0 if by == "hops" else link.latency
        if not graph.has_edge(start, end) or graph.edges[start, end]["weight"] > weight:
            graph.add_edge(start, end, weight=weight)
    assert (network.capacities / MEGABIT).tolist() == pytest.approx([megabits for *_, megabits in directed])
    for (i, a), (j, b) in itertools.permutations(enumerate(linked), 2):
        found = network.route(i, j)
        if not networkx.has_path(graph, a, b):
            assert found is None
            continue
        assert found is not None
        steps = [directed[number] for number in found.links]
        assert [step[0] for step in steps] + [b] == [a] + [step[1] for step in steps]
        length = len(steps) if by == "hops" else sum(link.latency for _, _, link, _ in steps)
        assert length == pytest.approx(networkx.shortest_path_length(graph, a, b, weight="weight"))
        assert found.latency == pytest.approx(sum(link.latency for _, _, link, _ in steps) / 1000)
        assert found.jitter == pytest.approx(math.sqrt(sum(link.jitter**2 for _, _, link, _ in steps)) / 1000)
        assert found.loss == pytest.approx(1 - math.prod(1 - link.drop for _, _, link, _ in steps))


def test_a_network_of_a_thousand_nodes_is_built_within_a_second(tmp_path: Path) -> None:
    bridges = tuple(f"bridge{i}" for i in range(20))
    services = tuple(Service(f"site{i}", replicas=50) for i in range(20))
    access = [Link(f"site{i}", f"bridge{i}", 1.0, 100.0, 100.0) for i in range(20)]
    ring = [Link(f"bridge{i}", f"bridge{(i + 1) % 20}", 10.0, 1000.0, 1000.0) for i in range(20)]
    file = tmp_path / "large.xml"
    write(Description(services, bridges, (*access, *ring)), file)
    begun = time.process_time()
    ((_, network),) = Kollaps(file).build(1000, 0).states
    routes = [route(network, i, (i * 7 + 3) % 1000) for i in range(0, 1000, 2)]
    assert time.process_time() - begun < 1
    assert max(len(found.links) for found in routes) == 12


# Which replicas are nodes


def test_nodes_are_replicas_in_the_order_of_the_file_without_supervisors(built: Callable[..., NetworkTimeline]) -> None:
    services = '<service name="dashboard" supervisor="true" port="8088"/>' + SERVICES
    ((_, network),) = built(3, services=services).states
    assert len(route(network, 0, 1).links) == 2
    assert len(route(network, 0, 2).links) == 3
    ((_, only),) = built(2, services=services, options={"services": ("server",)}).states
    assert route(only, 0, 1).latency == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("nodes", "options", "sections", "problem"),
    [
        (5, {}, {}, r"net\.xml: 4 replicas of 'client', 'server', but 5 nodes.*; set replicas in the file"),
        (3, {"services": ("client",)}, {}, r"2 replicas of 'client', but 3 nodes"),
        (2, {"services": ("clinet",)}, {}, r"services: there is no service 'clinet' in .*did you mean 'client'"),
        (4, {}, {"links": LINKS.split("\n")[1]}, r"net\.xml: service 'server' has no link, so no node can reach it"),
    ],
)
def test_impossible_numbers_of_nodes_are_rejected(
    built: Callable[..., NetworkTimeline], nodes: int, options: dict[str, Any], sections: dict[str, str], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        built(nodes, options=options, **sections)


# Schedules


def test_a_link_gets_new_properties_in_one_direction_or_with_a_download_in_both(
    built: Callable[..., NetworkTimeline],
) -> None:
    dynamic = """
    <schedule origin="left" dest="right" time="10" upload="5Mbps" latency="40"/>
    <schedule origin="left" dest="right" time="20.5" upload="6Mbps" download="7Mbps" drop="0.5" jitter="0"/>
    <schedule origin="right" dest="left" time="10" upload="8Mbps"/>
    """
    timeline = built(4, dynamic=dynamic)
    assert [start for start, _ in timeline.states] == [0, 10, 20.5]
    before, then, after = (network for _, network in timeline.states)
    assert [bandwidth(n, 0, 2) for n in (before, then, after)] == [20, 5, 6]
    assert [float(n.capacities[route(n, 2, 0).links[1]]) / MEGABIT for n in (before, then, after)] == [30, 8, 7]
    assert [route(n, 0, 2).latency for n in (before, then, after)] == pytest.approx([0.016, 0.046, 0.046])
    assert [route(n, 2, 0).latency for n in (before, then, after)] == pytest.approx([0.016, 0.016, 0.016])
    assert route(after, 2, 0).loss == route(after, 0, 2).loss == pytest.approx(1 - 0.9 * 0.5)
    assert route(after, 0, 2).links == route(before, 0, 2).links
    assert route(before, 0, 2).loss == pytest.approx(1 - 0.9 * 0.8)  # unchanged


@pytest.mark.parametrize(("down", "up"), [("leave", "join"), ("disconnect", "reconnect")])
def test_routes_avoid_a_link_from_leave_to_join(built: Callable[..., NetworkTimeline], down: str, up: str) -> None:
    ends = 'origin="right" dest="left"'
    dynamic = f'<schedule {ends} time="1" action="{down}"/><schedule {ends} time="2" action="{up}"/>'
    before, without, after = (network for _, network in built(4, dynamic=dynamic).states)
    assert without.route(0, 2) is None
    assert without.route(2, 0) is None
    assert route(without, 0, 1) == route(before, 0, 1)
    assert route(after, 0, 2) == route(before, 0, 2)


def test_a_bridge_may_leave(built: Callable[..., NetworkTimeline]) -> None:
    dynamic = '<schedule name="left" time="1" action="leave"/><schedule name="left" time="2" action="join"/>'
    _, without, after = (network for _, network in built(4, dynamic=dynamic).states)
    assert without.route(0, 1) is None
    assert route(without, 2, 3).latency == pytest.approx(0.002)
    assert after.route(0, 1) is not None


def test_a_new_link_joins(built: Callable[..., NetworkTimeline]) -> None:
    dynamic = (
        '<schedule origin="client" dest="right" time="3" action="join" latency="2" upload="3Mbps" download="4Mbps"/>'
    )
    before, after = (network for _, network in built(4, dynamic=dynamic).states)
    assert len(before.capacities) == len(after.capacities)
    assert len(route(before, 0, 2).links) == 3
    assert route(after, 0, 2).latency == pytest.approx(0.003)
    assert bandwidth(after, 0, 2) == 3
    assert bandwidth(after, 2, 0) == 0.5
    assert route(before, 2, 3) == route(after, 2, 3)


def test_a_link_that_joins_again_is_the_same_link(built: Callable[..., NetworkTimeline]) -> None:
    ends = 'origin="client" dest="right"'
    join = f'<schedule {ends} time="{{}}" action="join" latency="2" upload="3Mbps" download="4Mbps"/>'
    once, dynamic = join.format(3), join.format(3) + f'<schedule {ends} time="5" action="leave"/>' + join.format(7)
    _, first, without, again = (network for _, network in built(4, dynamic=dynamic).states)
    assert len(again.capacities) == len(built(4, dynamic=once).states[-1][1].capacities)
    assert route(again, 0, 2) == route(first, 0, 2) != route(without, 0, 2)
    assert route(again, 2, 0) == route(first, 2, 0) != route(without, 2, 0)


def test_the_first_online_replicas_leave_and_links_do_not_change(
    built: Callable[..., NetworkTimeline],
) -> None:
    dynamic = """
    <schedule name="server" time="30" action="crash" amount="2"/>
    <schedule name="client" time="10" action="leave"/>
    """
    timeline = built(4, dynamic=dynamic)
    assert list(timeline.availability_changes) == [
        AvailabilityChange(10, 0, False),
        AvailabilityChange(30, 2, False),
        AvailabilityChange(30, 3, False),
    ]
    assert len(timeline.states) == 1


def test_a_service_with_a_scheduled_join_starts_offline_and_has_its_peak_number_of_replicas(
    built: Callable[..., NetworkTimeline],
) -> None:
    dynamic = """
    <schedule name="client" time="0" action="join" amount="2"/>
    <schedule name="client" time="5" action="join"/>
    <schedule name="client" time="8" action="leave"/>
    <schedule name="client" time="9" action="join"/>
    """
    timeline = built(5, dynamic=dynamic)
    expected = [
        AvailabilityChange(0, 2, False),
        AvailabilityChange(5, 2, True),
        AvailabilityChange(8, 0, False),
        AvailabilityChange(9, 0, True),
    ]
    assert list(timeline.availability_changes) == expected
    late = (
        "5 replicas of 'client', 'server', but 6 nodes.*; replicas of 'client' exist only after they join by schedule"
    )
    with pytest.raises(ValueError, match=late):
        built(6, dynamic=dynamic)
    services = SERVICES.replace('name="client"', 'name="client" reuse="false"')
    fresh = built(6, dynamic=dynamic, services=services)
    assert list(fresh.availability_changes) == [
        AvailabilityChange(0, 2, False),
        AvailabilityChange(0, 3, False),
        AvailabilityChange(5, 2, True),
        AvailabilityChange(8, 0, False),
        AvailabilityChange(9, 3, True),
    ]


def test_a_disconnected_replica_is_online_and_reaches_no_node(built: Callable[..., NetworkTimeline]) -> None:
    dynamic = """
    <schedule name="client" time="10" action="disconnect"/>
    <schedule name="client" time="20" action="reconnect"/>
    """
    timeline = built(4, dynamic=dynamic)
    assert not timeline.availability_changes
    before, without, after = (network for _, network in timeline.states)
    assert without.route(0, 2) is without.route(2, 0) is without.route(1, 0) is None
    assert route(without, 1, 2) == route(before, 1, 2)
    assert route(after, 0, 2) == route(before, 0, 2)


def test_replicas_may_be_drawn_from_the_seed(built: Callable[..., NetworkTimeline]) -> None:
    services = SERVICES.replace('replicas="2"', 'replicas="50"')
    dynamic = '<schedule name="client" time="1" action="leave" amount="10"/>'

    def offline_nodes(seed: int, draw: bool) -> set[int]:
        timeline = built(100, seed, {"draw": draw}, services=services, dynamic=dynamic)
        assert all(not change.online for change in timeline.availability_changes)
        return {change.node for change in timeline.availability_changes}

    assert offline_nodes(0, False) == offline_nodes(1, False) == set(range(10))
    assert offline_nodes(0, True) == offline_nodes(0, True) != offline_nodes(1, True)
    assert offline_nodes(0, True) <= set(range(50))
    assert len(offline_nodes(0, True)) == 10


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "crash", "disconnect", "reconnect"]), st.integers(0, 9), st.integers(1, 4)
        ),
        max_size=8,
    )
)
def test_a_schedule_is_rejected_or_determines_the_number_of_online_replicas(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[Any, int, int]]
) -> None:
    events = tuple(ServiceEvent(float(at), "s", action, amount) for action, at, amount in actions)
    file = tmp_path_factory.getbasetemp() / "schedule.xml"
    write(Description((Service("s", 4), Service("t", 9)), (), (Link("s", "t", 1.0, 1.0, 1.0),), events), file)
    try:
        timeline = Kollaps(file, services=("s",)).build(1, 0)
    except ValueError:
        return
    whole = Kollaps(file).build(9 + _replica_count(events), 0)
    present = 0 if any(event.action == "join" for event in events) else 4
    online = dict.fromkeys(range(_replica_count(events)), True)
    for at in sorted({0.0, *(event.time for event in events)}):
        for event in (e for e in events if e.time == at):
            present += {"join": event.amount, "leave": -event.amount, "crash": -event.amount}.get(event.action, 0)
        online.update({p.node: p.online for p in whole.availability_changes if p.time == at})
        assert sum(online.values()) == present
    times = [p.time for p in whole.availability_changes]
    assert times == sorted(times)
    assert [start for start, _ in timeline.states] == sorted({start for start, _ in timeline.states})


def _replica_count(events: tuple[ServiceEvent, ...]) -> int:
    """The number of replicas of 's': four, or the peak if replicas join by schedule."""
    if not any(event.action == "join" for event in events):
        return 4
    present = [0]
    for event in sorted(events, key=lambda event: event.time):
        change = {"join": event.amount, "leave": -event.amount, "crash": -event.amount}.get(event.action, 0)
        present.append(present[-1] + change)
    return max(present)


@pytest.mark.parametrize(
    ("dynamic", "problem"),
    [
        (SCHEDULE.replace("/>", ' amount="3"/>'), r":9: leave of 3 replicas of 'client' at 1 s, when 2 are online"),
        (
            SCHEDULE.replace("leave", "reconnect"),
            r":9: reconnect of 1 replicas of 'client' at 1 s, when 0 are disconnec",
        ),
        (
            SCHEDULE + SCHEDULE.replace('"1"', '"2"').replace("leave", "join"),
            r":9: leave of 1 .*a service with a scheduled join starts without replicas",
        ),
    ],
)
def test_an_impossible_schedule_is_rejected(built: Callable[..., NetworkTimeline], dynamic: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"net\.xml" + problem):
        built(2, dynamic=dynamic, options={"services": ("server",)})
