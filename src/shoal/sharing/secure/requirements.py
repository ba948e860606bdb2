"""What secure aggregation requires of an experiment."""

from __future__ import annotations

from shoal.compression.floats import Float32
from shoal.sharing.full import FullSharing
from shoal.sharing.random import Random
from shoal.sharing.sharing import CoordinateSelector, Sharing, ValueEncoder
from shoal.topologies.inspection import graph_of
from shoal.traits import ExperimentView

NAME = "sharing = 'secure'"
ROUNDS_CHECKED = 8
"""The rounds of a changing graph that are checked. If no node has two neighbours in any of them, none ever will."""


def incompatibilities(inner: Sharing, single_sender: str, experiment: ExperimentView) -> list[str]:
    return [
        *_inner(inner, experiment),
        *_algorithm(experiment),
        *_topology(single_sender, experiment),
        *_faults(experiment),
    ]


def _inner(inner: Sharing, experiment: ExperimentView) -> list[str]:
    options = experiment.sharing.options.get("inner")
    name = "full" if options is None else options.name
    if not isinstance(inner, FullSharing | CoordinateSelector):
        return [
            f"sharing.inner = {name!r}: masks cancel only in a sum of models, coordinate by coordinate, and this "
            "sharing sends something else; use 'full', 'random' or 'topk'"
        ]
    if isinstance(inner, ValueEncoder) and not isinstance(inner.values, Float32):
        return [
            f"sharing.inner.values: {NAME} encodes values itself, as integers that can be added; remove this option"
        ]
    if isinstance(inner, Random) and not inner.common:
        return [
            "sharing.inner.common = false: all senders of a receiver must send the same coordinates; remove this option"
        ]
    if isinstance(inner, CoordinateSelector) and not inner.common and experiment.algorithm.traits.sends_to == "server":
        return [
            f"sharing.inner = {name!r}: each node requests coordinates from its senders, and a server does not; "
            "use 'full' or 'random'"
        ]
    return []


def _algorithm(experiment: ExperimentView) -> list[str]:
    if experiment.algorithm.traits.needs_only_sum:
        return []
    return [
        f"{NAME}: it gives the weighted sum of all neighbours' models of a round, and algorithm = "
        f"{experiment.algorithm.name!r} needs more; use 'dpsgd', 'el-oracle', 'el-local', 'qg-dsgdm' or 'fedavg'"
    ]


def _faults(experiment: ExperimentView) -> list[str]:
    if not experiment.restarts:
        return []
    return [
        f"{NAME}: a node that rejoins receives an unmasked model from the peer that is furthest ahead; remove "
        "all restarts and joins (faults of kind 'restart' or 'join', and 'until' and 'lasting' of a crash), or use "
        "another sharing"
    ]


def _topology(single_sender: str, experiment: ExperimentView) -> list[str]:
    if experiment.algorithm.traits.own_payloads:
        return []  # rejected for all sharings except "full"
    to = experiment.algorithm.traits.sends_to
    if to == "server":
        fraction = experiment.algorithm.options.get("fraction", 1.0)
        if single_sender == "reject" and max(1, round(fraction * experiment.nodes)) < 2:
            return [
                f"algorithm.fraction = {fraction:g} selects one client, and its model would be visible to the server; "
                f"{NAME} needs at least two, or single_sender = 'unmasked'"
            ]
        return []
    degree = experiment.algorithm.options.get("degree", 2)
    if to == "anyone" and single_sender == "reject" and degree < 2:
        return [
            f"algorithm.degree = {degree}: a node receives one model in a round, and that model would be visible; "
            f"{NAME} needs at least two, or single_sender = 'unmasked'"
        ]
    if to != "neighbours":
        return []
    if experiment.topology.traits.discovers_peers:
        return [
            f"topology = {experiment.topology.name!r}: nodes find their peers with a protocol, so no node knows the "
            f"other senders of its peers, which {NAME} must mask with; use a graph that all nodes compute from the seed"
        ]
    graph = graph_of(experiment)
    if single_sender == "unmasked" or graph is None:
        return []
    rounds = range(1 if graph.static else ROUNDS_CHECKED)
    by_round = [[graph.degree(node, round) for node in range(graph.nodes)] for round in rounds]
    exposed = [node for node, degrees in enumerate(zip(*by_round, strict=True)) if max(degrees) < 2]
    if not exposed or (not graph.static and len(exposed) < graph.nodes):
        return []
    some = ", ".join(map(str, exposed[:5])) + (" …" if len(exposed) > 5 else "")
    return [
        f"topology = {experiment.topology.name!r}: {len(exposed)} nodes ({some}) have fewer than two senders, so a "
        f"model would be visible; {NAME} needs at least two, or single_sender = 'unmasked'"
    ]
