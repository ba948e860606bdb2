"""Requirements of algorithms on the experiment, for their `incompatibilities`."""

from __future__ import annotations

import warnings

from shoal.errors import TopologyError
from shoal.topologies.graph import Topology
from shoal.traits import ExperimentView


def requires_whole_models(experiment: ExperimentView, feature: str) -> list[str]:
    """Reject sharings that average by a different W in each round, for a feature that diverges then.

    Such a sharing leaves out some coordinates, or a part of each difference, so that a model is not its row of Wx. A
    sharing that sends whole models, at most rounded, has the trait `sends_whole_models`.
    """
    if experiment.sharing.traits.sends_whole_models:
        return []
    return [
        f"sharing = {experiment.sharing.name!r}: {feature} diverges unless whole models are averaged; "
        "use sharing = 'full', or 'float16', 'bfloat16', 'int8' or 'qsgd', which only round"
    ]


def requires_plain_sgd(
    experiment: ExperimentView, why: str = "compares the gradients of different rounds", alternative: str = ""
) -> list[str]:
    """Reject optimizers whose local step is more than a sum of −η times gradients: with momentum or other moments.

    `why` is the reason, with the algorithm as its subject. `alternative` is another remedy, such as " or lazy = true".
    """
    training = experiment.training
    needs = f"{experiment.algorithm.name!r} {why} and needs plain SGD"
    problems = []
    if training.optimizer.lower() != "sgd":
        problems.append(f"training.optimizer = {training.optimizer!r}: {needs}; use optimizer = 'sgd'{alternative}")
    if training.momentum or training.options.get("momentum"):
        momentum = training.momentum or training.options["momentum"]
        problems.append(f"training.momentum = {momentum:g}: {needs}; remove the momentum{alternative}")
    return problems


def warn_of_local_steps(experiment: ExperimentView) -> None:
    """Warn if nodes take several local steps, for an algorithm whose correction holds for the first one only."""
    training, name = experiment.training, experiment.algorithm.name
    if training.local_steps == 1 and training.local_epochs is None:
        return
    key = "local_steps" if training.local_epochs is None else "local_epochs"
    warnings.warn(
        f"training.{key} = {getattr(training, key)}: the correction of {name!r} holds for one local step; with more "
        "steps the models converge to another point, which depends on how the data is split; use algorithm = 'k-gt' "
        "or training.local_steps = 1",
        stacklevel=3,
    )


def requires_buildable_graph(key: str, topology: Topology, experiment: ExperimentView) -> list[str]:
    """Check that the algorithm's own graph can be built for these nodes; `key` is the option that sets it."""
    try:
        topology.build(experiment.nodes, experiment.seed)
    except TopologyError as error:
        return [f"algorithm.{key}: {error}"]
    return []
