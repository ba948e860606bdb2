"""FedAvg: a server calls some clients, they train, it averages (McMahan et al., AISTATS 2017, arXiv:1602.05629)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from shoal.algorithms.support.server import alive, call, calls, dismiss
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
    """McMahan et al. 2017: each round a server calls a part of the clients, and averages by their sample counts.

    With x the server's model, S the clients drawn and n_k their samples: x ← Σ n_k·train_k(x) / Σ n_k over S. `server`
    puts an optimizer in place of that assignment: FedAvgM (Hsu et al. 2019), FedAdam, FedYogi and FedAdagrad (Reddi et
    al. 2021). FedProx (Li et al. 2020) is `training.proximal`; local epochs are `training.local_epochs`.

    Clients answer by the experiment's sharing. One that dies or keeps silent is passed over, and counts no more in the
    average than if it had not been drawn. At the end all hold the server's model; how clients end without a server is
    said in `shoal.algorithms.support.server.calls`.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    fraction: Annotated[float, Bounds(above=0, at_most=1)] = 1.0
    """Of the clients that are alive: how many are called, one at the least."""
    server: Annotated[ServerOptimizer, Nested("server-optimizer")] = field(default_factory=ServerSGD)

    traits: ClassVar[Traits] = Traits(sends_to="server", needs_only_sum=True, has_service=True)

    async def run(self, node: Node) -> None:
        await node.send([node.server], Payload({}, {SAMPLES: node.samples}), round=0, kind=JOIN)
        async for r in calls(node):
            trained = await node.train(node.params)
            await node.send([node.server], node.sharing.outgoing(trained, r), round=r)

    async def serve(self, node: Node) -> None:
        joined = await node.receive_each(range(node.nodes), round=0, kind=JOIN, timeout=math.inf, check=_counts_samples)
        samples = {client: int(said.fields[SAMPLES]) for client, said in joined.items()}
        async for r in node.rounds(self.rounds):
            drawn = self._draw(node, samples)
            await call(node, drawn, r, _weights(samples, drawn))
            received = await node.receive_each(drawn, round=r)
            if not received:
                node.event("nobody answered", f"round {r}: the model stays as it was")
                continue
            merged = node.sharing.merge(node.params, received, _weights(samples, received))
            node.params = self.server.step(node.params, merged - node.params, node.memory)
        await dismiss(node, self.rounds)

    def _draw(self, node: Node, samples: Mapping[NodeId, int]) -> list[NodeId]:
        clients = [client for client in alive(node) if client in samples]
        count = max(1, round(self.fraction * len(clients)))
        return sorted(node.rng("clients").choice(clients, count, replace=False).tolist()) if clients else []


def _weights(samples: Mapping[NodeId, int], clients: Collection[NodeId]) -> dict[NodeId, float]:
    total = sum(samples[client] for client in clients)
    return {client: samples[client] / total for client in clients}


def _counts_samples(said: Payload) -> None:
    count = said.fields.get(SAMPLES)
    if type(count) is not int or count < 1:
        raise MessageError(f"expected a number of samples, at least 1, not {count!r}")
