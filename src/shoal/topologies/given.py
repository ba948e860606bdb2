"""Graphs that the experiment defines: as a list of edges, or by a generator of networkx."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.errors import TopologyError
from shoal.randomness import derived_seed
from shoal.schema import nearest
from shoal.topologies.static import StaticGraph, undirected
from shoal.types import NodeId

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True)
class Edges:
    """Any undirected graph, as a list of pairs of node ids."""

    edges: tuple[tuple[NodeId, NodeId], ...]

    def build(self, nodes: int, seed: int) -> StaticGraph:
        for index, edge in enumerate(self.edges):
            if edge[0] == edge[1]:
                raise TopologyError(f"edges[{index}] = {list(edge)}: node {edge[0]} is linked to itself; remove it")
            if not all(0 <= node < nodes for node in edge):
                largest = max(max(pair) for pair in self.edges)
                advice = f"; set nodes = {largest + 1}" if largest >= nodes else ""
                raise TopologyError(
                    f"edges[{index}] = {list(edge)}: with {nodes} nodes, ids are 0 to {nodes - 1}{advice}"
                )
        return undirected(nodes, self.edges)


def from_networkx(graph: networkx.Graph[Any]) -> Edges:
    """Return the edges of a networkx graph. Labels other than 0 … n - 1 are numbered in the graph's own order."""
    if graph.is_directed():
        raise TopologyError(
            "a directed networkx graph: only undirected graphs are supported; use graph.to_undirected()"
        )
    labels = list(graph)
    numbered = set(labels) == set(range(len(labels)))
    ids = {label: label if numbered else index for index, label in enumerate(labels)}
    pairs = {(min(ids[a], ids[b]), max(ids[a], ids[b])) for a, b in graph.edges()}
    return Edges(tuple(sorted(pairs)))


@dataclass(frozen=True)
class NetworkX:
    """A graph from a generator of networkx, such as "barabasi_albert_graph" with { m = 2 }.

    `n` is the experiment's number of nodes unless the arguments set it, and `seed` is derived from its seed.
    """

    generator: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def build(self, nodes: int, seed: int) -> StaticGraph:
        import networkx

        generate = self._find_generator()
        accepted = inspect.signature(generate).parameters
        defaults: Mapping[str, Any] = {"n": nodes, "seed": derived_seed(seed, "topology")}
        arguments = {name: value for name, value in defaults.items() if name in accepted} | self.arguments
        call = f"networkx.{self.generator}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"
        try:
            inspect.signature(generate).bind(**arguments)
            graph = generate(**arguments)
        except Exception as error:  # generators raise any exception for wrong arguments
            raise TopologyError(f"{call}: {error}; it takes {_describe_parameters(accepted)}") from error
        if not isinstance(graph, networkx.Graph):
            raise TopologyError(f"{call}: this returns a {type(graph).__name__}, not a graph")
        if len(graph) != nodes:
            raise TopologyError(
                f"{call}: this graph has {len(graph)} nodes and the experiment has {nodes}; set nodes = {len(graph)}"
            )
        return from_networkx(graph).build(nodes, seed)

    def _find_generator(self) -> Callable[..., object]:
        import networkx.generators

        known = {
            name: value
            for name, value in vars(networkx.generators).items()
            if inspect.isfunction(value) and value.__module__.startswith("networkx.generators")
        }
        if self.generator not in known:
            close = nearest(self.generator, known).partition("; expected one of")[0]
            raise TopologyError(f"'{self.generator}' is not a generator of networkx{close}")
        return known[self.generator]


def _describe_parameters(accepted: Mapping[str, inspect.Parameter]) -> str:
    hidden = ("backend", "backend_kwargs", "create_using", "seed")
    return ", ".join(str(parameter) for name, parameter in accepted.items() if name not in hidden)
