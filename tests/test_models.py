"""Networks have the sizes of their papers; the flat vector is the module."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from shoal.models import MODELS, Model
from shoal.models.flat import FlatModule, initial_parameters
from shoal.models.networks import GnLenet, Logistic, Mlp

IMAGE = (3, 8, 8)
CASES: dict[str, Model] = {"mlp": Mlp((20, 10)), "logistic": Logistic(), "gn-lenet": GnLenet()}
every_model = pytest.mark.parametrize("model", CASES.values(), ids=list(CASES))


def batch(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, *IMAGE, generator=torch.Generator().manual_seed(0))


def plain(model: Model, seed: int = 0) -> nn.Module:
    """A module that no flat vector lies under."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.build(IMAGE, 10)


def flattened(module: nn.Module) -> np.ndarray:
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in module.parameters()])


class Tied(nn.Module):
    """An encoder and a decoder that share one weight, with a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.decoder = nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(torch.tanh(self.encoder(x))) * self.scale
        return out


def test_every_name_has_a_case_and_means_its_class():
    assert set(CASES) == set(MODELS)
    for name, target in MODELS.items():
        module, _, attribute = target.partition(":")
        assert getattr(importlib.import_module(module), attribute) is type(CASES[name])


@pytest.mark.parametrize(
    ("model", "shape", "outputs", "parameters"),
    [
        (GnLenet(), (3, 32, 32), 10, 89_834),
        (GnLenet(), (1, 28, 28), 62, 32 * 25 + 32 + 64 + 25_632 + 64 + 51_264 + 128 + 64 * 9 * 62 + 62),
        (Logistic(), (64,), 10, 650),
        (Mlp(), (64,), 10, 64 * 64 + 64 + 64 * 10 + 10),
        (Mlp((8, 4)), (2, 3), 5, 6 * 8 + 8 + 8 * 4 + 4 + 4 * 5 + 5),
        (Mlp(()), (64,), 10, 650),
    ],
    ids=str,
)
def test_parameter_counts(model, shape, outputs, parameters):
    flat = initial_parameters(model, shape, outputs, seed=0)
    assert flat.size == parameters
    assert flat.module(torch.zeros(2, *shape)).shape == (2, outputs)


@pytest.mark.parametrize("shape", [(64,), (32, 32), (3, 7, 32), (3, 32, 7), (1, 3, 32, 32)], ids=str)
def test_gn_lenet_refuses_what_is_no_image_or_too_small(shape):
    with pytest.raises(ValueError, match=r"expected images, \(channels, height, width\)"):
        GnLenet().build(shape, 10)


@every_model
def test_loading_then_forward_is_the_plain_modules_forward(model):
    other = plain(model, seed=7)
    flat = FlatModule(plain(model))
    assert not torch.equal(flat.module(batch()), other(batch()))
    flat.load(flattened(other))
    assert torch.equal(flat.module(batch()), other(batch()))


@every_model
def test_backward_lands_in_the_flat_gradient_and_adds_up(model):
    module = plain(model)
    module(batch()).square().sum().backward()
    gradient = np.concatenate([parameter.grad.numpy().ravel() for parameter in module.parameters()])

    flat = FlatModule(plain(model))
    flat.module(batch()).square().sum().backward()
    np.testing.assert_allclose(flat.gradient.numpy(), gradient, rtol=1e-4, atol=1e-4)
    once = flat.gradient.clone()
    flat.module(batch()).square().sum().backward()
    torch.testing.assert_close(flat.gradient, 2 * once)
    flat.gradient.zero_()
    assert all(not parameter.grad.any() for parameter in flat.module.parameters())


@every_model
def test_a_step_on_the_values_is_a_step_of_the_module(model):
    module = plain(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    flat = FlatModule(plain(model))
    for _ in range(3):
        optimizer.zero_grad()
        module(batch()).logsumexp(dim=1).sum().backward()
        optimizer.step()
        flat.gradient.zero_()
        flat.module(batch()).logsumexp(dim=1).sum().backward()
        flat.values.sub_(flat.gradient, alpha=0.1)
    np.testing.assert_allclose(flat.read(), flattened(module), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat.module(batch()), module(batch()), rtol=1e-4, atol=1e-4)


@every_model
def test_a_torch_optimizer_over_the_one_vector_trains_the_module(model):
    flat = FlatModule(plain(model))
    before = flat.read()
    flat.values.grad = flat.gradient
    flat.module(batch()).logsumexp(dim=1).sum().backward()
    torch.optim.SGD([flat.values], lr=0.1).step()
    np.testing.assert_array_equal(flattened(flat.module), flat.read())
    assert not np.array_equal(flat.read(), before)


@every_model
def test_stacked_rows_under_vmap_are_so_many_models(model):
    flat = initial_parameters(model, IMAGE, 10, seed=0)
    rows = [initial_parameters(model, IMAGE, 10, seed).read() for seed in range(3)]
    matrix = torch.tensor(np.stack(rows))
    views = flat.stacked(matrix)
    assert all(view.untyped_storage().data_ptr() == matrix.data_ptr() for view in views.values())

    inputs = batch(6).view(3, 2, *IMAGE)
    stacked = vmap(lambda params, x: functional_call(flat.module, params, (x,)))(views, inputs)
    for row, x, outputs in zip(rows, inputs, stacked, strict=True):
        flat.load(row)
        torch.testing.assert_close(flat.module(x), outputs, rtol=1e-4, atol=1e-4)


def test_the_layout_tells_where_each_parameter_lies():
    flat = FlatModule(plain(Logistic()))
    assert [(slot.name, slot.offset, slot.shape) for slot in flat.layout] == [
        ("1.weight", 0, (10, 192)),
        ("1.bias", 1920, (10,)),
    ]
    assert flat.values.data_ptr() % 64 == 0
    assert flat.values.is_contiguous()
    assert dict(flat.module.named_parameters())["1.bias"].data_ptr() == flat.values[1920:].data_ptr()


def test_what_is_read_is_a_copy_that_nobody_can_write_to():
    flat = FlatModule(plain(Logistic()))
    params = flat.read()
    assert params.dtype == np.float32
    assert not params.flags.writeable
    flat.values.zero_()
    assert params.any()
    flat.load(params)  # read-only arrays can be loaded
    np.testing.assert_array_equal(flat.read(), params)


def test_tied_parameters_have_one_slot_and_frozen_ones_a_slot_without_gradient():
    flat = FlatModule(Tied())
    assert [(slot.name, slot.trained) for slot in flat.layout] == [("scale", False), ("encoder.weight", True)]
    flat.load(np.arange(37, dtype=np.float32) / 37)
    assert flat.module.decoder.weight is flat.module.encoder.weight
    assert flat.module.scale.item() == 0.0

    flat.load(np.ones(37, dtype=np.float32))
    flat.module(torch.ones(2, 6)).sum().backward()
    assert flat.module.scale.grad is None
    assert flat.gradient[0] == 0
    assert flat.gradient[1:].all()

    outputs = vmap(lambda params: functional_call(flat.module, params, (torch.ones(1, 6),)))(
        flat.stacked(torch.stack([flat.values, 0.5 * flat.values]))
    )
    torch.testing.assert_close(outputs[0], flat.module(torch.ones(1, 6)))


@every_model
def test_the_same_seed_gives_the_same_initial_parameters_and_leaves_torch_alone(model):
    before = torch.get_rng_state()
    first, second, other = (initial_parameters(model, IMAGE, 10, seed).read() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Linear(2, 2).double(), "parameter 'weight' is torch.float64; expected torch.float32"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "buffer '1.running_mean'.*GroupNorm"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), "changes in training"),
        (nn.ReLU(), "no parameters"),
    ],
)
def test_modules_that_one_vector_cannot_carry_are_refused(module, said):
    with pytest.raises(ValueError, match=said):
        FlatModule(module)


def test_batch_norm_without_running_statistics_is_fine():
    assert FlatModule(nn.BatchNorm1d(4, track_running_stats=False)).size == 8


def test_wrong_sizes_are_refused():
    flat = FlatModule(plain(Logistic()))
    with pytest.raises(ValueError, match=r"\(3,\).*\(1930,\)"):
        flat.load(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(models, 1930\)"):
        flat.stacked(torch.zeros(2, 3))
