"""What algorithms demand of the experiment that they are in, for their `incompatibilities`."""

from __future__ import annotations

from shoal.errors import TopologyError
from shoal.topologies.graph import Topology
from shoal.traits import ExperimentView


def inexact(experiment: ExperimentView, needs: str) -> list[str]:
    """A sharing that averages by another W in each round, for what diverges then.

    It is one that leaves out some coordinates, or some of each difference, so that a model is not its row of Wx. A
    sharing that says whole models, rounded at most, has the trait `sends_whole_models`; others are taken not to.
    """
    if experiment.sharing.traits.sends_whole_models:
        return []
    return [
        f"sharing = {experiment.sharing.name!r}: {needs} diverges unless whole models are averaged; "
        "use sharing = 'full', or 'float16', 'int8' or 'qsgd', which only round"
    ]


def unlike_plain_sgd(experiment: ExperimentView) -> list[str]:
    """What makes a local step more than the sum of −η times gradients: momentum, or moments of any kind."""
    training, name = experiment.training, experiment.algorithm.name
    problems = []
    if training.optimizer.lower() != "sgd":
        problems.append(
            f"training.optimizer = {training.optimizer!r}: {name!r} compares the gradients of rounds, which only "
            "plain SGD shows; use optimizer = 'sgd'"
        )
    if training.momentum or training.options.get("momentum"):
        momentum = training.momentum or training.options["momentum"]
        problems.append(
            f"training.momentum = {momentum:g}: {name!r} compares the gradients of rounds, which only plain SGD "
            "shows; leave the momentum out"
        )
    return problems


def unbuildable(key: str, topology: Topology, experiment: ExperimentView) -> list[str]:
    """Why an algorithm's own graph cannot be made on these nodes."""
    try:
        topology.build(experiment.nodes, experiment.seed)
    except TopologyError as error:
        return [f"algorithm.{key}: {error}"]
    return []
