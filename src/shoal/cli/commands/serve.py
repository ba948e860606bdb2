"""`shoal serve`: a page that shows runs."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from shoal.cli.arguments import port_number
from shoal.cli.display import print_line
from shoal.errors import ExperimentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show runs in a web page, while they go on and afterwards. The page reads files only."
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs"),
                        help="the folder of runs, or of one run (default: runs)")  # fmt: skip
    parser.add_argument("--port", type=port_number, help="the port (default: the first free port from 8420 on)")
    parser.add_argument("--host", default="127.0.0.1",
                        help="the address to listen on (default: 127.0.0.1, this machine only); for all others, the "
                        "printed address has a token")  # fmt: skip
    parser.add_argument("--token", action="store_true",
                        help="require a token on this machine too: without it, every user of the machine can read the "
                        "runs")  # fmt: skip
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.set_defaults(command=serve_runs)


def serve_runs(parsed: argparse.Namespace) -> int:
    from shoal.dashboard.serving import bind, require_libraries, serve

    require_libraries()
    if not parsed.runs.is_dir():
        problem = f"there is no folder {str(parsed.runs)!r}; name another folder, or start a run with 'shoal run FILE'"
        raise ExperimentError([problem], "serve")
    address = bind(parsed.host, parsed.port, secrets.token_urlsafe(32) if parsed.token else None)
    print_line(f"runs in {parsed.runs}: {address.url} (Ctrl-C ends the page)")
    if parsed.open:
        import webbrowser

        webbrowser.open(address.url)
    serve(address, parsed.runs)
    return 0
