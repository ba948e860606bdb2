"""Rounding over thousands of rounds: no algorithm drifts away from the same recursion in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from quadratics import NODES, ROUNDED_STEPS, ROUNDING_LIMIT, ROUNDS, Case, lazy, metropolis, ring, uniform
from recursions import (
    DELAY,
    LABELS,
    PERIOD,
    Irregular,
    OneWayRing,
    adpsgd,
    artifact_adpsgd,
    asynchronous_server,
    averaging,
    chebyshev,
    d2,
    d_cliques,
    exponential,
    gossip,
    gradient_tracking,
    k_gt,
    latest_of_all,
    overlapped,
    qg_dsgdm,
    relaysum,
    sampled_server,
    server,
    sgp,
    shatter,
    swift,
)
from shoal.algorithms.adpsgd import ADPSGD
from shoal.algorithms.artifact_baselines import ArtifactADPSGD, ArtifactSWIFT
from shoal.algorithms.d2 import D2
from shoal.algorithms.d_cliques import DCliquesSGD
from shoal.algorithms.divshare import DivShare
from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.el_local import ELLocal
from shoal.algorithms.el_oracle import ELOracle
from shoal.algorithms.fedavg import FedAvg
from shoal.algorithms.gossip import Gossip
from shoal.algorithms.gradient_tracking import GradientTracking
from shoal.algorithms.ipls import IPLS
from shoal.algorithms.k_gt import KGT
from shoal.algorithms.muffliato import Muffliato
from shoal.algorithms.parameter_server import ParameterServer
from shoal.algorithms.qg_dsgdm import QGDSGDm
from shoal.algorithms.relaysum import RelaySum
from shoal.algorithms.sgp import SGP
from shoal.algorithms.shatter import Shatter
from shoal.algorithms.support.server_optimizers import Adagrad, Adam, Momentum, ServerSGD, Yogi
from shoal.algorithms.swift import SWIFT
from shoal.experiment.registry import registry
from shoal.topologies.exponential import Exponential
from shoal.topologies.random_out import RandomOut
from shoal.topologies.regular import Regular
from shoal.topologies.static import Ring, Star

pytestmark = pytest.mark.slow


def _mixing(algorithm: Any, w: Any, topology: Any = None, **settings: Any) -> Case:
    """Models are multiplied with `w` after each training."""
    return Case(algorithm, topology or Ring(), partial(averaging, lambda r: w), settings=settings)


def _muffliato(accelerated: bool) -> Case:
    polynomial = chebyshev(ring(), 2) if accelerated else np.linalg.matrix_power(ring(), 2)
    return _mixing(Muffliato(sigma=0.0, gossip=2, accelerated=accelerated), polynomial)


def _fedavg(optimizer: Any) -> Case:
    return Case(FedAvg(server=optimizer), Ring(), partial(server, optimizer), tolerance=ROUNDED_STEPS)


def _gossip(recursion: str, **options: Any) -> Case:
    algorithm, trainings = Gossip(period=PERIOD, **options), 2 if recursion == "um" else 1
    return Case(algorithm, OneWayRing(), partial(gossip, recursion), tolerance=ROUNDED_STEPS, trainings=trainings)


def _k_gt(eta_s: float) -> Case:
    return Case(KGT(eta_s=eta_s), Ring(), partial(k_gt, ring(), 3, eta_s), 3, tolerance=ROUNDED_STEPS)


def _epidemic(algorithm: Any, topology: Any) -> Case:
    return Case(algorithm, Ring(), partial(averaging, partial(uniform, topology.build(NODES, 0))))


def _late(algorithm: Any, topology: Any, oracle: Callable[[int], Iterator[Any]]) -> Case:
    return Case(algorithm, topology, oracle, settings={"delay": DELAY})


CASES: dict[str, Case] = {
    "dpsgd": _mixing(DPSGD(), ring()),
    "dpsgd, overlap": Case(DPSGD(overlap=True), Ring(), partial(overlapped, ring())),
    "el-oracle": _epidemic(ELOracle(degree=2), Regular(2, dynamic=True)),
    "el-local": _epidemic(ELLocal(peers=2), RandomOut(2)),
    "d2": Case(D2(), Ring(), partial(d2, lazy(ring()))),
    "d2, not lazy": Case(D2(lazy=False), Star(), partial(d2, metropolis(Star().build(NODES, 0)))),
    "gradient-tracking": Case(GradientTracking(), Ring(), partial(gradient_tracking, ring())),
    "k-gt, 3 local steps": _k_gt(1.0),
    "k-gt, eta_s 0.5": _k_gt(0.5),
    "qg-dsgdm": Case(QGDSGDm(), Ring(), partial(qg_dsgdm, ring()), tolerance=5e-5),
    "sgp": _mixing(SGP(), exponential(), Exponential()),
    "sgp, irregular graph": Case(SGP(), Irregular(), sgp),
    "relaysum": Case(RelaySum(), Star(), relaysum),
    "muffliato, plain": _muffliato(accelerated=False),
    "muffliato, accelerated": _muffliato(accelerated=True),
    "d-cliques": Case(DCliquesSGD(size=3, between="ring"), Ring(), d_cliques, settings={"labels": LABELS}),
    "shatter": Case(Shatter(virtual_nodes=2, degree=2), Ring(), partial(shatter, 2)),
    "ipls": Case(IPLS(), Ring(), partial(server, ServerSGD())),
    "fedavg": _fedavg(ServerSGD()),
    "fedavg, momentum": _fedavg(Momentum()),
    "fedavg, adam": _fedavg(Adam(lr=0.003)),
    "fedavg, yogi": _fedavg(Yogi(lr=0.003)),
    "fedavg, adagrad": _fedavg(Adagrad()),
    "fedavg, fraction 0.5": Case(
        FedAvg(fraction=0.5), Ring(), partial(sampled_server, 0.5), tolerance=ROUNDED_STEPS, trainings=0
    ),
    "parameter-server": Case(ParameterServer(), Ring(), partial(server, ServerSGD())),
    "parameter-server, asynchronous": Case(ParameterServer(asynchronous=True), Ring(), asynchronous_server),
    "swift": _late(SWIFT(), Ring(), partial(swift, ring(), 0)),
    "swift, skipped 2": _late(SWIFT(skipped=2), Ring(), partial(swift, ring(), 2)),
    "swift-artifact": _late(ArtifactSWIFT(degree=NODES - 1), Ring(), latest_of_all),
    "divshare": _late(DivShare(fraction=0.5, degree=NODES - 1), Ring(), latest_of_all),
    "adpsgd": _late(ADPSGD(), Star(), adpsgd),
    "adpsgd-artifact": _late(ArtifactADPSGD(degree=4), Ring(), partial(artifact_adpsgd, 4)),
    "gossip": _gossip("age"),
    "gossip, average": _gossip("average", merge="average"),
    "gossip, none": _gossip("none", merge="none"),
    "gossip, variant um": _gossip("um", variant="um"),
    "gossip, variant rw": _gossip("none", variant="rw"),
}

ROUNDINGS = {"dpsgd": 2, "gradient-tracking": 3, "sgp": 5, "relaysum": NODES + 1}
"""Roundings to float32 in a round, of values that a model is the sum of. D-PSGD: the training and the average.
Gradient tracking: the training, the average, the sum with the tracked gradient. SGP: the training, the sum with it, the
share that a node keeps, the shares of two senders. RelaySum: the training, the sum of n models with n − 1 roundings of
a value that is up to n times as large as the mean, and the division by n."""


def test_every_algorithm_has_a_case() -> None:
    assert {name.split(",")[0] for name in CASES} == set(registry("algorithm"))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_models_follow_the_recursion_in_double_precision(case: Case) -> None:
    found = case.errors()
    assert max(found.values()) < case.tolerance, found


@pytest.mark.parametrize("name", ROUNDINGS)
def test_the_number_of_roundings_limits_the_error_after_many_rounds(name: str) -> None:
    found = CASES[name].errors(2 * ROUNDS)
    assert max(found.values()) < ROUNDINGS[name] * ROUNDING_LIMIT, found
