"""Helpers for the oracles of algorithms: logistic regression on digits, trained for all nodes in double precision.

An oracle is a few lines of NumPy on whole matrices, one row per node. `Shoal.steps(X)` returns every node's local step
u = train(x) − x on the batches that the run draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conftest import models_of
from shoal.algorithms.dpsgd import DPSGD
from shoal.engines.simulation.engine import World
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.randomness import generator
from shoal.testing import FakeRuntime, Faults
from shoal.training.batches import Batches

STEPS, BATCH, RATE = 2, 16, 0.2
CRASH = Faults().crash(2, round=2).schedule
HANG = Faults().hang(2, round=2).schedule


def gradient(params: Any, x: Any, y: Any) -> Any:
    """The gradient of the mean cross-entropy of a linear model: weights (10, 64), then biases (10)."""
    weights, biases = params[:640].reshape(10, 64), params[640:]
    logits = x @ weights.T + biases
    likely = np.exp(logits - logits.max(1, keepdims=True))
    likely /= likely.sum(1, keepdims=True)
    error = (likely - np.eye(10)[y]) / len(y)
    return np.concatenate([(error.T @ x).ravel(), error.sum(0)])


def experiment(algorithm: Any, topology: Any = "ring", **changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": 8,
        "seed": 5,
        "algorithm": algorithm,
        "topology": {"name": topology} if isinstance(topology, str) else topology,
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "model": {"name": "logistic"},
        "training": {"lr": RATE, "batch_size": BATCH, "local_steps": STEPS},
        "evaluation": {"every": 0, "average": False},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed})


class Shoal:
    """All nodes of an experiment, as a matrix."""

    def __init__(self, described: Experiment) -> None:
        self.setup = Setup(described)
        self.nodes = described.nodes
        self.start = np.tile(self.setup.initial.astype(np.float64), (self.nodes, 1))
        self._rngs = [generator(described.seed, "training", node) for node in range(self.nodes)]
        self._streams = [Batches(p, BATCH, rng) for p, rng in zip(self.setup.parts, self._rngs, strict=True)]

    def steps(self, models: Any, offset: Callable[[int], Any] | None = None, rate: float = RATE) -> Any:
        """Return u = train(x) − x of every node.

        With `offset`, nodes train one step at a time and add `offset(node)` after each step.
        """
        data, trained = self.setup.data.train, models.copy()
        for node, stream in enumerate(self._streams):
            for count in [STEPS] if offset is None else [1] * STEPS:
                for batch in stream.take(count):
                    trained[node] -= rate * gradient(trained[node], data.x[batch].astype(np.float64), data.y[batch])
                self._rngs[node].integers(2**63)  # the seed of dropout, which this model does not use
                trained[node] += 0.0 if offset is None else offset(node)
        return trained - models

    def adjacency(self, round: int = 0, graph: Any = None) -> Any:
        """Row i: the senders to node i."""
        graph = graph or self.setup.mixing.graph
        senders = np.zeros((self.nodes, self.nodes))
        for node in range(self.nodes):
            senders[node, list(graph.links(node, round).senders)] = 1
        return senders

    def metropolis(self, round: int = 0, graph: Any = None) -> Any:
        senders = self.adjacency(round, graph)
        degrees = senders.sum(1)
        w = senders / (1 + np.maximum.outer(degrees, degrees))
        return w + np.diag(1 - w.sum(1))


def agrees(described: Experiment, expected: Any, folder: Path, atol: float = 2e-5) -> Any:
    """Run the experiment, and assert that models differ between nodes and are as expected. Returns the run."""
    run = described.run(folder)
    models = models_of(run)
    assert np.abs(expected - expected[0]).max() > 1e-4  # nodes differ: the graph matters
    np.testing.assert_allclose(models, expected, atol=atol)
    assert run.summary["status"] == "completed"
    return run


def same_in_both_engines(described: Experiment, folder: Path) -> Any:
    """Run in both engines, and assert that the models are identical. Returns the run as processes."""
    simulated = described.run(folder)
    real = dataclasses.replace(described, engine="processes").run(folder)
    assert simulated.summary["digest"] == real.summary["digest"]
    for counted in ("bytes_sent", "messages_sent", "rounds", "accuracy", "status"):
        assert simulated.summary[counted] == real.summary[counted], counted
    return real


def survives_a_crash(described: Experiment, folder: Path) -> None:
    """Run with a crash, and assert that the other nodes finish and learn."""
    _survivors_learn(dataclasses.replace(described, fault=CRASH), folder)


def survives_a_hang(described: Experiment, folder: Path, factor: float = 1.25) -> None:
    """Run with a node that hangs, and assert that the other nodes finish and learn."""
    with_timeout = dataclasses.replace(described.simulation, receive_timeout=1.0)
    _survivors_learn(dataclasses.replace(described, fault=HANG, simulation=with_timeout), folder, factor)


def _survivors_learn(described: Experiment, folder: Path, factor: float = 1.25) -> None:
    """Assert that their loss is at most `factor` times that of D-PSGD with the same fault."""
    run = described.run(folder)
    models = models_of(run)
    assert run.summary["status"] == "incomplete"
    assert len(models) == described.nodes - 1
    assert np.isfinite(models).all()
    before = Setup(described).evaluate(Setup(described).initial)
    assert run.summary["loss"]["mean"] < 0.75 * before["loss"]
    plain = dataclasses.replace(described, algorithm=DPSGD(described.algorithm.options["rounds"])).run(folder)
    assert run.summary["loss"]["mean"] < factor * plain.summary["loss"]["mean"]


def play(
    algorithm: Any,
    models: Any,
    topology: Any,
    train: Callable[[int, Any], Any] | None = None,
    tamper: Callable[[int, Message], Message] | None = None,
    failing: int | None = None,
    sharing: Callable[[], Any] | None = None,
    delay: float = 0.0,
    **settings: Any,
) -> list[Any]:
    """Run nodes that start with these models, without torch, and return them after their last round.

    `train(node, params)` takes a second, and changes nothing by default; `tamper(to, message)` may change messages;
    node `failing` fails after two and a half seconds; `sharing()` creates the sharing of a node, full by default. Each
    node starts `delay` seconds after the node before it. `settings` are further arguments of `FakeRuntime.node`. If the
    algorithm has a server, it starts with the model of node 0, and is the last of the nodes returned.
    """
    count = len(models)
    services = {"algorithm": count} if hasattr(algorithm, "serve") else {}
    world = World(count + len(services), training_node_count=count)
    nodes = [
        FakeRuntime().node(
            id,
            nodes=count,
            params=models[id % count],
            topology=topology,
            train=partial(train or (lambda _, params: params), id),
            sharing=sharing() if sharing else None,
            services=services,
            **settings,
        )
        for id in range(count + len(services))
    ]
    for node, runtime in zip(nodes, world.runtimes, strict=True):
        node.runtime = runtime
        if tamper is not None:
            _intercept(runtime, tamper)
        runtime.start(_after(delay * node.id, node, algorithm.run if node.id < count else algorithm.serve))
    if failing is not None:
        world.kernel.at(2.5, world.runtimes[failing].stop)
        world.kernel.at(2.5, partial(world.mark_failed, failing))
    world.kernel.run()
    world.raise_if_deadlocked()
    return [node for node in nodes if node.id != failing]


async def _after(seconds: float, node: Node, program: Callable[[Node], Any]) -> None:
    if seconds:
        await node.sleep(seconds)
    await program(node)


def _intercept(runtime: Any, tamper: Callable[[int, Message], Message]) -> None:
    send = runtime.send

    async def intercepted(to: int, message: Message) -> bool:
        return bool(await send(to, tamper(to, message)))

    runtime.send = intercepted


def altered(message: Message, **changed: Any) -> Message:
    """Return the message with other arrays or fields."""
    arrays = {k: changed.get(k, a) for k, a in message.payload.arrays.items()}
    fields = {k: changed.get(k, f) for k, f in message.payload.fields.items()}
    return Message(message.sender, message.kind, message.round, Payload(arrays, fields), message.run)
