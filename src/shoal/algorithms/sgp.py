"""SGP: stochastic gradient push, for directed graphs.

Assran, Loizou, Ballas, Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019 (arXiv:1811.10792).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.support.timeout_reports import TimeoutReports, check_reports
from shoal.algorithms.support.vectors import check_vectors
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.topologies.inspection import requires_paths_between_all
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds

PUSH = "push"
MIN_WEIGHT = 1e-6
"""Below this weight a node restarts with weight 1."""


@dataclass(frozen=True)
class SGP:
    """Assran et al. 2019, stochastic gradient push: train, push shares of model and weight, divide by the weight.

    Each node holds a sum x and its weight w, 1 at first. Its model is z = x/w, and its local step u = train(z) − z is
    −η∇F(z) for one step of SGD. With P **column**-stochastic, x ← P(x + u) and w ← Pw: the node and each of its
    receivers get the share 1/(1 + out-degree). So Σx/Σw is the average of all nodes on any graph, directed or not.

    A node sends no share to a peer that has failed or timed out. Nodes report timeouts to each other, because on a
    directed graph a node may send to a peer that it does not receive from. A node that is reported itself sends no
    shares either, because they would arrive too late. All receivers still get a message without a share, and count
    again as soon as a message of theirs arrives. A share in transit to a node that times out is lost with its weight.
    The other nodes must still reach each other over the rounds: the weight of a node that receives no share shrinks,
    and its steps grow, until at a weight of 1e-6 it restarts with its current model and weight 1.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        x, w = node.algorithm_state.get("x", node.params), node.algorithm_state.get("w", 1.0)
        timeouts = TimeoutReports(node)
        check = partial(_check, size=x.size, nodes=node.nodes, rounds=self.rounds)
        async for r in node.rounds(self.rounds):
            z = node.params
            x = x + (await node.train(z) - z)
            peers = await node.peers(r)
            receivers, excluded = timeouts.split(peers)
            share, weight = x * np.float32(1 / (1 + len(receivers))), w / (1 + len(receivers))
            x, w = x - len(receivers) * share, weight  # the rest: in float32, the shares of 1/3 would not sum to 1
            await node.send(receivers, Payload({"x": share, **timeouts.arrays()}, {"w": weight}), round=r, kind=PUSH)
            await node.send(excluded, Payload(timeouts.arrays(), {"w": 0.0}), round=r, kind=PUSH)
            received = await timeouts.receive(peers, round=r, kind=PUSH, check=check)
            for push in received.values():
                if push.fields["w"]:
                    x, w = x + push.arrays["x"], w + float(push.fields["w"])
            if w < MIN_WEIGHT:
                node.record_event("weight reset", f"round {r}: w = {w:.3g}; the node keeps its model, with weight 1")
                x, w = z, 1.0
            node.params = x / np.float32(w)
            node.algorithm_state.update(x=x, w=w)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return requires_paths_between_all(experiment, "algorithm = 'sgp'")


def _check(payload: Payload, size: int, nodes: int, rounds: int) -> None:
    w = payload.fields.get("w")
    if not isinstance(w, float) or not math.isfinite(w) or w < 0.0 or (w == 0.0) != ("x" not in payload.arrays):
        raise MessageError(f"w = {w!r}: expected a weight above 0 with x, or 0 without x")
    if w:
        check_vectors(payload, size, ("x",))
    check_reports(payload, nodes, rounds)
