"""The connection to Ray for one run, and the CPUs that the run reserves there."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import ExperimentError, LaunchError

LOCAL = "local"
"""The address that starts Ray on this machine, for this run only."""
CONNECT_SECONDS = 10.0
"""How long to wait for a connection to the address. Ray itself would wait for minutes."""
RESERVE_SECONDS = 20.0
"""How long to wait for CPUs that the cluster has, but that others use."""


@dataclass(frozen=True)
class RayCluster:
    """CPUs that are reserved on a Ray cluster, one for each worker."""

    group: Any
    """Ray's placement group."""
    machines: Sequence[str]
    """A description of the machine of each CPU."""
    kept: bool
    """Whether the connection existed before the run. A connection that is closed ends its actors and reservations."""


@contextlib.contextmanager
def ray_cluster(address: str, workers: int | None, nodes: int) -> Iterator[RayCluster]:
    """Connect to Ray and reserve one CPU for each worker, for the duration of the context.

    `address` is "local", "auto", HOST:PORT or ray://HOST:PORT. `workers` None takes all free CPUs, but not more than
    the `nodes` of the experiment. If the program is connected to Ray already, this connection is used and kept.
    Raises LaunchError if the connection fails, or the CPUs are not available.
    """
    ray = load_ray()
    if ray.is_initialized():
        group = _reserve(ray, workers, nodes)
        try:
            yield RayCluster(group, _machines(ray, group), kept=True)
        finally:
            ray.util.remove_placement_group(group)
        return
    try:
        _connect(ray, address, min(workers or os.cpu_count() or 1, nodes))
        group = _reserve(ray, workers, nodes)
        yield RayCluster(group, _machines(ray, group), kept=False)
    finally:
        ray.shutdown()


def load_ray() -> Any:
    """Import Ray. Raises ExperimentError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        problem = (
            f"simulation.batching = 'ray': the library 'ray' cannot be imported ({error}); pip install 'shoal[ray]'"
        )
        raise ExperimentError([problem]) from error
    return ray


def _connect(ray: Any, address: str, cpus: int) -> None:
    options: dict[str, Any] = {"include_dashboard": False, "num_cpus": cpus} if address == LOCAL else {}
    _check_reachable(address)
    try:
        with _signal_handlers_kept():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    except SystemExit as stop:  # raised by Ray's own handler of SIGTERM
        raise KeyboardInterrupt(signal.SIGTERM) from stop
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        task = "start Ray on this machine" if address == LOCAL else f"connect to Ray at {address!r}"
        raise LaunchError(f"cannot {task}: {error}") from error


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which `ray.init` replaces: the command line ends a run on SIGTERM itself."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _check_reachable(address: str) -> None:
    """Raise an error if `address` is malformed, or does not accept connections."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    if address in (LOCAL, "auto"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ExperimentError([f"Ray address {address!r}: expected 'auto', HOST:PORT or ray://HOST:PORT"], "--ray")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(f"cannot connect to Ray at {address!r}: {error}; start it with 'ray start --head'") from error


def _reserve(ray: Any, workers: int | None, nodes: int) -> Any:
    """Reserve one CPU for each worker, on as many machines as possible."""
    total, free = (int(found.get("CPU", 0)) for found in (ray.cluster_resources(), ray.available_resources()))
    count = min(free if workers is None else workers, nodes)
    has = f"the Ray cluster has {total} CPUs, and {free} of them are free"
    if not 1 <= count <= total:
        wanted = "no worker can be started" if workers is None else f"simulation.workers = {workers} needs {count} CPUs"
        raise LaunchError(f"{wanted}: {has}; set fewer workers, or add machines to the cluster")
    group = ray.util.placement_group([{"CPU": 1}] * count, strategy="SPREAD")
    try:
        reserved = bool(group.wait(RESERVE_SECONDS))
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    if not reserved:
        ray.util.remove_placement_group(group)
        raise LaunchError(
            f"cannot reserve {count} CPUs within {RESERVE_SECONDS:.0f} s: {has}; wait until other jobs have ended, or "
            "set simulation.workers"
        )
    return group


def _machines(ray: Any, group: Any) -> list[str]:
    """Describe the machine of each reserved CPU."""
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    placed: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [
        f"{nodes[id]['NodeManagerHostname']} ({nodes[id]['NodeManagerAddress']}, Ray node {id[:8]})"
        for _, id in sorted(placed.items())
    ]
