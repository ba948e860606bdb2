"""The mapping of nodes to machines: plain data, checked before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ExperimentError, LaunchError
from shoal.experiment import Experiment
from shoal.experiment.mapping import Explicit, Linear, by_machine
from shoal.types import format_node_ids, parse_node_ids


@given(st.sets(st.integers(0, 60), min_size=1))
def test_formatting_and_parsing_node_ids_are_inverse(ids: set[int]) -> None:
    assert parse_node_ids(format_node_ids(ids), 61) == sorted(ids)


def test_a_long_list_of_nodes_is_shortened() -> None:
    assert format_node_ids([0, 1, 2, 5, 7, 9, 10], most=2) == "0-2, 5 and 3 more"
    assert format_node_ids([0, 1, 2, 5], most=2) == "0-2, 5"


@given(st.integers(1, 100), st.integers(1, 12))
def test_linear_blocks_are_consecutive_and_equal_to_within_one(nodes: int, machines: int) -> None:
    placed = by_machine(Linear(tuple(f"m{i}" for i in range(machines))).place(nodes, {}))
    assert [node for ids in placed.values() for node in ids] == list(range(nodes))
    sizes = [len(ids) for ids in placed.values()]
    if nodes >= machines:
        assert len(placed) == machines
        assert max(sizes) - min(sizes) <= 1


def test_groups_name_the_machines_of_their_nodes() -> None:
    experiment = Experiment(
        nodes=6, mapping={"name": "by-group", "otherwise": "a"}, group=[{"nodes": "1-2, 5", "machine": "b"}]
    )
    assert experiment.placement == {"a": [0, 3, 4], "b": [1, 2, 5]}


def test_an_explicit_mapping_places_every_node() -> None:
    assert Explicit({"b": "0, 3", "a": "1-2"}).place(4, {}) == ["b", "a", "a", "b"]


def test_service_nodes_run_on_the_machine_of_node_0() -> None:
    experiment = Experiment(
        nodes=4, topology={"name": "peer-sampler", "graph": "ring"}, mapping={"name": "linear", "machines": ["a", "b"]}
    )
    assert experiment.placement == {"a": [0, 1, 4], "b": [2, 3]}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"mapping": {"name": "linear", "machines": []}}, "expected the names of one or more machines"),
        ({"mapping": {"name": "linear", "machines": ["a", "a"]}}, "all different"),
        ({"mapping": {"name": "explicit", "machines": {"a": "0-2"}}}, "mapping: no machine for nodes 3"),
        ({"mapping": {"name": "explicit", "machines": {"a": "0-3", "b": "1"}}}, "node 1 is placed twice"),
        ({"mapping": {"name": "explicit", "machines": {"a": "0-7"}}}, "there is no node 4"),
        ({"mapping": {"name": "linaer"}}, "did you mean 'linear'"),
        ({"group": [{"nodes": "0", "machine": "b"}]}, "use 'by-group'"),
    ],
)
def test_a_wrong_mapping_is_rejected(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        Experiment(nodes=4, **changed)


def test_the_mapping_is_written_to_the_runs_folder(tmp_path: Path) -> None:
    experiment = Experiment(
        nodes=4, algorithm={"name": "dpsgd", "rounds": 1}, mapping={"name": "linear", "machines": ["a", "b"]}
    )
    run = experiment.run(tmp_path)
    assert json.loads((run.folder.path / "mapping.json").read_text()) == {"a": "0-1", "b": "2-3"}
    assert Experiment.from_table(experiment.to_table()).placement == experiment.placement


def test_nodes_of_another_machine_are_rejected_before_any_node_starts(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nodes 2-3 are placed on 'elsewhere'"):
        Experiment(nodes=4, engine="processes", mapping={"name": "linear", "machines": ["localhost", "elsewhere"]}).run(
            tmp_path
        )
