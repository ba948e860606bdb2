"""Flower clients, unchanged and without a server: a node is a client, and `fit` is its local training.

    trainer = { name = "flower", client = "client.py:client_fn" }
    trainer = { name = "flower", client = "client_app.py:app", initial = "task.py:Net" }

`client` names a `ClientApp` (`shoal.training.flower_app`), or a class or a function that returns a `NumPyClient`. The
class or function is called with the arguments that its parameters name:

    context                              as in Flower's client_fn(context): node_config has "partition-id" and
                                         "num-partitions", run_config is the trainer's `config`
    cid, partition_id, num_partitions    as in older versions of Flower; `cid` is a string
    seed                                 the experiment's seed
    x_train, y_train, x_test, y_test     the node's part of the experiment's data set, normalised; these are copies

A client may load its own data. The experiment's data set is then not used, but it is still loaded and partitioned, so
choose a small one.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ExperimentError, NodeError
from shoal.plugins import load
from shoal.randomness import derived_seed, generator
from shoal.state import State, generator_state, restore_generator
from shoal.training.factory import reject_unused_settings
from shoal.training.flower_app import AppClients, has_client_fn, is_client_app, is_of_flower, named_arrays
from shoal.training.inputs import TrainerInputs
from shoal.training.settings import Training
from shoal.training.trainer import Trained, require_samples
from shoal.traits import Traits
from shoal.types import NodeId, Params


@dataclass(frozen=True)
class FlowerBackend:
    """Your own Flower ClientApp or NumPyClient, unchanged: `fit` trains a node, `evaluate` evaluates it.

    `client` is file.py:name or module:name of a ClientApp, or of a class or a function (client_fn) that returns a
    client. `config` is passed to `fit` and `evaluate`. `initial` names what nodes start from; default: the
    `get_parameters` of client 0. A step is one `fit`.
    """

    client: Path
    """A path, so that it is resolved relative to the experiment file."""
    config: dict[str, Any] = field(default_factory=dict)
    initial: Path | None = None

    traits: ClassVar[Traits] = Traits(imports_torch=True)

    def __post_init__(self) -> None:
        for key, path in (("client", self.client), ("initial", self.initial)):
            if path is None:
                continue
            where, separator, name = _import_path(path).rpartition(":")
            if not separator or not name or not where:
                raise ValueError(f"{key} = {str(path)!r}: expected file.py:name or module:name")
            if where.endswith(".py") and not Path(where).is_file():
                raise ValueError(f"{key} = {str(path)!r}: there is no file {where!r}")

    def create_factory(self, inputs: TrainerInputs) -> FlowerTrainerFactory:
        make = self._load("client", self.client)
        if not callable(make) or (is_of_flower(make) and not is_client_app(make)):
            raise ExperimentError(
                [
                    f"trainer.client = {_import_path(self.client)!r}: it is an instance of {type(make).__name__}; "
                    "expected a ClientApp, a class of NumPyClient, or a function (client_fn) that returns a client"
                ]
            )
        initial = None if self.initial is None else self._load("initial", self.initial)
        return FlowerTrainerFactory(make, dict(self.config), inputs, initial)

    def _load(self, key: str, path: Path) -> Any:
        try:
            return load(_import_path(path))
        except ValueError as error:
            advice = "; pip install 'shoal[flower]'" if "No module named 'flwr'" in str(error) else ""
            raise ExperimentError([f"trainer.{key}: {error}{advice}"]) from error


class FlowerTrainerFactory:
    """Creates each client when it is first needed, and converts its list of arrays to one vector and back.

    Arrays of other types than float32 are cast to float32 and back; integers are rounded.
    """

    def __init__(
        self, make: Callable[..., Any], config: dict[str, Any], inputs: TrainerInputs, initial: Any = None
    ) -> None:
        """`initial` is what nodes start from, as in `named_arrays`; None: the `get_parameters` of client 0."""
        import torch

        torch.set_num_threads(1)  # a node is one thread
        self.inputs, self.config = inputs, config
        self._make = make
        self._needs_parameters = initial is None
        self._clients: dict[NodeId, Any] = {}
        named = None if initial is None else self._named(initial)
        if is_client_app(make):
            if named is None and not has_client_fn(make):
                raise self._error(
                    "a ClientApp with message handlers does not know the initial model; set trainer.initial to "
                    "file.py:name of the class of the torch module, or of a function that returns its state_dict"
                )
            self._make = AppClients(make, None if named is None else list(named))
        arrays = self._parameters_of_client() if named is None else list(named.values())
        source = "get_parameters" if named is None else "trainer.initial"
        if not arrays:
            advice = "; all nodes start from those of client 0, or from those of trainer.initial"
            raise self._error(f"{source} returns no arrays{advice}")
        for i, array in enumerate(arrays):
            if array.dtype.kind not in "fiu":
                raise self._error(f"array {i} of {source} is {array.dtype}; expected numbers to average")
        self._types = [array.dtype for array in arrays]
        self.shapes: tuple[tuple[int, ...], ...] = tuple(array.shape for array in arrays)
        self.initial: Params = self.flat(arrays)

    def trainer(self, node: NodeId, training: Training, step_seconds: float) -> FlowerTrainer:
        reject_unused_settings(training, (), "flower", "pass settings to your client in trainer.config")
        return FlowerTrainer(self, node, step_seconds)

    def evaluate(self, params: Params) -> dict[str, float]:
        """Evaluate with every client, weighted by its number of samples. Flower calls this federated evaluation."""
        evaluations = [self.evaluate_client(node, params) for node in range(len(self.inputs.parts))]
        names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.scores)
        means = {}
        for name in names:
            scores = [(e.scores[name], e.samples) for e in evaluations if name in e.scores]
            means[name] = math.fsum(score * samples for score, samples in scores) / sum(n for _, n in scores)
        return means

    def warm_up(self, node: NodeId, training: Training) -> None:
        """Do nothing: it is unknown what clients share."""

    def client(self, node: NodeId) -> Any:
        if node not in self._clients:
            self._clients[node] = self._create_client(node)
        return self._clients[node]

    def samples(self, node: NodeId) -> int:
        """Return how many samples a client trains on. Only `fit` returns that number, so a temporary client runs it."""
        import torch

        with torch.random.fork_rng(devices=[]):
            return int(self._create_client(node).fit(self.arrays(self.initial), dict(self.config))[1])

    def evaluate_client(self, node: NodeId, params: Params) -> ClientEvaluation:
        loss, samples, metrics = self.client(node).evaluate(self.arrays(params), dict(self.config))
        if not samples:
            return ClientEvaluation({}, 0)
        scores = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float | np.number)}
        if loss is not None:  # an app need not return one
            scores["loss"] = float(loss)
        return ClientEvaluation(scores, int(samples))

    def flat(self, arrays: list[NDArray[Any]]) -> Params:
        return np.concatenate([np.asarray(array).ravel().astype(np.float32) for array in arrays])

    def arrays(self, params: Params) -> list[NDArray[Any]]:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        return [
            (np.rint(piece) if kind.kind in "iu" else piece).reshape(shape).astype(kind)
            for piece, shape, kind in zip(np.split(params, ends), self.shapes, self._types, strict=True)
        ]

    def _named(self, initial: Any) -> dict[str, NDArray[Any]]:
        with self._seeded():
            try:
                return named_arrays(initial)
            except Exception as error:
                raise ExperimentError([f"trainer.initial: {type(error).__name__}: {error}"]) from error

    def _parameters_of_client(self) -> list[NDArray[Any]]:
        client = self.client(0)
        with self._seeded():  # an app creates its client now
            return [np.asarray(array) for array in client.get_parameters(config=dict(self.config))]

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Seed torch's generator, from which initial parameters come; restore it at the end."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed(self.inputs.seed, "initial parameters"))
            yield

    def _create_client(self, node: NodeId) -> Any:
        arguments = self._arguments(node)
        with self._seeded():
            try:
                made = self._make(**arguments)
            except Exception as error:
                raise self._error(f"creating client {node} failed: {type(error).__name__}: {error}") from error
        client = getattr(made, "numpy_client", made)  # to_client() wraps the client
        methods = (*(("get_parameters",) if self._needs_parameters else ()), "fit", "evaluate")
        for method in methods:
            if not callable(getattr(client, method, None)):
                raise self._error(f"it returned {type(made).__name__} without {method}; expected a NumPyClient")
        return client

    def _arguments(self, node: NodeId) -> dict[str, Any]:
        """Return the arguments for creating a client, by the names of the parameters."""
        nodes, inputs = len(self.inputs.parts), self.inputs
        train = cache(lambda: inputs.batch(node, inputs.part(node)))
        test = cache(lambda: inputs.test_batch(node, inputs.part_of_test(node)))
        available: dict[str, Callable[[], Any]] = {
            "context": lambda: _context(node, nodes, self.config),
            "cid": lambda: str(node),
            "partition_id": lambda: node,
            "num_partitions": lambda: nodes,
            "seed": lambda: inputs.seed,
            # Copies: samples are read-only, and a client may write into its own.
            "x_train": lambda: train().x.copy(),
            "y_train": lambda: train().y.copy(),
            "x_test": lambda: test().x.copy(),
            "y_test": lambda: test().y.copy(),
        }
        arguments = {}
        for name, parameter in inspect.signature(self._make).parameters.items():
            if name in available:
                arguments[name] = available[name]()
            elif "Context" in str(parameter.annotation):
                arguments[name] = available["context"]()
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                if "Message" in str(parameter.annotation):
                    raise self._error("it is a handler of messages; name the ClientApp that it belongs to")
                raise self._error(f"unknown parameter {name!r}; available are {', '.join(available)}")
        return arguments

    def _error(self, reason: str) -> ExperimentError:
        return ExperimentError(
            [f"trainer.client = {getattr(self._make, '__name__', type(self._make).__name__)!r}: {reason}"]
        )


class FlowerTrainer:
    """Trains and evaluates one node with its client. State inside the client is not part of checkpoints."""

    def __init__(self, factory: FlowerTrainerFactory, node: NodeId, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.cpu_seconds = 0.0
        self._is_service = node >= len(factory.inputs.parts)
        self._samples: int | None = 0 if self._is_service else None
        self._factory = factory
        self._node = node
        self._rng = generator(factory.inputs.seed, "training", node)

    @property
    def samples(self) -> int:
        """The number that the latest `fit` returned. Before the first `fit`, a temporary client runs one."""
        if self._samples is None:
            self._samples = self._factory.samples(self._node)
        return self._samples

    def steps(self, steps: int | None) -> int:
        return 1 if steps is None else steps

    def train(self, params: Params, steps: int | None = None) -> Trained:
        import torch

        require_samples(0 if self._is_service else 1)
        started, losses, factory = time.thread_time(), [], self._factory
        client, arrays = factory.client(self._node), factory.arrays(params)
        for _ in range(self.steps(steps)):
            # Random draws of a client with torch, such as the order of batches, are the same in every engine.
            torch.default_generator.manual_seed(int(self._rng.integers(2**63)))
            arrays, samples, metrics = client.fit(arrays, dict(factory.config))
            self._check(arrays)
            self._samples = int(samples)
            losses.append(float(metrics.get("loss", metrics.get("train_loss", math.nan))))
        self.cpu_seconds += time.thread_time() - started
        return Trained(factory.flat(arrays), float(np.mean(losses)))

    def evaluate(self, params: Params) -> dict[str, float]:
        if self._is_service:
            return self._factory.evaluate(params)
        return self._factory.evaluate_client(self._node, params).scores

    def state(self) -> State:
        return {"rng": generator_state(self._rng), "samples": self._samples}

    def restore(self, state: State) -> None:
        restore_generator(self._rng, state["rng"])
        self._samples = state["samples"]

    def _check(self, arrays: list[NDArray[Any]]) -> None:
        shapes = tuple(np.shape(array) for array in arrays)
        if shapes != self._factory.shapes:
            raise NodeError(
                f"client {self._node}: fit returned arrays of shapes {shapes}; get_parameters returned "
                f"{self._factory.shapes}"
            )


class ClientEvaluation(NamedTuple):
    """A client's scores of a model, and the number of samples that it evaluated."""

    scores: dict[str, float]
    samples: int


def _import_path(path: Path) -> str:
    """A path as the plug-in loader takes it: a file with its folder, a module without."""
    return str(path) if ".py:" in path.name else path.name


def _context(node: NodeId, nodes: int, config: dict[str, Any]) -> SimpleNamespace:
    """Return an object with the attributes of Flower's Context, whose constructor differs between versions."""
    return SimpleNamespace(
        run_id=0,
        node_id=node,
        node_config={"partition-id": node, "num-partitions": nodes},
        run_config=dict(config),
        state=_client_state(),
    )


def _client_state() -> Any:
    """Return the object in which a client may keep data from round to round."""
    try:
        from flwr.common import RecordDict
    except ImportError:
        return {}
    return RecordDict()
