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
        adjacency   a matrix of 0 and 1, one row per line; or a list, "0: 1 2 3" per line

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
                self._fail(f"expected an edge, two node ids; found {len(line.tokens)} values", line)
            found.add(self._edge(self._node(line.tokens[0], line), self._node(line.tokens[1], line), line))
        largest = max((b for _, b in found), default=0)
        if not counted and largest != self.nodes - 1:
            self._fail(
                f"its largest id is {largest}, which makes {largest + 1} nodes, not {self.nodes};"
                f" set nodes = {largest + 1}, or put the number of nodes alone on the first line"
            )
        return found

    def _adjacency(self, lines: list[_Line]) -> set[Edge]:
        return self._matrix(lines) if lines[0].head is None else self._adjacency_list(lines)

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
