"""What a node rejects from an algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.errors import NodeError
from shoal.testing import FakeRuntime


def test_an_assignment_without_await_is_rejected() -> None:
    async def train() -> Any: ...

    node = FakeRuntime().node(0, nodes=2, params=np.zeros(2, np.float32))
    forgotten = train()
    with pytest.raises(NodeError, match="node 0: params is a coroutine; write 'await' before the call"):
        node.params = forgotten  # type: ignore[assignment]
    forgotten.close()
