"""Flower's clients, unchanged, without a server: a node is a client, and its `fit` is local training.

    trainer = { name = "flower", client = "client.py:client_fn" }

`client` names a class or a function that makes a `NumPyClient`. It is called by the names of its parameters:

    context                              as Flower's client_fn(context): node_config has "partition-id" and
                                         "num-partitions", run_config is the trainer's `config`
    cid, partition_id, num_partitions    as clients have been told before; the first is a string
    seed                                 the experiment's
    x_train, y_train, x_test, y_test     the node's part of the experiment's data set, scaled: copies of its own

A client that loads data of its own is told who it is, and the experiment's data set is left alone; it is still loaded
and divided, so a small one will do.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ExperimentError, NodeError
from shoal.plugins import load
from shoal.randomness import derived_seed, generator
from shoal.state import State, generator_state, restore_generator
from shoal.training.factory import TrainerInputs, refuse_others
from shoal.training.trainer import Trained, Training
from shoal.types import NodeId, Params


@dataclass(frozen=True)
class FlowerBackend:
    """Flower's NumPyClient, of your own and unchanged: `fit` is a node's training, `evaluate` its test.

    `client` is file.py:name or module:name of a class or a function (client_fn) that makes one; `config` is what its
    `fit` and `evaluate` are given. A step is a `fit`.
    """

    client: Path
    """A path, so that it is looked for beside the experiment."""
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where, separator, name = self.component_name.rpartition(":")
        if not separator or not name or not where:
            raise ValueError(f"client = {str(self.client)!r}: expected file.py:name or module:name")
        if where.endswith(".py") and not Path(where).is_file():
            raise ValueError(f"client = {str(self.client)!r}: there is no file {where!r}")

    @property
    def component_name(self) -> str:
        """A file with its folder, a module without."""
        return str(self.client) if ".py:" in self.client.name else self.client.name

    def create_factory(self, inputs: TrainerInputs) -> FlowerTrainerFactory:
        try:
            make = load(self.component_name)
        except ValueError as error:
            advice = "; pip install 'shoal[flower]'" if "No module named 'flwr'" in str(error) else ""
            raise ExperimentError([f"trainer.client: {error}{advice}"]) from error
        if not callable(make):
            raise ExperimentError([f"trainer.client = {self.component_name!r}: expected a class or a function"])
        return FlowerTrainerFactory(make, dict(self.config), inputs)


class FlowerTrainerFactory:
    """Makes clients, each when it is first needed, and turns their lists of arrays into one vector and back.

    Arrays of other types than float32 are cast on the way out and back on the way in; integers are rounded.
    """

    def __init__(self, make: Callable[..., Any], config: dict[str, Any], inputs: TrainerInputs) -> None:
        import torch

        torch.set_num_threads(1)  # a node is one thread
        self.inputs, self.config = inputs, config
        self._make = make
        self._clients: dict[NodeId, Any] = {}
        arrays = [np.asarray(array) for array in self.client(0).get_parameters(config=dict(config))]
        if not arrays:
            raise self._wrong("its get_parameters gives no arrays, and all nodes start from those of client 0")
        for i, array in enumerate(arrays):
            if array.dtype.kind not in "fiu":
                raise self._wrong(f"array {i} of get_parameters is {array.dtype}; expected numbers to average")
        self._types = [array.dtype for array in arrays]
        self.shapes: tuple[tuple[int, ...], ...] = tuple(array.shape for array in arrays)
        self.initial: Params = self.flat(arrays)

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> FlowerTrainer:
        refuse_others(training, (), "flower", "tell your client in trainer.config")
        return FlowerTrainer(self, node, step_seconds)

    def evaluate(self, params: Params) -> dict[str, float]:
        """By every client, weighted by their numbers of samples: what Flower calls federated evaluation."""
        tests = [self.test(node, params) for node in range(len(self.inputs.parts))]
        names = dict.fromkeys(name for test in tests for name in test.scores)
        found = {}
        for name in names:
            those = [(test.scores[name], test.samples) for test in tests if name in test.scores]
            found[name] = math.fsum(score * of for score, of in those) / sum(of for _, of in those)
        return found

    def warm_up(self, node: NodeId, training: Training) -> None:
        """Nothing is known of what clients share."""

    def client(self, node: NodeId) -> Any:
        if node not in self._clients:
            self._clients[node] = self._new(node)
        return self._clients[node]

    def samples(self, node: NodeId) -> int:
        """How many a client trains on, which only its `fit` says: that of another one made for it, to no other end."""
        import torch

        with torch.random.fork_rng(devices=[]):
            return int(self._new(node).fit(self.arrays(self.initial), dict(self.config))[1])

    def _new(self, node: NodeId) -> Any:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed(self.inputs.seed, "initial parameters"))
            try:
                made = self._make(**self._told(node))
            except Exception as error:
                raise self._wrong(f"making client {node} failed: {type(error).__name__}: {error}") from error
        client = getattr(made, "numpy_client", made)  # what to_client() has wrapped
        for method in ("get_parameters", "fit", "evaluate"):
            if not callable(getattr(client, method, None)):
                raise self._wrong(f"it made a {type(made).__name__} without {method}; expected a NumPyClient")
        return client

    def test(self, node: NodeId, params: Params) -> Tested:
        loss, samples, metrics = self.client(node).evaluate(self.arrays(params), dict(self.config))
        if not samples:
            return Tested({}, 0)
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float | np.number)}
        return Tested({**numbers, "loss": float(loss)}, int(samples))

    def flat(self, arrays: list[NDArray[Any]]) -> Params:
        return np.concatenate([np.asarray(array).ravel().astype(np.float32) for array in arrays])

    def arrays(self, params: Params) -> list[NDArray[Any]]:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        return [
            (np.rint(piece) if kind.kind in "iu" else piece).reshape(shape).astype(kind)
            for piece, shape, kind in zip(np.split(params, ends), self.shapes, self._types, strict=True)
        ]

    def _told(self, node: NodeId) -> dict[str, Any]:
        """What the client's maker asks for, by the names of its parameters."""
        nodes, inputs = len(self.inputs.parts), self.inputs
        train = cache(lambda: inputs.batch(node, inputs.part(node)))
        test = cache(lambda: inputs.test_batch(node, inputs.part_of_test(node)))
        offered: dict[str, Callable[[], Any]] = {
            "context": lambda: _context(node, nodes, self.config),
            "cid": lambda: str(node),
            "partition_id": lambda: node,
            "num_partitions": lambda: nodes,
            "seed": lambda: inputs.seed,
            # Copies: samples are read-only, and what a client does with its own is its own affair.
            "x_train": lambda: train().x.copy(),
            "y_train": lambda: train().y.copy(),
            "x_test": lambda: test().x.copy(),
            "y_test": lambda: test().y.copy(),
        }
        told = {}
        for name, parameter in inspect.signature(self._make).parameters.items():
            if name in offered:
                told[name] = offered[name]()
            elif "Context" in str(parameter.annotation):
                told[name] = offered["context"]()
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                raise self._wrong(f"it wants {name!r}; what it can be given is {', '.join(offered)}")
        return told

    def _wrong(self, why: str) -> ExperimentError:
        return ExperimentError([f"trainer.client = {getattr(self._make, '__name__', self._make)!r}: {why}"])


class FlowerTrainer:
    """A node's hold on its client. What the client itself keeps from round to round is in no checkpoint."""

    def __init__(self, shop: FlowerTrainerFactory, node: NodeId, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.cpu_seconds = 0.0
        self._samples: int | None = 0 if node >= len(shop.inputs.parts) else None
        self._shop = shop
        self._node = node
        self._rng = generator(shop.inputs.seed, "training", node)

    @property
    def samples(self) -> int:
        """What the client said in its latest `fit`. Asked before the first, it takes one for nothing."""
        if self._samples is None:
            self._samples = self._shop.samples(self._node)
        return self._samples

    def steps(self, steps: int | None) -> int:
        return 1 if steps is None else steps

    def train(self, params: Params, steps: int | None = None) -> Trained:
        import torch

        if self._node >= len(self._shop.inputs.parts):
            raise NodeError("this node holds no data to train on: it serves the others")
        started, losses, shop = time.thread_time(), [], self._shop
        client, arrays = shop.client(self._node), shop.arrays(params)
        for _ in range(self.steps(steps)):
            # What clients draw by torch, the order of their batches above all, is the same in every engine.
            torch.default_generator.manual_seed(int(self._rng.integers(2**63)))
            arrays, samples, metrics = client.fit(arrays, dict(shop.config))
            self._check(arrays)
            self._samples = int(samples)
            losses.append(float(metrics.get("loss", metrics.get("train_loss", math.nan))))
        self.cpu_seconds += time.thread_time() - started
        return Trained(shop.flat(arrays), float(np.mean(losses)))

    def evaluate(self, params: Params) -> dict[str, float]:
        if self._node >= len(self._shop.inputs.parts):
            return self._shop.evaluate(params)
        return self._shop.test(self._node, params).scores

    def state(self) -> State:
        return {"rng": generator_state(self._rng), "samples": self._samples}

    def restore(self, state: State) -> None:
        restore_generator(self._rng, state["rng"])
        self._samples = state["samples"]

    def _check(self, arrays: list[NDArray[Any]]) -> None:
        shapes = tuple(np.shape(array) for array in arrays)
        if shapes != self._shop.shapes:
            raise NodeError(
                f"client {self._node}: its fit gave arrays of shapes {shapes}; its get_parameters gave "
                f"{self._shop.shapes}"
            )


class Tested(NamedTuple):
    """What a client said of a model, and how many samples it looked at."""

    scores: dict[str, float]
    samples: int


def _context(node: NodeId, nodes: int, config: dict[str, Any]) -> SimpleNamespace:
    """What Flower's Context has; its own class has other parameters in every few versions."""
    return SimpleNamespace(
        run_id=0,
        node_id=node,
        node_config={"partition-id": node, "num-partitions": nodes},
        run_config=dict(config),
        state=_records(),
    )


def _records() -> Any:
    """Where a client may keep things from round to round."""
    try:
        from flwr.common import RecordDict
    except ImportError:
        return {}
    return RecordDict()
