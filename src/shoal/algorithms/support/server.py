"""Rounds that a server starts: it sends its model to clients, they train, and it sends the final model to all.

The server sends its whole model with every sharing: a client that took no part for a while has no earlier model that a
part or a difference could refer to.

A client may take no part in many rounds, so it cannot time out as a receive does. If the experiment sets
`receive_timeout`, a client that received nothing for that time sends the server a probe, and gives it the same time
again to reply.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping

import numpy as np

from shoal.algorithms.support.probes import answer_probes
from shoal.algorithms.support.server_optimizers import ServerOptimizer
from shoal.errors import MessageError
from shoal.message import Message, Payload
from shoal.node import Check, Node
from shoal.sharing.full import FullSharing
from shoal.sharing.sharing import SenderGroup
from shoal.types import NodeId, Params

GLOBAL_MODEL = "global"
FINAL = "last"
PARTICIPANTS, WEIGHT = "company", "weight"
PROBE, PROBE_REPLY = "is the server there", "the server is there"
_WHOLE_MODEL = FullSharing()


def running_clients(node: Node) -> list[NodeId]:
    """The clients that are not known to have failed."""
    failed = node.failed_peers
    return [client for client in range(node.nodes) if client not in failed]


class RoundServer:
    """The server's side: starts rounds, applies steps, and sends the final model."""

    def __init__(self, node: Node) -> None:
        self._node = node
        if node.receive_timeout is not None:
            node.background(answer_probes(node, probe=PROBE, reply=PROBE_REPLY))

    async def start_round(
        self, clients: Iterable[NodeId], round: int, weights: Mapping[NodeId, float] | None = None
    ) -> None:
        """Send the model to `clients`.

        `weights` are those of all participants in the round. An interactive sharing needs them: each client is then
        sent the list of participants and its own weight as well.
        """
        node = self._node
        model = _WHOLE_MODEL.outgoing(node.params, round)
        if weights is None or node.interactive_sharing is None:
            await node.send(clients, model, round=round, kind=GLOBAL_MODEL)
            return
        node.interactive_sharing.set_sender_group(node.id, round, SenderGroup(weights.keys(), weights))
        arrays = Payload({**model.arrays, PARTICIPANTS: np.array(list(weights), np.uint32)}).frozen().arrays

        def payload(client: NodeId) -> Payload:
            return Payload(arrays, {WEIGHT: weights[client]})

        await node.send(clients, payload, round=round, kind=GLOBAL_MODEL)

    def apply_step(self, optimizer: ServerOptimizer, direction: Params, round: int) -> None:
        """Set the model to the optimizer's step along `direction`.

        Clients would reject a model that is not finite, and wait. So such a step is left out, unless the experiment
        keeps values that are not finite.
        """
        node, memory = self._node, dict(self._node.algorithm_state)
        model = optimizer.step(node.params, direction, memory)
        if node.rejects_non_finite and not np.isfinite(model).all():
            node.record_event("values not finite", f"round {round}: the server's step is left out")
            return
        node.params = model
        node.algorithm_state.update(memory)

    async def finish(self, rounds: int) -> None:
        """Send the final model to all clients."""
        final = Payload({"params": self._node.params}, {FINAL: True})
        await self._node.send(running_clients(self._node), final, round=rounds - 1, kind=GLOBAL_MODEL)


async def server_rounds(node: Node) -> AsyncIterator[int]:
    """Iterate over the rounds that the server starts for this client, with `node.params` set to the server's model.

    If several models have arrived, the last counts: a client that is too slow for a round skips it. A model of a round
    that this client has already taken part in, or of an earlier round, is rejected: it is a copy, or was overtaken.

    Ends with the server's final model. If the server fails or times out, it ends with the last model received, which is
    the result of all clients; one more local step would add this client's data alone. Either model is evaluated.
    """
    latest = -1

    def check(payload: Payload) -> None:
        _WHOLE_MODEL.check(payload, node.params)
        _sender_group(payload, node)

    while (message := await _next_model(node, check)) is not None:
        newest: Message | None = None
        while message is not None:
            if message.round > latest or message.payload.fields.get(FINAL) is True:
                newest, latest = message, max(latest, message.round)
            else:
                node.reject(node.server, f"the model of round {message.round}: this node is already in round {latest}")
            message = await node.receive(kind=GLOBAL_MODEL, sender=node.server, timeout=0.0, check=check)
        if newest is None:
            continue
        node.params = newest.payload.arrays["params"]
        if newest.payload.fields.get(FINAL) is True:
            await node.evaluate(newest.round)
            return
        if (group := _sender_group(newest.payload, node)) is not None and node.interactive_sharing is not None:
            node.interactive_sharing.set_sender_group(node.server, latest, group)
        async with node.requested_round(latest):
            yield latest
    kept = f"the model that it received in round {latest}" if latest >= 0 else "its initial model"
    failure = "failed" if node.server in node.failed_peers else "timed out"
    node.record_event("server unreachable", f"node {node.server} {failure}; this node keeps {kept}")
    await node.evaluate(max(0, latest - 1))  # a round starts with the model that the previous round ended with


def _sender_group(payload: Payload, node: Node) -> SenderGroup | None:
    """Return all participants and this node's weight; None if the sharing does not need them. Raises `MessageError`."""
    if node.interactive_sharing is None or payload.fields.get(FINAL) is True:
        return None
    ids, weight = payload.arrays.get(PARTICIPANTS), payload.fields.get(WEIGHT)
    if ids is None or ids.dtype != np.uint32 or ids.ndim != 1 or len(np.unique(ids)) != len(ids):
        raise MessageError(f"expected an array {PARTICIPANTS!r} of distinct node ids")
    if not isinstance(weight, float) or not 0 < weight <= 1:
        raise MessageError(f"expected a field {WEIGHT!r}, the weight of this node, above 0 and at most 1")
    if node.id not in ids or ids.max() >= node.nodes:
        raise MessageError(f"expected this node in {PARTICIPANTS!r}, and only clients")
    return SenderGroup(ids.tolist(), {node.id: weight})


async def _next_model(node: Node, check: Check) -> Message | None:
    """Return the server's next message; None if the server has failed or does not reply to a probe."""
    timeout = math.inf if node.receive_timeout is None else node.receive_timeout
    while True:
        message = await node.receive(kind=GLOBAL_MODEL, sender=node.server, timeout=timeout, check=check)
        if message is not None or node.server in node.failed_peers:
            return message
        await node.send([node.server], Payload({}), round=0, kind=PROBE)
        if await node.receive(kind=PROBE_REPLY, sender=node.server, timeout=timeout) is None:
            return await node.receive(kind=GLOBAL_MODEL, sender=node.server, timeout=0.0, check=check)
