"""The models that colluding nodes read under secure aggregation, against the threshold, and what failures then cost.

python benchmarks/colluders.py               # a minute or two
python benchmarks/colluders.py --short       # fewer graphs

`benchmarks/attacks.py` describes what colluders know. Attacks on simulated runs check it: an eavesdropper on plain
links who has all sums, and a third of the nodes.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from attacks import Attack, AttackedRun, attack, determined, read_by
from measuring import Figure, show, step
from shoal.sharing.secure.messages import ProtocolRound
from shoal.sharing.secure.secure import Secure
from shoal.topologies.graph import Graph
from shoal.topologies.regular import Regular
from shoal.topologies.static import Ring
from shoal.types import NodeId

NODES, DEGREE = 48, 5
DEGREES = (3, 4, 5, 8, 12)
THRESHOLDS = (0.5, 0.75, 1.0)
"""With five neighbours these are all cases: two, three or four shares reconstruct a secret."""
COLLUDERS = (4, 8, 12, 16, 24)
FAILED = (1, 2, 4, 8)
ROUNDS = 20
"""Rounds of a graph that changes in every round."""
ERROR = 1e-5
"""The largest error of a value in a model that counts as read."""
RUN: dict[str, Any] = {
    "name": "colluders",
    "nodes": NODES,
    "seed": 1,
    "partition": {"name": "shards", "per_node": 2},
    "model": {"name": "mlp"},
    "training": {"lr": 0.3, "batch_size": 16, "local_steps": 4},
    "evaluation": {"every": 0, "nodes": 1, "average": False},
    "checkpoint": {"final": False},
    "simulation": {"batching": "off"},
}


def draw(count: int, seed: int) -> set[NodeId]:
    return set(np.random.default_rng(seed).choice(NODES, count, replace=False).tolist())


def protocol_rounds(graph: Graph, round: int, threshold: float, seed: int) -> list[ProtocolRound]:
    return [
        ProtocolRound(receiver, round, graph.links(receiver, round).senders, Secure.partners, threshold, seed)
        for receiver in range(graph.nodes)
    ]


def attacks() -> list[Figure]:
    figures = []
    for degree in (DEGREE, 12):
        settings = {**RUN, "topology": {"name": "regular", "degree": degree}}
        with step(f"an eavesdropper on the links of a run, {degree}-regular"):
            figures.append(_figure(f"{degree}-regular, eavesdropper with all sums", attack(AttackedRun(settings))))
        for threshold in THRESHOLDS:
            with step(f"16 colluders in a run, {degree}-regular, threshold {threshold:g}"):
                found = attack(AttackedRun(settings, threshold=threshold), draw(16, seed=0))
            figures.append(_figure(f"{degree}-regular, 16 colluders, threshold {threshold:g}", found))
    return figures


def _figure(what: str, found: Attack) -> Figure:
    others = len(found.errors) - len(found.read)
    if found.least_error_of_others < 100 * ERROR:
        raise SystemExit(f"{what}: read a model that does not count as read, error {found.least_error_of_others:.1e}")
    return Figure(
        what, found.error, "largest error", at_most=ERROR,
        note=f"{len(found.read)} of {len(found.errors)} models read"
        + (f"; least error of the {others} others: {found.least_error_of_others:.2g}" if others else ""),
    )  # fmt: skip


def exposure(topology: Regular, threshold: float, count: int, seeds: int, rounds: int) -> list[float]:
    """Return the fractions of the other nodes of which randomly placed colluders read at least one model."""
    fractions = []
    for seed in range(seeds):
        graph, colluders = topology.build(NODES, seed), draw(count, seed)
        read = set[NodeId]().union(
            *(read_by(protocol_rounds(graph, round, threshold, seed), colluders) for round in range(rounds))
        )
        fractions.append(len(read) / (NODES - count))
    return fractions


def colluding(topology: Regular, seeds: int, rounds: int = 1) -> list[Figure]:
    return [
        Figure(
            f"{count} colluders, threshold {threshold:g}", 100 * float(np.mean(found)), "%",
            note=f"{100 * min(found):.0f} to {100 * max(found):.0f} %",
        )
        for count in COLLUDERS
        for threshold in THRESHOLDS
        for found in [exposure(topology, threshold, count, seeds, rounds)]
    ]  # fmt: skip


def eavesdropping(seeds: int) -> list[Figure]:
    """The models that follow from the sums of all receivers."""
    figures = []
    for topology in (*map(Regular, DEGREES), Ring()):
        graphs = [topology.build(NODES, seed) for seed in range(seeds)]
        found = [determined(frozenset(graph.links(node, 0).senders) for node in range(NODES)) for graph in graphs]
        read = [len(nodes) / NODES for nodes in found]
        what = f"{topology.degree}-regular" if isinstance(topology, Regular) else "ring"
        note = f"all models on {sum(fraction == 1 for fraction in read)} of {seeds} graphs"
        figures.append(Figure(what, 100 * float(np.mean(read)), "%", note=note))
    return figures


def masked_after_failures(degree: int, threshold: float, failed: int, seeds: int) -> float:
    """Return the fraction of the running nodes whose sums stay masked after `failed` nodes failed.

    All senders to a node must share masks with each other, as with up to nine neighbours.
    """
    masked = 0
    for seed in range(seeds):
        lost = draw(failed, seed)
        for one in protocol_rounds(Regular(degree).build(NODES, seed), 0, threshold, seed):
            masked += one.receiver not in lost and one.objection(set(one.senders) - lost) is not None
    return masked / (seeds * (NODES - failed))


def main(short: bool) -> None:
    seeds, rounds = (5, 5) if short else (40, ROUNDS)
    show(f"Attacks on simulated runs, {NODES} nodes, digits", attacks())
    show(f"Models that an eavesdropper with all sums reads, {NODES} nodes", eavesdropping(seeds))
    for degree in (DEGREE,) if short else DEGREES:
        with step(f"colluders, {degree}-regular, {seeds} graphs"):
            figures = colluding(Regular(degree), seeds)
        show(f"Models of other nodes that colluders read, {NODES} nodes, {degree}-regular", figures)
    with step(f"colluders, a new graph in each of {rounds} rounds"):
        figures = colluding(Regular(DEGREE, dynamic=True), seeds, rounds)
    show(f"Nodes of which colluders read a model in {rounds} rounds, dynamic {DEGREE}-regular", figures)
    figures = [
        Figure(
            f"{degree}-regular, {failed} failed, threshold {threshold:g}",
            100 * masked_after_failures(degree, threshold, failed, 5 * seeds), "%",
        )
        for degree in (4, 5, 8)
        for failed in FAILED
        for threshold in THRESHOLDS
    ]  # fmt: skip
    show(f"Running nodes whose sums stay masked after failures, {NODES} nodes", figures)


if __name__ == "__main__":
    main("--short" in sys.argv)
