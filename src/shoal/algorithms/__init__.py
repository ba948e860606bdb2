"""Who speaks when: one algorithm, one file. Start at dpsgd.py."""

from __future__ import annotations

from typing import Protocol

from shoal.node import Node


class Algorithm(Protocol):
    """What a node does, as a coroutine. Its parameters are those of its constructor.

    Every `await` is a window in which other tasks of the node may change `node.params`. No `time`, `random`,
    `asyncio` or threads in here: the node offers a clock, generators and background tasks that work in every engine.
    """

    async def run(self, node: Node) -> None: ...


ALGORITHMS: dict[str, str] = {
    "dpsgd": "shoal.algorithms.dpsgd:DPSGD",
}

__all__ = ["ALGORITHMS", "Algorithm"]
