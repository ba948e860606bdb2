"""Everything that is built from an experiment before its nodes start: data, model, graph, trainers, environment.

It is built once in every process that runs nodes, and does not change after that, so that forked nodes share its
memory. `Setup.node` creates a node of either engine from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shoal.algorithms import Algorithm
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.checks import check_labelled_graph, graph_needs_labels
from shoal.experiment.environment_builder import build_environment, device_speeds
from shoal.experiment.interfaces import TRAINER, TRAINER_FACTORY, missing_members
from shoal.experiment.mixing_factory import CachedMixingFactory
from shoal.experiment.partitioned_data import PartitionedData, load_data
from shoal.experiment.sharing_checks import check_sharings
from shoal.node import DiscoveryTopology, InteractiveSharing, Node, PeerDiscovery, ServiceProvider
from shoal.node_context import CheckpointSaver, EvaluationSchedule, NodeContext, Observer
from shoal.results.node_data import MAX_COUNTS, NodeData
from shoal.runtime import Runtime
from shoal.topologies.graph import Mixing, Topology, TopologyWarning
from shoal.training import Trainer, TrainerBackend, TrainerFactory, TrainerInputs
from shoal.training.metrics import Metrics
from shoal.training.settings import OPTIONAL_SETTINGS, Training
from shoal.training.trainer import ScheduledTrainer
from shoal.types import NodeId, Params


class Setup:
    """What all nodes of an experiment share.

    With `shared`, the data is in memory that forked processes share.
    """

    def __init__(self, experiment: Experiment, shared: bool = False) -> None:
        self.experiment = experiment
        self._partitioned = load_data(experiment, shared)
        self.data = self._partitioned.data
        self.parts = self._partitioned.parts
        """The training samples of each node."""
        self.topology: Topology = experiment.topology.build()
        self.mixing_factory = CachedMixingFactory(experiment, self.label_counts)
        self.mixing = self._build_mixing()
        self.trainer_factory = create_trainer_factory(experiment, self._partitioned)
        self.initial: Params = self.trainer_factory.initial
        """The model that all nodes start from."""
        self.speeds = device_speeds(experiment)
        """The speed of each node's device; service nodes are last."""
        self.environment = build_environment(experiment, self.speeds)
        self._evaluated = experiment.evaluated_nodes
        check_sharings(experiment, self.initial, self.trainer_factory.shapes)

    def _build_mixing(self) -> Mixing:
        """Build the graph. The experiment has warned of it already, unless it depends on labels."""
        labelled = graph_needs_labels(self.experiment)
        with warnings.catch_warnings():
            if not labelled:
                warnings.simplefilter("ignore", TopologyWarning)
            mixing = self.mixing_factory.build(self.topology)
        if labelled:
            check_labelled_graph(self.experiment, mixing.graph)
        return mixing

    def label_counts(self) -> NDArray[np.int64]:
        """Return the number of training samples of each class on each node: nodes × classes."""
        return self._partitioned.label_counts()

    def node_data(self) -> NodeData:
        """Return the number of training samples of each node, and of each class on it, for the run's data.json."""
        known = self.data.task == "classification" and len(self.parts) * self.data.classes <= MAX_COUNTS
        return NodeData([len(part) for part in self.parts], self.label_counts().tolist() if known else None)

    def warm_up(self) -> None:
        """Initialise what training needs, such as libraries and caches, once and not in every node."""
        for node in range(self.experiment.nodes):
            self.trainer_factory.warm_up(node, self.experiment.settings(node).training)
        self.trainer(0)  # an error about the trainer is the error of the run, and not of each node

    def node(
        self,
        id: NodeId,
        runtime: Runtime,
        observer: Observer,
        run: str,
        receive_timeout: float | None,
        saver: CheckpointSaver | None = None,
        incarnation: int = 0,
    ) -> Node:
        """Create node `id`. `saver` saves its state for checkpoints; `incarnation` is how often it was restarted."""
        experiment = self.experiment
        settings = experiment.settings(id)
        trains = id < experiment.nodes
        context = NodeContext(
            id,
            nodes=experiment.nodes,
            seed=experiment.seed,
            run=run,
            shapes=self.trainer_factory.shapes,
            schedule=self._schedule(id),
            mixing=self.mixing,
            mixing_factory=self.mixing_factory,
            services=experiment.services,
            receive_timeout=receive_timeout,
            non_finite=experiment.non_finite,
            learning_rate=settings.training.step_size,
            incarnation=incarnation,
            late=incarnation > 0 or id in experiment.late_nodes,
        )
        return Node(
            context,
            params=self.initial,
            runtime=runtime,
            trainer=self.trainer(id),
            sharing=settings.sharing.build(),
            observer=observer,
            discovery=self._discovery() if trains else None,
            saver=saver,
        )

    def trainer(self, id: NodeId) -> Trainer:
        """Create the trainer of node `id`, as it is before its first step."""
        training = self.experiment.settings(id).training
        trainer = self.trainer_factory.trainer(id, training, self.speeds[id].simulated_step)
        _check_members(trainer, TRAINER, self.experiment)
        if problems := list(self._options_not_followed(training, trainer)):
            raise ExperimentError(problems, self.experiment.name)
        return trainer

    def _options_not_followed(self, training: Training, trainer: Trainer) -> Iterator[str]:
        """List the settings that would have no effect with this trainer."""
        backend = self.experiment.trainer
        for key in OPTIONAL_SETTINGS:
            value = getattr(training, key)
            followed = key in backend.traits.training_options
            if key == "schedule":
                followed = followed and isinstance(trainer, ScheduledTrainer)
            if not followed and value not in (None, 0.0, "float32"):
                yield (
                    f"training.{key} = {getattr(value, 'name', value)!r}: trainer {backend.name!r} does not follow it; "
                    f"remove it or, if the trainer does, declare Traits(training_options=frozenset(['{key}']))"
                )

    def _discovery(self) -> PeerDiscovery | None:
        if self.experiment.topology.traits.discovers_peers:
            return cast(DiscoveryTopology, self.topology).discovery()
        return None

    def _schedule(self, id: NodeId) -> EvaluationSchedule:
        """A server is evaluated if its clients are. With a server there is one model, and no average to evaluate."""
        plan, server = self.experiment.evaluation, self.experiment.services.get("algorithm")
        evaluated = id in self._evaluated or (id == server and bool(self._evaluated))
        return EvaluationSchedule(plan.every, evaluated, plan.average and server is None, plan.seconds is not None)

    def run_node(self, node: Node) -> Coroutine[Any, Any, None]:
        """Run `node` until it ends: its algorithm, or the service that it provides."""
        program = self._program(node)
        if node.interactive_sharing is not None:
            return run_interactively(program, node, node.interactive_sharing)
        return program

    def _program(self, node: Node) -> Coroutine[Any, Any, None]:
        experiment = self.experiment
        for kind, id in experiment.services.items():
            if id == node.id:
                provider = self.topology if kind == "topology" else experiment.algorithm.build()
                return cast(ServiceProvider, provider).serve(node)
        algorithm: Algorithm = experiment.settings(node.id).algorithm.build()
        return algorithm.run(node)

    def evaluate(self, params: Params) -> dict[str, float]:
        """Return the scores of `params` on the test samples of the experiment."""
        return self.trainer_factory.evaluate(params)


async def run_interactively(program: Coroutine[Any, Any, None], node: Node, sharing: InteractiveSharing) -> None:
    """Run the program of a node while its sharing serves peers in the background; then let the sharing finish."""
    node.background(sharing.serve_peers(node))
    await program
    await sharing.drain(node)


def create_trainer_factory(experiment: Experiment, partitioned: PartitionedData) -> TrainerFactory:
    """Build the model, and what its trainers share."""
    plan = experiment.evaluation
    metrics = Metrics(partitioned.data, plan.metrics)
    if plan.metric is not None and experiment.trainer.traits.reports_metrics:
        metrics.check(plan.metric)
    inputs = TrainerInputs(
        seed=experiment.seed,
        data=partitioned.data,
        parts=partitioned.parts,
        test_parts=partitioned.test_parts,
        shifts=partitioned.shifts,
        test=partitioned.test,
        metrics=metrics,
        model=experiment.model,
        training=experiment.training,
        augmentations=partitioned.augmentations,
        fine_tune=plan.fine_tune,
    )
    backend: TrainerBackend = experiment.trainer.build()
    factory = backend.create_factory(inputs)
    _check_members(factory, TRAINER_FACTORY, experiment)
    return factory


def _check_members(created: object, protocols: Sequence[str], experiment: Experiment) -> None:
    """Raise `ExperimentError` if an object that the trainer's backend has created lacks members."""
    if (missing := missing_members(created, protocols)) is not None:
        raise ExperimentError([f"trainer = {experiment.trainer.name!r}: {missing}"], experiment.name)
