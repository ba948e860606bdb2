"""Parameter server: workers push steps, the server applies them, workers pull (Li et al., OSDI 2014)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.server import alive, call, calls, dismiss
from shoal.algorithms.server_optimizers import Average, ServerOptimizer
from shoal.components import Speaks
from shoal.message import Payload
from shoal.node import Node
from shoal.schema import Bounds, Nested
from shoal.topologies.graph import NodeId


@dataclass(frozen=True)
class ParameterServer:
    """Li et al. 2014: workers push the steps of their training, a server applies them, workers pull its model.

    What is pushed is u = train(x) − x; after one local step of plain SGD that is −η times the gradient. The server
    then takes x ← x + ū, or what its optimizer makes of the direction ū:
    - synchronous: ū is the mean of all workers' u, once in a round; the dead and the silent are left out;
    - asynchronous: ū is u/n of n workers alive, at once for each u that comes, and its sender goes on with the new
      model without waiting for the others. So n pushes move the model as far as one synchronous round does; with
      `server.lr` = n each is applied whole.

    A round of an asynchronous worker is an iteration of its own; a round of the server is as many pushes as there are
    nodes. The last ones are empty when workers have died.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    asynchronous: bool = False
    staleness: Annotated[int, Bounds(at_least=0)] | None = None
    """How many iterations the fastest asynchronous worker may be ahead of the slowest before it has to wait: stale
    synchronous parallel (Ho et al. 2013). No limit when not given."""
    server: Annotated[ServerOptimizer, Nested("server-optimizer")] = field(default_factory=Average)

    speaks: ClassVar[Speaks] = "itself"  # a sharing that remembers models would not know what to make of steps

    def __post_init__(self) -> None:
        if self.staleness is not None and not self.asynchronous:
            raise ValueError("staleness is a limit for asynchronous workers: set asynchronous = true, or remove it")

    async def run(self, node: Node) -> None:
        async for r in calls(node):
            step = await node.train(node.params) - node.params
            await node.send([node.server], node.sharing.outgoing(step, r), round=r)

    async def serve(self, node: Node) -> None:
        await (self._asynchronous(node) if self.asynchronous else self._synchronous(node))
        await dismiss(node, self.rounds)

    async def _synchronous(self, node: Node) -> None:
        async for r in node.rounds(self.rounds):
            workers = alive(node)
            await call(node, workers, r)
            pushed = await node.receive_each(workers, round=r)
            if pushed:
                self._apply(node, pushed, 1 / len(pushed))
            else:
                node.event("nobody answered", f"round {r}: the model stays as it was")

    async def _asynchronous(self, node: Node) -> None:
        clocks = dict.fromkeys(range(node.nodes), 0)  # how many steps each worker has pushed
        pulled: dict[NodeId, int] = {}  # of the workers that train: how many steps the model had when they got it
        ages: list[int] = []
        async for _ in node.rounds(self.rounds):
            for _ in range(node.nodes):
                for worker in self._ready(node, clocks, pulled):
                    pulled[worker] = len(ages)
                    await call(node, [worker], clocks[worker])
                push = await node.receive_first(pulled)
                if push is None:
                    _give_up(node, clocks, pulled)
                    continue
                self._apply(node, {push.sender: push.payload}, 1 / max(1, len(alive(node))))
                ages.append(len(ages) - pulled.pop(push.sender))
                clocks[push.sender] += 1
        if ages:
            node.event("staleness", f"steps of others between a pull and its push: mean {np.mean(ages):.3g}, "
                                    f"at most {max(ages)}")  # fmt: skip

    def _ready(self, node: Node, clocks: Mapping[NodeId, int], pulled: Mapping[NodeId, int]) -> list[NodeId]:
        """The workers that may begin another iteration now."""
        living = [worker for worker in alive(node) if worker in clocks]
        slowest = min((clocks[worker] for worker in living), default=0)
        furthest = self.rounds if self.staleness is None else min(self.rounds, slowest + self.staleness + 1)
        return [worker for worker in living if worker not in pulled and clocks[worker] < furthest]

    def _apply(self, node: Node, pushed: Mapping[NodeId, Payload], share: float) -> None:
        direction = node.sharing.merge(np.zeros_like(node.params), pushed, dict.fromkeys(pushed, share))
        node.params = self.server.step(node.params, direction, node.memory)


def _give_up(node: Node, clocks: dict[NodeId, int], pulled: dict[NodeId, int]) -> None:
    """Those that train have died or keep silent: nobody waits for them any longer."""
    silent = [worker for worker in alive(node) if worker in pulled]
    if silent:
        node.event("no answer", f"gave up waiting for {', '.join(map(str, silent))}")
    for worker in pulled:
        del clocks[worker]
    pulled.clear()
