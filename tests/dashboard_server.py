"""The server of the page in a thread, on a real port, for tests."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from shoal.dashboard.serving import bind, create_server

CLIENT = httpx.Client(verify=False, trust_env=False, timeout=20)
"""One client for all tests: to load certificates takes longer than a request."""


@contextlib.contextmanager
def served(root: Path, token: str | None = None) -> Iterator[str]:
    """Serve the runs in a folder, and yield the address of the page."""
    address = bind("127.0.0.1", 0, token)
    server = create_server(address, root)
    thread = threading.Thread(target=server.run, args=([address.socket],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{address.socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


class Events:
    """The server-sent events of a stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()

    def next(self) -> tuple[str, Any]:
        """Return the kind and the data of the next event."""
        kind = ""
        for line in self._lines:
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return kind, json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream ended")


@contextlib.contextmanager
def stream(url: str, **query: Any) -> Iterator[Events]:
    with CLIENT.stream("GET", f"{url}/api/stream", params=query) as response:
        assert response.status_code == 200
        yield Events(response)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)
