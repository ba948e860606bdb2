"""Experiments with compressed sharings: valid names, and combinations that are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ring_exchange import experiment
from shoal.compression import COMPRESSORS, VALUES
from shoal.compression.compressors import (
    QuantizedCompressor,
)
from shoal.compression.quantizers import QSGD
from shoal.errors import ExperimentError
from shoal.experiment.setup import Setup
from shoal.node import Node
from shoal.sharing.choco import CHOCO
from shoal.sharing.random import Random
from shoal.traits import Traits

# Experiments


class Served:
    """An algorithm with a server."""

    traits = Traits(sends_to="server")

    async def run(self, node: Node) -> None:
        """Nothing happens."""


class Gossips(Served):
    traits = Traits(sends_to="anyone")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"sharing": {"name": "random", "fraction": 0}}, "sharing.fraction = 0: expected number above 0 and at most 1"),
        ({"sharing": {"name": "topk", "fraction": 1.5}}, "sharing.fraction = 1.5: expected number above 0 and at most"),
        ({"sharing": {"name": "choco", "gamma": 0}}, "sharing.gamma = 0: expected number above 0 and at most 1"),
        ({"sharing": {"name": "deepsqueeze", "gamma": 2}}, "sharing.gamma = 2"),
        ({"sharing": {"name": "qsgd", "levels": 0}}, "sharing.levels = 0"),
        ({"sharing": {"name": "int8", "levels": 3}}, "sharing.levels: unknown key"),
        ({"sharing": {"name": "topk", "values": "float12"}}, "unknown values 'float12'; did you mean 'float"),
        ({"sharing": {"name": "choco", "compressor": {"name": "topk", "fraction": 2}}}, "compressor.fraction = 2"),
        (
            {"sharing": {"name": "choco"}, "topology": {"name": "regular", "degree": 2, "dynamic": True}},
            "sharing = 'choco': a node follows .* topology = 'regular' changes the links every round; use a static",
        ),
        ({"sharing": {"name": "choco"}, "algorithm": {"name": f"{__name__}:Served"}}, "'choco': .* sends to a server"),
        (
            {"sharing": {"name": "deepsqueeze"}, "algorithm": {"name": f"{__name__}:Gossips"}},
            "sharing = 'deepsqueeze': nodes step towards each other.* sends to nodes that it chooses.*; use algorithm",
        ),
    ],
    ids=str,
)
def test_an_invalid_experiment_is_rejected(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ExperimentError, match=why):
        experiment(**changed)


def test_deepsqueeze_accepts_dynamic_graphs() -> None:
    experiment(sharing={"name": "deepsqueeze"}, topology={"name": "regular", "degree": 2, "dynamic": True})


@pytest.mark.parametrize(
    "sharing",
    [
        {"name": "random", "fraction": 0.001},
        {"name": "topk", "fraction": 0.001},
        {"name": "choco", "compressor": {"name": "topk", "fraction": 0.001}},
        {"name": "deepsqueeze", "compressor": {"name": "random", "fraction": 0.001}},
        {"name": "jwins", "wavelet": "haar", "level": 1, "fractions": [0.5, 0.001]},
    ],
    ids=str,
)
def test_a_fraction_that_keeps_nothing_is_rejected_with_the_smallest_valid_one(sharing: dict[str, Any]) -> None:
    why = f"sharing = '{sharing['name']}': fraction = 0.001 keeps none of the model's 650 parameters; .* is 0.001539"
    with pytest.raises(ExperimentError, match=why):
        Setup(experiment(sharing=sharing))
    with pytest.raises(ValueError, match="keeps none"):
        Random(0.1).start(np.zeros(9, np.float32))


def test_every_codec_and_compressor_can_be_named_in_an_experiment() -> None:
    for values in VALUES:
        experiment(sharing={"name": "topk", "values": values})
    for compressor in COMPRESSORS:
        described = experiment(sharing={"name": "choco", "compressor": compressor})
        assert isinstance(described.sharing.build(), CHOCO)
    configured = experiment(sharing=CHOCO(0.2, QuantizedCompressor(QSGD(3))))
    assert configured.sharing.to_table()["compressor"] == {
        "name": "quantized",
        "values": {"name": "qsgd", "levels": 3, "bucket": 512},
    }
