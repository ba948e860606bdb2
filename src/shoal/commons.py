"""What all nodes of an experiment have in common: the data and who holds what, the model, the graph.

Built once per process that hosts nodes; after that nobody writes to it, so that forked nodes share its memory.
Each node is then made from it by `Commons.node`, in whatever engine.
"""

from __future__ import annotations

import mmap
from collections.abc import Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.algorithms import Algorithm
from shoal.data.dataset import Data, Dataset, Indices, Partition, Samples
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.message import Params
from shoal.models.flat import FlatModule, initial_parameters
from shoal.node import Finds, Node, Observer, Schedule, Serves
from shoal.randomness import generator
from shoal.runtime import Runtime
from shoal.sharing.sharing import Joins, Member, Sharing
from shoal.topologies.graph import FromLabels, Mixing, NodeId, Topology, WeightScheme
from shoal.training import Learner, TorchTrainer, Training, find_device


class Commons:
    """Everything that is built before the first node is.

    With `shared`, the data is put where forked processes share it without so much as a page table of their own.
    """

    def __init__(self, experiment: Experiment, shared: bool = False) -> None:
        import torch

        torch.set_num_threads(1)  # a node is one thread; the engines use the other cores for other nodes
        self.experiment = experiment
        dataset: Dataset = experiment.dataset.build()
        partition: Partition = experiment.partition.build()
        self.data: Data = dataset.load(experiment.seed)
        if shared:
            self.data = Data(_shared(self.data.train), _shared(self.data.test), self.data.classes)
        self.parts: list[Indices] = partition.split(
            self.data.train.y, experiment.nodes, generator(experiment.seed, "partition")
        )
        self._mixings: dict[tuple[str, WeightScheme], Mixing] = {}
        self.topology: Topology = experiment.topology.build()
        self.mixing = self.mixing_on(self.topology)
        self.flat = self._module("cpu")
        self.initial: Params = self.flat.read()
        self._test = _sampled(self.data.test, experiment.evaluation.samples, experiment.seed)
        self._evaluated = _evaluated_nodes(experiment)
        self._learners: dict[str, Learner] = {}
        self._try_sharings()

    def mixing_on(self, topology: Topology, weights: WeightScheme | None = None) -> Mixing:
        """The graph of a topology on these nodes, with weights; one for all nodes that ask for the same."""
        experiment = self.experiment
        key = (repr(topology), weights or experiment.weights)
        if key not in self._mixings:
            if isinstance(topology, FromLabels):
                graph = topology.build_from(self.label_counts(), experiment.seed)
            else:
                graph = topology.build(experiment.nodes, experiment.seed)
            self._mixings[key] = Mixing(graph, key[1])
        return self._mixings[key]

    def label_counts(self) -> NDArray[np.int64]:
        """How many training samples of each class each node holds: nodes × classes."""
        labels, classes = self.data.train.y, self.data.classes
        return np.stack([np.bincount(labels[part], minlength=classes) for part in self.parts])

    def learner(self, training: Training) -> Learner:
        """The learner for these settings; one for all nodes that share them."""
        key = repr(training)
        if key not in self._learners:
            flat = self.flat if training.device == "cpu" else self._module(training.device)
            self._learners[key] = Learner(flat, training, self.data, self._test)
        return self._learners[key]

    def warm_up(self) -> None:
        """Make every learner and take one step with it, so that a fork inherits all that torch sets up lazily."""
        for node in range(self.experiment.nodes):
            training = self.experiment.settings(node).training
            if repr(training) not in self._learners:
                self.learner(training).warm_up(self.parts[node])

    def live(self, node: Node) -> Coroutine[Any, Any, None]:
        """What `node` does, from its beginning to its end: learn, or serve those that do."""
        experiment = self.experiment
        for kind, id in experiment.services.items():
            if id == node.id:
                served: Serves = self.topology if kind == "topology" else experiment.algorithm.build()  # type: ignore[assignment]
                return served.serve(node)
        algorithm: Algorithm = experiment.settings(node.id).algorithm.build()
        return algorithm.run(node)

    def node(self, id: NodeId, runtime: Runtime, observer: Observer, run: str, receive_timeout: float | None) -> Node:
        """Node `id`, ready to live."""
        experiment = self.experiment
        settings = experiment.settings(id)
        learns = id < experiment.nodes
        trainer = TorchTrainer(
            self.learner(settings.training),
            self.parts[id] if learns else self.parts[0][:0],
            generator(experiment.seed, "training", id),
            settings.device.step_seconds,
        )
        return Node(
            id,
            nodes=experiment.nodes,
            seed=experiment.seed,
            params=self.initial,
            runtime=runtime,
            trainer=trainer,
            sharing=settings.sharing.build(),
            mixing=self.mixing,
            schedule=self._schedule(id),
            observer=observer,
            run=run,
            receive_timeout=receive_timeout,
            finder=self.topology.finder() if learns and isinstance(self.topology, Finds) else None,
            mixings=self.mixing_on,
            services=experiment.services,
            shapes=self.shapes,
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The tensors of the model."""
        return tuple(slot.shape for slot in self.flat.layout)

    def _schedule(self, id: NodeId) -> Schedule:
        """A server is tested as its clients are; then there is no average of many models to look at."""
        plan, services = self.experiment.evaluation, self.experiment.services
        tested = id in self._evaluated or (id == services.get("algorithm") and bool(self._evaluated))
        return Schedule(plan.every, tested, plan.average and "algorithm" not in services)

    def _try_sharings(self) -> None:
        """Start every sharing once, so that one that does not fit the model is refused before anything runs."""
        experiment = self.experiment
        nodes = range(experiment.nodes) if experiment.group else range(1)
        for component in {repr(c): c for c in (experiment.settings(n).sharing for n in nodes)}.values():
            sharing: Sharing = component.build()
            if isinstance(sharing, Joins):
                sharing.join(Member(0, experiment.nodes, experiment.seed, self.shapes))
            try:
                sharing.start(self.initial)
            except ValueError as error:
                raise ExperimentError([f"sharing = {component.name!r}: {error}"], experiment.name) from error

    def evaluate(self, params: Params) -> dict[str, float]:
        """Scores of any parameters on the experiment's test data."""
        return self.learner(self.experiment.training).evaluate(params)

    def _module(self, device: str) -> FlatModule:
        experiment, where = self.experiment, find_device(device)
        try:
            return initial_parameters(
                experiment.model.build(), self.data.shape, self.data.classes, experiment.seed, where
            )
        except ValueError as error:
            raise ExperimentError([f"model = {experiment.model.name!r}: {error}"], experiment.name) from error


def _evaluated_nodes(experiment: Experiment) -> frozenset[NodeId]:
    wanted = experiment.evaluation.nodes
    if wanted is None or wanted >= experiment.nodes:
        return frozenset(range(experiment.nodes))
    drawn = generator(experiment.seed, "evaluated nodes").choice(experiment.nodes, wanted, replace=False)
    return frozenset(int(n) for n in drawn)


def _shared(samples: Samples) -> Samples:
    return Samples(_in_shared_memory(samples.x), _in_shared_memory(samples.y))


def _in_shared_memory(array: NDArray[Any]) -> NDArray[Any]:
    copy = np.frombuffer(mmap.mmap(-1, max(1, array.nbytes)), array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


def _sampled(samples: Samples, count: int | None, seed: int) -> Samples:
    if count is None or count >= len(samples):
        return samples
    drawn = np.sort(generator(seed, "test samples").choice(len(samples), count, replace=False))
    return Samples(samples.x[drawn], samples.y[drawn])
