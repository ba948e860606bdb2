"""Random sharing: a random fraction of the model, every round.

Konečný, McMahan, Yu, Richtárik, Suresh, Bacon: Federated Learning: Strategies for Improving Communication Efficiency,
2016 (arXiv:1610.05492), send random parts of updates. Here they are parts of models,
and receivers use their own values for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.compression.compressors import Fraction, Part, SeededCode, Values, random_positions
from shoal.compression.floats import Float32
from shoal.compression.indices import Positions
from shoal.compression.sparse import kept_count
from shoal.message import Payload
from shoal.randomness import derived_seed
from shoal.sharing.payload_cache import PayloadCache
from shoal.sharing.sharing import NodeInfo
from shoal.sharing.sparse_merge import merge_sparse
from shoal.types import NodeId, Params


@dataclass
class Random:
    """Konečný et al. 2016: a random `fraction` of the coordinates each round; receivers use their own for the others.

    A message carries the values and the seed of their positions. With `common`, all nodes draw the same coordinates in
    a round, so that all nodes average a coordinate or none does. Then doubly stochastic weights keep the mean of all
    models if `values` is lossless; a rounding error affects only the average of the receivers. Without `common`, each
    node draws its own coordinates, and a coordinate moves towards the nodes that happened to send it.

    Encoding takes the time of 30 copies of the model, nearly all of it to draw and sort positions. A random draw for
    each position would take longer, and would not give equally many values every round.
    """

    fraction: Fraction = 0.1
    common: bool = True
    values: Values = Float32()

    def __post_init__(self) -> None:
        self._code = SeededCode(self.values)
        self._cache: PayloadCache[Part] = PayloadCache(self._code.unpack)

    def bind(self, info: NodeInfo) -> None:
        self._info = info
        self._cache.reject_non_finite = info.rejects_non_finite

    def start(self, params: Params) -> None:
        self._count = kept_count(params.size, self.fraction)

    def outgoing(self, params: Params, round: int) -> Payload:
        seed = self._seed(round)
        rng = self._info.rng("random sharing, rounding", round) if self.values.stochastic else None
        return self._code.pack(params, self._count, seed, rng)[0]

    def check(self, payload: Payload, params: Params) -> None:
        self._cache.check(payload, params.size)

    def merge(self, params: Params, received: Mapping[NodeId, Payload], weights: Mapping[NodeId, float]) -> Params:
        return merge_sparse(params, self._cache.take(received, params.size), weights)

    def select(self, params: Params, round: int) -> Positions:
        return random_positions(self._seed(round), params.size, self._count)

    def _seed(self, round: int) -> int:
        who = () if self.common else (self._info.id,)
        return derived_seed(self._info.seed, "random sharing", round, *who)
