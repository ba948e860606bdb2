"""Trainers for external training code: scikit-learn, Flower and user-supplied trainers."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest

from shoal.data.dataset import Samples
from shoal.engines.simulation.batching import choose_batching
from shoal.engines.simulation.compute import StackedExecutor
from shoal.errors import ExperimentError, NodeError, ShoalError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.state import Stateful
from shoal.training import BatchTrainer, Trained, TrainerInputs
from shoal.training.batches import Batches
from shoal.training.trainer import Evaluate, Train
from shoal.types import Params

ROOT = Path(__file__).parent.parent
HAS_FLOWER = importlib.util.find_spec("flwr") is not None


def experiment(**changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": 4,
        "seed": 3,
        "algorithm": {"name": "dpsgd", "rounds": 3},
        "partition": {"name": "shards", "per_node": 3},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed})


def scikit(**changed: Any) -> Experiment:
    return experiment(
        **{"trainer": {"name": "scikit"}, "training": {"lr": 0.05, "batch_size": 8, "local_steps": 2}, **changed}
    )


def run_on_both_engines(make: Any, folder: Path, **changed: Any) -> Any:
    simulated = make(**changed).run(folder)
    real = make(**changed, engine="processes").run(folder)
    assert real.status == simulated.status == "completed"
    for key in ("digest", "metrics", "averaged_model", "bytes_sent"):
        assert real.summary[key] == simulated.summary[key], key
    return simulated


# scikit-learn


def test_a_scikit_trainer_equals_partial_fit() -> None:
    from sklearn.linear_model import SGDClassifier

    setup = Setup(scikit())
    trainer = setup.trainer_factory.trainer(1, setup.experiment.training, 0.5)
    trained = trainer.train(setup.initial)
    train, part = setup.data.train, setup.parts[1]
    from shoal.randomness import generator

    plain = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05, shuffle=False)
    for batch in Batches(part, 8, generator(3, "training", 1)).take(2):
        plain.partial_fit(train.x[batch].astype(np.float64), train.y[batch], classes=np.arange(10))
    assert np.allclose(trained.params, np.concatenate([plain.coef_.ravel(), plain.intercept_]), atol=1e-6)
    test = setup.data.test
    scores = trainer.evaluate(trained.params)
    assert scores["accuracy"] == pytest.approx(plain.score(test.x, test.y))
    margins = np.where(np.eye(10)[test.y] > 0, 1, -1) * plain.decision_function(test.x)
    assert scores["loss"] == pytest.approx(np.log1p(np.exp(-margins)).sum(1).mean(), rel=1e-4)
    assert (trainer.samples, trainer.steps(None), trainer.steps(7)) == (len(part), 2, 7)
    assert trainer.cpu_seconds > 0


def test_a_model_of_two_classes_has_one_row() -> None:
    table = {"name": "synthetic", "classes": 2, "shape": [2, 3], "samples": 200, "noise": 0.1}
    setup = Setup(scikit(dataset=table, partition={"name": "iid"}, trainer={"name": "scikit", "loss": "hinge"}))
    assert setup.trainer_factory.shapes == ((1, 6), (1,))
    trainer = setup.trainer_factory.trainer(0, setup.experiment.training, 0.0)
    params = trainer.train(setup.initial, 20).params
    assert trainer.evaluate(params)["accuracy"] == 1.0


@pytest.mark.parametrize(
    "changed",
    [{}, {"algorithm": {"name": "fedavg", "rounds": 2}, "sharing": {"name": "topk", "fraction": 0.2}}],
    ids=["dpsgd", "fedavg with topk"],
)
def test_scikit_gives_the_same_models_on_both_engines(changed: dict[str, Any], tmp_path: Path) -> None:
    run = run_on_both_engines(scikit, tmp_path, **changed)
    assert run.summary["accuracy"]["mean"] > 0.3


def test_scikit_continues_from_a_restored_state() -> None:
    setup = Setup(scikit())
    one, other = (setup.trainer_factory.trainer(0, setup.experiment.training, 0.0) for _ in range(2))
    params = one.train(setup.initial).params
    assert isinstance(one, Stateful)
    assert isinstance(other, Stateful)
    other.restore(one.state())
    assert np.array_equal(one.train(params).params, other.train(params).params)


def test_scikit_rejects_options_that_it_would_ignore() -> None:
    setup = Setup(scikit(training={"momentum": 0.9}))
    with pytest.raises(ExperimentError, match=r"training\.momentum = 0\.9: trainer 'scikit' does not use it"):
        setup.warm_up()


# Flower

CLIENT = '''
import numpy as np


class Client:
    """The interface of a NumPyClient."""

    def __init__(self, partition_id, num_partitions):
        rng = np.random.default_rng(partition_id)
        self.x, self.wanted = rng.standard_normal((10 + partition_id, 3)), np.array([1.0, -2.0, 3.0])
        self.partition_id, self.configs = partition_id, []

    def get_parameters(self, config):
        return [np.zeros((3, 1)), np.array(5), np.zeros(2, np.float16)]

    def fit(self, parameters, config):
        self.configs.append(config)
        weights, count, rest = parameters
        assert (weights.dtype, count.dtype, rest.dtype) == (np.float64, np.int64, np.float16)
        residual = self.x @ weights[:, 0] - self.x @ self.wanted
        slope = self.x.T @ residual / len(self.x)
        return [weights - config["lr"] * slope[:, None], count + 1, rest], len(self.x), {"loss": (residual**2).mean()}

    def evaluate(self, parameters, config):
        residual = self.x @ (parameters[0][:, 0] - self.wanted)
        samples = 0 if self.partition_id == 2 else len(self.x)
        return float((residual**2).mean()), samples, {"mae": abs(residual).mean(), "note": "x"}


class Wrapped:
    def __init__(self, client):
        self.numpy_client = client


def client_fn(context):
    return Wrapped(Client(context.node_config["partition-id"], context.node_config["num-partitions"]))


class Scales(Client):
    """Modifies its samples in place."""

    def __init__(self, partition_id, x_train, y_train, x_test, y_test):
        super().__init__(partition_id, 4)
        self.given = [x_train, y_train, x_test, y_test]
        for array in self.given:
            array *= 2


def by_cid(cid: str):
    return Client(int(cid), 4)


def wants_too_much(model, optimizer="sgd"): ...
def raises(cid): raise RuntimeError("no data here")
def no_client(cid): return 3
class NoArrays(Client):
    def get_parameters(self, config): return []
class Odd(Client):
    def get_parameters(self, config): return [np.array(["a"])]
class Other(Client):
    def fit(self, parameters, config): return [np.zeros(9)], 1, {}
number = 3
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "client.py").write_text(CLIENT)
    return tmp_path


def flower(base: Path, name: str = "client_fn", **changed: Any) -> Experiment:
    trainer = {"name": "flower", "client": f"client.py:{name}", "config": {"lr": 0.1}}
    return experiment(**{"trainer": trainer, "base": base, **changed})


@pytest.mark.parametrize("name", ["client_fn", "by_cid", "Client"])
def test_client_arguments_are_selected_by_parameter_name(name: str, folder: Path) -> None:
    setup = Setup(flower(folder, name))
    assert setup.initial.tolist() == [0.0, 0.0, 0.0, 5.0, 0.0, 0.0]
    assert setup.trainer_factory.shapes == ((3, 1), (), (2,))
    trainer = setup.trainer_factory.trainer(1, setup.experiment.training, 0.5)
    assert trainer.samples == 11, "known before it trains"
    assert setup.trainer_factory.client(1).configs == [], "the client must not be called"  # type: ignore[attr-defined]
    trained = trainer.train(setup.initial, 2)
    assert trained.params.dtype == np.float32
    assert trained.params[3] == 7.0, "two fits"
    assert trained.loss > 0
    assert trainer.samples == 11
    assert trainer.steps(None) == 1
    scores = trainer.evaluate(trained.params)
    assert scores.keys() == {"loss", "mae"}
    assert scores["loss"] < trainer.evaluate(setup.initial)["loss"]


def test_clients_may_modify_their_samples(folder: Path) -> None:
    with mock.patch.object(TrainerInputs, "batch", autospec=True, side_effect=TrainerInputs.batch) as batch:
        setup = Setup(flower(folder, "Scales"))
    assert batch.call_count == 1, "inputs and targets of client 0 at once"
    kept, inputs = setup.data.train.y.copy(), setup.trainer_factory.inputs  # type: ignore[attr-defined]
    given = setup.trainer_factory.client(1).given  # type: ignore[attr-defined]
    samples, tests = (
        inputs.batch(1, inputs.part(1)),
        inputs.test_batch(1, inputs.part_of_test(1)),
    )
    for array, own in zip(given, (samples.x, samples.y, tests.x, tests.y), strict=True):
        assert np.array_equal(array, 2 * own)
    assert np.array_equal(setup.data.train.y, kept)


def test_clients_evaluate_any_model_together(folder: Path) -> None:
    setup = Setup(flower(folder))
    trainers = [setup.trainer_factory.trainer(n, setup.experiment.training, 0.0) for n in range(4)]
    assert trainers[2].evaluate(setup.initial) == {}, "it has no test samples"
    losses = [trainers[n].evaluate(setup.initial)["loss"] for n in (0, 1, 3)]
    assert setup.evaluate(setup.initial)["loss"] == pytest.approx(np.average(losses, weights=[10, 11, 13]))


def test_flower_gives_the_same_models_on_both_engines(folder: Path) -> None:
    run = run_on_both_engines(lambda **changed: flower(folder, **changed), folder)
    assert run.summary["accuracy"] is None
    assert run.summary["metrics"].keys() == {"loss", "mae"}


def test_flower_with_a_server(folder: Path) -> None:
    run = flower(folder, algorithm={"name": "fedavg", "rounds": 15}).run(folder)
    assert run.status == "completed"
    weights, inputs = np.zeros(3), [np.random.default_rng(i).standard_normal((10 + i, 3)) for i in range(4)]
    for _ in range(15):
        fits = [weights - 0.1 * x.T @ x @ (weights - [1.0, -2.0, 3.0]) / len(x) for x in inputs]
        weights = np.average(fits, axis=0, weights=[10, 11, 12, 13])
    assert np.load(run.folder.model(4))[:3] == pytest.approx(weights, abs=1e-5)


@pytest.mark.parametrize(
    ("client", "expected_error"),
    [
        ("client.py", "expected file.py:name or module:name"),
        ("nowhere.py:Client", "there is no file"),
        ("client.py:Clent", "has no 'Clent'; did you mean 'Client'?"),
        ("client.py:number", "it is an instance of int; expected a ClientApp, a class of NumPyClient, or a function"),
        ("client.py:wants_too_much", "unknown parameter 'model'; available are context, cid"),
        ("client.py:raises", "creating client 0 failed: RuntimeError: no data here"),
        ("client.py:no_client", "it returned int without get_parameters; expected a NumPyClient"),
        ("client.py:NoArrays", "get_parameters returns no arrays"),
        ("client.py:Odd", "array 0 of get_parameters is <U1; expected numbers"),
        ("no.such.module:Client", "importing 'no.such.module' failed"),
    ],
)
def test_invalid_clients_are_rejected(client: str, expected_error: str, folder: Path) -> None:
    with pytest.raises(ExperimentError, match=re.escape(expected_error)):
        Setup(flower(folder, trainer={"name": "flower", "client": client}))


def test_the_error_names_a_client_that_changes_its_shapes(folder: Path) -> None:
    setup = Setup(flower(folder, "Other"))
    with pytest.raises(NodeError, match=r"client 1: fit returned arrays of shapes \(\(9,\),\)"):
        setup.trainer_factory.trainer(1, setup.experiment.training, 0.0).train(setup.initial)


def test_training_options_are_rejected_because_the_client_defines_training(folder: Path) -> None:
    with pytest.raises(
        ExperimentError, match=r"training\.lr = 0\.5: .* pass settings to your client in trainer\.config"
    ):
        flower(folder, training={"lr": 0.5}).run(folder)


class NoFlower:
    """An importer for a machine on which Flower is not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "flwr":
            raise ModuleNotFoundError("No module named 'flwr'", name=name)


def test_without_flower_the_error_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "flwr"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoFlower(), *sys.meta_path])
    for file in ("flower.toml", "flower_client.py"):
        shutil.copy(ROOT / "examples" / file, tmp_path)
    with pytest.raises(ExperimentError, match=re.escape("pip install 'shoal[flower]'")):
        Experiment.from_file(tmp_path / "flower.toml").run(tmp_path)


@pytest.mark.skipif(not HAS_FLOWER, reason="flwr is not installed: pip install 'shoal[flower]'")
def test_a_real_flower_client_learns_the_digits_on_both_engines(tmp_path: Path) -> None:
    def example(**changed: Any) -> Experiment:
        return Experiment.from_file(ROOT / "examples" / "flower.toml", {"nodes": 6, "algorithm.rounds": 10, **changed})

    run = run_on_both_engines(example, tmp_path)
    assert run.summary["accuracy"]["mean"] > 0.75


@pytest.mark.skipif(not HAS_FLOWER, reason="flwr is not installed: pip install 'shoal[flower]'")
def test_a_real_client_fn_returns_a_wrapped_client(tmp_path: Path) -> None:
    source = (ROOT / "examples" / "flower_client.py").read_text()
    (tmp_path / "real.py").write_text(
        source
        + "\n\nfrom flwr.common import Context\n\n\n"
        + "def client_fn(ctx: Context):\n"
        + "    ctx.state  # a RecordDict\n"
        + "    rng = np.random.default_rng(ctx.node_config['partition-id'])\n"
        + "    x, y = rng.standard_normal((20, 4)).astype(np.float32), rng.integers(0, 10, 20)\n"
        + "    return Client(x, y, x, y).to_client()\n"
    )
    trainer = {"name": "flower", "client": "real.py:client_fn", "config": {"lr": 0.1}}
    assert experiment(trainer=trainer, base=tmp_path).run(tmp_path).status == "completed"


# User-supplied trainers


def test_the_trainer_of_the_docs_learns(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "trainers.md").read_text()
    found = re.search(r"```python\n(# centres\.py\n.*?)```", text, re.DOTALL)
    assert found is not None
    (tmp_path / "centres.py").write_text(found[1])
    training = {"lr": 0.1, "local_steps": 4}
    run = experiment(trainer={"name": "centres.py:Centres"}, training=training, base=tmp_path).run(tmp_path)
    assert run.summary["accuracy"]["mean"] > 0.4


class Counting(BatchTrainer):
    """Adds the node id at each step and counts the batched calls."""

    calls: ClassVar[list[tuple[str, int]]] = []

    def learn(self, params: Params, batches: Iterator[Samples]) -> Trained:
        return Trained(params + np.float32(self.node * len(list(batches))), 0.0)

    def evaluate(self, params: Params) -> dict[str, float]:
        return {"loss": float(self.node)}

    def train_key(self, steps: int | None) -> Hashable | None:
        return None if self.node == 0 else self.steps(steps)

    def evaluate_key(self) -> Hashable | None:
        return "all"

    @staticmethod
    def train_batch(trainers: Sequence[Any], params: Sequence[Params], steps: int | None = None) -> list[Trained]:
        Counting.calls.append(("train", len(trainers)))
        return [trainer.train(own, steps) for trainer, own in zip(trainers, params, strict=True)]

    @staticmethod
    def evaluate_batch(trainers: Sequence[Any], params: Sequence[Params]) -> list[dict[str, float]]:
        Counting.calls.append(("evaluate", len(trainers)))
        return [trainer.evaluate(own) for trainer, own in zip(trainers, params, strict=True)]


def test_trainers_with_equal_batch_keys_are_batched() -> None:
    setup = Setup(scikit())
    inputs, training = setup.trainer_factory.inputs, setup.experiment.training  # type: ignore[attr-defined]
    trainers = [Counting(inputs, node, training, 0.0) for node in range(4)]
    start = np.zeros(3, np.float32)
    steps = [1, 1, 1, 2]
    Counting.calls.clear()
    works = [Train(trainer, start, count) for trainer, count in zip(trainers, steps, strict=True)]
    assert [trained.params[0] for trained in StackedExecutor().run(works)] == [0, 1, 2, 6]
    assert StackedExecutor().run([Evaluate(trainer, start) for trainer in trainers]) == [
        {"loss": float(i)} for i in range(4)
    ]
    assert Counting.calls == [("train", 2), ("evaluate", 4)]


def test_trainers_without_batch_keys_are_never_batched() -> None:
    setup = Setup(scikit(simulation={"batching": "auto"}))
    trainers = [setup.trainer_factory.trainer(node, setup.experiment.training, 0.0) for node in range(2)]
    assert len({Train(trainer, setup.initial).batch_key for trainer in trainers}) == 2
    assert choose_batching(setup.experiment, setup) == "off"


def test_the_examples_learn(tmp_path: Path) -> None:
    changed = {"nodes": 6, "algorithm.rounds": 8, "topology.degree": 3}
    run = Experiment.from_file(ROOT / "examples" / "scikit.toml", changed).run(tmp_path)
    assert run.summary["accuracy"]["mean"] > 0.5
    assert run.summary["metrics"]["top5"]["mean"] > 0.8


def test_an_unknown_trainer_is_rejected() -> None:
    with pytest.raises(ShoalError, match="did you mean 'scikit'"):
        experiment(trainer={"name": "sckit"})
