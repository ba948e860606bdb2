"""An agent reports why a node failed, also if the node's exit is known before its last message arrives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.agent import REASON_SECONDS, AgentSettings, LocalAgent
from shoal.engines.processes.control_server import ControlMessage
from shoal.engines.processes.zygote_process import ZygoteProcess
from shoal.experiment import ProcessesPlan
from shoal.message import RUN_LENGTH
from shoal.results.records import RunFolder

RUN = "1" * RUN_LENGTH


class StandInZygote:
    """Starts no process. Its reports are those of the test."""

    has_unsent = False

    def __init__(self) -> None:
        self.requests: list[control.ToZygote] = []
        self.reports: deque[control.FromZygote] = deque()

    def begin(self, folder: RunFolder) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def send(self, request: control.ToZygote) -> None:
        self.requests.append(request)

    def has_report(self) -> bool:
        return bool(self.reports)

    def receive(self) -> control.FromZygote:
        return self.reports.popleft()


class Setting:
    """An agent with one node."""

    def __init__(self, folder: Path) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.zygote = StandInZygote()
        settings = AgentSettings(RUN, ProcessesPlan(), nodes=1, sealed=False)
        folder_of_run = RunFolder.create(folder, "run")
        self.agent = LocalAgent(self._context, folder_of_run, settings, cast(ZygoteProcess, self.zygote))
        self.agent.send(control.StartNodes([0], RUN, training_nodes=1))

    def fail_after(self, seconds: float) -> threading.Thread:
        """Send the reason of the node's failure after some time."""
        (start,) = self.zygote.requests
        assert isinstance(start, control.StartNodes)

        def send() -> None:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.connect(start.control_endpoint)
                time.sleep(seconds)
                socket.send(control.encode(control.NodeFailed(0, RUN, "ValueError: the reason")))

        thread = threading.Thread(target=send)
        thread.start()
        return thread

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.close()


def described(reports: list[Any]) -> list[type]:
    return [type(r.message if isinstance(r, ControlMessage) else r) for r in reports]


def test_the_reason_of_a_failure_comes_before_the_exit(setting: Setting) -> None:
    sender = setting.fail_after(0.3)
    setting.zygote.reports.append(control.NodeExited(0, control.EXIT_ERROR))
    assert described(list(setting.agent.reports())) == [control.NodeFailed, control.NodeExited]
    sender.join()


def test_a_node_that_sends_no_reason_delays_others_only_for_a_short_time(setting: Setting) -> None:
    setting.zygote.reports.append(control.NodeExited(0, control.EXIT_ERROR))
    began = time.monotonic()
    assert described(list(setting.agent.reports())) == [control.NodeExited]
    assert REASON_SECONDS - 0.1 < time.monotonic() - began < REASON_SECONDS + 5


@pytest.mark.parametrize("code", [0, -9])
def test_a_node_that_ended_well_or_was_killed_sends_no_reason(setting: Setting, code: int) -> None:
    setting.zygote.reports.append(control.NodeExited(0, code))
    began = time.monotonic()
    assert described(list(setting.agent.reports())) == [control.NodeExited]
    assert time.monotonic() - began < REASON_SECONDS / 2
