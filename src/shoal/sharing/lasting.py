"""For sharings that build on what they said before: who listens has to have listened from the first round on."""

from __future__ import annotations

from shoal.components import Whole, find, speaks


def without_lasting_neighbours(whole: Whole, why: str) -> list[str]:
    """What in an experiment makes neighbours come and go, each with the reason `why` this does not do."""
    name = whole.sharing.name
    if (to := speaks(whole.algorithm)) not in ("neighbours", "itself"):
        whom = "a server" if to == "server" else "whom it picks"
        return [
            f"sharing = {name!r}: {why}, and algorithm = {whole.algorithm.name!r} speaks to {whom}; "
            "use algorithm = 'dpsgd' or another sharing"
        ]
    topology = whole.topology
    changes = hasattr(find("topology", topology.name), "finder")
    made_from_labels = hasattr(find("topology", topology.name), "build_from")
    if changes or (not made_from_labels and not topology.build().build(whole.nodes, whole.seed).static):
        return [
            f"sharing = {name!r}: {why}, and topology = {topology.name!r} links others every round; "
            "use a graph that stays as it is, or another sharing"
        ]
    return []
