"""Graphs read from text files. Every error names the file and the line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from shoal.errors import TopologyError
from shoal.topologies.static import Edge, StaticGraph, undirected

Format: TypeAlias = Literal["auto", "edges", "adjacency"]


@dataclass(frozen=True)
class File:
    """An undirected graph from a text file: an edge list, an adjacency list or an adjacency matrix.

    Numbers are separated by blanks or commas, and `#` starts a comment. Nodes are 0 to n - 1.

        edges       two ids per line; a first line with one number may state the number of nodes
        adjacency   a matrix of 0 and 1, one row per line; or a list, "0: 1 2 3" per line; or the number of nodes on
                    the first line, then one line for each node with the ids of its neighbours

    DecentralizePy writes edges with the number of nodes, and reads the last kind of adjacency list as `adjacency`.
    An edge list without the number of nodes must contain the last node; otherwise it describes a smaller graph.
    """

    path: Path
    format: Format = "auto"

    def build(self, nodes: int, seed: int) -> StaticGraph:
        return undirected(nodes, _Reader(Path(self.path), nodes).edges(self.format))


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    tokens: list[str]
    head: str | None
    """The text before a colon, if there is one."""


class _Reader:
    def __init__(self, path: Path, nodes: int) -> None:
        self.path = path
        self.nodes = nodes

    def edges(self, format: Format) -> set[Edge]:
        lines = list(self._lines())
        if not lines:
            self._fail(f"it is empty; expected a graph of {self.nodes} nodes")
        first = lines[0]
        if format == "auto":
            pairs = first.head is None and (len(first.tokens) == 2 or (len(first.tokens) == 1 and self.nodes > 1))
            if pairs:
                self._reject_ambiguous(lines)
            return self._edge_list(lines) if pairs else self._adjacency(lines)
        return self._edge_list(lines) if format == "edges" else self._adjacency(lines)

    def _lines(self) -> Iterator[_Line]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise TopologyError(f"{self.path}: cannot read this graph: {reason}") from None
        for number, raw in enumerate(text.splitlines(), start=1):
            content = raw.partition("#")[0].replace(",", " ")
            head, colon, rest = content.partition(":")
            tokens = rest.split() if colon else content.split()
            if tokens or colon:
                yield _Line(number, tokens, head.strip() if colon else None)

    def _edge_list(self, lines: list[_Line]) -> set[Edge]:
        if len(lines[0].tokens) == 1:
            self._check_count(self._integer(lines[0].tokens[0], lines[0]), lines[0])
            counted, lines = True, lines[1:]
        else:
            counted = False
        found: set[Edge] = set()
        for line in lines:
            if len(line.tokens) != 2 or line.head is not None:
                advice = "; for lists of neighbours, set format = 'adjacency'" if counted else ""
                self._fail(f"expected an edge, two node ids; found {len(line.tokens)} values{advice}", line)
            found.add(self._edge(self._node(line.tokens[0], line), self._node(line.tokens[1], line), line))
        largest = max((b for _, b in found), default=0)
        if not counted and largest != self.nodes - 1:
            self._fail(
                f"its largest id is {largest}, which makes {largest + 1} nodes, not {self.nodes};"
                f" set nodes = {largest + 1}, or put the number of nodes alone on the first line"
            )
        return found

    def _adjacency(self, lines: list[_Line]) -> set[Edge]:
        if lines[0].head is not None:
            return self._adjacency_list(lines)
        return self._neighbours(lines) if self._counts(lines) else self._matrix(lines)

    def _counts(self, lines: list[_Line]) -> bool:
        """Whether the first line is the number of nodes. A single row `0` is the matrix of one node."""
        return lines[0].head is None and len(lines[0].tokens) == 1 and len(lines) > 1

    def _reject_ambiguous(self, lines: list[_Line]) -> None:
        """Reject pairs of ids that can be read as edges, and as the two neighbours of each node."""
        rows = [line.tokens for line in lines[1:]]
        if not self._counts(lines) or len(rows) != self.nodes or any(len(row) != 2 for row in rows):
            return
        linked = {(str(node), other) for node, row in enumerate(rows) for other in row}
        if all((b, a) in linked for a, b in linked):
            self._fail("each line can be an edge, or the two neighbours of a node; set format = 'edges' or 'adjacency'")

    def _neighbours(self, lines: list[_Line]) -> set[Edge]:
        """Read the number of nodes, then the neighbours of node 0, of node 1, …"""
        self._check_count(self._integer(lines[0].tokens[0], lines[0]), lines[0])
        rows = lines[1:]
        if len(rows) != self.nodes:
            self._fail(
                f"{len(rows)} lines with neighbours for {self.nodes} nodes; expected one line for each node"
                " (or 'node: neighbours' per line, if a node has no neighbours)"
            )
        found: set[Edge] = set()
        linked: list[set[int]] = []
        for node, line in enumerate(rows):
            if line.head is not None:
                self._fail("expected the ids of neighbours, without a colon", line)
            linked.append({self._node(token, line) for token in line.tokens})
            found |= {self._edge(node, other, line) for other in linked[node]}
        for node, line in enumerate(rows):
            for other in sorted(linked[node]):
                if node not in linked[other]:
                    self._fail(f"node {node} lists {other}, and line {rows[other].number} does not list {node}", line)
        return found

    def _adjacency_list(self, lines: list[_Line]) -> set[Edge]:
        found: set[Edge] = set()
        listed: set[int] = set()
        for line in lines:
            if line.head is None:
                self._fail("expected 'node: neighbours'", line)
            node = self._node(line.head, line)
            listed.add(node)
            found |= {self._edge(node, self._node(token, line), line) for token in line.tokens}
        seen = listed.union(*found)
        if len(seen) != self.nodes:
            missing = min(set(range(self.nodes)) - seen)
            self._fail(
                f"it lists {len(seen)} nodes and the experiment has {self.nodes}; node {missing} is missing"
                f" (a node without links is written '{missing}:')"
            )
        return found

    def _matrix(self, lines: list[_Line]) -> set[Edge]:
        for line in lines:
            if len(line.tokens) != len(lines) or line.head is not None:
                self._fail(
                    f"this row has {len(line.tokens)} entries and the matrix has {len(lines)} rows;"
                    " expected an adjacency matrix, or two ids per line",
                    line,
                )
        self._check_count(len(lines), None)
        linked = [[self._entry(token, line) for token in line.tokens] for line in lines]
        found: set[Edge] = set()
        for i, (row, line) in enumerate(zip(linked, lines, strict=True)):
            for j in (j for j, link in enumerate(row) if link):
                if not linked[j][i]:
                    self._fail(
                        f"the matrix is not symmetric: row {i} links to {j}, and row {j}"
                        f" (line {lines[j].number}) does not link to {i}",
                        line,
                    )
                found.add(self._edge(i, j, line))
        return found

    def _entry(self, token: str, line: _Line) -> bool:
        if token not in ("0", "1"):
            self._fail(f"'{token}' in an adjacency matrix; expected 0 or 1", line)
        return token == "1"

    def _edge(self, a: int, b: int, line: _Line) -> Edge:
        if a == b:
            self._fail(f"node {a} is linked to itself; remove this link, a node always keeps its own model", line)
        return (a, b) if a < b else (b, a)

    def _node(self, token: str, line: _Line) -> int:
        node = self._integer(token, line)
        if not 0 <= node < self.nodes:
            self._fail(f"node {node} is out of range; with {self.nodes} nodes, ids are 0 to {self.nodes - 1}", line)
        return node

    def _integer(self, token: str, line: _Line) -> int:
        try:
            return int(token)
        except ValueError:
            self._fail(f"'{token}' is not an integer", line)

    def _check_count(self, count: int, line: _Line | None) -> None:
        if count != self.nodes:
            self._fail(f"it has {count} nodes and the experiment has {self.nodes}; set nodes = {count}", line)

    def _fail(self, problem: str, line: _Line | None = None) -> NoReturn:
        place = f"{self.path}:{line.number}" if line else f"{self.path}"
        raise TopologyError(f"{place}: {problem}")
