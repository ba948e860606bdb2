"""Payloads with infinities or NaN, for example of a node that diverged or of an attacker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import play
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
from shoal.algorithms.overlapped_dpsgd import OverlappedDPSGD
from shoal.algorithms.parameter_server import ParameterServer
from shoal.algorithms.qg_dsgdm import QGDSGDm
from shoal.algorithms.relaysum import RelaySum
from shoal.algorithms.sgp import SGP
from shoal.algorithms.shatter import Shatter
from shoal.algorithms.support.server_optimizers import Momentum
from shoal.algorithms.swift import SWIFT
from shoal.compression.libraries import Zstd
from shoal.experiment import Experiment
from shoal.experiment.registry import find, registry
from shoal.message import Message, Payload
from shoal.results.records import Event
from shoal.sharing.full import FullSharing
from shoal.sharing.quantized import BFloat16Sharing, Int8Sharing
from shoal.sharing.topk import TopK
from shoal.testing import FakeRuntime
from shoal.topologies.static import Ring, Star


def model(sender: int, *values: float) -> Message:
    return Message(sender, "model", 0, Payload({"params": np.array(values, np.float32)}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_model_that_is_not_finite_is_rejected_and_its_sender_counts_as_missing(bad: float) -> None:
    fake = FakeRuntime(model(1, bad, 0), model(2, 4, 4))
    node = fake.node(nodes=3, params=np.array([1, 1], np.float32))
    fake.run(DPSGD(1).run(node))
    assert node.params.tolist() == [2.5, 2.5]  # the weights of the remaining two are renormalised
    assert node.rejected_count == 1
    assert [(e.what, e.detail) for e in fake.records if isinstance(e, Event)] == [
        ("payload rejected", "from node 1: it holds values that are not finite")
    ]


@pytest.mark.parametrize(("setting", "finite"), [("reject", True), ("keep", False)])
def test_a_diverged_node_does_not_spread_nan_unless_the_experiment_keeps_it(
    setting: Any, finite: bool, tmp_path: Path
) -> None:
    run = Experiment(
        nodes=4,
        non_finite=setting,
        algorithm=DPSGD(6),
        topology={"name": "full"},
        model={"name": "mlp"},
        group=({"nodes": "0", "training": {"lr": 1e38, "local_steps": 5}},),
        evaluation={"every": 0},
    ).run(tmp_path)
    models = np.stack([np.load(run.folder.model(node)) for node in range(1, 4)])
    assert np.isfinite(models).all() == finite


ROUNDS = 6
LABELS = np.eye(4, dtype=np.int64)
ALGORITHMS = [
    *(ADPSGD(ROUNDS), SWIFT(ROUNDS), DivShare(ROUNDS), Shatter(ROUNDS, degree=3), Gossip(ROUNDS)),
    *(ArtifactADPSGD(ROUNDS), ArtifactSWIFT(ROUNDS), SGP(ROUNDS), RelaySum(ROUNDS), D2(ROUNDS), KGT(ROUNDS)),
    *(GradientTracking(ROUNDS), Muffliato(ROUNDS), DCliquesSGD(ROUNDS, size=4), IPLS(ROUNDS), FedAvg(ROUNDS)),
    *(ParameterServer(ROUNDS), ParameterServer(ROUNDS, asynchronous=True), DPSGD(ROUNDS), OverlappedDPSGD(ROUNDS)),
    *(ELLocal(ROUNDS, 2), ELOracle(ROUNDS, 2), QGDSGDm(ROUNDS)),
]


def test_the_list_has_every_algorithm() -> None:
    assert {type(algorithm) for algorithm in ALGORITHMS} >= {find("algorithm", name) for name in registry("algorithm")}


def diverging(node: int, params: Any) -> Any:
    """Train by 1 in a round; node 1 diverges."""
    return params + 1 if node != 1 else np.full_like(params, np.nan)


@pytest.mark.parametrize(("setting", "finite"), [("reject", True), ("keep", False)])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_every_algorithm_obeys_the_setting(algorithm: Any, setting: Any, finite: bool) -> None:
    topology = Star() if isinstance(algorithm, RelaySum) else Ring()
    nodes = play(algorithm, np.zeros((4, 8), np.float32), topology, diverging, labels=LABELS, non_finite=setting)
    others = np.stack([node.params for node in nodes if node.id != 1])
    assert np.isfinite(others).all() == finite
    assert (others[:1] > 0).all() or not finite  # they still train


@pytest.mark.parametrize(("setting", "finite"), [("reject", True), ("keep", False)])
@pytest.mark.parametrize("algorithm", [DPSGD(ROUNDS), Muffliato(ROUNDS, accelerated=False)], ids=["dpsgd", "muffliato"])
@pytest.mark.parametrize(
    "sharing",
    [FullSharing, BFloat16Sharing, Int8Sharing, lambda: TopK(1.0, Zstd())],
    ids=["full", "bf16", "i8", "zstd"],
)
def test_values_that_are_not_finite_are_found_in_encoded_models(
    sharing: Any, algorithm: Any, setting: Any, finite: bool
) -> None:
    start = np.zeros((3, 300), np.float32)
    nodes = play(algorithm, start, Ring(), diverging, sharing=sharing, non_finite=setting)
    assert np.isfinite([node.params for node in nodes if node.id != 1]).all() == finite


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(("setting", "finite"), [("reject", True), ("keep", False)])
@pytest.mark.parametrize("algorithm", [FedAvg, ParameterServer], ids=["fedavg", "parameter server"])
def test_a_server_leaves_out_a_step_that_is_not_finite(algorithm: Any, setting: Any, finite: bool) -> None:
    nodes = play(
        algorithm(4, server=Momentum()),
        np.zeros((2, 3), np.float32),
        Ring(),
        lambda _, params: np.full_like(params, 3e38),
        non_finite=setting,
    )
    assert np.isfinite([node.params for node in nodes]).all() == finite
