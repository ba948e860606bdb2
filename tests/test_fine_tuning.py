"""evaluation.fine_tune: a copy of the model is trained before its evaluation; training itself does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conftest import models_of
from shoal.data.dataset import Indices
from shoal.data.digits import Digits
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.models.flat import FlatModule
from shoal.randomness import derived_seed, generator
from shoal.results.records import Evaluation
from shoal.training import Training
from shoal.training.batches import Batches, FineTuning
from shoal.training.learner import Learner
from shoal.training.torch_trainer import TorchTrainer


def experiment(**changed: Any) -> Experiment:
    defaults: dict[str, Any] = {
        "nodes": 4,
        "seed": 2,
        "algorithm": {"name": "dpsgd", "rounds": 3},
        "partition": {"name": "shards"},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"batch_size": 8, "momentum": 0.9},
        "evaluation": {"every": 1, "fine_tune": 3},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**defaults, **changed})


def losses(run: Any) -> list[float]:
    return [r.scores["loss"] for n in range(4) for r in run.folder.read(n) if isinstance(r, Evaluation)]


def test_training_and_the_average_do_not_change(tmp_path: Path) -> None:
    plain = experiment(evaluation={"every": 1}).run(tmp_path)
    tuned = experiment().run(tmp_path)
    pool = experiment(simulation={"batching": "pool", "workers": 2}).run(tmp_path)
    real = experiment(engine="processes").run(tmp_path)
    for run in (tuned, pool, real):
        assert run.summary["digest"] == plain.summary["digest"]
        assert run.summary["averaged_model"] == plain.summary["averaged_model"], "averages are not fine-tuned"
        assert losses(run) == losses(tuned)
    assert len(losses(tuned)) == 12
    assert all(abs(a - b) > 1e-5 for a, b in zip(losses(tuned), losses(plain), strict=True))
    stacked = experiment(simulation={"batching": "vmap"}).run(tmp_path)
    assert models_of(stacked) == pytest.approx(models_of(plain), abs=1e-5)
    assert losses(stacked) == pytest.approx(losses(tuned), abs=1e-4)


@pytest.mark.parametrize("by", ["rounds", "steps"])
def test_fine_tuning_has_the_learning_rate_of_the_node_at_the_evaluation(by: str, tmp_path: Path) -> None:
    """Also if models are kept, and evaluated after the run."""
    schedule = {"name": "step", "every": 2, "factor": 0.1, "by": by}
    scheduled = {"training": {"batch_size": 8, "lr": 0.5, "schedule": schedule}}
    expected = losses(experiment(**scheduled).run(tmp_path))
    assert losses(experiment(**scheduled, engine="processes", duration=60.0).run(tmp_path)) == expected
    pool = {"batching": "pool", "workers": 2}
    assert losses(experiment(**scheduled, simulation=pool).run(tmp_path)) == expected


def test_a_copy_takes_the_steps_on_the_samples_of_the_node() -> None:
    own = {"model": {"name": "logistic"}, "evaluation": {"fine_tune": 2}}
    setup = Setup(experiment(**own, training={"batch_size": 360, "lr": 0.5, "optimizer": "adam"}, nodes=4))
    part, data = setup.parts[1], setup.data
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    trainer = setup.trainer(1)
    torch.nn.utils.vector_to_parameters(torch.tensor(setup.initial), module.parameters())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)
    batches, _ = setup.trainer_factory.inputs.fine_tuning(1).draw(part, 360)  # type: ignore[attr-defined]
    assert set(batches.ravel().tolist()) == set(part.tolist())
    for batch in batches:
        optimizer.zero_grad()
        x, y = torch.tensor(data.train.x[batch]), torch.tensor(data.train.y[batch])
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        test = nn.functional.cross_entropy(module(torch.tensor(data.test.x)), torch.tensor(data.test.y))
    assert trainer.evaluate(setup.initial)["loss"] == pytest.approx(float(test), rel=1e-3)
    assert trainer.cpu_seconds == 0.0, "the processor time of training"


def small_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def test_rotated_images_are_flipped_and_a_copy_with_its_buffers_takes_fresh_steps() -> None:
    """A hand-written loop: rotation comes before augmentation, and fine-tuning has no optimizer state of training."""
    training = {"batch_size": 8, "lr": 0.02, "optimizer": "adam", "buffers": "local"}
    data = {"dataset": {"name": "digits", "images": True}, "augmentation": ["flip"], "model": small_network()}
    rotation = {"name": "rotation", "angles": [90]}
    setup = Setup(experiment(**data, partition=rotation, training=training))
    samples, part = setup.data, setup.parts[1]
    module, trainer = small_network(), setup.trainer(1)
    nn.utils.vector_to_parameters(torch.tensor(setup.initial), module.parameters())

    def take_steps(batches: Indices, seed: int) -> None:
        optimizer, rng = torch.optim.Adam(module.parameters(), lr=0.02), generator(seed, "augmentation")
        for batch in batches:
            x = torch.rot90(torch.tensor(samples.train.x[batch]), 1, (2, 3))
            flipped = torch.tensor(rng.random(len(batch)) < 0.5)
            x[flipped] = x[flipped].flip(3)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), torch.tensor(samples.train.y[batch])).backward()
            optimizer.step()

    rng = generator(setup.experiment.seed, "training", 1)
    take_steps(Batches(part, 8, rng).take(4), int(rng.integers(2**63)))
    params = trainer.train(setup.initial, 4).params
    expected = nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    assert params == pytest.approx(expected, abs=1e-5)
    take_steps(*FineTuning(3, derived_seed(setup.experiment.seed, "fine-tuning", 1)).draw(part, 8))
    module.eval()
    with torch.no_grad():
        outputs = module(torch.rot90(torch.tensor(samples.test.x), 1, (2, 3)))
        loss = nn.functional.cross_entropy(outputs, torch.tensor(samples.test.y))
    assert trainer.evaluate(params)["loss"] == pytest.approx(float(loss), abs=1e-4)


def test_evaluation_leaves_optimizer_buffers_and_batches_as_they_are() -> None:
    data = Digits().load(0)
    learner = Learner(
        FlatModule(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10)), "local"),
        Training("adam", lr=0.01, batch_size=8, buffers="local"),
        data,
    )
    tuning = FineTuning(3, seed=5)

    def trainer(fine_tuning: FineTuning | None) -> TorchTrainer:
        rng = np.random.default_rng(1)
        return TorchTrainer(learner, np.arange(50), rng, 0.0, fine_tuning=fine_tuning)

    start = learner.flat.read()
    tuned, plain = trainer(tuning), trainer(None)
    for _ in range(2):
        params = {one: one.train(start, 2).params for one in (tuned, plain)}
        assert np.array_equal(params[tuned], params[plain])
        assert tuned.evaluate(params[tuned]) != plain.evaluate(params[plain])
        assert tuned.evaluate(params[tuned]) == tuned.evaluate(params[tuned]), "the same batches each time"
        states = tuned.state(), plain.state()
        assert states[0]["batches"]["rng"] == states[1]["batches"]["rng"]
        for part in ("optimizer", "buffers"):
            assert states[0][part].keys() == states[1][part].keys()
            assert all(np.array_equal(states[0][part][key], states[1][part][key]) for key in states[0][part])


def test_scikit_fine_tunes_and_augments_in_both_engines(tmp_path: Path) -> None:
    own = {
        "trainer": {"name": "scikit"},
        "training": {"lr": 0.05, "batch_size": 8},
        "dataset": {"name": "digits", "images": True},
        "augmentation": ["flip"],
    }
    tuned, real = (experiment(**own, engine=engine).run(tmp_path) for engine in ("simulation", "processes"))
    plain = experiment(**own, evaluation={"every": 1}).run(tmp_path)
    assert tuned.summary["digest"] == real.summary["digest"] == plain.summary["digest"]
    assert losses(tuned) == losses(real)
    assert losses(tuned) != losses(plain)


def test_the_model_of_a_server_is_not_fine_tuned_but_those_of_its_clients_are(tmp_path: Path) -> None:
    own = {"algorithm": {"name": "fedavg", "rounds": 2}}
    tuned, plain = (experiment(**own, evaluation={"fine_tune": k}).run(tmp_path) for k in (3, 0))
    assert tuned.summary["digest"] == plain.summary["digest"]
    server = [[r.scores for r in run.folder.read(4) if isinstance(r, Evaluation)] for run in (tuned, plain)]
    assert server[0] == server[1] != []
    assert len(set(losses(plain))) == 1, "all clients have the same model"
    assert len({*losses(plain), *losses(tuned)}) == 5


def test_a_trainer_that_cannot_fine_tune_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Own:\n    def create_factory(self, inputs): ...\n")
    with pytest.raises(ExperimentError, match=r"evaluation\.fine_tune = 3: trainer = .* cannot train a copy"):
        experiment(trainer={"name": "own.py:Own"}, base=tmp_path)
