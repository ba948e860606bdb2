"""K-GT: gradient tracking whose correction also holds within the local steps of a round.

Liu, Lin, Koloskova, Stich: Decentralized Gradient Tracking with Local Steps, 2023 (arXiv:2301.01313).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.support.rate_changes import rate_change, rescaled
from shoal.algorithms.support.requirements import requires_plain_sgd
from shoal.algorithms.support.restart_epochs import RestartEpochs, epoch_of
from shoal.algorithms.support.vectors import average, check_vectors, lazy_weights
from shoal.message import Payload
from shoal.node import Node
from shoal.topologies.inspection import requires_doubly_stochastic
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds

TRACKED = "tracked"


@dataclass(frozen=True)
class KGT:
    """Liu et al. 2023: K local steps with a correction, then exchange models and mean steps.

    Node i takes K steps x ← x − η(g_i(x) + c_i) from x_i, to x½_i. With z_i = (x_i − x½_i)/(Kη), then
    x_i ← Σ_j w_ij (x_j − η_s K η z_j) and c_i ← c_i − z_i + Σ_j w_ij z_j. c_i starts at 0, and Σc = 0 at all times; the
    paper starts with the mean of all gradients minus the node's own, which would need an average over all nodes. Once
    the models agree, each local step follows the average gradient of all nodes, however many local steps there are.
    `eta_s` is η_s, the step size of an exchange: with 1, nodes average x½. The code keeps −ηc in double precision,
    because it adds up over all rounds, and scales it if η follows a schedule. As in `gradient-tracking`, all nodes must
    have the same schedule, by rounds.

    With `lazy`, (W + I)/2 replaces W. After a failure or a timeout nodes restart with c = 0, in a new epoch, as in
    `gradient-tracking`: z is mixed only within an epoch.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    lazy: bool = False
    eta_s: Annotated[float, Bounds(above=0)] = 1.0

    traits: ClassVar[Traits] = Traits(own_payloads=True, common_schedule=True)

    async def run(self, node: Node) -> None:
        zero, epochs = np.zeros(node.params.size), RestartEpochs(node)
        correction = node.algorithm_state.get("correction", zero)
        check = partial(_check, size=node.params.size)
        async for r in node.rounds(self.rounds):
            if epochs.restart_needed():
                correction = zero
            correction = rescaled(correction, rate_change(node))
            half, steps = node.params, node.trainer.steps(None)
            for _ in range(steps):
                half = (await node.train(half, 1) + correction).astype(np.float32)
            z = (node.params - half) / np.float32(steps)
            if self.eta_s != 1.0:
                half = node.params + self.eta_s * (half - node.params)
            peers = await node.peers(r)
            await node.send(peers, epochs.tag(Payload({"x": half, "z": z})), round=r, kind=TRACKED)
            received = await epochs.receive(peers, round=r, kind=TRACKED, check=check)
            weights = lazy_weights(peers.weights) if self.lazy else peers.weights
            node.params = average(half, {j: p.arrays["x"] for j, p in received.items()}, weights)
            exact = z.astype(np.float64)
            mixed = average(exact, {j: p.arrays["z"] for j, p in epochs.same_epoch(received).items()}, weights)
            correction = correction + (exact - mixed)
            node.algorithm_state["correction"] = correction

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return requires_plain_sgd(experiment) + requires_doubly_stochastic(experiment, "algorithm = 'k-gt'")


def _check(payload: Payload, size: int) -> None:
    check_vectors(payload, size, ("x", "z"))
    epoch_of(payload)
