"""FedAvg: a server samples clients, they train, it averages (McMahan et al., AISTATS 2017, arXiv:1602.05629)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from shoal.algorithms.support.server import RoundServer, running_clients, server_rounds
from shoal.algorithms.support.server_optimizers import ServerOptimizer, ServerSGD
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.traits import Traits
from shoal.types import Bounds, Nested, NodeId

JOIN = "join"
SAMPLES = "samples"


@dataclass(frozen=True)
class FedAvg:
    """McMahan et al. 2017: in each round a server samples a part of the clients and averages by their sample counts.

    With x the server's model, S the sampled clients and n_k their samples: x ← Σ n_k·train_k(x) / Σ n_k over S; with
    `weights` = "equal" all n_k count as 1.
    `server` replaces that assignment by an optimizer: FedAvgM (Hsu et al. 2019), FedAdam, FedYogi and FedAdagrad (Reddi
    et al. 2021). FedProx (Li et al. 2020) is `training.proximal`; local epochs are `training.local_epochs`. Clients are
    stateless: each round starts with a new optimizer, without momentum from earlier rounds, unless
    `training.keep_state` is true.

    Clients send their models by the experiment's sharing. A client that fails or times out is left out of the average,
    as if it had not been sampled. At the end all clients hold the server's model. If the server fails, clients end as
    described in `shoal.algorithms.support.server.server_rounds`.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    fraction: Annotated[float, Bounds(above=0, at_most=1)] = 1.0
    """The fraction of the running clients to sample in a round; at least one client is sampled."""
    server: Annotated[ServerOptimizer, Nested("server-optimizer")] = field(default_factory=ServerSGD)
    weights: Literal["samples", "equal"] = "samples"

    traits: ClassVar[Traits] = Traits(sends_to="server", needs_only_sum=True, has_service=True, stateless_nodes=True)

    async def run(self, node: Node) -> None:
        if not node.algorithm_state.get(JOIN):
            await node.send([node.server], Payload({}, {SAMPLES: node.samples}), round=0, kind=JOIN)
            # A checkpoint contains no messages. The server has the JOIN of a late client when it sends its model.
            node.algorithm_state[JOIN] = not node.context.late
        async for r in server_rounds(node):
            node.algorithm_state[JOIN] = True
            trained = await node.train(node.params)
            await node.send([node.server], node.sharing.outgoing(trained, r), round=r)

    async def serve(self, node: Node) -> None:
        await self._wait_for_clients(node)
        server = RoundServer(node)
        async for r in node.rounds(self.rounds):
            samples = self._joined_clients(node)
            clients = self._sample(node, samples)
            await server.start_round(clients, r, _weights(samples, clients))
            received = await node.receive_each(clients, round=r)
            if not received:
                node.record_event("no updates", f"round {r}: no client answered; the model is unchanged")
                continue
            merged = node.sharing.merge(node.params, received, _weights(samples, received))
            server.apply_step(self.server, merged - node.params, r)
        await server.finish(self.rounds)

    async def _wait_for_clients(self, node: Node) -> None:
        """Wait until all clients that are there at the start have joined."""
        if SAMPLES not in node.algorithm_state:
            joins = await node.receive_each(
                range(node.nodes), round=0, kind=JOIN, timeout=math.inf, check=_check_samples
            )
            node.algorithm_state[SAMPLES] = [[client, payload.fields[SAMPLES]] for client, payload in joins.items()]

    def _joined_clients(self, node: Node) -> dict[NodeId, int]:
        """How much each client that has joined so far counts in the average."""
        counts = dict(node.algorithm_state[SAMPLES])
        if late := node.receive_available(kind=JOIN, check=_check_samples):
            counts |= {message.sender: message.payload.fields[SAMPLES] for message in late}
            node.algorithm_state[SAMPLES] = [[client, count] for client, count in sorted(counts.items())]
        return counts if self.weights == "samples" else dict.fromkeys(counts, 1)

    def _sample(self, node: Node, samples: Mapping[NodeId, int]) -> list[NodeId]:
        clients = [client for client in running_clients(node) if client in samples]
        count = max(1, round(self.fraction * len(clients)))
        return sorted(node.rng("clients").choice(clients, count, replace=False).tolist()) if clients else []


def _weights(samples: Mapping[NodeId, int], clients: Collection[NodeId]) -> dict[NodeId, float]:
    total = sum(samples[client] for client in clients)
    return {client: samples[client] / total for client in clients}


def _check_samples(payload: Payload) -> None:
    count = payload.fields.get(SAMPLES)
    if type(count) is not int or count < 1:
        raise MessageError(f"{SAMPLES} = {count!r}: expected an integer, at least 1")
