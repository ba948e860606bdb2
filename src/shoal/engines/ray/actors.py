"""A worker as a Ray actor. It builds the setup on its own machine, with the data of that machine."""

from __future__ import annotations

import platform
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.engines.ray.cluster import RayCluster, load_ray
from shoal.engines.setup_fingerprint import SetupFingerprint, check_equal, fingerprint
from shoal.engines.worker import Command, Replies, Rows, compute
from shoal.errors import LaunchError, RunError, ShoalError
from shoal.experiment import Experiment
from shoal.experiment.plugin_files import with_plugin_hashes
from shoal.experiment.setup import Setup
from shoal.types import NodeId, Params


def start_actors(cluster: RayCluster, setup: Setup) -> list[ActorWorker]:
    """Start one actor on each reserved CPU, and check that all of them have the setup of this process.

    Raises LaunchError if an actor cannot build it, or has another one.
    """
    count, size = len(cluster.machines), setup.experiment.size
    workers: list[ActorWorker] = []
    try:
        for index in range(count):
            workers.append(ActorWorker(cluster, index, setup.experiment, range(index, size, count)))
        own = {f"{platform.node()} (this process)": fingerprint(setup)}  # computed while the actors build theirs
        check_equal(own | {worker.name: worker.wait_until_ready() for worker in workers})
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


class TrainingActor:
    """The actor itself. Ray creates it on one of its machines."""

    def __init__(self, table: Mapping[str, Any], base: str, nodes: Sequence[NodeId]) -> None:
        self._table, self._base, self._nodes = table, base, nodes

    def prepare(self) -> SetupFingerprint | str:
        """Build the setup and the trainers. Returns what the setup contains, or the error."""
        try:
            setup = Setup(Experiment.from_table(self._table, base=Path(self._base)))
            self._trainers = {node: setup.trainer(node) for node in self._nodes}
            return fingerprint(setup)
        except ShoalError as error:
            return str(error)
        except Exception:
            return traceback.format_exc()

    def compute(self, commands: Sequence[Command], rows: Rows) -> tuple[Replies, Rows]:
        """Carry out the commands. If none of them trains, no parameters are sent back."""
        rows = rows.copy()  # Ray's arrays are read-only
        replies = compute(self._trainers, commands, rows)
        return replies, rows if any(command.kind == "train" for command in commands) else rows[:0]


class ActorWorker:
    """A `Worker` on a Ray cluster. Ray transports the parameters of a request as one array."""

    external = True

    def __init__(self, cluster: RayCluster, index: int, experiment: Experiment, nodes: Sequence[NodeId]) -> None:
        self._ray = load_ray()
        self._nodes = nodes
        self.name = f"worker {index} on {cluster.machines[index]}"
        placement = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(cluster.group, index)
        options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": placement}
        actor_class = self._ray.remote(TrainingActor).options(**options)
        self._actor = actor_class.remote(with_plugin_hashes(experiment), str(experiment.base.resolve()), nodes)
        self._pending = self._actor.prepare.remote()
        self._sent: Rows = np.empty((0, 0), np.float32)

    def wait_until_ready(self) -> SetupFingerprint:
        """Wait until the actor has built its setup. Raises LaunchError if it cannot."""
        try:
            found: SetupFingerprint | str = self._ray.get(self._pending)
        except self._ray.exceptions.RayError as error:
            raise LaunchError(f"{self.name} cannot be started; is shoal installed there? {error}") from error
        if isinstance(found, str):
            raise LaunchError(f"{self.name} cannot build the experiment: {found}")
        return found

    def send(self, commands: Sequence[Command], params: Sequence[Params]) -> None:
        self._sent = np.stack(params) if params else np.zeros((len(commands), 0), np.float32)
        try:
            self._pending = self._actor.compute.remote(list(commands), self._sent)
        except self._ray.exceptions.RayError as error:
            raise self._failure(error) from error

    def receive(self) -> tuple[Replies, Rows]:
        try:
            replies, rows = self._ray.get(self._pending)
        except self._ray.exceptions.RayError as error:
            raise self._failure(error) from error
        finally:
            self._pending = None
        return replies, rows if len(rows) else self._sent

    def close(self) -> None:
        self._pending = None
        self._ray.kill(self._actor)

    def _failure(self, error: Exception) -> RunError:
        reason = " ".join(str(error).split())
        return RunError(f"{self.name}, which trained {len(self._nodes)} nodes, has failed: {reason}")
