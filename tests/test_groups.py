"""Groups of nodes that differ in some keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiment_tables import PLUGIN, problems
from shoal.algorithms.dpsgd import DPSGD
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.training.schedules import Cosine
from shoal.training.settings import Training
from shoal.traits import Traits

# Groups


def test_a_group_overrides_single_keys_and_another_name_replaces_the_table(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    experiment = Experiment.from_table(
        {
            "nodes": 4,
            "algorithm": {"name": "dpsgd", "rounds": 7},
            "sharing": {"name": "random", "fraction": 0.2},
            "training": {"lr": 0.1, "batch_size": 3},
            "group": [
                {"nodes": "0, 2-3", "training": {"lr": 0.5}, "sharing": {"values": "float16"}},
                {"nodes": "1", "algorithm": {"name": "mine.py:Mine"}, "speed": {"step_seconds": 2}},
            ],
        },
        base=tmp_path,
    )
    for node in (0, 2, 3):
        assert experiment.settings(node).training == Training(lr=0.5, batch_size=3)
        assert experiment.settings(node).algorithm == experiment.algorithm
        sharing = experiment.settings(node).sharing.options
        assert (sharing["fraction"], sharing["values"].name) == (0.2, "float16")
    other = experiment.settings(1)
    assert (other.training, other.sharing) == (experiment.training, experiment.sharing)
    assert other.algorithm.options == {"alpha": 0.5}
    assert (other.speed.name, other.speed.options["step_seconds"]) == ("constant", 2.0)


def test_the_training_of_a_group_is_written_as_a_table_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\nclass Loss(torch.nn.CrossEntropyLoss): ...\n")
    training = {"schedule": Cosine(length=3), "loss": "mine.py:Loss"}
    written = Experiment(nodes=2, group=[{"nodes": "1", "training": training}], base=tmp_path)  # type: ignore[arg-type]
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "experiment.toml"
    path.write_text(written.toml())
    read = Experiment.from_file(path).settings(1).training
    assert read == written.settings(1).training
    assert read.schedule.options["length"] == 3
    assert read.loss == f"{tmp_path / 'mine.py'}:Loss"


@pytest.mark.parametrize(
    ("algorithm", "group", "problem"),
    [
        ({"name": "dpsgd"}, {"name": "fedavg"}, "group[0].algorithm = 'fedavg': other nodes run 'dpsgd', and nodes"),
        ({"name": "fedavg"}, {"name": "dpsgd"}, "group[0].algorithm = 'dpsgd': other nodes run 'fedavg', and nodes"),
        ({"name": "dpsgd", "rounds": 7}, {"rounds": 9}, "group[0].algorithm.rounds = 9: other nodes have 7, and nodes"),
        ({"name": "el-local", "peers": 2}, {"peers": 1}, "group[0].algorithm.peers = 1: other nodes have 2, and nodes"),
    ],
    ids=["a server", "no server", "rounds", "graph"],
)
def test_all_nodes_of_a_run_need_the_same_algorithm(algorithm: Any, group: Any, problem: str) -> None:
    table = {"nodes": 4, "algorithm": algorithm, "group": [{"nodes": "0-1", "algorithm": group}]}
    (found,) = problems(table)
    assert found.startswith(problem)


def test_an_algorithm_declares_the_options_that_may_differ_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DPSGD, "traits", Traits(per_node_options=frozenset({"overlap"})))
    group = {"nodes": "0", "algorithm": {"overlap": True}}
    assert Experiment.from_table({"nodes": 4, "group": [group]}).settings(0).algorithm.options["overlap"] is True
    assert problems({"nodes": 4, "group": [{**group, "algorithm": {"rounds": 7}}]})


def test_a_plug_in_may_run_beside_any_algorithm(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    mine = {"name": "mine.py:Mine"}
    groups = [{"nodes": "0", "algorithm": mine}, {"nodes": "1", "algorithm": {**mine, "alpha": 0.1}}]
    Experiment.from_table({"nodes": 4, "algorithm": {"name": "fedavg"}, "group": groups}, base=tmp_path)
    ours = [{"nodes": "0", "algorithm": {"name": "dpsgd"}}, {"nodes": "1", "algorithm": {"name": "d2"}}]
    Experiment.from_table({"nodes": 4, "algorithm": mine, "group": ours[:1]}, base=tmp_path)
    assert problems({"nodes": 4, "algorithm": mine, "group": ours}, base=tmp_path)


@pytest.mark.parametrize(
    ("sharing", "group", "receiver"),
    [({"name": "full"}, {"name": "topk"}, "'full'"), ({"name": "powergossip"}, {"rank": 2}, "'powergossip'")],
)
def test_sharings_that_cannot_read_each_others_payloads_are_rejected(sharing: Any, group: Any, receiver: str) -> None:
    small = {"nodes": 4, "dataset": {"name": "digits"}, "model": {"name": "logistic"}, "sharing": sharing}
    experiment = Experiment.from_table({**small, "group": [{"nodes": "1", "sharing": group}]})
    with pytest.raises(ExperimentError, match=f"{receiver}.* cannot read the payloads of .*, which other nodes use"):
        Setup(experiment)


def test_sharings_that_can_read_each_others_payloads_may_differ() -> None:
    small = {"nodes": 4, "dataset": {"name": "digits"}, "model": {"name": "logistic"}}
    sharing = {"sharing": {"name": "random", "fraction": 0.2}, "group": [{"nodes": "1", "sharing": {"fraction": 0.5}}]}
    Setup(Experiment.from_table({**small, **sharing}))


def test_the_later_of_two_groups_overrides_the_earlier() -> None:
    groups = [{"nodes": "0-1", "training": {"lr": 0.2, "batch_size": 2}}, {"nodes": "1-2", "training": {"lr": 0.3}}]
    experiment = Experiment(nodes=4, training={"lr": 0.1, "batch_size": 1}, group=groups)
    found = [(experiment.settings(n).training.lr, experiment.settings(n).training.batch_size) for n in range(4)]
    assert found == [(0.2, 2), (0.3, 2), (0.3, 1), (0.1, 1)]


def test_a_group_may_override_a_key_of_another_groups_component(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    chosen = {"nodes": "0-1", "algorithm": {"name": "mine.py:Mine"}}
    inside = {"nodes": "1", "algorithm": {"alpha": 0.7}}
    experiment = Experiment.from_table({"nodes": 4, "group": [chosen, inside]}, base=tmp_path)
    assert [experiment.settings(n).algorithm.options.get("alpha") for n in range(3)] == [0.5, 0.7, None]
    wider = {**inside, "nodes": "1-2"}
    assert problems({"nodes": 4, "group": [chosen, wider]}, base=tmp_path) == (
        "group[1].algorithm.alpha: unknown key; expected one of overlap, rounds",
    )


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ({"nodes": "two"}, "group[0].nodes = 'two': expected numbers and ranges such as '0-3, 8'"),
        ({"nodes": ""}, "group[0].nodes = '': expected numbers and ranges such as '0-3, 8'"),
        ({"nodes": "3-1"}, "group[0].nodes = '3-1': 3-1 counts down; did you mean 1-3?"),
        ({"nodes": "2-5"}, "group[0].nodes = '2-5': there is no node 4; nodes = 4"),
        ({"nodes": "0-99999999999999"}, "group[0].nodes = '0-99999999999999': there is no node 4; nodes = 4"),
        ({"nodes": 3}, "group[0].nodes = 3: expected string of node ids and ranges, such as '0-3, 8'; write '3'"),
        (
            {"nodes": [2, 0, 1, 8]},
            "group[0].nodes = [2, 0, 1, 8]: expected string of node ids and ranges, such as '0-3, 8'; write '0-2, 8'",
        ),
        (
            {"nodes": [0, "two"]},
            "group[0].nodes = [0, 'two']: expected string of node ids and ranges, such as '0-3, 8'",
        ),
        ({}, "group[0].nodes: missing; expected string of node ids and ranges, such as '0-3, 8'"),
        (
            {"nodes": "1", "model": {}},
            "group[0].model: a group cannot change it; expected one of algorithm, machine, network, nodes, sharing, "
            "speed, training",
        ),
        ({"nodes": "1", "training": {"lrr": 1}}, "group[0].training.lrr: unknown key; did you mean 'lr'?"),
        (
            {"nodes": "1", "sharing": {"name": "fulll"}},
            "group[0].sharing.name = 'fulll': unknown sharing 'fulll'; did you mean 'full'?",
        ),
    ],
)
def test_a_wrong_group_is_rejected(group: dict[str, Any], problem: str) -> None:
    assert problems({"nodes": 4, "group": [group]}) == (problem,)


def test_a_problem_of_overlapping_groups_is_reported_once() -> None:
    groups = [{"nodes": "0-3", "training": {"lr": -1}}, {"nodes": "1"}, {"nodes": "9", "training": {"lr": -2}}]
    assert problems({"nodes": 4, "group": groups}) == (
        "group[2].nodes = '9': there is no node 9; nodes = 4",
        "group[0].training.lr = -1: expected number above 0",
        "group[2].training.lr = -2: expected number above 0",
    )
