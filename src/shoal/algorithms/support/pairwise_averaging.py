"""Pairwise averaging: two nodes average their models atomically while both go on training.

The active node i sends s = x_i. The passive node j answers with h = (s − x_j)/2 and sets x_j ← x_j + h. When i receives
the answer, it sets x_i ← x_i − h. Steps that either node takes meanwhile commute with both updates, so the result is
that of one atomic average, and the mean of all models is kept except for rounding.

An exchange is identified by its round, because an active node starts one per round, and by the time at which the active
node started (`STARTED`), which distinguishes its exchanges from those before a restart.
"""

from __future__ import annotations

import numpy as np

from shoal.algorithms.support.probes import answer_probes
from shoal.algorithms.support.vectors import check_vectors
from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.types import NodeId

REQUEST, ANSWER, DONE = "average", "half the difference", "done"
PROBE, PROBE_REPLY = "are you there", "here"
STARTED, REJECTED = "since", "refused"
HALF = np.float32(0.5)
WAIT_FACTOR = 0.1
"""A node waits for a peer that did not answer for this fraction of the time that it waited before."""


class ActiveSide:
    """Starts one exchange per round, with a random passive neighbour.

    `timeout` is in seconds; None is the timeout of the experiment or the engine. A request is sent up to `attempts`
    times. A peer that did not answer the last time gets one request, and the node waits for its answer only for a tenth
    of the time that it waited before: an answer that arrives later counts as well.
    """

    def __init__(self, node: Node, passive: tuple[NodeId, ...], *, timeout: float | None, attempts: int) -> None:
        self._node = node
        self._passive = passive
        self._timeout = timeout
        self._attempts = attempts
        self._started = node.now()
        self._pending: set[tuple[NodeId, int]] = set()
        """The peer and round of every exchange without an answer."""
        self._request = Payload({})
        self._unanswered = dict.fromkeys(passive, 0)
        """The number of exchanges in a row that each peer has not answered."""
        self._waits: dict[NodeId, float] = {}
        """Seconds to wait for the next answer of these peers."""
        node.background(answer_probes(node, probe=PROBE, reply=PROBE_REPLY))

    async def start_exchange(self, round: int) -> NodeId | None:
        """Send the model to a random neighbour. Returns None if all have failed.

        A peer is less likely to be chosen the more exchanges it has left unanswered.
        """
        node, failed = self._node, self._node.failed_peers
        candidates = [peer for peer in self._passive if peer not in failed]
        if not candidates:
            return None
        likely = np.array([1 / (1 + self._unanswered[peer]) for peer in candidates])
        peer = candidates[int(node.rng("neighbours").choice(len(candidates), p=likely / likely.sum()))]
        self._pending.add((peer, round))
        self._request = Payload({"params": node.params}, {STARTED: self._started})
        await self._send_request(peer, round)
        return peer

    async def finish_exchange(self, peer: NodeId, round: int) -> None:
        """Wait for the answer of `peer`, and repeat the request after a timeout."""
        attempts = 1 if self._unanswered[peer] else self._attempts
        for attempt in range(1, attempts + 1):
            began = self._node.now()
            if await self._answered(peer, round) or peer in self._node.failed_peers:
                return
            self._waits[peer] = WAIT_FACTOR * (self._node.now() - began)
            if attempt < attempts:
                await self._send_request(peer, round)
        self._unanswered[peer] += 1
        self._node.record_event("timed out", f"round {round}: node {peer} did not answer {attempts} requests")

    def apply_late_answers(self) -> None:
        """Apply answers that arrived after their timeout: the peer has already made its half of the average."""
        for message in self._node.receive_available(kind=ANSWER, finite=False):
            self._apply(message)

    async def announce_end(self, round: int) -> None:
        """Notify the passive neighbours that no more requests follow."""
        await self._node.send(self._passive, Payload({}), round=round, kind=DONE)

    async def _send_request(self, peer: NodeId, round: int) -> None:
        """Send the model as it was when the exchange started."""
        await self._node.send([peer], self._request, round=round, kind=REQUEST)

    async def _answered(self, peer: NodeId, round: int) -> bool:
        """Wait until the exchange is over. Returns False after a timeout, or if the peer failed."""
        node = self._node
        timeout = self._waits[peer] if self._unanswered[peer] else self._timeout
        deadline = None if timeout is None else node.now() + timeout
        while (peer, round) in self._pending:
            left = None if deadline is None else max(0.0, deadline - node.now())
            message = await node.receive(kind=ANSWER, sender=peer, timeout=left, finite=False)
            if message is None:
                return False
            self._apply(message)
        return True

    def _apply(self, message: Message) -> None:
        node = self._node
        if (message.sender, message.round) not in self._pending or message.payload.fields.get(STARTED) != self._started:
            return  # a second answer to a repeated request, an answer from before a restart, or one without a request
        self._pending.remove((message.sender, message.round))
        self._unanswered[message.sender] = 0
        if message.payload.fields.get(REJECTED) is True:
            node.record_event(
                "exchange rejected", f"round {message.round}: node {message.sender} could not use the model"
            )
            return
        try:
            node.check_finite(message)
            check_vectors(message.payload, node.params.size, ("half",))
        except MessageError as error:
            node.reject(message.sender, str(error))
        else:
            node.params = node.params - message.payload.arrays["half"]


class PassiveSide:
    """Answers the requests of the active neighbours at once, in the background.

    `timeout` and `attempts` limit how long `wait_for_active` waits for a neighbour that does not answer probes.
    """

    def __init__(self, node: Node, active: tuple[NodeId, ...], *, timeout: float | None, attempts: int) -> None:
        self._node = node
        self._active = frozenset(active)
        self._timeout = timeout
        self._attempts = attempts
        self._unanswered = dict.fromkeys(active, 0)
        """The active neighbours that have not finished, with the number of probes in a row without a reply."""
        node.background(self._answer_requests())

    async def wait_for_active(self) -> None:
        """Wait until every active neighbour has finished, has failed, or has left `attempts` probes unanswered."""
        node, unanswered, probes = self._node, self._unanswered, 0
        while waiting := [p for p, n in unanswered.items() if n < self._attempts and p not in node.failed_peers]:
            done = await node.receive_first(waiting, kind=DONE, timeout=self._timeout)
            if done is not None:
                del unanswered[done.sender]
                continue
            await node.send(waiting, Payload({}), round=probes, kind=PROBE)
            replies = await node.receive_each(waiting, round=probes, kind=PROBE_REPLY, timeout=self._timeout)
            unanswered.update({peer: 0 if peer in replies else unanswered[peer] + 1 for peer in waiting})
            probes += 1

    async def _answer_requests(self) -> None:
        """Average once per exchange. A repeated request gets the same answer again."""
        node = self._node
        last: dict[NodeId, tuple[object, int, Payload]] = {}
        while (request := await node.receive(kind=REQUEST, finite=False)) is not None:
            peer, round, started = request.sender, request.round, request.payload.fields.get(STARTED)
            if peer not in self._active:
                node.reject(request.sender, "not an active neighbour")
                continue
            last_started, last_round, answer = last.get(peer, (started, -1, Payload({})))
            if started == last_started and round < last_round:
                continue  # a delayed copy: the peer is in a later round
            if started != last_started or round > last_round:
                answer = self._average(request)
                if started is not None:
                    answer = answer.with_field(STARTED, started)
                last[peer] = started, round, answer
            await node.send([peer], answer, round=round, kind=ANSWER)

    def _average(self, request: Message) -> Payload:
        """Move the model half of the way to the peer's. Returns the distance for the peer to move by."""
        node = self._node
        try:
            node.check_finite(request)
            check_vectors(request.payload, node.params.size, ("params",))
        except MessageError as error:
            node.reject(request.sender, str(error))
            return Payload({}, {REJECTED: True})
        half = request.payload.arrays["params"] * HALF - node.params * HALF  # in this order nothing overflows
        if node.rejects_non_finite and not np.isfinite(half).all():
            return Payload({}, {REJECTED: True})  # this node's model has diverged and must not spread
        node.params = node.params + half
        return Payload({"half": half})
