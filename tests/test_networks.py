"""Network descriptions: stars, sites of a matrix, and the networks of published experiments."""

from __future__ import annotations

import gzip
import math
import os
import re
import time
import tomllib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import CommandResult
from routes import bandwidth, route
from shoal.environment.network import NETWORKS, NetworkState, Route
from shoal.environment.network.links import Ideal, Uniform, star
from shoal.environment.network.matrix import LatencyMatrix, read
from shoal.environment.network.network import MEGABIT, NetworkTimeline, capacity
from shoal.environment.network.published import BANDWIDTHS, REGIONS, DivShareStragglers, TenRegions
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.environment_builder import build_environment, device_speeds
from shoal.experiment.registry import Component, find

ROOT = Path(__file__).parent.parent
REAL = Path(os.environ.get("SHOAL_DATA") or ROOT / "../shared/data") / "latency"


def network_state(network: Any, nodes: int, seed: int = 0) -> NetworkState:
    """Build a network that never changes, and return its only state."""
    timeline = network.build(nodes, seed)
    assert isinstance(timeline, NetworkTimeline)
    ((start, only),) = timeline.states
    assert start == 0
    assert not timeline.availability_changes
    return only


# Stars


def test_an_ideal_network_has_no_timeline() -> None:
    assert Ideal().build(4, 0) is None


def test_all_nodes_of_a_uniform_network_have_the_same_link() -> None:
    network = network_state(Uniform(latency=0.02, jitter=0.003, upload=8, download=16, loss=0.25), 3)
    assert network.capacities.tolist() == [1e6, 2e6] * 3
    there = route(network, 0, 2)
    assert (there.links, there.latency, there.jitter) == ((0, 5), 0.02, 0.003)
    assert there.loss == pytest.approx(0.25)
    assert network.access(2) == (4, 5)


def test_a_link_without_a_bandwidth_is_unlimited() -> None:
    assert np.isinf(network_state(Uniform(), 2).capacities).all()
    assert capacity([0, 1]).tolist() == [math.inf, 125_000]


links_of_a_node = st.builds(
    Uniform,
    latency=st.floats(0, 10),
    jitter=st.floats(0, 1),
    upload=st.floats(0, 1000),
    download=st.floats(0, 1000),
    loss=st.floats(0, 1),
)


@given(st.lists(links_of_a_node, min_size=1, max_size=6))
def test_star_latency_jitter_and_loss_are_symmetric_and_equal_nodes_keep_their_values(each: list[Uniform]) -> None:
    network = star([*each, *each])
    for a, own in enumerate(each):
        there = route(network, a, a + len(each))
        assert there.latency == own.latency
        assert there.jitter == pytest.approx(own.jitter)
        assert there.loss == pytest.approx(own.loss, abs=1e-7)
        for b, other in enumerate(each):
            one, back = route(network, a, b), route(network, b, a)
            assert (one.latency, one.jitter, one.loss) == (back.latency, back.jitter, back.loss)
            assert one is route(network, a, b)
            if a != b:
                assert one.latency == pytest.approx((own.latency + other.latency) / 2)
                assert one.links == (network.access(a)[0], network.access(b)[1])
                up, down = own.upload or math.inf, other.download or math.inf
                assert bandwidth(network, a, b) == pytest.approx(min(up, down))


def test_the_route_of_a_node_to_itself_has_no_links() -> None:
    assert route(network_state(Uniform(), 2), 1, 1) == Route()


def test_values_of_single_links_apply_and_later_ones_take_precedence() -> None:
    links = (
        {"from": "0-1", "to": "2,3", "latency": 0.5, "bandwidth": 4},
        {"from": "3", "to": "0", "latency": 0.75, "oneway": True},
        {"from": "2", "to": "3", "loss": 1.0, "jitter": 0.25},
    )
    network = network_state(Uniform(latency=0.01, upload=10, download=20, links=links), 5)
    assert [route(network, a, b).latency for a, b in [(0, 2), (2, 0), (1, 3), (0, 3), (3, 0), (0, 1), (4, 0)]] == [
        0.5, 0.5, 0.5, 0.5, 0.75, 0.01, 0.01,
    ]  # fmt: skip
    assert bandwidth(network, 2, 1) == 4
    assert bandwidth(network, 0, 1) == 10
    assert (route(network, 3, 2).loss, route(network, 3, 2).jitter) == (1.0, 0.25)
    own = [route(network, a, b).links[1] for a, b in [(0, 2), (2, 0), (1, 2), (0, 3), (3, 0)]]
    assert len(set(own)) == len(own)  # a link for each pair, in each direction
    assert {*own, *range(10)} <= set(range(len(network.capacities)))
    assert all(len(network.access(node)) == 2 for node in range(5))


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"from": "0", "to": "1", "latncy": 1}, r"links\[0\]\.latncy: unknown key; did you mean 'latency'"),
        ({"from": "0", "to": "1", "bandwidth": 0}, r"links\[0\]\.bandwidth = 0: expected number above 0"),
        ({"from": "0", "to": "1", "loss": 2}, r"links\[0\]\.loss = 2: expected number at least 0 and at most 1"),
        ({"to": "1", "latency": 1}, r"links\[0\]\.from: missing; expected string"),
        ({"from": "0", "to": "1"}, r"links\[0\]: it changes nothing; add latency"),
    ],
)
def test_an_invalid_link_is_rejected_at_once(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        Experiment(nodes=2, network={"name": "uniform", "links": [table]})


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"from": "0-9", "to": "1", "latency": 1}, r"links\[0\]\.from: .*there is no node 4; nodes = 4"),
        ({"from": "0", "to": "a", "latency": 1}, r"links\[0\]\.to: .*expected numbers and ranges"),
        ({"from": "2", "to": "2", "latency": 1}, r"links\[0\]: from = '2' and to = '2' are the same node"),
    ],
)
def test_a_link_between_unknown_nodes_is_rejected(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Uniform(links=(table,)).build(4, 0)


def test_links_are_the_same_after_a_round_trip_through_toml() -> None:
    network = {"name": "uniform", "links": [{"from": "0", "to": "1", "latency": 0.5}]}
    described = Experiment(nodes=2, network=network)
    again = Experiment.from_table(tomllib.loads(described.toml()))
    assert again == described
    assert route(network_state(again.network.build(), 2), 0, 1).latency == 0.5


# Matrices


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str, name: str = "latency.csv") -> Path:
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


SQUARE = [[0.0, 10.0, 30.0], [12.0, 0.0, 20.0], [34.0, 22.0, 0.0]]


@pytest.mark.parametrize(
    "text",
    [
        "0,10,30\n12,0,20\n34,22,0\n",
        "0;10;30\n12;0;20\n34;22;0",
        "0\t10\t30\n\n12\t0\t20\n34\t22\t0\n",
        "  0 10   30\n12 0 20\n34 22 0\n",
        "# milliseconds\n  # round trip\n0, 10, 30,\n12, 0, 20,\n34, 22, 0,\n",
        '\ufeff"Oslo",Rome,Lima\n0,10,30\n12,0,20\n34,22,0\n',
        ",Oslo,Rome,Lima\nOslo,0,10,30\nRome,12,0,20\nLima,34,22,0\n",
        "Oslo Rome Lima\nOslo 0 10 30\nRome 12 0 20\nLima 34 22 0\n",
        "Oslo,0,10,30\nRome,12,0,20\nLima,34,22,0\n",
        "0,1,2\n0,10,30\n12,0,20\n34,22,0\n",
        "1,0,10,30\n2,12,0,20\n3,34,22,0\n",
        "-1,10,30\n12,nan,20\n34,22,\n",
    ],
)
def test_a_matrix_is_read_with_any_separator_comments_and_names(text: str, written: Callable[[str], Path]) -> None:
    network = network_state(LatencyMatrix(written(text), round_trip=False), 3)
    for a, b in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]:
        assert route(network, a, b).latency == pytest.approx(SQUARE[a][b] / 1000)


@pytest.mark.parametrize("text", [",0,1\n0,0,10\n1,12,0\n", ",1,2,3\n1,0,10,30\n2,12,0,20\n3,34,22,0\n"])
def test_numeric_names_below_an_empty_first_cell_are_not_read_as_latencies(
    text: str, written: Callable[[str], Path]
) -> None:
    with pytest.raises(ValueError, match=r"the first cell is empty.*leave out the first cell.*write nan"):
        network_state(LatencyMatrix(written(text), round_trip=False), 2)
    as_names = written(text.removeprefix(","))
    assert route(network_state(LatencyMatrix(as_names, round_trip=False), 2), 0, 1).latency == pytest.approx(0.01)
    as_values = written("nan" + text)
    latency = float(text.split(",")[1]) / 1000
    assert route(network_state(LatencyMatrix(as_values, round_trip=False), 2), 0, 1).latency == pytest.approx(latency)


def test_a_matrix_may_be_compressed_in_seconds_and_of_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "latency.gz"
    file.write_bytes(gzip.compress(b"0 0.5\n0.5 0\n"))
    network = network_state(LatencyMatrix(file, unit="s", jitter=0.1, loss=0.01, upload=5, download=6), 2)
    assert route(network, 0, 1) == Route((0, 3), 0.25, pytest.approx(0.025), 0.01)  # type: ignore[arg-type]
    assert bandwidth(network, 0, 1) == 5


@settings(max_examples=50)
@given(
    st.integers(1, 7).flatmap(
        lambda n: st.lists(st.lists(st.floats(0, 1e6), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    st.sampled_from([",", ";", "\t", " "]),
    st.booleans(),
    st.booleans(),
)
def test_a_written_matrix_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[float]], separator: str, header: bool, named: bool
) -> None:
    lines = [[*([f"site{i}"] if named else []), *map(repr, row)] for i, row in enumerate(rows)]
    if header:
        lines.insert(0, [*(["to"] if named else []), *(f"site{i}" for i in range(len(rows)))])
    file = tmp_path_factory.getbasetemp() / "matrix.csv"
    file.write_text("\n".join(separator.join(line) for line in lines))
    assert read(file).values.tolist() == rows


def test_a_missing_latency_is_the_shortest_path_or_the_mean_or_rejected(written: Callable[[str], Path]) -> None:
    file = written("0,10,-1\n20,0,30\n,40,0\n")
    path = network_state(LatencyMatrix(file, round_trip=False), 3)
    assert route(path, 0, 2).latency == pytest.approx(0.040)
    assert route(path, 2, 0).latency == pytest.approx(0.060)
    assert route(path, 0, 1).latency == pytest.approx(0.010)
    mean = network_state(LatencyMatrix(file, missing="mean", round_trip=False), 3)
    assert route(mean, 0, 2).latency == pytest.approx((10 + 30) / 2 / 1000)
    assert route(mean, 2, 0).latency == pytest.approx((40 + 20) / 2 / 1000)
    with pytest.raises(ValueError, match=r"latency\.csv:1: row 1, column 3: the value is missing; add it"):
        LatencyMatrix(file, missing="refuse").build(3, 0)
    assert route(network_state(LatencyMatrix(file, missing="refuse"), 2), 0, 1).latency == pytest.approx(0.005)


@pytest.mark.parametrize("missing", ["path", "mean"])
def test_a_missing_value_without_a_substitute_is_rejected(missing: Any, written: Callable[[str], Path]) -> None:
    file = written("site,a,b,c\na,0,5,-1\nb,5,0,-1\nc,-1,-1,0\n" if missing == "path" else "0,-1\n-1,0\n")
    with pytest.raises(
        ValueError, match=r"latency\.csv:\d: row 1, column \d: the value is missing; (no path through|the two sites)"
    ):
        LatencyMatrix(file, missing=missing).build(3, 0)


def test_nodes_are_at_the_first_sites_or_random_sites_and_share_sites_in_turn(written: Callable[[str], Path]) -> None:
    sites = 40
    cells = [[abs(i - j) * 1.0 if i != j else 0.125 for j in range(sites)] for i in range(sites)]
    file = written("\n".join(",".join(map(str, row)) for row in cells))

    def latencies(matrix: LatencyMatrix, nodes: int, seed: int = 0) -> list[float]:
        network = network_state(matrix, nodes, seed)
        return [round(route(network, 0, j).latency * 1000, 6) for j in range(1, nodes)]

    first = LatencyMatrix(file, round_trip=False)
    assert latencies(first, 5) == [1, 2, 3, 4]
    assert latencies(first, 5, seed=1) == [1, 2, 3, 4]
    drawn = LatencyMatrix(file, round_trip=False, draw=True)
    assert latencies(drawn, 5) == latencies(drawn, 5) != latencies(first, 5)
    assert latencies(drawn, 5, seed=1) != latencies(drawn, 5)
    assert 0.125 not in latencies(drawn, sites)  # no site twice
    assert latencies(first, sites + 2)[-2:] == [0.125, 1]  # after the last site: site 0 again, then site 1


def test_nodes_share_the_links_of_a_bandwidth_matrix(tmp_path: Path) -> None:
    (tmp_path / "ms").write_text("0 10\n10 0\n")
    (tmp_path / "mbps").write_text("- 8\n4 -\n")
    network = network_state(LatencyMatrix(tmp_path / "ms", bandwidth=tmp_path / "mbps", upload=100), 4)
    assert bandwidth(network, 0, 1) == bandwidth(network, 2, 3) == 8
    assert bandwidth(network, 1, 0) == 4
    assert bandwidth(network, 0, 2) == 100  # at the same site
    assert set(route(network, 0, 1).links) & set(route(network, 2, 3).links)
    assert not set(route(network, 0, 1).links) & set(route(network, 1, 0).links)
    network = network_state(LatencyMatrix(tmp_path / "ms", bandwidth=tmp_path / "mbps", upload=1, download=2), 4)
    assert (network.capacities[:8] / MEGABIT).tolist() == pytest.approx([1, 2] * 4)


def test_a_missing_bandwidth_is_the_mean_or_rejected(tmp_path: Path) -> None:
    (tmp_path / "ms").write_text("0 1 1\n1 0 1\n1 1 0\n")
    (tmp_path / "mbps").write_text("0 2 0\n2 0 4\n6 8 0\n")
    files: dict[str, Any] = {"latency": tmp_path / "ms", "bandwidth": tmp_path / "mbps"}
    assert bandwidth(network_state(LatencyMatrix(**files), 3), 0, 2) == pytest.approx(3)
    with pytest.raises(ValueError, match=r"mbps:1: row 1, column 3: expected a bandwidth above 0"):
        LatencyMatrix(**files, missing="refuse").build(3, 0)
    (tmp_path / "mbps").write_text("0 2\n2 0\n")
    with pytest.raises(ValueError, match=r"mbps: 2 sites, but .*ms has 3"):
        LatencyMatrix(**files).build(3, 0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("0,5\n5,0\n2,2\n", r"3 rows and 2 columns; expected a square matrix"),
        ("0,5,2\n5,0,2\n", r"2 rows and 3 columns; expected a square matrix"),
        ("0,1\n1,0,3\n", r"latency\.csv: 1 rows and 2 columns|latency\.csv:1: 2 entries"),
        ("0,1,2\n1,0\n2,2,0\n", r"latency\.csv:2: 2 entries, but the last line has 3"),
        ("0,1,2\n1,0,fast\n2,2,0\n", r"latency\.csv:2: column 3: 'fast' is not a number"),
        ("0,fast,2\n1,0,1\n2,2,0\n", r"latency\.csv:1: column 2: 'fast' is not a number"),
        (",a,b\na,0,1\nb,x,0\n", r"latency\.csv:3: column 2: 'x' is not a number"),
    ],
)
def test_an_invalid_matrix_is_rejected_with_its_line(text: str, problem: str, written: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=problem):
        LatencyMatrix(written(text)).build(2, 0)


def test_the_error_for_an_unreadable_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.csv: cannot read this matrix: No such file"):
        LatencyMatrix(tmp_path / "nowhere.csv").build(2, 0)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"0 1\n1 0\n" * 99)[:20])
    with pytest.raises(ValueError, match=r"cut\.gz: cannot read this matrix: it is neither"):
        LatencyMatrix(cut).build(2, 0)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (bytes(2**20), r"bomb\.gz: unpacked, it has more than 134,217,728 bytes"),
        (b"0 1\n" * 2**18, r"bomb\.gz:5: more rows than columns; expected a square matrix"),
    ],
)
def test_a_small_file_that_unpacks_to_a_large_one_is_rejected_before_it_fills_memory(
    line: bytes, problem: str, tmp_path: Path
) -> None:
    bomb = tmp_path / "bomb.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        for _ in range(2**28 // len(line)):
            file.write(line)
    assert bomb.stat().st_size < 4 * 2**20
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=problem):
            LatencyMatrix(bomb).build(2, 0)
        assert tracemalloc.get_traced_memory()[1] < 600 * 2**20
    finally:
        tracemalloc.stop()


def real(name: str) -> Path:
    if not (REAL / name).is_file():
        pytest.skip(f"no {name} in {REAL}: set SHOAL_DATA to the folder of the data sets")
    return REAL / name


def test_measured_latencies_between_227_sites() -> None:
    file = real("devos50-227.csv")
    network = network_state(LatencyMatrix(file), 227)
    raw = np.loadtxt(file, delimiter=",")
    rng = np.random.default_rng(0)
    known = 0
    for a, b in rng.integers(227, size=(500, 2)).tolist():
        there = route(network, a, b)
        assert a == b or there.latency > 0
        if a != b and raw[a, b] >= 0:
            known += 1
            assert there.latency == pytest.approx(raw[a, b] / 2000)
    assert known > 100


def test_planetlab_is_symmetric_and_built_within_a_second() -> None:
    file = real("planetlab/PlanetLabData_1.gz")
    begun = time.process_time()
    network = network_state(LatencyMatrix(file), 490)
    assert time.process_time() - begun < 1
    assert route(network, 0, 1).latency == pytest.approx(0.175e-3 / 2)
    assert route(network, 3, 400).latency == route(network, 400, 3).latency


# Published networks


def test_divshare_has_seven_slow_nodes_of_sixty() -> None:
    network = network_state(DivShareStragglers(), 60)
    assert [bandwidth(network, node, 59) for node in range(8)] == [12, 12, 12, 13, 10, 13, 11, 60]
    assert [bandwidth(network, 59, node) for node in range(8)] == [12, 12, 12, 13, 10, 13, 11, 60]
    assert bandwidth(network, 30, 40) == 60
    assert route(network, 0, 59).latency == 0.002
    fast = network_state(DivShareStragglers(stragglers=False), 60)
    assert set(fast.capacities.tolist()) == {60 * MEGABIT}


@given(st.integers(2, 500))
def test_the_share_of_slow_nodes_does_not_depend_on_the_number_of_nodes(nodes: int) -> None:
    slow = np.count_nonzero(network_state(DivShareStragglers(), nodes).capacities[::2] < 60 * MEGABIT)
    assert slow >= 1
    assert abs(slow - nodes * 7 / 60) <= max(0.5, 1 - nodes * 7 / 60)


def test_regions_have_the_published_bandwidths() -> None:
    assert [len(row) for row in BANDWIDTHS] == list(range(len(REGIONS) - 1, 0, -1))
    network = network_state(TenRegions(), 60)
    named = {name: 6 * i for i, name in enumerate(REGIONS)}
    for one, other, megabits in [
        ("Cape Town", "Tokyo", 26), ("Mumbai", "Bahrain", 336), ("Stockholm", "Milan", 405), ("Ohio", "Oregon", 105),
        ("Cape Town", "Oregon", 36), ("Sydney", "São Paulo", 31),
    ]:  # fmt: skip
        assert bandwidth(network, named[one], named[other]) == megabits
        assert bandwidth(network, named[other] + 5, named[one] + 3) == megabits
    assert math.isinf(bandwidth(network, 0, 5))
    assert route(network, 0, 5).latency < route(network, 5, 6).latency


def test_nodes_of_two_regions_share_a_link_unless_shared_is_false() -> None:
    def between(network: NetworkState, sender: int, receiver: int) -> int:
        return route(network, sender, receiver).links[1]

    shared, apart = network_state(TenRegions(), 60), network_state(TenRegions(shared=False, within=9), 60)
    assert between(shared, 0, 6) == between(shared, 5, 11) != between(shared, 6, 0)
    assert between(apart, 0, 6) != between(apart, 5, 11)
    assert bandwidth(apart, 0, 6) == bandwidth(apart, 5, 11) == 26
    assert bandwidth(apart, 0, 5) == 9


# All networks


@pytest.mark.parametrize("nodes", [1, 2, 7])
@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"ideal"}))
def test_every_network_fulfils_the_contract(name: str, nodes: int, tmp_path: Path) -> None:
    (tmp_path / "ms").write_text("0 5 6\n5 0 7\n6 7 0\n")
    files = {"matrix": {"latency": tmp_path / "ms"}, "kollaps": {"path": ROOT / "examples/networks/two-sites.xml"}}
    network = find("network", name)(**files.get(name, {})).build(nodes, 0).initial_state
    links = range(len(network.capacities))
    assert (network.capacities > 0).all()
    for a in range(nodes):
        assert network.route(a, a) == Route()
        assert network.access(a)
        assert set(network.access(a)) <= set(links)
        for b in set(range(nodes)) - {a}:
            there = route(network, a, b)
            assert there is network.route(a, b)
            assert set(there.links) <= set(links)
            assert there.links[0] in network.access(a)
            assert there.links[-1] in network.access(b)
            assert there.latency >= 0
            assert there.jitter >= 0
            assert 0 <= there.loss <= 1


def test_every_network_is_listed_with_its_parameters(shoal: Callable[..., CommandResult]) -> None:
    listed = shoal("list", "network")
    assert listed.code == 0
    for text in (
        *NETWORKS,
        "round_trip: true or false = True",
        "by: one of 'hops', 'latency' = 'hops'",
        "links: a list",
    ):
        assert text in listed.out


def test_the_networks_of_the_docs_can_be_built(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "networks.md").read_text().partition("## Devices")[0]
    snippets = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "latency.csv").write_text("0,50,80\n50,0,90\n80,90,0\n")
    (tmp_path / "two-sites.xml").write_bytes((ROOT / "examples/networks/two-sites.xml").read_bytes())
    named = set()
    for snippet in snippets:
        experiment = Experiment.from_table({"nodes": 8, **tomllib.loads(snippet)}, base=tmp_path)
        assert isinstance(experiment.network, Component)
        named.add(experiment.network.name)
        experiment.network.build().build(experiment.size, experiment.seed)
    assert named | {"ideal"} == NETWORKS.keys()  # ideal is the default and has no parameters


def test_groups_may_have_their_own_connections() -> None:
    described = Experiment(
        nodes=3,
        network={"name": "uniform", "latency": 0.01, "upload": 8.0},
        group=[{"nodes": "1", "network": {"latency": 0.03, "upload": 4.0}}],
    )
    timeline = build_environment(described, device_speeds(described)).timeline
    assert timeline is not None
    network_state = timeline.initial_state
    assert [network_state.capacities[network_state.access(node)[0]] for node in range(3)] == [1e6, 5e5, 1e6]
    assert [network_state.route(0, to).latency for to in (1, 2)] == pytest.approx([0.02, 0.01])  # type: ignore[union-attr]


def test_connections_of_groups_need_a_uniform_network() -> None:
    own = [{"nodes": "1", "network": {"name": "uniform", "latency": 0.1}}]
    described = Experiment(nodes=60, network={"name": "ten-regions"}, group=own)
    with pytest.raises(ExperimentError, match="which only 'uniform' supports"):
        build_environment(described, device_speeds(described))
