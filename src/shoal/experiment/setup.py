"""What all nodes of an experiment have in common: the data and who holds what, the model, the graph.

Built once per process that hosts nodes; after that nobody writes to it, so that forked nodes share its memory.
Each node is then made from it by `Setup.node`, in whatever engine.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.algorithms import Algorithm
from shoal.data.dataset import ByOwner, Data, Dataset, Indices, Partition, Samples, Shift, Shifts
from shoal.errors import DataError, ExperimentError, MessageError
from shoal.experiment import Experiment
from shoal.experiment.environment import build_environment, device_speeds
from shoal.experiment.mixings import ExperimentMixings
from shoal.experiment.registry import Component, registry
from shoal.message import Payload
from shoal.node import DiscoveryTopology, InteractiveSharing, Node, ServiceProvider
from shoal.node_context import EvaluationSchedule, NodeContext, Observer
from shoal.randomness import generator
from shoal.runtime import Runtime
from shoal.sharing.sharing import NodeAware, NodeInfo, PayloadChecker, Sharing
from shoal.topologies.graph import Topology
from shoal.training import TrainerBackend, TrainerFactory, TrainerInputs
from shoal.training.metrics import TRAINERS, Metrics
from shoal.types import NodeId, Params


class Setup:
    """Everything that is built before the first node is.

    With `shared`, the data is put where forked processes share it without so much as a page table of their own.
    """

    def __init__(self, experiment: Experiment, shared: bool = False) -> None:
        self.experiment = experiment
        dataset: Dataset = experiment.dataset.build()
        self.data: Data = dataset.load(experiment.seed)
        if shared:
            self.data = replace(self.data, train=_shared(self.data.train), test=_shared(self.data.test))
        partition: Partition | ByOwner = experiment.partition.build()
        rng = generator(experiment.seed, "partition")
        self.parts, tests = _split(partition, self.data, experiment.nodes, rng)
        self.topology: Topology = experiment.topology.build()
        self.mixings = ExperimentMixings(experiment, self.label_counts)
        self.mixing = self.mixings.build(self.topology)
        plan = experiment.evaluation
        kept = _kept(len(self.data.test), plan.samples, experiment.seed)
        metrics = Metrics(self.data, plan.metrics)
        if plan.metric is not None and experiment.trainer.name in TRAINERS:
            metrics.check(plan.metric)
        trainers: TrainerBackend = experiment.trainer.build()
        self.trainer_factory: TrainerFactory = trainers.create_factory(
            TrainerInputs(
                experiment.seed,
                self.data,
                self.parts,
                _own_tests(plan.data, tests, kept, experiment),
                _shifts(partition, self.data, experiment),
                self.data.test if kept is None else self.data.test[kept],
                metrics,
                experiment.model,
                experiment.training,
            )
        )
        self.initial: Params = self.trainer_factory.initial
        self.speeds = device_speeds(experiment)
        """How fast each node is, by its id; those that serve come last."""
        self.environment = build_environment(experiment, self.speeds)
        self._evaluated = _evaluated_nodes(experiment)
        self._try_sharings()

    def label_counts(self) -> NDArray[np.int64]:
        """How many training samples of each class each node holds: nodes × classes."""
        labels, classes = self.data.labels, self.data.classes
        return np.stack([np.bincount(labels[part], minlength=classes) for part in self.parts])

    def warm_up(self) -> None:
        """Do once what every node would do otherwise."""
        for node in range(self.experiment.nodes):
            self.trainer_factory.warm_up(node, self.experiment.settings(node).training)

    def run_node(self, node: Node) -> Coroutine[Any, Any, None]:
        """What `node` does, from its beginning to its end: learn, or serve those that do."""
        life = self._life(node)
        return life if not isinstance(node.sharing, InteractiveSharing) else run_interactively(life, node, node.sharing)

    def _life(self, node: Node) -> Coroutine[Any, Any, None]:
        experiment = self.experiment
        for kind, id in experiment.services.items():
            if id == node.id:
                served: ServiceProvider = self.topology if kind == "topology" else experiment.algorithm.build()  # type: ignore[assignment]
                return served.serve(node)
        algorithm: Algorithm = experiment.settings(node.id).algorithm.build()
        return algorithm.run(node)

    def node(self, id: NodeId, runtime: Runtime, observer: Observer, run: str, receive_timeout: float | None) -> Node:
        """Node `id`, ready to live."""
        experiment = self.experiment
        settings = experiment.settings(id)
        learns = id < experiment.nodes
        trainer = self.trainer_factory.trainer(id, settings.training, self.speeds[id].simulated_step)
        context = NodeContext(
            id,
            nodes=experiment.nodes,
            seed=experiment.seed,
            run=run,
            shapes=self.trainer_factory.shapes,
            schedule=self._schedule(id),
            mixing=self.mixing,
            mixing_factory=self.mixings,
            services=experiment.services,
            receive_timeout=receive_timeout,
        )
        return Node(
            context,
            params=self.initial,
            runtime=runtime,
            trainer=trainer,
            sharing=settings.sharing.build(),
            observer=observer,
            discovery=self.topology.discovery() if learns and isinstance(self.topology, DiscoveryTopology) else None,
        )

    def _schedule(self, id: NodeId) -> EvaluationSchedule:
        """A server is tested as its clients are; then there is no average of many models to look at."""
        plan, services = self.experiment.evaluation, self.experiment.services
        tested = id in self._evaluated or (id == services.get("algorithm") and bool(self._evaluated))
        averaged = plan.average and "algorithm" not in services
        return EvaluationSchedule(plan.every, tested, averaged, by_time=plan.seconds is not None)

    def _try_sharings(self) -> None:
        """Start every sharing once, and have each hear what the others say, so that one that does not fit the model,
        and two that do not understand each other, are refused before anything runs."""
        experiment = self.experiment
        nodes = range(experiment.size) if experiment.group else range(1)
        used = {repr(c): c for c in (experiment.settings(n).sharing for n in nodes if n not in self._samplers)}
        started: list[tuple[Component, Sharing]] = []
        for component in used.values():
            sharing: Sharing = component.build()
            if isinstance(sharing, NodeAware):
                sharing.bind(NodeInfo(0, experiment.nodes, experiment.seed, self.trainer_factory.shapes))
            try:
                sharing.start(self.initial)
            except ValueError as error:
                raise ExperimentError([f"sharing = {component.name!r}: {error}"], experiment.name) from error
            if component.name in registry("sharing"):  # a plug-in may mean not to be understood
                started.append((component, sharing))
        problems = [
            f"sharing = {_described(hears)} cannot read the payloads of {_described(speaks)}, which other nodes use: "
            f"{why}; let all nodes use one sharing"
            for (speaks, one), (hears, other) in itertools.permutations(started, 2)
            if (why := self._misunderstood(one, other)) is not None
        ]
        if problems:
            raise ExperimentError(problems, experiment.name)

    @property
    def _samplers(self) -> frozenset[NodeId]:
        """The nodes that say nothing by a sharing."""
        return frozenset(id for kind, id in self.experiment.services.items() if kind == "topology")

    def _misunderstood(self, speaks: Sharing, hears: Sharing) -> str | None:
        """Why one sharing would refuse what another says."""
        said = speaks.outgoing(self.initial, 0)
        try:
            if isinstance(hears, PayloadChecker):
                hears.check(said if isinstance(said, Payload) else said(1), self.initial)
        except MessageError as error:
            return str(error)
        return None

    def evaluate(self, params: Params) -> dict[str, float]:
        """Scores of any parameters on the experiment's test data."""
        return self.trainer_factory.evaluate(params)


async def run_interactively(life: Coroutine[Any, Any, None], node: Node, sharing: InteractiveSharing) -> None:
    node.background(sharing.serve_peers(node))
    await life
    await sharing.drain(node)


def _described(component: Component) -> str:
    given = {key: value for key, value in component.options.items() if value is not None}
    spelt = {key: _described(value) if isinstance(value, Component) else repr(value) for key, value in given.items()}
    options = "".join(f", {key} = {value}" for key, value in spelt.items())
    return f"{{ name = {component.name!r}{options} }}" if options else repr(component.name)


def _split(
    partition: Partition | ByOwner, data: Data, nodes: int, rng: np.random.Generator
) -> tuple[list[Indices], list[Indices] | None]:
    """What each node holds of the training samples and, where samples have owners, of the test samples."""
    if isinstance(partition, ByOwner):
        return partition.split_owned(data.train, data.test, nodes, rng)
    labels = data.labels if getattr(partition, "by_class", False) else _numbered(data)
    return partition.split(labels, nodes, rng), None


def _numbered(data: Data) -> NDArray[np.int64]:
    """Something to divide, for partitions that do not look at classes."""
    return data.train.y if data.task == "classification" else np.zeros(len(data.train), np.int64)


def _own_tests(
    which: str, tests: list[Indices] | None, kept: Indices | None, experiment: Experiment
) -> list[Indices] | None:
    """The test samples of each node, as numbers among those that are kept; None when all are tested on all."""
    if which == "all":
        return None
    if tests is None:
        raise ExperimentError(
            [
                f"evaluation.data = 'own': with partition {experiment.partition.name!r} nodes have no test samples of "
                "their own; use 'natural', or evaluation.data = 'all'"
            ],
            experiment.name,
        )
    if not any(map(len, tests)):
        raise ExperimentError(
            [
                "evaluation.data = 'own': no test sample of this data set is of a user that a node holds; "
                "use evaluation.data = 'all'"
            ],
            experiment.name,
        )
    if kept is None:
        return tests
    return [np.flatnonzero(np.isin(kept, own)) for own in tests]


def _shifts(partition: Partition | ByOwner, data: Data, experiment: Experiment) -> list[Shift | None] | None:
    """How each node sees its inputs; None when all see them as they are."""
    if not isinstance(partition, Shifts):
        return None
    if data.sizes:
        raise DataError(f"partition {experiment.partition.name!r}: inputs of this data set are ids, not measurements")
    return partition.shifts(experiment.nodes, data.shape, generator(experiment.seed, "shifts"))


def _evaluated_nodes(experiment: Experiment) -> frozenset[NodeId]:
    wanted = experiment.evaluation.nodes
    if wanted is None or wanted >= experiment.nodes:
        return frozenset(range(experiment.nodes))
    drawn = generator(experiment.seed, "evaluated nodes").choice(experiment.nodes, wanted, replace=False)
    return frozenset(int(n) for n in drawn)


def _shared(samples: Samples) -> Samples:
    return Samples(_in_shared_memory(samples.x), _in_shared_memory(samples.y), samples.owner)


def _in_shared_memory(array: NDArray[Any]) -> NDArray[Any]:
    if _is_mapped(array):
        return array  # pages of a file: all processes share them as it is
    copy = np.frombuffer(mmap.mmap(-1, max(1, array.nbytes)), array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


def _is_mapped(array: NDArray[Any]) -> bool:
    """Whether the values lie in mapped memory. A copy of a `np.memmap` is one by its class, and does not."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, mmap.mmap)


def _kept(samples: int, count: int | None, seed: int) -> Indices | None:
    """Which test samples are looked at; None for all of them."""
    if count is None or count >= samples:
        return None
    return np.sort(generator(seed, "test samples").choice(samples, count, replace=False))
