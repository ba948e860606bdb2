"""Requirements of sharings that need neighbours, or the same neighbours in every round."""

from __future__ import annotations

from shoal.topologies.inspection import graph_of, is_dynamic
from shoal.traits import ExperimentView


def requires_neighbours(experiment: ExperimentView, why: str) -> list[str]:
    """Reject algorithms that send to other nodes than the neighbours; `why` is the reason that this cannot work.

    Algorithms with their own payloads are rejected elsewhere, for all sharings except "full".
    """
    traits = experiment.algorithm.traits
    if (to := traits.sends_to) != "neighbours" and not traits.own_payloads:
        receivers = "a server" if to == "server" else "nodes that it chooses, not to all neighbours"
        return [
            f"sharing = {experiment.sharing.name!r}: {why}, and algorithm = {experiment.algorithm.name!r} sends to "
            f"{receivers}; use algorithm = 'dpsgd' or another sharing"
        ]
    return []


def requires_static_neighbours(experiment: ExperimentView, why: str) -> list[str]:
    """Reject neighbours that change between rounds as well; `why` is the reason that this cannot work."""
    if problems := requires_neighbours(experiment, why):
        return problems
    if is_dynamic(experiment, graph_of(experiment)):
        return [
            f"sharing = {experiment.sharing.name!r}: {why}, and topology = {experiment.topology.name!r} changes the "
            "links every round; use a static graph, or another sharing"
        ]
    return []
