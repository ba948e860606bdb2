"""A node's connection to the coordinator, over a real socket."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

import msgspec
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


@pytest.mark.parametrize(
    ("invalid", "error"),
    [
        (control.encode(control.Finish(stopped=True)), pytest.raises(OSError, match="no space left")),
        (b"no message", pytest.raises(msgspec.DecodeError)),
    ],
    ids=["cannot be handled", "cannot be decoded"],
)
def test_a_message_that_causes_an_error_ends_the_node(invalid: bytes, error: AbstractContextManager[Any]) -> None:
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
            for message in (invalid, control.encode(control.SetOnline(online=True))):
                coordinator.send_multipart([identity, message])
            await asyncio.sleep(10)

    try:
        with error:
            asyncio.run(body())
        assert node.online == [True], "later messages are handled"
    finally:
        context.destroy(linger=0)
