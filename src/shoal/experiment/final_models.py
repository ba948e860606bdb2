"""The final models of a run, as torch modules and as files that other programs read."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from shoal.errors import DataError
from shoal.experiment.experiment import Experiment
from shoal.experiment.partitioned_data import load_data
from shoal.experiment.registry import plain
from shoal.results.checkpoints import Checkpoints
from shoal.results.records import RunFolder
from shoal.results.state_files import read_state
from shoal.types import NodeId, Params

if TYPE_CHECKING:
    import torch
    from torch import nn

Which: TypeAlias = NodeId | Literal["average"]
"""A node, or the average of the final models of all training nodes."""


def averaged_nodes(folder: RunFolder, summary: Mapping[str, Any]) -> list[NodeId]:
    """Return the training nodes that have a final model."""
    return [node for node in _saved(folder) if node < summary["nodes"]]


def _saved(folder: RunFolder) -> list[NodeId]:
    return sorted(int(file.stem) for file in folder.model(0).parent.glob("*.npy"))


def final_params(folder: RunFolder, summary: Mapping[str, Any], node: Which) -> Params:
    """Return the final parameters of a node or of the average. Raises `DataError` if there are none."""
    saved = _saved(folder)
    if not saved:
        plan = folder.read_experiment().get("checkpoint", {})
        reason = (
            "checkpoint.final = false; set it to true and run again"
            if plan.get("final") is False
            else f"its status is {summary['status']!r}"
        )
        raise DataError(f"{folder.path} has no final models: {reason}")
    if node == "average":
        trained = averaged_nodes(folder, summary)
        if not trained:
            raise DataError(
                f"{folder.path} has no final model of a training node to average: no such node has reached its end; "
                f"there are models of the nodes {saved}"
            )
        total = np.zeros_like(_load(folder, trained[0]), np.float64)
        for own in trained:
            total += _load(folder, own)
        return (total / len(trained)).astype(np.float32)
    if node not in saved:
        raise DataError(f"{folder.path} has no final model of node {node!r}: {_reason(folder, summary, node, saved)}")
    return _load(folder, node)


def _load(folder: RunFolder, node: NodeId) -> Params:
    try:
        params: Params = np.load(folder.model(node), allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder.model(node)} cannot be read: {error}") from error
    return params


def _reason(folder: RunFolder, summary: Mapping[str, Any], node: object, saved: list[NodeId]) -> str:
    if (lost := summary["lost"].get(str(node))) is not None:
        return f"it failed: {lost}"
    if isinstance(node, int) and 0 <= node < summary["nodes"]:
        return f"it has not reached its end; the status of the run is {summary['status']!r}"
    return f"there is no such node; expected 'average' or a number from 0 to {max(saved)}"


def final_module(experiment: Experiment, folder: RunFolder, summary: Mapping[str, Any], node: Which) -> nn.Module:
    """Return the module of the experiment with the final parameters of `node`, in evaluation mode."""
    import torch

    from shoal.experiment.setup import create_trainer_factory
    from shoal.training.torch_factory import TorchTrainerFactory

    params = final_params(folder, summary, node)
    threads = torch.get_num_threads()
    factory = create_trainer_factory(experiment, load_data(experiment))
    torch.set_num_threads(threads)  # a factory sets one thread, for nodes that train side by side
    if not isinstance(factory, TorchTrainerFactory):
        raise DataError(
            f"trainer = {experiment.trainer.name!r} has no torch module; the parameters of node i are in "
            f"{folder.model(0).parent}/<i>.npy"
        )
    flat = factory.flat
    if factory.initial.size != params.size:
        raise DataError(
            f"model = {experiment.model.name!r} has {factory.initial.size} parameters, and the final models of the run "
            f"have {params.size}: the model or the data set has changed since the run; restore its files"
        )
    flat.load(params)
    flat.load_local(None if node == "average" else _local_buffers(flat.read_local(), folder, node, params))
    for tensor in (*flat.module.parameters(), *flat.module.buffers()):
        tensor.data = tensor.data.clone()  # a tensor of its own, not a part of the vector
        tensor.grad = None
    return flat.module.eval()


def _local_buffers(
    initial: dict[str, torch.Tensor], folder: RunFolder, node: NodeId, params: Params
) -> dict[str, torch.Tensor] | None:
    """Return the buffers that a node keeps for itself, from a checkpoint of its final model; None if it has none.

    Counters alone have no effect on outputs, and keep their initial values without a checkpoint. Raises `DataError` if
    statistics are not stored.
    """
    import torch

    path = Checkpoints(folder).latest_of(node) if initial else None
    state = None if path is None else read_state(path)["node"]
    if state is not None and np.array_equal(state["params"], params):
        return {name: torch.from_numpy(value) for name, value in state["trainer"]["buffers"].items()}
    statistics = [name for name, buffer in initial.items() if buffer.is_floating_point()]
    if statistics:
        raise DataError(
            f"node {node} has statistics of its own ({statistics[0]}, …), and a run stores them in checkpoints only: "
            "run again with training.buffers = 'shared', or with a checkpoint of the last round (checkpoint.every)"
        )
    return None


def save_final_model(
    experiment: Experiment, folder: RunFolder, summary: Mapping[str, Any], node: Which, path: Path
) -> None:
    """Write the state dict of `final_module` as safetensors. The metadata describes the model and its origin.

    The file is replaced at once. Raises `DataError` if it cannot be written.
    """
    from safetensors.torch import save

    if path.suffix != ".safetensors":
        raise DataError(f"{str(path)!r}: expected a name that ends in .safetensors, the format of the file")
    module = final_module(experiment, folder, summary, node)
    params = final_params(folder, summary, node)
    data = experiment.dataset.build().load(experiment.seed)
    metadata = {
        "model": json.dumps(plain(experiment.model, keep_none=False)),
        "shape": json.dumps(data.shape),
        "classes": str(data.classes),
        "task": data.task,
        "node": str(node),
        **({"averaged_nodes": str(len(averaged_nodes(folder, summary)))} if node == "average" else {}),
        "digest": hashlib.sha256(params.tobytes()).hexdigest(),
        "run": folder.path.name,
        "shoal": importlib.metadata.version("shoal"),
    }
    # Tied parameters are in the file once for each name, so that `load_state_dict` finds all of them.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in module.state_dict().items()}
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(save(tensors, metadata))
        unfinished.replace(path)
    except OSError as error:
        if unfinished.is_file():
            unfinished.unlink()
        raise DataError(f"cannot write {str(path)!r}: {error.strerror}; choose another file") from error
