"""The experiment: typed, validated whole before anything starts, and its TOML spelling.

    experiment = Experiment.from_file("examples/quickstart.toml", {"nodes": 32})
    experiment = Experiment(nodes=16, algorithm=DPSGD(rounds=40), topology={"name": "ring"})
    run = experiment.run()

Whatever is wrong raises one `ExperimentError` that lists every problem with its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import tomli_w

from shoal import schema
from shoal.environment.faults import Fault as Fault
from shoal.environment.faults import incompatibilities
from shoal.errors import ExperimentError
from shoal.experiment.mapping import Machine, NodeMapping, by_machine
from shoal.experiment.registry import REGISTRIES, Component, component_name, find, registry
from shoal.topologies.graph import WeightScheme
from shoal.training import metrics
from shoal.training.trainer import Training
from shoal.traits import Constrained
from shoal.types import Bounds, NodeId, parse_node_ids

if TYPE_CHECKING:
    from shoal.experiment.running import Run

Engine: TypeAlias = Literal["simulation", "processes"]
Batching: TypeAlias = Literal["auto", "off", "vmap", "pool"]
Shaping: TypeAlias = Literal["model", "kernel"]


@dataclass(frozen=True)
class EvaluationPlan:
    """The `evaluation` table: when, on whom and on what models are tested."""

    every: Annotated[int, Bounds(at_least=0)] = 10
    """Rounds between evaluations; 0 is after the last round only. The last round is always evaluated. Not looked at
    when `seconds` is given."""
    seconds: Annotated[float, Bounds(above=0)] | None = None
    """Seconds of the run's clock between evaluations, of all nodes at the same moment, in place of `every`: the k-th is
    at k * seconds, k = 1, 2, …, and the last at the end of the run."""
    nodes: Annotated[int, Bounds(at_least=0)] | None = None
    """How many nodes, drawn once from the seed; all when not given."""
    samples: Annotated[int, Bounds(at_least=1)] | None = None
    """How many test samples, drawn once from the seed; all when not given."""
    data: Literal["all", "own"] = "all"
    """Whether a node is tested on all test samples, or on its own: those of the users that it holds."""
    metrics: tuple[str, ...] | None = None
    """What is measured, of 'accuracy', 'top5', 'per-class', 'perplexity', 'rmse' and 'loss'; when not given, what fits
    the data set's task."""
    average: bool = True
    """Whether the average of all models is tested too, and the nodes' distance to it measured."""
    target: float | None = None
    """The mean score over the nodes that the summary says the time to."""
    metric: str | None = None
    """What `target` is a score of: a name of a score that is measured, such as 'accuracy' or 'class 3'. When not given,
    accuracy or, where there is none, what the task is measured by."""


@dataclass(frozen=True)
class SimulationPlan:
    """The `simulation` table.

    `batching`: how nodes that train at the same virtual time are computed. "vmap" stacks their parameters, "pool"
    spreads them over worker processes, "off" takes one after another; "auto" measures once per model and picks.
    "off" and "pool" give the numbers of the process engine to the bit.
    """

    batching: Batching = "auto"
    workers: Annotated[int, Bounds(at_least=1)] | None = None
    """Worker processes of the pool; one per core when not given."""
    receive_timeout: Annotated[float, Bounds(above=0)] | None = None
    """Virtual seconds after which a receive goes on without those that kept silent; never when not given."""


@dataclass(frozen=True)
class ProcessesPlan:
    """The `processes` table."""

    host: str = "127.0.0.1"
    """The address that nodes listen on."""
    base_port: Annotated[int, Bounds(at_least=1, at_most=65535)] | None = None
    """Node i listens on base_port + i; any free port when not given."""
    receive_timeout: Annotated[float, Bounds(above=0)] | None = None
    """Seconds after which a receive goes on without those that kept silent. When not given, a minute and several
    times what a round should take by the node's own training. The dead are known at once, without a timeout."""
    announce: str | None = None
    """The address that other nodes are told; `host` when not given. Needed where `host` is a wildcard."""
    training_slots: Annotated[int, Bounds(at_least=1)] | None = None
    """How many nodes train at the same time; as many as there are cores when not given."""
    max_message_mib: Annotated[float, Bounds(above=0)] = 256.0
    """A larger message is refused and its sender cut off."""
    connections: Annotated[int, Bounds(at_least=1)] | None = None
    """Outgoing connections that a node keeps open; the longest unused is closed first. When not given, one for each
    of its peers in the first round, and 64 at the least."""
    shaping: Shaping = "model"
    """Who makes messages take as long as the network says: the model that the simulation uses, in real time; or the
    kernel, which needs root, and can only limit what each node sends and receives."""
    sealed: bool = False
    """Whether all links are encrypted, and only those that belong to the run are let in."""
    keys: Path | None = None
    """A folder that 'shoal keys make' made, with the key pair of every node; new ones in every run when not given."""

    @property
    def hang_timeout(self) -> float:
        """Seconds for which anyone waits, at the least, for a node that may be hung."""
        return 60.0 if self.receive_timeout is None else self.receive_timeout


@dataclass(frozen=True)
class CheckpointPlan:
    """The `checkpoint` table."""

    final: bool = True
    """Whether every node's final model is written to checkpoints/<id>.npy."""


GROUP_KEYS = ("algorithm", "sharing", "training", "device", "network")


@dataclass(frozen=True)
class Group:
    """Some nodes, and what is different about them: any of algorithm, sharing, training, device, network, machine."""

    nodes: str
    algorithm: Mapping[str, Any] | None = None
    sharing: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None
    device: Mapping[str, Any] | None = None
    network: Mapping[str, Any] | None = None
    """Their own connections, where the network is "uniform" otherwise."""
    machine: str | None = None
    """Where they run, for mapping = "by-group"."""

    def ids(self, nodes: int) -> list[NodeId]:
        """The nodes that `nodes` spells, of so many: "0-3, 8". Raises ValueError for anything else."""
        return parse_node_ids(self.nodes, nodes)


@dataclass(frozen=True)
class NodeSettings:
    """What may differ from node to node, resolved for one of them."""

    algorithm: Component
    sharing: Component
    training: Training
    device: Component
    network: Component


@dataclass(frozen=True)
class Experiment:
    """All that a run depends on. Tables may be given as dicts, components also as instances."""

    name: str = "experiment"
    nodes: Annotated[int, Bounds(at_least=1)] = 16
    seed: Annotated[int, Bounds(at_least=0, below=2**63)] = 0
    engine: Engine = "simulation"
    duration: Annotated[float, Bounds(above=0)] | None = None
    """Seconds of the run's clock after which it ends, wherever the nodes are; when not given, the algorithm says."""
    algorithm: Any = field(default_factory=lambda: {"name": "dpsgd"})
    sharing: Any = field(default_factory=lambda: {"name": "full"})
    topology: Any = field(default_factory=lambda: {"name": "ring"})
    weights: WeightScheme = "metropolis-hastings"
    dataset: Any = field(default_factory=lambda: {"name": "digits"})
    partition: Any = field(default_factory=lambda: {"name": "iid"})
    model: Any = field(default_factory=lambda: {"name": "mlp"})
    network: Any = field(default_factory=lambda: {"name": "ideal"})
    device: Any = field(default_factory=lambda: {"name": "constant"})
    availability: Any = field(default_factory=lambda: {"name": "always"})
    mapping: Any = field(default_factory=lambda: {"name": "linear"})
    trainer: Any = field(default_factory=lambda: {"name": "torch"})
    training: Training = field(default_factory=Training)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    simulation: SimulationPlan = field(default_factory=SimulationPlan)
    processes: ProcessesPlan = field(default_factory=ProcessesPlan)
    checkpoint: CheckpointPlan = field(default_factory=CheckpointPlan)
    group: tuple[Group, ...] = ()
    fault: tuple[Fault, ...] = ()
    base: Path = field(default=Path("."), compare=False)
    """The folder that plug-in files are looked for in."""

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        problems: list[str] = []
        resolved = _resolve(given, self.base, problems)
        if problems:
            raise ExperimentError(problems, self.name if isinstance(self.name, str) else "experiment")
        for key, value in resolved.items():
            object.__setattr__(self, key, value)
        problems = _incompatibilities(self)
        if problems:
            raise ExperimentError(problems, self.name)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
        """The experiment in a TOML file. `overrides` maps dotted keys to values."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                table = tomllib.load(file)
        except FileNotFoundError:
            raise ExperimentError([f"there is no file {str(path)!r}"], str(path)) from None
        except IsADirectoryError:
            raise ExperimentError([f"{str(path)!r} is a folder, expected a TOML file"], str(path)) from None
        except OSError as error:
            raise ExperimentError([f"{str(path)!r} cannot be read: {error.strerror}"], str(path)) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ExperimentError([f"not valid TOML: {error}"], str(path)) from None
        table.setdefault("name", re.sub(r"^\W+|[^\w.+-]", "_", path.stem))
        return cls.from_table(table, overrides, base=path.parent, source=str(path))

    @classmethod
    def from_table(
        cls,
        table: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        base: Path = Path("."),
        source: str = "experiment",
    ) -> Experiment:
        """The experiment in a table as TOML gives it."""
        problems: list[str] = []
        table = _overridden(table, overrides or {}, problems)
        table.pop("versions", None)  # what a resolved experiment says of its making
        known = {f.name for f in dataclasses.fields(cls)} - {"base", "partition", "weights"}
        _remove_misplaced(table, known, base, problems)
        _lift(table, "dataset", "partition")
        _lift(table, "topology", "weights")
        values = _resolve(table, base, problems)
        if problems:
            raise ExperimentError(problems, source)
        try:
            return cls(**values, base=base)
        except ExperimentError as error:
            raise ExperimentError(list(error.problems), source) from None

    def to_table(self) -> dict[str, Any]:
        """The experiment as plain data: what `from_table` reads."""
        table: dict[str, Any] = {k: getattr(self, k) for k in ("name", "nodes", "seed", "engine", "duration")}
        table["algorithm"] = self.algorithm.to_table()
        table["sharing"] = self.sharing.to_table()
        table["topology"] = {**self.topology.to_table(), "weights": self.weights}
        table["dataset"] = {**self.dataset.to_table(), "partition": self.partition.to_table()}
        table["model"] = self.model.to_table()
        table["network"] = self.network.to_table()
        table["device"] = self.device.to_table()
        table["availability"] = self.availability.to_table()
        table["mapping"] = self.mapping.to_table()
        table["trainer"] = self.trainer.to_table()
        for key in ("training", "evaluation", "simulation", "processes", "checkpoint"):
            table[key] = dataclasses.asdict(getattr(self, key))
        table["group"] = [dataclasses.asdict(g) for g in self.group]
        table["fault"] = [dataclasses.asdict(f) for f in self.fault]
        plain: dict[str, Any] = _plain(table)
        return plain

    def toml(self) -> str:
        return tomli_w.dumps(self.to_table())

    def settings(self, node: NodeId) -> NodeSettings:
        """What holds for `node`, with the overrides of its groups."""
        overrides = tuple(i for i, ids in enumerate(self._members) if node in ids)
        return self._settings(overrides)

    @functools.cached_property
    def _members(self) -> list[frozenset[NodeId]]:
        return [frozenset(g.ids(self.nodes)) for g in self.group]

    @functools.cached_property
    def _settings_by_groups(self) -> dict[tuple[int, ...], NodeSettings]:
        return {}

    def _settings(self, groups: tuple[int, ...]) -> NodeSettings:
        if groups not in self._settings_by_groups:
            problems: list[str] = []
            settings = _node_settings(self, {g: self.group[g] for g in groups}, self.base, problems)
            if settings is None:
                raise ExperimentError(problems)
            self._settings_by_groups[groups] = settings
        return self._settings_by_groups[groups]

    @functools.cached_property
    def services(self) -> dict[str, NodeId]:
        """The nodes beside those that learn: what needs them, "algorithm" or "topology", and their ids."""
        kinds = _serving({"algorithm": self.algorithm, "topology": self.topology})
        return {kind: self.nodes + i for i, kind in enumerate(kinds)}

    @property
    def size(self) -> int:
        """How many nodes there are in all, with those that serve."""
        return self.nodes + len(self.services)

    @functools.cached_property
    def placement(self) -> dict[Machine, list[NodeId]]:
        """Which nodes run on which machine; those that serve run with node 0."""
        machines = _placed(self.mapping, self.nodes, self.group)
        return by_machine(machines + [machines[0]] * len(self.services))

    @property
    def round_nodes(self) -> range:
        """The nodes whose rounds are those of the run: all that learn, or the server that calls them."""
        server = self.services.get("algorithm")
        return range(self.nodes) if server is None else range(server, server + 1)

    def faults(self, node: NodeId) -> list[Fault]:
        """What strikes `node` by round, in the order of rounds."""
        by_round = [(f.round, f) for f in self.fault if f.round is not None and node in f.ids(self.size)]
        return [fault for _, fault in sorted(by_round, key=lambda pair: pair[0])]

    @property
    def timed_faults(self) -> tuple[Fault, ...]:
        """Those that strike by the clock: what `shoal.environment.faults.fault_events` makes of them may be endless."""
        return tuple(fault for fault in self.fault if fault.round is None)

    @property
    def restarts(self) -> bool:
        """Whether nodes that died may come back."""
        return any(fault.restarts_nodes for fault in self.fault)

    def describe_failure(self, node: NodeId, fate: str) -> str:
        """What people are told when a node is lost."""
        for kind, id in self.services.items():
            if id == node:
                return f"node {node}, which serves {kind} = {getattr(self, kind).name!r}, {fate}"
        return f"node {node} {fate}; its neighbours go on without it"

    def run(self, out: str | Path = "runs") -> Run:
        """Run it, without a display; returns when it has ended."""
        from shoal.experiment.running import run

        return run(self, Path(out))


_TABLES: dict[str, Any] = {
    "name": str,
    "nodes": Annotated[int, Bounds(at_least=1)],
    "seed": Annotated[int, Bounds(at_least=0, below=2**63)],
    "engine": Engine,
    "duration": Annotated[float, Bounds(above=0)] | None,
    "weights": WeightScheme,
    "training": Training,
    "evaluation": EvaluationPlan,
    "simulation": SimulationPlan,
    "processes": ProcessesPlan,
    "checkpoint": CheckpointPlan,
    "group": tuple[Group, ...],
    "fault": tuple[Fault, ...],
}
_PLACES = {"partition": "dataset.partition", "weights": "topology.weights"}
_UNNAMED = {"device": "constant"}
"""Components whose name may be left out, and what it is then."""


def _resolve(given: Mapping[str, Any], base: Path, problems: list[str]) -> dict[str, Any]:
    """Every value that is given as its type says, with all problems noted."""
    resolved: dict[str, Any] = {}
    for key, value in given.items():
        place = _PLACES.get(key, key)
        if key == "dataset" and isinstance(value, Mapping) and "otherwise" in value:
            value = _first_at_hand(value)
        if key in REGISTRIES:
            resolved[key] = _component(key, value, base, place, problems)
        elif key in _TABLES:
            resolved[key] = schema.convert(value, _TABLES[key], place, problems)
    if isinstance(plan := resolved.get("processes"), ProcessesPlan) and plan.keys is not None:
        resolved["processes"] = dataclasses.replace(plan, keys=_located(plan.keys, base))
    if isinstance(name := resolved.get("name"), str) and not re.fullmatch(r"\w[\w.+-]*", name):
        problems.append(
            f"name = {name!r}: expected letters, digits and . _ + -, the first of them no sign (it names a folder)"
        )
    if not problems:
        _check_together(resolved, base, problems)
    return resolved


def _check_together(resolved: Mapping[str, Any], base: Path, problems: list[str]) -> None:
    """What no single value shows: group members, overrides and faults in range, the network of the engine."""
    nodes = resolved.get("nodes", schema.parameters(Experiment)["nodes"].default)
    groups = dict(enumerate(resolved.get("group", ())))
    members: dict[NodeId, tuple[int, ...]] = {}
    misspelt: list[tuple[int, ...]] = []
    for i, group in groups.items():
        try:
            members.update({node: (*members.get(node, ()), i) for node in group.ids(nodes)})
        except ValueError as error:
            problems.append(f"group[{i}].{error}")
            misspelt.append((i,))
    view = _WithDefaults(resolved, base)
    for together in sorted({*members.values(), *misspelt}):
        found: list[str] = []
        _node_settings(view, {i: groups[i] for i in together}, base, found)
        problems.extend(p for p in found if p not in problems)
    problems.extend(incompatibilities(resolved.get("fault", ()), nodes, nodes + len(_serving(resolved))))
    if not problems and "mapping" in resolved:
        try:
            _placed(resolved["mapping"], nodes, tuple(groups.values()))
        except ValueError as error:
            problems.append(f"mapping: {error}")
    engine = resolved.get("engine")
    _check_processes(resolved, problems)
    _check_metric(resolved, problems)
    for key in REGISTRIES:
        if engine == "processes" and key in resolved and resolved[key].name.startswith("__main__:"):
            problems.append(
                f"{key} = {resolved[key].name!r}: other processes cannot find a class of the script that is running; "
                "move it to a module or a file of its own, or choose engine = 'simulation'"
            )


@dataclass(frozen=True)
class _Seen:
    """An experiment as one of its components sees it, on the nodes that it is used on."""

    nodes: int
    seed: int
    algorithm: Component
    sharing: Component
    topology: Component
    weights: WeightScheme
    training: Training
    restarts: bool


def _serving(components: Mapping[str, Any]) -> list[str]:
    """Which of these need a node of their own."""
    found = {kind: components.get(kind) for kind in ("algorithm", "topology")}
    return [k for k, c in found.items() if isinstance(c, Component) and c.traits.has_service]


def _incompatibilities(experiment: Experiment) -> list[str]:
    """What single components find wrong with the experiment that they are in, each said once."""
    nodes = range(experiment.nodes) if experiment.group else range(1)
    problems: dict[str, None] = dict.fromkeys(_mixtures(experiment))
    for settings in {id(s): s for s in map(experiment.settings, nodes)}.values():
        view = _Seen(
            experiment.nodes,
            experiment.seed,
            settings.algorithm,
            settings.sharing,
            experiment.topology,
            experiment.weights,
            settings.training,
            experiment.restarts,
        )
        if view.sharing.name != "full" and view.algorithm.traits.own_payloads:
            said = f"sharing = {view.sharing.name!r}: {view.algorithm.name!r} says more than a model, in its own words"
            problems[f"{said}; use sharing = 'full' or another algorithm"] = None
        for component in (view.algorithm, view.sharing, view.topology):
            instance = component.build()
            if isinstance(instance, Constrained):
                problems.update(dict.fromkeys(instance.incompatibilities(view)))
    return list(problems)


def _mixtures(experiment: Experiment) -> list[str]:
    """Groups whose nodes would not understand the others, since they run another algorithm or the same one otherwise.

    A plug-in may do as it likes: nodes that disturb the others are what some experiments are about.
    """
    own = registry("algorithm")
    rule = experiment.algorithm if experiment.algorithm.name in own else None
    problems: dict[str, None] = {}
    for i, group in enumerate(experiment.group):
        members = () if group.algorithm is None else group.ids(experiment.nodes)
        for algorithm in {id(a): a for a in (experiment.settings(node).algorithm for node in members)}.values():
            if algorithm.name not in own:
                continue
            rule = rule or algorithm
            if algorithm.name != rule.name:
                problems[
                    f"group[{i}].algorithm = {algorithm.name!r}: other nodes run {rule.name!r}, and neither waits for "
                    "what the other says; let all nodes run one algorithm, or one of your own"
                ] = None
                continue
            may_differ = rule.traits.per_node_options
            for key, value in algorithm.options.items():
                if key not in may_differ and value != rule.options[key]:
                    problems[
                        f"group[{i}].algorithm.{key} = {value!r}: other nodes have {rule.options[key]!r}, and nodes "
                        "that differ in this wait for each other in vain; set it for all nodes"
                    ] = None
    return list(problems)


def _placed(mapping: Component, nodes: int, groups: Sequence[Group]) -> list[Machine]:
    assigned = {node: g.machine for g in groups if g.machine is not None for node in g.ids(nodes)}
    if assigned and mapping.name != "by-group":
        raise ValueError(f"groups name machines, and mapping = {mapping.name!r} does not look at them; use 'by-group'")
    placing: NodeMapping = mapping.build()
    return placing.place(nodes, assigned)


def _check_processes(resolved: Mapping[str, Any], problems: list[str]) -> None:
    """What only nodes that are processes cannot have."""
    if resolved.get("engine") != "processes":
        return
    training, plan = resolved.get("training", Training()), resolved.get("processes", ProcessesPlan())
    if training.device != "cpu":
        problems.append(
            f"training.device = {training.device!r}: forked processes cannot share it; "
            "use 'cpu' or engine = 'simulation'"
        )
    if plan.host in ("0.0.0.0", "*") and plan.announce is None:
        problems.append(f"processes.host = {plan.host!r}: say in processes.announce where others find this machine")
    if plan.keys is not None and not plan.sealed:
        problems.append(
            f"processes.keys = {str(plan.keys)!r}: nothing is encrypted with them unless processes.sealed = true; set "
            "it, or leave the keys out"
        )
    if plan.shaping == "kernel":
        _check_kernel_shaping(resolved, plan, problems)


def _check_kernel_shaping(resolved: Mapping[str, Any], plan: ProcessesPlan, problems: list[str]) -> None:
    """What only the model can do to messages; `shoal.environment.network.access` looks at the network itself."""
    instead = "; use processes.shaping = 'model'"
    for key in ("host", "announce"):
        if (value := getattr(plan, key)) != getattr(ProcessesPlan(), key):
            problems.append(
                f"processes.{key} = {value!r}: with processes.shaping = 'kernel' every node has an address of its own; "
                f"leave it out, or set processes.shaping = 'model'"
            )
    if "availability" in resolved and resolved["availability"].name != "always":
        name = resolved["availability"].name
        problems.append(f"availability = {name!r}: the kernel does not keep messages from nodes that are away{instead}")
    for i, fault in enumerate(resolved.get("fault", ())):
        if fault.kind == "slow" and fault.what != "compute":
            what = "" if fault.what is None else f" of what = {fault.what!r}"
            problems.append(f"fault[{i}]: 'slow'{what} slows messages down; set what = 'compute', or use "
                            "processes.shaping = 'model'")  # fmt: skip
        elif fault.kind in ("partition", "repair", "hold", "release", "drop"):
            problems.append(f"fault[{i}]: {fault.kind!r} is about messages, which the kernel carries{instead}")


def _check_metric(resolved: Mapping[str, Any], problems: list[str]) -> None:
    """That what the time to is asked for is measured, as far as that can be told without the data."""
    plan: EvaluationPlan = resolved.get("evaluation", EvaluationPlan())
    if plan.metric is None or ("trainer" in resolved and resolved["trainer"].name not in metrics.TRAINERS):
        return
    known = set().union(*metrics.BY_TASK.values())
    measured = set().union(*metrics.DEFAULT.values()) if plan.metrics is None else {*plan.metrics, "loss"}
    source = "per-class" if re.fullmatch(r"class \d+", plan.metric) else plan.metric
    if source not in known or plan.metric == "per-class":
        expected = schema.nearest(plan.metric, known - {"per-class"} | {"class 0"})
        problems.append(f"evaluation.metric = {plan.metric!r}: unknown{expected}")
    elif source not in measured:
        problems.append(
            f"evaluation.metric = {plan.metric!r}: it would not be measured; add {source!r} to evaluation.metrics"
        )


class _WithDefaults:
    """The values resolved so far, with the defaults of those not given."""

    def __init__(self, resolved: Mapping[str, Any], base: Path) -> None:
        problems: list[str] = []
        for key in GROUP_KEYS:
            value = resolved.get(key, schema.parameters(Experiment)[key].default)
            if key in REGISTRIES:
                value = _component(key, value, base, key, problems)
            setattr(self, key, value)


def _node_settings(view: Any, groups: Mapping[int, Group], base: Path, problems: list[str]) -> NodeSettings | None:
    """What holds for a node in these groups, each of which overrides those before it."""
    values: dict[str, Any] = {}
    for key in GROUP_KEYS:
        value = getattr(view, key)
        for i, group in groups.items():
            override = getattr(group, key)
            if override is None:
                continue
            place = f"group[{i}].{key}"
            if key in REGISTRIES:
                replaced = override.get("name", value.name) != value.name
                merged = dict(override) if replaced else {**value.to_table(), **override}
                value = _component(key, merged, base, place, problems)
            else:
                merged = {**dataclasses.asdict(value), **override}
                value = schema.convert(merged, type(value), place, problems)
            if value is schema.INVALID:
                return None
        values[key] = value
    return NodeSettings(**values)


def _component(kind: str, value: Any, base: Path, place: str, problems: list[str]) -> Any:
    """A component from its table, an instance of its class, or one that is resolved already."""
    if isinstance(value, Component):
        return value
    if type(value).__module__.startswith("networkx"):
        from shoal.topologies.given import from_networkx

        value = from_networkx(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _spelt(kind, value)
    if isinstance(value, Mapping) and kind in _UNNAMED:
        value = {"name": _UNNAMED[kind], **value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        problems.append(f"{place} = {value!r}: expected a table with a name, such as {{ name = … }}")
        return schema.INVALID
    options = {k: v for k, v in value.items() if k != "name"}
    name = _absolute(value["name"], base)
    try:
        cls = find(kind, name)
    except ValueError as error:
        problems.append(f"{place}.name = {value['name']!r}: {error}")
        return schema.INVALID
    inner = _inner_components(cls, options, base, place, problems)
    wrong = [key for key, component in inner.items() if component is schema.INVALID]
    options.update({k: None if k in wrong else c.build() for k, c in inner.items()})
    arguments = schema.arguments(cls, options, place, problems)
    if arguments is schema.INVALID or wrong:
        return schema.INVALID
    # Files are looked for beside the experiment, by nodes that may start in another folder.
    arguments = {k: _located(v, base) if isinstance(v, Path) else v for k, v in arguments.items()}
    before = len(problems)
    if schema.build(cls, arguments, place, problems) is schema.INVALID or len(problems) > before:
        return schema.INVALID
    defaults = {p.name: p.default for p in schema.parameters(cls).values() if not p.required}
    return Component(kind, name, {**defaults, **arguments, **inner})


def _inner_components(
    cls: type, options: Mapping[str, Any], base: Path, place: str, problems: list[str]
) -> dict[str, Any]:
    """The parameters of `cls` that are components themselves, given or by default; a bare word is a name."""
    try:
        nested = {p.name: p for p in schema.parameters(cls).values() if p.nested is not None}
    except ValueError:
        return {}  # said by whoever looks at the other parameters
    found = {}
    for key, parameter in nested.items():
        value = options.get(key, parameter.default)
        if value is not None and value is not schema.REQUIRED:
            table = {"name": value} if isinstance(value, str) else value
            found[key] = _component(parameter.nested or "", table, base, f"{place}.{key}", problems)
    return found


def _first_at_hand(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """The data set that a table names or, where its files are not here, the one that it names `otherwise`."""
    from shoal.data.store import at_hand

    first = {key: value for key, value in dataset.items() if key != "otherwise"}
    path = first.get("path")
    if at_hand(str(first.get("name")), None if path is None else Path(path)):
        return first
    other = dataset["otherwise"]
    table = {"name": other} if isinstance(other, str) else dict(other)
    warnings.warn(
        f"dataset {first['name']!r} is not here ('shoal data fetch {first['name']}' gets it): "
        f"{table.get('name')!r} in its place",
        stacklevel=2,
    )
    return table


def _spelt(kind: str, instance: Any) -> dict[str, Any]:
    """An instance of a component's class, as a table."""
    options = {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance) if f.init}
    return {"name": component_name(kind, instance), **options}


def _absolute(name: str, base: Path) -> str:
    """A plug-in file's path made absolute: nodes may start in another folder."""
    where, separator, attribute = name.rpartition(":")
    if separator and where.endswith(".py"):
        return f"{_located(Path(where), base)}:{attribute}"
    return name


def _located(path: Path, base: Path) -> Path:
    """A file as an experiment names it: beside the experiment or, as with --set, in the working folder."""
    beside = (base / path).resolve()
    return path.resolve() if not beside.exists() and path.exists() else beside


def _overridden(table: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A copy of `table` with dotted keys set."""
    result: dict[str, Any] = _copied(table)
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        place: Any = result
        for parent in parents:
            if not isinstance(place.setdefault(parent, {}), dict):
                problems.append(f"{dotted}: {parent!r} is not a table")
                break
            place = place[parent]
        else:
            place[last] = value
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copied(v) for k, v in value.items()}
    return value


def _lift(table: dict[str, Any], outer: str, inner: str) -> None:
    """Move `outer.inner` up: partitions and weights go with every data set and topology."""
    if isinstance(table.get(outer), dict) and inner in table[outer]:
        table[inner] = table[outer].pop(inner)


def _remove_misplaced(table: dict[str, Any], known: set[str], base: Path, problems: list[str]) -> None:
    """Note and take out the keys that are unknown where they stand: those of another table, and any at the top."""
    inside = _keys_by_table(table, base)
    homes: dict[str, list[str]] = {}
    for name, keys in inside.items():
        for key in keys:
            homes.setdefault(key, []).append(f"{name}.{key}")
    for key in [k for k in table if k not in known]:
        belongs = f"; it belongs to {' or '.join(homes[key])}" if key in homes else schema.nearest(key, known)
        problems.append(f"{key}: unknown key{belongs}")
        del table[key]
    homes.update({key: ["the top of the file, above every [table]"] for key in known - homes.keys()})
    for name, keys in inside.items():
        given = table.get(name)
        if not isinstance(given, dict):
            continue
        for key in [k for k in given if k != "name" and k not in keys and k in homes]:
            problems.append(f"{name}.{key}: unknown key; it belongs to {' or '.join(homes[key])}")
            del given[key]


def _keys_by_table(table: Mapping[str, Any], base: Path) -> dict[str, set[str]]:
    """The keys that each table of an experiment may have, as far as they are known."""
    keys = {n: set(schema.parameters(t)) for n, t in _TABLES.items() if isinstance(t, type) and t is not str}
    for kind in REGISTRIES.keys() & schema.parameters(Experiment).keys() - _PLACES.keys():
        named = table.get(kind, schema.parameters(Experiment)[kind].default)
        name = named.get("name", _UNNAMED.get(kind)) if isinstance(named, Mapping) else None
        with contextlib.suppress(ValueError):  # no such component: that is said elsewhere
            keys[kind] = set(schema.parameters(find(kind, _absolute(str(name), base))))
            keys[kind].update(key for key, place in _PLACES.items() if place == f"{kind}.{key}")
    return keys


def _plain(value: Any) -> Any:
    """Only what TOML can spell: no None, tuples as lists."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` of the command line: a dotted key and a TOML value; a bare word is a string."""
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not all(re.fullmatch(r"[\w-]+", part) for part in key.split(".")):
        raise ExperimentError([f"{text!r}: expected key=value, such as topology.degree=5"], "--set")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        if re.fullmatch(r"[\w./:+-]*", value.strip()):
            return key, value.strip()
        raise ExperimentError([f"{text!r}: {error}"], "--set") from None


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    return dict(parse_override(text) for text in texts)
