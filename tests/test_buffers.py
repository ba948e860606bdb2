"""Buffers that training changes are shared or local, and training does not change frozen parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conftest import models_of
from random_data import CLASSES, DATA, PART
from shoal.engines.simulation.engine import Simulation
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.models.flat import Buffers, FlatModule, find_changing_buffers, initial_module
from shoal.results.records import RunFolder
from shoal.training.batches import Batches
from shoal.training.learner import Learner
from shoal.training.settings import Training
from shoal.training.torch_trainer import TorchTrainer
from shoal.training.trainer import Evaluate, Train

BATCH, STEPS = 5, 3
SGD = Training(lr=0.1, momentum=0.9, weight_decay=0.05, batch_size=BATCH, local_steps=STEPS)
both_buffer_modes = pytest.mark.parametrize("buffers", ["shared", "local"])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # like in a run


def seeded(make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def batch_norm_module() -> nn.Module:
    module: nn.Module = seeded(
        lambda: nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 7), nn.BatchNorm1d(7))
    )
    return nn.Sequential(module, seeded(lambda: nn.Linear(7, CLASSES)))


def trainer(flat: FlatModule, training: Training = SGD, node: int = 0) -> TorchTrainer:
    return TorchTrainer(Learner(flat, training, DATA), PART, np.random.default_rng(node), step_seconds=0.0)


def statistics(module: nn.Module) -> Any:
    return np.concatenate([b.numpy().ravel() for b in module.buffers() if b.is_floating_point()])


def trained_values(module: nn.Module) -> Any:
    return np.concatenate([p.detach().numpy().ravel() for p in module.parameters()])


class Frozen(nn.Module):
    """A frozen layer followed by a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(6, 7).requires_grad_(False)
        self.last = nn.Linear(7, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.fixed(x)))
        return out


class CustomBuffers(nn.Module):
    """Custom buffers: training replaces the first, increments the second and does not change the third."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * x.detach().mean(0)
            self.calls += 1
        out: torch.Tensor = self.linear((x - self.seen) * self.scale)
        return out


# One node


@both_buffer_modes
def test_training_one_node_matches_a_plain_loop_with_batch_norm(buffers: Buffers) -> None:
    plain, one = batch_norm_module(), trainer(FlatModule(batch_norm_module(), buffers))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    node_rng = np.random.default_rng(0)
    stream = Batches(PART, BATCH, node_rng)
    flat = one.learner.flat
    params = flat.read()
    for _ in range(4):
        params = one.train(params).params
        for batch in stream.take(STEPS):
            optimizer.zero_grad()
            outputs = plain(torch.tensor(DATA.train.x[batch]))
            nn.functional.cross_entropy(outputs, torch.tensor(DATA.train.y[batch])).backward()
            optimizer.step()
        node_rng.integers(2**63)  # the trainer draws the seed of dropout
    np.testing.assert_allclose(params[: flat.trained_size], trained_values(plain), rtol=1e-4, atol=1e-5)
    state = one.state()["buffers"]
    assert int(state["0.1.num_batches_tracked"]) == 4 * STEPS
    if buffers == "shared":
        assert params.size == flat.trained_size + 4 * 7
        np.testing.assert_allclose(params[flat.trained_size :], statistics(plain), rtol=1e-4, atol=1e-5)
    else:
        assert params.size == flat.trained_size
        np.testing.assert_allclose(
            np.concatenate([v for v in state.values() if v.ndim]), statistics(plain), rtol=1e-4, atol=1e-5
        )
    plain.eval()
    expected = nn.functional.cross_entropy(plain(torch.tensor(DATA.test.x)), torch.tensor(DATA.test.y)).item()
    assert one.evaluate(params)["loss"] == pytest.approx(expected, rel=1e-4)


@both_buffer_modes
def test_nodes_in_one_process_have_separate_statistics(buffers: Buffers) -> None:
    alone = trainer(FlatModule(batch_norm_module(), buffers))
    interleaved = trainer(FlatModule(batch_norm_module(), buffers))
    other = TorchTrainer(interleaved.learner, np.arange(8), np.random.default_rng(5), step_seconds=0.0)
    params = again = start = alone.learner.flat.read()
    for _ in range(3):
        params = alone.train(params).params
        other.train(start)
        other.evaluate(start)
        again = interleaved.train(again).params
        interleaved.learner.evaluate(start)
    assert np.array_equal(params, again)
    assert alone.evaluate(params) == interleaved.evaluate(params)


@both_buffer_modes
def test_a_restored_trainer_continues_with_the_saved_buffers(buffers: Buffers) -> None:
    one = trainer(FlatModule(batch_norm_module(), buffers))
    restored = trainer(FlatModule(batch_norm_module(), buffers), node=7)
    params = one.train(one.learner.flat.read()).params
    saved = one.state()
    restored.restore(saved)
    assert one.evaluate(params) == restored.evaluate(params)
    for _ in range(3):
        trained, again = one.train(params), restored.train(params)
        assert np.array_equal(trained.params, again.params)
        assert one.evaluate(trained.params) == restored.evaluate(again.params)
        params = trained.params
    assert int(saved["buffers"]["0.1.num_batches_tracked"]) == STEPS  # a copy


def test_evaluation_without_a_node_uses_the_initial_buffers() -> None:
    one = trainer(FlatModule(batch_norm_module(), "local"))
    start = one.learner.flat.read()
    fresh = batch_norm_module().eval()
    expected = nn.functional.cross_entropy(fresh(torch.tensor(DATA.test.x)), torch.tensor(DATA.test.y)).item()
    one.train(start)
    assert one.learner.evaluate(start)["loss"] == pytest.approx(expected, rel=1e-5)
    assert one.evaluate(start)["loss"] != pytest.approx(expected, rel=1e-3)


# Selection of buffers


def test_find_changing_buffers_detects_changes_and_restores_values() -> None:
    module = CustomBuffers()
    seen, calls = module.seen, module.calls
    assert find_changing_buffers(module, torch.ones(2, 6)) == {"seen", "calls"}
    assert module.seen is seen
    assert module.calls is calls
    assert not seen.any()
    assert not calls
    assert find_changing_buffers(nn.Linear(2, 2), torch.ones(2, 2)) == frozenset()
    with pytest.raises(ValueError, match=r"CustomBuffers raised RuntimeError for a batch of inputs of shape \(2, 5\)"):
        find_changing_buffers(module, torch.ones(2, 5))


def test_buffers_are_restored_if_a_forward_pass_or_the_check_of_its_outputs_fails() -> None:
    def reject(outputs: object) -> None:
        raise ArithmeticError

    module = CustomBuffers()
    seen, calls = module.seen, module.calls
    with pytest.raises(ArithmeticError):
        find_changing_buffers(module, torch.ones(2, 6), reject)
    module.linear = nn.Linear(5, CLASSES)
    with pytest.raises(ValueError, match="CustomBuffers raised RuntimeError"):
        find_changing_buffers(module, torch.ones(2, 6))
    assert module.seen is seen
    assert not seen.any()
    assert module.calls is calls
    assert not calls


@pytest.mark.parametrize(
    ("buffers", "shared", "local"), [("shared", ["seen"], ("calls",)), ("local", [], ("seen", "calls"))]
)
def test_custom_buffers_are_shared_or_local_and_constant_buffers_are_neither(
    buffers: Buffers, shared: list[str], local: tuple[str, ...]
) -> None:
    flat = initial_module(CustomBuffers, 0, buffers=buffers, inputs=torch.ones(2, 6))
    assert [slot.name for slot in flat.layout] == ["linear.weight", "linear.bias", *shared]
    assert flat.local_buffers == local
    one = trainer(flat)
    params = one.train(flat.read()).params
    seen, stream = np.zeros(6, np.float32), Batches(PART, BATCH, np.random.default_rng(0))
    for batch in stream.take(STEPS):
        seen = 0.5 * seen + 0.5 * DATA.train.x[batch].mean(0)
    found = params[flat.trained_size :] if shared else one.state()["buffers"]["seen"]
    np.testing.assert_allclose(found, seen, rtol=1e-5, atol=1e-6)
    flat.load(params + 1)
    if shared:
        np.testing.assert_allclose(flat.module.seen, seen + 1, rtol=1e-5)  # still a view


def test_a_buffer_shared_by_two_layers_has_one_slot() -> None:
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.running_mean = first.running_mean
    flat = FlatModule(nn.Sequential(first, second))
    assert [s.name for s in flat.layout][-3:] == ["0.running_mean", "0.running_var", "1.running_var"]
    assert first.running_mean is second.running_mean
    assert first.running_mean.data_ptr() == flat.values[16:].data_ptr()


def test_spectral_norm_trains_with_local_buffers() -> None:
    def make() -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(seeded(lambda: nn.Linear(6, CLASSES)))

    one = trainer(FlatModule(seeded(make), "local"))
    trained = one.train(one.learner.flat.read())
    assert np.isfinite(trained.loss)
    assert len(one.state()["buffers"]) == 2


# Frozen parameters


WITH_WEIGHT_DECAY = [
    Training("sgd", lr=0.1, weight_decay=0.1, momentum=0.9),
    Training("adam", lr=0.1, weight_decay=0.1),
    Training("adamw", lr=0.1),
    Training("asgd", lr=0.1, options={"lambd": 0.5}),
    Training("rmsprop", lr=0.1, weight_decay=0.1, proximal=0.5),
    Training("adafactor", lr=0.1, weight_decay=0.1),
]


@pytest.mark.parametrize("training", WITH_WEIGHT_DECAY, ids=lambda t: t.optimizer)
def test_frozen_parameters_do_not_change_under_weight_decay_in_single_or_stacked_training(training: Training) -> None:
    flat = FlatModule(seeded(Frozen))
    learner = Learner(flat, training, DATA)
    start = flat.read()
    fixed = slice(flat.trained_size, None)
    assert start[fixed].size == 6 * 7 + 7
    batches = PART[:20].reshape(4, 5)
    alone, _ = learner.train(start, {}, batches)
    assert np.array_equal(alone.params[fixed], start[fixed])
    assert not np.array_equal(alone.params, start)
    if learner.trains_stacked:
        together, states = learner.train_stacked([start, start], [{}, {}], np.stack([batches, batches]))
        assert np.array_equal(together[0].params[fixed], start[fixed])
        np.testing.assert_allclose(together[1].params, alone.params, atol=1e-5)
        learner.train_stacked([start, start], states, np.stack([batches, batches]))


@pytest.mark.parametrize("training", WITH_WEIGHT_DECAY, ids=lambda t: t.optimizer)
def test_optimizers_do_not_change_statistics(training: Training) -> None:
    still = FlatModule(nn.Sequential(nn.BatchNorm1d(6, momentum=0.0), seeded(lambda: nn.Linear(6, CLASSES))))
    start = still.read()
    trained, _ = Learner(still, training, DATA).train(start, {}, PART[:20].reshape(4, 5))
    assert np.array_equal(trained.params[still.trained_size :], start[still.trained_size :])
    assert (start[still.trained_size :] == [0.0] * 6 + [1.0] * 6).all()


def test_the_proximal_term_does_not_change_statistics() -> None:
    start = FlatModule(batch_norm_module()).read()
    batches = PART[:20].reshape(4, 5)
    still = Training("sgd", lr=1e-30)
    pulled = Training("sgd", lr=1e-30, proximal=1e20)
    first, second = (
        Learner(FlatModule(batch_norm_module()), t, DATA).train(start, {}, batches)[0] for t in (still, pulled)
    )
    assert np.array_equal(first.params, second.params)


# Stacked models


class ValueDependent(nn.Module):
    """A module whose control flow depends on a value, which `vmap` does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out if out.sum().item() > 0 else out * 2


class LstmModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.linear = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.lstm(x[:, None])[0][:, -1])
        return out


@pytest.mark.parametrize(
    ("make", "vectorized"), [(Frozen, True), (ValueDependent, False), (LstmModule, False), (batch_norm_module, False)]
)
def test_modules_that_vmap_does_not_support_are_detected(make: Any, vectorized: bool) -> None:
    learner = Learner(FlatModule(make()), SGD, DATA)
    before = torch.get_rng_state()
    assert learner.evaluates_stacked is vectorized
    assert torch.equal(torch.get_rng_state(), before)
    assert learner.trains_stacked is vectorized
    assert learner.flat.module.training
    nodes = [TorchTrainer(learner, PART, np.random.default_rng(n), step_seconds=0.0) for n in range(2)]
    params = learner.flat.read()
    assert (len({Train(one, params).batch_key for one in nodes}) == 1) is vectorized
    assert (len({Evaluate(one, params).batch_key for one in nodes}) == 1) is vectorized


def test_a_vectorized_module_with_an_unstackable_optimizer_is_not_stackable() -> None:
    learner = Learner(FlatModule(Frozen()), Training("adafactor"), DATA)
    assert learner.evaluates_stacked
    assert not learner.trains_stacked


# Complete runs


MODULE_SOURCE = '''
import torch
from torch import nn


class BatchNormModule(nn.Module):
    """Batch normalisation between two layers, for digits."""

    def __init__(self, width: int = 8, slope: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.LeakyReLU(slope), nn.Linear(width, 10)
        )

    def forward(self, x):
        return self.layers(x)
'''
SIZES = {"shared": 64 * 9 + 9 + 18 + 90 + 10 + 18, "local": 64 * 9 + 9 + 18 + 90 + 10}


@pytest.fixture
def module_path(tmp_path: Path) -> str:
    (tmp_path / "custom.py").write_text(MODULE_SOURCE)
    return f"{tmp_path / 'custom.py'}:BatchNormModule"


def experiment(model_name: str, buffers: str, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": 4,
        "seed": 4,
        "algorithm": {"name": "dpsgd", "rounds": 3},
        "topology": {"name": "full"},
        "partition": {"name": "shards", "per_node": 2},
        "model": {"name": model_name, "width": 9},
        "training": {"lr": 0.1, "batch_size": 16, "local_steps": 2, "buffers": buffers},
        "evaluation": {"every": 1, "samples": 100},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changes})


@both_buffer_modes
def test_a_custom_module_gives_equal_results_on_both_engines_and_in_every_batching_mode(
    buffers: str, module_path: str, tmp_path: Path
) -> None:
    off = experiment(module_path, buffers).run(tmp_path)
    assert off.status == "completed"
    assert models_of(off).shape == (4, SIZES[buffers])
    others = [
        experiment(module_path, buffers, engine="processes"),
        experiment(module_path, buffers, simulation={"batching": "pool", "workers": 2}),
        experiment(module_path, buffers, simulation={"batching": "vmap"}),
    ]
    for other in others:
        run = other.run(tmp_path)
        assert np.array_equal(models_of(run), models_of(off))
        for score in ("accuracy", "loss"):
            assert run.summary[score] == off.summary[score]


def test_shared_statistics_are_averaged_and_local_ones_are_not(module_path: str, tmp_path: Path) -> None:
    for buffers in ("shared", "local"):
        simulation = Simulation(
            experiment(module_path, buffers, evaluation={"every": 0, "average": False}),
            RunFolder.create(tmp_path, buffers),
        )
        simulation.run()
        params = np.stack([node.params for node in simulation.nodes])
        # In a full graph all nodes have the same average.
        np.testing.assert_allclose(params, np.broadcast_to(params[0], params.shape), atol=1e-6)
        states = [node.trainer.state()["buffers"] for node in simulation.nodes]  # type: ignore[attr-defined]
        assert all(int(own["layers.2.num_batches_tracked"]) == 6 for own in states)
        if buffers == "local":
            means = [own["layers.2.running_mean"] for own in states]
            assert not np.allclose(means[0], means[1], atol=1e-3)  # nodes have different digits
        else:
            assert set(states[0]) == {"layers.2.num_batches_tracked"}
            assert params[0, -9:].min() > 0  # variances


def test_local_statistics_are_not_sent(module_path: str, tmp_path: Path) -> None:
    shared, local = (
        experiment(module_path, buffers, evaluation={"every": 0}).run(tmp_path).summary
        for buffers in ("shared", "local")
    )
    messages = shared["messages_sent"]
    assert messages == local["messages_sent"]
    assert shared["bytes_sent"]["total"] - local["bytes_sent"]["total"] == messages * 18 * 4


def test_groups_with_different_buffer_modes_are_rejected(module_path: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"training.buffers = 'local' for a group"):
        experiment(module_path, "shared", group=[{"nodes": "0-1", "training": {"buffers": "local"}}]).run(tmp_path)


def test_unknown_options_of_a_custom_module_are_rejected(module_path: str) -> None:
    with pytest.raises(ExperimentError, match="widht"):
        experiment(module_path, "shared", model={"name": module_path, "widht": 9})


def test_leaf_cnn_with_batch_norm_keeps_local_statistics(tmp_path: Path) -> None:
    run = experiment(
        "leaf-cnn",
        "local",
        nodes=2,
        model={"name": "leaf-cnn", "batch_norm": True},
        dataset={"name": "synthetic", "shape": [3, 16, 16], "samples": 80, "test_samples": 40},
        partition={"name": "iid"},
    ).run(tmp_path)
    assert np.load(run.folder.model(0)).size == 28_640 + 256 + 32 * 10 + 10


def test_negative_variances_of_a_merged_model_count_as_zero() -> None:
    flat = FlatModule(batch_norm_module())
    slot = next(slot for slot in flat.layout if slot.name.endswith("running_var"))
    params = flat.read().copy()
    params[slot.offset] = -0.5
    scores = trainer(flat).evaluate(params)
    assert np.isfinite(list(scores.values())).all()
    params[slot.offset] = 0.0
    assert trainer(flat).evaluate(params) == scores
