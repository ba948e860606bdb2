"""The message that starts nodes."""

from __future__ import annotations

import pytest

from coordination import FakeAgents
from shoal.engines.processes import control
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.node_starter import NodeStarter
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.processes.watch_clock import WatchClock
from shoal.engines.run_tracker import RunTracker
from shoal.errors import RunError
from shoal.experiment import Experiment


@pytest.fixture
def registry() -> NodeRegistry:
    registry = NodeRegistry(3)
    for entry in registry:
        entry.public_key = bytes([entry.id]) * 40
    return registry


def start(registry: NodeRegistry) -> FakeAgents:
    experiment = Experiment(nodes=len(registry), engine="processes", processes={"sealed": True})
    agents = FakeAgents()
    NodeStarter(registry, agents.as_group(), RunTracker(experiment), RunTimes(None, ()), WatchClock()).send_start()
    return agents


def test_nodes_learn_each_others_public_keys_by_id(registry: NodeRegistry) -> None:
    agents = start(registry)
    for node in range(3):
        (message,) = agents.sent[node]
        assert isinstance(message, control.Start)
        assert message.public_keys == [b"\0" * 40, b"\1" * 40, b"\2" * 40]


@pytest.mark.parametrize("key", [None, b""])
def test_nodes_do_not_start_without_the_public_keys_of_all_nodes(registry: NodeRegistry, key: bytes | None) -> None:
    registry[1].public_key = key
    with pytest.raises(RunError, match="the public keys of nodes 1 are not known"):
        start(registry)
