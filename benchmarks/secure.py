"""Secure aggregation compared with plain sharing: bytes, accuracy, the time of masks, and the error of sums.

python benchmarks/secure.py               # three minutes of processor time; six more if CIFAR-10 is present
python benchmarks/secure.py --short       # one seed, fewer rounds of the small model, and without CIFAR-10
python benchmarks/secure.py --cifar10     # only CIFAR-10 (in SHOAL_DATA)

The aims refer to DecentralizePy (Dhasade et al., EuroMLSys 2023): its secure aggregation sent 3 % more bytes and lost 3
points of accuracy with 48 nodes on a 5-regular graph.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measuring import Figure, median, shoal_run, shoal_run_in, show, step
from shoal.data.store import is_available
from shoal.sharing.secure import masks, shamir
from shoal.sharing.secure.fixed_point import FixedPoint
from shoal.sharing.secure.messages import to_rows
from shoal.sharing.secure.secure import Secure

SECURE, PLAIN = "secure-aggregation.toml", "secure-aggregation-plain.toml"
PARAMETERS = 89_834
"""Parameters of GN-LeNet for 32 × 32 colour pixels and ten classes."""
NEIGHBOURS = 5
PARTNERS = NEIGHBOURS - 1
SHARES_NEEDED = math.ceil(Secure.threshold * PARTNERS)
TERMS = bytes(32)
ROUNDS = 1000

GN_LENET: dict[str, Any] = {
    "dataset": {"name": "synthetic", "shape": [3, 32, 32], "samples": 480, "test_samples": 16},
    "model": {"name": "gn-lenet"},
    "training": {"lr": 0.05, "batch_size": 8, "local_steps": 1},
}
QUIET: dict[str, Any] = {
    "evaluation": {"every": 0, "nodes": 1, "average": False},
    "checkpoint.final": False,
    "simulation.batching": "off",
}
CIFAR10: dict[str, Any] = {
    "dataset": {"name": "cifar10", "partition": {"name": "iid"}},
    "model": {"name": "gn-lenet"},
    "training": {"lr": 0.05, "batch_size": 16, "local_steps": 8},
    "algorithm.rounds": 20,
    "evaluation": {"every": 0, "nodes": 8, "samples": 2000, "average": False},
    "simulation.batching": "off",
}


@dataclass(frozen=True)
class Traffic:
    """The mean traffic of a node: once per run, and in every round."""

    once: float
    each: float
    messages: float
    """Messages per node and round."""
    run_cpu_s: float
    """Processor time per node and round, without training."""

    def after(self, rounds: int) -> float:
        """Every message contains its round, which MessagePack writes in 1 byte below 128, then in 2 or 3."""
        longer = sum((number >= 128) + (number >= 256) for number in range(rounds))
        return self.once + rounds * self.each + self.messages * longer


def traffic(example: str, settings: dict[str, Any], short: int = 1, long: int = 6) -> Traffic:
    """Measure by two runs of different length: their difference is the traffic of the additional rounds."""
    settings = {**settings, **QUIET}
    ran = {rounds: shoal_run(example, {**settings, "algorithm.rounds": rounds}) for rounds in (short, long)}
    sent = {rounds: summary["bytes_sent"]["per_node_mean"] for rounds, summary in ran.items()}
    beside = {rounds: s["time"]["total_cpu_s"] - s["time"]["train_cpu_s"] for rounds, s in ran.items()}
    nodes = ran[long]["nodes"]
    each = (sent[long] - sent[short]) / (long - short)
    cpu = (beside[long] - beside[short]) / (long - short) / nodes
    messages = (ran[long]["messages_sent"] - ran[short]["messages_sent"]) / (long - short) / nodes
    return Traffic(sent[short] - short * each, each, messages, cpu)


def bytes_sent(short: bool) -> list[Figure]:
    with step("bytes of GN-LeNet, 48 nodes, 1 and 6 rounds, secure and plain"):
        secure, plain = traffic(SECURE, GN_LENET), traffic(PLAIN, GN_LENET)
    more = secure.after(ROUNDS) / plain.after(ROUNDS) - 1
    rounds = 300 if short else ROUNDS
    small = {"nodes": 6, "model": {"name": "logistic"}, "training": {"batch_size": 4, "local_steps": 1}}
    with step(f"bytes of a small model, {rounds} rounds"):
        scaled = traffic(SECURE, small).after(rounds)
        summary = shoal_run(SECURE, {**small, **QUIET, "algorithm.rounds": rounds})
    real = summary["bytes_sent"]["per_node_mean"]
    return [
        Figure(
            f"additional bytes in {ROUNDS:,} rounds", 100 * more, "%", at_most=1.0,
            note=f"{secure.after(ROUNDS) / 1e6:,.1f} MB per node, plain {plain.after(ROUNDS) / 1e6:,.1f}; paper: 3 %",
        ),
        Figure(
            "… per round, secure", secure.each / 1e6, "MB per node",
            note=f"{secure.each:,.0f} bytes: the difference of 6 rounds and 1 round, divided by 5",
        ),
        Figure(
            "… per round, plain", plain.each / 1e6, "MB per node",
            note=f"{plain.each:,.0f} bytes: secure is {secure.each - plain.each:,.0f} more",
        ),
        Figure("… set-up, secure", secure.once / 1e3, "KB per node", note="keys and end messages, once per run"),
        Figure(
            f"small model: {rounds:,} rounds, deviation from prediction", 100 * abs(real / scaled - 1), "%",
            at_most=0.01, note=f"{real:,.0f} and {scaled:,.0f} bytes per node: equal in every round",
        ),
        Figure(
            "additional processor time per round", 1e3 * (secure.run_cpu_s - plain.run_cpu_s), "ms per node",
            note=f"without training; {NEIGHBOURS} models, {NEIGHBOURS * (PARTNERS + 2)} masks in total",
        ),
    ]  # fmt: skip


def accuracy(seeds: int, settings: dict[str, Any] | None = None) -> list[Figure]:
    settings = settings or {}
    secure, plain, apart, more = [], [], [], []
    for seed in range(1, seeds + 1):
        with step(f"accuracy, secure and plain, seed {seed}"):
            one = shoal_run(SECURE, {**settings, "seed": seed})
            other = shoal_run(PLAIN, {**settings, "seed": seed})
        secure.append(one["accuracy"]["mean"])
        plain.append(other["accuracy"]["mean"])
        apart.append(100 * abs(secure[-1] - plain[-1]))
        more.append([run["bytes_sent"]["per_node_mean"] for run in (one, other)])
    over = ", ".join
    return [
        Figure("accuracy, secure", sum(secure) / seeds, "", note=over(f"{a:.4f}" for a in secure)),
        Figure("accuracy, plain", sum(plain) / seeds, "", note=over(f"{a:.4f}" for a in plain)),
        Figure("maximum difference", max(apart), "points", at_most=0.3, note="the paper: 3 points lost"),
        Figure(
            "maximum additional bytes in these runs", 100 * max(one / other - 1 for one, other in more), "%",
            note=over(f"{one / 1e6:,.2f} MB per node, plain {other / 1e6:,.2f}" for one, other in more),
        ),
    ]  # fmt: skip


def costs() -> list[Figure]:
    rng = np.random.default_rng(0)
    ring = FixedPoint(Secure.bits, Secure.range)
    model, target = rng.standard_normal(PARAMETERS, np.float32), np.empty(PARAMETERS, np.float32)
    update, total = ring.encode(model, 1 / 6), np.zeros(PARAMETERS, ring.dtype)
    one, other = masks.Keys("run"), masks.Keys("run")
    one.agree(1, other.public)

    def pair() -> None:
        """The work of a node for one partner of one receiver."""
        seed = one.pair_secrets(1, TERMS).seed
        masks.add(update, seed)
        masks.commitment(seed, 2, 3)

    def create_shares() -> None:
        """Encrypted shares of all secrets of one message, for each partner of a node."""
        shares = shamir.split(to_rows([bytes(masks.SEED_BYTES)] * (1 + PARTNERS)), PARTNERS, SHARES_NEEDED)
        for share in shares:
            one.pair_secrets(1, TERMS).encrypt(share.tobytes(), True)

    def unmask_one() -> None:
        """The work of a receiver for one neighbour whose update has arrived."""
        nonlocal total
        total += update
        masks.commitment(bytes(masks.SEED_BYTES), 2, 3)
        masks.subtract(total, bytes(masks.SEED_BYTES))

    works: dict[str, tuple[Callable[[], object], float | None, str]] = {
        "encoding": (lambda: ring.encode(model, 1 / 6), None, "the weighted model as integers"),
        "masking with one partner": (pair, 5.0, f"seed, mask and commitment; {PARTNERS} partners per message"),
        "creating shares": (create_shares, None, f"{1 + PARTNERS} secrets in {PARTNERS} shares each, encrypted"),
        "unmasking one neighbour's update": (unmask_one, 5.0, "added, and its self mask removed"),
        "decoding": (lambda: ring.decode(total), None, "once per round"),
        "agreeing on a key": (lambda: one.agree(1, other.public), None, "once per pair and run"),
    }  # fmt: skip
    copies: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in works}
    with step("time of masks"):
        for _ in range(15):  # in turns, so a busy machine slows all of them
            copies.append(_fastest(lambda: np.copyto(target, model)))
            for name, (work, _, _) in works.items():
                found[name].append(_fastest(work))
    copy = median(copies)
    return [
        Figure(
            name, 1e3 * median(found[name]), "ms", at_most=aim,
            note=f"{median(found[name]) / copy:,.0f} copies of the model, {1e6 * copy:.1f} µs each: {what}",
        )
        for name, (_, aim, what) in works.items()
    ]  # fmt: skip


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(10):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def errors() -> list[Figure]:
    rng = np.random.default_rng(0)
    ring = FixedPoint(Secure.bits, Secure.range)
    models = rng.uniform(-ring.range, ring.range, (NEIGHBOURS, PARAMETERS)).astype(np.float32)
    weight = 1 / (1 + NEIGHBOURS)
    total = np.zeros(PARAMETERS, ring.dtype)
    for model in models:
        update, seed = ring.encode(model, weight), rng.bytes(masks.SEED_BYTES)
        masks.add(update, seed)
        total += update
        masks.subtract(total, seed)
    error = np.abs(ring.decode(total) - (models.astype(np.float64) * weight).sum(axis=0)).max() / ring.range
    with step("models after one round, secure and plain"):
        apart = np.abs(_models(SECURE) - _models(PLAIN)).max() / ring.range
    return [
        Figure(
            "error of a sum, part of the range", error, "", at_most=2**-16,
            note=f"2^{np.log2(error):.1f}: {NEIGHBOURS} models with values in ±{ring.range:g}, compared with float64",
        ),
        Figure(
            "models of 48 nodes after one round, part of the range", apart, "", at_most=2**-16,
            note=f"at most 2^{np.log2(max(apart, 2**-60)):.1f} from those of plain sharing, which adds in float32",
        ),
    ]  # fmt: skip


def _models(example: str) -> NDArray[np.float64]:
    less = {"algorithm.rounds": 1, "evaluation.nodes": 1, "simulation.batching": "off"}
    with tempfile.TemporaryDirectory() as folder:
        run = shoal_run_in(Path(folder), example, less)
        nodes = json.loads((run / "summary.json").read_text())["nodes"]
        return np.stack([np.load(run / "checkpoints" / f"{node}.npy") for node in range(nodes)]).astype(np.float64)


def main(short: bool) -> None:
    seeds = 1 if short else 3
    show(f"GN-LeNet ({PARAMETERS:,} parameters), 48 nodes, 5-regular: secure and plain", bytes_sent(short))
    show(f"Digits, 48 nodes, 2 shards each, 5-regular, 100 rounds, {seeds} seeds", accuracy(seeds))
    show(f"Masks of {PARAMETERS:,} parameters", costs())
    show("Sums compared with averages in floating point", errors())
    if not short and is_available("cifar10"):
        cifar10()


def cifar10() -> None:
    rounds, steps = CIFAR10["algorithm.rounds"], CIFAR10["training"]["local_steps"]
    show(f"CIFAR-10, GN-LeNet, 48 nodes, IID, 5-regular, {rounds} rounds of {steps} steps", accuracy(1, CIFAR10))


if __name__ == "__main__":
    if "--cifar10" in sys.argv:
        cifar10()
    else:
        main("--short" in sys.argv)
