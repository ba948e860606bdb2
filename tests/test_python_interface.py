"""Experiments in Python: the same as in TOML, with names, classes, instances and arrays."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

import shoal
from shoal.errors import ExperimentError
from shoal.experiment.registry import REGISTRIES, components
from shoal.models.basic import Logistic
from shoal.schema import parameters
from shoal.topologies import Graph
from shoal.topologies.static import Ring
from shoal.training.module_draws import global_states
from shoal.training.scikit import ScikitBackend
from shoal.training.settings import Training

QUICK: dict[str, Any] = {
    "nodes": 3,
    "algorithm": {"name": "dpsgd", "rounds": 2},
    "model": "logistic",
    "simulation": {"batching": "off"},
}


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class OwnRing:
    """A topology that is not a dataclass."""

    def __init__(self, repeats: int = 1) -> None:
        self.repeats = repeats

    def build(self, nodes: int, seed: int) -> Graph:
        return Ring().build(nodes, seed)


class Doubled(OwnRing):
    def __init__(self, repeats: int = 1) -> None:
        super().__init__(2 * repeats)


class Forgetful(OwnRing):
    def __init__(self, chords: int = 1) -> None:
        super().__init__()


def samples(count: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, 5)).astype(np.float32), np.arange(count) % 3
    return x[20:], y[20:], x[:20], y[:20]


# Names and tables

NAMED = [
    (kind, name)
    for kind in sorted(REGISTRIES.keys() & {f.name for f in dataclasses.fields(shoal.Experiment)})
    for name, cls in components(kind)
    if not any(parameter.required for parameter in parameters(cls).values())
]


@settings(max_examples=40)
@given(st.sampled_from(NAMED))
def test_a_name_stands_for_a_table_with_this_name(component: tuple[str, str]) -> None:
    kind, name = component

    def outcome(value: Any) -> Any:
        table = {"dataset": {"name": "digits", "partition": value}} if kind == "partition" else {kind: value}
        try:
            return shoal.Experiment.from_table(table), shoal.Experiment(**{kind: value})
        except ExperimentError as error:  # it does not suit the default experiment
            return error.problems

    assert outcome(name) == outcome({"name": name})


def test_tables_in_python_have_the_keys_of_tables_in_toml() -> None:
    table = {
        "topology": {"name": "regular", "degree": 4, "weights": "uniform"},
        "dataset": {"name": "digits", "partition": {"name": "shards", "per_node": 2}},
    }
    experiment = shoal.Experiment(**table)  # type: ignore[arg-type]
    assert experiment == shoal.Experiment.from_table(table)
    assert (experiment.weights, experiment.partition.name) == ("uniform", "shards")
    assert table["topology"]["weights"] == "uniform", "the tables of the caller are unchanged"
    changed = dataclasses.replace(experiment, dataset={"name": "digits", "partition": "iid"})
    assert changed.partition.name == "iid"
    with pytest.raises(ExperimentError, match=r"topology\.weights: given here, and as weights = 'uniform' too"):
        shoal.Experiment(topology={"name": "ring", "weights": "metropolis-hastings"}, weights="uniform")


def test_names_in_overrides_and_groups() -> None:
    table = {"topology": "ring", "group": [{"nodes": "0-3", "sharing": "float16"}], "sharing": "bfloat16"}
    experiment = shoal.Experiment.from_table(table, {"topology": "regular", "topology.degree": 3})
    assert experiment.topology.options["degree"] == 3
    assert [experiment.settings(node).sharing.name for node in (0, 4)] == ["float16", "bfloat16"]
    assert shoal.Experiment.from_table(experiment.to_table()) == experiment
    in_python = shoal.Experiment(
        topology={"name": "regular", "degree": 3}, sharing="bfloat16", group=[{"nodes": "0-3", "sharing": "float16"}]
    )
    assert in_python == experiment
    with pytest.raises(ExperimentError, match=r"group\[0\]\.sharing = 3: expected a table with a name"):
        shoal.Experiment(group=[{"nodes": "0-3", "sharing": 3}])


@pytest.mark.parametrize(
    ("given_settings", "text"),
    [
        ({"dataset": "CIFAR10"}, "unknown dataset 'CIFAR10'; did you mean 'cifar10'?"),
        ({"model": "LeNet"}, "did you mean 'lenet' (LeNet-5 without normalisation"),
        ({"model": "LeNet"}, "or 'gn-lenet' (LeNet with group normalisation (Hsieh et al. 2020): the `LeNet` of"),
        ({"model": "ResNet18"}, "unknown model 'ResNet18'; did you mean 'resnet18'?"),
        ({"model": "net.Net"}, "unknown model 'net.Net'; for a class of your own, write 'net.py:Net' or 'net:Net'"),
        (
            {"model": "net.py"},
            "unknown model 'net.py'; for a class of your own, write 'net.py:' and the name of the class",
        ),
        ({"model": "nets.small.Net"}, "write 'nets/small.py:Net' or 'nets.small:Net'"),
        ({"topology": "RING"}, "unknown topology 'RING'; did you mean 'ring'?"),
        ({"training": {"optimiser": "sgd"}}, "training.optimiser: unknown key; did you mean 'optimizer'?"),
        ({"training": {"learning_rate": 0.1}}, "training.learning_rate: unknown key; did you mean 'lr'?"),
        ({"engine": "Processes"}, "did you mean 'processes'?"),
    ],
)
def test_near_misses_in_any_case(given_settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        shoal.Experiment(**given_settings)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("key", "given_class"),
    [("optimizer", torch.optim.Adam), ("loss", nn.CrossEntropyLoss), ("loss", nn.CrossEntropyLoss())],
)
def test_the_error_for_a_class_of_torch_gives_a_name_that_works(key: str, given_class: Any) -> None:
    with pytest.raises(ExperimentError, match=f"training.{key} = .*: expected string; write its name, '") as raised:
        shoal.Experiment(training={key: given_class})
    name = str(raised.value).split("'")[-2]
    assert getattr(shoal.Experiment(training={key: name}).training, key) == name
    with pytest.raises(ExperimentError, match=r"training\.device = .*: expected string$"):
        shoal.Experiment(training={"device": torch.device("cpu")})


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"lr": 0.1}, "lr: unknown key; it belongs to training.lr: write training={'lr': 0.1}"),
        ({"rounds": 5}, "belongs to algorithm.rounds: write algorithm={'name': 'dpsgd', 'rounds': 5}"),
        ({"topology": "regular", "degree": 3}, "write topology={'name': 'regular', 'degree': 3}"),
        ({"training": Training(batch_size=3), "lr": 0.2}, "write training={'batch_size': 3, 'lr': 0.2}"),
        ({"training": {"batch_size": 3}, "lr": 0.2}, "write training={'batch_size': 3, 'lr': 0.2}"),
        ({"training": 3, "lr": 0.2}, "write training={'lr': 0.2}"),
        (
            {"topology": {"name": "regular", "dynamic": True}, "degree": 3},
            "write topology={'name': 'regular', 'dynamic': True, 'degree': 3}",
        ),
        ({"topolgy": "ring"}, "topolgy: unknown key; did you mean 'topology'?"),
    ],
)
def test_an_unknown_parameter_is_an_error_with_its_place(parameters: dict[str, Any], problem: str) -> None:
    for create in (shoal.Experiment, functools.partial(dataclasses.replace, shoal.Experiment())):
        with pytest.raises(ExperimentError) as raised:
            create(**parameters)
        assert problem in str(raised.value)


def threads_by_library() -> dict[str, int]:
    return {library["filepath"]: library["num_threads"] for library in threadpool_info()}


@pytest.mark.parametrize("trainer", ["torch", "scikit"])
def test_a_run_leaves_the_generators_and_threads_of_the_caller_alone(trainer: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with threadpool_limits(2):
        torch.set_num_threads(2)
        np.random.seed(3)
        np.random.normal()  # it draws two numbers, and keeps one for the next call
        before = global_states()
        limits = threads_by_library()
        shoal.Experiment(nodes=2, algorithm={"name": "dpsgd", "rounds": 1}, trainer=trainer).run(tmp_path)
        after = global_states(), torch.get_num_threads()
        limits_after = threads_by_library()
    torch.set_num_threads(threads)
    assert after == (before, 2)
    assert limits_after | limits == limits_after, "the run may load more libraries"


class LimitsThreads(ScikitBackend):
    """The trainer of a plug-in."""


def test_the_trainer_of_a_plug_in_declares_that_it_limits_threads(tmp_path: Path) -> None:
    with threadpool_limits(2):
        limits = threads_by_library()
        shoal.Experiment(nodes=2, algorithm={"name": "dpsgd", "rounds": 1}, trainer=LimitsThreads).run(tmp_path)
        limits_after = threads_by_library()
    assert limits_after | limits == limits_after


IMPORTS_TORCH = """
import shoal
from shoal.training.scikit import ScikitBackend
from shoal.training.settings import Training

class ImportsTorch(ScikitBackend):
    traits = shoal.Traits(augments=True, imports_torch=True)

    def create_factory(self, inputs):
        import torch
        torch.set_num_threads(1)
        return super().create_factory(inputs)

if __name__ == "__main__":
    options = {"simulation": {"batching": "off"}, "algorithm": {"name": "dpsgd", "rounds": 1}}
    shoal.Experiment(nodes=2, trainer=ImportsTorch, **options).run("out")
    import torch
    print(torch.get_num_threads())
"""


def test_the_trainer_of_a_plug_in_declares_that_it_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "imports_torch.py").write_text(IMPORTS_TORCH)

    def shown_by(*arguments: str) -> str:
        return subprocess.check_output([sys.executable, *arguments], cwd=tmp_path, text=True)

    without_run = shown_by("-c", "import torch; print(torch.get_num_threads())")
    assert shown_by("imports_torch.py") == without_run


# Classes and instances


def test_a_class_stands_for_its_name_and_an_instance_for_its_parameters(tmp_path: Path) -> None:
    assert shoal.Experiment(model=Logistic) == shoal.Experiment(model="logistic")
    assert shoal.Experiment(topology=OwnRing(3)).topology.options == {"repeats": 3}
    experiment = shoal.Experiment(**{**QUICK, "model": Net, "topology": OwnRing(2)})
    assert experiment.model.name == f"{__name__}:Net"
    assert shoal.Experiment.from_table(experiment.to_table()) == experiment
    by_name = shoal.Experiment(**{**QUICK, "model": {"name": f"{__name__}:Net"}})
    assert experiment.run(tmp_path).summary["digest"] == by_name.run(tmp_path).summary["digest"]


@pytest.mark.parametrize("topology", [Doubled(2), Forgetful(2)], ids=["changed", "not stored"])
def test_an_instance_whose_parameters_are_unknown_is_rejected(topology: Any) -> None:
    with pytest.raises(ExperimentError, match=r"the parameters \w+ of this instance are not known; make \w+ a datacl"):
        shoal.Experiment(topology=topology)


def test_an_option_that_no_file_can_hold_is_rejected() -> None:
    with pytest.raises(ExperimentError, match=r"topology\.repeats = .*: an experiment cannot hold a function"):
        shoal.Experiment(topology={"name": f"{__name__}:Forgetless", "repeats": print_nothing})


def print_nothing() -> None: ...


class Forgetless(OwnRing):
    def __init__(self, repeats: Any = 1) -> None:
        super().__init__(repeats)


@pytest.mark.parametrize("batching", ["off", "vmap", "pool"])
def test_a_module_of_this_process_is_the_initial_model_in_a_simulation(batching: str, tmp_path: Path) -> None:
    net = Net(width=5)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    changed = {"model": net, "training": {"lr": 1e-30}, "simulation": {"batching": batching}}
    run = shoal.Experiment(**{**QUICK, **changed}).run(tmp_path)
    for own, initial, trained in zip(net.parameters(), before, run.model(1).parameters(), strict=True):
        assert torch.equal(own, initial)
        assert torch.equal(trained, initial)
    with pytest.raises(ExperimentError, match=r"this model existed only in the process .* 'file\.py:Net'"):
        shoal.Experiment.from_file(run.folder.experiment)


def test_later_changes_to_a_module_do_not_change_the_experiment() -> None:
    net = Net(width=5)
    described = shoal.Experiment(**{**QUICK, "model": net})
    with torch.no_grad():
        net.layers[0].weight.zero_()
    assert described.model.build().layers[0].weight.abs().sum() > 0


def test_what_exists_only_in_this_process_is_rejected_by_processes() -> None:
    class Local(Net):
        """A class without an import path."""

    for model, name in ((Net(), "Net"), (Local, "Local")):
        shoal.Experiment(model=model)
        with pytest.raises(ExperimentError, match=rf"model = 'memory:{name}.*exists only in this process.*file of its"):
            shoal.Experiment(model=model, engine="processes")


def test_a_class_inside_a_function_works_in_a_simulation(tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Chain:
        repeats: int = 1

        def build(self, nodes: int, seed: int) -> Graph:
            assert self.repeats == 4
            return Ring().build(nodes, seed)

    run = shoal.Experiment(**QUICK, topology=Chain(4)).run(tmp_path)
    assert run.summary["digest"] == shoal.Experiment(**QUICK, topology="ring").run(tmp_path).summary["digest"]


# Arrays


@pytest.mark.usefixtures("data_folders")
def test_arrays_give_the_same_models_in_both_engines_and_in_a_replay(tmp_path: Path) -> None:
    arrays = samples()
    experiment = shoal.Experiment(**QUICK, dataset=arrays)
    tensors = shoal.Experiment(**QUICK, dataset=tuple(map(torch.tensor, arrays)))
    assert experiment == tensors, "equal arrays are written once"
    run = experiment.run(tmp_path)
    replayed = shoal.Experiment.from_file(run.folder.experiment).run(tmp_path)
    processes = dataclasses.replace(experiment, engine="processes").run(tmp_path)
    assert run.summary["digest"] == replayed.summary["digest"] == processes.summary["digest"]


@pytest.mark.usefixtures("data_folders")
def test_targets_that_are_not_integers_are_those_of_a_regression(tmp_path: Path) -> None:
    x, y, *_ = samples()
    run = shoal.Experiment(**QUICK, dataset=(x.astype(np.float64), y * 0.5)).run(tmp_path)
    assert "rmse" in run.summary["metrics"]


@pytest.mark.usefixtures("data_folders")
@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ((1, 2), r"expected \(x_train, y_train, x_test, y_test\), or \(x, y\)"),
        (samples()[:3], r"expected \(x_train, y_train, x_test, y_test\), or \(x, y\)"),
        ((samples()[0], samples()[3]), "x has 40 samples and y has 20"),
        ((samples()[0], np.array(["a"] * 40)), "an array of <U1"),
        (np.zeros((40, 64)), r"an array of shape \(40, 64\): expected a table with a name"),
    ],
)
def test_wrong_arrays_are_rejected(dataset: Any, text: str) -> None:
    with pytest.raises(ExperimentError, match=f"dataset: {text}"):
        shoal.Experiment(dataset=dataset)


# Classes of a script

SCRIPT = """
import shoal
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x)

{guard}
    rounds = {{"name": "dpsgd", "rounds": 1}}
    run = shoal.Experiment(nodes=2, engine="processes", algorithm=rounds, model=Net).run({out!r})
    print(run.summary["digest"])
"""


def script(tmp_path: Path, guard: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(guard=guard, out=str(tmp_path / "runs")))
    return subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=False)


def test_processes_import_the_classes_of_a_script_and_its_run_can_be_replayed(tmp_path: Path) -> None:
    done = script(tmp_path, 'if __name__ == "__main__":')
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "runs").glob("*/*/experiment.toml")
    assert tomllib.loads(written.read_text())["model"]["name"] == "plugins/script.py:Net"
    replay = shoal.Experiment.from_file(written, {"engine": "simulation", "simulation.batching": "off"})
    assert replay.run(tmp_path / "again").summary["digest"] == done.stdout.strip()


MODULES = """
import shoal
from net import Net

if __name__ == "__main__":
    rounds = {{"name": "dpsgd", "rounds": 1}}
    run = shoal.Experiment(nodes=2, engine="processes", algorithm=rounds, model=Net).run({out!r})
    print(type(run.model(0)) is Net, run.summary["digest"])
"""


def test_processes_import_the_modules_in_the_folder_of_a_script(tmp_path: Path) -> None:
    (folder := tmp_path / "code").mkdir()
    (folder / "net.py").write_text(SCRIPT.partition("{guard}")[0])
    (folder / "script.py").write_text(MODULES.format(out=str(tmp_path / "runs")))
    command = [sys.executable, str(folder / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "runs").glob("*/*/experiment.toml")
    assert tomllib.loads(written.read_text())["model"]["name"] == "plugins/net.py:Net"
    replay = shoal.Experiment.from_file(written, {"engine": "simulation", "simulation.batching": "off"})
    assert done.stdout.split() == ["True", replay.run(tmp_path / "again").summary["digest"]]


def test_a_script_that_starts_its_run_on_import_is_rejected(tmp_path: Path) -> None:
    done = script(tmp_path, "if True:")
    assert done.returncode == 1
    assert "starts a run while other processes import it for its classes" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr
    assert not list((tmp_path / "runs").iterdir())


SESSION = (
    SCRIPT.partition("{guard}")[0]
    + """
quick = {"nodes": 2, "algorithm": {"name": "dpsgd", "rounds": 1}, "model": Net}
run = shoal.Experiment(**quick).run("runs")
print(run.folder.experiment)
shoal.Experiment(**quick, engine="processes")
"""
)


def test_a_class_of_a_notebook_works_in_a_simulation_alone(tmp_path: Path) -> None:
    """In a notebook and in a session, `__main__` has no file."""
    command = [sys.executable, "-c", SESSION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert "model = '__main__:Net': it exists only in this process" in done.stderr
    assert "model = { name = 'file.py:Net' }" in done.stderr
    with pytest.raises(ExperimentError, match=r"of the notebook or session .* name it as 'file\.py:Net'"):
        shoal.Experiment.from_file(tmp_path / done.stdout.strip())
