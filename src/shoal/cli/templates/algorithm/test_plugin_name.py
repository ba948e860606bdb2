"""PluginName trains and averages as described, and runs on both engines."""

from pathlib import Path

import numpy as np
from shoal import Experiment, Message, Payload
from shoal.testing import FakeRuntime

from plugin_name import PluginName

EXPERIMENT = Path(__file__).with_name("plugin_name.toml")


def model(value: float) -> Payload:
    return Payload({"params": np.full(3, value, np.float32)})


def test_a_node_trains_once_and_averages_twice() -> None:
    # Node 0 of two nodes with equal weights. The fake runtime delivers two messages of node 1.
    fake = FakeRuntime(Message(1, "model", 0, model(3)), Message(1, "model", 1, model(6)))
    node = fake.node(nodes=2, params=np.zeros(3, np.float32), train=lambda params: params + 1)
    fake.run(PluginName(rounds=1, exchanges=2).run(node))
    sent = [(to, message.round, message.payload.arrays["params"][0]) for to, message in fake.sent]
    assert sent == [(1, 0, 1.0), (1, 1, 2.0)]  # after training: 1; averaged with 3: 2
    assert node.params.tolist() == [4, 4, 4]  # averaged with 6: 4


def test_a_node_continues_without_a_failed_peer() -> None:
    fake = FakeRuntime().mark_failed(1)
    node = fake.node(nodes=2, params=np.zeros(3, np.float32), train=lambda params: params + 1)
    fake.run(PluginName(rounds=2).run(node))
    assert node.params.tolist() == [2, 2, 2]


def test_both_engines_end_with_the_same_models(tmp_path: Path) -> None:
    digests = []
    for engine in ("simulation", "processes"):
        settings = {"engine": engine, "nodes": 4, "algorithm.rounds": 5, "simulation.batching": "off"}
        run = Experiment.from_file(EXPERIMENT, settings).run(tmp_path)
        assert run.status == "completed"
        digests.append(run.summary["digest"])
    assert digests[0] == digests[1]
