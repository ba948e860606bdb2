"""Who speaks when: one algorithm, one file. Start at dpsgd.py."""

from __future__ import annotations

from typing import Protocol

from shoal.node import Node


class Algorithm(Protocol):
    """What a node does, as a coroutine. Its parameters are those of its constructor.

    Every `await` is a window in which other tasks of the node may change `node.params`. No `time`, `random`,
    `asyncio` or threads in here: the node offers a clock, generators and background tasks that work in every engine.

    An algorithm may also have
    - `async def serve(self, node)`: the life of one more node, a server (see `shoal.node.ServiceProvider`);
    - `speaks`, one of `Speaks`: to whom, and whether by `node.sharing`. It tells which sharings go
      with the algorithm; "neighbours" when it is not said;
    - `incompatibilities(whole)`: what it cannot work with (see `shoal.traits.Constrained`).
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
    "ipls": "shoal.algorithms.ipls:IPLS",
    "sgp": "shoal.algorithms.sgp:SGP",
    "relaysum": "shoal.algorithms.relaysum:RelaySum",
    "d2": "shoal.algorithms.d2:D2",
    "gradient-tracking": "shoal.algorithms.gradient_tracking:GradientTracking",
    "qg-dsgdm": "shoal.algorithms.qg_dsgdm:QGDSGDm",
    "muffliato": "shoal.algorithms.muffliato:Muffliato",
    "d-cliques": "shoal.algorithms.d_cliques:DCliquesSGD",
    "fedavg": "shoal.algorithms.fedavg:FedAvg",
    "parameter-server": "shoal.algorithms.parameter_server:ParameterServer",
}

__all__ = ["ALGORITHMS", "Algorithm", "Node", "Protocol"]
