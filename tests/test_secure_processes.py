"""The key exchange of secure aggregation with the timeouts of processes."""

from __future__ import annotations

from typing import Any, cast

import pytest

import leaping
from shoal.engines.processes.runtime import ProcessRuntime, RuntimeSettings
from shoal.engines.processes.slots import Slots
from shoal.engines.processes.transport import Transport
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.mailbox import Mailbox
from shoal.message import RUN_LENGTH, Message
from shoal.results.records import Event, Record
from shoal.sharing.secure.key_exchange import KeyExchange

TIMEOUT = 7.0


class Unanswered:
    """A transport whose peers receive everything and answer nothing."""

    async def send(self, to: int, message: Message) -> bool:
        return True


class Records:
    """Keeps the events that a node records."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, record: Record) -> None:
        assert isinstance(record, Event)
        self.events.append(record)


@pytest.mark.parametrize(("receive_timeout", "waited"), [(None, TIMEOUT), (3.0, 3.0)], ids=["default", "given"])
def test_keys_that_are_lost_are_waited_for_once_for_all_partners_together(
    receive_timeout: float | None, waited: float
) -> None:
    setup = Setup(Experiment(nodes=4, topology={"name": "full"}, sharing={"name": "secure"}))
    records = Records()

    async def body() -> tuple[float, float]:
        transport, settings = cast(Transport, Unanswered()), RuntimeSettings(min_peer_timeout=TIMEOUT)
        async with ProcessRuntime(0, transport, Mailbox(), Slots(), settings) as runtime:
            node = setup.node(0, runtime, cast(Any, records), "0" * RUN_LENGTH, receive_timeout)
            exchange = KeyExchange()
            await exchange.run(node, {1, 2, 3})
            first = runtime.now()
            await exchange.run(node, {1, 2, 3})
            return first, runtime.now()

    assert leaping.run(body()) == pytest.approx((waited, waited)), "one timeout for all three, and none later"
    assert [(event.what, event.time) for event in records.events] == [("key timed out", pytest.approx(waited))] * 3
