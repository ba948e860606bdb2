"""For sharings that do not go with every way of speaking: those that need neighbours, and those that need the same
neighbours from the first round on, since they build on what they said before."""

from __future__ import annotations

from shoal.traits import ExperimentView


def without_neighbours(experiment: ExperimentView, why: str) -> list[str]:
    """What in an experiment makes nodes speak to others than their neighbours, with the reason `why` this does not do.

    An algorithm that speaks in its own words is refused elsewhere, for all sharings but one.
    """
    name = experiment.sharing.name
    traits = experiment.algorithm.traits
    if (to := traits.sends_to) != "neighbours" and not traits.own_payloads:
        whom = "a server" if to == "server" else "whom it picks"
        return [
            f"sharing = {name!r}: {why}, and algorithm = {experiment.algorithm.name!r} speaks to {whom}; "
            "use algorithm = 'dpsgd' or another sharing"
        ]
    return []


def without_lasting_neighbours(experiment: ExperimentView, why: str) -> list[str]:
    """What in an experiment makes neighbours come and go, each with the reason `why` this does not do."""
    if problems := without_neighbours(experiment, why):
        return problems
    name, topology = experiment.sharing.name, experiment.topology
    changes, needs_labels = topology.traits.discovers_peers, topology.traits.needs_labels
    if changes or (not needs_labels and not topology.build().build(experiment.nodes, experiment.seed).static):
        return [
            f"sharing = {name!r}: {why}, and topology = {topology.name!r} links others every round; "
            "use a graph that stays as it is, or another sharing"
        ]
    return []
