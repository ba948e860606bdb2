"""Nodes on a ring with compressed sharings, and the experiments that use them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from hypothesis import settings
from numpy.typing import NDArray

from shoal.algorithms.dpsgd import DPSGD
from shoal.compression.compressors import (
    QuantizedCompressor,
    RandomCompressor,
    TopKCompressor,
)
from shoal.compression.floats import BFloat16, Float16
from shoal.compression.indices import Bitmap, EliasGamma, Raw
from shoal.compression.libraries import Zstd
from shoal.compression.quantizers import QSGD, Int8
from shoal.experiment import Experiment
from shoal.message import Message, Payload, decode
from shoal.sharing import quantized
from shoal.sharing.choco import CHOCO
from shoal.sharing.deepsqueeze import DeepSqueeze
from shoal.sharing.full import FullSharing
from shoal.sharing.random import Random
from shoal.sharing.sharing import NodeInfo, payload_for
from shoal.sharing.topk import TopK
from shoal.types import Params

SEED = 5
few = settings(max_examples=10, deadline=None)


Matrix = NDArray[np.float64]
Mix = Callable[[Matrix, Matrix, int], Matrix]
"""Maps the models before a round, the weights and the round to the models after the round."""


def experiment(**changed: Any) -> Experiment:
    values: dict[str, Any] = {
        "nodes": 4,
        "seed": SEED,
        "algorithm": DPSGD(4),
        "topology": {"name": "ring"},
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "model": {"name": "logistic"},
        "training": {"lr": 0.2, "batch_size": 16, "local_steps": 2},
        "evaluation": {"every": 0, "average": False},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**values, **changed})


def ring(nodes: int) -> Matrix:
    identity = np.eye(nodes)
    return (identity + np.roll(identity, 1, 0) + np.roll(identity, -1, 0)) / 3


# Without training, for many rounds, on random models


class RingExchange:
    """Nodes on a ring, each with a sharing; payloads are encoded, decoded and checked."""

    def __init__(self, make: Callable[[], Any], models: NDArray[Any], seed: int = SEED) -> None:
        self.models = models.astype(np.float32)
        self.nodes, self.size = self.models.shape
        self.sharings = [make() for _ in self.models]
        for id, sharing in enumerate(self.sharings):
            if not isinstance(sharing, FullSharing):
                sharing.bind(NodeInfo(id, self.nodes, seed, ((self.size,),)))
            sharing.start(frozen(self.models[0] * 0))

    def round(self, r: int, lost: Collection[tuple[int, int]] = (), failed: Collection[int] = ()) -> Matrix:
        """Run one round and return all models. The message from i to j is lost if (i, j) is in `lost`."""
        models = [frozen(model.copy()) for model in self.models]
        alive = [i for i in range(self.nodes) if i not in failed]
        outgoing = {i: self.sharings[i].outgoing(models[i], r) for i in alive}
        w = ring(self.nodes)
        for i in alive:
            received = {}
            for j in sorted({(i - 1) % self.nodes, (i + 1) % self.nodes} - {i} - set(failed)):
                if (j, i) in lost:
                    continue
                payload = payload_for(outgoing[j], i)
                payload = decode([bytes(f) for f in Message(j, "model", r, payload).frames()]).payload
                self.sharings[i].check(payload, models[i])
                received[j] = payload
            total = w[i, i] + sum(w[i, j] for j in received)
            weights = {j: float(w[i, j] / total) for j in received}
            self.models[i] = self.sharings[i].merge(models[i], received, weights)
        return self.models.astype(np.float64)

    def all(self) -> list[tuple[int, Any]]:
        return list(enumerate(self.sharings))

    @property
    def max_deviation(self) -> float:
        return float(np.abs(self.models - self.models.mean(0)).max())


def frozen(params: Params) -> Params:
    params.flags.writeable = False
    return params


def random_models(nodes: int = 5, size: int = 60, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal((nodes, size)).astype(np.float32).astype(np.float64)


MAKERS: dict[str, Callable[[], Any]] = {
    "random": lambda: Random(0.1),
    "random of bfloat16": lambda: Random(0.2, values=BFloat16()),
    "random own": lambda: Random(0.1, common=False),
    "topk": lambda: TopK(0.1),
    "topk int8 raw": lambda: TopK(0.3, Int8(), Raw()),
    "topk zstd gamma": lambda: TopK(0.3, Zstd(), EliasGamma()),
    "choco": lambda: CHOCO(0.3, TopKCompressor(0.1)),
    "choco random": lambda: CHOCO(0.3, RandomCompressor(0.1)),
    "choco quantized": lambda: CHOCO(0.3, QuantizedCompressor(QSGD(16))),
    "choco topk float16": lambda: CHOCO(0.3, TopKCompressor(0.1, Float16(), Bitmap())),
    "deepsqueeze": lambda: DeepSqueeze(0.1, TopKCompressor(0.1)),
    "deepsqueeze random": lambda: DeepSqueeze(0.1, RandomCompressor(0.3, Int8())),
    "deepsqueeze quantized": lambda: DeepSqueeze(),
    "qsgd": lambda: quantized.QSGDSharing(16, 32),
}


def payload_of(sharing: Any, size: int = 100) -> Payload:
    sharing.bind(NodeInfo(0, 4, SEED, ((size,),)))
    sharing.start(frozen(np.zeros(size, np.float32)))
    payload = sharing.outgoing(frozen(np.random.default_rng(0).standard_normal(size).astype(np.float32)), 0)
    assert isinstance(payload, Payload)
    return payload
