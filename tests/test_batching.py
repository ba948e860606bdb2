"""When nodes are stacked: never if a trainer or a model does anything that stacking does not repeat."""

from __future__ import annotations

import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import models_of
from random_data import CLASSES, DATA, PART
from shoal.data.dataset import Data, Samples
from shoal.engines.simulation.compute import StackedExecutor
from shoal.errors import NodeError
from shoal.experiment import Experiment
from shoal.models.flat import FlatModule
from shoal.training.learner import Learner
from shoal.training.losses import Loss
from shoal.training.optimizers import stack_states, state_signature, unstack_state
from shoal.training.overrides import METADATA
from shoal.training.settings import Training
from shoal.training.torch_trainer import TorchTrainer
from shoal.training.trainer import UNRELATED_TO_EVALUATION, UNRELATED_TO_TRAINING, Evaluate, Train

PLUGIN = '''
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from shoal.training import Trained
from shoal.training.learner import Learner
from shoal.training.torch_factory import TorchBackend, TorchTrainerFactory
from shoal.training.torch_trainer import TorchTrainer


class Halved(TorchTrainer):
    """Goes half of the way."""

    def train(self, params, steps=None):
        trained = super().train(params, steps)
        return Trained((params + trained.params) / 2, trained.loss)


class OneSample(TorchTrainer):
    """Uses the first sample of each batch alone."""

    def draw(self, steps):
        batches, seed = super().draw(steps)
        return np.repeat(batches[:, :1], batches.shape[1], 1), seed


class Backwards(Learner):
    """Takes the batches in the reverse order."""

    def train(self, params, state, batches, *rest):
        return super().train(params, state, batches[::-1].copy(), *rest)


class Factory(TorchTrainerFactory):
    def __init__(self, inputs, override):
        super().__init__(inputs)
        self.override = override

    def learner(self, training):
        learner = super().learner(training)
        if self.override == "learner":
            learner.__class__ = Backwards
        return learner

    def trainer(self, node, training, step_seconds):
        made = super().trainer(node, training, step_seconds)
        made.__class__ = {"train": Halved, "draw": OneSample, "learner": TorchTrainer}[self.override]
        return made


@dataclass(frozen=True)
class Backend:
    override: str

    def create_factory(self, inputs):
        return Factory(inputs, self.override)


class Masked(nn.Module):
    def __init__(self, shape, classes, draws):
        super().__init__()
        self.inside, self.out = nn.Linear(shape[0], 12), nn.Linear(12, classes)
        self.draws = {
            "torch": lambda: torch.rand(12),
            "numpy": lambda: torch.tensor(np.random.random(12), dtype=torch.float32),
            "python": lambda: torch.tensor([random.random() for _ in range(12)]),
            "rarely": lambda: torch.tensor(np.random.random(12) if torch.rand(()) < 0.3 else np.ones(12)),
        }[draws]

    def forward(self, x):
        hidden = self.inside(x).relu()
        return self.out(hidden * (self.draws() > 0.5) if self.training else hidden)


@dataclass(frozen=True)
class Model:
    draws: str

    def build(self, shape, classes):
        return Masked(shape, classes, self.draws)


class Noise:
    """Augmentation that draws from a global generator."""

    def apply(self, x, rng):
        return x + torch.randn_like(x)


class Sometimes:
    """Augmentation that draws from a global generator for some batches, and never for few samples."""

    def apply(self, x, rng):
        return x + torch.randn_like(x) if len(x) > 2 and rng.random() < 0.3 else x


class Several:
    """Augmentation that draws from a global generator for every batch of more than two samples."""

    def apply(self, x, rng):
        return x + torch.randn_like(x) if len(x) > 2 else x


class Two:
    """Augmentation that draws from a global generator for every batch of more than one sample."""

    def apply(self, x, rng):
        return x + torch.randn_like(x) if len(x) > 1 else x


class Failing(torch.optim.SGD):
    """Fails in its second step if nodes are stacked."""

    elementwise = True

    def fail(self):
        raise LookupError("no stacks\\nplease")

    def step(self, closure=None):
        super().step()
        for tensor in self.param_groups[0]["params"]:
            state = self.state[tensor]
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] == 2 and tensor.ndim == 2:
                self.fail()


class OutOfMemory(Failing):
    def fail(self):
        raise MemoryError("full")


class OutOfTorchMemory(Failing):
    def fail(self):
        torch.empty(2**55)


class Late(torch.optim.SGD):
    """Draws from a global generator in its third step."""

    elementwise = True

    def step(self, closure=None):
        super().step()
        for tensor in self.param_groups[0]["params"]:
            state = self.state[tensor]
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] == 3:
                tensor.data.add_(torch.randn_like(tensor))


class Listing(torch.optim.SGD):
    """Keeps a list in its state, and draws from a global generator in its third step."""

    elementwise = True

    def step(self, closure=None):
        super().step()
        for tensor in self.param_groups[0]["params"]:
            seen = self.state[tensor].setdefault("seen", [])
            seen.append(1)
            if len(seen) == 3:
                tensor.data.add_(torch.randn_like(tensor), alpha=0.01)


class Remembering(torch.optim.SGD):
    """Keeps its gradients in a list, and adds all of them."""

    elementwise = True

    def step(self, closure=None):
        for tensor in self.param_groups[0]["params"]:
            past = self.state[tensor].setdefault("past", [])
            past.append(tensor.grad.clone())
            for gradient in past:
                tensor.data.add_(gradient, alpha=-0.01)


class Langevin(torch.optim.SGD):
    elementwise = True

    def step(self, closure=None):
        super().step()
        for tensor in self.param_groups[0]["params"]:
            tensor.data.add_(torch.randn_like(tensor), alpha=0.01)
'''
WAYS = ("off", "vmap", "pool")


def experiment(folder: Path, **changed: Any) -> Experiment:
    (folder / "mine.py").write_text(PLUGIN)
    settings: dict[str, Any] = {
        "nodes": 4,
        "seed": 1,
        "algorithm": {"name": "dpsgd", "rounds": 2},
        "model": {"name": "mlp", "hidden": (6,)},
        "training": {"batch_size": 4, "local_steps": 2},
        "evaluation": {"every": 0, "average": False, "samples": 20},
        "simulation": {"batching": "off"},
        "base": folder,
    }
    return Experiment(**{**settings, **changed})


def digests(described: Experiment, folder: Path, processes: bool) -> dict[str, str]:
    """The digest of each way to compute the nodes."""
    runs = {way: dataclasses.replace(described, simulation={"batching": way, "workers": 2}) for way in WAYS}  # type: ignore[arg-type]
    if processes:
        runs["processes"] = dataclasses.replace(described, engine="processes")
    return {way: str(each.run(folder).summary["digest"]) for way, each in runs.items()}


# What stacking repeats


@pytest.mark.parametrize("override", ["train", "draw", "learner"])
def test_what_a_subclass_changes_has_its_effect_in_every_way(override: str, tmp_path: Path) -> None:
    changed = experiment(tmp_path, trainer={"name": "mine.py:Backend", "override": override})
    found = digests(changed, tmp_path, processes=override == "train")
    assert len(set(found.values())) == 1, found
    assert experiment(tmp_path).run(tmp_path).summary["digest"] != found["off"]


@pytest.mark.parametrize("draws", ["torch", "numpy", "python", "rarely"])
def test_random_draws_in_a_module_are_the_same_in_every_way(draws: str, tmp_path: Path) -> None:
    described = experiment(tmp_path, model={"name": "mine.py:Model", "draws": draws})
    found = digests(described, tmp_path, processes=draws == "numpy")
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    "drawing",
    [
        {"augmentation": [{"name": "mine.py:Noise"}]},
        {"training": {"batch_size": 4, "optimizer": "mine.py:Langevin"}},
    ],
    ids=["augmentation", "optimizer"],
)
def test_draws_from_global_generators_are_the_same_in_every_way(drawing: Any, tmp_path: Path) -> None:
    found = digests(experiment(tmp_path, **drawing), tmp_path, processes=False)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    "drawing",
    [
        {"augmentation": [{"name": "mine.py:Sometimes"}]},
        {"training": {"batch_size": 4, "local_steps": 2, "optimizer": "mine.py:Late"}},
        {
            "training": {"batch_size": 4, "local_steps": 2, "optimizer": "mine.py:Listing"},
            "algorithm": {"name": "dpsgd", "rounds": 3},
        },
    ],
    ids=["augmentation", "optimizer", "optimizer with a list"],
)
@pytest.mark.filterwarnings("ignore:simulation.batching = 'vmap'")
def test_rare_draws_from_global_generators_are_the_same_in_every_way(drawing: Any, tmp_path: Path) -> None:
    alone, stacked = (
        models_of(experiment(tmp_path, simulation={"batching": way}, **drawing).run(tmp_path))
        for way in ("off", "vmap")
    )
    np.testing.assert_allclose(stacked, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"augmentation": [{"name": "mine.py:Several"}]}, "the code of a plug-in drew from a global generator"),
        (
            {"training": {"batch_size": 4, "local_steps": 2, "optimizer": "mine.py:Failing"}},
            "computing them together raised LookupError: no stacks$",
        ),
    ],
    ids=["draws", "raises"],
)
def test_nodes_that_cannot_be_trained_together_are_reported(changed: Any, reason: str, tmp_path: Path) -> None:
    alone = experiment(tmp_path, **changed).run(tmp_path)
    with pytest.warns(UserWarning, match=f"4 nodes are trained one by one from now on: {reason}") as shown:
        stacked = experiment(tmp_path, simulation={"batching": "vmap"}, **changed).run(tmp_path)
    assert len(shown) == 1
    assert stacked.summary["digest"] == alone.summary["digest"]
    assert stacked.summary["batching"] == "off"


def test_draws_for_every_batch_of_two_samples_are_found_before_the_run(tmp_path: Path) -> None:
    described = experiment(tmp_path, augmentation=[{"name": "mine.py:Two"}], simulation={"batching": "vmap"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert described.run(tmp_path).summary["batching"] == "off"


@pytest.mark.parametrize("optimizer", ["OutOfMemory", "OutOfTorchMemory"])
def test_a_stack_for_which_memory_does_not_suffice_ends_the_run(optimizer: str, tmp_path: Path) -> None:
    training = {"local_steps": 2, "optimizer": f"mine.py:{optimizer}"}
    with pytest.raises(NodeError, match=r"MemoryError: full|can't allocate memory"):
        experiment(tmp_path, simulation={"batching": "vmap"}, training=training).run(tmp_path)


class Counted:
    """An augmentation that counts its calls for batches, and draws from a global generator in them."""

    def __init__(self) -> None:
        self.batches = 0

    def apply(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        self.batches += len(x) > 2
        return x + torch.randn_like(x) if len(x) > 2 else x


def test_nodes_that_could_not_be_trained_together_are_trained_alone_from_then_on() -> None:
    augmentation = Counted()
    learner = Learner(FlatModule(nn.Linear(6, CLASSES)), Training(batch_size=4), DATA, augmentations=[augmentation])
    made = [TorchTrainer(learner, PART, np.random.default_rng(node), 0.0) for node in range(4)]
    start, executor = learner.flat.read(), StackedExecutor()
    with pytest.warns(UserWarning, match="3 nodes are trained one by one"):
        executor.run([Train(trainer, start) for trainer in made[:3]])
    assert augmentation.batches == 2 * 3
    restored = TorchTrainer(learner, PART, np.random.default_rng(9), 0.0)
    restored.restore(made[0].state())
    executor.run([Train(trainer, start) for trainer in [*made, restored]])
    assert augmentation.batches == 2 * 3 + 5
    assert not executor.trained_together


def test_stacked_states_of_optimizers_share_nothing_with_those_of_nodes() -> None:
    states = [{"seen": [1], "marks": {1}, "table": {"past": [torch.full((2,), float(i))]}} for i in range(2)]
    assert len({state_signature(state) for state in states}) == 1
    stacked = stack_states(states)
    nodes = unstack_state(stacked, 2)
    for changed in (stacked, nodes[0]):
        changed["seen"].append(2)
        changed["marks"].add(2)
        changed["table"]["past"].append(torch.zeros(2))
    for number, unchanged in [(0, states[0]), (1, states[1]), (1, nodes[1])]:
        assert unchanged["seen"] == [1]
        assert unchanged["marks"] == {1}
        assert [past.tolist() for past in unchanged["table"]["past"]] == [[number, number]]


def test_lists_of_gradients_in_the_state_of_an_optimizer_belong_to_one_node(tmp_path: Path) -> None:
    """Nodes are trained in changing groups, because their speeds differ."""
    training = {"batch_size": 4, "optimizer": "mine.py:Remembering"}
    asynchronous = {"algorithm": {"name": "gossip", "rounds": 4}, "speed": {"name": "lognormal"}, "nodes": 6}
    alone, stacked = (
        models_of(experiment(tmp_path, simulation={"batching": way}, training=training, **asynchronous).run(tmp_path))
        for way in ("off", "vmap")
    )
    np.testing.assert_allclose(stacked, alone, atol=1e-5)


class Noisy(nn.Module):
    """Draws from all global generators, also in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.fails = nn.Linear(6, CLASSES), False

    def forward(self, x: torch.Tensor) -> Any:
        noise = torch.randn(len(x), CLASSES) + random.random() + np.random.random()
        if self.fails:
            raise ArithmeticError
        return self.out(x) * noise


def test_evaluations_repeat_their_draws_and_leave_the_generators_of_the_caller_alone() -> None:
    module = Noisy()
    learner = Learner(FlatModule(module), Training(), DATA)
    params = learner.flat.read()
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)
    assert learner.evaluate(params) == learner.evaluate(params)
    learner.train(params, {}, PART[None, :4])
    module.fails = True
    for use in (lambda: learner.evaluate(params), lambda: learner.train(params, {}, PART[None, :4])):
        with pytest.raises(ArithmeticError):
            use()
    assert (random.random(), np.random.random()) == expected


def trainers(cls: type[TorchTrainer]) -> list[TorchTrainer]:
    learner = Learner(FlatModule(nn.Linear(6, CLASSES)), Training(), DATA)
    return [cls(learner, PART, np.random.default_rng(node), 0.0) for node in range(2)]


ATTRIBUTES = sorted({*vars(TorchTrainer), *vars(trainers(TorchTrainer)[0])} - METADATA)


def is_batched(cls: type[TorchTrainer]) -> tuple[bool, bool]:
    """Whether two trainers of this class are trained in one call, and evaluated in one call."""
    params = np.zeros(6 * CLASSES + CLASSES, np.float32)
    made = trainers(cls)
    works: list[list[Any]] = [[work(one, params) for one in made] for work in (Train, Evaluate)]
    trained, evaluated = (len({work.batch_key for work in some}) == 1 for some in works)
    return trained, evaluated


@given(st.sampled_from(ATTRIBUTES), st.booleans())
def test_a_class_is_stacked_only_as_far_as_it_overrides_nothing_below(name: str, mixed_in: bool) -> None:
    if name in vars(TorchTrainer):
        override: Any = vars(TorchTrainer)[name]
    else:
        override = property(lambda self: vars(self)[name], lambda self, value: vars(self).update({name: value}))
    bases = (type("Mixin", (), {name: override}), TorchTrainer) if mixed_in else (TorchTrainer,)
    changed = type("Changed", bases, {} if mixed_in else {name: override})
    trained, evaluated = is_batched(changed)
    assert trained == (name in UNRELATED_TO_TRAINING or name == "train_batch")
    assert evaluated == (name in UNRELATED_TO_EVALUATION or name == "evaluate_batch")


def test_a_class_that_defines_nothing_is_stacked_and_a_method_of_an_instance_is_not() -> None:
    assert is_batched(type("Same", (TorchTrainer,), {})) == (True, True)
    params = np.zeros(6 * CLASSES + CLASSES, np.float32)
    one, other = trainers(TorchTrainer)
    assert Train(one, params).batch_key == Train(other, params).batch_key
    one.train = lambda params, steps=None: None  # type: ignore[assignment,method-assign,misc,return-value]
    assert Train(one, params).batch_key != Train(other, params).batch_key


# The summary


def test_the_summary_names_the_method_that_trained_the_nodes(tmp_path: Path) -> None:
    described = experiment(tmp_path, simulation={"batching": "vmap"})
    assert described.run(tmp_path).summary["batching"] == "vmap"
    dropout = dataclasses.replace(described, model={"name": "mine.py:Model", "draws": "torch"})
    overridden = dataclasses.replace(described, trainer={"name": "mine.py:Backend", "override": "train"})
    for trained_alone in (dropout, overridden):
        run = trained_alone.run(tmp_path)
        assert run.summary["batching"] == "off"
        assert run.folder.read_experiment()["simulation"]["batching"] == "vmap", "a replay makes the same choice"


def test_the_summary_and_its_display_name_the_method(shoal: Any, small: Path) -> None:
    shown = shoal("run", small).out
    assert "batching 'off'" in shown


def test_a_loss_with_options_of_its_own_is_that_of_every_model_of_a_stack() -> None:
    """A plug-in of torch's class gets the padding of the data, which the loss must leave out."""
    x, y = np.zeros((4, 3), np.int64), np.array([[1, 2, 0], [3, 0, 0], [1, 1, 1], [0, 2, 3]])
    data = Data(Samples(x, y), Samples(x, y), classes=4, task="sequence", padding=0)
    outputs, targets = torch.randn(2, 4, 3, 4, generator=torch.Generator().manual_seed(0)), torch.from_numpy(y)
    for name in ("torch.nn:CrossEntropyLoss", "cross-entropy", "auto"):
        loss = Loss(name, data)
        alone = torch.stack([loss(output, targets) for output in outputs])
        torch.testing.assert_close(loss.of_stack(outputs, targets.expand(2, -1, -1)), alone)
