"""Parameter server: workers push steps, the server applies them, workers pull (Li et al., OSDI 2014)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.support.async_workers import AsyncWorkers
from shoal.algorithms.support.server import RoundServer, running_clients, server_rounds
from shoal.algorithms.support.server_optimizers import ServerOptimizer, ServerSGD
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.traits import Traits
from shoal.types import Bounds, Nested, NodeId, Params


@dataclass(frozen=True)
class ParameterServer:
    """Li et al. 2014: workers push the steps of their training, a server applies them, workers pull its model.

    A worker pushes u = train(x) − x, which is −η times the gradient for one local step of plain SGD. The server sets
    x ← x + ū, or applies its optimizer to the direction ū:
    - synchronous: ū is the mean of all workers' u, once per round, without workers that failed or timed out;
    - asynchronous: ū is u/n for n running workers, applied to each u as it arrives; its sender continues with the new
      model and does not wait for the others. So n pushes move the model as far as one synchronous round does. With
      `server.lr` = n each step is applied in full.

    A step that is not finite is left out, unless the experiment keeps such values; its worker continues.

    A round of an asynchronous worker is an iteration of its own. A round of the server has as many pushes as there are
    nodes; if workers have failed, the last rounds have fewer pushes or none.

    If an asynchronous server receives no push within the timeout, it goes on waiting, but workers that timed out no
    longer hold back the fastest. After ten timeouts in a row it abandons the workers that train. It ends early if no
    worker remains. See `support.async_workers`.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    asynchronous: bool = False
    staleness: Annotated[int, Bounds(at_least=0)] | None = None
    """The number of iterations that the fastest asynchronous worker may be ahead of the slowest before it has to wait:
    stale synchronous parallel (Ho et al. 2013). No limit by default."""
    server: Annotated[ServerOptimizer, Nested("server-optimizer")] = field(default_factory=ServerSGD)

    # Payloads are steps, not models: a sharing that keeps earlier models cannot use them.
    traits: ClassVar[Traits] = Traits(own_payloads=True, has_service=True)

    def __post_init__(self) -> None:
        if self.staleness is not None and not self.asynchronous:
            raise ValueError("staleness is a limit for asynchronous workers: set asynchronous = true, or remove it")
        if self.asynchronous:
            object.__setattr__(self, "traits", replace(self.traits, checkpoint_cut="time"))

    async def run(self, node: Node) -> None:
        async for r in server_rounds(node):
            step = await node.train(node.params) - node.params
            await node.send([node.server], node.sharing.outgoing(step, r), round=r)

    async def serve(self, node: Node) -> None:
        server = RoundServer(node)
        await (self._serve_asynchronously(node, server) if self.asynchronous else self._serve_in_rounds(node, server))
        await server.finish(self.rounds)

    async def _serve_in_rounds(self, node: Node, server: RoundServer) -> None:
        async for r in node.rounds(self.rounds):
            workers = running_clients(node)
            await server.start_round(workers, r)
            pushed = await node.receive_each(workers, round=r)
            if pushed:
                server.apply_step(self.server, _direction(node, pushed, 1 / len(pushed)), r)
            else:
                node.record_event("no updates", f"round {r}: no worker answered; the model is unchanged")

    async def _serve_asynchronously(self, node: Node, server: RoundServer) -> None:
        workers = AsyncWorkers(node, server, rounds=self.rounds, max_lead=self.staleness)
        async for r in node.rounds(self.rounds):
            for _ in range(node.nodes):
                push = await workers.next_push()
                if push is None:
                    continue
                try:
                    node.check_finite(push)
                except MessageError as error:
                    node.reject(push.sender, str(error))
                else:
                    weight = 1 / max(1, len(running_clients(node)))
                    server.apply_step(self.server, _direction(node, {push.sender: push.payload}, weight), r)
                workers.record_push(push.sender)
            if not workers.remaining():
                node.record_event(
                    "no workers left", f"round {r}: all workers failed or were abandoned; the server ends"
                )
                await node.evaluate(r)
                break
        workers.report_staleness()


def _direction(node: Node, pushed: Mapping[NodeId, Payload], weight: float) -> Params:
    """Return the sum of the pushed steps, each with the same weight."""
    return node.sharing.merge(np.zeros_like(node.params), pushed, dict.fromkeys(pushed, weight))
