"""Static graphs: the base class, and the textbook graphs."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeAlias, runtime_checkable

from shoal.errors import TopologyError
from shoal.topologies.graph import Graph, Links, TopologyWarning
from shoal.types import Bounds, NodeId

Edge: TypeAlias = tuple[NodeId, NodeId]
Layout: TypeAlias = Literal["circle", "grid", "radial", "spring"]
"""The placement of nodes in a drawing; it has no other effect."""


@runtime_checkable
class LaidOut(Protocol):
    """A graph that determines its placement in a drawing."""

    @property
    def layout(self) -> Layout: ...


class StaticGraph:
    """A graph stored as the links of every node."""

    static = True

    def __init__(self, neighbours: Sequence[Links], layout: Layout = "spring", columns: int = 0) -> None:
        self.nodes = len(neighbours)
        self.layout = layout
        self.columns = columns
        """The number of columns, if the layout is a grid."""
        self._neighbours = tuple(neighbours)

    def links(self, node: NodeId, round: int) -> Links:
        return self._neighbours[node]

    def degree(self, node: NodeId, round: int) -> int:
        return len(self._neighbours[node].senders)


class FullGraph:
    """A graph in which all pairs of nodes are linked, without a list of n² links."""

    static = True
    layout: Layout = "circle"

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def links(self, node: NodeId, round: int) -> Links:
        others = (*range(node), *range(node + 1, self.nodes))
        return Links(others, others)

    def degree(self, node: NodeId, round: int) -> int:
        return self.nodes - 1


def undirected(nodes: int, edges: Iterable[Edge], layout: Layout = "spring", columns: int = 0) -> StaticGraph:
    """Build the graph with these edges, each given once or more, in either order. Warns if it is disconnected."""
    neighbours: list[set[NodeId]] = [set() for _ in range(nodes)]
    for a, b in edges:
        neighbours[a].add(b)
        neighbours[b].add(a)
    ordered = (tuple(sorted(peers)) for peers in neighbours)
    graph = StaticGraph([Links(peers, peers) for peers in ordered], layout, columns)
    warn_if_disconnected(graph)
    return graph


def components(graph: Graph, round: int = 0) -> list[list[NodeId]]:
    """Return the connected components of a round, the largest first; links count in both directions."""
    found = []
    unvisited = bytearray(b"\x01") * graph.nodes
    for start in range(graph.nodes):
        if not unvisited[start]:
            continue
        unvisited[start] = 0
        component = [start]
        for node in component:  # the list grows during the loop
            links = graph.links(node, round)
            for peer in links.receivers if links.receivers is links.senders else links.receivers + links.senders:
                if unvisited[peer]:
                    unvisited[peer] = 0
                    component.append(peer)
        found.append(sorted(component))
    return sorted(found, key=len, reverse=True)


def warn_if_disconnected(graph: Graph) -> None:
    sizes = [len(component) for component in components(graph)]
    if len(sizes) > 1:
        counted = Counter(sizes)
        listed = [f"{count} of {size}" for size, count in list(counted.items())[:5]]
        listed += ["…"] if len(counted) > 5 else []
        warnings.warn(
            f"the graph of {graph.nodes} nodes is disconnected: {len(sizes)} components"
            f" ({', '.join(listed)} node{'s' if sizes[0] > 1 else ''}); models never "
            "pass from one to another over it; add links between them if they must agree",
            TopologyWarning,
            stacklevel=4,
        )


@dataclass(frozen=True)
class Ring:
    """A circle: each node is linked to the previous and the next one."""

    def build(self, nodes: int, seed: int) -> StaticGraph:
        edges = ((i, (i + 1) % nodes) for i in range(nodes)) if nodes > 1 else ()
        return undirected(nodes, edges, layout="circle")


@dataclass(frozen=True)
class Full:
    """Every node is linked to every other."""

    def build(self, nodes: int, seed: int) -> FullGraph:
        return FullGraph(nodes)


@dataclass(frozen=True)
class Star:
    """Node 0 in the centre, linked to all others."""

    def build(self, nodes: int, seed: int) -> StaticGraph:
        return undirected(nodes, ((0, i) for i in range(1, nodes)), layout="radial")


@dataclass(frozen=True)
class Tree:
    """A balanced tree with its root at node 0; each node has `children` children, two by default."""

    children: Annotated[int, Bounds(at_least=1)] = 2

    def build(self, nodes: int, seed: int) -> StaticGraph:
        edges = ((i, (i - 1) // self.children) for i in range(1, nodes))
        return undirected(nodes, edges, layout="radial")


@dataclass(frozen=True)
class Grid:
    """Rows and columns, as square as possible unless `rows` is given; a prime number of nodes gives a line."""

    rows: Annotated[int, Bounds(at_least=1)] | None = None

    def build(self, nodes: int, seed: int) -> StaticGraph:
        _, columns = grid_shape(nodes, self.rows)
        right = ((i, i + 1) for i in range(nodes) if (i + 1) % columns)
        down = ((i, i + columns) for i in range(nodes - columns))
        return undirected(nodes, (*right, *down), layout="grid", columns=columns)


@dataclass(frozen=True)
class Torus:
    """A grid whose opposite sides are joined; a prime number of nodes gives a ring."""

    rows: Annotated[int, Bounds(at_least=1)] | None = None

    def build(self, nodes: int, seed: int) -> StaticGraph:
        _, columns = grid_shape(nodes, self.rows)
        right = ((i, i - columns + 1 if (i + 1) % columns == 0 else i + 1) for i in range(nodes))
        down = ((i, (i + columns) % nodes) for i in range(nodes))
        edges = ((a, b) for a, b in (*right, *down) if a != b)  # a side of length 1 would link to itself
        return undirected(nodes, edges, layout="grid", columns=columns)


def grid_shape(nodes: int, rows: int | None) -> tuple[int, int]:
    """Return the numbers of rows and columns, whose product is `nodes`."""
    if rows is None:
        rows = next(r for r in range(math.isqrt(nodes), 0, -1) if nodes % r == 0)
    if nodes % rows:
        divisors = [r for r in range(1, nodes + 1) if nodes % r == 0]
        nearest = min(divisors, key=lambda r: abs(r - rows))
        raise TopologyError(
            f"{rows} rows on {nodes} nodes: the rows must divide the number of nodes; try rows = {nearest}"
        )
    return rows, nodes // rows
