"""Exponential graphs: directed graphs in which every node reaches all others in log2(n) hops.

Ying, Yuan, Chen, Hu, Pan, Yin: Exponential Graph is Provably Efficient for Decentralized Deep Training,
NeurIPS 2021. The one-peer form is from Assran, Loizou, Ballas, Rabbat: Stochastic Gradient Push for
Distributed Deep Learning, ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.topologies.graph import Links
from shoal.topologies.static import Layout, StaticGraph
from shoal.types import NodeId


def hops(nodes: int) -> list[int]:
    """1, 2, 4, … below `nodes`: ceil(log2(nodes)) of them."""
    return [1 << k for k in range((nodes - 1).bit_length())]


@dataclass(frozen=True)
class Exponential:
    """Node i sends to i + 1, i + 2, i + 4, … around a circle (Ying et al. 2021)."""

    def build(self, nodes: int, seed: int) -> StaticGraph:
        def links(node: NodeId) -> Links:
            return Links(
                receivers=tuple(sorted((node + hop) % nodes for hop in hops(nodes))),
                senders=tuple(sorted((node - hop) % nodes for hop in hops(nodes))),
            )

        return StaticGraph([links(node) for node in range(nodes)], layout="circle")


@dataclass(frozen=True)
class OnePeerExponential:
    """One hop of the exponential graph per round: 1, 2, 4, …, then again (Assran et al. 2019, Ying et al. 2021).

    If n is a power of two, log2(n) rounds average exactly.
    """

    def build(self, nodes: int, seed: int) -> OnePeerGraph:
        return OnePeerGraph(nodes)


class OnePeerGraph:
    """Round r links node i to i + 2^(r mod ceil(log2(n)))."""

    layout: Layout = "circle"

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._hops = hops(nodes)
        self.static = len(self._hops) < 2

    def links(self, node: NodeId, round: int) -> Links:
        if not self._hops:
            return Links((), ())
        hop = self._hops[round % len(self._hops)]
        return Links(((node + hop) % self.nodes,), ((node - hop) % self.nodes,))

    def degree(self, node: NodeId, round: int) -> int:
        return 1 if self._hops else 0
