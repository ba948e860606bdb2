"""SGP: stochastic gradient push, for graphs whose links go one way.

Assran, Loizou, Ballas, Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019 (arXiv:1811.10792).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.vectors import check_vectors
from shoal.components import Speaks
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.schema import Bounds

PUSH = "push"


@dataclass(frozen=True)
class SGP:
    """Assran et al. 2019, stochastic gradient push: train, push shares of model and weight, divide by the weight.

    Each node holds a sum x and its weight w, 1 at first. Its model is z = x/w, and its local step u = train(z) − z is
    −η∇F(z) for one step of SGD. With P **column**-stochastic, x ← P(x + u) and w ← Pw: of what a node holds, it and
    each that it sends to get 1/(1 + out-degree). So Σx/Σw is the average of all on any graph, directed or not.

    Nobody gives a share to a node that it knows to be dead. A share that was under way when its receiver died is
    lost, its weight with it. Those that live must still reach each other over the rounds: the weight of a node that
    hears from nobody any more shrinks, and its steps grow.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100

    speaks: ClassVar[Speaks] = "itself"

    async def run(self, node: Node) -> None:
        x, w = node.memory.get("x", node.params), node.memory.get("w", 1.0)
        check = partial(_check, size=x.size)
        async for r in node.rounds(self.rounds):
            z = node.params
            x = x + (await node.train(z) - z)
            peers = await node.peers(r)
            gone = node.runtime.gone()
            to = [peer for peer in peers.to if peer not in gone]
            x, w = x * np.float32(1 / (1 + len(to))), w / (1 + len(to))
            await node.send(to, Payload({"x": x}, {"w": w}), round=r, kind=PUSH)
            received = await node.receive_each(peers, round=r, kind=PUSH, check=check)
            for share in received.values():
                x, w = x + share.arrays["x"], w + float(share.fields["w"])
            node.params = x / np.float32(w)
            node.memory.update(x=x, w=w)


def _check(payload: Payload, size: int) -> None:
    check_vectors(payload, size, ("x",))
    w = payload.fields.get("w")
    if not isinstance(w, float) or not math.isfinite(w) or w <= 0.0:
        raise MessageError(f"w = {w!r}: expected a weight above 0")
