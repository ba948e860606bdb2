"""Flower's `ClientApp` as a trainer, with the real package: message handlers, client_fn, initial models and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import ExperimentError, NodeError
from shoal.experiment import Experiment
from shoal.experiment.running import Run
from shoal.experiment.setup import Setup

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'shoal[flower]'")

# As in Flower's quickstart: handlers, a torch model, and own data by partition.
HANDLERS = """
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.norm = torch.nn.BatchNorm1d(1, affine=False)  # it has an integer buffer

    def forward(self, x):
        return self.layer(x)


def load_data(context):
    rng = np.random.default_rng(context.node_config["partition-id"])
    x = rng.standard_normal((20 + context.node_config["partition-id"], 3)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(x @ np.array([[1.0], [-2.0], [3.0]], np.float32))


app = ClientApp()


@app.train()
def train(message: Message, context: Context):
    model, (x, y) = Net(), load_data(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    state = context.state.setdefault("calls", ConfigRecord({"count": 0}))
    state["count"] += 1
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(x), "calls": state["count"]})
    content = RecordDict({"model": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context):
    model, (x, y) = Net(), load_data(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = torch.nn.functional.mse_loss(model(x), y).item()
    metrics = {"eval_loss": loss, "eval_acc": float(loss < 1), "num-examples": 9}
    if "calls" in context.state:
        metrics["calls"] = context.state["calls"]["count"]
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def state_dict():
    return Net().state_dict()


def record():
    return ArrayRecord(Net().state_dict())


def number():
    return 3


server = ServerApp()
renames, counts_nothing, fails, unfinished = ClientApp(), ClientApp(), ClientApp(), ClientApp()


@renames.train()
def train_renames(message, context):
    content = RecordDict({"arrays": ArrayRecord([np.zeros(3)]), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)


@counts_nothing.train()
def train_counts_nothing(message, context):
    return Message(content=RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


@fails.train()
def train_fails(message, context):
    return Message(Error(1, "out of memory"), reply_to=message)
"""

CLIENTS = """
import numpy as np
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Client(NumPyClient):
    def __init__(self, id):
        self.x = np.random.default_rng(id).standard_normal((10 + id, 3))

    def get_parameters(self, config):
        return [np.zeros(3), np.array(5)]

    def fit(self, parameters, config):
        weights, count = parameters
        residual = self.x @ (weights - [1.0, -2.0, 3.0])
        weights = weights - config["lr"] * self.x.T @ residual / len(self.x)
        return [weights, count + 1], len(self.x), {"loss": float((residual**2).mean())}

    def evaluate(self, parameters, config):
        residual = self.x @ (parameters[0] - [1.0, -2.0, 3.0])
        return float((residual**2).mean()), len(self.x), {"mae": float(abs(residual).mean())}


class WithoutParameters(Client):
    def get_parameters(self, config):
        return super(Client, self).get_parameters(config)


def client_fn(context: Context):
    return Client(context.node_config["partition-id"]).to_client()


def start():
    return [np.zeros(3), np.array(5)]


def counted(message, context, call_next):
    reply = call_next(message, context)
    if message.metadata.message_type == "train":
        reply.content.metric_records["fitres.num_examples"]["num_examples"] = 77
    return reply


app = ClientApp(client_fn=client_fn)
modded = ClientApp(client_fn=client_fn, mods=[counted])
without = ClientApp(client_fn=lambda context: WithoutParameters(context.node_config["partition-id"]).to_client())
instance = Client(0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "handlers.py").write_text(HANDLERS)
    (tmp_path / "clients.py").write_text(CLIENTS)
    return tmp_path


def flower(base: Path, client: str, initial: str | None = None, **changed: Any) -> Experiment:
    trainer = {"name": "flower", "client": client, "config": {"lr": 0.1}}
    settings: dict[str, Any] = {
        "nodes": 4,
        "seed": 3,
        "algorithm": {"name": "dpsgd", "rounds": 3},
        "simulation": {"batching": "off"},
        "trainer": trainer if initial is None else {**trainer, "initial": initial},
    }
    return Experiment(**{**settings, **changed}, base=base)


def run(folder: Path, client: str, initial: str | None = None, **changed: Any) -> Run:
    ended = flower(folder, client, initial, **changed).run(folder)
    assert ended.status == "completed"
    return ended


def test_an_app_with_handlers_learns_on_both_engines(folder: Path) -> None:
    rounds = {"name": "dpsgd", "rounds": 8}
    simulated, real = (
        run(folder, "handlers.py:app", "handlers.py:Net", engine=engine, algorithm=rounds)
        for engine in ("simulation", "processes")
    )
    for key in ("digest", "metrics"):
        assert simulated.summary[key] == real.summary[key], key
    assert simulated.summary["loss"]["mean"] < 5  # at the start: about 14
    assert simulated.summary["accuracy"] is not None, "eval_acc"
    assert simulated.summary["metrics"]["calls"]["min"] == 8, "the context keeps its state from round to round"


def test_the_arrays_of_an_app_keep_their_names_and_types(folder: Path) -> None:
    setup = Setup(flower(folder, "handlers.py:app", "handlers.py:Net"))
    assert setup.trainer_factory.shapes == ((1, 3), (1,), (1,), (1,), ())
    trainer = setup.trainer_factory.trainer(1, setup.experiment.training, 0.5)
    trained = trainer.train(setup.initial, 2)
    assert trainer.samples == 21
    assert trained.loss > 0
    assert trainer.evaluate(trained.params)["loss"] < 20


@pytest.mark.parametrize("initial", ["Net", "state_dict", "record"])
def test_an_initial_model_is_a_module_a_state_dict_or_a_record(initial: str, folder: Path) -> None:
    setups = [Setup(flower(folder, "handlers.py:app", f"handlers.py:{name}")) for name in (initial, "Net")]
    assert np.array_equal(setups[0].initial, setups[1].initial), "seeded"
    assert setups[0].initial.any()


def test_an_app_with_a_client_fn_equals_the_client_fn(folder: Path) -> None:
    fedavg = {"name": "fedavg", "rounds": 3}
    app, client_fn = (run(folder, f"clients.py:{name}", algorithm=fedavg) for name in ("app", "client_fn"))
    real = run(folder, "clients.py:app", algorithm=fedavg, engine="processes")
    assert app.summary["digest"] == client_fn.summary["digest"] == real.summary["digest"]
    assert app.summary["metrics"] == client_fn.summary["metrics"]


def test_mods_of_an_app_are_applied(folder: Path) -> None:
    setup = Setup(flower(folder, "clients.py:modded"))
    assert setup.trainer_factory.trainer(0, setup.experiment.training, 0.0).samples == 77


def test_clients_without_parameters_start_from_the_initial_model(folder: Path) -> None:
    assert Setup(flower(folder, "clients.py:without", "clients.py:start")).initial.tolist() == [0, 0, 0, 5]
    with pytest.raises(
        ExperimentError, match=r"get_parameters returns no arrays; .* or from those of trainer\.initial"
    ):
        Setup(flower(folder, "clients.py:without"))


@pytest.mark.parametrize(
    ("client", "initial", "expected_error"),
    [
        ("handlers.py:app", None, "does not know the initial model; set trainer.initial to file.py:name"),
        ("handlers.py:app", "handlers.py:number", "trainer.initial: TypeError: it is int; expected a torch module"),
        ("handlers.py:app", "handlers.py:Nt", "trainer.initial: "),
        ("handlers.py:app", "handlers.py", "initial = "),
        ("handlers.py:server", None, "it is an instance of ServerApp; expected a ClientApp, a class of NumPyClient"),
        (
            "handlers.py:train",
            None,
            "problem\n  - trainer.client = 'train': it is a handler of messages; name the ClientApp",
        ),
        ("handlers.py:ap", None, "has no 'ap'; did you mean 'app'?"),
        ("clients.py:instance", None, "it is an instance of Client; expected a ClientApp, a class of NumPyClient"),
    ],
)
def test_what_is_no_client_is_rejected(client: str, initial: str | None, expected_error: str, folder: Path) -> None:
    with pytest.raises(ExperimentError, match=re.escape(expected_error)):
        Setup(flower(folder, client, initial))


@pytest.mark.parametrize(
    ("app", "error"),
    [
        (
            "renames",
            r"client 1: the reply .* to 'train' has arrays \['0'\]; expected those of the model, \['layer.bias'",
        ),
        ("counts_nothing", r"client 1: the reply .* has 0 MetricRecords; expected one, with 'num-examples'"),
        ("fails", r"client 1: the ClientApp replied to 'train': out of memory"),
    ],
)
def test_replies_that_cannot_be_used_are_errors(app: str, error: str, folder: Path) -> None:
    setup = Setup(flower(folder, f"handlers.py:{app}", "handlers.py:Net"))
    with pytest.raises(NodeError, match=error):
        setup.trainer_factory.trainer(1, setup.experiment.training, 0.0).train(setup.initial)


def test_an_app_without_a_handler_fails_with_the_message_of_flower(folder: Path) -> None:
    setup = Setup(flower(folder, "handlers.py:unfinished", "handlers.py:Net"))
    with pytest.raises(ValueError, match="No train function registered"):
        setup.trainer_factory.trainer(1, setup.experiment.training, 0.0).train(setup.initial)


def test_a_run_keeps_a_copy_of_its_client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = run(folder, "clients.py:app", "clients.py:start", name="first")
    text = (folder / "clients.py").read_text()
    (folder / "clients.py").write_text(text.replace("[1.0, -2.0, 3.0]", "[9.0, 9.0, 9.0]"))
    edited = run(folder, "clients.py:app", "clients.py:start", engine="processes")
    assert edited.summary["digest"] != first.summary["digest"]
    moved = first.folder.path.rename(tmp_path_factory.mktemp("elsewhere") / "run")
    again = Experiment.from_file(moved / "experiment.toml").run(folder)
    assert again.summary["digest"] == first.summary["digest"]
