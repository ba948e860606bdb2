"""PluginName fulfils the contract of a sharing, and runs on both engines."""

from pathlib import Path

import numpy as np
import pytest
from shoal import Experiment, Payload
from shoal.errors import MessageError
from shoal.testing import check_sharing

from plugin_name import PluginName

EXPERIMENT = Path(__file__).with_name("plugin_name.toml")


@pytest.mark.parametrize("size", [1, 2, 101])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_it_fulfils_the_contract(parts: int, size: int) -> None:
    # A few nodes exchange models for a few rounds. Pass averages=False for a sharing that changes their mean.
    check_sharing(lambda: PluginName(parts), size)


def test_a_round_sends_one_part_and_does_not_change_the_rest() -> None:
    sharing = PluginName(parts=2)
    payload = sharing.outgoing(np.full(4, 3, np.float32), round=1)
    assert payload.arrays["values"].size == 2
    merged = sharing.merge(np.ones(4, np.float32), {7: payload}, {7: 0.5})
    assert merged.tolist() == [1, 2, 1, 2]


def test_an_unknown_part_is_rejected() -> None:
    params = np.zeros(4, np.float32)
    with pytest.raises(MessageError, match="part = 9"):
        PluginName().check(Payload({"values": params[::2]}, {"part": 9}), params)


def test_both_engines_end_with_the_same_models(tmp_path: Path) -> None:
    digests = []
    for engine in ("simulation", "processes"):
        settings = {"engine": engine, "nodes": 4, "algorithm.rounds": 5, "simulation.batching": "off"}
        run = Experiment.from_file(EXPERIMENT, settings).run(tmp_path)
        assert run.status == "completed"
        digests.append(run.summary["digest"])
    assert digests[0] == digests[1]
