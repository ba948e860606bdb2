"""QG-DSGDm: momentum from the movement of the averaged models, in place of each node's own gradients.

Lin, Karimireddy, Stich, Jaggi: Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data,
ICML 2021 (arXiv:2102.04761).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.support.rate_changes import rate_change, rescaled
from shoal.algorithms.support.requirements import requires_plain_sgd
from shoal.node import Node
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds


@dataclass(frozen=True)
class QGDSGDm:
    """Lin et al. 2021, quasi-global momentum: D-PSGD with momentum from the movement of the averaged models.

    With gradients g, x½ = x − η(βm + g), x⁺ = Wx½, m ← μm + (1 − μ)(x − x⁺)/η. The code keeps ηm in place of m, and
    train(x) is x − ηg for one step of SGD. If η follows a schedule, ηm is scaled to the new η. The momentum is never
    sent. `beta` is its share in a step, `mu` the share that is kept from round to round; the paper sets both to the
    same value.
    """

    traits: ClassVar[Traits] = Traits(needs_only_sum=True)

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    beta: Annotated[float, Bounds(at_least=0, below=1)] = 0.9
    mu: Annotated[float, Bounds(at_least=0, below=1)] = 0.9

    async def run(self, node: Node) -> None:
        m = node.algorithm_state.get("m", np.zeros_like(node.params))
        async for r in node.rounds(self.rounds):
            x, m = node.params, rescaled(m, rate_change(node))
            half = await node.train(x) - self.beta * m
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(half, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(half, received, node.weights(received))
            node.algorithm_state["m"] = m = self.mu * m + (1 - self.mu) * (x - node.params)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return requires_plain_sgd(experiment)
