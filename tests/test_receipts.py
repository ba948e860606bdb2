"""Receipts: `send_and_wait` returns when the receiver has read the message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq

from local_transports import RUN, eventually, new_message, open_transport
from shoal.engines.processes.transport import NO_ENDPOINT, Transport
from shoal.mailbox import Filter
from shoal.message import Message
from shoal.message import address as envelope
from shoal.runtime import Runtime
from shoal.testing import SocketHarness


@asynccontextmanager
async def transports(**options: Any) -> AsyncIterator[tuple[Transport, Transport, list[Message], list[str]]]:
    """Two transports, of which the first has started; the messages of the second, and why it rejected others."""
    context: zmq.Context[Any] = zmq.Context()
    came: list[Message] = []
    rejected: list[str] = []
    one, other = (
        open_transport(context, id, deliver=came.append, reject=rejected.append, **options) for id in range(2)
    )
    one.start([one.endpoint, other.endpoint])
    try:
        async with asyncio.timeout(60):
            yield one, other, came, rejected
    finally:
        one.close()
        other.close()
        context.destroy(linger=0)


def test_send_and_wait_waits_until_the_peer_has_read_the_message() -> None:
    async def body() -> None:
        async with transports() as (one, other, came, rejected):
            sending = asyncio.create_task(one.send_and_wait(1, new_message(size=1000)))
            await asyncio.sleep(0.2)
            assert not sending.done()
            other.start([one.endpoint, other.endpoint])
            assert await sending
            assert len(came) == 1
            assert one.unsent == 0
            assert not rejected

    asyncio.run(body())


def test_send_and_wait_ends_when_the_peer_fails_or_restarts() -> None:
    async def body() -> None:
        async with transports() as (one, other, _, _):
            for end in (lambda: one.move(1, other.endpoint), lambda: one.mark_failed(1)):
                sending = asyncio.create_task(one.send_and_wait(1, new_message()))
                await asyncio.sleep(0.05)
                assert not sending.done()
                end()
                assert not await sending
            assert not await one.send_and_wait(1, new_message())
            assert one.unsent == 0

    asyncio.run(body())


def test_send_and_wait_times_out_if_the_peer_reads_nothing() -> None:
    async def body() -> None:
        async with transports(send_timeout=0.1) as (one, _, _, _):
            assert not await one.send_and_wait(1, new_message())
            assert one.unsent == 1

    asyncio.run(body())


def test_send_and_wait_waits_longer_for_the_receipt_of_a_large_message() -> None:
    """By its time on the slowest link: 250 kB at 12.5 kB/s."""

    async def body() -> None:
        async with transports(send_timeout=0.05) as (one, other, came, _):
            assert not await one.send_and_wait(1, new_message())
            sending = asyncio.create_task(one.send_and_wait(1, new_message(size=250_000)))
            await asyncio.sleep(0.5)
            other.start([one.endpoint, other.endpoint])
            assert await sending
            assert len(came) == 2
            assert one.unsent == 1

    asyncio.run(body())


def test_a_receipt_that_cannot_be_sent_yet_is_sent_later() -> None:
    async def body() -> None:
        async with transports() as (one, other, came, _):
            other.start([NO_ENDPOINT, other.endpoint])
            sending = asyncio.create_task(one.send_and_wait(1, new_message()))
            await eventually(lambda: came)
            assert len(came) == 1
            assert not sending.done()
            other.move(0, one.endpoint)
            assert await sending

    asyncio.run(body())


def test_a_receipt_of_another_run_is_rejected_and_an_unexpected_receipt_is_ignored() -> None:
    async def body() -> None:
        async with transports() as (one, other, came, rejected):
            other.start([one.endpoint, other.endpoint])
            context: zmq.Context[Any] = zmq.Context()
            other_run = context.socket(zmq.PUSH)
            other_run.connect(other.endpoint)
            other_run.send_multipart([envelope(1, 7), b"another run"])
            other_run.send_multipart([envelope(1, 7)])
            other_run.send_multipart([envelope(1, 7), RUN.encode()])
            other_run.send_multipart([envelope(1), *new_message(1).frames()])
            assert await one.send_and_wait(1, new_message())
            await eventually(
                lambda: len(came) == 2
            )  # the last message of the other socket has arrived, and all before it
            assert {m.sender for m in came} == {0, 1}
            assert len(rejected) == 2
            context.destroy(linger=0)

    asyncio.run(body())


def test_messages_of_send_and_wait_and_send_arrive_once_and_in_order_without_receipts() -> None:
    harness = SocketHarness()

    async def sender(runtime: Runtime) -> list[bool]:
        taken = []
        for round in range(0, 40, 2):
            taken.append(await runtime.send(1, new_message(round=round)))
            taken.append(await runtime.send_and_wait(1, new_message(round=round + 1, size=100_000)))
        await runtime.receive(Filter("end"), 10)
        assert runtime.receive_available("model") == []
        return taken

    async def receiver(runtime: Runtime) -> list[int]:
        came = [m.round for _ in range(40) for m in await runtime.receive(Filter("model"), 10)]
        await runtime.sleep(0.05)
        assert runtime.receive_available("model") == []
        await runtime.send(0, new_message(sender=1, kind="end"))
        return came

    results = harness.run({0: sender, 1: receiver})
    assert results[0] == [True] * 40
    assert results[1] == list(range(40))
    assert harness.rejected == []


def test_send_and_wait_to_a_failed_node_is_false_in_a_harness_too() -> None:
    harness = SocketHarness()

    async def sender(runtime: Runtime) -> list[bool]:
        before = await runtime.send_and_wait(1, new_message())
        harness.mark_failed(1)
        return [before, await runtime.send_and_wait(1, new_message())]

    async def crashes(runtime: Runtime) -> None:
        await runtime.receive(Filter("nothing"))

    assert harness.run({0: sender, 1: crashes})[0] == [True, False]
