"""The tables of an experiment: what each of them may hold, with types, ranges and defaults."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from shoal import schema
from shoal.errors import ExperimentError
from shoal.experiment.registry import Component
from shoal.training.settings import Training
from shoal.types import Bounds, FormerOption, NodeId, NodeIds, parse_node_ids

Engine: TypeAlias = Literal["simulation", "processes"]
Batching: TypeAlias = Literal["auto", "off", "vmap", "pool", "ray"]
Shaping: TypeAlias = Literal["model", "kernel"]


@dataclass(frozen=True)
class EvaluationPlan:
    """The `evaluation` table: when models are tested, on which nodes, and with which samples and metrics."""

    every: Annotated[int, Bounds(at_least=0)] = 10
    """Rounds between evaluations; 0 means after the last round only. The last round is always evaluated. Ignored when
    `seconds` is given."""
    seconds: Annotated[float, Bounds(above=0)] | None = None
    """Seconds of the run's clock between evaluations, in place of `every`. All nodes are evaluated at the same moment:
    at k * seconds for k = 1, 2, …, and at the end of the run."""
    nodes: Annotated[int, Bounds(at_least=0)] | None = None
    """Number of nodes that are evaluated, drawn once from the seed; default: all."""
    samples: Annotated[int, Bounds(at_least=1)] | None = None
    """Number of test samples, drawn once from the seed; default: all. If nodes have their own, the number per node."""
    split: Literal["test", "validation"] = "test"
    """The samples that models are evaluated on: the test samples, or the samples in `dataset.validation`."""
    data: Literal["all", "own"] = "all"
    """The samples that a node is evaluated on: all of them, or its own. Its own are the samples of the users whose data
    the node holds or, without users, samples in the proportions of the classes that the node holds."""
    fine_tune: Annotated[int, Bounds(at_least=0)] = 0
    """Local steps that a copy of a node's model takes on the node's training samples before each evaluation."""
    metrics: tuple[str, ...] | None = None
    """Metrics out of 'accuracy', 'top5', 'per-class', 'perplexity', 'rmse' and 'loss'; default: the metrics of the
    data set's task."""
    average: bool = True
    """Whether to test the average of all models too, and to measure the distance of the nodes to it."""
    target: float | None = None
    """A mean score over the nodes. The summary reports the time until it is reached."""
    metric: str | None = None
    """The metric of `target`: the name of a score that is measured, such as 'accuracy' or 'class 3'. Default: accuracy,
    or the main metric of a task that has no accuracy."""


@dataclass(frozen=True)
class SimulationPlan:
    """The `simulation` table.

    `batching` selects how the simulation computes nodes that train at the same virtual time: "vmap" stacks their
    parameters, "pool" distributes them over worker processes, "ray" over the machines of a Ray cluster, "off" trains
    one node after another. "auto" benchmarks all methods except "ray" once per model and picks the fastest. With "off",
    "pool" and "ray" the models are equal, bit for bit, to those of the process engine.
    """

    batching: Batching = "auto"
    workers: Annotated[int, Bounds(at_least=1)] | None = None
    """Worker processes of the pool or on Ray; default: one per core, or one per free CPU of the Ray cluster."""
    receive_timeout: Annotated[float, Bounds(above=0)] | None = None
    """Virtual seconds after which a receive continues without the missing senders; default: no timeout."""


MODELS_PER_MESSAGE = 16
"""A message may be so many times as large as the model: numbers of twice the bytes, several vectors, coordinates."""
HEARTBEATS_PER_TIMEOUT = 6
"""Heartbeats that a process sends in the time that its peers wait for it."""


@dataclass(frozen=True)
class ProcessesPlan:
    """The `processes` table."""

    host: str = "127.0.0.1"
    """The address that nodes listen on."""
    base_port: Annotated[int, Bounds(at_least=1, at_most=65535)] | None = None
    """Node i listens on port base_port + i; default: any free port."""
    receive_timeout: Annotated[float, Bounds(above=0)] | None = None
    """Seconds after which a receive continues without the missing senders. Default: a minute plus several times the
    duration of a round, estimated from the node's own training. Crashed peers are reported at once, without a
    timeout."""
    announce: str | None = None
    """The address at which other nodes reach this machine; default: `host`. Required when `host` is a wildcard."""
    training_slots: Annotated[int, Bounds(at_least=1)] | None = None
    """Number of nodes that train at the same time; default: 1.25 times the number of cores, rounded up."""
    max_message_mib: Annotated[float, Bounds(above=0)] | None = None
    """A larger message is rejected before it is read, and its sender is disconnected. Default: sixteen times the size
    of the model, and at least 1; 256 if nodes send samples."""
    connections: Annotated[int, Bounds(at_least=1)] | None = None
    """Outgoing connections that a node keeps open; it closes the least recently used one first. Default: one for each
    of its peers in the first round, and at least 64."""
    shaping: Shaping = "model"
    """How messages are delayed to match the network: by the network model of the simulation, in real time; or by the
    kernel, which needs root and can only limit the rates at which each node sends and receives."""
    sealed: bool = False
    """Whether all links are encrypted and authenticated."""
    allow_unsealed: bool = False
    """Whether links that other machines can reach may be plain: messages can then be read, and sent by anyone."""
    keys: Path | None = None
    """A folder written by 'shoal keys make' with the key pair of every node; default: new keys in every run."""

    @staticmethod
    def of(table: Mapping[str, Any]) -> ProcessesPlan:
        """Return the `processes` table out of the table of an experiment. Raises `ExperimentError`."""
        problems: list[str] = []
        plan = schema.convert(table.get("processes", {}), ProcessesPlan, "processes", problems)
        if problems:
            raise ExperimentError(problems)
        assert isinstance(plan, ProcessesPlan)
        return plan

    @property
    def reachable_address(self) -> tuple[str, str] | None:
        """The key and the address at which other machines may reach nodes; None if all addresses are on the loopback.

        Kernel shaping uses neither: nodes have addresses in network namespaces of this machine.
        """
        given = {"host": self.host, "announce": self.announce or self.host}
        return next(((key, address) for key, address in given.items() if not _is_loopback(address)), None)

    @property
    def hang_timeout(self) -> float:
        """The minimum number of seconds to wait for a node that may hang."""
        return 60.0 if self.receive_timeout is None else self.receive_timeout

    def max_message_bytes(self, model_bytes: int | None) -> int:
        """The size of the largest message; `model_bytes` None: its size does not follow from that of the model."""
        if self.max_message_mib is not None:
            return int(self.max_message_mib * 2**20)
        return 2**28 if model_bytes is None else max(2**20, MODELS_PER_MESSAGE * model_bytes)

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats of a process: several in the time after which it counts as failed."""
        return self.hang_timeout / HEARTBEATS_PER_TIMEOUT


def _is_loopback(address: str) -> bool:
    """Return whether `address` is one of this machine's loopback. Other names than 'localhost' are not looked up."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class CheckpointPlan:
    """The `checkpoint` table."""

    every: Annotated[int, Bounds(at_least=0)] = 0
    """Rounds between checkpoints, from which `shoal resume` continues the run; 0 writes none."""
    keep: Annotated[int, Bounds(at_least=1)] = 2
    """Number of checkpoints to keep. Older ones are deleted when a new one is complete."""
    final: bool = True
    """Whether every node's final model is written to checkpoints/<id>.npy."""


@dataclass(frozen=True)
class Group:
    """A `[[group]]` table: settings for some of the nodes, which override the settings of the experiment.

    A component is a table, a name, a class or an instance; in an experiment, it is a table.
    """

    nodes: NodeIds
    algorithm: Any = None
    sharing: Any = None
    training: Mapping[str, Any] | None = None
    speed: Annotated[Any, FormerOption("device")] = None
    network: Any = None
    """The connections of these nodes; the network of the other nodes must be "uniform"."""
    machine: str | None = None
    """The machine that these nodes run on, for mapping = "by-group"."""

    def ids(self, nodes: int) -> list[NodeId]:
        """Return the ids in `self.nodes`, such as "0-3, 8", out of `nodes` nodes. Raises ValueError if it is wrong."""
        return parse_node_ids(self.nodes, nodes)


@dataclass(frozen=True)
class NodeSettings:
    """The settings of one node: those of the experiment, with the overrides of its groups."""

    algorithm: Component
    sharing: Component
    training: Training
    speed: Component
    network: Component


PARENT_TABLES = {"partition": "dataset", "augmentation": "dataset", "validation": "dataset", "weights": "topology"}
"""Fields of `Experiment` that are written inside another table, and that table."""
NOT_IN_TABLES = ("base", "source")
"""Fields of `Experiment` that no table has: the folder and the file of the table."""
DEFAULT_NAMES = {"speed": "constant"}
"""Components whose name may be omitted, and the name that they have then."""


def location(key: str) -> str:
    """Return the dotted name of a field of `Experiment` in a TOML file."""
    return f"{PARENT_TABLES[key]}.{key}" if key in PARENT_TABLES else key
