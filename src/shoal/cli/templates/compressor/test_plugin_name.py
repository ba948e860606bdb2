"""PluginName approximates vectors, rejects invalid payloads, and runs on both engines."""

from pathlib import Path

import numpy as np
import pytest
from shoal import Experiment, Payload
from shoal.errors import MessageError
from shoal.randomness import generator
from shoal.sharing.choco import CHOCO
from shoal.testing import check_sharing

from plugin_name import PluginName

EXPERIMENT = Path(__file__).with_name("plugin_name.toml")


@pytest.mark.parametrize("size", [1, 7, 8, 300])
@pytest.mark.parametrize("block", [1, 3, 256])
def test_receivers_decode_what_the_sender_knows(block: int, size: int) -> None:
    vector = generator(0, "test", size).standard_normal(size).astype(np.float32)
    compressor = PluginName(block)
    payload, known = compressor.compress(vector, None)
    decoded = compressor.decompress(payload, size)
    assert np.array_equal(decoded.values, known.values)
    assert np.linalg.norm(vector - decoded.values) <= np.linalg.norm(vector)


def test_a_sharing_with_it_fulfils_the_contract() -> None:
    check_sharing(lambda: CHOCO(compressor=PluginName()))


@pytest.mark.parametrize("size", [7, 9, 17])
def test_a_payload_of_another_size_is_rejected(size: int) -> None:
    payload, _ = PluginName(block=8).compress(np.ones(size, np.float32), None)
    with pytest.raises(MessageError):
        PluginName(block=8).decompress(payload, 100)


def test_invalid_arrays_are_rejected() -> None:
    signs, scales = np.zeros(1, np.uint8), np.ones(1, np.float32)
    for arrays in ({}, {"signs": signs}, {"signs": scales, "scales": scales}, {"signs": signs, "scales": -scales}):
        with pytest.raises(MessageError):
            PluginName().decompress(Payload(arrays), 8)


def test_both_engines_end_with_the_same_models(tmp_path: Path) -> None:
    digests = []
    for engine in ("simulation", "processes"):
        settings = {"engine": engine, "nodes": 4, "algorithm.rounds": 5, "simulation.batching": "off"}
        run = Experiment.from_file(EXPERIMENT, settings).run(tmp_path)
        assert run.status == "completed"
        digests.append(run.summary["digest"])
    assert digests[0] == digests[1]
