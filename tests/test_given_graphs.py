"""Graphs from networkx, from lists of edges and from files."""

from __future__ import annotations

from pathlib import Path

import networkx
import pytest

from shoal.errors import TopologyError
from shoal.topologies import TopologyWarning
from shoal.topologies.files import File
from shoal.topologies.given import Edges, NetworkX, from_networkx
from shoal.topologies.static import Grid

# Graphs from networkx


def test_networkx_generator_is_seeded_by_the_experiment() -> None:
    topology = NetworkX("gnm_random_graph", {"m": 60})
    one, same, other = (topology.build(20, seed) for seed in (1, 1, 2))
    assert [one.links(i, 0) for i in range(20)] == [same.links(i, 0) for i in range(20)]
    assert [one.links(i, 0) for i in range(20)] != [other.links(i, 0) for i in range(20)]


def test_networkx_graph_with_any_labels_becomes_edges() -> None:
    graph = networkx.Graph([("a", "b"), ("b", "c")])
    assert from_networkx(graph) == Edges(((0, 1), (1, 2)))


def test_networkx_graph_numbered_from_0_keeps_its_numbers() -> None:
    graph = networkx.Graph([(2, 1), (1, 0)])
    assert from_networkx(graph) == Edges(((0, 1), (1, 2)))


def test_networkx_graph_in_two_dimensions_equals_the_grid() -> None:
    theirs = NetworkX("grid_2d_graph", {"m": 3, "n": 4}).build(12, 0)
    assert all(theirs.links(i, 0) == Grid().build(12, 0).links(i, 0) for i in range(12))


# Graph files

SQUARE = [(1, 3), (0, 2), (1, 3), (0, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n1 2\n2 3\n3 0\n",
        "# a square\n0,1\n1, 2  # both ways is fine\n2 1\n\n2\t3\n3 0",
        "4\n0 1\n1 2\n2 3\n3 0\n",
        "0 1 0 1\n1 0 1 0\n0 1 0 1\n1 0 1 0\n",
        "0,1,0,1\n1,0,1,0\n0,1,0,1\n1,0,1,0\n",
        "0: 1 3\n2: 1, 3\n",
        "0: 1\n1: 2\n2: 3\n3: 0\n",
    ],
)
def test_square_is_read_from_every_format(text: str, tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_text(text)
    graph = File(str(path)).build(4, 0)
    assert [graph.links(node, 0).receivers for node in range(4)] == SQUARE


def test_format_of_a_matrix_of_two_nodes_may_be_given(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_text("0 1\n1 0\n")
    for format in ("auto", "edges", "adjacency"):
        assert File(str(path), format).build(2, 0).links(0, 0).receivers == (1,)


def test_lists_of_neighbours_have_the_format_adjacency(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_text("4\n1 3\n0 2\n1 3\n0 2\n")
    graph = File(path, "adjacency").build(4, 0)
    assert [graph.links(node, 0).receivers for node in range(4)] == SQUARE
    with pytest.raises(TopologyError, match="an edge, or the two neighbours of a node; set format = 'edges' or 'adj"):
        File(path).build(4, 0)
    path.write_text("4\n1 2 3\n0\n0\n0\n")
    assert File(path, "adjacency").build(4, 0).links(0, 0).receivers == (1, 2, 3)
    with pytest.raises(TopologyError, match=r"graph:2: .* found 3 values; for lists of neighbours, set format = 'adj"):
        File(path).build(4, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5\n1\n0\n3\n2\n", r"graph:1: it has 5 nodes and the experiment has 4"),
        ("4\n1\n0\n3\n", r"graph: 3 lines with neighbours for 4 nodes; expected one line for each node"),
        ("4\n1 2\n0\n3\n2\n", r"graph:2: node 0 lists 2, and line 4 does not list 0"),
        ("4\n1\n1\n3\n2\n", r"graph:3: node 1 is linked to itself"),
        ("4\n1\n0\n3\n3: 2\n", r"graph:5: expected the ids of neighbours, without a colon"),
    ],
)
def test_invalid_lists_of_neighbours_are_rejected(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_text(text)
    with pytest.raises(TopologyError, match=message):
        File(path, "adjacency").build(4, 0)


def test_file_may_have_nodes_without_links(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    for text in ("3\n0 1\n", "0: 1\n2:\n", "0 1 0\n1 0 0\n0 0 0\n"):
        path.write_text(text)
        with pytest.warns(TopologyWarning, match="2 components"):
            assert File(str(path)).build(3, 0).links(2, 0).receivers == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n2 2\n", r"graph:2: node 2 is linked to itself"),
        ("0 1\n1 4\n", r"graph:2: node 4 is out of range; with 4 nodes, ids are 0 to 3"),
        ("0 1\n1 -2\n", r"graph:2: node -2 is out of range"),
        ("# head\n0 one\n", r"graph:2: 'one' is not an integer"),
        ("0 1.5\n", r"graph:1: '1.5' is not an integer"),
        ("0 1\n1 2 3\n", r"graph:2: expected an edge, two node ids; found 3 values"),
        ("0 1\n1: 2\n", r"graph:2: expected an edge"),
        ("0 1\n1 2\n", r"graph: its largest id is 2, which makes 3 nodes, not 4; set nodes = 3"),
        ("5\n0 1\n", r"graph:1: it has 5 nodes and the experiment has 4; set nodes = 5"),
        ("0 1 0\n1 0 1\n0 1 0\n", r"graph: it has 3 nodes and the experiment has 4; set nodes = 3"),
        ("0 1 0 0\n1 0 1 0\n0 0 0 1\n0 0 1 0\n", r"graph:2: .*row 1 links to 2, and row 2 \(line 3\)"),
        ("1 0 0 0\n0 0 0 0\n0 0 0 0\n0 0 0 0\n", r"graph:1: node 0 is linked to itself"),
        ("0 2 0 0\n2 0 0 0\n0 0 0 0\n0 0 0 0\n", r"graph:1: '2' in an adjacency matrix; expected 0 or 1"),
        ("0 1 0 0\n1 0 0\n0 0 0 0\n0 0 0 0\n", r"graph:2: this row has 3 entries and the matrix has 4 rows"),
        ("0: 1 2\n", r"graph: it lists 3 nodes and the experiment has 4; node 3 is missing"),
        ("0: 1 2\n1 2\n", r"graph:2: expected 'node: neighbours'"),
        ("x: 1 2\n", r"graph:1: 'x' is not an integer"),
        ("# nothing\n", r"graph: it is empty; expected a graph of 4 nodes"),
    ],
)  # fmt: skip
def test_invalid_file_is_rejected_with_the_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_text(text)
    with pytest.raises(TopologyError, match=message):
        File(str(path)).build(4, 0)


def test_error_names_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"missing\.edges: cannot read this graph: No such file"):
        File(str(tmp_path / "missing.edges")).build(4, 0)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TopologyError, match=r"binary: cannot read this graph: it is not a text file"):
        File(str(tmp_path / "binary")).build(4, 0)
