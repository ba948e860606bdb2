"""Experiments in TOML and in Python: what is rejected, and what survives a round trip."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_tables import problems
from shoal.algorithms.dpsgd import DPSGD
from shoal.data.partitions import Dirichlet
from shoal.errors import ExperimentError, TopologyError
from shoal.experiment import Experiment, parse_override, parse_overrides
from shoal.topologies.regular import Regular
from shoal.training.settings import Training

EXAMPLES = [file for file in sorted((Path(__file__).parent.parent / "examples").glob("*.toml")) if file.stem != "sweep"]
"""All examples except the sweep, which is not one experiment."""


# Every problem is reported with its location


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"nodez": 3}, "nodez: unknown key; did you mean 'nodes'?"),
        (
            {"engine": "processes", "processes": {"host": "0.0.0.0", "sealed": True}},
            "processes.host = '0.0.0.0': nodes cannot connect to a wildcard; set processes.announce to the address of "
            "this machine",
        ),
        ({"training": {"lrr": 1}}, "training.lrr: unknown key; did you mean 'lr'?"),
        ({"sharing": {"name": "fulll"}}, "sharing.name = 'fulll': unknown sharing 'fulll'; did you mean 'full'?"),
        ({"algorithm": {"name": "dpsgd", "ruonds": 3}}, "algorithm.ruonds: unknown key; did you mean 'rounds'?"),
        ({"lr": 0.1}, "lr: unknown key; it belongs to training.lr"),
        ({"rounds": 5}, "rounds: unknown key; it belongs to algorithm.rounds"),
        ({"partition": {"name": "iid"}}, "partition: unknown key; it belongs to dataset.partition"),
        ({"weights": "uniform"}, "weights: unknown key; it belongs to topology.weights"),
        ({"algorithm": {"name": "dpsgd", "lr": 0.1}}, "algorithm.lr: unknown key; it belongs to training.lr"),
        ({"training": {"rounds": 5}}, "training.rounds: unknown key; it belongs to algorithm.rounds"),
        (
            {"training": {"seed": 5}},
            "training.seed: unknown key; it belongs to the top of the file, above every [table]",
        ),
        (
            {"group": [{"nodes": "0", "model": "mlp"}]},
            "group[0].model: a group cannot change it; expected one of algorithm, machine, network, nodes, sharing, "
            "speed, training",
        ),
        ({"nodes": "many"}, "nodes = 'many': expected integer at least 1"),
        ({"nodes": 0}, "nodes = 0: expected integer at least 1"),
        ({"seed": 2**64}, f"seed = {2**64}: expected integer at least 0 and below 9.22337e+18"),
        ({"engine": "xyz"}, "engine = 'xyz': expected one of 'simulation', 'processes'"),
        ({"training": 5}, "training = 5: expected a table"),
        ({"topology": ["ring"]}, "topology = ['ring']: expected a table with a name, such as { name = 'ring' }"),
        ({"model": {"hidden": [1]}}, "model = {'hidden': [1]}: expected a table with a name, such as { name = 'mlp' }"),
        (
            {"sharing": {"name": "choco", "compressor": 3}},
            "sharing.compressor = 3: expected a table with a name, such as { name = … }",
        ),
        (
            {"model": len},
            "model = <built-in function len>: expected a table with a name, such as { name = 'mlp' }, "
            "or a torch.nn.Module",
        ),
        (
            {"training": {"optimizer": Fraction}},
            "training.optimizer = <class 'fractions.Fraction'>: expected string; write the name of the class, "
            "'file.py:Fraction' or 'module:Fraction'",
        ),
        (
            {"training": {"loss": list(range(99))}},
            f"training.loss = {str(list(range(99)))[:199]}…: expected string",
        ),
        ({"model": {"name": "mlp", "hidden": [8, 0]}}, "model.hidden[1] = 0: expected integer at least 1"),
        (
            {"processes": {"base_port": 70000}},
            "processes.base_port = 70000: expected integer at least 1 and at most 65535",
        ),
        ({"fault": [{"kind": "crash", "node": 99}]}, "fault[0].node = 99: there is no such node; nodes = 16"),
    ],
)  # fmt: skip
def test_a_problem_names_the_location_and_the_remedy(table: dict[str, Any], problem: str) -> None:
    assert problems(table) == (problem,)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "-x", "two words"])
def test_a_name_that_cannot_be_a_folder_is_rejected(name: str) -> None:
    (problem,) = problems({"name": name})
    assert problem.startswith(f"name = {name!r}: expected letters")


def test_all_problems_are_reported_at_once() -> None:
    found = problems({
        "nodez": 3, "lr": 0.1, "seed": -1, "training": {"lrr": 1, "batch_size": 0}, "sharing": {"name": "fulll"},
    })  # fmt: skip
    assert [p.split(" ")[0].rstrip(":") for p in found] == [
        "nodez", "lr", "seed", "training.lrr", "training.batch_size", "sharing.name",
    ]  # fmt: skip


def test_the_message_names_the_file_and_counts_the_problems(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("nodes = 0\nseed = -1\n")
    with pytest.raises(ExperimentError, match=r"mine.toml: 2 problems\n  - nodes = 0: .*\n  - seed = -1: "):
        Experiment.from_file(file)


def test_a_file_that_cannot_be_read_raises_an_experiment_error(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("nodes = = 3")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path, why in (
        ("none.toml", "there is no file"),
        (".", "is a folder"),
        ("broken.toml", "not valid TOML: Invalid value"),
        ("binary.toml", "not valid TOML"),
        ("broken.toml/x.toml", "cannot be read: Not a directory"),
    ):
        with pytest.raises(ExperimentError, match=why):
            Experiment.from_file(tmp_path / path)


def test_an_experiment_without_a_name_is_named_after_its_file(tmp_path: Path) -> None:
    (tmp_path / "my experiment.toml").write_text("")
    assert Experiment.from_file(tmp_path / "my experiment.toml").name == "my_experiment"


# --set


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("nodes=8", "nodes", 8),
        ("training.lr = 0.5", "training.lr", 0.5),
        ("engine=simulation", "engine", "simulation"),
        ("algorithm.name=mine.py:Mine", "algorithm.name", "mine.py:Mine"),
        ("engine='simulation'", "engine", "simulation"),
        ("evaluation.average=false", "evaluation.average", False),
        ("model.hidden=[8, 8]", "model.hidden", [8, 8]),
        ("topology={name='ring'}", "topology", {"name": "ring"}),
    ],
)
def test_set_takes_a_dotted_key_and_a_toml_value_or_a_bare_word(text: str, key: str, value: object) -> None:
    assert parse_override(text) == (key, value)


@pytest.mark.parametrize("text", ["nodes", "=3", "a..b=3", "topology={name='ring'", "name=two words", "a b=3"])
def test_set_rejects_what_it_cannot_parse(text: str) -> None:
    with pytest.raises(ExperimentError, match="--set: 1 problem"):
        parse_overrides([text])


def test_set_changes_one_key_and_a_table_replaces_the_table() -> None:
    table = {"topology": {"name": "regular", "degree": 4, "dynamic": True}}
    one = Experiment.from_table(table, {"topology.degree": 2})
    assert one.topology.options == {"degree": 2, "dynamic": True}
    assert Experiment.from_table(table, {"topology": {"name": "ring"}}).topology.name == "ring"
    assert table["topology"]["degree"] == 4, "the given table is not modified"


def test_set_creates_missing_tables_and_rejects_a_value_in_place_of_a_table() -> None:
    assert (
        Experiment.from_table({}, {"dataset.name": "digits", "dataset.partition.name": "shards"}).partition.name
        == "shards"
    )
    assert problems({"training": {"lr": 0.1}}, {"training.lr.x": 3}) == ("training.lr.x: 'lr' is not a table",)


# Python


def test_dicts_and_instances_give_the_same_experiment_as_toml() -> None:
    table = tomllib.loads(
        """
        name = "same"
        nodes = 8
        algorithm = { name = "dpsgd", rounds = 3 }
        topology = { name = "regular", degree = 4, weights = "uniform" }
        dataset = { name = "digits", partition = { name = "dirichlet", alpha = 0.1 } }
        training = { lr = 0.2 }
        group = [{ nodes = "0-3", training = { lr = 0.3 } }]
        """
    )
    from_toml = Experiment.from_table(table)
    with_instances = Experiment(
        name="same", nodes=8, algorithm=DPSGD(rounds=3), topology=Regular(degree=4), weights="uniform",
        partition=Dirichlet(alpha=0.1), training=Training(lr=0.2),
        group=[{"nodes": "0-3", "training": {"lr": 0.3}}],
    )  # fmt: skip
    with_dicts = Experiment(
        name="same", nodes=8, algorithm={"name": "dpsgd", "rounds": 3}, topology={"name": "regular", "degree": 4},
        weights="uniform", partition={"name": "dirichlet", "alpha": 0.1}, training={"lr": 0.2},
        group=[{"nodes": "0-3", "training": {"lr": 0.3}}],
    )  # fmt: skip
    assert from_toml == with_instances == with_dicts
    assert from_toml.toml() == with_instances.toml() == with_dicts.toml()


def test_a_wrong_value_in_python_is_rejected_in_the_same_way() -> None:
    with pytest.raises(ExperimentError, match="nodes = 0: expected integer at least 1"):
        Experiment(nodes=0)
    with pytest.raises(ExperimentError, match="sharing = 3: expected a table with a name"):
        Experiment(sharing=3)


def test_a_networkx_graph_is_a_topology() -> None:
    graph = networkx.petersen_graph()
    experiment = Experiment(nodes=10, topology=graph)
    built = experiment.topology.build().build(10, 0)
    assert {(a, b) for a in range(10) for b in built.links(a, 0).receivers} == set(graph.edges) | {
        (b, a) for a, b in graph.edges
    }
    assert Experiment.from_table(tomllib.loads(experiment.toml())) == experiment
    with pytest.raises(TopologyError, match="directed"):
        Experiment(nodes=3, topology=networkx.DiGraph([(0, 1)]))


def test_an_experiment_is_immutable() -> None:
    experiment = Experiment()
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.nodes = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.training.lr = 3.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.algorithm.name = "x"
    other = dataclasses.replace(experiment, nodes=3)
    assert (other.nodes, experiment.nodes) == (3, 16)


# Round trips

rates = st.floats(1e-6, 10, allow_subnormal=False)
tables = st.fixed_dictionaries(
    {"nodes": st.integers(4, 2000)},
    optional={
        "name": st.from_regex(r"[a-z][a-z0-9.+_-]{0,20}", fullmatch=True),
        "seed": st.integers(0, 2**63 - 1),
        "engine": st.sampled_from(["simulation", "processes"]),
        "algorithm": st.fixed_dictionaries({"name": st.just("dpsgd"), "rounds": st.integers(1, 10**6)}),
        "topology": st.one_of(
            st.fixed_dictionaries({"name": st.sampled_from(["ring", "full", "exponential"])}),
            st.fixed_dictionaries(
                {"name": st.just("regular")}, optional={"degree": st.integers(1, 50), "dynamic": st.booleans()}
            ),
            st.fixed_dictionaries(
                {"name": st.just("edges"), "edges": st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2))},
                optional={"weights": st.sampled_from(["uniform", "metropolis-hastings"])},
            ),
        ),
        "dataset": st.fixed_dictionaries(
            {"name": st.just("synthetic"), "shape": st.lists(st.integers(1, 32), min_size=1, max_size=3)},
            optional={"partition": st.fixed_dictionaries({"name": st.just("dirichlet"), "alpha": rates})},
        ),
        "model": st.fixed_dictionaries({"name": st.just("mlp"), "hidden": st.lists(st.integers(1, 64), max_size=3)}),
        "training": st.fixed_dictionaries(
            {}, optional={"lr": rates, "batch_size": st.integers(1, 512), "options": st.just({"dampening": 1e-8})}
        ),
        "evaluation": st.fixed_dictionaries({}, optional={"every": st.integers(0, 9), "nodes": st.integers(0, 9)}),
        "processes": st.fixed_dictionaries({}, optional={"base_port": st.integers(1, 65535)}),
        "group": st.lists(
            st.fixed_dictionaries({"nodes": st.sampled_from(["0", "1-3", "0, 2"]), "training": st.just({"lr": 0.5})}),
            max_size=3,
        ),
        "fault": st.lists(
            st.fixed_dictionaries({"kind": st.sampled_from(["crash", "hang"]), "node": st.integers(0, 3)}), max_size=2
        ),
    },
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(tables)
def test_an_experiment_survives_its_table_and_its_toml(table: dict[str, Any]) -> None:
    experiment = Experiment.from_table(table)
    assert Experiment.from_table(experiment.to_table()) == experiment
    assert Experiment.from_table(tomllib.loads(experiment.toml())) == experiment
    assert dataclasses.replace(experiment) == experiment


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_valid_and_survives_its_toml(path: Path) -> None:
    experiment = Experiment.from_file(path)
    assert Experiment.from_table(tomllib.loads(experiment.toml())) == experiment


# A data set with an alternative


def test_a_missing_data_set_is_replaced_by_the_one_in_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    table = {"dataset": {"name": "cifar10", "otherwise": "digits", "partition": {"name": "shards", "per_node": 3}}}
    with pytest.warns(UserWarning, match=r"'cifar10' is not on this machine .*fetch cifar10.*using 'digits' instead"):
        resolved = Experiment.from_table(table)
    assert resolved.dataset.name == "digits"
    assert resolved.partition.options["per_node"] == 3
    assert "otherwise" not in resolved.toml(), "the written experiment names the data set that was used"


def test_an_available_data_set_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    (tmp_path / "cifar-10").mkdir()
    (tmp_path / "cifar-10" / "cifar-10-python.tar.gz").touch()
    assert Experiment.from_table({"dataset": {"name": "cifar10", "otherwise": "digits"}}).dataset.name == "cifar10"
    assert Experiment.from_table({"dataset": {"name": "digits", "otherwise": "synthetic"}}).dataset.name == "digits"


def test_the_alternative_data_set_is_validated_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    rejected = pytest.raises(ExperimentError, match=r"unknown dataset 'digit'.*'digits'")
    with pytest.warns(UserWarning, match="using 'digit' instead"), rejected:
        Experiment.from_table({"dataset": {"name": "cifar10", "otherwise": "digit"}})


def test_an_experiment_is_validated_without_torch() -> None:
    """The coordinator and agents validate it, and torch takes seconds to import."""
    program = (
        "import sys; from shoal.experiment import Experiment; "
        f"Experiment.from_file({str(EXAMPLES[0].parent / 'thousand-processes.toml')!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
