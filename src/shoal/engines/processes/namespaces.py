"""Nodes with a network of their own each, whose links the kernel shapes.

Every node lives in a network namespace with one device, eth0, whose other end is a port of a bridge in one more
namespace, the switch. A queue on eth0 limits what the node sends, a queue on the port what it receives.

Namespaces have no names here: the supervisor holds them as open files, and nodes enter them by way of /proc. So nothing
can be left behind, whatever ends the supervisor and its nodes: with the last of them the kernel takes back the
namespaces, their devices and their queues. To look into one: nsenter --net --target (a node's process).
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

MOST_NODES = 1023
"""The ports of a bridge."""
BURST_SECONDS = 0.002
SMALLEST_BURST = 2 * 1514
"""Bytes that may leave at once: what a link carries in BURST_SECONDS, two packets at the least."""
LARGEST_PACKET = 65536
"""Bytes that TCP hands to a device at once, at the most; on the wire it is many packets."""
QUEUE_SECONDS = 0.1
SMALLEST_QUEUE = 32 * 1024
"""Bytes that wait for a link before packets are dropped: what it carries in QUEUE_SECONDS, or SMALLEST_QUEUE."""
INSTEAD = "or set processes.shaping = 'model', which needs neither root nor tools"

_CLONE_NEWNET = 0x40000000
_OURS = "/proc/thread-self/ns/net"
_NETWORK = ipaddress.ip_network("10.0.0.0/8")
_c_library = ctypes.CDLL(None, use_errno=True)


class Namespaces:
    """A namespace for each node, and the switch between them, for as long as this object is not closed."""

    def __init__(self, links: Sequence[AccessLink]) -> None:
        """Node i on a link as links[i] says. Raises `LaunchError` where that cannot be done."""
        _check_system()
        if len(links) > MOST_NODES:
            raise LaunchError(
                f"nodes: {len(links)}, with those that serve, and a bridge of the kernel has {MOST_NODES} ports; "
                f"use fewer, {INSTEAD}"
            )
        self._files: list[int] = []
        try:
            with _back_home():
                for _ in range(len(links) + 1):
                    self._files.append(_new())
                self._connect(links)
        except BaseException:
            self.close()
            raise

    def place(self, node: NodeId) -> str:
        """Where another process finds the node's namespace, to `enter` it."""
        return f"/proc/{os.getpid()}/fd/{self._files[node]}"

    def listen(self, socket: zmq.Socket[bytes]) -> str:
        """Bind `socket` to where processes of all namespaces find it; returns where that is.

        A socket in the file system is reached from everywhere, an open file by way of /proc also without a name: so
        this too goes with the process.
        """
        with tempfile.TemporaryDirectory(prefix="shoal-", dir="/tmp") as folder:  # a socket's path is short
            socket.bind(f"ipc://{folder}/control")
            self._files.append(os.open(f"{folder}/control", os.O_PATH))
        return f"ipc:///proc/{os.getpid()}/fd/{self._files[-1]}"

    def close(self) -> None:
        """Give the namespaces back; each is gone when no node is in it any longer."""
        while self._files:
            os.close(self._files.pop())

    def _connect(self, links: Sequence[AccessLink]) -> None:
        *nodes, switch = self._files
        wires = ["link add switch type bridge mcast_snooping 0", "link set switch up"]
        queues = []
        for node, link in enumerate(links):
            wires.append(f"link add n{node} type veth peer name eth0 netns {self.place(node)}")
            wires.append(f"link set n{node} master switch addrgenmode none up")
            queues += _queue(f"n{node}", link.download)
        _batch(switch, "ip", wires)
        _batch(switch, "tc", queues)
        for node, link in enumerate(links):
            own = ["link set lo up", f"address add {address(node)}/{_NETWORK.prefixlen} dev eth0"]
            # TCP hands over as much at once as the link may send at once: more would be cut up, and dropped in part.
            largest = LARGEST_PACKET if link.upload == math.inf else min(_burst(link.upload), LARGEST_PACKET)
            _batch(nodes[node], "ip", [*own, f"link set eth0 gso_max_size {largest} addrgenmode none up"])
            _batch(nodes[node], "tc", _queue("eth0", link.upload))


def _check_system() -> None:
    if sys.platform != "linux":
        raise LaunchError(
            f"processes.shaping = 'kernel': {sys.platform} has no network namespaces; use Linux, {INSTEAD}"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LaunchError(
                f"processes.shaping = 'kernel': there is no command {tool!r} here; install iproute2, {INSTEAD}"
            )


def address(node: NodeId) -> str:
    """The node's address in its own namespace."""
    return str(_NETWORK[node + 1])


def enter(place: str) -> None:
    """Move this thread, and those that it will start, into a namespace."""
    file = os.open(place, os.O_RDONLY)
    try:
        _set(file)
    finally:
        os.close(file)


@contextmanager
def _back_home() -> Iterator[None]:
    """Come back to this thread's namespace in the end."""
    home = os.open(_OURS, os.O_RDONLY)
    try:
        yield
    finally:
        if not os.path.samestat(os.fstat(home), os.stat(_OURS)):  # who could not leave may not enter either
            _set(home)
        os.close(home)


def _new() -> int:
    """A new namespace, as an open file; this thread is in it."""
    if _c_library.unshare(_CLONE_NEWNET):
        why = os.strerror(ctypes.get_errno())
        raise LaunchError(
            f"processes.shaping = 'kernel': a network namespace cannot be made here: {why}; run as root, or as root of "
            f"a user namespace (unshare --map-root-user --net shoal run …), {INSTEAD}"
        )
    return os.open(_OURS, os.O_RDONLY)


def _set(file: int) -> None:
    if _c_library.setns(file, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot enter a network namespace: {os.strerror(error)}")


def _burst(rate: float) -> int:
    return max(SMALLEST_BURST, int(rate * BURST_SECONDS))


def _queue(device: str, rate: float) -> list[str]:
    """What has `tc` limit a device to so many bytes per second."""
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
    """Run commands of `ip` or `tc` in a namespace, where this thread then is."""
    if not commands:
        return
    _set(namespace)
    said = "".join(f"{command}\n" for command in commands)
    done = subprocess.run([tool, "-batch", "-"], input=said, capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LaunchError(
            f"processes.shaping = 'kernel': {tool!r} says: {why}; see that the kernel has bridges, veth and htb, "
            + INSTEAD
        )
