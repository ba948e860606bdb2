"""Checks across the tables of an experiment whose values are all valid by themselves."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal import schema
from shoal.data.dataset import transforms_batches
from shoal.environment import faults
from shoal.environment.faults.table import affects_pairs
from shoal.errors import ExperimentError, TopologyError
from shoal.experiment.registry import ONLY_HERE, Component, registry
from shoal.experiment.resolving import Resolver
from shoal.experiment.tables import NodeSettings, ProcessesPlan, location
from shoal.topologies.graph import Graph, Mixing, TopologyWarning, TopologyWrapper, WeightScheme
from shoal.topologies.inspection import is_directed, is_doubly_stochastic, mixing_graph
from shoal.training import metrics
from shoal.training.settings import Training
from shoal.traits import Constrained, traits_of
from shoal.types import NodeId

if TYPE_CHECKING:
    from shoal.experiment.experiment import Experiment


def contradictions(experiment: Experiment) -> list[str]:
    """List the values that contradict each other: groups, faults, machines, the engine, the target's metric."""
    problems = _wrong_groups(experiment)
    problems += faults.incompatibilities(experiment.fault, experiment.nodes, experiment.size)
    if not problems:
        try:
            _ = experiment.placement
        except ValueError as error:
            problems.append(f"mapping: {error}")
    if experiment.engine == "processes":
        sharings = (
            [experiment.sharing] if problems else [experiment.settings(n).sharing for n in range(experiment.nodes)]
        )
        problems += _plain_links(experiment.processes, sharings)
        problems += _wrong_for_processes(experiment)
    elif experiment.simulation.batching == "ray":
        problems += _wrong_for_ray(experiment)
    elif experiment.simulation.batching == "pool":
        problems += _wrong_for_pool(experiment)
    problems += _wrong_metric(experiment)
    problems += _wrong_data_settings(experiment)
    problems += _wrong_checkpoints(experiment)
    return problems


def _wrong_checkpoints(experiment: Experiment) -> Iterator[str]:
    """List the components whose state checkpoints cannot hold."""
    if experiment.checkpoint.every and experiment.algorithm.traits.checkpoint_cut == "none":
        yield (
            f"checkpoint.every = {experiment.checkpoint.every}: the state of algorithm = "
            f"{experiment.algorithm.name!r} cannot be saved; use checkpoint.every = 0 or another algorithm"
        )


def _wrong_data_settings(experiment: Experiment) -> Iterator[str]:
    """List settings of the data that the experiment or its trainer cannot use."""
    plan, trainer = experiment.evaluation, experiment.trainer
    if plan.split == "validation" and experiment.validation is None:
        yield (
            "evaluation.split = 'validation': no samples are held out for it; add dataset.validation = 0.1, a tenth of "
            "the training samples"
        )
    if not trainer.traits.augments and any(transforms_batches(entry.build()) for entry in experiment.augmentation):
        yield (
            f"dataset.augmentation: trainer = {trainer.name!r} does not transform its batches; use 'torch' or "
            "'scikit', or, if this trainer gets them from TrainerInputs.batch, declare Traits(augments=True)"
        )
    if plan.fine_tune and not trainer.traits.fine_tunes:
        yield (
            f"evaluation.fine_tune = {plan.fine_tune}: trainer = {trainer.name!r} cannot train a copy of a model; use "
            "'torch' or 'scikit', or, if this trainer uses TrainerInputs.fine_tuning, declare Traits(fine_tunes=True)"
        )


def _wrong_groups(experiment: Experiment) -> list[str]:
    """Check the node ids and the overrides of every combination of groups that some node is in."""
    problems: list[str] = []
    groups_of: dict[NodeId, tuple[int, ...]] = {}
    invalid: list[tuple[int, ...]] = []
    for i, group in enumerate(experiment.group):
        try:
            groups_of.update({node: (*groups_of.get(node, ()), i) for node in group.ids(experiment.nodes)})
        except ValueError as error:
            problems.append(f"group[{i}].{error}")
            invalid.append((i,))
    for combination in sorted({*groups_of.values(), *invalid}):
        resolver = Resolver(experiment.base)
        resolver.node_settings(experiment, {i: experiment.group[i] for i in combination})
        problems.extend(problem for problem in resolver.problems if problem not in problems)
    return problems


def _plain_links(plan: ProcessesPlan, sharings: Sequence[Component]) -> Iterator[str]:
    """List why links that other machines can reach must be sealed."""
    reachable = plan.reachable_address
    if reachable is None or plan.sealed or plan.allow_unsealed:
        return
    key, address = reachable
    yield (
        f"processes.{key} = {address!r}: other machines can read plain links, and send messages to nodes; set "
        "processes.sealed = true, or use '127.0.0.1', or set processes.allow_unsealed = true to accept it"
    )
    for name in sorted({sharing.name for sharing in sharings if sharing.traits.needs_private_links}):
        yield (
            f"sharing = {name!r}: it does not hide models from those who can read the links; set processes.sealed = "
            "true, or processes.allow_unsealed = true to accept it"
        )


def _wrong_for_processes(experiment: Experiment) -> Iterator[str]:
    """List what the simulation can do and processes cannot."""
    plan = experiment.processes
    if plan.host in ("0.0.0.0", "*") and plan.announce is None:
        yield (
            f"processes.host = {plan.host!r}: nodes cannot connect to a wildcard; set processes.announce to the "
            "address of this machine"
        )
    if plan.keys is not None and not plan.sealed:
        yield (
            f"processes.keys = {str(plan.keys)!r}: the keys have no effect without processes.sealed = true; set it, "
            "or remove the keys"
        )
    if plan.shaping == "kernel":
        yield from _wrong_for_kernel_shaping(experiment, plan)
    yield from _classes_of_the_script(experiment, "use engine = 'simulation'")


def _wrong_for_ray(experiment: Experiment) -> Iterator[str]:
    """List what other ways to compute can do and workers on Ray cannot."""
    instead = "use another simulation.batching"
    for key, device in _accelerators(experiment):
        yield f"{key} = {device!r}: workers on Ray train on CPUs; use 'cpu', or {instead}"
    yield from _classes_of_the_script(experiment, instead)


def _wrong_for_pool(experiment: Experiment) -> Iterator[str]:
    """List what other ways to compute can do and forked workers of the simulation cannot."""
    for key, device in _accelerators(experiment):
        yield (
            f"{key} = {device!r}: the workers of simulation.batching = 'pool' are forks, in which an accelerator does "
            "not work; use 'auto', 'vmap' or 'off'"
        )


def _accelerators(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield the keys that name another torch device than the CPU, and the device."""
    if experiment.training.device != "cpu":
        yield "training.device", experiment.training.device
    for i, group in enumerate(experiment.group):
        device = (group.training or {}).get("device", "cpu")
        if device != "cpu":
            yield f"group[{i}].training.device", device


def uses_accelerator(experiment: Experiment) -> bool:
    """Whether a node trains on another torch device than the CPU."""
    return any(True for _ in _accelerators(experiment))


def _classes_of_the_script(experiment: Experiment, instead: str) -> Iterator[str]:
    """List the components that other processes cannot import."""
    for key, value in {**vars(experiment), "training.schedule": experiment.training.schedule}.items():
        kind = location(key)
        for name in _names_only_here(value):
            written = f"{kind} = {{ name = 'file.py:{name.partition(':')[2]}' }}"
            yield (
                f"{kind} = {name!r}: it exists only in this process, and other processes cannot import it; write its "
                f"class to a file of its own, and {written}, or {instead}"
            )


def _names_only_here(value: object) -> Iterator[str]:
    """The names of a component, and of components in it, that other processes cannot import."""
    if isinstance(value, Component):
        if value.name.startswith(ONLY_HERE):
            yield value.name
        for inner in value.options.values():
            yield from _names_only_here(inner)
    elif isinstance(value, tuple):
        for inner in value:
            yield from _names_only_here(inner)


def _wrong_for_kernel_shaping(experiment: Experiment, plan: ProcessesPlan) -> Iterator[str]:
    """List what only the network model can do; `shoal.environment.network.access` checks the network itself."""
    instead = "use processes.shaping = 'model'"
    for key in ("host", "announce"):
        if (value := getattr(plan, key)) != getattr(ProcessesPlan(), key):
            yield (
                f"processes.{key} = {value!r}: with processes.shaping = 'kernel' every node has an address of its own; "
                f"remove it, or {instead}"
            )
    if (name := experiment.availability.name) != "always":
        yield f"availability = {name!r}: the kernel cannot hold back the messages of offline nodes; {instead}"
    for i, fault in enumerate(experiment.fault):
        if fault.kind == "slow" and fault.what != "compute":
            what = "" if fault.what is None else f" with what = {fault.what!r}"
            yield (
                f"fault[{i}]: 'slow'{what} delays messages, which the kernel cannot do; set what = 'compute', or "
                f"{instead}"
            )
        elif affects_pairs(fault):  # only the network model can cause faults of messages
            yield f"fault[{i}]: the kernel cannot cause a {fault.kind!r}; {instead}"


def _wrong_metric(experiment: Experiment) -> list[str]:
    """Check the metrics, and that the target's metric is one of them, as far as known before the data is loaded."""
    plan = experiment.evaluation
    if problems := metrics.unknown_metrics(plan.metrics or ()):
        return problems
    if plan.metric is None or not experiment.trainer.traits.reports_metrics:
        return []
    known = set().union(*metrics.BY_TASK.values())
    measured = set().union(*metrics.DEFAULT.values()) if plan.metrics is None else {*plan.metrics, "loss"}
    source = "per-class" if re.fullmatch(r"class \d+", plan.metric) else plan.metric
    if source not in known or plan.metric == "per-class":
        expected = schema.nearest(plan.metric, known - {"per-class"} | {"class 0"})
        return [f"evaluation.metric = {plan.metric!r}: unknown{expected}"]
    if source not in measured:
        return [f"evaluation.metric = {plan.metric!r}: it would not be measured; add {source!r} to evaluation.metrics"]
    return []


@dataclass(frozen=True)
class _NodeView:
    """The experiment as the components of one node see it: a `shoal.traits.ExperimentView`."""

    nodes: int
    seed: int
    algorithm: Component
    sharing: Component
    topology: Component
    weights: WeightScheme
    trainer: Component
    training: Training
    restarts: bool
    graph: Graph | None

    @classmethod
    def of(cls, experiment: Experiment, settings: NodeSettings, graph: Graph | None) -> _NodeView:
        return cls(
            experiment.nodes,
            experiment.seed,
            settings.algorithm,
            settings.sharing,
            experiment.topology,
            experiment.weights,
            experiment.trainer,
            settings.training,
            experiment.restarts,
            graph,
        )


def graph_needs_labels(experiment: Experiment) -> bool:
    """Whether the graph is built from labels, also where a peer sampler takes the neighbours from it."""
    topology = experiment.topology.build()
    while isinstance(topology, TopologyWrapper):
        topology = topology.sampled_topology
    return traits_of(topology, "topology").needs_labels


def check_labelled_graph(experiment: Experiment, graph: Graph) -> None:
    """Raise `ExperimentError` if a component does not work with the graph that was built from labels.

    Warnings that do not depend on the graph were issued when the experiment was created.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", TopologyWarning)
        if problems := incompatibilities(experiment, graph):
            raise ExperimentError(problems, experiment.name)


def _build_graph(experiment: Experiment) -> Graph | None:
    """Return the graph as far as it is known without data."""
    if graph_needs_labels(experiment):
        return None
    try:
        graph: Graph = experiment.topology.build().build(experiment.nodes, experiment.seed)
    except TopologyError:  # reported where the graph is built for the run
        return None
    return graph


def incompatibilities(experiment: Experiment, graph: Graph | None = None) -> list[str]:
    """List the components that do not work with the rest of the experiment, each problem once.

    `graph` is the graph that was built from labels. Any other graph is built here, once for all components.
    """
    graph = _build_graph(experiment) if graph is None else graph
    nodes = range(experiment.nodes) if experiment.group else range(1)
    problems: dict[str, None] = dict.fromkeys(_mixed_algorithms(experiment))
    all_settings = list({id(s): s for s in map(experiment.settings, nodes)}.values())
    problems.update(dict.fromkeys(_different_schedules(all_settings)))
    for settings in all_settings:
        view = _NodeView.of(experiment, settings, graph)
        if view.sharing.name != "full" and view.algorithm.traits.own_payloads:
            problems[
                f"sharing = {view.sharing.name!r}: {view.algorithm.name!r} builds its own payloads; "
                "use sharing = 'full' or another algorithm"
            ] = None
        for component in (view.algorithm, view.sharing, view.topology, view.trainer):
            instance = component.build()
            if isinstance(instance, Constrained):
                problems.update(dict.fromkeys(instance.incompatibilities(view)))
        if not problems:
            _warn_of_weights(view)
    return list(problems)


def _different_schedules(all_settings: Sequence[NodeSettings]) -> Iterator[str]:
    """List schedules by which learning rates do not change in the same rounds, if the algorithm needs that."""
    algorithm = all_settings[0].algorithm
    if not algorithm.traits.common_schedule:
        return
    schedules = [settings.training.schedule for settings in all_settings]
    needs = f"algorithm = {algorithm.name!r} needs learning rates that change at all nodes in the same rounds"
    if any(schedule is not None and getattr(schedule.build(), "by", "rounds") == "steps" for schedule in schedules):
        yield f"training.schedule.by = 'steps': {needs}; use by = 'rounds'"
    if any(schedule != schedules[0] for schedule in schedules):
        yield f"group.training.schedule: {needs}; use one schedule for all nodes (training.lr may differ in a group)"


def _warn_of_weights(view: _NodeView) -> None:
    """Warn if models are averaged with weights that do not keep their mean."""
    graph, traits = mixing_graph(view), view.algorithm.traits
    if graph is None or traits.sends_to != "neighbours" or traits.own_payloads:
        return
    if not is_doubly_stochastic(Mixing(graph, view.weights)):
        remedy = "use an undirected graph" if is_directed(graph) else "use topology.weights = 'metropolis-hastings'"
        warnings.warn(
            f"topology.weights = {view.weights!r}: on topology = {view.topology.name!r} the mixing matrix is not "
            "doubly stochastic, so the models of some nodes count more than others in the average of all; "
            f"{remedy} to count all alike",
            TopologyWarning,
            stacklevel=2,
        )


def _mixed_algorithms(experiment: Experiment) -> Iterator[str]:
    """List the groups that run another algorithm, or the same one with options that must be equal on all nodes.

    Plug-ins are not checked: experiments with nodes that disturb the others need them.
    """
    built_in = registry("algorithm")
    reference = experiment.algorithm if experiment.algorithm.name in built_in else None
    for i, group in enumerate(experiment.group):
        members = () if group.algorithm is None else group.ids(experiment.nodes)
        for algorithm in {id(a): a for a in (experiment.settings(node).algorithm for node in members)}.values():
            if algorithm.name not in built_in:
                continue
            reference = reference or algorithm
            if algorithm.name != reference.name:
                yield (
                    f"group[{i}].algorithm = {algorithm.name!r}: other nodes run {reference.name!r}, and nodes with "
                    "different algorithms may wait for messages that never arrive; use one algorithm for all nodes, or "
                    "a plug-in"
                )
                continue
            for key, value in algorithm.options.items():
                expected = reference.options[key]
                if key not in reference.traits.per_node_options and value != expected:
                    yield (
                        f"group[{i}].algorithm.{key} = {value!r}: other nodes have {expected!r}, and nodes with "
                        "different values wait for messages that never arrive; set it for all nodes"
                    )
