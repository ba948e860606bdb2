"""PluginName learns, does not keep the model between calls, and runs on both engines."""

from pathlib import Path

import numpy as np
import pytest
from shoal import Experiment
from shoal.errors import ExperimentError
from shoal.experiment.setup import Setup
from shoal.training import Trainer

from plugin_name import mean_loss, softmax

EXPERIMENT = Path(__file__).with_name("plugin_name.toml")


def first_node(**settings: object) -> tuple[Setup, Trainer]:
    setup = Setup(Experiment.from_file(EXPERIMENT, {"nodes": 4, **settings}))
    return setup, setup.trainer(0)


def test_training_lowers_the_loss() -> None:
    setup, trainer = first_node()
    trained = trainer.train(setup.initial, 20)
    assert trained.params.dtype == np.float32
    assert trainer.train(trained.params, 20).loss < trained.loss
    assert trainer.evaluate(trained.params).keys() == {"loss", "accuracy"}


def test_the_result_depends_on_the_parameters_and_the_batches_only() -> None:
    (setup, one), (_, other) = first_node(), first_node()
    assert np.array_equal(one.train(setup.initial, 3).params, other.train(setup.initial, 3).params)
    assert not setup.initial.any(), "`train` must not change its argument"


def test_decay_pulls_the_weights_to_zero() -> None:
    (setup, free), (_, decayed) = first_node(), first_node(**{"trainer.decay": 1.0})
    norms = [float(np.linalg.norm(trainer.train(setup.initial, 20).params)) for trainer in (decayed, free)]
    assert norms[0] < norms[1]


def test_the_schedule_sets_the_step_size() -> None:
    schedule = {"name": "step", "every": 1, "factor": 0.5, "by": "steps"}
    (setup, constant), (_, halved) = first_node(), first_node(**{"training.schedule": schedule})
    norms = [float(np.linalg.norm(trainer.train(setup.initial, 2).params)) for trainer in (halved, constant)]
    assert norms[0] < norms[1]


def test_settings_that_have_no_effect_are_rejected() -> None:
    with pytest.raises(ExperimentError, match=r"training\.momentum = 0\.9"):
        first_node(**{"training.momentum": 0.9})


def test_softmax_and_loss() -> None:
    outputs = np.array([[0.0, 0.0], [1000.0, 0.0]], np.float32)
    assert np.allclose(softmax(outputs), [[0.5, 0.5], [1.0, 0.0]])
    assert np.isclose(mean_loss(outputs, np.array([0, 0])), np.log(2) / 2)


def test_both_engines_end_with_the_same_models(tmp_path: Path) -> None:
    digests = []
    for engine in ("simulation", "processes"):
        settings = {"engine": engine, "nodes": 4, "algorithm.rounds": 5, "simulation.batching": "off"}
        run = Experiment.from_file(EXPERIMENT, settings).run(tmp_path)
        assert run.status == "completed"
        digests.append(run.summary["digest"])
    assert digests[0] == digests[1]
