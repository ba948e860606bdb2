"""Data sharing: nodes send each other samples, and no models.

Dhasade, Dresevic, Kermarrec, Pires: TEE-based decentralized recommender systems: The raw data sharing redemption,
IPDPS 2022, arXiv:2202.11655.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from shoal.data.dataset import Samples
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.sharing.sharing import NodeInfo
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, NodeId, Params

GENEROUS = 16
"""A neighbour may send so many times the samples that this node sends: groups of nodes may be set to other numbers."""


@dataclass
class DataSharing:
    """REX, Dhasade et al. 2022: messages carry raw samples, which their receivers train on from then on.

    Each round a node draws `samples` of those that it holds, its own and those that it was sent, for all its
    neighbours. Who receives them keeps those that it does not hold yet, and leaves its model as it is: no models
    are averaged, they agree more and more because their data does. In REX trusted hardware hides the samples from the
    people behind a node; here nothing does.

    Messages with more than sixteen times `samples` are refused, lest one neighbour fill a node's memory in a round:
    groups of nodes that send different numbers are to differ by less.
    """

    traits: ClassVar[Traits] = Traits(adds_data=True)
    """Merging changes what a node trains on, so it has to train in the process that merges."""

    samples: Annotated[int, Bounds(at_least=1)] = 32

    def bind(self, info: NodeInfo) -> None:
        self._info = info

    def start(self, params: Params) -> None:
        """What is kept is kept with the node's own data."""

    def outgoing(self, params: Params, round: int) -> Payload:
        data = self._info.data
        if data is None:  # a trainer that shows no samples has none to give
            return Payload({"x": np.empty(0, np.float32), "y": np.empty(0, np.int64)})
        drawn = data.sample(self.samples, self._info.rng("data sharing", round))
        return Payload({"x": drawn.x, "y": drawn.y})

    def check(self, payload: Payload, params: Params) -> None:
        x, y = payload.arrays.get("x"), payload.arrays.get("y")
        if x is None or y is None or not x.ndim or not y.ndim:
            raise MessageError("expected samples 'x' and their targets 'y'")
        if len(y) > GENEROUS * self.samples:
            raise MessageError(
                f"{len(y)} samples, expected at most {GENEROUS * self.samples}: {GENEROUS} times `samples` of this node"
            )
        data = self._info.data
        if data is None:
            if len(x) or len(y) or x.dtype != np.float32 or y.dtype != np.int64 or (x.ndim, y.ndim) != (1, 1):
                raise MessageError(f"{len(y)} samples for a node whose trainer takes none")
            return
        try:
            data.validate(x, y)
        except ValueError as error:
            raise MessageError(str(error)) from error

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        said = [received[peer].arrays for peer in sorted(received)]
        if said and self._info.data is not None:
            x, y = np.concatenate([a["x"] for a in said]), np.concatenate([a["y"] for a in said])
            self._info.data.add(Samples(x, y))
        return params.copy()

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        if experiment.algorithm.traits.sends_to != "server":
            return []
        return [
            f"sharing = {experiment.sharing.name!r}: a server has no use for samples, "
            f"and algorithm = {experiment.algorithm.name!r} speaks to one; use algorithm = 'dpsgd' or another sharing"
        ]
