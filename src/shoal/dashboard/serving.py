"""Starts the server of the page: its address, its token, and the libraries that it needs."""

from __future__ import annotations

import importlib.util
import secrets
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import LaunchError

if TYPE_CHECKING:
    import uvicorn

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8420
TRIED_PORTS = 50
"""If no port was chosen, so many ports are tried from the default one on."""
STOP_SECONDS = 3
"""How long the server waits for pages to close their connections when it ends."""


@dataclass(frozen=True)
class Address:
    """Where the page is. The socket accepts connections already; they wait until the server starts."""

    host: str
    socket: socket.socket
    token: str | None

    @property
    def url(self) -> str:
        """The address to open, with the token if there is one."""
        name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        shown = f"[{name}]" if ":" in name else name
        query = "" if self.token is None else f"?token={self.token}"
        return f"http://{shown}:{self.socket.getsockname()[1]}/{query}"


def require_libraries() -> None:
    """Raise `LaunchError` if the libraries of the page are not installed."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(f"the page needs {' and '.join(missing)}: install them with pip install 'shoal[dashboard]'")


def bind(host: str, port: int | None, token: str | None = None) -> Address:
    """Reserve a port, without one the first free port from `DEFAULT_PORT` on. Raises `LaunchError`.

    Another host than this machine gets a token.
    """
    from shoal.dashboard.guard import is_loopback

    ports = [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + TRIED_PORTS), 0]
    try:
        family, *_, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is too long"
        raise LaunchError(f"--host {host!r} is not a name or address of this machine: {reason}") from error
    problem: OSError | None = None
    for tried in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, tried))
            listener.listen(128)
        except (OSError, OverflowError) as error:
            listener.close()
            problem = error if isinstance(error, OSError) else OSError(0, str(error))
            continue
        needs_token = token is None and not is_loopback(str(address))
        return Address(host, listener, secrets.token_urlsafe(32) if needs_token else token)
    reason = problem.strerror if problem is not None else ""
    raise LaunchError(
        f"the page cannot use {host}, port {ports[0]}: {reason}; choose another with --port, or leave --port out"
    )


def create_server(address: Address, root: Path) -> uvicorn.Server:
    """Return the server that shows the runs in `root`."""
    import uvicorn

    from shoal.dashboard.server import create_app

    stopping = threading.Event()

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            stopping.set()  # streams to pages have no end of their own
            await super().shutdown(sockets)

    config = uvicorn.Config(
        create_app(root, address.host, address.token, stopping),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
        limit_concurrency=256,
        lifespan="off",
        ws="none",
    )
    return Server(config)


def serve(address: Address, root: Path) -> None:
    """Show the runs in `root` until the process is interrupted (SIGINT or SIGTERM)."""
    create_server(address, root).run(sockets=[address.socket])
