"""The baselines of the DivShare artifact: its own variants of AD-PSGD and SWIFT.

Biswas, Kermarrec, Marouani, Pires, Sharma, de Vos: Boosting Asynchronous Decentralized Learning with Model
Fragmentation, WWW 2025 (arXiv:2410.12918). The published times to accuracy compare DivShare with these variants. They
differ from the papers of AD-PSGD and SWIFT (algorithms `adpsgd` and `swift`) in what a node sends and averages, and in
that a node never drops a waiting message: if it trains faster than its link sends, its queue grows without limit, and
the models that it sends are older and older.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.support.send_queue import OrderedSender
from shoal.algorithms.support.vectors import check_vectors
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.traits import Traits
from shoal.types import Bounds, NodeId, Params

REQUEST = "request"
ANSWER = "answer"
MODEL = "artifact model"


@dataclass(frozen=True)
class ArtifactADPSGD:
    """Biswas et al. 2025, AD-PSGD in their artifact: exchange whole models with random nodes; no node waits.

    After training, a node queues ⌊`degree`/2⌋ requests with its new model, to random nodes, with replacement. A node
    that receives a request queues its own model as the answer. Then the node averages its model and the latest model of
    each node from which a request or an answer has arrived since its last average, all with the same weight. The
    exchange is not atomic: the two nodes of an exchange average different models.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    degree: Annotated[int, Bounds(at_least=2)] = 6

    traits: ClassVar[Traits] = Traits(own_payloads=True, checkpoint_cut="time")

    async def run(self, node: Node) -> None:
        sender, rng = OrderedSender(node), node.rng("artifact adpsgd")
        requests: list[Message] = []
        check = partial(check_vectors, size=node.params.size, names=("params",))
        node.background(self._answer(node, sender, requests))
        async for r in node.rounds(self.rounds):
            trained = await node.train(node.params)
            candidates = _others(node)
            for peer in rng.choice(candidates, self.degree // 2).tolist() if len(candidates) else ():
                sender.add(peer, Payload({"params": trained}), r, REQUEST)
            node.params = _average(trained, [*requests, *node.receive_available(kind=ANSWER, check=check)])
            requests.clear()

    async def _answer(self, node: Node, sender: OrderedSender, requests: list[Message]) -> None:
        """Queue an answer to every request, and keep the requests for the next average."""
        check = partial(check_vectors, size=node.params.size, names=("params",))
        while True:
            request = await node.receive(kind=REQUEST, check=check)
            if request is not None:
                requests.append(request)
                sender.add(request.sender, Payload({"params": node.params}), node.next_round, ANSWER)


@dataclass(frozen=True)
class ArtifactSWIFT:
    """Biswas et al. 2025, SWIFT in their artifact: send models to random nodes, average what has arrived; never wait.

    After training, a node queues its model for `degree` distinct random nodes, or for all if there are fewer. Then it
    averages its model and the latest model of each node from which one has arrived since its last average, all with the
    same weight.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    degree: Annotated[int, Bounds(at_least=1)] = 6

    traits: ClassVar[Traits] = Traits(own_payloads=True, checkpoint_cut="time")

    async def run(self, node: Node) -> None:
        sender, rng = OrderedSender(node), node.rng("artifact swift")
        check = partial(check_vectors, size=node.params.size, names=("params",))
        async for r in node.rounds(self.rounds):
            trained = await node.train(node.params)
            candidates = _others(node)
            for peer in rng.choice(candidates, min(self.degree, len(candidates)), replace=False).tolist():
                sender.add(peer, Payload({"params": trained}), r, MODEL)
            node.params = _average(trained, node.receive_available(kind=MODEL, check=check))


def _others(node: Node) -> list[NodeId]:
    """All training nodes except this one that are not known to have failed."""
    failed = node.failed_peers
    return [peer for peer in range(node.nodes) if peer != node.id and peer not in failed]


def _average(own: Params, messages: Iterable[Message]) -> Params:
    """Average the node's model and the latest model of each sender, in ascending order of senders."""
    latest: dict[NodeId, Message] = {}
    for message in messages:
        if message.sender not in latest or message.round >= latest[message.sender].round:
            latest[message.sender] = message
    total = own.astype(np.float64)
    for sender in sorted(latest):
        total += latest[sender].payload.arrays["params"]
    average: Params = (total / (1 + len(latest))).astype(np.float32)
    return average
