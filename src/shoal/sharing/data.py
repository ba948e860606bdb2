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

MAX_FACTOR = 16
"""A neighbour may send at most this many times the samples of this node: groups of nodes may differ."""


@dataclass
class DataSharing:
    """REX, Dhasade et al. 2022: messages carry raw samples, and receivers train on them from then on.

    Each round a node draws `samples` of its own and received samples, and sends them to all its neighbours. A receiver
    keeps the samples that it does not have yet, and leaves its model unchanged: models are not averaged, they become
    similar because their data does. In REX trusted hardware hides the samples from the owner of a node; here nothing
    does.

    Messages with more than sixteen times `samples` are rejected, so that a neighbour cannot fill a node's memory in one
    round. Groups of nodes that send different numbers must differ by less.
    """

    traits: ClassVar[Traits] = Traits(adds_data=True)
    """Merging changes the training data, so a node must train in the process that merges."""

    samples: Annotated[int, Bounds(at_least=1)] = 32

    def bind(self, info: NodeInfo) -> None:
        self._info = info

    def start(self, params: Params) -> None:
        """Keep nothing: received samples become part of the node's data."""

    def outgoing(self, params: Params, round: int) -> Payload:
        data = self._info.data
        if data is None:  # the trainer does not give access to samples
            return Payload({"x": np.empty(0, np.float32), "y": np.empty(0, np.int64)})
        drawn = data.sample(self.samples, self._info.rng("data sharing", round))
        return Payload({"x": drawn.x, "y": drawn.y})

    def check(self, payload: Payload, params: Params) -> None:
        x, y = payload.arrays.get("x"), payload.arrays.get("y")
        if x is None or y is None or not x.ndim or not y.ndim:
            raise MessageError("expected samples 'x' and their targets 'y'")
        if len(y) > MAX_FACTOR * self.samples:
            limit = MAX_FACTOR * self.samples
            raise MessageError(f"{len(y)} samples, expected at most {limit}: {MAX_FACTOR} times `samples` of this node")
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
        samples = [received[peer].arrays for peer in sorted(received)]
        if samples and self._info.data is not None:
            x, y = np.concatenate([a["x"] for a in samples]), np.concatenate([a["y"] for a in samples])
            self._info.data.add(Samples(x, y))
        return params.copy()

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        if experiment.algorithm.traits.sends_to != "server":
            return []
        return [
            f"sharing = {experiment.sharing.name!r}: a server cannot use samples, "
            f"and algorithm = {experiment.algorithm.name!r} sends to a server; "
            "use algorithm = 'dpsgd' or another sharing"
        ]
