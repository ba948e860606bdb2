"""Several machines on one: network namespaces, connected by a switch. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil


def can_make_machines() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"shoal-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return made


class Machines:
    """Machines with the addresses 10.77.0.1, 10.77.0.2, … in one network."""

    def __init__(self, count: int) -> None:
        self._prefix = f"shoal-{os.getpid()}-{time.monotonic_ns() % 10**6}"
        self._switch = f"{self._prefix}-switch"
        self._names = [f"{self._prefix}-{machine}" for machine in range(count)]
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for machine, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("-n", self._switch, "link", "add", f"m{machine}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "set", f"m{machine}", "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{self.address(machine)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def address(self, machine: int) -> str:
        return f"10.77.0.{machine + 1}"

    def start(
        self, machine: int, arguments: Sequence[str], log: Path, folder: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `shoal` on a machine, in `folder`."""
        with log.open("wb") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._names[machine], sys.executable, "-m", "shoal", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def cut_off(self, machine: int) -> None:
        """Take a machine off the network."""
        _ip("-n", self._switch, "link", "set", f"m{machine}", "down")

    def connect_again(self, machine: int) -> None:
        _ip("-n", self._switch, "link", "set", f"m{machine}", "up")

    def close(self) -> None:
        for name in [*self._names, self._switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def machines(count: int) -> Iterator[Machines]:
    made = Machines(count)
    try:
        yield made
    finally:
        made.close()


def end(*processes: subprocess.Popen[bytes]) -> None:
    """End processes and all their children."""
    for process in processes:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for child in children:
                if child.is_running():
                    child.kill()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
