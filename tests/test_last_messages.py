"""A node exits when its agent has read its last message, so that no message comes after the report of the exit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from shoal.engines.processes import control, coordinator_link
from shoal.engines.processes.agent import AgentSettings, LocalAgent, Report
from shoal.engines.processes.control_server import ControlMessage
from shoal.engines.processes.coordinator_link import CoordinatorLink
from shoal.engines.processes.zygote_process import ZygoteProcess
from shoal.experiment import ProcessesPlan
from shoal.message import RUN_LENGTH
from shoal.results.records import RunFolder

RUN = "1" * RUN_LENGTH
ENDPOINT = "tcp://127.0.0.1:5000"


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

    def start_node(
        self, *messages: control.FromNode, last: control.NodeExiting | control.NodeFailed
    ) -> threading.Thread:
        """Start a thread that sends what a node sends, and then reports the node's exit."""
        (start,) = self.zygote.requests
        assert isinstance(start, control.StartNodes)

        async def send(context: zmq.Context[Any]) -> None:
            link = CoordinatorLink(context, start.control_endpoint, cast(Any, None))
            for message in messages:
                link.send(message)
            link.close(last)

        def run() -> None:
            with zmq.Context() as context:
                asyncio.run(send(context))
                code = control.EXIT_ERROR if isinstance(last, control.NodeFailed) else 0
                self.zygote.reports.append(control.NodeExited(0, code))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def reports_until_exit(self) -> list[Any]:
        """What the agent reports, up to and including the node's exit; of messages only their content."""
        reports: list[Report] = []
        while not any(isinstance(report, control.NodeExited) for report in reports):
            reports.extend(self.agent.reports())
            time.sleep(0.001)
        return [report.message if isinstance(report, ControlMessage) else report for report in reports]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.close()


def test_all_messages_of_a_node_come_before_its_exit(setting: Setting) -> None:
    messages = [control.NodeListening(0, RUN, ENDPOINT), *(control.ProgressReport(0, k, k) for k in range(5000))]
    node = setting.start_node(*messages, last=control.NodeExiting(0))
    time.sleep(0.3)  # the agent is busy, and has read nothing
    assert setting.reports_until_exit() == [*messages, control.NodeExiting(0), control.NodeExited(0, 0)]
    node.join()


def test_the_reason_of_a_failure_comes_before_the_exit(setting: Setting) -> None:
    failed = control.NodeFailed(0, RUN, "ValueError: the reason")
    node = setting.start_node(last=failed)
    time.sleep(0.3)
    assert setting.reports_until_exit() == [failed, control.NodeExited(0, control.EXIT_ERROR)]
    node.join()


def test_a_node_whose_agent_does_not_respond_exits(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_link, "LAST_MESSAGE_SECONDS", 0.2)
    node = setting.start_node(last=control.NodeExiting(0))
    node.join(timeout=30)
    assert not node.is_alive()
