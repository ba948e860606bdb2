"""SGP: stochastic gradient push, for graphs whose links go one way.

Assran, Loizou, Ballas, Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019 (arXiv:1811.10792).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from shoal.algorithms.support.presence import PeerMonitor
from shoal.algorithms.support.vectors import check_vectors
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Check, Node
from shoal.topologies.graph import Peers
from shoal.traits import Traits
from shoal.types import Bounds, NodeId

PUSH = "push"
SILENCE = "silence"
LEAST = 1e-6
"""A weight below this is as good as lost."""


@dataclass(frozen=True)
class SGP:
    """Assran et al. 2019, stochastic gradient push: train, push shares of model and weight, divide by the weight.

    Each node holds a sum x and its weight w, 1 at first. Its model is z = x/w, and its local step u = train(z) − z is
    −η∇F(z) for one step of SGD. With P **column**-stochastic, x ← P(x + u) and w ← Pw: of what a node holds, it and
    each that it sends to get 1/(1 + out-degree). So Σx/Σw is the average of all on any graph, directed or not.

    Nobody gives a share to a node that it knows to be dead, nor to one that keeps silent, of which nodes tell each
    other: where links go one way, who sends to a node does not hear it. A node of which that is said gives no shares
    either, for they would come too late. All are still told that there is none for them, and count again as soon as
    they are heard. What was under way when its receiver fell silent is lost, its weight with it. Those that speak must
    still reach each other over the rounds: the weight of a node that hears from nobody shrinks, and its steps grow,
    until at a weight of 1e-6 it starts anew with the model that it had and weight 1.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        x, w = node.memory.get("x", node.params), node.memory.get("w", 1.0)
        silence = _Silence(node)
        check = partial(_check, size=x.size, nodes=node.nodes, rounds=self.rounds)
        async for r in node.rounds(self.rounds):
            z = node.params
            x = x + (await node.train(z) - z)
            peers = await node.peers(r)
            to, passed_over = silence.sort(peers)
            x, w = x * np.float32(1 / (1 + len(to))), w / (1 + len(to))
            await node.send(to, Payload({"x": x, **silence.told()}, {"w": w}), round=r, kind=PUSH)
            await node.send(passed_over, Payload(silence.told(), {"w": 0.0}), round=r, kind=PUSH)
            received = await silence.hear(peers, r, check)
            for share in received:
                x, w = x + share.arrays["x"], w + float(share.fields["w"])
            if w < LEAST:
                node.event("weight lost", f"round {r}: w = {w:.3g}; the model stays as it was, with weight 1")
                x, w = z, 1.0
            node.params = x / np.float32(w)
            node.memory.update(x=x, w=w)


class _Silence:
    """Who keeps silent: what this node finds, and what others tell it. Of two, the later round is right."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._listener = PeerMonitor(node)
        self._known: dict[NodeId, tuple[int, int]] = {k: (r, s) for k, r, s in node.memory.get("silence", [])}
        """Of those that were missed at any time: the round of the latest news, and 1 for silent or 0 for heard."""

    def sort(self, peers: Peers) -> tuple[list[NodeId], list[NodeId]]:
        """Of those that are sent to: who gets a share, and who gets none; nothing is sent to the dead."""
        gone = self._node.failed_peers
        living = [peer for peer in peers.to if peer not in gone]
        if self._is_silent(self._node.id):
            return [], living
        return [p for p in living if not self._is_silent(p)], [p for p in living if self._is_silent(p)]

    def told(self) -> dict[str, NDArray[np.int32]]:
        """What is said of it to others: nothing, as long as nobody was missed."""
        rows = [(node, *news) for node, news in sorted(self._known.items())]
        return {SILENCE: np.array(rows, np.int32)} if rows else {}

    async def hear(self, peers: Peers, round: int, check: Check) -> list[Payload]:
        """The shares that came, in ascending order of sender, without those that are none."""
        received = await self._listener.hear(peers, round=round, kind=PUSH, check=check)
        for peer in self._listener.silent.intersection(peers.weights):
            self._known[peer] = (round, 1)
        for said in received.values():
            for node, *news in said.arrays.get(SILENCE, np.empty((0, 3), np.int32)).tolist():
                self._known[node] = max(self._known.get(node, (-1, 0)), (news[0], news[1]))
        for peer in received:
            if peer in self._known:
                self._known[peer] = max(self._known[peer], (round, 0))
        self._node.memory["silence"] = [[node, *news] for node, news in sorted(self._known.items())]
        return [said for said in received.values() if said.fields["w"]]

    def _is_silent(self, node: NodeId) -> bool:
        return self._known.get(node, (0, 0))[1] == 1


def _check(payload: Payload, size: int, nodes: int, rounds: int) -> None:
    w = payload.fields.get("w")
    if not isinstance(w, float) or not math.isfinite(w) or w < 0.0 or (w == 0.0) != ("x" not in payload.arrays):
        raise MessageError(f"w = {w!r}: expected a weight above 0, or 0 and no x")
    if w:
        check_vectors(payload, size, ("x",))
    news = payload.arrays.get(SILENCE)
    if news is None:
        return
    if news.dtype != np.int32 or news.ndim != 2 or news.shape[1] != 3 or len(news) > nodes:
        raise MessageError(f"expected at most {nodes} rows of three int32 in {SILENCE!r}")
    if (news < 0).any() or (news >= (nodes, rounds, 2)).any():
        raise MessageError(f"{SILENCE!r} holds what is no node, no round, or neither 0 nor 1")
