"""The connection to Ray for one run, and the CPUs that the run reserves there."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
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


@contextlib.contextmanager
def ray_cluster(address: str, workers: int | None, nodes: int) -> Iterator[RayCluster]:
    """Connect to Ray and reserve one CPU for each worker, for the duration of the context.

    `address` is "local", "auto", HOST:PORT or ray://HOST:PORT. `workers` None takes all free CPUs, but not more than
    the `nodes` of the experiment. If the program is connected to Ray already, this connection is used and kept.
    Raises LaunchError if the connection fails, or the CPUs are not available.
    """
    with connected(address, min(workers or os.cpu_count() or 1, nodes)):
        count = _count_workers(workers, nodes)
        with reserved([{"CPU": 1}] * count, "SPREAD", f"{count} CPUs", "simulation.workers") as group:
            yield RayCluster(group, [describe(node) for node in placed(group)])


@contextlib.contextmanager
def connected(address: str, cpus: int) -> Iterator[None]:
    """Connect to Ray for the duration of the context. A Ray that is started for it has this many `cpus`.

    If the program is connected to Ray already, this connection is used and kept. Raises LaunchError.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield
        return
    try:
        _connect(ray, address, cpus)
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def reserved(bundles: Sequence[Mapping[str, float]], strategy: str, wanted: str, key: str) -> Iterator[Any]:
    """Reserve resources for the duration of the context, and yield Ray's placement group.

    The end of the context also ends the processes that use them. Raises LaunchError if the resources are not free:
    `wanted` describes them, and `key` is the key of an experiment that needs fewer.
    """
    ray = load_ray()
    group = ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    try:
        if not group.wait(RESERVE_SECONDS):
            raise LaunchError(
                f"cannot reserve {wanted} within {RESERVE_SECONDS:.0f} s: {describe_cpus()}; wait until other jobs "
                f"have ended, or set {key}"
            )
        yield group
    finally:
        ray.util.remove_placement_group(group)


def placed(group: Any) -> list[dict[str, Any]]:
    """The Ray node of each bundle of a placement group."""
    ray = load_ray()
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    found: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [nodes[id] for _, id in sorted(found.items())]


def describe(node: Mapping[str, Any]) -> str:
    """Describe a Ray node."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, Ray node {node['NodeID'][:8]})"


def describe_cpus() -> str:
    """Describe the CPUs of the cluster."""
    total, free = _count_cpus()
    return f"the Ray cluster has {total} CPUs, and {free} of them are free"


def load_ray() -> Any:
    """Import Ray. Raises ExperimentError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        problem = f"Ray is to be used, and the library 'ray' cannot be imported ({error}); pip install 'shoal[ray]'"
        raise ExperimentError([problem]) from error
    return ray


def _connect(ray: Any, address: str, cpus: int) -> None:
    options: dict[str, Any] = {"include_dashboard": False, "num_cpus": cpus} if address == LOCAL else {}
    _check_reachable(ray, address)
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


def _check_reachable(ray: Any, address: str) -> None:
    """Raise an error if `address` is malformed, or does not accept connections."""
    hint = "start it with 'ray start --head'"
    if address == "auto":
        hint = f"{hint}, or give its address, --ray HOST:PORT"
        try:
            # From RAY_ADDRESS, from a Ray process of this machine, or from a file, which remains if Ray was killed.
            address = ray._private.services.get_ray_address_from_environment(address, None) or address
        except ConnectionError as error:
            raise LaunchError(f"no Ray cluster runs on this machine; {hint}") from error
        except (AttributeError, TypeError):  # this private function is another one in other versions of Ray
            return  # Ray looks for the cluster itself, and takes longer
    if address in (LOCAL, "auto"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ExperimentError([f"Ray address {address!r}: expected 'auto', HOST:PORT or ray://HOST:PORT"], "--ray")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(f"cannot connect to Ray at {address!r}: {error}; {hint}") from error


def _count_cpus() -> tuple[int, int]:
    """The CPUs of the cluster, and how many of them are free."""
    ray = load_ray()
    total, free = (int(found.get("CPU", 0)) for found in (ray.cluster_resources(), ray.available_resources()))
    return total, free


def _count_workers(workers: int | None, nodes: int) -> int:
    """How many workers to start. Raises LaunchError if the cluster has too few CPUs."""
    total, free = _count_cpus()
    count = min(free if workers is None else workers, nodes)
    if not 1 <= count <= total:
        wanted = "no worker can be started"
        if workers is not None:
            limit = "" if workers <= nodes else f", because {nodes} nodes use at most {nodes} workers"
            wanted = f"simulation.workers = {workers} needs {count} CPUs, one for each worker{limit}"
        fewer = f"set simulation.workers to {total} or less" if total else "start Ray with CPUs (--num-cpus)"
        if workers is None and total:
            fewer = "wait until other jobs have ended"
        raise LaunchError(f"{wanted}: {describe_cpus()}; {fewer}, or add machines to the cluster")
    return count
