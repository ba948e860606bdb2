"""Training equals a plain torch loop: any optimizer, any loss, one node or many in a batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from random_data import CLASSES, DATA, PART
from shoal.data.dataset import Data, Samples
from shoal.errors import ExperimentError, NodeError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.models.flat import FlatModule
from shoal.training.batches import Batches
from shoal.training.learner import Learner
from shoal.training.optimizers import ELEMENTWISE
from shoal.training.settings import Training
from shoal.training.torch_trainer import TorchTrainer
from shoal.training.trainer import Train

BATCH = 5

OPTIMIZERS: dict[str, Training] = {
    "sgd": Training("sgd", lr=0.1),
    "sgd with momentum": Training("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd with Nesterov's": Training("sgd", lr=0.1, momentum=0.8, nesterov=True),
    "sgd with dampening": Training("SGD", lr=0.1, momentum=0.9, options={"dampening": 0.5}),
    "adam": Training("adam", lr=0.01),
    "adam with options": Training("Adam", lr=0.01, options={"betas": [0.8, 0.9], "amsgrad": True}),
    "adamw": Training("adamw", lr=0.01, weight_decay=0.1),
    "adamax": Training("adamax", lr=0.01),
    "nadam": Training("nadam", lr=0.01),
    "radam": Training("radam", lr=0.01),
    "rmsprop": Training("rmsprop", lr=0.01, momentum=0.5),
    "adagrad": Training("adagrad", lr=0.05),
    "adadelta": Training("adadelta", lr=1.0),
    "asgd": Training("asgd", lr=0.1),
    "rprop": Training("rprop", lr=0.01),
    "adafactor": Training("adafactor", lr=0.1),
}
PLAIN: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd with Nesterov's": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "sgd with dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam with options": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def flattened(module: nn.Module) -> Any:
    return np.concatenate([p.detach().numpy().ravel() for p in module.parameters()])


def with_batches(training: Training) -> Training:
    return Training(**{**vars(training), "batch_size": BATCH, "local_steps": 2})


def trainer(training: Training, node: int = 0, learner: Learner | None = None) -> TorchTrainer:
    learner = learner or Learner(FlatModule(module()), with_batches(training), DATA)
    return TorchTrainer(learner, PART, np.random.default_rng(node), step_seconds=0.0)


def batches(node: int = 0) -> list[Any]:
    """The batches that the trainer of `node` draws in three calls of two steps."""
    rng = np.random.default_rng(node)
    stream = Batches(PART, BATCH, rng)
    drawn = []
    for _ in range(3):
        drawn.extend(stream.take(2))
        rng.integers(2**63)  # the seed of dropout
    return drawn


def step(plain: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Any = None) -> float:
    optimizer.zero_grad()
    outputs = plain(torch.tensor(DATA.train.x[batch]))
    value = (loss or nn.functional.cross_entropy)(outputs, torch.tensor(DATA.train.y[batch]))
    value.backward()
    optimizer.step()
    return value.item()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # as in a run


# Optimizers


def test_every_single_step_torch_optimizer_has_a_case() -> None:
    known = {n for n, found in vars(torch.optim).items() if isinstance(found, type)}
    cases = {type(make([nn.Parameter(torch.zeros(2, 2))])).__name__ for make in PLAIN.values()}
    # LBFGS evaluates the loss several times a step, SparseAdam requires sparse gradients, Muon takes no bias
    assert known - cases == {"Optimizer", "LBFGS", "SparseAdam", "Muon"} & known
    assert OPTIMIZERS.keys() == PLAIN.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trainer_equals_a_plain_torch_loop(name: str) -> None:
    plain, one = module(), trainer(OPTIMIZERS[name])
    optimizer = PLAIN[name](plain.parameters())
    params, losses = one.learner.flat.read(), []
    drawn = batches()
    for pair in (drawn[0:2], drawn[2:4], drawn[4:6]):
        trained = one.train(params)
        params = trained.params
        losses.append((trained.loss, np.mean([step(plain, optimizer, batch) for batch in pair])))
    np.testing.assert_allclose(params, flattened(plain), rtol=1e-4, atol=1e-5)
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_keep_state_every_training_uses_a_new_optimizer(name: str) -> None:
    training = Training(**{**vars(OPTIMIZERS[name]), "keep_state": False})
    plain, one = module(), trainer(training)
    params, drawn = one.learner.flat.read(), batches()
    for round in range(3):
        params = one.train(params).params
        optimizer = PLAIN[name](plain.parameters())
        for batch in drawn[2 * round : 2 * round + 2]:
            step(plain, optimizer, batch)
    np.testing.assert_allclose(params, flattened(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep_state", [True, False])
@pytest.mark.parametrize(
    "name", [n for n, t in PLAIN.items() if type(t([nn.Parameter(torch.zeros(1))])).__name__ in ELEMENTWISE]
)
def test_nodes_trained_in_a_batch_equal_nodes_trained_alone(name: str, keep_state: bool) -> None:
    training = Training(**{**vars(OPTIMIZERS[name]), "keep_state": keep_state})
    alone = [trainer(training, node) for node in range(4)]
    learner = alone[0].learner
    batched = [trainer(training, node, learner) for node in range(4)]
    models = [learner.flat.read() + np.float32(0.1 * node) for node in range(4)]
    apart, stacked = list(models), list(models)
    for _ in range(3):
        apart = [one.train(params).params for one, params in zip(alone, apart, strict=True)]
        works = [Train(one, params) for one, params in zip(batched, stacked, strict=True)]
        assert len({work.batch_key for work in works}) == 1
        stacked = [trained.params for trained in Train.run_batch(works)]
    np.testing.assert_allclose(stacked, apart, rtol=1e-4, atol=1e-4)


def test_nodes_at_different_optimizer_steps_are_not_batched() -> None:
    first = trainer(OPTIMIZERS["adam"])
    second = trainer(OPTIMIZERS["adam"], 1, first.learner)
    params = first.learner.flat.read()
    assert Train(first, params).batch_key == Train(second, params).batch_key
    first.train(params)
    assert Train(first, params).batch_key != Train(second, params).batch_key
    second.train(params)
    assert Train(first, params).batch_key == Train(second, params).batch_key
    assert Train(first, params, steps=5).batch_key != Train(second, params).batch_key


@pytest.mark.parametrize(
    ("training", "expected_error"),
    [
        (Training("sdg"), "training.optimizer = 'sdg': unknown; did you mean 'sgd'?"),
        (Training("lbfgs"), "training.optimizer = 'lbfgs': unknown"),
        (Training("adam", momentum=0.5), "training.momentum: Adam has no such option"),
        (Training("adagrad", momentum=0.5, nesterov=True), "training.nesterov: Adagrad has no such option"),
        (
            Training("adam", options={"beta": [0.1, 0.2]}),
            "training.options.beta: Adam has no such option; did you mean 'betas'?",
        ),
        (Training(loss="cross-entrpy"), "training.loss = 'cross-entrpy': unknown; did you mean 'crossentropy'?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_names_and_options_are_errors_that_name_the_key(training: Training, expected_error: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        Learner(FlatModule(module()), training, DATA)
    assert expected_error in str(caught.value)


def test_nesterov_without_momentum_is_rejected() -> None:
    with pytest.raises(ValueError, match="nesterov = true needs a momentum above 0"):
        Training(nesterov=True)


# Losses


def one_hot(labels: Any) -> Any:
    return nn.functional.one_hot(labels, CLASSES).float()


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("cross-entropy", nn.functional.cross_entropy),
        ("CrossEntropyLoss", nn.functional.cross_entropy),
        ("multi_margin", nn.functional.multi_margin_loss),
        ("mse", lambda outputs, labels: nn.functional.mse_loss(outputs, one_hot(labels))),
        ("smooth-l1", lambda outputs, labels: nn.functional.smooth_l1_loss(outputs, one_hot(labels))),
        (
            "bce-with-logits",
            lambda outputs, labels: nn.functional.binary_cross_entropy_with_logits(outputs, one_hot(labels)),
        ),
    ],
)
def test_a_torch_loss_is_applied_to_labels_or_one_hot_rows(name: str, loss: Any) -> None:
    plain, one = module(), trainer(Training(lr=0.1, loss=name))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    initial = one.learner.flat.read()
    trained = one.train(initial)
    expected = np.mean([step(plain, optimizer, batch, loss) for batch in batches()[:2]])
    assert trained.loss == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(trained.params, flattened(plain), rtol=1e-4, atol=1e-5)
    outputs = plain(torch.tensor(DATA.test.x))
    scores = one.evaluate(trained.params)
    assert scores["loss"] == pytest.approx(loss(outputs, torch.tensor(DATA.test.y)).item(), rel=1e-4)
    assert scores["accuracy"] == pytest.approx(float((outputs.argmax(1) == torch.tensor(DATA.test.y)).float().mean()))


def test_the_gradient_of_a_zero_root_error_is_zero() -> None:
    x = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    samples = Samples(x, np.zeros(4, np.float32))
    learner = Learner(
        FlatModule(nn.Linear(6, 1)), Training(loss="rmse"), Data(samples, samples, classes=1, task="regression")
    )
    exact = np.zeros(7, np.float32)
    batch = np.arange(4)[None]
    alone = learner.train(exact, {}, batch)[0]
    stacked = learner.train_stacked([exact, exact], [{}, {}], np.stack([batch, batch]))[0]
    for trained in (alone, *stacked):
        assert np.array_equal(trained.params, exact)
        assert trained.loss == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("loss", ["auto", "nll"])
def test_padding_is_ignored_and_a_batch_of_padding_changes_nothing(loss: str) -> None:
    tokens = np.array([[1, 2, 0, 0], [2, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    samples = Samples(tokens, tokens)
    data = Data(samples, samples, classes=3, task="sequence", sizes=(3,), padding=0)
    layers = nn.Sequential(nn.Embedding(3, 5), nn.Linear(5, 3), nn.LogSoftmax(-1))
    learner = Learner(FlatModule(layers), Training(loss=loss), data)
    params = learner.flat.read()
    outputs, targets = layers(torch.tensor(tokens[:2])).reshape(-1, 3), torch.tensor(tokens[:2]).reshape(-1)
    expected = nn.functional.nll_loss(outputs[targets != 0], targets[targets != 0]).item()
    some, nothing = np.array([[0, 1]]), np.array([[2, 3]])
    alone = [learner.train(params, {}, batch)[0] for batch in (some, nothing)]
    stacked = learner.train_stacked([params, params], [{}, {}], np.stack([some, nothing]))[0]
    for trained, empty in (alone, stacked):
        assert trained.loss == pytest.approx(expected, rel=1e-5)
        assert not np.array_equal(trained.params, params)
        assert empty.loss == 0.0
        assert np.array_equal(empty.params, params)


def test_warm_up_evaluates_one_batch_and_leaves_the_model_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "EVALUATION_VALUES", 6 * 4)  # 4 samples at a time, of 15
    learner = trainer(Training()).learner
    before = learner.flat.read()
    with mock.patch.object(learner.metrics, "batch_sums", wraps=learner.metrics.batch_sums) as batch_sums:
        learner.warm_up(PART)
    assert [len(call.args[1]) for call in batch_sums.call_args_list] == [4]
    assert np.array_equal(learner.flat.read(), before)


def test_evaluation_in_pieces_and_in_a_batch_gives_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    one_pass = trainer(Training())
    models = [one_pass.learner.flat.read() + np.float32(node) for node in range(3)]
    expected = [one_pass.evaluate(params) for params in models]
    monkeypatch.setattr(Learner, "EVALUATION_VALUES", 6 * 4)  # 4 samples at a time; the last piece has 3
    pieces = trainer(Training())
    for scores in ([pieces.evaluate(params) for params in models], pieces.learner.evaluate_stacked(models)):
        for ours, theirs in zip(scores, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


# Parameters in, parameters out


def test_training_leaves_its_input_unchanged_and_returns_new_read_only_parameters() -> None:
    one = trainer(OPTIMIZERS["adam"])
    params = one.learner.flat.read()
    before = params.copy()
    trained = one.train(params).params
    assert np.array_equal(params, before)
    assert not trained.flags.writeable
    kept = trained.copy()
    one.train(trained)
    assert np.array_equal(trained, kept)


def test_training_of_a_node_does_not_depend_on_other_nodes() -> None:
    first, second = trainer(OPTIMIZERS["adam"]), trainer(OPTIMIZERS["adam"])
    other = trainer(OPTIMIZERS["adam"], 5, second.learner)
    params = again = first.learner.flat.read()
    for _ in range(3):
        params = first.train(params).params
        other.train(again)
        again = second.train(again).params
        second.evaluate(again - 1)
    assert np.array_equal(params, again)


def test_the_requested_number_of_steps_is_taken() -> None:
    one, plain = trainer(OPTIMIZERS["sgd"]), module()
    optimizer = PLAIN["sgd"](plain.parameters())
    trained = one.train(one.learner.flat.read(), steps=1).params
    step(plain, optimizer, batches()[0])
    np.testing.assert_allclose(trained, flattened(plain), rtol=1e-4, atol=1e-5)


def test_dropout_uses_the_generator_of_the_node_and_not_the_global_one() -> None:
    def run() -> Any:
        flat = FlatModule(nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, CLASSES)))
        flat.load(np.linspace(-1, 1, flat.size, dtype=np.float32))
        one = trainer(Training(), 0, Learner(flat, with_batches(Training()), DATA))
        return one.train(one.train(flat.read()).params).params

    torch.manual_seed(1)
    first = run()
    torch.manual_seed(2)
    assert np.array_equal(first, run())


def test_a_model_is_evaluated_without_dropout_and_trained_with_it() -> None:
    flat = FlatModule(nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, CLASSES)))
    learner = Learner(flat, with_batches(Training()), DATA)
    params = flat.read()
    scores = learner.evaluate(params)
    assert learner.evaluate(params) == scores
    assert [pytest.approx(scores)] * 2 == learner.evaluate_stacked([params, params])
    losses = {learner.train(params, {}, np.array([[1, 2, 3]]), draw)[0].loss for draw in range(5)}
    assert len(losses) > 1


# Batches


@given(
    st.integers(1, 12), st.integers(1, 15), st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 2**32)
)
def test_every_epoch_is_a_permutation_of_the_node_s_samples(count: int, size: int, takes: list[int], seed: int) -> None:
    samples = np.random.default_rng(seed).permutation(1000)[:count]
    stream = Batches(samples, size, np.random.default_rng(seed))
    drawn = [stream.take(steps) for steps in takes]
    assert [d.shape for d in drawn] == [(steps, size) for steps in takes]
    flat = np.concatenate([d.ravel() for d in drawn])
    for start in range(0, len(flat) - count + 1, count):
        assert sorted(flat[start : start + count]) == sorted(samples)
    assert len(set(flat[len(flat) // count * count :])) == len(flat) % count


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 2**32))
def test_batches_do_not_depend_on_the_number_taken_per_call(takes: list[int], seed: int) -> None:
    at_once = Batches(np.arange(7), 3, np.random.default_rng(seed)).take(sum(takes))
    stream = Batches(np.arange(7), 3, np.random.default_rng(seed))
    assert np.array_equal(np.concatenate([stream.take(steps) for steps in takes]), at_once)


# Epochs, the proximal term, restored state and received samples


def test_local_epochs_are_passes_over_the_samples_of_the_node() -> None:
    training = Training("sgd", lr=0.1, batch_size=BATCH, local_epochs=2)
    learner = Learner(FlatModule(module()), training, DATA)
    one = TorchTrainer(learner, PART, np.random.default_rng(0), step_seconds=0.5)
    assert one.steps(None) == 10  # 2 × 23 samples, in batches of 5
    assert Train(one, learner.flat.read()).seconds == 5.0
    assert one.steps(3) == 3


def test_steps_and_epochs_together_are_rejected() -> None:
    with pytest.raises(ValueError, match="local_steps and local_epochs exclude each other"):
        Training(local_steps=4, local_epochs=1)


def test_the_proximal_term_equals_that_of_fedprox() -> None:
    mu = 0.7
    one = trainer(Training("sgd", lr=0.1, proximal=mu))
    start = one.learner.flat.read()
    trained = one.train(start).params
    plain = module()
    anchor = [p.detach().clone() for p in plain.parameters()]

    def pulled(outputs: Any, targets: Any) -> Any:
        distance = sum(((p - a) ** 2).sum() for p, a in zip(plain.parameters(), anchor, strict=True))
        return nn.functional.cross_entropy(outputs, targets) + mu / 2 * distance

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches()[:2]:
        step(plain, optimizer, batch, pulled)
    np.testing.assert_allclose(trained, flattened(plain), atol=1e-6)
    free = trainer(Training("sgd", lr=0.1)).train(start).params
    assert np.linalg.norm(trained - start) < np.linalg.norm(free - start)


def test_the_proximal_term_is_the_same_when_nodes_are_stacked() -> None:
    learner = Learner(FlatModule(module()), with_batches(Training("sgd", lr=0.1, proximal=0.7)), DATA)
    start = learner.flat.read()
    alone = [trainer(learner.training, node, learner).train(start).params for node in range(3)]
    batched = TorchTrainer.train_batch([trainer(learner.training, n, learner) for n in range(3)], [start] * 3)
    for one, other in zip(alone, batched, strict=True):
        np.testing.assert_allclose(one, other.params, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "sgd with momentum", "adam", "adafactor"])
def test_a_new_trainer_continues_from_a_restored_state(name: str) -> None:
    one, anew = trainer(OPTIMIZERS[name]), trainer(OPTIMIZERS[name], node=7)
    params = one.train(one.learner.flat.read()).params
    one.data.add(Samples(np.ones((2, 6), np.float32), np.array([0, 1])))
    anew.restore(one.state())
    assert anew.samples == one.samples == len(PART) + 2
    for _ in range(4):  # more than one pass, so that the order of the next pass is drawn
        trained, again = one.train(params), anew.train(params)
        assert np.array_equal(trained.params, again.params)
        params = trained.params


def test_received_samples_are_stored_once_and_used_for_training() -> None:
    one = trainer(Training("sgd", lr=0.1))
    foreign = Samples(np.full((3, 6), 9, np.float32), np.array([0, 0, 1]))
    assert one.data.add(foreign) == 2  # the first two are the same sample
    assert one.data.add(foreign) == 0
    assert one.data.add(Samples(DATA.train.x[PART[:4]], DATA.train.y[PART[:4]])) == 0
    assert one.samples == len(PART) + 2
    seen = np.concatenate([one.draw(1)[0].ravel() for _ in range(10)])
    assert {40, 41} <= set(seen.tolist())
    numbers = np.array([[9, 40, 41, 12, 13]])
    params = one.learner.flat.read()
    trained, _ = one.learner.train(params, {}, numbers, 0, one.data.added)
    plain = module()
    x = np.concatenate([DATA.train.x[[9]], foreign.x[[0, 2]], DATA.train.x[[12, 13]]])
    y = np.concatenate([DATA.train.y[[9]], foreign.y[[0, 2]], DATA.train.y[[12, 13]]])
    nn.functional.cross_entropy(plain(torch.tensor(x)), torch.tensor(y)).backward()
    gradient = np.concatenate([p.grad.numpy().ravel() for p in plain.parameters()])  # type: ignore[union-attr]
    np.testing.assert_allclose(trained.params, params - 0.1 * gradient, atol=1e-6)


def test_a_node_without_data_raises_an_error_on_training() -> None:
    learner = Learner(FlatModule(module()), with_batches(Training()), DATA)
    bystander = TorchTrainer(learner, PART[:0], np.random.default_rng(0), step_seconds=0.0)
    with pytest.raises(NodeError, match="holds no data to train on"):
        bystander.train(learner.flat.read())


def test_warm_up_trains_once_with_each_group_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked processes inherit what a first step sets up, and the zygote measures the memory of a training."""
    trained: list[float] = []
    train = Learner.train

    def counted(self: Learner, *args: Any, **options: Any) -> Any:
        trained.append(self.training.lr)
        return train(self, *args, **options)

    monkeypatch.setattr(Learner, "train", counted)
    described = Experiment(nodes=4, training={"lr": 0.1}, group=[{"nodes": "3", "training": {"lr": 0.5}}])
    setup = Setup(described)
    setup.trainer(0)
    setup.warm_up()
    setup.warm_up()
    assert sorted(trained) == [0.1, 0.5]
