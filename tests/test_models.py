"""Models: parameter counts of the papers, and the view of a module as one flat vector."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from shoal.data.dataset import Data, Samples, Task
from shoal.models import MODELS, Model
from shoal.models.basic import GnLenet, Logistic, Mlp
from shoal.models.factorization import MatrixFactorization
from shoal.models.flat import FlatModule, initial_module, module_for
from shoal.models.huggingface import HuggingFace
from shoal.models.images import LeafCnn, Lenet
from shoal.models.model import DataDependentModel
from shoal.models.resnets import Resnet8, Resnet18
from shoal.models.sequences import Lstm, Transformer


def images(*shape: int, classes: int = 10, rows: int = 8) -> Data:
    rng = np.random.default_rng(0)
    some = Samples(rng.standard_normal((rows, *shape), np.float32), rng.integers(0, classes, rows))
    return Data(some, some, classes)


def texts(length: int, tokens: int, task: Task = "classification", classes: int = 0, kind: Any = np.uint8) -> Data:
    rng = np.random.default_rng(0)
    x = rng.integers(0, min(tokens, 200), (8, length)).astype(kind)
    y = rng.integers(0, classes or tokens, (8, length) if task == "sequence" else 8)
    return Data(Samples(x, y), Samples(x, y), classes or tokens, task, sizes=(tokens,))


def ratings(users: int, items: int) -> Data:
    rng = np.random.default_rng(0)
    x = np.stack([rng.integers(0, users, 8), rng.integers(0, items, 8)], axis=1).astype(np.int32)
    some = Samples(x, rng.random(8, np.float32))
    return Data(some, some, classes=1, task="regression", sizes=(users, items))


class Case(NamedTuple):
    """A model and matching data."""

    model: Model | DataDependentModel
    data: Data

    def initial(self, seed: int) -> FlatModule:
        return initial_module(lambda: module_for(self.model, self.data), seed)

    def plain(self, seed: int = 0) -> nn.Module:
        """Return a module without a flat vector."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return module_for(self.model, self.data)

    def batch(self, rows: int = 5) -> torch.Tensor:
        return torch.tensor(self.data.train.x[:rows])


IMAGES = images(3, 16, 16)
CASES = {
    "mlp": Case(Mlp((20, 10)), IMAGES),
    "logistic": Case(Logistic(), IMAGES),
    "gn-lenet": Case(GnLenet(), IMAGES),
    "lenet": Case(Lenet(), IMAGES),
    "leaf-cnn": Case(LeafCnn(), IMAGES),
    "lstm": Case(Lstm(4, 10, dense=6), texts(7, 20)),
    "matrix-factorization": Case(MatrixFactorization(4), ratings(5, 9)),
    "resnet8": Case(Resnet8(), IMAGES),
    "resnet18": Case(Resnet18(), images(3, 8, 8)),
    "transformer": Case(Transformer(8, heads=2), texts(7, 20, "sequence")),
}
every_model = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
every_stackable_model = pytest.mark.parametrize(
    "case", [case for name, case in CASES.items() if name != "lstm"], ids=[name for name in CASES if name != "lstm"]
)
IMAGE = (3, 8, 8)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # like in a run


def plain(model: Model) -> nn.Module:
    return model.build(IMAGE, 10)


def score(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.logsumexp(dim=-1).sum()


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


def test_every_registered_name_has_a_case_and_maps_to_its_class():
    assert {*CASES, "huggingface"} == set(MODELS)
    for name, case in CASES.items():
        module, _, attribute = MODELS[name].partition(":")
        assert getattr(importlib.import_module(module), attribute) is type(case.model)


CIFAR, FEMNIST, CELEBA = images(3, 32, 32), images(1, 28, 28, classes=62), images(3, 84, 84, classes=2)
SHAKESPEARE, REDDIT = texts(80, 80), texts(10, 9999, kind=np.int16)


@pytest.mark.parametrize(
    ("model", "data", "parameters"),
    [
        (GnLenet(), CIFAR, 89_834),
        (GnLenet(), FEMNIST, 32 * 25 + 32 + 64 + 25_632 + 64 + 51_264 + 128 + 64 * 9 * 62 + 62),
        (Logistic(), images(64), 650),
        (Logistic(), FEMNIST, 48_670),
        (Mlp(), images(64), 64 * 64 + 64 + 64 * 10 + 10),
        (Mlp((8, 4)), images(2, 3, classes=5), 6 * 8 + 8 + 8 * 4 + 4 + 4 * 5 + 5),
        (Mlp(()), images(64), 650),
        (Lenet(), CIFAR, 62_006),
        (Lenet(), images(1, 28, 28), 61_706),
        (LeafCnn(), FEMNIST, 1_690_046),
        (LeafCnn(hidden=2048), FEMNIST, 6_603_710),
        (LeafCnn(), CELEBA, 30_242),
        (LeafCnn(batch_norm=True), CELEBA, 30_498 + 256),
        (LeafCnn("femnist"), CIFAR, 32 * 75 + 32 + 51_264 + 64 * 64 * 512 + 512 + 5_130),
        (Lstm(), SHAKESPEARE, 819_920),
        (Lstm(read="all"), texts(80, 92), 2_683_708),
        (Lstm(embedding=200, dense=128), REDDIT, 4_317_895),
        (Lstm(100, 100, dense=128), texts(25, 1000, classes=2, kind=np.int32), 100_000 + 161_600 + 12_928 + 258),
        (MatrixFactorization(), ratings(610, 9724), 206_680),
        (Resnet8(), CIFAR, 78_042),
        (Resnet18(), CIFAR, 11_173_962),
        (Transformer(), texts(80, 80, "sequence"), 115_456),
    ],
    ids=str,
)
def test_parameter_counts(model, data, parameters):
    flat = Case(model, data).initial(seed=0)
    assert flat.size == parameters
    outputs = flat.module(torch.tensor(data.train.x[:2]))
    assert outputs.shape == ((2,) if data.task == "regression" else (2, *data.train.y.shape[1:], data.classes))


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("model", [Lstm(4, 5), Transformer(8, heads=2)], ids=["lstm", "transformer"])
def test_text_models_accept_every_integer_dtype_and_both_kinds_of_targets(model, kind):
    for data, shape in [
        (texts(6, 30, "sequence", kind=kind), (8, 6, 30)),
        (texts(6, 30, classes=3, kind=kind), (8, 3)),
        (texts(6, 300, "sequence", kind=kind), (8, 6, 300)),
    ]:
        assert module_for(model, data)(torch.tensor(data.train.x)).shape == shape


@pytest.mark.parametrize("model", [Lstm(4, 5), Transformer(8, heads=2)], ids=["lstm", "transformer"])
def test_the_prediction_of_a_token_depends_only_on_earlier_tokens(model):
    module = module_for(model, texts(6, 30, "sequence"))
    some = torch.randint(30, (1, 6))
    other = some.clone()
    other[0, 4:] = (some[0, 4:] + 1) % 30
    assert torch.equal(module(some)[:, :4], module(other)[:, :4])
    assert not torch.equal(module(some)[:, 4:], module(other)[:, 4:])


def test_a_rating_is_the_dot_product_of_two_vectors_with_small_initial_values():
    module = module_for(MatrixFactorization(), ratings(5, 9))
    users, items = (table.detach() for table in module.parameters())
    assert users.shape == (5, 20)
    assert items.shape == (9, 20)
    assert max(users.abs().max(), items.abs().max()) <= 0.05
    assert min(users.std(), items.std()) > 0.02
    torch.testing.assert_close(module(torch.tensor([[3, 7]], dtype=torch.int32)), (users[3] @ items[7])[None])


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (Lenet(), images(3, 11, 32), "expected images, .* of at least 12×12 pixels"),
        (LeafCnn(), images(3, 12, 12), "expected images, .* of at least 16×16 pixels"),
        (LeafCnn(), images(64), r"inputs have shape \(64,\)"),
        (Resnet8(), images(8, 8), "expected images"),
        (Resnet8(groups=3), IMAGES, "groups = 3: expected a divisor of 16"),
        (Lstm(), IMAGES, "expected texts"),
        (Transformer(), ratings(3, 4), "expected texts"),
        (Lstm(read="all"), texts(4, 5, "sequence"), "read = 'all'"),
        (MatrixFactorization(), texts(2, 5), "expected pairs of a user and an item"),
    ],
    ids=str,
)
def test_unsuitable_data_is_rejected(model, data, message):
    with pytest.raises(ValueError, match=message):
        module_for(model, data)


def test_width_must_be_a_multiple_of_heads():
    with pytest.raises(ValueError, match="width = 10: expected a multiple of heads = 4"):
        Transformer(width=10)


@pytest.mark.parametrize("shape", [(64,), (32, 32), (3, 7, 32), (3, 32, 7), (1, 3, 32, 32)], ids=str)
def test_gn_lenet_rejects_inputs_that_are_not_images_or_are_too_small(shape):
    with pytest.raises(ValueError, match=r"expected images, \(channels, height, width\)"):
        GnLenet().build(shape, 10)


@every_model
def test_forward_after_loading_equals_forward_of_the_plain_module(case):
    other = case.plain(seed=7)
    flat = FlatModule(case.plain())
    assert not torch.equal(flat.module(case.batch()), other(case.batch()))
    flat.load(flattened(other))
    assert torch.equal(flat.module(case.batch()), other(case.batch()))


@every_model
def test_backward_accumulates_in_the_flat_gradient(case):
    module = case.plain()
    score(module(case.batch())).backward()
    gradient = np.concatenate([parameter.grad.numpy().ravel() for parameter in module.parameters()])

    flat = FlatModule(case.plain())
    score(flat.module(case.batch())).backward()
    np.testing.assert_allclose(flat.gradient.numpy(), gradient, rtol=1e-4, atol=1e-4)
    once = flat.gradient.clone()
    score(flat.module(case.batch())).backward()
    torch.testing.assert_close(flat.gradient, 2 * once)
    flat.gradient.zero_()
    assert all(not parameter.grad.any() for parameter in flat.module.parameters())


@every_model
def test_a_step_on_the_flat_values_equals_an_sgd_step_of_the_module(case):
    module = case.plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    flat = FlatModule(case.plain())
    for _ in range(3):
        optimizer.zero_grad()
        score(module(case.batch())).backward()
        optimizer.step()
        flat.gradient.zero_()
        score(flat.module(case.batch())).backward()
        flat.values.sub_(flat.gradient, alpha=0.1)
    np.testing.assert_allclose(flat.read(), flattened(module), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat.module(case.batch()), module(case.batch()), rtol=1e-4, atol=1e-4)


@every_model
def test_a_torch_optimizer_on_the_flat_vector_trains_the_module(case):
    flat = FlatModule(case.plain())
    before = flat.read()
    flat.values.grad = flat.gradient
    score(flat.module(case.batch())).backward()
    torch.optim.SGD([flat.values], lr=0.1).step()
    np.testing.assert_array_equal(flattened(flat.module), flat.read())
    assert not np.array_equal(flat.read(), before)


@every_stackable_model
def test_stacked_rows_under_vmap_equal_separate_models(case):
    flat = case.initial(seed=0)
    rows = [case.initial(seed).read() for seed in range(3)]
    matrix = torch.tensor(np.stack(rows))
    views = flat.stacked(matrix)
    assert all(view.untyped_storage().data_ptr() == matrix.data_ptr() for view in views.values())

    inputs = case.batch(6).view(3, 2, *case.data.shape)
    stacked = vmap(lambda params, x: functional_call(flat.module, params, (x,)))(views, inputs)
    for row, x, outputs in zip(rows, inputs, stacked, strict=True):
        flat.load(row)
        torch.testing.assert_close(flat.module(x), outputs, rtol=1e-4, atol=1e-4)


def test_the_layout_gives_the_position_of_each_parameter():
    flat = FlatModule(plain(Logistic()))
    assert [(slot.name, slot.offset, slot.shape) for slot in flat.layout] == [
        ("1.weight", 0, (10, 192)),
        ("1.bias", 1920, (10,)),
    ]
    assert flat.values.data_ptr() % 64 == 0
    assert flat.values.is_contiguous()
    assert dict(flat.module.named_parameters())["1.bias"].data_ptr() == flat.values[1920:].data_ptr()


def test_read_returns_a_read_only_copy():
    flat = FlatModule(plain(Logistic()))
    params = flat.read()
    assert params.dtype == np.float32
    assert not params.flags.writeable
    flat.values.zero_()
    assert params.any()
    flat.load(params)  # read-only arrays can be loaded
    np.testing.assert_array_equal(flat.read(), params)


def test_tied_parameters_have_one_slot_and_frozen_parameters_have_no_gradient():
    flat = FlatModule(Tied())
    assert [(slot.name, slot.trained) for slot in flat.layout] == [("encoder.weight", True), ("scale", False)]
    assert flat.trained_size == 36
    flat.load(np.arange(37, dtype=np.float32) / 37)
    assert flat.module.decoder.weight is flat.module.encoder.weight
    assert flat.module.scale.item() == np.float32(36 / 37)

    flat.load(np.ones(37, dtype=np.float32))
    flat.module(torch.ones(2, 6)).sum().backward()
    assert flat.module.scale.grad is None
    assert flat.gradient[36] == 0
    assert flat.gradient[:36].all()

    outputs = vmap(lambda params: functional_call(flat.module, params, (torch.ones(1, 6),)))(
        flat.stacked(torch.stack([flat.values, 0.5 * flat.values]))
    )
    torch.testing.assert_close(outputs[0], flat.module(torch.ones(1, 6)))


@every_model
def test_equal_seeds_give_equal_initial_parameters_and_keep_the_generator_state(case):
    before = torch.get_rng_state()
    first, second, other = (case.initial(seed).read() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 2).double(), "parameter 'weight' is torch.float64; expected torch.float32"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), "changes in training.*training.buffers = 'local'"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False).double()), "buffer '1.running_mean' is"),
        (nn.ReLU(), "no parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameter is trained"),
    ],
)
def test_modules_that_cannot_be_flattened_are_rejected(module, message):
    with pytest.raises(ValueError, match=message):
        FlatModule(module)


def test_batch_norm_without_running_statistics_is_accepted():
    assert FlatModule(nn.BatchNorm1d(4, track_running_stats=False)).size == 8


def test_wrong_sizes_are_rejected():
    flat = FlatModule(plain(Logistic()))
    with pytest.raises(ValueError, match=r"\(3,\).*\(1930,\)"):
        flat.load(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(models, 1930\)"):
        flat.stacked(torch.zeros(2, 3))


# Hugging Face

TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def save_config(config: Any, path: Any) -> str:
    config.save_pretrained(path)
    return str(path)


def test_hugging_face_models_are_built_from_the_configuration_in_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    gpt = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 16}
    folder = save_config(transformers.GPT2Config(**gpt, pad_token_id=0), tmp_path / "gpt2")
    sequences, classes = texts(6, 30, "sequence"), texts(6, 30, classes=3)
    for data in (sequences, classes):
        case = Case(HuggingFace(folder, pretrained=False), data)
        flat = case.initial(seed=1)
        assert flat.module.training
        assert np.array_equal(flat.read(), case.initial(seed=1).read())
        assert flat.module(case.batch()).shape == (5, *data.train.y.shape[1:], data.classes)
        score(flat.module(case.batch())).backward()
        assert flat.gradient.any()
    deeper = module_for(HuggingFace(folder, pretrained=False, options={"n_layer": 2}), sequences)
    assert sum(p.numel() for p in deeper.parameters()) > flat.size
    with pytest.raises(ValueError, match="the model has a vocabulary of 30 tokens; the data has 31"):
        module_for(HuggingFace(folder, pretrained=False), texts(6, 31, classes=2))
    with pytest.raises(ValueError, match="the model predicts 30 tokens; the targets have 20"):
        module_for(HuggingFace(folder, pretrained=False), texts(6, 20, "sequence"))


def test_pretrained_hugging_face_models_start_with_the_saved_values(tmp_path):
    transformers = pytest.importorskip("transformers")
    trained = transformers.ViTModel(transformers.ViTConfig(**TINY, image_size=16, patch_size=8))
    trained.save_pretrained(tmp_path)
    module = module_for(HuggingFace(str(tmp_path)), IMAGES)
    found = module.model.vit.embeddings.position_embeddings
    assert torch.equal(found, trained.embeddings.position_embeddings)


def test_hugging_face_models_ignore_padding(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**TINY, vocab_size=30, max_position_embeddings=16)
    module = module_for(HuggingFace(save_config(config, tmp_path), pretrained=False), texts(6, 30, classes=4))
    padded = torch.tensor([[3, 4, 5, 0, 0, 0], [3, 4, 5, 0, 7, 7]])
    module.eval()
    torch.testing.assert_close(module(padded)[:1], module(padded[:1, :3]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", ["classification", "sequence"])
def test_pretrained_models_reject_texts(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    with pytest.raises(
        ValueError, match=r"pretrained = true: .* not use the token ids of the tokenizer .* pretrained = false"
    ):
        module_for(HuggingFace("gpt2"), texts(6, 30, task))


def test_hugging_face_models_classify_images(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**TINY, image_size=16, patch_size=8)
    case = Case(HuggingFace(save_config(config, tmp_path), pretrained=False), IMAGES)
    assert case.initial(seed=0).module(case.batch()).shape == (5, 10)


def test_hugging_face_errors_name_unsuitable_data_and_missing_models(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"expected texts of tokens, .*, or images"):
        module_for(HuggingFace("none"), ratings(3, 4))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="cannot load"):
        module_for(HuggingFace(str(tmp_path / "missing"), pretrained=False), texts(6, 30))


def test_without_transformers_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'shoal\[transformers\]'"):
        module_for(HuggingFace("gpt2"), texts(6, 30))
