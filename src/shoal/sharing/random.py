"""Random sharing: a random fraction of the model, every round.

Konečný, McMahan, Yu, Richtárik, Suresh, Bacon: Federated Learning: Strategies for Improving Communication Efficiency,
2016 (arXiv:1610.05492), send random masks of updates; here it is models, and the receiver fills in its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.compression.compressors import Fraction, Part, SeededCode, Values, kept_count, random_positions
from shoal.compression.floats import Float32
from shoal.compression.indices import Positions
from shoal.message import Payload
from shoal.randomness import derived_seed
from shoal.sharing.payload_cache import PayloadCache, merge_sparse
from shoal.sharing.sharing import NodeInfo
from shoal.types import NodeId, Params


@dataclass
class Random:
    """Konečný et al. 2016: a random `fraction` of the coordinates each round; those missing are as the receiver's own.

    A message carries the values and the seed that their positions follow from. With `common`, all nodes draw the same
    coordinates in a round, so that each is averaged by all or by none, and doubly stochastic weights keep the mean
    of all models if `values` keeps every bit: what rounding takes away is taken from the receivers' average alone.
    Without, each node draws its own, and a coordinate moves towards whoever happened to send it.

    To speak takes as long as 30 copies of the model, nearly all of it to draw positions and to sort them. To toss a
    coin for each position would take longer, and would not say equally many values every round.
    """

    fraction: Fraction = 0.1
    common: bool = True
    values: Values = Float32()

    def __post_init__(self) -> None:
        self._code = SeededCode(self.values)
        self._cache: PayloadCache[Part] = PayloadCache(self._code.unpack)

    def bind(self, info: NodeInfo) -> None:
        self._info = info

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
