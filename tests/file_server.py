"""A local web server that publishes files."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from shoal.data.publishers import PublishedFile

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@dataclass
class Server:
    """A local web server that records its requests."""

    url: str = ""
    content: bytes = CONTENT
    supports_ranges: bool = True
    """Whether the server supports range requests."""
    cuts: list[int] = field(default_factory=list)
    """Numbers of bytes after which successive connections are closed; later connections stay open."""
    status: int = 200
    sends_length: bool = True
    requested_ranges: list[str | None] = field(default_factory=list)
    """The range header of each request."""

    def file(self, name: str = "data.tar.gz", md5: str | None = MD5) -> PublishedFile:
        return PublishedFile(name, f"{self.url}/{name}", len(CONTENT), md5)


@contextmanager
def serve() -> Iterator[Server]:
    """A running server."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.requested_ranges.append(wanted)
            self.close_connection = True
            if state.status != 200:
                self.send_error(state.status)
                return
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and state.supports_ranges else 0  # type: ignore[index]
            total = len(state.content)
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if wanted and state.supports_ranges else 200)
            if wanted and state.supports_ranges:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            if state.sends_length:
                self.send_header("Content-Length", str(total - start))
            self.send_header("Connection", "close")
            self.end_headers()
            body = state.content[start:]
            self.wfile.write(body[: state.cuts.pop(0)] if state.cuts else body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []
