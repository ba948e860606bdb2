"""Cost and accuracy of sharings.

python benchmarks/sharing.py              # time of `outgoing` and `merge`, in copies of the model; bytes
python benchmarks/sharing.py --accuracy   # digits, 64 nodes, two shards each: accuracy and bytes
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from measuring import Figure, median, shoal_run, show, step
from shoal.compression.compressors import random_positions
from shoal.data.dataset import Data, Samples
from shoal.data.local import NodeData
from shoal.experiment import Experiment
from shoal.experiment.registry import Component
from shoal.message import Message
from shoal.models.basic import GnLenet
from shoal.models.flat import FlatModule, initial_module
from shoal.sharing.sharing import NodeAware, NodeInfo, PayloadChecker, Sharing
from shoal.types import Params

NEIGHBOURS = 5
ROUNDS = 30
LIMIT = 25.0

SHARINGS: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "float16": {"name": "float16"},
    "bfloat16": {"name": "bfloat16"},
    "int8": {"name": "int8"},
    "qsgd": {"name": "qsgd"},
    "random 10 %": {"name": "random", "fraction": 0.1},
    "random 10 %, each its own": {"name": "random", "fraction": 0.1, "common": False},
    "top-k 10 %": {"name": "topk", "fraction": 0.1},
    "top-k 10 %, int8": {"name": "topk", "fraction": 0.1, "values": "int8"},
    "choco, top-k 10 %": {"name": "choco", "compressor": {"name": "topk", "fraction": 0.1}},
    "choco, random 10 %": {"name": "choco", "compressor": {"name": "random", "fraction": 0.1}},
    "deepsqueeze, top-k 10 %": {"name": "deepsqueeze", "compressor": {"name": "topk", "fraction": 0.1}},
    "powergossip": {"name": "powergossip"},
    "jwins 10 %": {"name": "jwins", "fractions": [0.1]},
    "data, 8 images": {"name": "data", "samples": 8},
}


class Exchange:
    """A node and its neighbours, with models that drift as in training."""

    def __init__(self, component: Component, flat: FlatModule) -> None:
        self._rng = np.random.default_rng(0)
        self._initial = flat.read()
        self.models = [self._drifted(self._initial) for _ in range(NEIGHBOURS + 1)]
        self.sharings: list[Sharing] = [component.build() for _ in self.models]
        shapes = tuple(slot.shape for slot in flat.layout)
        for node, sharing in enumerate(self.sharings):
            if isinstance(sharing, NodeAware):
                sharing.bind(NodeInfo(node, NEIGHBOURS + 1, 0, shapes, _data(node)))
            sharing.start(self._initial)

    def round(self, round: int) -> tuple[float, float, int]:
        """Return the seconds of node 0's `outgoing` and `merge` of five others, and the bytes of one message."""
        payloads: list[Any] = [None] * len(self.models)
        sending_s = 0.0
        for node in reversed(range(len(self.models))):  # node 0 last, so that it does not profit from cached draws
            random_positions.cache_clear()
            started = time.perf_counter()
            outgoing = self.sharings[node].outgoing(self.models[node], round)
            if callable(outgoing):
                payloads[node] = {peer: outgoing(peer) for peer in range(len(self.models)) if peer != node}
            else:
                payloads[node] = outgoing
            sending_s = time.perf_counter() - started
        size = Message(0, "model", round, _to(payloads[0], 1)).wire_size
        merging_s = 0.0
        weights = 1.0 / (1 + NEIGHBOURS)
        merged = []
        for node, (sharing, model) in enumerate(zip(self.sharings, self.models, strict=True)):
            received = {peer: _to(payloads[peer], node).frozen() for peer in range(len(self.models)) if peer != node}
            started = time.perf_counter()
            if isinstance(sharing, PayloadChecker):
                for payload in received.values():
                    sharing.check(payload, model)
            merged.append(sharing.merge(model, received, dict.fromkeys(received, weights)))
            merging_s = time.perf_counter() - started if node == 0 else merging_s
        self.models = [self._drifted(model) for model in merged]
        return sending_s, merging_s, size

    def _drifted(self, model: Params) -> Params:
        moved = model + self._rng.standard_normal(model.size, np.float32) * np.float32(0.01) * np.abs(model)
        moved.flags.writeable = False
        return moved


def _data(node: int) -> NodeData:
    """Byte images like CIFAR-10: 1,000 images, a separate part for each node."""
    images = np.random.default_rng(0).integers(0, 256, (1000, 3, 32, 32), np.uint8)
    samples = Samples(images, np.arange(1000) % 10)
    return NodeData(Data(samples, samples, 10), np.arange(1000)[node :: NEIGHBOURS + 1])


def _to(payload: Any, peer: int) -> Any:
    return payload[peer] if isinstance(payload, dict) else payload


def costs() -> None:
    torch.set_num_threads(1)  # as in a node process
    flat = initial_module(lambda: GnLenet().build((3, 32, 32), 10), seed=0)
    model, target = flat.read(), np.empty(flat.size, np.float32)
    figures, full = [], 0
    for name, table in SHARINGS.items():
        exchange = Exchange(Experiment(sharing=table).sharing, flat)
        copies, sending, merging, size = [], [], [], []
        with step(name):
            for round in range(ROUNDS):
                copies.append(_fastest(lambda: np.copyto(target, model)))
                sending_s, merging_s, bytes_ = exchange.round(round)
                sending.append(sending_s)
                merging.append(merging_s)
                size.append(bytes_)
        copy, bytes_ = median(copies), int(np.mean(size))
        full = full or bytes_
        note = f"{bytes_:,} bytes per message, {bytes_ / full:.2%} of full"
        figures.append(Figure(f"{name}: outgoing", median(sending) / copy, "copies", at_most=LIMIT, note=note))
        note = f"{NEIGHBOURS} neighbours: {median(merging) / copy:.0f} copies, {1e3 * median(merging):.2f} ms"
        figures.append(
            Figure(f"{name}: merge one", median(merging) / copy / NEIGHBOURS, "copies", at_most=LIMIT, note=note)
        )
    show(f"Sharings of GN-LeNet ({flat.size:,} parameters); a copy of the model takes {1e6 * copy:.1f} µs", figures)


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


LEARNING: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "random 10 %": {"name": "random", "fraction": 0.1},
    "random 20 %": {"name": "random", "fraction": 0.2},
    "top-k 10 %": {"name": "topk", "fraction": 0.1},
    "top-k 20 %": {"name": "topk", "fraction": 0.2},
    "choco 10 %, γ 0.4": {"name": "choco", "gamma": 0.4, "compressor": {"name": "topk", "fraction": 0.1}},
    "choco 20 %, γ 0.7": {"name": "choco", "gamma": 0.7, "compressor": {"name": "topk", "fraction": 0.2}},
    "choco int8, γ 1": {"name": "choco", "gamma": 1.0, "compressor": {"name": "quantized"}},
    "jwins 10 %": {"name": "jwins", "fractions": [0.1]},
    "jwins 20 %": {"name": "jwins", "fractions": [0.2]},
    "jwins, its own fractions": {"name": "jwins"},
    "deepsqueeze int8": {"name": "deepsqueeze"},
    "powergossip": {"name": "powergossip"},
    "powergossip, rank 4": {"name": "powergossip", "rank": 4},
    "float16": {"name": "float16"},
    "int8": {"name": "int8"},
}


def accuracy(seeds: int) -> None:
    figures: list[Figure] = []
    best, full = 0.0, 0.0
    for name, table in LEARNING.items():
        with step(name):
            found = [shoal_run("sparsification.toml", {"sharing": table, "seed": seed}) for seed in range(seeds)]
        reached = median([s["accuracy"]["mean"] for s in found])
        sent = median([s["bytes_sent"]["per_node_mean"] for s in found])
        if name == "full":
            best, full = reached, sent
        note = f"{sent / 1e6:.1f} MB sent per node, {sent / full:.1%} of full; {100 * (reached - best):+.1f} points"
        figures.append(Figure(name, reached, "", note=note))
    show(f"Digits, 64 nodes, 2 shards each, 5-regular, 200 rounds, {seeds} seeds", figures)
    print(json.dumps({figure.what: figure.value for figure in figures}))


if __name__ == "__main__":
    if "--accuracy" in sys.argv:
        accuracy(1 if "--short" in sys.argv else 3)
    else:
        costs()
