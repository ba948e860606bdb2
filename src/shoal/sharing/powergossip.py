"""PowerGossip: neighbours average a low-rank approximation of their difference, from a power iteration.

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
from shoal.sharing.requirements import requires_neighbours
from shoal.sharing.sharing import NodeInfo
from shoal.state import State
from shoal.topologies.inspection import initial_graph, is_directed, requires_doubly_stochastic
from shoal.traits import ExperimentView
from shoal.types import Bounds, NodeId, Params

Matrix: TypeAlias = NDArray[np.float32]

STEPS = 2**62
"""Steps on an edge are counted modulo this, an even number, so that a message can carry them."""
REMEMBERED_ROUNDS = 8
"""The rounds that an edge may be unused before both its ends forget it."""
NEGLIGIBLE = 1e-6
"""A column of P that is shorter than this fraction of the longest one, after orthogonalisation, is rounding error."""


@dataclass
class PowerGossip:
    """Vogels et al. 2020: a low-rank approximation of each difference between neighbours, by power iteration.

    Every tensor with two or more dimensions is a matrix X, its first dimension by the rest. For each edge {i, j} and
    each matrix, both ends know the same V with `rank` orthonormal columns. In even steps i sends X_i V, j sends X_j V,
    and with the mixing weight w of the edge

        P   = (X_j − X_i) V
        X_i ← X_i + w P Vᵀ        X_j ← X_j − w P Vᵀ

    P Vᵀ is the projection of X_j − X_i on the span of V: the difference of the neighbours is averaged in these
    directions, and stays unchanged in the others. If both ends receive each other's messages and have the same weight
    for the edge, the two updates cancel, and the sum of all models is unchanged. A projection never overshoots, so
    there is no step size to tune. The next V is P with orthonormal columns, for the other side: in odd steps i sends
    X_iᵀ V, and P = (X_j − X_i)ᵀ V gives the update w V Pᵀ. Two steps are one power iteration on a difference that
    changes slowly, so V converges to its largest singular vectors: the paper's warm start, with one message per step.
    The first V is random; both ends draw it from the experiment's seed. Tensors of one dimension are sent unchanged and
    averaged.

    P is always that of the higher id minus that of the lower, so that both ends compute V from the same numbers.

    Links must go both ways, and may change. An unused edge keeps its V for a few rounds and starts again after more: a
    node of a large graph would otherwise remember too many peers. When a message is lost, one end is a step ahead.
    Messages contain their step, so both ends detect it in the next round in which they receive each other's messages:
    they skip that round and start from a new random V, in the step after the later of the two. Steps are counted modulo
    a fixed number, so a message with a wrong step costs a few rounds, whatever the step is. Models whose difference is
    not finite stay unchanged.
    """

    rank: Annotated[int, Bounds(at_least=1)] = 1

    def bind(self, info: NodeInfo) -> None:
        self._info = info
        self._layout = _Layout(info.shapes, self.rank)
        self._edges: dict[NodeId, _Edge] = {}
        self._send_count = 0
        """How often this node has sent. It is equal on nodes that proceed round by round together."""

    def start(self, params: Params) -> None:
        """Keep nothing: an edge starts when it is first used."""

    def outgoing(self, params: Params, round: int) -> Callable[[NodeId], Payload]:
        self._send_count += 1
        self._edges = {
            peer: edge for peer, edge in self._edges.items() if self._send_count - edge.used <= REMEMBERED_ROUNDS
        }
        for edge in self._edges.values():
            edge.sent = None

        def to(peer: NodeId) -> Payload:
            edge = self._edges.get(peer)
            if edge is None:
                edge = self._edges[peer] = self._new_edge(peer, 0)
            edge.used = self._send_count
            edge.sent = self._layout.encode(params, edge)
            return Payload({"values": edge.sent}, {"step": edge.step})

        return to

    def check(self, payload: Payload, params: Params) -> None:
        step, values = payload.fields.get("step"), payload.arrays.get("values")
        if type(step) is not int or not 0 <= step < STEPS:
            raise MessageError(f"step is {step!r}, expected an integer from 0 to 2**62 - 1")
        size = self._layout.size(step)
        if values is None or values.dtype != np.float32 or values.shape != (size,):
            raise MessageError(f"expected one float32 vector 'values' of {size} numbers in step {step}")
        if not np.isfinite(values).all():
            raise MessageError("array 'values' holds numbers that are not finite")

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        differences: list[tuple[float, _Edge, Params]] = []
        for peer in sorted(received):
            step, values = int(received[peer].fields["step"]), received[peer].arrays["values"]
            edge = self._edges.get(peer)
            if edge is None or edge.sent is None:
                continue  # it received nothing from this node, and takes no step either
            if step != edge.step:  # a message was lost
                self._edges[peer] = self._new_edge(peer, (max(step, edge.step) + 1) % STEPS)
                continue
            above = peer > self._info.id
            with np.errstate(over="ignore"):
                difference = values - edge.sent if above else edge.sent - values
            if not np.isfinite(difference).all():
                continue  # the other end finds the same and takes no step either
            differences.append((weights[peer] if above else -weights[peer], edge, difference))
            self._edges[peer] = self._next(peer, edge, difference)
        return self._layout.merged(params, differences)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        why = "two neighbours compare their models, so each must receive from the other"
        if problems := requires_neighbours(experiment, why):
            return problems
        if is_directed(initial_graph(experiment)):
            return [
                f"sharing = {experiment.sharing.name!r}: {why}, "
                f"and topology = {experiment.topology.name!r} has one-way links; "
                "use an undirected graph, or another sharing"
            ]
        return requires_doubly_stochastic(experiment, "sharing = 'powergossip'")

    def state(self) -> State:
        edges = self._edges.items()
        kept = {str(peer): {"step": edge.step, "basis": edge.basis.copy(), "used": edge.used} for peer, edge in edges}
        return {"edges": kept, "times": self._send_count}

    def restore(self, state: State) -> None:
        self._send_count = state["times"]
        self._edges = {
            int(peer): _Edge(edge["step"], np.array(edge["basis"], np.float32), edge["used"])
            for peer, edge in state["edges"].items()
        }

    def _new_edge(self, peer: NodeId, step: int) -> _Edge:
        """Return the edge to `peer` with a random V for every matrix."""
        shapes = self._layout.bases(step)
        basis = _flat([self._random(peer, step, i, shape) for i, shape in enumerate(shapes)])
        return _Edge(step, basis, self._send_count)

    def _next(self, peer: NodeId, edge: _Edge, difference: Params) -> _Edge:
        """Return the edge after a step with this difference."""
        step = (edge.step + 1) % STEPS
        if self.rank == 1 and (normalised := self._layout.normalised(difference, edge.step)) is not None:
            return _Edge(step, normalised, self._send_count)
        bases = []
        for i, product in enumerate(self._layout.products(difference, edge.step)):
            basis, lost = _orthonormal(product)
            if lost.any():  # equal models, or a difference of lower rank: try other directions
                basis, _ = _orthonormal(np.where(lost[:, None], self._random(peer, step, i, basis.shape), basis))
            bases.append(basis)
        return _Edge(step, _flat(bases), self._send_count)

    def _random(self, peer: NodeId, step: int, matrix: int, shape: tuple[int, ...]) -> Matrix:
        """Return a random V. The peer draws the same one."""
        one, other = sorted((self._info.id, peer))
        rng = generator(self._info.seed, "powergossip", one, other, step, matrix)
        return _orthonormal(rng.standard_normal(shape, np.float32))[0]


class _Edge:
    """One end of an edge. The other end is equal unless a message is lost."""

    __slots__ = ("basis", "sent", "step", "used")

    def __init__(self, step: int, basis: Params, used: int) -> None:
        self.step = step
        """Even if V multiplies from the right."""
        self.basis = basis
        """V of every matrix, concatenated."""
        self.used = used
        """The value of `_send_count` when this end last sent."""
        self.sent: Params | None = None
        """The values that this end has sent in this round."""


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
    """The matrices and other tensors of a model, and their layout in messages and bases.

    V and P are stored transposed, so that each of their columns is contiguous.
    """

    def __init__(self, shapes: tuple[tuple[int, ...], ...], rank: int) -> None:
        self.blocks: list[_Block] = []
        self.plain: list[slice] = []
        """Tensors that are sent unchanged."""
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
        """Return the shape of V for each matrix."""
        return self._bases[step % 2]

    def size(self, step: int) -> int:
        """Return the number of values in a message of this step."""
        return self._sizes[step % 2] + self._plain_size

    def encode(self, params: Params, edge: _Edge) -> Params:
        """Return X V or Xᵀ V of every matrix, then all other tensors."""
        values = np.empty(self.size(edge.step), np.float32)
        bases = _matrices(edge.basis, self.bases(edge.step))
        for block, product, basis in zip(self.blocks, self.products(values, edge.step), bases, strict=True):
            x = block.of(params)
            np.matmul(basis, x if edge.step % 2 else x.T, out=product)
        at = self._sizes[edge.step % 2]
        for part in self.plain:
            values[at : at + part.stop - part.start] = params[part]
            at += part.stop - part.start
        values.setflags(write=False)
        return values

    def products(self, values: Params, step: int) -> list[Matrix]:
        """Return P of each matrix, from a message or from the difference of two."""
        return _matrices(values, self._products[step % 2])

    def normalised(self, values: Params, step: int) -> Params | None:
        """Return P of each matrix, one column each, scaled to length 1; None if one of them is zero or not finite."""
        lengths = [length for _, length in self._products[step % 2]]
        if not lengths:
            return np.empty(0, np.float32)
        wide = values[: self._sizes[step % 2]].astype(np.float64)
        norms = np.sqrt(np.add.reduceat(wide * wide, np.cumsum([0, *lengths[:-1]])))
        if not 0 < norms.min() <= norms.max() < np.inf:
            return None
        wide /= np.repeat(norms, lengths)
        return wide.astype(np.float32)

    def merged(self, params: Params, differences: Sequence[tuple[float, _Edge, Params]]) -> Params:
        """Return X plus the weighted P Vᵀ or V Pᵀ of each edge, with one product per matrix for all edges."""
        merged = params.copy()
        change = np.zeros(self._plain_size, np.float32)
        left: list[list[Matrix]] = [[] for _ in self.blocks]
        right: list[list[Matrix]] = [[] for _ in self.blocks]
        for weight, edge, difference in differences:
            weighted = difference * np.float32(weight)
            bases = _matrices(edge.basis, self.bases(edge.step))
            for i, (product, basis) in enumerate(zip(self.products(weighted, edge.step), bases, strict=True)):
                left[i].append(basis if edge.step % 2 else product)
                right[i].append(product if edge.step % 2 else basis)
            change += weighted[self._sizes[edge.step % 2] :]
        if differences:
            at = 0
            for part in self.plain:
                merged[part] += change[at : at + part.stop - part.start]
                at += part.stop - part.start
            for block, one, other in zip(self.blocks, left, right, strict=True):
                x = block.of(merged)
                x += np.concatenate(one).T @ np.concatenate(other)
        return merged


def _matrices(values: Params, shapes: list[tuple[int, int]]) -> list[Matrix]:
    """Return the matrices that are concatenated in `values`."""
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
    """Return an orthonormal basis of the span of `rows`, and which of its vectors are arbitrary (a smaller span)."""
    wide = rows.astype(np.float64)  # squares of float32 neither vanish nor overflow in it
    if len(rows) == 1:
        lengths = np.sqrt(np.vdot(wide, wide)).reshape(1)
        basis = wide / lengths if lengths[0] > 0 else wide
    else:
        columns, triangle = np.linalg.qr(wide.T)
        basis, lengths = columns.T, np.abs(np.diagonal(triangle))
    return basis.astype(np.float32), ~(lengths > NEGLIGIBLE * lengths.max())
