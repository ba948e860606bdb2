"""SWIFT: nodes train at their own pace and average with the last model of each neighbour (arXiv:2210.14026).

Bornstein, Rabbani, Wang, Bedi, Huang: SWIFT: Rapid Decentralized Federated Learning via Wait-Free Model Communication,
ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from shoal.algorithms.support.communication_coefficients import coefficients_of
from shoal.algorithms.support.send_queue import LatestSender
from shoal.algorithms.support.vectors import average, check_vectors
from shoal.message import Payload
from shoal.node import Node
from shoal.topologies.inspection import graph_of, is_directed, is_dynamic
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, NodeId, Params

BROADCAST = "broadcast"


@dataclass(frozen=True)
class SWIFT:
    """Bornstein et al. 2022: send the model to the neighbours, train, average with their last models; never wait.

    In an iteration, with u = train(x_i) − x_i: x_i is sent to all neighbours; then x_i ← w_ii x_i + Σ_j w_ij x̂_j + u,
    where x̂_j is the last model received from j. x̂_j is initialised with the initial model, which is equal on all nodes.
    With `skipped` = s, the paper's C_s, only every (s + 1)-th iteration averages; in the others x_i ← x_i + u.

    The weights are those of the paper's communication coefficient selection, see `support.communication_coefficients`;
    the weights of the experiment are not used. The weight of a failed neighbour is added to w_ii.

    Models are sent in the background. With `queue` = "latest", for each neighbour separately, a waiting model whose
    transmission has not started is replaced by the newer one, so slow links do not send outdated models. With "all",
    every model is passed to the network immediately and is sent after all earlier models. After its last iteration a
    node sends its final model.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    skipped: Annotated[int, Bounds(at_least=0)] = 0
    queue: Literal["latest", "all"] = "latest"

    traits: ClassVar[Traits] = Traits(own_payloads=True, checkpoint_cut="time")

    async def run(self, node: Node) -> None:
        weights = coefficients_of(node.mixing)[node.id]
        neighbours = _NeighbourModels(node, weights)
        sender = LatestSender(node, BROADCAST)
        async for r in node.rounds(self.rounds):
            payload = Payload({"params": node.params})
            if self.queue == "latest":
                sender.send(weights, payload, r)
            else:
                await node.send(weights, payload, round=r, kind=BROADCAST)
            step = await node.train(node.params) - node.params
            neighbours.receive()
            mixed = neighbours.average(node.params) if (r + 1) % (self.skipped + 1) == 0 else node.params
            node.params = mixed + step
        await node.send(weights, Payload({"params": node.params}), round=self.rounds, kind=BROADCAST)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        graph = graph_of(experiment)
        if not is_dynamic(experiment, graph) and not is_directed(graph):
            return []
        return [
            f"topology = {experiment.topology.name!r}: 'swift' keeps the last model of each neighbour and needs an "
            "undirected graph that does not change; use a graph like topology = { name = 'ring' } or "
            "{ name = 'regular' } without dynamic"
        ]


class _NeighbourModels:
    """The last model of each neighbour, kept in `node.algorithm_state`."""

    def __init__(self, node: Node, weights: Mapping[NodeId, float]) -> None:
        self._node = node
        self._weights = weights
        first: Params = node.algorithm_state.setdefault("first", node.params)
        received: dict[str, Any] = node.algorithm_state.setdefault("received", {})
        self._received = received
        """Maps each neighbour's id, as a string, to [round in which the model was sent, model]."""
        for peer in weights:
            received.setdefault(str(peer), [-1, first])

    def receive(self) -> None:
        """Take all models that have arrived."""
        node = self._node
        check = partial(check_vectors, size=node.params.size, names=("params",))
        for message in node.receive_available(kind=BROADCAST, check=check):
            if message.sender not in self._weights:
                node.reject(message.sender, "not a neighbour")
            elif message.round > self._received[str(message.sender)][0]:  # messages may arrive out of order
                self._received[str(message.sender)] = [message.round, message.payload.arrays["params"]]

    def average(self, own: Params) -> Params:
        failed = self._node.failed_peers
        models = {p: self._received[str(p)][1] for p in self._weights if p not in failed}
        return average(own, models, self._weights)
