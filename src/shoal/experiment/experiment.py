"""The experiment: typed, and validated completely before anything starts.

    experiment = Experiment.from_file("examples/quickstart.toml", {"nodes": 32})
    experiment = Experiment(nodes=16, algorithm=DPSGD(rounds=40), topology={"name": "ring"})
    run = experiment.run()

A wrong experiment raises one `ExperimentError`, which lists every problem with its location.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w

from shoal import schema
from shoal.data.validation import Validation
from shoal.environment.faults import Fault
from shoal.errors import ExperimentError
from shoal.experiment import checks
from shoal.experiment.mapping import THIS_MACHINE, Machine, MachineInfo, NodeMapping, by_machine
from shoal.experiment.overrides import (
    apply_overrides,
    current_tables,
    lift_nested_keys,
    lift_nested_values,
    remove_misplaced,
    unknown_parameters,
)
from shoal.experiment.plugin_files import PLUGINS, changed_plugin_files
from shoal.experiment.reading import name_of, read_toml
from shoal.experiment.resolving import Resolver
from shoal.experiment.tables import (
    NOT_IN_TABLES,
    CheckpointPlan,
    Engine,
    EvaluationPlan,
    Group,
    NodeSettings,
    ProcessesPlan,
    SimulationPlan,
)
from shoal.experiment.writing import experiment_to_table
from shoal.node_context import NonFinite
from shoal.randomness import generator
from shoal.results.monitor import OnEvaluation, OnRound, RunMonitor
from shoal.results.progress_text import ProgressLines
from shoal.topologies.graph import WeightScheme
from shoal.training.settings import Training
from shoal.types import Bounds, FormerOption, NodeId

if TYPE_CHECKING:
    from shoal.experiment.run_results import Run


def _named(name: str) -> Any:
    """A field for a component, with the name of its default."""
    return field(default_factory=lambda: {"name": name})


@dataclass(frozen=True)
class Experiment:
    """Everything that a run depends on.

    Tables may be given as dicts. A component may also be its name, its class or an instance, and the data set arrays.
    """

    name: str = "experiment"
    nodes: Annotated[int, Bounds(at_least=1)] = 16
    seed: Annotated[int, Bounds(at_least=0, below=2**63)] = 0
    engine: Engine = "simulation"
    duration: Annotated[float, Bounds(above=0)] | None = None
    """Seconds of the run's clock after which the run ends; default: it ends when the algorithm ends."""
    algorithm: Any = _named("dpsgd")
    sharing: Any = _named("full")
    topology: Any = _named("ring")
    weights: WeightScheme = "metropolis-hastings"
    non_finite: NonFinite = "reject"
    """What nodes do with received payloads of the sharing that hold infinities or NaN."""
    dataset: Any = _named("digits")
    partition: Any = _named("iid")
    augmentation: tuple[Any, ...] = ()
    """Transformations of training inputs, in order; a string is the name of one without options."""
    validation: Annotated[float, Bounds(at_least=0, below=1)] | Validation | None = None
    """Training samples that nodes do not train on: a fraction of all of them, or a table; 0 means None."""
    model: Any = _named("mlp")
    network: Any = _named("ideal")
    speed: Annotated[Any, FormerOption("device")] = _named("constant")
    """How fast nodes compute. `training.device` is the torch device that computes."""
    availability: Any = _named("always")
    mapping: Any = _named("cores")
    trainer: Any = _named("torch")
    training: Training = field(default_factory=Training)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    simulation: SimulationPlan = field(default_factory=SimulationPlan)
    processes: ProcessesPlan = field(default_factory=ProcessesPlan)
    checkpoint: CheckpointPlan = field(default_factory=CheckpointPlan)
    group: tuple[Group, ...] = ()
    fault: tuple[Fault, ...] = ()
    base: Path = field(default=Path("."), compare=False)
    """The folder that relative paths of plug-ins and other files start from."""
    source: str = field(default="", compare=False)
    """The file that the experiment was read from; it begins error messages. Empty if there is none."""

    def __post_init__(self) -> None:
        name = self.name if isinstance(self.name, str) else "experiment"
        resolver = Resolver(self.base)
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        lift_nested_values(values, _parameters(), resolver.problems)
        resolved = resolver.values(values, _parameters())
        if resolver.problems:
            raise ExperimentError(resolver.problems, name)
        for key, value in resolved.items():
            object.__setattr__(self, key, value)
        if problems := checks.contradictions(self) or checks.incompatibilities(self):
            raise ExperimentError(problems, name)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
        """Read an experiment from a TOML file. `overrides` maps dotted keys to values."""
        path = Path(path)
        table = read_toml(path)
        table.setdefault("name", name_of(path))
        return cls.from_table(table, overrides, base=path.parent, source=str(path))

    @classmethod
    def from_table(
        cls,
        table: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        base: Path = Path("."),
        source: str = "",
    ) -> Experiment:
        """Read an experiment from a table, as a TOML file holds it. `source` is the file, for error messages."""
        title = source or "experiment"
        problems: list[str] = []
        known = _parameters()
        table = apply_overrides(current_tables(table, known), current_tables(overrides or {}, known), problems)
        table.pop("versions", None)  # a run writes them beside its resolved experiment
        if changed := changed_plugin_files(table.pop(PLUGINS, {}), base):
            raise ExperimentError(changed, title)  # before any of them is imported
        remove_misplaced(table, known, base, problems)
        lift_nested_keys(table)
        values = Resolver(base, problems).values(table, known)
        if problems:
            raise ExperimentError(problems, title)
        try:
            return cls(**values, base=base, source=source)
        except ExperimentError as error:
            raise ExperimentError(list(error.problems), title) from None

    def to_table(self) -> dict[str, Any]:
        """Return the experiment as plain data, which `from_table` reads."""
        return experiment_to_table(self)

    def toml(self) -> str:
        """Return the experiment as TOML, which `from_file` reads."""
        return tomli_w.dumps(self.to_table())

    def settings(self, node: NodeId) -> NodeSettings:
        """Return the settings of `node`, with the overrides of its groups."""
        groups = tuple(i for i, members in enumerate(self._members) if node in members)
        if groups not in self._settings_by_groups:
            resolver = Resolver(self.base)
            settings = resolver.node_settings(self, {i: self.group[i] for i in groups})
            if settings is None:
                raise ExperimentError(resolver.problems, self.title)
            self._settings_by_groups[groups] = settings
        return self._settings_by_groups[groups]

    @property
    def title(self) -> str:
        """How error messages name the experiment: its file, or its name."""
        return self.source or self.name

    @functools.cached_property
    def _members(self) -> list[frozenset[NodeId]]:
        """The nodes of each group."""
        return [frozenset(group.ids(self.nodes)) for group in self.group]

    @functools.cached_property
    def _settings_by_groups(self) -> dict[tuple[int, ...], NodeSettings]:
        return {}

    @functools.cached_property
    def services(self) -> dict[str, NodeId]:
        """The ids of the service nodes by the component that needs them, "algorithm" or "topology"."""
        kinds = [kind for kind in ("algorithm", "topology") if getattr(self, kind).traits.has_service]
        return {kind: self.nodes + i for i, kind in enumerate(kinds)}

    @property
    def size(self) -> int:
        """The number of nodes, including service nodes."""
        return self.nodes + len(self.services)

    @functools.cached_property
    def placement(self) -> dict[Machine, list[NodeId]]:
        """The nodes on each machine, if all that the mapping does not name run on this one. Raises ValueError."""
        return self.place(THIS_MACHINE)

    def place(self, machines: Sequence[MachineInfo]) -> dict[Machine, list[NodeId]]:
        """Return the nodes on each of `machines`; service nodes run on the machine of node 0.

        Raises ValueError if the mapping does not fit the nodes or the groups.
        """
        assigned = {node: g.machine for g in self.group if g.machine is not None for node in g.ids(self.nodes)}
        if assigned and self.mapping.name != "by-group":
            raise ValueError(f"groups name machines, which mapping = {self.mapping.name!r} ignores; use 'by-group'")
        mapping: NodeMapping = self.mapping.build()
        placed = mapping.place(self.nodes, assigned, machines)
        return by_machine(placed + [placed[0]] * len(self.services))

    @property
    def round_nodes(self) -> range:
        """The nodes whose rounds count as rounds of the run: all nodes that train, or the server that calls them."""
        server = self.services.get("algorithm")
        return range(self.nodes) if server is None else range(server, server + 1)

    @functools.cached_property
    def evaluated_nodes(self) -> frozenset[NodeId]:
        """The training nodes whose models are evaluated."""
        wanted = self.evaluation.nodes
        if wanted is None or wanted >= self.nodes:
            return frozenset(range(self.nodes))
        drawn = generator(self.seed, "evaluated nodes").choice(self.nodes, wanted, replace=False)
        return frozenset(int(n) for n in drawn)

    @property
    def scored_nodes(self) -> frozenset[NodeId]:
        """The nodes that every evaluation during a run has scores of: the server, if rounds are evaluated."""
        server = self.services.get("algorithm")
        if server is None or self.evaluation.seconds is not None or not self.evaluated_nodes:
            return self.evaluated_nodes
        return frozenset([server])

    @property
    def adds_data(self) -> bool:
        """Whether nodes send samples, which become part of the receivers' training data."""
        nodes = range(self.nodes) if self.group else range(1)
        return any(self.settings(node).sharing.traits.adds_data for node in nodes)

    def faults(self, node: NodeId) -> list[Fault]:
        """Return the faults that strike `node` in a given round, in the order of rounds."""
        struck = [fault for fault in self.fault if fault.kind != "join" and node in fault.ids(self.size)]
        by_round = [(fault.round, fault) for fault in struck if fault.round is not None]
        return [fault for _, fault in sorted(by_round, key=lambda pair: pair[0])]

    @property
    def timed_faults(self) -> tuple[Fault, ...]:
        """The faults that strike by the clock. Their `shoal.environment.faults.fault_events` may be infinite."""
        return tuple(fault for fault in self.fault if fault.round is None)

    @functools.cached_property
    def late_nodes(self) -> frozenset[NodeId]:
        """The nodes that are not there at the start, and join later."""
        return frozenset(node for fault in self.fault if fault.kind == "join" for node in fault.ids(self.size))

    @property
    def joins_by_round(self) -> dict[NodeId, int]:
        """The late nodes that join when the others start a given round, with this round."""
        joins = [(fault.round, fault) for fault in self.fault if fault.kind == "join"]
        return {node: round for round, fault in joins if round is not None for node in fault.ids(self.size)}

    @property
    def restarts(self) -> bool:
        """Whether nodes may be started during the run: failed ones again, or late ones."""
        return any(fault.restarts_nodes for fault in self.fault)

    def describe_failure(self, node: NodeId, failure: str) -> str:
        """Return the notice for users about a failed node."""
        for kind, id in self.services.items():
            if id == node:
                return f"node {node}, the service node of {kind} = {getattr(self, kind).name!r}, {failure}"
        return f"node {node} {failure}; its neighbours continue without it"

    def run(
        self,
        out: str | Path = "runs",
        ray: str | None = None,
        *,
        progress: bool = False,
        on_round: OnRound | None = None,
        on_evaluation: OnEvaluation | None = None,
    ) -> Run:
        """Run the experiment, and return when it has ended.

        `ray` is the address of a Ray cluster, or "local" to start Ray for this run. Its machines run the nodes of the
        process engine, or the training of a simulation with simulation.batching = "ray" (there "local" is the default).

        With `progress`, lines of progress are printed. `on_round` is called with a `RoundReport` when all nodes have
        finished a round, `on_evaluation` with an `EvaluationReport` when all nodes have been evaluated, both in this
        process. An exception that they raise ends the run, and is raised here.
        """
        from shoal.experiment.running import run

        monitor = RunMonitor(ProgressLines() if progress else None, on_round, on_evaluation)
        done = run(self, Path(out), monitor, ray=ray)
        if progress:
            print(done)
        return done


def _accept_former_names(init: Callable[..., None]) -> Callable[..., None]:
    """Let the constructor accept earlier names of its parameters, with a warning, and explain unknown ones."""

    @functools.wraps(init)
    def accepting(self: Experiment, *positional: Any, **named: Any) -> None:
        known = _parameters()
        earlier = {key: value for key, value in named.items() if key not in (*known, *NOT_IN_TABLES)}
        current = {key: value for key, value in named.items() if key not in earlier}
        texts = {key: value for key, value in earlier.items() if isinstance(value, str)}
        tables = {key: value for key, value in earlier.items() if key not in texts}
        renamed = {**texts, **schema.current_names(tables, known, "")}  # a text has no earlier name, as in a file
        if not renamed.keys() <= known.keys():
            name, base = current.get("name", "experiment"), current.get("base", Path("."))
            raise ExperimentError(unknown_parameters({**current, **renamed}, known, Path(base)), str(name))
        init(self, *positional, **{**current, **renamed})

    return accepting


@functools.cache
def _parameters() -> dict[str, schema.Parameter]:
    """The fields of `Experiment` that a table may have, with their types and defaults."""
    return {name: parameter for name, parameter in schema.parameters(Experiment).items() if name not in NOT_IN_TABLES}


Experiment.__init__ = _accept_former_names(Experiment.__init__)  # type: ignore[method-assign]
