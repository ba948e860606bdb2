"""PowerGossip: neighbours average what a power iteration shows of their difference.

Vogels, Karimireddy, Jaggi: Practical Low-Rank Communication Compression in Decentralized Deep Learning, NeurIPS 2020,
arXiv:2008.01425.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MessageError
from shoal.message import Payload
from shoal.randomness import generator
from shoal.sharing.requirements import without_neighbours
from shoal.sharing.sharing import NodeInfo
from shoal.state import State
from shoal.traits import ExperimentView
from shoal.types import Bounds, NodeId, Params

Matrix: TypeAlias = NDArray[np.float32]

STEPS = 2**62
"""Steps on an edge are counted modulo this, an even number, so that a message can carry them."""
LOOKED_AT = 64
"""Nodes whose links are looked at to tell whether links go both ways."""
REMEMBERED = 8
"""Rounds for which an edge may rest before both its ends forget it."""
NEGLIGIBLE = 1e-6
"""A column of P so much shorter than the longest, once those before it are taken out of it, is rounding."""


@dataclass
class PowerGossip:
    """Vogels et al. 2020: a low-rank approximation of each difference between neighbours, by power iteration.

    Every tensor with two dimensions or more is a matrix X, its first dimension by the rest. For each edge {i, j} and
    each matrix, both ends know the same V with orthonormal columns, `rank` of them. In even steps i sends X_i V, j
    sends X_j V, and with w the mixing weight of the edge

        P   = (X_j − X_i) V
        X_i ← X_i + w P Vᵀ        X_j ← X_j − w P Vᵀ

    P Vᵀ is X_j − X_i projected on the span of V: what the neighbours' difference has in these directions is averaged
    as ever, and the rest stays. Where both ends hear each other and give the edge the same weight, the two updates
    cancel, and the sum of all models is kept. As a projection never overshoots, there is no step size to tune. The next
    V is P with its columns made orthonormal, for the other side: in odd steps i sends X_iᵀ V, and P = (X_j − X_i)ᵀ V
    makes the update w V Pᵀ. Two steps are one power iteration on a difference that changes slowly, so V turns to its
    largest singular vectors: the paper's warm start, with one message per step. The first V is random, equal on both
    ends by the experiment's seed. Tensors of one dimension are sent as they are and averaged.

    P is always that of the higher id less that of the lower, so that both ends compute one V from the same numbers.

    Links have to go both ways; they may come and go. An edge that rests keeps its V for a few rounds, and is begun
    anew after more: with everyone it ever met a node of a large graph would remember too much. When a message is lost,
    one end has gone a step further. Messages name their step, so both see it in the next round that they hear each
    other: they leave that round out and start from a new random V, in the step after the later of the two. Steps are
    counted round a circle, so a message that names a wrong one costs a few rounds, whatever it names. Models so far
    apart that their difference is not finite are left as they are.
    """

    rank: Annotated[int, Bounds(at_least=1)] = 1

    def bind(self, info: NodeInfo) -> None:
        self._info = info
        self._layout = _Layout(info.shapes, self.rank)
        self._edges: dict[NodeId, _Edge] = {}
        self._times = 0
        """How often this node has spoken; nodes that go from round to round together agree on it."""

    def start(self, params: Params) -> None:
        """Edges begin when they are first used."""

    def outgoing(self, params: Params, round: int) -> Callable[[NodeId], Payload]:
        self._times += 1
        self._edges = {peer: edge for peer, edge in self._edges.items() if self._times - edge.used <= REMEMBERED}
        for edge in self._edges.values():
            edge.said = None

        def to(peer: NodeId) -> Payload:
            edge = self._edges.get(peer)
            if edge is None:
                edge = self._edges[peer] = self._anew(peer, 0)
            edge.used = self._times
            edge.said = self._layout.say(params, edge)
            return Payload({"values": edge.said}, {"step": edge.step})

        return to

    def check(self, payload: Payload, params: Params) -> None:
        step, values = payload.fields.get("step"), payload.arrays.get("values")
        if type(step) is not int or not 0 <= step < STEPS:
            raise MessageError(f"step is {step!r}, expected a whole number from 0 to 2**62 - 1")
        size = self._layout.size(step)
        if values is None or values.dtype != np.float32 or values.shape != (size,):
            raise MessageError(f"expected one float32 vector 'values' of {size} numbers in step {step}")
        if not np.isfinite(values).all():
            raise MessageError("array 'values' holds numbers that are not finite")

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        heard: list[tuple[float, _Edge, Params]] = []
        for peer in sorted(received):
            step, values = int(received[peer].fields["step"]), received[peer].arrays["values"]
            edge = self._edges.get(peer)
            if edge is None or edge.said is None:
                continue  # it heard nothing from us, and takes no step either
            if step != edge.step:  # one of us missed a message
                self._edges[peer] = self._anew(peer, (max(step, edge.step) + 1) % STEPS)
                continue
            above = peer > self._info.id
            with np.errstate(over="ignore"):
                difference = values - edge.said if above else edge.said - values
            if not np.isfinite(difference).all():
                continue  # the other end finds the same, and takes no step either
            heard.append((weights[peer] if above else -weights[peer], edge, difference))
            self._edges[peer] = self._next(peer, edge, difference)
        return self._layout.merged(params, heard)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        why = "two neighbours compare their models, each hearing the other"
        if problems := without_neighbours(experiment, why):
            return problems
        if _one_way(experiment):
            return [
                f"sharing = {experiment.sharing.name!r}: {why}, "
                f"and topology = {experiment.topology.name!r} has links that go one way; "
                "use an undirected graph, or another sharing"
            ]
        return []

    def state(self) -> State:
        edges = self._edges.items()
        kept = {str(peer): {"step": edge.step, "basis": edge.basis.copy(), "used": edge.used} for peer, edge in edges}
        return {"edges": kept, "times": self._times}

    def restore(self, state: State) -> None:
        self._times = state["times"]
        self._edges = {
            int(peer): _Edge(edge["step"], np.array(edge["basis"], np.float32), edge["used"])
            for peer, edge in state["edges"].items()
        }

    def _anew(self, peer: NodeId, step: int) -> _Edge:
        """The edge to `peer` with a random V of every matrix."""
        shapes = self._layout.bases(step)
        basis = _flat([self._random(peer, step, i, shape) for i, shape in enumerate(shapes)])
        return _Edge(step, basis, self._times)

    def _next(self, peer: NodeId, edge: _Edge, difference: Params) -> _Edge:
        """The edge after a step that has found this difference."""
        step = (edge.step + 1) % STEPS
        if self.rank == 1 and (normalised := self._layout.normalised(difference, edge.step)) is not None:
            return _Edge(step, normalised, self._times)
        bases = []
        for i, product in enumerate(self._layout.products(difference, edge.step)):
            basis, lost = _orthonormal(product)
            if lost.any():  # equal models, or a difference of lower rank: look elsewhere for what V does not see
                basis, _ = _orthonormal(np.where(lost[:, None], self._random(peer, step, i, basis.shape), basis))
            bases.append(basis)
        return _Edge(step, _flat(bases), self._times)

    def _random(self, peer: NodeId, step: int, matrix: int, shape: tuple[int, ...]) -> Matrix:
        """A random V, which the peer draws alike."""
        one, other = sorted((self._info.id, peer))
        rng = generator(self._info.seed, "powergossip", one, other, step, matrix)
        return _orthonormal(rng.standard_normal(shape, np.float32))[0]


class _Edge:
    """One end of an edge; while no message is lost, the other end holds the same."""

    __slots__ = ("basis", "said", "step", "used")

    def __init__(self, step: int, basis: Params, used: int) -> None:
        self.step = step
        """Even when V multiplies from the right."""
        self.basis = basis
        """V of every matrix, one behind the other."""
        self.used = used
        """When this end last spoke on it."""
        self.said: Params | None = None
        """What this end has sent in this round."""


@dataclass(frozen=True)
class _Block:
    """A matrix within the flat vector."""

    start: int
    rows: int
    columns: int
    rank: int

    def of(self, params: Params) -> Matrix:
        return params[self.start : self.start + self.rows * self.columns].reshape(self.rows, self.columns)


class _Layout:
    """The matrices and the other tensors of a model, and how they are laid out in messages and bases.

    V and P are kept transposed, each of their columns in one piece.
    """

    def __init__(self, shapes: tuple[tuple[int, ...], ...], rank: int) -> None:
        self.blocks: list[_Block] = []
        self.plain: list[slice] = []
        """Tensors that are sent as they are."""
        start = 0
        for shape in shapes:
            size = math.prod(shape)
            if len(shape) >= 2 and size:
                rows, columns = shape[0], size // shape[0]
                self.blocks.append(_Block(start, rows, columns, min(rank, rows, columns)))
            elif size:
                self.plain.append(slice(start, start + size))
            start += size
        tall, wide = [(b.rank, b.rows) for b in self.blocks], [(b.rank, b.columns) for b in self.blocks]
        self._bases, self._products = (wide, tall), (tall, wide)
        self._sizes: list[int] = [sum(math.prod(shape) for shape in shapes) for shapes in self._products]
        self._plain_size: int = sum(part.stop - part.start for part in self.plain)

    def bases(self, step: int) -> list[tuple[int, int]]:
        """The shape of each matrix's V."""
        return self._bases[step % 2]

    def size(self, step: int) -> int:
        """How many values a message of this step has."""
        return self._sizes[step % 2] + self._plain_size

    def say(self, params: Params, edge: _Edge) -> Params:
        """X V or Xᵀ V of every matrix, then all other tensors."""
        said = np.empty(self.size(edge.step), np.float32)
        bases = _matrices(edge.basis, self.bases(edge.step))
        for block, product, basis in zip(self.blocks, self.products(said, edge.step), bases, strict=True):
            x = block.of(params)
            np.matmul(basis, x if edge.step % 2 else x.T, out=product)
        at = self._sizes[edge.step % 2]
        for part in self.plain:
            said[at : at + part.stop - part.start] = params[part]
            at += part.stop - part.start
        said.flags.writeable = False
        return said

    def products(self, values: Params, step: int) -> list[Matrix]:
        """Each matrix's P in a message, or in the difference of two."""
        return _matrices(values, self._products[step % 2])

    def normalised(self, values: Params, step: int) -> Params | None:
        """Each matrix's P of one column at length 1, for all at once; None when one of them has no direction."""
        lengths = [length for _, length in self._products[step % 2]]
        if not lengths:
            return np.empty(0, np.float32)
        wide = values[: self._sizes[step % 2]].astype(np.float64)
        norms = np.sqrt(np.add.reduceat(wide * wide, np.cumsum([0, *lengths[:-1]])))
        if not 0 < norms.min() <= norms.max() < np.inf:
            return None
        wide /= np.repeat(norms, lengths)
        return wide.astype(np.float32)

    def merged(self, params: Params, heard: Sequence[tuple[float, _Edge, Params]]) -> Params:
        """X plus, for each edge heard from, its weight times P Vᵀ or V Pᵀ: one product per matrix for all edges."""
        merged = params.copy()
        change = np.zeros(self._plain_size, np.float32)
        left: list[list[Matrix]] = [[] for _ in self.blocks]
        right: list[list[Matrix]] = [[] for _ in self.blocks]
        for weight, edge, difference in heard:
            weighted = difference * np.float32(weight)
            bases = _matrices(edge.basis, self.bases(edge.step))
            for i, (product, basis) in enumerate(zip(self.products(weighted, edge.step), bases, strict=True)):
                left[i].append(basis if edge.step % 2 else product)
                right[i].append(product if edge.step % 2 else basis)
            change += weighted[self._sizes[edge.step % 2] :]
        if heard:
            at = 0
            for part in self.plain:
                merged[part] += change[at : at + part.stop - part.start]
                at += part.stop - part.start
            for block, one, other in zip(self.blocks, left, right, strict=True):
                x = block.of(merged)
                x += np.concatenate(one).T @ np.concatenate(other)
        return merged


def _matrices(values: Params, shapes: list[tuple[int, int]]) -> list[Matrix]:
    """Matrices that lie one behind the other."""
    found = []
    at = 0
    for rank, length in shapes:
        found.append(values[at : at + rank * length].reshape(rank, length))
        at += rank * length
    return found


def _flat(matrices: Sequence[Matrix]) -> Params:
    rows = [matrix.reshape(-1) for matrix in matrices]
    return np.concatenate(rows) if rows else np.empty(0, np.float32)


def _orthonormal(rows: Matrix) -> tuple[Matrix, NDArray[np.bool_]]:
    """An orthonormal basis of the span of `rows`, and which of it are arbitrary because the span has no more."""
    wide = rows.astype(np.float64)  # in which squares of float32 neither vanish nor overflow
    if len(rows) == 1:
        lengths = np.sqrt(np.vdot(wide, wide)).reshape(1)
        basis = wide / lengths if lengths[0] > 0 else wide
    else:
        columns, triangle = np.linalg.qr(wide.T)
        basis, lengths = columns.T, np.abs(np.diagonal(triangle))
    return basis.astype(np.float32), ~(lengths > NEGLIGIBLE * lengths.max())


def _one_way(experiment: ExperimentView) -> bool:
    """Whether some link of the topology is known to go one way only."""
    if experiment.topology.traits.needs_labels:
        return False  # known when the data is; cliques are linked both ways
    graph = experiment.topology.build().build(experiment.nodes, experiment.seed)
    some = (graph.links(node, 0) for node in range(min(experiment.nodes, LOOKED_AT)))
    return any(links.to != links.of for links in some)
