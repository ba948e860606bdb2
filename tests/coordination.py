"""A fake for the parts of the coordinator: agents that record what they are asked to do and to send."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from shoal.engines.processes import control
from shoal.engines.processes.agent_group import AgentGroup
from shoal.results.records import Event


class FakeAgents:
    """Agents that start nothing, and whose nodes are always connected."""

    def __init__(self) -> None:
        self.requests: list[control.ToAgent] = []
        """All requests but those to pass messages on."""
        self.sent: dict[int, list[control.ToNode]] = {}
        """The messages to each node."""

    def as_group(self) -> AgentGroup:
        return cast(AgentGroup, cast(Any, self))

    def start(self, request: control.StartNodes) -> None:
        self.requests.append(request)

    def kill(self, nodes: Collection[int]) -> None:
        self.requests.append(control.KillNodes(sorted(nodes)))

    def evaluate(self, request: control.EvaluateAverage) -> None:
        self.requests.append(request)

    def record(self, events: Sequence[tuple[int, Event]]) -> None:
        if events:
            self.requests.append(control.RecordEvents(list(events)))

    def send(self, nodes: Collection[int], message: control.ToNode) -> None:
        for node in nodes:
            self.sent.setdefault(node, []).append(message)

    def send_network(self, message: control.ToNode) -> None: ...
