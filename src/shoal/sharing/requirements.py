"""Requirements of sharings that need neighbours, or the same neighbours in every round."""

from __future__ import annotations

from shoal.traits import ExperimentView


def without_neighbours(experiment: ExperimentView, why: str) -> list[str]:
    """List what makes nodes send to other nodes than their neighbours; `why` is the reason that this cannot work.

    Algorithms with their own payloads are rejected elsewhere, for all sharings except "full".
    """
    name = experiment.sharing.name
    traits = experiment.algorithm.traits
    if (to := traits.sends_to) != "neighbours" and not traits.own_payloads:
        receivers = "a server" if to == "server" else "nodes of its own choice"
        return [
            f"sharing = {name!r}: {why}, and algorithm = {experiment.algorithm.name!r} sends to {receivers}; "
            "use algorithm = 'dpsgd' or another sharing"
        ]
    return []


def without_lasting_neighbours(experiment: ExperimentView, why: str) -> list[str]:
    """List what makes neighbours change between rounds; `why` is the reason that this cannot work."""
    if problems := without_neighbours(experiment, why):
        return problems
    name, topology = experiment.sharing.name, experiment.topology
    changes, needs_labels = topology.traits.discovers_peers, topology.traits.needs_labels
    if changes or (not needs_labels and not topology.build().build(experiment.nodes, experiment.seed).static):
        return [
            f"sharing = {name!r}: {why}, and topology = {topology.name!r} changes the links every round; "
            "use a static graph, or another sharing"
        ]
    return []
