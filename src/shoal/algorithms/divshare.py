"""DivShare: send a model in fragments, each to peers of its own, while the next one is trained.

Biswas, Kermarrec, Marouani, Pires, Sharma, de Vos: Boosting Asynchronous Decentralized Learning with Model
Fragmentation, WWW 2025 (arXiv:2410.12918).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.algorithms.support.fragments import NUMBER, VALUES, Fragments, cut
from shoal.algorithms.support.send_queue import UNSENT, OutQueue
from shoal.message import Message
from shoal.node import Node
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, NodeId, Params

FRAGMENT = "fragment"
OUTGOING = "outgoing"


@dataclass(frozen=True)
class DivShare:
    """Biswas et al. 2025: train, send each fragment of the model to a few random nodes, average what has come.

    Nobody waits for anybody. The model is cut into ⌊1/`fraction`⌋ fragments (the paper's 1/Ω). When a node has trained,
    it drops what it has not got out yet of its last model, and gives each fragment of the new one to `degree` random
    nodes (the paper's J): ⌈log2 n⌉ when it is not given, and fewer where there are fewer. These leave in random order
    while the node trains on, `streams` at a time. Then it averages, parameter by parameter, its own model and all
    fragments that have come since it last did; of two copies of one sender's fragment, the one of the later round. So a
    node with a slow link gets out a part of each model, and never an old one.

    `peers` is who may be drawn: "all" is any other node, as in the paper, whatever the experiment's topology;
    "neighbours" are those that the topology, or a peer sampler, gives the node in this round.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    fraction: Annotated[float, Bounds(at_least=1e-4, at_most=1)] = 0.1
    degree: Annotated[int, Bounds(at_least=1)] | None = None
    peers: Literal["all", "neighbours"] = "all"
    streams: Annotated[int, Bounds(at_least=1)] = 1

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        fragments = cut(node.context.shapes, self.fragments, node.seed)
        queue = OutQueue(node, FRAGMENT, self.streams)
        _resume(node, fragments, queue)
        async for r in node.rounds(self.rounds):
            trained = await node.train(node.params)
            pairs = self._pairs(node, fragments, await self._candidates(node, r))
            node.memory[OUTGOING] = {"round": r, "params": trained, "pairs": pairs}
            _fill(queue, fragments, trained, pairs, r)
            node.params = fragments.average(trained, _latest(node.collect(kind=FRAGMENT, check=fragments.check)))

    @property
    def fragments(self) -> int:
        """How many fragments a model is cut into."""
        return max(1, int(1 / self.fraction + 1e-9))  # 1/(1/93) is a little less than 93

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        if self.peers == "all" and self.degree is not None and self.degree >= experiment.nodes:
            return [
                f"algorithm.degree = {self.degree}: each of {experiment.nodes} nodes has {experiment.nodes - 1} others "
                "to send a fragment to; use a smaller degree, or leave it out"
            ]
        return []

    async def _candidates(self, node: Node, r: int) -> NDArray[np.int64]:
        """Whom fragments may be sent to in this round."""
        gone = node.failed_peers
        if self.peers == "neighbours":
            return np.array([peer for peer in (await node.peers(r)).to if peer not in gone], np.int64)
        return np.delete(np.arange(node.nodes), [node.id, *(peer for peer in gone if peer < node.nodes)])

    def _pairs(self, node: Node, fragments: Fragments, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of a peer and a fragment that it is sent, in random order: distinct peers for each fragment."""
        rng = node.rng("divshare")
        degree = (node.nodes - 1).bit_length() if self.degree is None else self.degree  # ⌈log2 n⌉
        degree = min(degree, len(candidates))
        filled = [number for number, positions in enumerate(fragments.positions) if positions.size]
        peers = [rng.choice(candidates, degree, replace=False, shuffle=False) for _ in filled]
        pairs = np.stack([np.concatenate(peers), np.repeat(filled, degree)], axis=1)
        return rng.permutation(pairs)


def _fill(queue: OutQueue, fragments: Fragments, trained: Params, pairs: NDArray[np.int64], r: int) -> None:
    said = {number: fragments.payload(trained, number) for number in np.unique(pairs[:, 1]).tolist()}
    queue.refill([(peer, said[number]) for peer, number in pairs.tolist()], r)


def _resume(node: Node, fragments: Fragments, queue: OutQueue) -> None:
    """What the node had not got out when its state was kept, it sends now."""
    if node.memory.get(UNSENT):
        outgoing = node.memory[OUTGOING]
        _fill(queue, fragments, outgoing["params"], outgoing["pairs"][-node.memory[UNSENT] :], outgoing["round"])


def _latest(messages: Iterable[Message]) -> dict[int, list[Params]]:
    """By fragment: the latest values of each sender, in ascending order of fragments and senders."""
    latest: dict[tuple[int, NodeId], Message] = {}
    for message in messages:
        key = int(message.payload.fields[NUMBER]), message.sender
        if key not in latest or message.round >= latest[key].round:  # messages may overtake each other
            latest[key] = message
    received: dict[int, list[Params]] = {}
    for (number, _), message in sorted(latest.items(), key=lambda item: item[0]):
        received.setdefault(number, []).append(message.payload.arrays[VALUES])
    return received
