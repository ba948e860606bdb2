"""Training slots under stopped and killed processes, with real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import until
from shoal.engines.processes.slots import Slots
from shoal.experiment import Experiment
from shoal.results.records import Event


class Children:
    """Forked processes that share slots, as nodes do."""

    def __init__(self) -> None:
        self._running: set[int] = set()

    def fork(self, body: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                body()
            finally:
                os._exit(0)
        self._running.add(pid)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def wait(self, pid: int) -> None:
        os.waitpid(pid, 0)
        self._running.discard(pid)

    def ended(self, pid: int) -> bool:
        if pid in self._running and os.waitpid(pid, os.WNOHANG)[0] == pid:
            self._running.discard(pid)
        return pid not in self._running

    def end(self) -> None:
        for pid in list(self._running):
            self.kill(pid)


@pytest.fixture
def children() -> Iterator[Children]:
    children = Children()
    yield children
    children.end()


class Signal:
    """A pipe on which forked processes report."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._count = 0

    def send(self) -> None:
        os.write(self._write, b".")

    @property
    def count(self) -> int:
        with suppress(BlockingIOError):  # nothing new
            while True:
                self._count += len(os.read(self._read, 4096))
        return self._count


def hold(slots: Slots, taken: Signal) -> Callable[[], None]:
    def body() -> None:
        with slots.taken():
            taken.send()
            time.sleep(600)

    return body


def take_often(slots: Slots, times: int, taken: Signal) -> Callable[[], None]:
    def body() -> None:
        for _ in range(times):
            with slots.taken():
                taken.send()

    return body


def test_a_node_that_waits_gets_whichever_slot_is_free(children: Children) -> None:
    slots, held, taken = Slots(2), Signal(), Signal()
    holder = children.fork(hold(slots, held))
    until(lambda: held.count == 1)
    os.kill(holder, signal.SIGSTOP)
    others = [children.fork(take_often(slots, 20, taken)) for _ in range(5)]
    until(lambda: all(children.ended(pid) for pid in others))
    assert taken.count == 100


def test_no_more_nodes_hold_a_slot_than_there_are(children: Children) -> None:
    slots, held = Slots(2), Signal()
    for _ in range(4):
        children.fork(hold(slots, held))
    until(lambda: held.count == 2)
    time.sleep(0.2)
    assert held.count == 2


def test_the_slot_of_a_killed_node_is_restored(children: Children) -> None:
    slots, held, taken = Slots(1), Signal(), Signal()
    holder = children.fork(hold(slots, held))
    until(lambda: held.count == 1)
    waiting = children.fork(take_often(slots, 1, taken))
    children.kill(holder)
    time.sleep(0.1)
    assert not children.ended(waiting), "nothing has put the slot back yet"
    slots.restore_lost()
    until(lambda: children.ended(waiting))
    assert taken.count == 1


def test_restoring_adds_no_slot(children: Children) -> None:
    slots, held, seen = Slots(3), Signal(), Signal()
    children.fork(hold(slots, held))
    until(lambda: held.count == 1)
    busy = [children.fork(take_often(slots, 2000, seen)) for _ in range(3)]
    while not all(children.ended(pid) for pid in busy):
        slots.restore_lost()
    for _ in range(4):
        children.fork(hold(slots, held))
    until(lambda: held.count == 3)
    time.sleep(0.2)
    assert held.count == 3


def test_killing_nodes_at_any_moment_loses_no_slot(children: Children) -> None:
    slots, taken, held = Slots(2), Signal(), Signal()
    for delay in range(40):
        pid = children.fork(take_often(slots, 10**9, taken))
        time.sleep(0.001 + delay * 2e-5)
        children.kill(pid)
        slots.restore_lost()
    for _ in range(3):
        children.fork(hold(slots, held))
    until(lambda: held.count == 2)
    time.sleep(0.2)
    assert held.count == 2


SLOW_TRAINING = """
import time

class Slow:
    async def run(self, node):
        learn = node.trainer.train

        def learn_slowly(params, steps=None):
            time.sleep(0.5)
            return learn(params, steps)

        node.trainer.train = learn_slowly
        async for r in node.rounds(1):
            node.params = await node.train(node.params)
            node.record_event("peer timeout", f"{node.runtime.peer_timeout()}")
"""


@pytest.mark.usefixtures("no_process_is_left")
def test_nodes_wait_for_peers_as_long_as_all_trainings_of_a_slot_may_take(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TRAINING)
    described = Experiment(
        nodes=4,
        engine="processes",
        algorithm={"name": f"{tmp_path / 'slow.py'}:Slow"},
        model={"name": "logistic"},
        training={"batch_size": 8, "local_steps": 1},
        evaluation={"every": 0, "average": False},
        processes={"training_slots": 1},
    )
    folder = described.run(tmp_path).folder
    found = [float(r.detail) for _, r in folder.read_all() if isinstance(r, Event) and r.what == "peer timeout"]
    assert len(found) == 4
    assert min(found) >= 60 + 5 * 0.5 * 4, "four nodes train one after another, each for half a second"
