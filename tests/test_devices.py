"""Devices: the speed of each node, changes by groups, and the effect on the virtual clock."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.engines.simulation.batching import choose_batching
from shoal.environment.devices import SIMULATED_STEP, Constant, Device, FedScaleDevices, Lognormal, Speed
from shoal.errors import DataError, ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup

CAPACITIES = {
    432802: {"computation": 162.0, "communication": 5648.1},
    7: {"computation": 20, "communication": 100.0},
    8: {"computation": 50.5, "communication": 20_000},
}


@pytest.fixture
def capacities(tmp_path: Path) -> Path:
    (tmp_path / "capacity").write_bytes(pickle.dumps(CAPACITIES))
    return tmp_path / "capacity"


def experiment(table: dict[str, Any], base: Path = Path(".")) -> Experiment:
    return Experiment.from_table({"nodes": 4, "training": {"batch_size": 10}, **table}, base=base)


def problems(table: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ExperimentError) as caught:
        experiment(table)
    return caught.value.problems


# Speeds of single devices


def test_a_step_takes_its_given_or_its_default_time() -> None:
    assert Constant().speed(0, 0, 16) == Speed(None)
    assert Constant().speed(0, 0, 16).simulated_step == SIMULATED_STEP
    assert Constant(slowdown=3).speed(0, 0, 16).simulated_step == 3 * SIMULATED_STEP
    assert Constant(0.02).speed(5, 1, 8).step_seconds == 0.02
    assert Constant(0.0).speed(5, 1, 8).simulated_step == 0.0  # zero, which differs from not given


@given(st.floats(0.001, 100), st.floats(0.001, 100), st.integers(0, 5), st.integers(1, 64))
def test_slowdowns_multiply_the_times_of_every_device(
    slowdown: float, network_slowdown: float, node: int, batch: int
) -> None:
    pairs: list[tuple[Device, Device]] = [
        (Constant(0.3), Constant(0.3, slowdown, network_slowdown)),
        (Lognormal(), Lognormal(slowdown=slowdown, network_slowdown=network_slowdown)),
    ]
    for plain, slow in pairs:
        before, after = plain.speed(node, 1, batch), slow.speed(node, 1, batch)
        assert before.step_seconds is not None
        assert after.step_seconds == pytest.approx(before.step_seconds * slowdown)
        assert (before.network_slowdown, after.network_slowdown) == (1.0, network_slowdown)
        assert before.bandwidth == after.bandwidth is None


def test_lognormal_devices_have_the_given_median_and_standard_deviation() -> None:
    logs = np.log([step for node in range(2000) if (step := Lognormal().speed(node, 3, 10).step_seconds)])
    assert logs.mean() == pytest.approx(math.log(10 * 0.005) + 1.0, abs=4 * 0.6 / math.sqrt(2000))
    assert logs.std() == pytest.approx(0.6, rel=0.1)
    assert Lognormal(sigma=0).speed(0, 0, 10).step_seconds == pytest.approx(0.05 * math.e)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(1, 256))
def test_each_node_has_its_own_random_speed_independent_of_the_batch_size(seed: int, node: int, batch: int) -> None:
    one, more = Lognormal().speed(node, seed, 1), Lognormal().speed(node, seed, batch)
    assert one.step_seconds is not None
    assert more.step_seconds == pytest.approx(batch * one.step_seconds)
    assert Lognormal().speed(node + 1, seed, 1) != one


def test_a_phone_takes_three_times_its_inference_time_and_has_its_bandwidth(capacities: Path) -> None:
    device = FedScaleDevices(capacities, order="file", slowdown=2, network_slowdown=4)
    assert device.speed(0, 0, 10) == Speed(3 * 10 * 0.162 * 2, 2, 5.6481, 4)
    assert [device.speed(node, 0, 1).bandwidth for node in range(4)] == pytest.approx([5.6481, 0.1, 20, 5.6481])


def test_nodes_take_random_phones_and_all_phones_before_any_repeats(capacities: Path) -> None:
    def drawn(seed: int) -> list[float | None]:
        return [FedScaleDevices(capacities).speed(node, seed, 1).bandwidth for node in range(6)]

    for seed in range(5):
        assert sorted(map(float, drawn(seed)[:3])) == pytest.approx([0.1, 5.6481, 20])  # type: ignore[arg-type]
        assert drawn(seed)[3:] == drawn(seed)[:3]
    assert len({tuple(drawn(seed)) for seed in range(20)}) == 6  # every possible order


def test_capacities_can_be_read_from_json(capacities: Path, tmp_path: Path) -> None:
    (tmp_path / "capacity.json").write_text(json.dumps(CAPACITIES, indent=1))
    for node in range(3):
        assert FedScaleDevices(tmp_path / "capacity.json").speed(node, 5, 8) == FedScaleDevices(capacities).speed(
            node, 5, 8
        )


@pytest.mark.parametrize(
    ("client", "problem"),
    [
        ({"computation": 0, "communication": 5}, "client 1: computation = 0: expected a number above 0"),
        ({"computation": "fast", "communication": 5}, "client 1: computation = 'fast': expected a number above 0"),
        ({"computation": 9, "communication": math.inf}, "client 1: communication = inf: expected a number above 0"),
        ({"active": [1], "inactive": [2]}, "client 1 has no 'computation'; found active, inactive"),
        (5, "client 1 is 5: expected a dictionary"),
    ],
)
def test_an_invalid_capacity_is_rejected_with_its_client(client: Any, problem: str, tmp_path: Path) -> None:
    (tmp_path / "capacity").write_bytes(pickle.dumps({1: client}))
    with pytest.raises(DataError) as caught:
        FedScaleDevices(tmp_path / "capacity").speed(0, 0, 1)
    assert str(caught.value).startswith(f"{tmp_path / 'capacity'}: {problem}")


class OpensFile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_a_pickle_that_would_run_code_is_rejected_without_running_it(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    (tmp_path / "capacity").write_bytes(pickle.dumps({1: {"computation": OpensFile(mark), "communication": 1}}))
    with pytest.raises(DataError, match="nothing that could run"):
        FedScaleDevices(tmp_path / "capacity").speed(0, 0, 1)
    assert not mark.exists()


# In an experiment


def test_the_name_of_a_device_may_be_left_out() -> None:
    tables: list[dict[str, Any]] = [{}, {"speed": {}}, {"speed": {"name": "constant"}}]
    for table in tables:
        assert experiment(table).speed.build() == Constant()
    for device in ({"step_seconds": 0.02}, {"name": "constant", "step_seconds": 0.02}, Constant(0.02)):
        found = experiment({"speed": device})
        assert found.speed.build() == Constant(0.02)
        assert Experiment.from_table(found.to_table()) == found
    assert experiment({"speed": {"slowdown": 2}}).to_table()["speed"] == {
        "name": "constant", "slowdown": 2.0, "network_slowdown": 1.0,
    }  # fmt: skip


def test_groups_change_single_keys_or_the_whole_device(capacities: Path) -> None:
    found = experiment(
        {
            "algorithm": {"name": "fedavg"},
            "speed": {"step_seconds": 0.02, "network_slowdown": 2},
            "network": {"name": "uniform", "upload": 10},
            "group": [
                {"nodes": "0-1", "speed": {"slowdown": 5}},
                {"nodes": "1", "speed": {"step_seconds": 0.1}},
                {"nodes": "2", "speed": {"name": "lognormal"}, "training": {"batch_size": 20}},
                {"nodes": "3", "speed": {"name": "fedscale", "path": capacities.name}},
            ],
        },
        capacities.parent,
    )
    speeds = Setup(found).speeds
    assert speeds == [
        Speed(0.1, 5, network_slowdown=2),
        Speed(0.5, 5, network_slowdown=2),
        Lognormal().speed(2, 0, 20),
        FedScaleDevices(capacities).speed(3, 0, 10),
        Speed(0.02, network_slowdown=2),  # the server is in no group
    ]
    assert Experiment.from_table(found.to_table()) == found


def test_the_device_in_the_documentation_works(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "devices.md").read_text()
    (tmp_path / "ageing.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    speeds = Setup(experiment({"speed": {"name": "ageing.py:Ageing", "step_seconds": 2}}, tmp_path)).speeds
    assert [speed.simulated_step for speed in speeds] == pytest.approx([2, 2.2, 2.42, 2.662])


def test_a_file_is_read_once_for_all_nodes(capacities: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_files = []

    def record_read(content: bytes, place: str) -> Any:
        read_files.append(place)
        return CAPACITIES

    monkeypatch.setattr("shoal.environment.fedscale.read_pickle", record_read)
    groups = [{"nodes": "0-1", "training": {"lr": 0.5}}]
    Setup(experiment({"speed": {"name": "fedscale", "path": str(capacities)}, "group": groups}))
    assert read_files == [str(capacities)]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"speed": {"step_secs": 1}}, "speed.step_secs: unknown key; did you mean 'step_seconds'?"),
        ({"step_seconds": 1}, "step_seconds: unknown key; it belongs to speed.step_seconds"),
        ({"speed": {"step_seconds": -1}}, "speed.step_seconds = -1: expected number at least 0"),
        ({"speed": {"slowdown": 0}}, "speed.slowdown = 0: expected number above 0"),
        ({"speed": {"name": "lognormal", "step_seconds": 1}}, "speed.step_seconds: unknown key; "),
        (
            {"speed": {"name": "log-normal"}},
            "speed.name = 'log-normal': unknown speed 'log-normal'; did you mean 'l",
        ),
        ({"speed": {"name": "fedscale"}}, "speed.path: missing; expected path of a file"),
        ({"speed": 3}, "speed = 3: expected a table with a name, such as { name = 'constant' }"),
        (
            {"speed": {"name": "lognormal"}, "group": [{"nodes": "0", "speed": {"step_seconds": 1}}]},
            "group[0].speed.step_seconds: unknown key; ",
        ),
    ],
)
def test_an_invalid_device_is_rejected_with_its_problem(table: dict[str, Any], problem: str) -> None:
    (found,) = problems(table)
    assert found.startswith(problem)


def test_the_slowest_device_determines_the_virtual_time(tmp_path: Path) -> None:
    found = experiment({
        "algorithm": {"name": "dpsgd", "rounds": 5}, "topology": {"name": "full"}, "training": {"local_steps": 2},
        "evaluation": {"every": 0}, "simulation": {"batching": "off"}, "checkpoint": {"final": False},
        "group": [{"nodes": "1", "speed": {"slowdown": 7}}],
    })  # fmt: skip
    run = found.run(tmp_path)
    assert run.summary["time"]["virtual_s"] == pytest.approx(5 * 2 * 7 * SIMULATED_STEP)


# The earlier name, and the torch device


def test_the_earlier_name_of_the_table_is_accepted_with_a_warning() -> None:
    new = experiment({"speed": {"step_seconds": 0.02}, "group": [{"nodes": "0", "speed": {"slowdown": 5}}]})
    with pytest.warns(FutureWarning, match=r"device: this table has a new name; write speed") as caught:
        old = experiment({"device": {"step_seconds": 0.02}, "group": [{"nodes": "0", "device": {"slowdown": 5}}]})
    assert any("group[0].device" in str(warning.message) for warning in caught)
    assert old == new
    assert old.to_table() == new.to_table()
    assert "device" not in {*old.to_table(), *old.to_table()["group"][0]}


def test_the_earlier_name_is_accepted_in_overrides_and_in_python() -> None:
    with pytest.warns(FutureWarning, match=r"device\.sigma: this table has a new name; write speed\.sigma"):
        found = Experiment.from_table({"speed": {"name": "lognormal", "mu": 0.5}}, {"device.sigma": 0.1})
    assert found.speed.build() == Lognormal(mu=0.5, sigma=0.1)
    with pytest.warns(FutureWarning, match="write speed = "):
        assert Experiment(device=Constant(0.5)).speed.build() == Constant(0.5)  # type: ignore[call-arg]
    with pytest.warns(FutureWarning, match="write speed = "):
        assert dataclasses.replace(found, device=Constant(0.5)).speed.build() == Constant(0.5)  # type: ignore[call-arg]
    with pytest.raises(ExperimentError, match="devise: unknown key"):
        Experiment(devise=Constant(0.5))  # type: ignore[call-arg]


def test_the_torch_device_at_the_top_level_is_not_the_earlier_name() -> None:
    with pytest.raises(ExperimentError, match=r"device: unknown key; it belongs to training\.device"):
        experiment({"device": "cuda"})
    with pytest.raises(ExperimentError, match=r"device: unknown key; .*: write training=\{'device': 'cuda'\}"):
        Experiment(device="cuda")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "table", [{"training": {"device": "cuda"}}, {"group": [{"nodes": "1", "training": {"device": "cuda"}}]}]
)
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"simulation": {"batching": "pool"}}, "'pool' are forks, .*; use 'auto', 'vmap' or 'off'"),
        ({"simulation": {"batching": "ray"}}, "workers on Ray train on CPUs"),
    ],
    ids=["pool", "ray"],
)
def test_accelerators_are_rejected_where_workers_train(
    table: dict[str, Any], settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ExperimentError, match=rf"(group\[0\]\.)?training\.device = 'cuda': .*{error}"):
        experiment({**table, **settings})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_a_device_that_is_not_there_is_named(engine: str, tmp_path: Path) -> None:
    with pytest.raises(
        ExperimentError, match=r"training\.device = 'cuda': not available on this machine .*; try 'cpu'"
    ):
        experiment({"engine": engine, "training": {"device": "cuda"}}).run(tmp_path)


def test_node_processes_train_on_another_device_as_on_the_default_one(tmp_path: Path) -> None:
    """With groups on two devices, whose modules each process makes after its fork."""
    settings = {"engine": "processes", "algorithm": {"name": "dpsgd", "rounds": 2}}
    runs = [
        experiment({**settings, **table}).run(tmp_path)
        for table in (
            {"training": {}},
            {"training": {"device": "cpu:0"}, "group": [{"nodes": "0", "training": {"device": "cpu"}}]},
        )
    ]
    assert runs[0].summary["status"] == runs[1].summary["status"] == "completed"
    assert runs[0].summary["digest"] == runs[1].summary["digest"]


@pytest.mark.parametrize("batching", ["off", "vmap"])
def test_nodes_on_another_device_train_as_on_the_default_one(batching: str, tmp_path: Path) -> None:
    settings = {"simulation": {"batching": batching}, "algorithm": {"name": "dpsgd", "rounds": 3}}
    runs = [
        experiment({**settings, "training": {"momentum": 0.9, "device": device}}).run(tmp_path)
        for device in ("cpu", "cpu:0")
    ]
    assert runs[0].summary["digest"] == runs[1].summary["digest"]


def test_the_pool_is_never_chosen_for_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for hidden in ([512, 512], [1024, 1024]):
        described = experiment(
            {
                "model": {"name": "mlp", "hidden": hidden},
                "training": {"device": "cpu:0", "batch_size": 64, "local_steps": 4},
                "nodes": 2,
            }
        )
        assert choose_batching(described, Setup(described)) != "pool"
