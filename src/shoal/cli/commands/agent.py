"""`shoal agent`: run nodes of this machine for a coordinator on another one."""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import positive_integer
from shoal.cli.display import print_line
from shoal.errors import LaunchError

if TYPE_CHECKING:
    from shoal.engines.processes.remote.channel import Trust


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run nodes of this machine for a coordinator: 'shoal run FILE --agents HOST:PORT' there connects "
        "to 'shoal agent --listen HOST:PORT' here. An agent serves one run after another until it is interrupted."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen", metavar="HOST:PORT", help="wait for a coordinator at this address of this machine")
    where.add_argument("--join", metavar="HOST:PORT", help="connect to a coordinator that listens at this address")
    parser.add_argument("--name", help="the name of this agent in mappings (default: the name of the machine)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="the secret key of this agent")
    parser.add_argument("--trust", type=Path, action="append", default=[], metavar="FILE",
                        help="the public key of a coordinator, or a folder of keys; may be repeated")  # fmt: skip
    parser.add_argument("--host", help="the address that nodes listen on (default: the address of --listen, or the "
                        "address from which --join connects)")  # fmt: skip
    parser.add_argument("--announce", help="the address at which other machines reach the nodes (default: --host)")
    parser.add_argument("--relay", action="store_true",
                        help="other machines cannot reach this one: they reach its nodes through the coordinator (with "
                        "--join)")  # fmt: skip
    parser.add_argument("--keys-from-stdin", action="store_true", help=argparse.SUPPRESS)  # for agents started over ssh
    parser.add_argument("--cores", type=positive_integer, help="the cores to use (default: all)")
    parser.add_argument("--allow-code", action="store_true",
                        help="accept plug-ins: the coordinator can run any code with your rights")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where the files of a run are kept until the coordinator has them")
    parser.add_argument("--once", action="store_true", help="exit after one run")
    parser.add_argument("--wait", type=positive_integer, metavar="SECONDS",
                        help="exit with code 1 if no run begins in this time (default: no limit)")  # fmt: skip
    parser.set_defaults(command=run_agent)


def run_agent(parsed: argparse.Namespace) -> int:
    from shoal.engines.processes.keys import read_pair_file, read_trusted
    from shoal.engines.processes.remote.agent_folder import agent_folder
    from shoal.engines.processes.remote.agent_server import serve_agent
    from shoal.engines.processes.remote.channel import Address, Trust, bracketed
    from shoal.engines.processes.remote.hosted_run import AgentOptions

    listen = None if parsed.listen is None else Address.parse(parsed.listen)
    join = None if parsed.join is None else Address.parse(parsed.join)
    if parsed.relay and join is None:
        raise LaunchError("--relay: only an agent that joins with --join can be relayed")
    if parsed.keys_from_stdin:
        trust = _given_keys()
    else:
        trust = Trust(None if parsed.key is None else read_pair_file(parsed.key), read_trusted(parsed.trust))
    host = bracketed(parsed.host or ("127.0.0.1" if parsed.relay else _own_host(listen, join)))
    if host in ("*", "0.0.0.0", "[::]") and parsed.announce is None:
        raise LaunchError(
            f"--listen {parsed.listen}: nodes need an address that other machines can reach; add --announce ADDRESS"
        )
    with agent_folder(parsed.folder or Path(tempfile.gettempdir())) as folder:
        options = AgentOptions(
            parsed.name or socket.gethostname(),
            host,
            bracketed(parsed.announce or host),
            folder,
            parsed.allow_code,
            parsed.once,
            parsed.cores,
            join.host if parsed.relay and join is not None else None,
            parsed.wait,
            parsed.keys_from_stdin,
        )
        return serve_agent(options, trust, listen, join, print_line)


def _given_keys() -> Trust:
    """The keys that the coordinator has sent over ssh. Raises `LaunchError`."""
    import msgspec

    from shoal.engines.processes.keys import KeyPair
    from shoal.engines.processes.remote.channel import Trust
    from shoal.engines.processes.remote.ssh import GivenKeys

    try:
        keys = msgspec.json.decode(sys.stdin.readline(), type=GivenKeys)
    except msgspec.DecodeError as error:
        raise LaunchError(f"--keys-from-stdin: no keys have arrived: {error}") from error
    return Trust(KeyPair(keys.public.encode(), keys.secret.encode()), {"coordinator": keys.coordinator.encode()})


def _own_host(listen: object, join: object) -> str:
    """The address of this machine that faces the coordinator. Raises `LaunchError`."""
    from shoal.engines.processes.remote.channel import Address

    if isinstance(listen, Address):
        return listen.host
    assert isinstance(join, Address)
    host = join.host.strip("[]")
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, join.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only looks up the route
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"--join {join}: {error.strerror or error}; check the address, or give --host") from error
    return own
