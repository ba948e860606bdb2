"""A node's connection to the coordinator, over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.coordinator_link import CoordinatorLink
from shoal.engines.processes.task_scope import TaskScope


class FullDisk:
    """A node that cannot save its model."""

    def __init__(self) -> None:
        self.scope = TaskScope()
        self.online: list[bool] = []

    def peer_failed(self, message: control.PeerFailed) -> None: ...

    def peer_restarted(self, message: control.PeerRestarted) -> None: ...

    def set_online(self, online: bool) -> None:
        self.online.append(online)

    def inject_fault(self, message: control.InjectFault) -> None: ...

    def stop(self, message: control.Finish) -> None:
        raise OSError("no space left on device")

    def fail(self, error: Exception) -> None:
        self.scope.fail(error)


def test_an_error_while_a_message_is_handled_ends_the_node() -> None:
    context: zmq.Context[Any] = zmq.Context()
    coordinator = context.socket(zmq.ROUTER)
    port = coordinator.bind_to_random_port("tcp://127.0.0.1")
    node = FullDisk()

    async def body() -> None:
        async with node.scope:
            link = CoordinatorLink(context, f"tcp://127.0.0.1:{port}", node)
            link.send(control.Heartbeat(0, busy=True))
            identity, _ = await asyncio.to_thread(coordinator.recv_multipart)
            coordinator.send_multipart([identity, control.encode(control.Start([]))])
            await link.started
            link.resume()
            for message in (control.Finish(stopped=True), control.SetOnline(online=True)):
                coordinator.send_multipart([identity, control.encode(message)])
            await asyncio.sleep(10)

    try:
        with pytest.raises(OSError, match="no space left"):
            asyncio.run(body())
        assert node.online == [True], "later messages are handled"
    finally:
        context.destroy(linger=0)
