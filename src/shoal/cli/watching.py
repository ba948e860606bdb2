"""The page beside a run: `shoal run --watch`. A process of its own serves it, so that the run is not slower."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

from shoal.cli.display import print_line
from shoal.dashboard.serving import DEFAULT_HOST, Address, bind, require_libraries, serve
from shoal.results.records import RunFolder

STOP_SECONDS = 5.0
PROGRAM = "from shoal.cli.watching import serve_beside; serve_beside()"


class Watching:
    """The process that serves the page. It ends with this process, however this process ends."""

    def __init__(self, root: Path, resumed: RunFolder | None = None) -> None:
        """Serve the runs in `root`. The page shows `resumed`, or else the run that starts next."""
        require_libraries()
        root.mkdir(parents=True, exist_ok=True)
        address = bind(DEFAULT_HOST, None)
        self._root, self._url = root.resolve(), address.url
        self.url = self._run_url(resumed) if resumed is not None else f"{self._url}#/started/{int(time.time())}"
        with address.socket as listener:
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(root), str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the run first
            )

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self, run: RunFolder) -> None:
        """Serve the page of a run that has ended until Ctrl-C."""
        if (code := self._process.poll()) is not None:
            print_line(f"the page has ended with exit code {code}; 'shoal serve {self._root}' shows the run")
            return
        print_line(f"the run has ended; its page stays until Ctrl-C: {self._run_url(run)}")
        with contextlib.suppress(KeyboardInterrupt):
            self._process.wait()

    def _run_url(self, run: RunFolder) -> str:
        id = quote(run.path.resolve().relative_to(self._root).as_posix(), safe="")
        return f"{self._url}#/run/{id}"


def serve_beside() -> None:
    """Serve the page in the process that `Watching` starts."""
    from shoal.engines.operating_system import exit_with_parent

    root, descriptor, parent = sys.argv[1:]
    exit_with_parent(int(parent))
    listener = socket.socket(fileno=int(descriptor))
    serve(Address(DEFAULT_HOST, listener, None), Path(root))
