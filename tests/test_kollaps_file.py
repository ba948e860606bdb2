"""Kollaps files: reading, writing and rejected content."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kollaps_files import SCHEDULE, SERVICES, text
from routes import bandwidth
from shoal.environment.network.kollaps import Description, Kollaps, Link, LinkEvent, Service, ServiceEvent, read, write

EXAMPLE = Path(__file__).parent.parent / "examples" / "networks" / "two-sites.xml"


# Reading and writing

names = st.from_regex(r"[A-Za-z][\w .<&\"'-]{0,8}[A-Za-z0-9]", fullmatch=True)
numbers = st.floats(0, 1e9)
kilobits = st.integers(1, 10**6).map(lambda count: count / 1000)
widths = st.floats(1e-6, 1e6) | kilobits | kilobits.map(lambda width: math.nextafter(width, math.inf))
times = st.floats(0, 1e6)


@st.composite
def descriptions(draw: st.DrawFn) -> Description:
    all_names = draw(st.lists(names, min_size=2, max_size=6, unique=True))
    split = draw(st.integers(1, len(all_names)))
    flags = st.booleans()
    anything = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), max_size=9)
    services = tuple(
        Service(n, draw(st.integers(1, 99)), draw(flags), draw(flags), draw(flags), draw(anything), draw(anything))
        for n in all_names[:split]
    )
    ends = st.sampled_from(list(itertools.permutations(all_names, 2)))
    links = tuple(
        Link(*draw(ends), draw(numbers), draw(widths), draw(st.none() | widths), draw(numbers), draw(st.floats(0, 1)))
        for _ in range(draw(st.integers(0, 4)))
    )
    events: list[ServiceEvent | LinkEvent] = []
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(all_names[:split]))
        action = draw(st.sampled_from(["join", "leave", "crash", "disconnect", "reconnect"]))
        events.append(ServiceEvent(draw(times), name, action, draw(st.integers(1, 9))))
    for link in links:
        optional = st.none() | numbers
        events.append(LinkEvent(draw(times), link.origin, link.dest, None, draw(optional), draw(widths)))
        events.append(LinkEvent(draw(times), link.dest, link.origin, draw(st.sampled_from(["leave", "join"]))))
    for bridge in all_names[split:]:
        events.append(ServiceEvent(draw(times), bridge, draw(st.sampled_from(["join", "leave"]))))
    return Description(services, tuple(all_names[split:]), links, tuple(events), draw(anything))


@settings(max_examples=50)
@given(descriptions())
def test_a_written_description_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, description: Description
) -> None:
    file = tmp_path_factory.getbasetemp() / "described.xml"
    write(description, file)
    assert read(file) == description


def test_the_example_has_the_expected_services_links_and_states(tmp_path: Path) -> None:
    description = read(EXAMPLE)
    assert [(service.name, service.replicas) for service in description.services] == [("north", 8), ("south", 8)]
    assert description.links[1] == Link("south", "south-switch", 0.5, 50.0, 100.0, network="net")
    write(description, tmp_path / "again.xml")
    assert read(tmp_path / "again.xml") == description
    assert 'upload="50Mbps"' in (tmp_path / "again.xml").read_text()  # Kollaps reads only integers
    timeline = Kollaps(EXAMPLE).build(16, 0)
    assert [start for start, _ in timeline.states] == [0, 2, 6]
    assert [bandwidth(network, 0, 15) for _, network in timeline.states] == [20, 5, 20]


@pytest.mark.parametrize(
    ("written", "megabits"),
    [("100Kbps", 0.1), ("60mbps", 60), ("1.5 GBPS", 1500), ("2e1Mbps", 20), (".5Gbps", 500)],
)
def test_bandwidths_have_units_in_any_case(tmp_path: Path, written: str, megabits: float) -> None:
    file = tmp_path / "net.xml"
    file.write_text(text(links=f'<link origin="client" dest="left" latency="1" upload="{written}"/>'))
    assert read(file).links[0].upload == pytest.approx(megabits)


def test_attributes_that_only_kollaps_uses_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "net.xml"
    services = '<service name="a" image="x:1" command="[\'b\', \'0\']" supervisor="true" port="80" ip="10.0.0.1"/>'
    file.write_text("<!-- a file -->" + text(services=services + SERVICES, dynamic=">"))
    assert read(file).services[0] == Service("a", supervisor=True, image="x:1", command="['b', '0']")


def one_link(more: str = "", upload: str = "1Mbps", ends: str = 'origin="client" dest="left"') -> str:
    return text(links=f'<link {ends} latency="1" upload="{upload}" {more}/>')


def scheduled(attributes: str) -> str:
    return text(dynamic=f"<schedule {attributes}/>")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (one_link(ends='origin="clent" dest="left"'),
         r":4: origin = 'clent': there is no such service or bridge; did you mean 'client'"),
        (one_link(ends='origin="client"'), r":4: <link> has no dest"),
        (one_link(ends='origin="left" dest="left"'), r":4: <link> from 'left' to itself"),
        (text(links='<link origin="client" dest="left" upload="1Mbps"/>'), r"from 'client' to 'left' has no latency"),
        (text(links='<link origin="client" dest="left" latency="1"/>'), r"from 'client' to 'left' has no upload"),
        (one_link(upload="0Mbps"), r":4: upload = '0Mbps': expected a bandwidth above 0; to remove a link"),
        (one_link('download="0.0Kbps"'), r":4: download = '0.0Kbps': expected a bandwidth above 0"),
        (one_link(upload="100"), r":4: upload = '100': expected a number and a unit.*; it has no unit"),
        (one_link(upload="1MB/s"), r"the unit 'MB/s' is unknown"),
        (one_link(upload="fast"), r"upload = 'fast': expected a number and a unit"),
        (one_link(upload="1.2.3Mbps"), r"upload = '1\.2\.3Mbps': expected a number and a unit"),
        (one_link(upload="-1Mbps"), r"upload = '-1Mbps': expected a number and a unit"),
        (one_link('jitter="-1"'), r":4: jitter = '-1': expected milliseconds, at least 0"),
        (one_link('drop="1.5"'), r":4: drop = '1\.5': expected a probability from 0 to 1"),
        (one_link('drop="nan"'), r":4: drop = 'nan': expected a probability"),
        (one_link('lateny="1"'), r":4: <link> has no attribute 'lateny'; did you mean 'latency'"),
        (text(services='<service name="a" replica="3"/>'), r":2: <service> has no attribute 'replica'; did you mean"),
        (text(services='<service name="a" replicas="0"/>'), r":2: replicas = '0': expected an integer, at least 1"),
        (
            text(services='<service name="a" replicas="600000"/><service name="b" replicas="400001"/>'),
            r":2: replicas = '400001': more than 1,000,000 replicas in total; use fewer",
        ),
        (text(services='<service name="a" share="yes"/>'), r":2: share = 'yes': expected true or false"),
        (text(services='<service image="a"/>'), r":2: <service> has no name"),
        (text(services="", links=""), r":1: no services; nodes are the replicas of services"),
        (text(bridges='<bridge name="client"/>'), r":3: the name 'client' is used twice"),
        (text(dynamic=SCHEDULE.replace("leave", "sleep")), r":9: action = 'sleep': unknown; did you mean 'leave'"),
        (text(dynamic=SCHEDULE.replace("client", "cliant")), r":9: name = 'cliant': there is no such service"),
        (text(dynamic=SCHEDULE.replace('time="1"', "")), r":9: <schedule> has no time"),
        (text(dynamic=SCHEDULE.replace('time="1"', 'time="-1"')), r":9: time = '-1': expected a time in seconds"),
        (text(dynamic=SCHEDULE.replace("/>", ' amount="0"/>')), r":9: amount = '0': expected an integer"),
        (text(dynamic=SCHEDULE.replace('action="leave"', "")), r":9: <schedule> of 'client' has no action"),
        (text(dynamic=SCHEDULE.replace("/>", ' upload="1Mbps"/>')), r":9: <schedule> of 'client' has no upload"),
        (scheduled('time="1" action="leave"'), r":9: <schedule> has no target"),
        (scheduled('name="left" time="1" action="crash"'), r":9: 'left' is a bridge: it can only join or leave"),
        (scheduled('origin="client" dest="right" time="1" upload="1Mbps"'),
         r":9: there is no link from 'client' to 'right'"),
        (scheduled('origin="client" dest="right" time="1" action="join"'),
         r":9: there is no link from 'client' to 'right'; to add a link, give latency and upload"),
        (scheduled('origin="client" dest="left" time="1" action="crash"'), r":9: a link cannot crash"),
        (scheduled('origin="client" dest="left" time="1"'), r":9: .*neither an action nor a property"),
        (text().replace("links>", "lnks>"), r":4: <lnks> in <experiment>; did you mean 'links'"),
        (text().replace("<dynamic></dynamic>", "<links></links>"), r":9: a second <links>"),
        (text(bridges="<bridg/>"), r":3: <bridg> in <bridges>; did you mean 'bridge'"),
        ("<graph/>", r":1: <graph> at the top; expected one of experiment"),
        ("<experiment>\n<services>\n</experiment>", r":3: not valid XML: mismatched tag"),
        ("", r"not valid XML: no element found"),
        ("not XML", r":1: not valid XML"),
        ('<?xml version="1.0" encoding="klingon"?><experiment/>', r"not valid XML: unknown encoding"),
        ("<experiment>&lots;</experiment>", r":1: not valid XML: undefined entity"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_rejected_with_its_line(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "net.xml"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"net\.xml" + problem if problem.startswith(":") else problem):
        read(file)


def test_the_error_for_a_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.xml: cannot read this file: No such file"):
        read(tmp_path / "nowhere.xml")


@pytest.mark.parametrize(
    "declared",
    [
        '<!DOCTYPE experiment [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>',
        '<!DOCTYPE experiment [<!ENTITY file SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE experiment SYSTEM "http://example.org/experiment.dtd">',
    ],
)
def test_a_file_with_a_document_type_is_rejected(tmp_path: Path, declared: str) -> None:
    file = tmp_path / "net.xml"
    file.write_text(f"<?xml version='1.0'?>\n{declared}\n" + text().replace("kollaps:2.0", "&b;"))
    with pytest.raises(ValueError, match=r"net\.xml:2: it declares a document type"):
        read(file)
