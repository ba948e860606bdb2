"""Run coroutines on a few connected runtimes, for tests of runtimes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from shoal.environment.network.model import NetworkModel
from shoal.environment.network.network import Network
from shoal.mailbox import Mailbox
from shoal.message import RUN_LENGTH
from shoal.runtime import Runtime
from shoal.types import NodeId

if TYPE_CHECKING:  # the engines import torch, which a test of a topology does not need
    from shoal.engines.processes.transport import Transport
    from shoal.engines.simulation.world import World

Body: TypeAlias = Callable[[Runtime], Coroutine[Any, Any, Any]]
"""The coroutine that a node runs on its runtime."""


class RuntimeHarness(Protocol):
    """A set of connected nodes, created for each `run`."""

    def run(self, bodies: Mapping[NodeId, Body]) -> dict[NodeId, Any]:
        """Run nodes 0, 1, … to the end. Return the result of each body, without failed nodes.

        An exception in a body or in one of its background tasks ends the run and is raised here.
        """
        ...

    def mark_failed(self, node: NodeId) -> None:
        """Fail `node` now and inform all others; bodies call this. The node must be waiting for a message."""
        ...


class SimulationHarness:
    """Runtimes of the simulation, under a virtual clock. `network` None is an ideal network."""

    def __init__(self, network: Network | None = None) -> None:
        self._network = network
        self._world: World | None = None

    def run(self, bodies: Mapping[NodeId, Body]) -> dict[NodeId, Any]:
        from shoal.engines.simulation.world import World

        nodes = len(bodies)
        timeline = None if self._network is None else self._network.build(nodes, seed=0)
        world = self._world = World(
            nodes, None if timeline is None else NetworkModel(timeline.initial_state, nodes, seed=0)
        )
        results: dict[NodeId, Any] = {}

        async def main(id: NodeId) -> None:
            results[id] = await bodies[id](world.runtimes[id])

        for id in range(nodes):
            world.runtimes[id].start(main(id))
        world.kernel.run()
        world.raise_if_deadlocked()
        return results

    def mark_failed(self, node: NodeId) -> None:
        assert self._world is not None
        self._world.mark_failed(node)


class SocketHarness:
    """Runtimes of the process engine: real time and TCP on this machine, but all in one process.

    Nodes that are not done after `timeout` seconds are an error.
    """

    def __init__(self, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self.rejected: list[str] = []
        """Why messages were rejected."""
        self.endpoints: list[str] = []
        """The endpoint of each node of the run."""
        self._ends: list[tuple[Transport, Mailbox]] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def run(self, bodies: Mapping[NodeId, Body]) -> dict[NodeId, Any]:
        return asyncio.run(self._run(bodies))

    def mark_failed(self, node: NodeId) -> None:
        self._tasks[node].cancel()
        for other, (transport, mailbox) in enumerate(self._ends):
            if other != node:
                mailbox.mark_failed(node)
                transport.mark_failed(node)

    async def _run(self, bodies: Mapping[NodeId, Body]) -> dict[NodeId, Any]:
        import zmq

        from shoal.engines.processes.runtime import ProcessRuntime
        from shoal.engines.processes.slots import Slots

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ends = [self._connect(context, id) for id in range(len(bodies))]
        self.endpoints = [transport.endpoint for transport, _ in self._ends]
        for transport, _ in self._ends:
            transport.start(self.endpoints)
        slots = Slots(len(bodies))

        async def run_body(id: NodeId) -> Any:
            async with ProcessRuntime(id, *self._ends[id], slots) as runtime:
                return await bodies[id](runtime)

        self._tasks = [asyncio.create_task(run_body(id)) for id in range(len(bodies))]
        try:
            _, waiting = await asyncio.wait(self._tasks, timeout=self.timeout, return_when=asyncio.FIRST_EXCEPTION)
            failures = [t.exception() for t in self._tasks if t.done() and not t.cancelled() and t.exception()]
            if failures:
                raise failures[0]  # type: ignore[misc]
            if waiting:
                waiting_ids = [str(id) for id, task in enumerate(self._tasks) if task in waiting]
                raise TimeoutError(f"after {self.timeout:g} s, these nodes are not done: {', '.join(waiting_ids)}")
            return {id: task.result() for id, task in enumerate(self._tasks) if not task.cancelled()}
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for transport, _ in self._ends:
                transport.close()
            context.destroy(linger=0)

    def _connect(self, context: Any, id: NodeId) -> tuple[Transport, Mailbox]:
        from shoal.engines.processes.transport import Transport, TransportSettings

        mailbox = Mailbox()
        settings = TransportSettings(
            run="0" * RUN_LENGTH,
            host="127.0.0.1",
            max_message_bytes=2**24,
            connections=64,
            send_timeout=self.timeout,
        )
        return Transport(context, id, settings, deliver=mailbox.put, reject=self.rejected.append), mailbox
