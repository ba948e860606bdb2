"""A Flower `ClientApp` with the interface of a `NumPyClient`: each call is a message to the app.

An app has message handlers (`@app.train()`, `@app.evaluate()`), or is made of a client_fn: `ClientApp(client_fn=…)`.
Messages are those of Flower's strategies. Flower is imported when an app is used.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import NodeError

ARRAYS, CONFIG, EXAMPLES = "arrays", "config", "num-examples"
"""The names of records and metrics in the messages of Flower's strategies."""
SCORES = {"eval_loss": "loss", "eval_acc": "accuracy", "eval_accuracy": "accuracy"}
"""Usual names of metrics that an app returns, and the names of the same scores in Shoal."""


def is_client_app(found: object) -> bool:
    return type(found).__name__ == "ClientApp" and is_of_flower(found)


def is_of_flower(found: object) -> bool:
    """Whether this is an instance of a class of Flower."""
    return type(found).__module__.partition(".")[0] == "flwr"


def named_arrays(source: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays of a model by name.

    `source` is a torch module, a state_dict, a list of arrays or an ArrayRecord; or a class or function that returns
    one of these. Raises TypeError for anything else.
    """
    if isinstance(source, type) or inspect.isroutine(source):
        source = source()
    if hasattr(source, "state_dict"):
        source = source.state_dict()
    if isinstance(source, Mapping):
        return {str(name): _array(value) for name, value in source.items()}
    if isinstance(source, list | tuple):
        return {str(i): np.asarray(value) for i, value in enumerate(source)}
    raise TypeError(
        f"it is {type(source).__name__}; expected a torch module, a state_dict, a list of arrays or an ArrayRecord, or "
        "a class or a function that returns one of these"
    )


def _array(value: Any) -> NDArray[Any]:
    """Convert a tensor of torch or an `Array` of Flower."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    array: NDArray[Any] = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    return array


class AppClients:
    """Creates the clients of a `ClientApp`. A client keeps its context, in which an app may keep data."""

    __name__ = "ClientApp"

    def __init__(self, app: Any, names: list[str] | None) -> None:
        """`names` are the names of the model's arrays; None: they come from the app's own clients."""
        self._app, self._names = app, names

    def __call__(self, context: Any) -> AppClient | ClientFnClient:
        if has_client_fn(self._app):
            return ClientFnClient(self._app, context)
        assert self._names is not None
        return AppClient(self._app, context, self._names)


def has_client_fn(app: Any) -> bool:
    """Whether the app is made of a client_fn. Flower has no public way to ask."""
    return getattr(app, "_call", None) is not None


class AppClient:
    """A client of an app with message handlers. Its messages have the records `arrays` and `config`."""

    def __init__(self, app: Any, context: Any, names: list[str]) -> None:
        self._app, self._context, self._names = app, context, names

    def fit(self, arrays: list[NDArray[Any]], config: dict[str, Any]) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        content = self._ask("train", arrays, config)
        if len(content.array_records) != 1:
            raise self._error("train", f"{len(content.array_records)} ArrayRecords; expected one, with the new model")
        (record,) = content.array_records.values()
        if set(record) != set(self._names):
            raise self._error("train", f"arrays {sorted(record)}; expected those of the model, {sorted(self._names)}")
        samples, metrics = self._metrics("train", content)
        return [record[name].numpy() for name in self._names], samples, metrics

    def evaluate(self, arrays: list[NDArray[Any]], config: dict[str, Any]) -> tuple[Any, int, dict[str, Any]]:
        samples, metrics = self._metrics("evaluate", self._ask("evaluate", arrays, config))
        metrics = {SCORES.get(name.replace("-", "_"), name): value for name, value in metrics.items()}
        return metrics.pop("loss", None), samples, metrics

    def _ask(self, kind: str, arrays: list[NDArray[Any]], config: dict[str, Any]) -> Any:
        from flwr.common import Array, ArrayRecord, ConfigRecord, RecordDict

        record = ArrayRecord({name: Array(array) for name, array in zip(self._names, arrays, strict=True)})
        content = RecordDict({ARRAYS: record, CONFIG: ConfigRecord(dict(config))})
        return ask(self._app, self._context, kind, content)

    def _metrics(self, kind: str, content: Any) -> tuple[int, dict[str, Any]]:
        records = content.metric_records
        if len(records) != 1 or EXAMPLES not in (metrics := dict(next(iter(records.values())))):
            raise self._error(kind, f"{len(records)} MetricRecords; expected one, with {EXAMPLES!r}")
        return int(metrics.pop(EXAMPLES)), metrics

    def _error(self, kind: str, found: str) -> NodeError:
        return NodeError(f"client {self._context.node_id}: the reply of the ClientApp to {kind!r} has {found}")


class ClientFnClient:
    """A client of an app with a client_fn. As in Flower, the app creates a client for each message."""

    def __init__(self, app: Any, context: Any) -> None:
        self._app, self._context = app, context

    def get_parameters(self, config: dict[str, Any]) -> list[NDArray[Any]]:
        from flwr.common import GetParametersIns, parameters_to_ndarrays

        compat = _compat()
        reply = self._ask("get_parameters", compat.getparametersins_to_recorddict(GetParametersIns(config)))
        arrays: list[NDArray[Any]] = parameters_to_ndarrays(
            compat.recorddict_to_getparametersres(reply, keep_input=False).parameters
        )
        return arrays

    def fit(self, arrays: list[NDArray[Any]], config: dict[str, Any]) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays

        compat, order = _compat(), FitIns(ndarrays_to_parameters(arrays), config)
        reply = self._ask("train", compat.fitins_to_recorddict(order, keep_input=False))
        result = self._checked(compat.recorddict_to_fitres(reply, keep_input=False), "fit")
        return parameters_to_ndarrays(result.parameters), result.num_examples, result.metrics

    def evaluate(self, arrays: list[NDArray[Any]], config: dict[str, Any]) -> tuple[Any, int, dict[str, Any]]:
        from flwr.common import EvaluateIns, ndarrays_to_parameters

        compat, order = _compat(), EvaluateIns(ndarrays_to_parameters(arrays), config)
        reply = self._ask("evaluate", compat.evaluateins_to_recorddict(order, keep_input=False))
        result = self._checked(compat.recorddict_to_evaluateres(reply), "evaluate")
        return result.loss, result.num_examples, result.metrics

    def _ask(self, kind: str, content: Any) -> Any:
        return ask(self._app, self._context, kind, content)

    def _checked(self, result: Any, method: str) -> Any:
        if result.status.code.value:
            raise NodeError(f"client {self._context.node_id}: {method}: {result.status.message}")
        return result


def ask(app: Any, context: Any, kind: str, content: Any) -> Any:
    """Send a message to an app, and return the content of its reply. Raises `NodeError` if the reply is an error."""
    from flwr.common import DEFAULT_TTL, Message, Metadata

    metadata = Metadata(  # Message would make it itself, but only in a process that Flower has started
        run_id=context.run_id,
        message_id="",
        src_node_id=context.node_id,
        dst_node_id=context.node_id,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=DEFAULT_TTL,
        message_type=kind,
    )
    reply = app(Message(content, metadata=metadata), context)
    if reply.has_error():
        raise NodeError(f"client {context.node_id}: the ClientApp replied to {kind!r}: {reply.error.reason}")
    return reply.content


def _compat() -> ModuleType:
    """Flower's conversion of the arguments and results of clients to records; it has moved between versions."""
    try:
        return importlib.import_module("flwr.compat.common.recorddict_compat")
    except ImportError:
        return importlib.import_module("flwr.common.recorddict_compat")
