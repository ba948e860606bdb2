"""DivShare: send a model in fragments, each to different random peers, while the next model is trained.

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
from shoal.algorithms.support.send_queue import UNSENT, SendQueue
from shoal.message import Message
from shoal.node import Node
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, NodeId, Params

FRAGMENT = "fragment"
OUTGOING = "outgoing"


@dataclass(frozen=True)
class DivShare:
    """Biswas et al. 2025: train, send each fragment of the model to a few random nodes, average received fragments.

    No node waits for another. The model is cut into ⌊1/`fraction`⌋ fragments (the paper's 1/Ω). After training, a node
    drops the unsent fragments of its last model, and sends each fragment of the new one to `degree` random nodes (the
    paper's J): by default ⌈log2 n⌉, or fewer if there are fewer. They leave in random order while the node trains
    again, `streams` at a time. Then the node averages, parameter by parameter, its own model and all fragments that
    have arrived since its last average; of two copies of one sender's fragment, that of the later round counts. So a
    node with a slow link sends a part of each model, and never an old one.

    `peers` selects the candidates: "all" is any other node, as in the paper, whatever the experiment's topology;
    "neighbours" are the peers that the topology, or a peer sampler, gives the node in this round.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    fraction: Annotated[float, Bounds(at_least=1e-4, at_most=1)] = 0.1
    degree: Annotated[int, Bounds(at_least=1)] | None = None
    peers: Literal["all", "neighbours"] = "all"
    streams: Annotated[int, Bounds(at_least=1)] = 1

    traits: ClassVar[Traits] = Traits(own_payloads=True, checkpoint_cut="time")

    async def run(self, node: Node) -> None:
        fragments = cut(node.shapes, self.fragments, node.seed)
        queue = SendQueue(node, FRAGMENT, self.streams)
        _resume(node, fragments, queue)
        async for r in node.rounds(self.rounds):
            trained = await node.train(node.params)
            pairs = self._pairs(node, fragments, await self._candidates(node, r))
            node.algorithm_state[OUTGOING] = {"round": r, "params": trained, "pairs": pairs}
            _fill(queue, fragments, trained, pairs, r)
            node.params = fragments.average(
                trained, _latest(node.receive_available(kind=FRAGMENT, check=fragments.check))
            )

    @property
    def fragments(self) -> int:
        """The number of fragments of a model."""
        return max(1, int(1 / self.fraction + 1e-9))  # 1/(1/93) is a little less than 93

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        if self.peers == "all" and self.degree is not None and self.degree >= experiment.nodes:
            return [
                f"algorithm.degree = {self.degree}: each of {experiment.nodes} nodes can send a fragment to at most "
                f"{experiment.nodes - 1} others; use a smaller degree, or remove it"
            ]
        return []

    async def _candidates(self, node: Node, r: int) -> NDArray[np.int64]:
        """The nodes that may be sent fragments in this round."""
        failed = node.failed_peers
        if self.peers == "neighbours":
            return np.array([peer for peer in (await node.peers(r)).receivers if peer not in failed], np.int64)
        return np.delete(np.arange(node.nodes), [node.id, *(peer for peer in failed if peer < node.nodes)])

    def _pairs(self, node: Node, fragments: Fragments, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of a peer and the fragment to send it, in random order, with distinct peers for each fragment."""
        rng = node.rng("divshare")
        degree = (node.nodes - 1).bit_length() if self.degree is None else self.degree  # ⌈log2 n⌉
        degree = min(degree, len(candidates))
        nonempty = [number for number, positions in enumerate(fragments.positions) if positions.size]
        peers = [rng.choice(candidates, degree, replace=False, shuffle=False) for _ in nonempty]
        pairs = np.stack([np.concatenate(peers), np.repeat(nonempty, degree)], axis=1)
        return rng.permutation(pairs)


def _fill(queue: SendQueue, fragments: Fragments, trained: Params, pairs: NDArray[np.int64], r: int) -> None:
    payloads = {number: fragments.payload(trained, number) for number in np.unique(pairs[:, 1]).tolist()}
    queue.refill([(peer, payloads[number]) for peer, number in pairs.tolist()], r)


def _resume(node: Node, fragments: Fragments, queue: SendQueue) -> None:
    """Send the fragments that were unsent when the node's state was saved."""
    if node.algorithm_state.get(UNSENT):
        outgoing = node.algorithm_state[OUTGOING]
        _fill(
            queue, fragments, outgoing["params"], outgoing["pairs"][-node.algorithm_state[UNSENT] :], outgoing["round"]
        )


def _latest(messages: Iterable[Message]) -> dict[int, list[Params]]:
    """The latest values from each sender, by fragment, in ascending order of fragments and senders."""
    latest: dict[tuple[int, NodeId], Message] = {}
    for message in messages:
        key = int(message.payload.fields[NUMBER]), message.sender
        if key not in latest or message.round >= latest[key].round:  # messages may overtake each other
            latest[key] = message
    received: dict[int, list[Params]] = {}
    for (number, _), message in sorted(latest.items(), key=lambda item: item[0]):
        received.setdefault(number, []).append(message.payload.arrays[VALUES])
    return received
