"""The memory format of images in training and evaluation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from shoal import Experiment
from shoal.models.basic import GnLenet, Mlp
from shoal.models.images import LeafCnn, Lenet
from shoal.models.resnets import Resnet8
from shoal.training.memory_format import channels_last, prefers_channels_last

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def loss(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


class Viewing(nn.Module):
    """A network that flattens with `view`, which needs the channels of an image one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.pooling = nn.MaxPool2d(2)
        self.linear = nn.Linear(4 * 15 * 15, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pooling(self.convolution(x))
        return self.linear(x.view(len(x), -1))


class FlattenGradient(torch.autograd.Function):
    """The identity, whose backward pass flattens the gradient with `view`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0]
        return gradient.view(len(gradient), -1).view(gradient.shape)


class ViewingBackward(nn.Module):
    """A network that computes outputs of such images, and no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.normalisation = nn.BatchNorm2d(4)
        self.pooling = nn.MaxPool2d(2)
        self.linear = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = FlattenGradient.apply(self.normalisation(self.convolution(x)))  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.linear(self.pooling(x).mean((2, 3)))
        return out


class Recording(nn.Module):
    """A network that keeps its mode and the strides of its inputs."""

    seen: ClassVar[list[tuple[bool, tuple[int, ...]]]] = []

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(outputs)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Recording.seen.append((self.training, x.stride()[1:]))
        output: torch.Tensor = self.layers(x)
        return output


@dataclass(frozen=True)
class RecordingModel:
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        network = Recording(shape[0], outputs)
        network(torch.zeros(1, *shape))  # so that the lazy layer has its shape
        Recording.seen.clear()
        return network


@pytest.mark.parametrize(
    ("model", "expected"), [(GnLenet(), True), (Lenet(), True), (LeafCnn(), True), (Resnet8(), False), (Mlp(), False)]
)
def test_convolutions_with_max_pooling_take_channels_last(model: GnLenet, expected: bool) -> None:
    assert prefers_channels_last(model.build((3, 32, 32), 10), IMAGES, loss) is expected


def test_a_network_that_cannot_take_channels_last_gets_its_inputs_as_they_are() -> None:
    assert not prefers_channels_last(Viewing(), IMAGES, loss)


def test_a_network_that_cannot_compute_gradients_of_channels_last_gets_its_inputs_as_they_are() -> None:
    network = ViewingBackward()
    loss(network(channels_last(IMAGES)))
    assert not prefers_channels_last(network, IMAGES, loss)


def test_a_network_that_cannot_compute_gradients_of_channels_last_is_trained(tmp_path: Path) -> None:
    experiment = Experiment(
        nodes=2,
        dataset={"name": "synthetic", "shape": [3, 8, 8], "samples": 40, "test_samples": 20},
        model=ViewingBackward(),
        topology="ring",
        algorithm={"name": "dpsgd", "rounds": 1},
        simulation={"batching": "off"},
    )
    assert experiment.run(tmp_path).summary["status"] == "completed"


def test_other_inputs_than_images_and_other_devices_are_left_alone() -> None:
    network = GnLenet().build((3, 32, 32), 10)
    assert not prefers_channels_last(network, IMAGES.flatten(1), loss)
    assert not prefers_channels_last(network.to("meta"), IMAGES.to("meta"), loss)


@pytest.mark.parametrize("channels", [1, 3])
def test_values_stay_and_channels_become_adjacent(channels: int) -> None:
    images = IMAGES[:, :channels]
    arranged = channels_last(images)
    assert torch.equal(arranged, images)
    assert arranged.stride() == (channels * 32 * 32, 1, channels * 32, channels)


def test_the_trial_changes_no_buffer_no_gradient_and_no_mode() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    gradients = [torch.full_like(parameter, 2.0) for parameter in network.parameters()]
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        parameter.grad = gradient
    assert prefers_channels_last(network, IMAGES, loss)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(layer.training for layer in network.modules())
    assert all(parameter.grad is gradient for parameter, gradient in zip(network.parameters(), gradients, strict=True))
    assert all(bool((gradient == 2.0).all()) for gradient in gradients)


@pytest.mark.parametrize("mode", [True, False])
def test_a_network_that_needs_the_default_format_in_one_mode_gets_it_in_both(mode: bool) -> None:
    class Partly(Viewing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.pooling(self.convolution(x))
            return self.linear(x.view(len(x), -1) if self.training is mode else x.flatten(1))

    assert not prefers_channels_last(Partly(), IMAGES, loss)


def test_a_step_in_both_formats_gives_the_same_model_within_rounding() -> None:
    network = GnLenet().build((3, 32, 32), 10)
    gradients = []
    for inputs in (IMAGES, channels_last(IMAGES)):
        network.zero_grad()
        nn.functional.cross_entropy(network(inputs), torch.tensor([1, 7])).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]).numpy())
    scale = float(np.abs(gradients[0]).max())
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-5 * scale, rtol=0)


def test_training_and_evaluation_use_the_format(tmp_path: Path) -> None:
    experiment = Experiment(
        nodes=2,
        dataset={"name": "digits", "images": True},
        model=RecordingModel(),
        topology="ring",
        algorithm={"name": "dpsgd", "rounds": 1},
        simulation={"batching": "off"},
        training={"local_steps": 1},
    )
    experiment.run(tmp_path)
    computed = set(Recording.seen[3:])  # after the trials of the model and of the format
    assert computed == {(True, (1, 8, 1)), (False, (1, 8, 1))}


def test_all_engines_give_one_digest_for_a_network_with_channels_last(tmp_path: Path) -> None:
    shape = (3, 16, 16)
    assert prefers_channels_last(GnLenet().build(shape, 4), torch.randn(2, *shape), loss)
    experiment = Experiment(
        nodes=3,
        dataset={"name": "synthetic", "shape": list(shape), "classes": 4, "samples": 60, "test_samples": 20},
        model="gn-lenet",
        topology="ring",
        algorithm={"name": "dpsgd", "rounds": 2},
        training={"batch_size": 4, "local_steps": 2},
        simulation={"batching": "off"},
    )
    runs = {
        "off": experiment,
        "pool": dataclasses.replace(experiment, simulation={"batching": "pool", "workers": 2}),  # type: ignore[arg-type]
        "processes": dataclasses.replace(experiment, engine="processes"),
    }
    digests = {name: run.run(tmp_path).summary["digest"] for name, run in runs.items()}
    assert len(set(digests.values())) == 1, digests
