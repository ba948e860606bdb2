"""When a node trains, sends, receives and averages: one file per algorithm. Start with dpsgd.py.

Two exceptions: `artifact_baselines` has two algorithms, and `overlapped_dpsgd` is `dpsgd` with `overlap = true`. An
algorithm's file shows the update rule of its paper; everything else is in `support`. The package may import the
foundations, `shoal.message`, `shoal.node`, sharings and topologies.
"""

from __future__ import annotations

from typing import Protocol

from shoal.node import Node


class Algorithm(Protocol):
    """The program of a node, as a coroutine. Its options are the parameters of its constructor.

    All nodes of a run execute `run` with the same options; it ends after the node's last round. During every `await`
    other tasks of the node may change `node.params`: add a step to it, never overwrite it with an older result. Do not
    use `time`, `random`, `asyncio` or threads: the node offers a clock, generators and background tasks that work in
    every engine.

    An algorithm may declare `traits: ClassVar[Traits]` (see `shoal.traits.Traits`). Shoal uses them to reject
    experiments that cannot work:
    - `sends_to`: the receivers of its models: "neighbours" (the default), "server" or "anyone";
    - `own_payloads`: its payloads are not models of the sharing: it builds them itself, or they are steps;
    - `needs_only_sum`: it uses only the weighted sum of the received models, so that secure aggregation is possible;
    - `has_service`: it has a method `async def serve(self, node)`, the program of one more node, a server (see
      `shoal.node.ServiceProvider`);
    - `per_node_options`: the options that may differ between nodes.

    An algorithm that does not work with every experiment also has `incompatibilities(experiment)` (see
    `shoal.traits.Constrained`).
    """

    async def run(self, node: Node) -> None: ...


ALGORITHMS: dict[str, str] = {
    "dpsgd": "shoal.algorithms.dpsgd:DPSGD",
    "el-oracle": "shoal.algorithms.el_oracle:ELOracle",
    "el-local": "shoal.algorithms.el_local:ELLocal",
    "gossip": "shoal.algorithms.gossip:Gossip",
    "divshare": "shoal.algorithms.divshare:DivShare",
    "shatter": "shoal.algorithms.shatter:Shatter",
    "adpsgd": "shoal.algorithms.adpsgd:ADPSGD",
    "swift": "shoal.algorithms.swift:SWIFT",
    "adpsgd-artifact": "shoal.algorithms.artifact_baselines:ArtifactADPSGD",
    "swift-artifact": "shoal.algorithms.artifact_baselines:ArtifactSWIFT",
    "ipls": "shoal.algorithms.ipls:IPLS",
    "sgp": "shoal.algorithms.sgp:SGP",
    "relaysum": "shoal.algorithms.relaysum:RelaySum",
    "d2": "shoal.algorithms.d2:D2",
    "gradient-tracking": "shoal.algorithms.gradient_tracking:GradientTracking",
    "k-gt": "shoal.algorithms.k_gt:KGT",
    "qg-dsgdm": "shoal.algorithms.qg_dsgdm:QGDSGDm",
    "muffliato": "shoal.algorithms.muffliato:Muffliato",
    "d-cliques": "shoal.algorithms.d_cliques:DCliquesSGD",
    "fedavg": "shoal.algorithms.fedavg:FedAvg",
    "parameter-server": "shoal.algorithms.parameter_server:ParameterServer",
}

__all__ = ["ALGORITHMS", "Algorithm"]
