"""A network namespace for each node, with links that the kernel shapes.

This is for users who want the kernel's TCP behaviour over limited links, as in the testbeds of papers.

Every node runs in a network namespace with one device, eth0. The device's other end is a port of a bridge in one more
namespace, the switch. A queue on eth0 limits what the node sends, a queue on the port limits what it receives.

The namespaces have no names: the coordinator holds them as open files, and nodes enter them through /proc. So nothing
is left behind, however the coordinator and its nodes end: with the last of these processes the kernel removes the
namespaces, their devices and their queues. To inspect one: nsenter --net --target (a node's process).
"""

from __future__ import annotations

import ctypes
import ipaddress
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import zmq

from shoal.environment.network.access import AccessLink
from shoal.errors import LaunchError
from shoal.types import NodeId

MAX_NODES = 1023
"""The ports of a bridge."""
BURST_SECONDS = 0.002
SMALLEST_BURST = 2 * 1514
"""Bytes that may leave at once: what a link carries in BURST_SECONDS, and two packets at the least."""
LARGEST_PACKET = 65536
"""The most bytes that TCP hands to a device at once; they leave as many packets."""
QUEUE_SECONDS = 0.1
SMALLEST_QUEUE = 32 * 1024
"""Bytes that wait for a link before packets are dropped: what it carries in QUEUE_SECONDS, or SMALLEST_QUEUE."""
ALTERNATIVE = "or set processes.shaping = 'model', which needs neither root nor tools"

_CLONE_NEWNET = 0x40000000
_OURS = "/proc/thread-self/ns/net"
_NETWORK = ipaddress.ip_network("10.0.0.0/8")
_c_library = ctypes.CDLL(None, use_errno=True)


class Namespaces:
    """A namespace for each node, and the switch between them, until this object is closed."""

    def __init__(self, links: Sequence[AccessLink]) -> None:
        """Connect node i by the link `links[i]`. Raises `LaunchError` if the system does not allow it."""
        _check_system()
        if len(links) > MAX_NODES:
            raise LaunchError(
                f"nodes: {len(links)} with servers, but a bridge of the kernel has {MAX_NODES} ports; "
                f"use fewer, {ALTERNATIVE}"
            )
        self._files: list[int] = []
        try:
            with _restored_namespace():
                for _ in range(len(links) + 1):
                    self._files.append(_new())
                self._connect(links)
        except BaseException:
            self.close()
            raise

    def place(self, node: NodeId) -> str:
        """The path by which another process enters the node's namespace."""
        return f"/proc/{os.getpid()}/fd/{self._files[node]}"

    def listen(self, socket: zmq.Socket[bytes]) -> str:
        """Bind `socket` to an endpoint that processes of all namespaces can reach. Returns the endpoint.

        Processes of all namespaces reach a socket in the file system, and through /proc also one whose name is removed.
        So the endpoint, too, disappears with the process.
        """
        with tempfile.TemporaryDirectory(prefix="shoal-", dir="/tmp") as folder:  # the path of a socket must be short
            socket.bind(f"ipc://{folder}/control")
            self._files.append(os.open(f"{folder}/control", os.O_PATH))
        return f"ipc:///proc/{os.getpid()}/fd/{self._files[-1]}"

    def close(self) -> None:
        """Release the namespaces. The kernel removes each when no node is in it any longer."""
        while self._files:
            os.close(self._files.pop())

    def _connect(self, links: Sequence[AccessLink]) -> None:
        *nodes, switch = self._files
        links_up = ["link add switch type bridge mcast_snooping 0", "link set switch up"]
        queues = []
        for node, link in enumerate(links):
            links_up.append(f"link add n{node} type veth peer name eth0 netns {self.place(node)}")
            links_up.append(f"link set n{node} master switch addrgenmode none up")
            queues += _queue(f"n{node}", link.download)
        _batch(switch, "ip", links_up)
        _batch(switch, "tc", queues)
        for node, link in enumerate(links):
            own = ["link set lo up", f"address add {address(node)}/{_NETWORK.prefixlen} dev eth0"]
            # TCP hands over as much as the link may send at once: larger packets would be split, and dropped in part.
            largest = LARGEST_PACKET if link.upload == math.inf else min(_burst(link.upload), LARGEST_PACKET)
            _batch(nodes[node], "ip", [*own, f"link set eth0 gso_max_size {largest} addrgenmode none up"])
            _batch(nodes[node], "tc", _queue("eth0", link.upload))


def _check_system() -> None:
    if sys.platform != "linux":
        raise LaunchError(
            f"processes.shaping = 'kernel': {sys.platform} has no network namespaces; use Linux, {ALTERNATIVE}"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LaunchError(
                f"processes.shaping = 'kernel': the command {tool!r} is missing; install iproute2, {ALTERNATIVE}"
            )


def address(node: NodeId) -> str:
    """The node's address in its own namespace."""
    return str(_NETWORK[node + 1])


def enter(place: str) -> None:
    """Move this thread, and the threads that it starts later, into a namespace."""
    file = os.open(place, os.O_RDONLY)
    try:
        _set(file)
    finally:
        os.close(file)


@contextmanager
def _restored_namespace() -> Iterator[None]:
    """Return to this thread's namespace at the end."""
    home = os.open(_OURS, os.O_RDONLY)
    try:
        yield
    finally:
        if not os.path.samestat(os.fstat(home), os.stat(_OURS)):  # a thread that could not leave may not enter either
            _set(home)
        os.close(home)


def _new() -> int:
    """Create a namespace, move this thread into it, and return it as an open file."""
    if _c_library.unshare(_CLONE_NEWNET):
        why = os.strerror(ctypes.get_errno())
        raise LaunchError(
            f"processes.shaping = 'kernel': cannot create a network namespace: {why}; run as root, or as root of "
            f"a user namespace (unshare --map-root-user --net shoal run …), {ALTERNATIVE}"
        )
    return os.open(_OURS, os.O_RDONLY)


def _set(file: int) -> None:
    if _c_library.setns(file, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot enter a network namespace: {os.strerror(error)}")


def _burst(rate: float) -> int:
    return max(SMALLEST_BURST, int(rate * BURST_SECONDS))


def _queue(device: str, rate: float) -> list[str]:
    """The commands of `tc` that limit a device to `rate` bytes per second."""
    if rate == math.inf:
        return []
    burst = _burst(rate)
    limit = burst + max(SMALLEST_QUEUE, int(rate * QUEUE_SECONDS))
    bits = f"{round(rate * 8)}bit"
    return [
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:1 htb rate {bits} ceil {bits} burst {burst} cburst {burst}",
        f"qdisc add dev {device} parent 1:1 bfifo limit {limit}",
    ]


def _batch(namespace: int, tool: str, commands: Sequence[str]) -> None:
    """Run commands of `ip` or `tc` in a namespace. This thread stays in it."""
    if not commands:
        return
    _set(namespace)
    script = "".join(f"{command}\n" for command in commands)
    done = subprocess.run([tool, "-batch", "-"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LaunchError(
            f"processes.shaping = 'kernel': {tool!r} failed: {why}; check that the kernel has bridges, veth and htb, "
            + ALTERNATIVE
        )
